"""The models that an FFF is compared with, on the same weights: dense, the paper's gather, and a mixture of experts.

The leaves of an FFF, side by side, are the hidden layer of a dense FF. Both share one storage, so a layer that fills
half of the memory can still be compared. Every opponent runs at its best: FF tries both layouts of its second matrix;
MoE (k = 1) spends one product and an argmax on its gate and then runs the leaf kernel of the FFF.
"""

import time
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree as heap
from ..activations import apply
from ..baselines import FF
from ..layer import FFF
from ..tensors import Leaves, Tree
from .case import LEAST_INPUTS, Case, floor_bytes
from .hardware import lack_of_memory

Call = Callable[[Tensor], Tensor]

_ROTATED_BYTES = 2**28  # weights that a rotation visits on a CPU: about the largest caches
_INPUT_BYTES = 2**30


class Problem:
    """The weights and the inputs of a case; `inputs` says how many, by default `rotation` does."""

    def __init__(self, case: Case, seed: int = 0, inputs: int | None = None) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.layer = FFF(
            case.in_features,
            case.out_features,
            depth=case.depth,
            leaf_width=case.leaf_width,
            node_width=case.node_width,
            activation=case.activation,
            device=torch.device(case.device),
            dtype=case.torch_dtype,
        ).eval()
        self.tree: Tree = self.layer.tree
        self.leaves: Leaves = self.layer.leaves
        self.gate = self._normal(case.num_leaves, case.in_features) / case.in_features**0.5  # of the MoE
        self.out_bias = torch.zeros(case.out_features, device=case.device, dtype=case.torch_dtype)  # of the FF
        self.inputs = [self._normal(case.batch, case.in_features) for _ in range(inputs or rotation(case))]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.case.device, dtype=self.case.torch_dtype)


def rotation(case: Case) -> int:
    """The number of different inputs."""
    # The expected number of leaves that a batch finds, if each sample falls into one at random.
    leaves = case.num_leaves * (1 - (1 - 1 / case.num_leaves) ** case.batch)
    wanted = 32 if case.device == "cuda" else int(_ROTATED_BYTES / floor_bytes(case, leaves, leaves))
    affordable = _INPUT_BYTES // (case.batch * case.in_features * case.itemsize)
    return max(LEAST_INPUTS, min(wanted, affordable, 2048))


def dense(problem: Problem) -> list[FF]:
    """FF of the layer's training width, on the storage of its leaves: in two layouts, if the memory allows.

    The second matrix lies (width, out) in a leaf and (out, width) in a Linear. The library decides which is faster.
    """
    second = problem.leaves.out_weight.flatten(0, 1).T  # (out, width)
    models = [_dense_on(problem, problem.leaves, second)]
    size = second.numel() * problem.case.itemsize
    if not lack_of_memory(size + working_bytes(problem.case, "FF"), problem.case.device):
        models.append(_dense_on(problem, problem.leaves, second.contiguous()))
    return models


def dense_seconds(problem: Problem) -> float:
    """An estimate for a call of the dense layer, from a part of its width: all of it may take minutes."""
    count = max(1, min(problem.case.num_leaves, 4096 // problem.case.leaf_width))
    part = Leaves._make(None if t is None else t[:count] for t in problem.leaves)
    model = _dense_on(problem, part, part.out_weight.flatten(0, 1).T)
    seconds = min(seconds_of(model, problem.inputs[0]) for _ in range(3))
    return seconds * problem.case.num_leaves / count


def _dense_on(problem: Problem, leaves: Leaves, second: Tensor) -> FF:
    """FF with the neurons of the leaves and the given second matrix (out, width)."""
    case = problem.case
    model = FF(case.in_features, case.out_features, width=second.shape[1], activation=case.activation, device="meta")
    linears = [(model.up, leaves.in_weight.flatten(0, 1), leaves.in_bias), (model.down, second, problem.out_bias)]
    if model.gate is not None and leaves.gate_weight is not None:
        linears.append((model.gate, leaves.gate_weight.flatten(0, 1), leaves.gate_bias))
    for linear, weight, bias in linears:
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().flatten(), requires_grad=False)
    return model.eval()


def seconds_of(call: Call, x: Tensor) -> float:
    """The seconds of one call, by the clock of the host."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gather(problem: Problem) -> Call:
    """The paper's implementation: gather the weights of each sample's node, level by level, then of its leaf; bmm."""
    tree, leaves, activation = problem.tree, problem.leaves, problem.case.activation
    depth, nodes = problem.case.depth, heap.num_nodes(problem.case.depth)

    def forward(x: Tensor) -> Tensor:
        column, node = x.unsqueeze(-1), torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for _ in range(depth):
            node = 2 * node + 1 + (logit(column, node) >= 0)
        leaf = node - nodes
        gate = None if leaves.gate_weight is None else linear(column, leaves.gate_weight, leaves.gate_bias, leaf)
        hidden = apply(activation, linear(column, leaves.in_weight, leaves.in_bias, leaf), gate)
        y = torch.bmm(hidden.mT, leaves.out_weight.index_select(0, leaf)).squeeze(1)
        return y if leaves.out_bias is None else y + leaves.out_bias.index_select(0, leaf)

    def linear(column: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor) -> Tensor:
        rows = weight.index_select(0, at)
        return torch.bmm(rows, column) if bias is None else torch.baddbmm(bias[at].unsqueeze(-1), rows, column)

    def logit(column: Tensor, node: Tensor) -> Tensor:
        if tree.out_weight is None or tree.out_bias is None:
            return linear(column, tree.weight.unsqueeze(1), tree.bias.unsqueeze(1), node).flatten()
        hidden = apply(activation, linear(column, tree.weight, tree.bias, node)).squeeze(-1)
        return (hidden * tree.out_weight[node]).sum(-1) + tree.out_bias[node]

    return forward


def mixture_of_experts(problem: Problem, backend: ModuleType) -> Call:
    """MoE in evaluation with k = 1: its one weight is 1. `backend` runs the leaves."""
    gate, leaves, activation = problem.gate, problem.leaves, problem.case.activation

    def forward(x: Tensor) -> Tensor:
        y: Tensor = backend.visit(x, F.linear(x, gate).argmax(-1), leaves, activation)
        return y

    return forward


def working_bytes(case: Case, model: str, backend: str = "") -> int:
    """About the memory of a call beyond weights and inputs."""
    if model == "FF":  # the hidden layer before and after its activation, and the gate
        return 3 * case.batch * case.training_width * case.itemsize
    copies = case.batch * case.leaf_numel * case.itemsize if model == "gather" or backend == "reference" else 0
    return copies + (2 * case.batch * case.num_leaves * case.itemsize if model == "MoE" else 0)
