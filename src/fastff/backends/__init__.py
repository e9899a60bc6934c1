"""The backends: how a pass runs.

Each backend is a module with the same functions of tensors, x being (batch, in):

    why_not(request) -> str                               why it cannot run a pass; empty if it can
    describe(request) -> str                              what it does with a batch of this size
    soft(x, tree, leaves, activation, options) -> Soft    all leaves, mixed                        (training)
    hard(x, tree, leaves, activation) -> output, leaf     one path, one leaf                       (inference)
    route(x, tree, activation) -> leaf                    the path alone
    visit(x, leaf, leaves, activation) -> output          the leaf alone

`reference` is the specification. `aten` is torch operations arranged for speed, and runs anywhere. `native` is C++ on a
CPU, for the hard pass. `triton` is a GPU's. HAS_GRADIENT says whether autograd sees through a backend's hard pass.
`native` has no soft pass. `reference` and `aten` also have node_logits, mixture, walk, leaf_hidden and mix:
`torch_backend` gives one of the two. The soft pass with epsilon > 0 is `shed`, in torch operations; `reference` has its
specification.
"""

from . import aten, native, ops, reference, shed, triton
from .choice import BACKENDS, available, backend, check_name, choose, chosen, run, torch_backend
from .request import Request

__all__ = [
    "BACKENDS",
    "Request",
    "aten",
    "available",
    "backend",
    "check_name",
    "choose",
    "chosen",
    "native",
    "ops",
    "reference",
    "run",
    "shed",
    "torch_backend",
    "triton",
]
