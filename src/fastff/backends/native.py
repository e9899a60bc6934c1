"""The hard pass on a CPU in C++ (csrc/), loaded with ctypes: AVX-512, AVX2 or plain code, as the CPU allows.

A few rows descend the tree together; the batch is then sorted by leaf, and each leaf reads its weights once for all of
its rows. Threads, which are torch's own, share a single row if its leaf is large. Weights are read where torch keeps
them, in float32 or bfloat16, in leaves also int8; all sums are float32. Where few rows share a leaf, the output weights
of neurons that are 0, as half of them are after relu, are not read (an infinite or NaN weight there has no effect).
Nothing here is differentiable; visited.py adds the gradient.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree as heap
from .._torch import empty_strided_cpu
from ..activations import Activation
from ..tensors import Leaves, Tree, alias
from ..validate import check_layer
from . import __path__ as _folders  # an editable install keeps the library outside the sources' folder
from . import direct
from .plan import LayerPlan
from .request import Kind, Request

# In the order of csrc/layer.h.
_ACTIVATIONS = {
    name: code
    for code, name in enumerate(
        ["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity", "swiglu", "geglu", "geglu_tanh"]
    )
}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIZES = ("in_features", "out_features", "depth", "leaf_width", "node_width", "leaves")
_call = struct.Struct("=QQQQqq").pack  # csrc/fastff.h: struct Call
_threads = torch.get_num_threads
_ROWS = 2**31  # rows: the kernels count fewer than this
HAS_GRADIENT = False
_NO_TREE, _NO_LEAVES = (None,) * len(Tree._fields), (None,) * len(Leaves._fields)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((f"node_{name}", ctypes.c_void_p) for name in Tree._fields),
        *((name, ctypes.c_void_p) for name in Leaves._fields),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("activation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, loaded on first use; or why it is missing."""
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
    """The address of torch's own GOMP_parallel: a second thread pool would compete with torch's for the cores."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                # A symbol is also looked up in the library's dependencies.
                return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
            except (OSError, AttributeError):
                return None
    return None


def status() -> str:
    """The instruction set in use: "avx512", "avx2" or "portable"; or why the library is missing."""
    lib = library()
    return lib if isinstance(lib, str) else lib.fastff_isa().decode()


def why_not(request: Request) -> str:
    if request.kind == "soft":
        return "only has the hard pass"
    if isinstance(lib := library(), str):
        return lib
    # Sizes last: a tracer's are symbols, which a comparison would fix.
    reason = request.why_no_kernel("cpu", tuple(_DTYPES))
    return reason or ("counts rows in 32 bits" if len(request.x) >= _ROWS else "")


def describe(request: Request) -> str:
    few = len(request.x) < _threads()
    many = "threads share a row if its leaf is large" if few else "rows walk in groups, then leaf by leaf"
    return f"{status()}, {_threads()} thread{'s' * (_threads() > 1)}, {many}"


class Plan(LayerPlan):
    """A layer as the C++ kernels see it. `route` needs no leaves, `visit` no tree."""

    backend = "native"

    def __init__(self, tree: Tree | None, leaves: Leaves | None, activation: Activation) -> None:
        lib = library()
        if isinstance(lib, str):
            raise RuntimeError(f"the native backend is {lib}.")
        tree, leaves = tree and alias(tree), leaves and alias(leaves)
        super().__init__(tree, leaves, activation)
        tensors = [*(tree or _NO_TREE), *(leaves or _NO_LEAVES)]
        first = next(t for t in tensors if t is not None)
        empty = first.new_empty(0, self.in_features, dtype=self.dtype)
        check_layer(empty, tree, leaves, activation)
        kind: Kind = "visit" if tree is None else "route" if leaves is None else "hard"
        if reason := why_not(Request.make(kind, empty, tree, leaves, activation)):
            raise ValueError(f"backend='native' cannot run this hard pass: it {reason}.")
        num_leaves = len(tree.weight) + 1 if tree else len(first)
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

    def run(self, x: Tensor, weights: Sequence[Tensor] = ()) -> Tensor | None:
        batch, storage = x.shape[0], x.untyped_storage()  # kept alive until the call ends
        if batch >= _ROWS:
            return None
        y = empty_strided_cpu((batch, self.out_features), self._strides, self.dtype)
        start, base = x.data_ptr(), storage.data_ptr()
        if not base <= start <= base + storage.nbytes() - batch * self._row:
            self._start(x, storage, batch)  # raises, unless the batch is empty
        self._hard(_call(self._address, start, 0, y.data_ptr(), batch, _threads()))
        return y

    def direct(self, x: Tensor, weights: Sequence[Tensor]) -> direct.Direct | None:
        names, absent = self.names[: self.count], self.names[self.count :]
        places = [*zip(names, self._references, self._pointers, self._bytes, strict=True)]
        hard = ctypes.cast(self._hard, ctypes.c_void_p).value or 0
        return direct.make(x, weights, places, absent, self.activation, hard=hard, layer=self._layer)

    def run_with_leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The hard pass of x (batch, in), and the leaf of each row."""
        y, leaf = x.new_empty(len(x), self.out_features), x.new_empty(len(x), dtype=torch.int64)
        self._launch(self._hard, x, leaf, y)
        return y, leaf

    def route(self, x: Tensor) -> Tensor:
        """The leaf of each row of x (batch, in)."""
        leaf = x.new_empty(len(x), dtype=torch.int64)
        self._launch(self._route, x, leaf, None)
        return leaf

    def visit(self, x: Tensor, leaf: Tensor) -> Tensor:
        """The output of the given leaf for each row of x (batch, in)."""
        if leaf.dtype != torch.int64 or leaf.shape != x.shape[:1] or not leaf.is_cpu:
            given = f"{leaf.dtype} {tuple(leaf.shape)}"
            raise ValueError(f"leaf must be int64 of shape ({len(x)},) on the CPU; got {given}.")
        y = x.new_empty(len(x), self.out_features)
        leaf = leaf.clone(memory_format=torch.contiguous_format)  # nobody writes to it after the kernel's check
        if self._launch(self._visit, x, leaf, y):
            raise IndexError(f"leaf must be within 0..{self._layer.leaves - 1}; got {leaf.min()}..{leaf.max()}.")
        return y

    def rows(self, x: Tensor) -> Tensor:
        """x (batch, in) as the kernels read it, row by row; or an error."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype is not self.dtype or not x.is_cpu:
            wanted = f"{self.dtype} rows of {self.in_features} on the CPU"
            raise ValueError(f"the native backend was given weights for {wanted}; got {x.dtype} {tuple(x.shape)}.")
        return x.resolve_neg().contiguous()

    def _launch(self, function: Any, x: Tensor, leaf: Tensor, y: Tensor | None) -> Any:
        """Call a kernel, as `run` does."""
        batch, storage = len(x), x.untyped_storage()  # kept alive until the call ends
        start = self._start(x, storage, batch)
        to = 0 if y is None else y.data_ptr()
        return function(_call(self._address, start, leaf.data_ptr(), to, batch, _threads()))


def hard(x: Tensor, tree: Tree, leaves: Leaves, activation: Activation) -> tuple[Tensor, Tensor]:
    plan = Plan(tree, leaves, activation)
    return plan.run_with_leaf(plan.rows(x))


def route(x: Tensor, tree: Tree, activation: Activation) -> Tensor:
    plan = Plan(tree, None, activation)
    return plan.route(plan.rows(x))


def visit(x: Tensor, leaf: Tensor, leaves: Leaves, activation: Activation) -> Tensor:
    plan = Plan(None, leaves, activation)
    return plan.visit(plan.rows(x), leaf)
