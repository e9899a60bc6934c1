"""The models that `compare` measures: FFF, and the alternatives that a user has. Each is made from a copy.

    FFF             trees of a given depth and leaf width
    FFF int8        the same trees after training, with int8 leaves, and the other linear layers in int8
    dense           one layer with as many neurons as the tree uses per token: depth + leaf_width
    dense int8      that layer after training, and the other linear layers, in int8
    low rank        the whole block with factored matrices, at the FLOPs of the tree
    pruned          the dense block's neurons of largest weights, as many as "dense" has, with their own output weights
    int8            the original with int8 weights and products
    int8 weights    the original with int8 weights alone
    original        the model itself

FFF, dense and low rank are fitted to the same inputs. All models smaller than the original then train in the same way.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..activations import apply
from .apply import commit, edits_for
from .blocks import Block
from .closeness import hold_out
from .history import layer_path
from .inputs import inputs_of
from .int8_control import int8_copy, int8_trained
from .linears import read_linear
from .lowrank import LowRank, fit_low_rank_, flops_of_rank, rank_for
from .replace import replace_
from .specification import entry_of

INT8 = ("int8", "int8 weights")  # of the original
METHODS = ("FFF", "FFF int8", "dense", "dense int8", "low rank", "pruned", *INT8)
ORIGINAL = "original"


class Task(NamedTuple):
    """One model to measure. depth and leaf_width: of the tree, or the tree it is a control for; None if neither.

    size: in words, for the table. neurons: the hidden neurons of a block that a token uses. flops: per token, two for
    each product of a weight and a number. Both are means over the blocks.
    """

    method: str
    size: str
    depth: int | None
    leaf_width: int | None
    neurons: float
    flops: float


class Candidate(NamedTuple):
    """A model that was made for a task.

    trained: its new layers by block, which learn in distillation. parts: the function of each block, for timing.
    inputs: by block, a module with the same input. how: what made it, if that is not in the task.
    """

    model: nn.Module
    trained: dict[str, nn.Module]
    parts: list[Callable[[Tensor], Tensor]]
    inputs: dict[str, nn.Module]
    how: str = ""


def flops_of_tree(block: Block, depth: int, leaf_width: int) -> int:
    """The FLOPs per token of an FFF of this size; depth 0 is a dense layer."""
    inner = 1 if block.weights.gate is None else 2
    return 2 * (depth * block.in_features + leaf_width * (inner * block.in_features + block.out_features))


def tasks(blocks: Sequence[Block], sizes: Sequence[tuple[int, int]], methods: Sequence[str]) -> list[Task]:
    """The original, then the methods for each size, then int8. A control that two sizes share occurs once."""
    width, whole = _mean([b.width for b in blocks]), _mean([flops_of_tree(b, 0, b.width) for b in blocks])
    made = [Task(ORIGINAL, _spread([b.width for b in blocks]), None, None, width, whole)]
    for depth, leaf_width in sizes:
        neurons, trees = depth + leaf_width, [flops_of_tree(b, depth, leaf_width) for b in blocks]
        ranks = [rank_for(b, flops) for b, flops in zip(blocks, trees, strict=True)]
        tree = Task("FFF", f"{depth} x {leaf_width}", depth, leaf_width, neurons, _mean(trees))
        made += [tree._replace(method=method) for method in ("FFF", "FFF int8") if method in methods]
        narrow = _mean([flops_of_tree(b, 0, neurons) for b in blocks])
        dense = Task("dense", str(neurons), depth, leaf_width, neurons, narrow)
        made += [dense._replace(method=method) for method in ("dense", "dense int8") if method in methods]
        if "low rank" in methods:
            flops = _mean([flops_of_rank(b, rank) for b, rank in zip(blocks, ranks, strict=True)])
            made.append(Task("low rank", f"rank {_spread(ranks)}", depth, leaf_width, width, flops))
        if "pruned" in methods:
            made.append(dense._replace(method="pruned"))
    made += [Task(method, made[0].size, None, None, width, whole) for method in INT8 if method in methods]
    first: dict[tuple[str, str], Task] = {}
    for task in made:
        first.setdefault((task.method, task.size), task)
    return [*first.values()]


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _spread(values: list[int]) -> str:
    return f"{min(values)}" if len({*values}) == 1 else f"{min(values)} to {max(values)}"


def build(
    task: Task, original: nn.Module, blocks: Sequence[Block], data: Any, samples: int, options: Mapping[str, Any]
) -> Candidate:
    """Make the model of a task from the original, fitted to data. options: filter and example, as in `replace_`."""
    if task.method == ORIGINAL:
        return Candidate(original, {}, dense_parts(original, original, blocks), first_linears(original, blocks))
    if task.method in INT8:
        model, how = int8_copy(task.method, original, blocks)
        return Candidate(model, {}, dense_parts(model, original, blocks), first_linears(model, blocks), how)
    model = copy.deepcopy(original)
    if task.method == "low rank":
        return _low_rank(task, model, original, blocks, data, samples)
    depth, leaf_width = _sizes(task) if task.method == "FFF" else (0, sum(_sizes(task)))
    fit: dict[str, Any] = {"init": "data", "data": data, "samples": samples}
    if task.method == "pruned":
        fit = {"init": "dense"}  # keeps the neurons of largest weights
    report = replace_(model, depth=depth, leaf_width=leaf_width, **fit, **options)
    layers: dict[str, nn.Module] = {e["name"]: model.get_submodule(layer_path(e)) for e in report.specification}
    return Candidate(model, layers, [*layers.values()], layers)


def int8_of(trained: Candidate, check_runs: Callable[[nn.Module], None]) -> Candidate:
    """A trained FFF or dense candidate in int8; raises NoInt8 with why if it cannot be."""
    model, how = int8_trained(trained.model, check_runs)
    paths = {id(module): path for path, module in trained.model.named_modules()}
    layers = {name: model.get_submodule(paths[id(layer)]) for name, layer in trained.trained.items()}
    return Candidate(model, layers, [*layers.values()], layers, how)


def _sizes(task: Task) -> tuple[int, int]:
    return task.depth or 0, task.leaf_width or 0


def _low_rank(
    task: Task, model: nn.Module, original: nn.Module, blocks: Sequence[Block], data: Any, samples: int
) -> Candidate:
    """The layers take the places that FFF layers would take."""
    seen = inputs_of(original, first_linears(original, blocks), data, samples)
    layers: dict[str, nn.Module] = {}
    for block in blocks:
        layer = LowRank(block, rank_for(block, flops_of_tree(block, *_sizes(task))))
        fit_low_rank_(layer, block, hold_out(seen.pop(block.name))[1])  # as in replace_
        sizes = {"depth": 0, "leaf_width": block.width, "node_width": 1, "transposition": 0.0, "decision": "soft"}
        commit(edits_for(model, entry_of(block, sizes), layer.eval()))
        layers[block.name] = layer
    return Candidate(model, layers, [*layers.values()], layers)


def first_linears(model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Module]:
    """By block, the first linear layer of its dense form: its input is the block's."""
    return {block.name: model.get_submodule(block.linears[0]) for block in blocks}


def dense_parts(model: nn.Module, original: nn.Module, blocks: Sequence[Block]) -> list[Callable[[Tensor], Tensor]]:
    """The function of each dense block, run through the linear layers of a model, quantised or not."""
    return [_through(model, original, block) for block in blocks]


def _through(model: nn.Module, original: nn.Module, block: Block) -> Callable[[Tensor], Tensor]:
    *inner, down = [model.get_submodule(path) for path in block.linears]
    gate = block.weights.gate
    linear = read_linear(original.get_submodule(block.linears[0]))
    # Gate and up may come in either order.
    gate_first = gate is not None and linear is not None and bool((linear.weight[: block.width] == gate).all())

    def run(x: Tensor) -> Tensor:
        parts = inner[0](x).chunk(2, -1) if gate is not None and len(inner) == 1 else [layer(x) for layer in inner]
        if gate is None:
            return down(apply(block.activation, parts[0]))
        one, other = parts
        return down(apply(block.activation, *((other, one) if gate_first else (one, other))))

    return run


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
