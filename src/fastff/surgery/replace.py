"""replace_: change a model's feedforward blocks into FFF layers, all of them or none.

Everything is found, verified, built and initialised first; the model changes in one go at the end. A specification, one
dict per block, records what was done; apply_ repeats it on a fresh model.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..batches import batches
from ..checks import check_int, check_probability
from ..layer import FFF, Decision
from .apply import Edit, build_layer, commit, edits_for, remember
from .blocks import Block
from .choose import Filter, check_filter, choose, leaf_width_of
from .closeness import MIN_INPUTS, hold_out, missed
from .example import example_of
from .fit import INITS, Init, from_data_
from .inputs import inputs_in_example, inputs_of
from .match import activation_name
from .operable import check_mode, check_model
from .outputs import OutputCheck
from .report import HELD_OUT, Replaced, Report, Skipped, too_few
from .specification import Specification, entry_of
from .trace import probe
from .undo import unchanged_on_error


def replace_(
    model: nn.Module,
    *,
    depth: int,
    leaf_width: int | None = None,
    filter: Filter | None = None,
    init: str | Init = "dense",
    node_width: int = 1,
    transposition: float = 0.0,
    decision: Decision = "soft",
    data: Any = None,
    samples: int = 32768,
    example: Any = None,
) -> Report:
    """Replace the feedforward blocks of `model` with FFF layers, in place, and report what was done.

    Blocks are found by structure, and each is verified: its output, recomputed from the weights on random inputs, must
    equal the model's own output. Activation, biases, dropout, dtype, device, training mode and requires_grad are kept.
    Parameters are new, so create the optimizer afterwards. An error, or Ctrl-C, leaves the model unchanged.

    The report says how good evaluation is: for every block, the fraction of its output variance that the hard pass
    misses, on held-out data, on the example, or else on random inputs.

    Args:
        depth, node_width, transposition, decision: of the FFF layers, as in `FFF`.
        leaf_width: the hidden neurons of a leaf; by default the block's width / 2**depth, which keeps the number of
            hidden neurons.
        filter: which blocks: a glob on the name ("*.layers.1?.mlp"), several globs, or a function of (name, block).
        init: how the layers get their weights.
            "dense" copies them so that the soft pass (train mode) computes the same as the block. Evaluation does not,
            and is unusable until the tree has been trained.
            "data" builds each tree on the inputs of the block, and gives every leaf the neurons that matter most in its
            region. Evaluation is close to the block at once; the report says how close. It needs node_width=1 and a
            leaf_width up to the block's width; otherwise it raises.
            "random" draws new weights.
            A function of (block, layer) fills the layer and returns a description of what it did.
        data: for init="data", batches for the model, as in `initialize_tree_`.
        samples: the number of inputs to collect for a block; later batches are not read. The inputs of all blocks are
            in memory at once.
        example: a small batch for the whole model. It verifies blocks inside a layer that does not run on its own,
            and shows whether the converted model still runs. By default, one is made from the model's config, as in
            Hugging Face models; the report says where that was not enough.
    """
    check_mode()
    check_model(model)
    depth = check_int("depth", depth, 0)
    leaf_width = None if leaf_width is None else check_int("leaf_width", leaf_width, 1)
    node_width = check_int("node_width", node_width, 1)
    check_probability("transposition", transposition)
    if init not in (*INITS, "data") if isinstance(init, str) else not callable(init):
        names = ", ".join((*INITS, "data"))
        raise ValueError(f"init must be one of {names}, or a function of (block, layer); got {init!r}.")
    globs = check_filter(filter)
    if (init == "data") != (data is not None):
        raise ValueError('init="data" and data=... belong together: pass both, or neither.')
    check_int("samples", samples, 2)
    if data is not None:
        batches(data)
    sizes = {"depth": depth, "node_width": node_width, "transposition": float(transposition), "decision": decision}
    with unchanged_on_error(model):
        sample = example_of(model) if example is None else example
        chosen, skipped = choose(model, sample, globs)
        widths = {block.name: leaf_width_of(block, depth, leaf_width) for block in chosen}
        entries = [entry_of(block, {**sizes, "leaf_width": widths[block.name]}) for block in chosen]
        return _operate(model, chosen, entries, skipped, init, data, samples, example, sample)


def _operate(
    model: nn.Module,
    chosen: list[Block],
    entries: Specification,
    skipped: list[Skipped],
    init: str | Init,
    data: Any,
    samples: int,
    example: Any,
    sample: Any,
) -> Report:
    """Build, fill and measure the layers, put them in, and check that the model still runs."""
    if init == "data":
        firsts = {block.name: model.get_submodule(block.linears[0]) for block in chosen}
        seen = inputs_of(model, firsts, data, samples)
    else:
        seen = {} if example is None else inputs_in_example(model, chosen, example)
    replaced: list[Replaced] = []
    edits: list[Edit] = []
    for block, entry in zip(chosen, entries, strict=True):
        layer = build_layer(model, entry)
        how, share, on = _fill_(block, layer, init, seen.pop(block.name, None))
        layer.fitted_tree, layer.fitted_leaves = init not in INITS, init != "random"
        _keep_requires_grad(block, layer)
        edits += edits_for(model, entry, layer)
        sizes = block.in_features, block.width, block.out_features, entry["depth"], entry["leaf_width"]
        replaced.append(Replaced(block.name, block.form, *sizes, activation_name(block.activation), how, share, on))

    before = _parameters(model)
    # In the soft pass: with other decisions, a training forward visits single leaves.
    soft = all(entry["decision"] == "soft" for entry in entries)
    exact = init == "dense" and soft and all(r.leaf_width << r.depth >= r.width for r in replaced)
    first = None if example is not None else _first(data)
    outputs = OutputCheck(model, chosen, sample if first is None else first)
    commit([*edits, *remember(model, entries)])
    outputs.check(exact)
    dense = sum(block.width for block in chosen)
    fast = sum(entry["depth"] * entry["node_width"] + entry["leaf_width"] for entry in entries)
    kept = {block.name: block for block in chosen}
    return Report(replaced, skipped, before, _parameters(model), dense, fast, entries, kept)


def _fill_(block: Block, layer: FFF, init: str | Init, x: Tensor | None) -> tuple[str, float | None, str]:
    """Fill a layer. Returns how, the fraction that its hard pass misses, and what it was measured on or why not.

    x: inputs of the block (samples, in), if there are any.
    """
    if init == "data" and x is not None:
        held_out, train = hold_out(x)
        how = from_data_(block, layer, train)
        if held_out is train:
            return how, None, too_few(len(x))
        x, on = held_out, HELD_OUT
    else:
        how = (INITS[init] if isinstance(init, str) else init)(block, layer)
        if not isinstance(how, str):
            raise TypeError(f"init must return a string that says what it did; got {how!r} for {block.name}.")
        on = "the example"
        if x is None or len(x) < MIN_INPUTS:
            x, on = probe(block.in_features, block.weights.up, (512,)), "random inputs"
    share = missed(layer, block, x)
    if share is None:
        return how, None, f"the outputs of {block.name} do not vary on {on}"
    if math.isnan(share):
        return how, None, f"the outputs of {block.name} are not finite on {on}"
    return how, share, on


def _first(data: Any) -> Any:
    """The first batch of data; None for an iterator, which cannot be read again."""
    if data is None or isinstance(data, Iterator):
        return None
    return next(iter(batches(data)), None)


def _keep_requires_grad(block: Block, layer: FFF) -> None:
    """A leaf's parameter trains if its dense one did; a new parameter trains if any in the block did."""
    roles = {"leaf_in": "up", "leaf_out": "down", "leaf_gate": "gate"}
    some = any(block.requires_grad.values())
    for name, parameter in layer.named_parameters(recurse=False):
        part, _, kind = name.rpartition("_")
        parameter.requires_grad_(block.requires_grad.get(f"{roles.get(part)}.{kind}", some))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
