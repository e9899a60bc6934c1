"""Which parts of a sampled pass run in Triton's kernels, and what happens where one fails.

Most sampled passes are one composition of kernels (triton_sampled.py). Others run as sampled.py writes them, and their
parts ask here: visited leaves with their gradient (triton_segments.py), and walks and logits with theirs
(triton_paths.py). None of them asks the host, so a whole step can be captured in a CUDA graph.
"""

from torch import Tensor

from .._torch import in_eager, is_plain
from ..activations import Activation
from . import triton
from .choice import chosen

_CHOICES = ("triton", "auto")  # of fastff.backend


def takes(activation: Activation, x: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the kernels run what is computed from x and these parameters."""
    if chosen() not in _CHOICES or not triton.INSTALLED or not (_can_run(x) and isinstance(activation, str)):
        return False
    weights = [t for t in tensors if t is not None]
    alike = all(t.dtype == x.dtype and t.device == x.device and t.is_contiguous() for t in weights)
    if x.dtype not in triton.DTYPES or not alike:
        return False
    # Under a compiler the kernels are operations, which copy what they could not read; Dynamo refuses is_neg(). In
    # eager, torch runs weights with a negative bit: no copy of them at every step.
    return not in_eager() or (is_plain(x, *weights) and not any(t.is_neg() for t in weights))


def _can_run(x: Tensor) -> bool:
    return x.is_cuda
