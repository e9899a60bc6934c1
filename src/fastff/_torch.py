"""The questions that torch answers only through private functions, asked in one place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

# Asked at every call of a layer; each attribute on the way to them costs as much as the answer.
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
has_transforms = torch._C._are_functorch_transforms_active  # as in_transform, but also of what a compiler traces

# How compiled code allocates, by (sizes, strides, dtype): in 0.7 us, where Tensor.new_empty takes 1.1 us (EPYC).
# On a GPU: the current one.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
try:
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]  # its stub lacks them
except ImportError:

    def _empty_strided_cpu(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")

    def _empty_strided_cuda(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


empty_strided_cpu: Allocate = _empty_strided_cpu
empty_strided_cuda: Allocate = _empty_strided_cuda

# The number of the current GPU, and the address of its current stream; a build for CPUs has neither.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def is_dtensor(tensor: Any) -> bool:
    """Known by its method: torch.distributed.tensor need not be imported for this."""
    return hasattr(tensor, "full_tensor")


def is_exporting() -> bool:
    """Whether torch.export traces. Asked of the flag itself: torch 2.11 answers yes under torch.compile too."""
    return bool(torch.compiler._is_exporting_flag)


def in_backward() -> bool:
    """Whether autograd is running: a forward inside it is a recomputation by gradient checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether a torch.func transform (vmap, grad) is active: values cannot then steer Python, nor outlive it."""
    return not torch.compiler.is_compiling() and has_transforms()


def has_escaped(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a torch.func transform that has ended, and can no longer be read."""
    return not in_transform() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_batched(grad: torch.Tensor) -> bool:
    """Whether autograd computes with many gradients at once (is_grads_batched=True), where nothing is in place."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def in_eager() -> bool:
    """Whether operations run as they are called: no compiler or exporter traces them, no torch.func transform is
    active."""
    return not torch.compiler.is_compiling() and not in_transform()


def is_watched() -> bool:
    """Whether something other than autograd sees each operation: torch.jit.trace, a dispatch mode, forward-mode AD."""
    return _tracing_state() is not None or _dispatch_modes() > 0 or forward_ad._current_level >= 0


# For direct.py, which asks in C++ whether nothing stands between a plain call and a kernel (no gradients, no transform,
# nobody watches): calls and their answers then, and entries of modules and their values.
QUIET = ((torch.is_grad_enabled, False), (has_transforms, False), (_tracing_state, None), (_dispatch_modes, 0))
QUIET_ENTRIES = ((vars(forward_ad), "_current_level", -1),)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether compiled code may read these tensors itself: they hold their numbers, and nobody watches."""
    plain, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    return in_eager() and not is_watched() and all(type(t) in plain and t.layout is strided for t in tensors)


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in its memory. Torch's efficient zeros, a functional tensor and what a torch.func
    transform leaves behind have none, and torch computes with them all the same."""
    if tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return False
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def frozen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that are these to `alike_test`, and whose form no other thread can change."""
    from .interrupts import uninterrupted  # which imports this module

    # A Ctrl-C while inference mode ends would leave it on. Parameters that were made there must be made there again.
    with uninterrupted(), torch.inference_mode():
        return [torch.Tensor._make_subclass(type(t), t, t.requires_grad) for t in tensors]


def never(*_: Any) -> bool:
    """What `alike_test` gives if torch lacks the test."""
    return False


def alike_test(x: torch.Tensor | None, weights: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A quick test for another input and other weights, passed as (x, *weights); without x, as (*weights).

    It says whether they have the types, dtypes, devices, shapes, strides and bits of these, where x may have other
    leading sizes; and whether autocast and inference mode are on or off as they are now. It does not see whether
    gradients are recorded. "No" may mean "perhaps not". Ask `is_nested` first: a nested tensor ends the process here.
    torch.compile asks this before it runs its code again. It takes 0.6 us for six weights, where their shapes, strides,
    dtypes and bits alone take 2.9 us (Xeon).
    """
    tensors = [*weights]
    sizes, strides = [[*t.shape] for t in weights], [[*t.stride()] for t in weights]
    if x is not None:
        free: list[Any] = [None] * (x.dim() - 1)
        tensors, sizes, strides = [x, *tensors], [[*free, x.shape[-1]], *sizes], [[*free, 1], *strides]
    options: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, **options).check
    except (ImportError, TypeError):  # it is private: another torch may lack it, or want other arguments
        return never
    return check
