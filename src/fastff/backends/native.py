"""The hard pass on a CPU in C++ (csrc/), loaded with ctypes: AVX-512, AVX2 or plain code, as the processor has it.

A few rows descend the tree together; the batch is then sorted by leaf, and each leaf reads its weights once for all of
its rows. A single row is shared by the threads, which are torch's own. Weights are read where torch keeps them, in
float32 or bfloat16; every sum is a float32 one. A neuron that is 0, as half of them are behind relu, has its output
weights left unread where few rows share a leaf (so one of these that is infinite or NaN leaves no trace there). Nothing
here is differentiable: that is the caller's business.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import tree as heap
from .._torch import in_transform
from ..activations import Activation
from . import __path__ as _folders  # an editable install keeps the library in another folder than the sources
from .reference import Leaves, Tree

# In the order of csrc/layer.h.
_ACTIVATIONS = {
    name: code for code, name in enumerate(["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity", "swiglu", "geglu"])
}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTERS = ["node_weight", "node_bias", "node_out_weight", "node_out_bias"]
_POINTERS += ["in_weight", "in_bias", "out_weight", "out_bias", "gate_weight", "gate_bias"]
_SIZES = ("in_features", "out_features", "depth", "leaf_width", "node_width", "leaves")
_call = struct.Struct("=QQQQqq").pack  # csrc/fastff.h: struct Call
_threads = torch.get_num_threads
_data_ptr = Tensor.data_ptr
_NO_TREE, _NO_LEAVES = (None,) * len(Tree._fields), (None,) * len(Leaves._fields)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("activation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, loaded on first use; or why there is none."""
    found = [path for folder in _folders if (path := Path(folder, "libfastff_native.so")).exists()]
    if not found:
        return "not built: fastff was installed without a C++ compiler; install one, then fastff again"
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"not loaded: {error}"
    for function in (lib.fastff_hard, lib.fastff_route, lib.fastff_visit, lib.fastff_use_isa):
        function.argtypes = [ctypes.c_char_p]
    lib.fastff_hard.restype = lib.fastff_route.restype = lib.fastff_use_openmp.restype = None
    lib.fastff_use_openmp.argtypes = [ctypes.c_void_p]
    lib.fastff_isa.restype = ctypes.c_char_p
    lib.fastff_use_openmp(_openmp())
    return lib


def _openmp() -> int | None:
    """The address of torch's own GOMP_parallel: a second pool of threads would fight with torch's for the cores."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                # A symbol is looked up in what the library depends on, too.
                return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
            except (OSError, AttributeError):
                return None
    return None


def status() -> str:
    """The instruction set in use: "avx512", "avx2" or "portable"; or why the library is not there."""
    lib = library()
    return lib if isinstance(lib, str) else lib.fastff_isa().decode()


def unsupported(x: Tensor, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> str:
    """Why this hard pass cannot run here; empty if it can."""
    weights = [t for t in (*(tree or ()), *(leaves or ())) if t is not None]
    if isinstance(lib := library(), str):
        return lib
    if x.device.type != "cpu":
        return f"needs a CPU tensor; got device {x.device}"
    if x.dtype not in _DTYPES:
        return f"has kernels for float32 and bfloat16; got {x.dtype}"
    if activation not in _ACTIVATIONS:
        return "has kernels for named activations only"
    if in_transform():
        return "runs under no torch.func transform"
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (x, *weights)):
        return "reads plain tensors only, no subclass"
    if any(t.device != x.device or t.dtype != x.dtype or not t.is_contiguous() for t in weights):
        return "needs contiguous weights of the input's device and dtype"
    if len(x) >= 2**31:
        return "counts rows in 32 bits"
    return ""


def describe(x: Tensor, tree: Tree, leaves: Leaves) -> str:
    """What happens to a batch of this size."""
    many = "threads may share a row's leaf" if len(x) < _threads() else "rows walk in groups, then leaf by leaf"
    return f"{status()}, {_threads()} threads, {many}"


class Plan:
    """A layer as the kernels see it: pointers and sizes, read once, for tensors that `unsupported` accepts.

    It holds as long as `pointers` of the same tensors says what it said then: nothing has moved. `route` needs no
    leaves, `visit` no tree. Inputs are contiguous.
    """

    def __init__(self, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> None:
        lib = library()
        if isinstance(lib, str):
            raise RuntimeError(f"the native backend is {lib}.")
        tensors = [*(tree or _NO_TREE), *(leaves or _NO_LEAVES)]
        weights = [t for t in tensors if t is not None]
        num_leaves = len(tree.weight) + 1 if tree else len(weights[0])
        self.out_features: int = leaves.out_weight.shape[-1] if leaves else 0
        self.dtype, self.in_features = weights[0].dtype, weights[0].shape[-1]
        self.pointers = pointers(weights)
        self._layer = _Layer(
            *(None if t is None else t.data_ptr() for t in tensors),
            self.in_features,
            self.out_features,
            heap.depth_of(num_leaves) if tree else 0,
            leaves.in_weight.shape[1] if leaves else 0,
            tree.out_weight.shape[-1] if tree and tree.out_weight is not None else 1,
            num_leaves,
            _ACTIVATIONS[activation],  # type: ignore[index]
            _DTYPES[self.dtype],
        )
        self._address = ctypes.addressof(self._layer)
        self._hard, self._route, self._visit = lib.fastff_hard, lib.fastff_route, lib.fastff_visit

    def run(self, x: Tensor) -> Tensor:
        """The hard pass of x (batch, in)."""
        batch = x.shape[0]
        y = x.new_empty(batch, self.out_features)
        self._hard(_call(self._address, x.data_ptr(), 0, y.data_ptr(), batch, _threads()))
        return y

    def run_with_leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The hard pass of x (batch, in), and the leaf of each row."""
        batch = x.shape[0]
        y, leaf = x.new_empty(batch, self.out_features), x.new_empty(batch, dtype=torch.int64)
        self._hard(_call(self._address, x.data_ptr(), leaf.data_ptr(), y.data_ptr(), batch, _threads()))
        return y, leaf

    def route(self, x: Tensor) -> Tensor:
        """The leaf of each row of x (batch, in)."""
        leaf = x.new_empty(x.shape[0], dtype=torch.int64)
        self._route(_call(self._address, x.data_ptr(), leaf.data_ptr(), 0, x.shape[0], _threads()))
        return leaf

    def visit(self, x: Tensor, leaf: Tensor) -> Tensor:
        """The output of the given leaf for each row of x (batch, in)."""
        y = x.new_empty(x.shape[0], self.out_features)
        if self._visit(_call(self._address, x.data_ptr(), leaf.data_ptr(), y.data_ptr(), x.shape[0], _threads())):
            raise IndexError(f"leaf must be within 0..{self._layer.leaves - 1}; got {leaf.min()}..{leaf.max()}.")
        return y


def pointers(weights: Sequence[Tensor]) -> list[int]:
    """Where the weights of a plan lie: those of the tree, then those of the leaves, without the missing ones."""
    return [*map(_data_ptr, weights)]


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> Tensor:
    return Plan(tree, leaves, activation).run(x.contiguous())


def hard_with_leaf(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> tuple[Tensor, Tensor]:
    """The output of the hard pass, and the leaf of each row."""
    return Plan(tree, leaves, activation).run_with_leaf(x.contiguous())


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    return Plan(tree, None, activation).route(x.contiguous())


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    return Plan(None, leaves, activation).visit(x.contiguous(), leaf.contiguous())
