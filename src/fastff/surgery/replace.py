"""replace_ and apply_: change a model's feedforward blocks into FFF layers, all of them or none.

Everything is found, verified, built and initialised first; the model changes in one go at the end. What was done is
written down as a specification, one dict a block, from which apply_ does the same to a fresh model.
"""

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..activations import Activation, identity
from ..batches import batches
from ..checks import check_int, check_probability
from ..layer import FFF
from .blocks import FORMS, Block
from .distill import inputs_of
from .find import Finder, call_name
from .fit import INITS, Init, from_data_
from .guard import SaveGuard
from .leaves import FEW, hold_out, missed
from .outputs import Answers
from .report import HELD_OUT, Replaced, Report, Skipped, too_few
from .specification import MEMORY, SIZES, Specification, check_fit, check_specification, part_at
from .trace import probe, run_example
from .undo import unchanged_on_error

Filter = str | Iterable[str] | Callable[[str, Block], bool]


def replace_(
    model: nn.Module,
    *,
    depth: int,
    leaf_width: int | None = None,
    filter: Filter | None = None,
    init: str | Init = "dense",
    node_width: int = 1,
    transposition: float = 0.0,
    decision: Literal["soft", "straight_through"] = "soft",
    data: Any = None,
    samples: int = 32768,
    example: Any = None,
) -> Report:
    """Replace the feedforward blocks of `model` by FFF layers, in place, and report what was done.

    Blocks are found by structure and each is verified: recomputed from its weights on a probe, it must give what the
    model's own modules give. Activation, biases, dropout, dtype, device, training mode and requires_grad are kept.
    Parameters are new, so make the optimiser afterwards. An error, or Ctrl-C, leaves the model unchanged.

    The report says what evaluation is worth: for every block, the share of its output variance that the hard pass
    misses, on held-out data, on the example, or else on random inputs.

    Args:
        depth, node_width, transposition, decision: of the FFF layers, as in `FFF`.
        leaf_width: the hidden neurons of a leaf; by default the block's width / 2**depth, which keeps the number of
            hidden neurons.
        filter: which blocks: a glob on the name ("*.layers.1?.mlp"), several of them, or a function of (name, block).
        init: "dense" carries the weights over so that the soft pass (train mode) computes what the block did;
            evaluation does not, and is of no use until the tree has been trained. "data" builds each tree on the inputs
            that the block has seen, and gives every leaf the neurons that matter most in its region, so that evaluation
            is near the block's at once; the report says how near. "random" draws them anew. Or a function of (block,
            layer) that fills the layer and returns how, in words.
        data: for init="data", batches for the model, as in `initialize_tree_`.
        samples: how many inputs of a block are enough; batches past that are not read. All blocks' inputs are in memory
            at once.
        example: a small batch for the whole model. It is needed to verify blocks that lie inside a layer which does not
            run on its own (the report says so), and shows whether the operated model still runs.
    """
    _check_mode()
    check_model(model)
    depth = check_int("depth", depth, 0)
    leaf_width = None if leaf_width is None else check_int("leaf_width", leaf_width, 1)
    node_width = check_int("node_width", node_width, 1)
    check_probability("transposition", transposition)
    if init not in (*INITS, "data") if isinstance(init, str) else not callable(init):
        names = ", ".join((*INITS, "data"))
        raise ValueError(f"init must be one of {names}, or a function of (block, layer); got {init!r}.")
    if not (filter is None or callable(filter)):
        filter = [filter] if isinstance(filter, str) else list(filter) if isinstance(filter, Iterable) else [filter]
        if not all(isinstance(glob, str) for glob in filter):
            raise TypeError(
                f"filter must be a glob on the name, several, or a function of (name, block); got {filter}."
            )
    if (init == "data") != (data is not None):
        raise ValueError('init="data" and data=... belong together: pass both, or neither.')
    check_int("samples", samples, 2)
    if data is not None:
        batches(data)
    sizes = {"depth": depth, "node_width": node_width, "transposition": float(transposition), "decision": decision}
    with unchanged_on_error(model):
        chosen, skipped = _choose(model, example, filter)
        widths = {block.name: _leaf_width(block, depth, leaf_width) for block in chosen}
        entries = [_entry(block, {**sizes, "leaf_width": widths[block.name]}) for block in chosen]
        return _operate(model, chosen, entries, skipped, init, data, samples, example)


def _choose(model: nn.Module, example: Any, filter: Filter | None) -> tuple[list[Block], list[Skipped]]:
    """The blocks to replace, and what is skipped."""
    finder = Finder(model, example)
    skipped = [Skipped(*pair) for pair in finder.skipped] + [Skipped(n, "it is an FFF already") for n in finder.present]
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    shared = [block for block in finder.blocks if places[id(model.get_submodule(block.name))] > 1]
    skipped += [Skipped(block.name, "its module is used in several places") for block in shared]
    chosen = [block for block in finder.blocks if block not in shared and _passes(filter, block)]
    if shared and len(shared) == len(finder.blocks):
        raise ValueError(f"nothing can be replaced:\n{_list(skipped)}")
    if not chosen:
        raise ValueError(_nothing(model, finder, skipped))
    rest = (block for block in finder.blocks if block not in chosen and block not in shared)
    return chosen, [*skipped, *(Skipped(block.name, "excluded by the filter") for block in rest)]


def _operate(
    model: nn.Module,
    chosen: list[Block],
    entries: Specification,
    skipped: list[Skipped],
    init: str | Init,
    data: Any,
    samples: int,
    example: Any,
) -> Report:
    """Build the layers, fill them, measure them, put them in, and see whether the model still answers."""
    if init == "data":
        firsts = {block.name: model.get_submodule(block.linears[0]) for block in chosen}
        seen = inputs_of(model, firsts, data, samples)
    else:
        seen = {} if example is None else _inputs_in(model, chosen, example)
    replaced: list[Replaced] = []
    edits: list[Edit] = []
    for block, entry in zip(chosen, entries, strict=True):
        layer = _build(model, entry)
        x = seen.pop(block.name, None)
        if init == "data" and x is not None:
            held_out, train = hold_out(x)
            how = from_data_(block, layer, train)
            x, on = held_out, HELD_OUT if held_out is not train else too_few(len(x))
        else:
            how = (INITS[init] if isinstance(init, str) else init)(block, layer)
            if not isinstance(how, str):
                raise TypeError(f"init must return a string that says what it did; got {how!r} for {block.name}.")
            on = "the example"
            if x is None or len(x) < FEW:
                x, on = probe(block.in_features, block.weights.up, (512,)), "random inputs"
        share = None if on.endswith("few") else missed(layer, block, x)
        if share is not None and math.isnan(share):
            share, on = None, f"the outputs of {block.name} are not finite on {on}"
        elif share is None and not on.endswith("few"):
            on = f"the outputs of {block.name} do not vary on {on}"
        layer.fitted_tree, layer.fitted_leaves = init not in INITS, init != "random"
        _keep_requires_grad(block, layer)
        edits += _edits(model, entry, layer)
        sizes = block.in_features, block.width, block.out_features, entry["depth"], entry["leaf_width"]
        replaced.append(Replaced(block.name, block.form, *sizes, call_name(block.activation), how, share, on))

    before = _parameters(model)
    exact = init == "dense" and all(r.leaf_width << r.depth >= r.width for r in replaced)
    exact = exact and not any(block.dropout for block in chosen)
    answers = Answers(model, chosen, example if example is not None else _first(data))
    commit([*edits, *_remember(model, entries)])
    answers.check(exact)
    dense = sum(block.width for block in chosen)
    fast = sum(entry["depth"] * entry["node_width"] + entry["leaf_width"] for entry in entries)
    kept = {block.name: block for block in chosen}
    return Report(replaced, skipped, before, _parameters(model), dense, fast, entries, kept)


def _inputs_in(model: nn.Module, chosen: list[Block], example: Any) -> dict[str, Tensor]:
    """What reaches each block in the example (rows, in); blocks that it does not reach are left out."""
    try:
        calls = run_example(model, example, training=False)[1]
    except Exception as error:  # someone else's forward, which may raise anything
        told = str(error).rstrip(".")
        raise ValueError(f"the model does not run on example=: {told}. Pass a batch as the model takes it.") from error
    found = {}
    for block in chosen:
        first = model.get_submodule(block.linears[0])
        rows = [call.input.reshape(-1, block.in_features) for call in calls if call.module is first]
        if rows and torch.cat(rows).isfinite().all():
            found[block.name] = torch.cat(rows)
    return found


def _first(data: Any) -> Any:
    """A batch of data that can be read again, if there is one."""
    if data is None or isinstance(data, Iterator):
        return None
    return next(iter(batches(data)), None)


def apply_(model: nn.Module, specification: Specification) -> None:
    """Do to a fresh `model` what `replace_` did to another: FFF layers of the same sizes at the same places.

    Their weights are random: load the state dict of the other model afterwards, which fits strictly. The model may be
    on the meta device. An error, or Ctrl-C, leaves it unchanged.
    """
    edits = plan(model, specification)
    with unchanged_on_error(model):
        commit(edits)


def plan(model: nn.Module, specification: Specification) -> list["Edit"]:
    """What apply_ changes, all checked and built."""
    _check_mode()
    check_model(model)
    check_specification(specification)
    for entry in specification:
        check_fit(model, entry)
    edits = [edit for entry in specification for edit in _edits(model, entry, _build(model, entry))]
    return [*edits, *_remember(model, specification)]


def _check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise ValueError("parameters made within torch.inference_mode() never train. Call it outside.")


def check_model(model: nn.Module, *, saving: bool = False) -> None:
    """Raise where the modules of a model are no longer its own to change, or with `saving`, to name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    for path, module in model.named_modules():
        at = f"{type(model).__name__} is" if not path else f"{path} is"
        if saving and "_orig_mod" in module._modules:
            remedy = "Pass the model that you compiled: compiled._orig_mod."
            if path:
                remedy = f"Put the module that you compiled back: model.set_submodule({path!r}, compiled._orig_mod)."
            raise ValueError(f"{at} what torch.compile returned, which renames its tensors. {remedy}")
        if not saving and ("_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None):
            raise ValueError(f"{at} compiled. Call it before torch.compile, on the model itself.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{at} a TorchScript module, which cannot be changed. Pass the model it was made from.")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{at} wrapped by DistributedDataParallel. Call it before wrapping, on the model itself.")
        if "_fsdp_wrapped_module" in module._modules or any(
            hasattr(p, "device_mesh") for p in module.parameters(recurse=False)
        ):
            raise ValueError(f"{at} sharded (FSDP, DTensor). Call it before sharding, on the whole model.")


class Edit(NamedTuple):
    """An attribute of a module, and its new value."""

    owner: nn.Module
    name: str
    value: Any


def commit(edits: list[Edit]) -> None:
    """Make the changes, within `unchanged_on_error`."""
    for edit in edits:
        setattr(*edit)


def _remember(model: nn.Module, specification: Specification) -> list[Edit]:
    """What was done to a model stays with it, after what was done before."""
    edits = [Edit(model, MEMORY, [*(getattr(model, MEMORY, None) or []), *copy.deepcopy(specification)])]
    if hasattr(type(model), "save_pretrained"):
        edits.append(Edit(model, "save_pretrained", SaveGuard(model)))
    return edits


def _edits(model: nn.Module, entry: Mapping[str, Any], layer: FFF) -> list[Edit]:
    """What to change for one block."""
    new: nn.Module = layer
    if entry["dropout_after"]:
        after = model.get_submodule(entry["dropout_after"])
        new = nn.Sequential(OrderedDict(fff=layer, dropout=after))
    new.training = layer.training
    edits = [Edit(*_slot(model, entry["name"]), new)]
    for path in entry["identity"]:
        owner, name = _slot(model, path)
        keeps_module = isinstance(getattr(owner, name), nn.Module)
        edits.append(Edit(owner, name, nn.Identity().train(owner.training) if keeps_module else identity))
    # torch.nn's encoder has a fused way in evaluation that reads the weights of linear1 and linear2 itself.
    parts = entry["name"].split(".")
    for above in (model.get_submodule(".".join(parts[:i])) for i in range(len(parts))):
        if hasattr(above, "activation_relu_or_gelu"):
            edits.append(Edit(above, "activation_relu_or_gelu", 0))
        if hasattr(above, "use_nested_tensor"):
            edits.append(Edit(above, "use_nested_tensor", False))
    return edits


def _slot(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _entry(block: Block, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What is done to a block, as data."""
    return {
        "name": block.name,
        "form": block.form,
        "in_features": block.in_features,
        "width": block.width,
        "out_features": block.out_features,
        "depth": sizes["depth"],
        "leaf_width": sizes["leaf_width"],
        "node_width": sizes["node_width"],
        # A callable is taken from where it stands in the model.
        "activation": block.activation if isinstance(block.activation, str) else {"at": block.activation_at},
        "bias": block.bias,
        "dropout": block.dropout,
        "transposition": sizes["transposition"],
        "decision": sizes["decision"],
        "linears": list(block.linears),
        "identity": list(block.identity),
        "dropout_after": block.dropout_after,
    }


def _build(model: nn.Module, entry: Mapping[str, Any]) -> FFF:
    """A new layer as an entry of a specification says, on the device and in the dtype and mode of what it replaces."""
    old = model.get_submodule(entry["name"])
    weight = next(old.parameters())
    activation: Activation = entry["activation"]
    if isinstance(activation, Mapping):
        activation = part_at(model, activation["at"], entry["name"])
    options = {key: entry[key] for key in ("bias", "dropout", "transposition", "decision", *SIZES)}
    layer = FFF(**options, activation=activation, device=weight.device, dtype=weight.dtype)
    return layer.train(old.training)


def _leaf_width(block: Block, depth: int, leaf_width: int | None) -> int:
    if leaf_width is not None:
        return leaf_width
    if block.width % 2**depth:
        raise ValueError(
            f"{block.name} is {block.width} wide, which 2**depth = {2**depth} leaves do not divide evenly. "
            "Choose another depth, or pass leaf_width."
        )
    return block.width // 2**depth


def _passes(filter: Filter | None, block: Block) -> bool:
    if filter is None:
        return True
    if callable(filter):
        return bool(filter(block.name, block))
    return any(fnmatchcase(block.name, glob) for glob in filter)


def _keep_requires_grad(block: Block, layer: FFF) -> None:
    """A leaf's parameter trains if the dense one did; what had no dense one trains if anything in the block did."""
    roles = {"leaf_in": "up", "leaf_out": "down", "leaf_gate": "gate"}
    some = any(block.requires_grad.values())
    for name, parameter in layer.named_parameters(recurse=False):
        part, _, kind = name.rpartition("_")
        parameter.requires_grad_(block.requires_grad.get(f"{roles.get(part)}.{kind}", some))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _nothing(model: nn.Module, finder: Finder, skipped: list[Skipped]) -> str:
    """The error for a model in which there is nothing to replace."""
    if finder.blocks:
        names = ", ".join(block.name for block in finder.blocks[:8])
        return f"the filter lets none of the {len(finder.blocks)} feedforward blocks pass: {names}, ..."
    if finder.present:
        return (
            f"{type(model).__name__} has been replaced already: it has {len(finder.present)} FFF layers "
            f"({', '.join(finder.present[:3])}, ...) and no dense feedforward block"
            + (f" but those skipped:\n{_list(skipped[: -len(finder.present)])}" if finder.skipped else ".")
        )
    kinds = Counter(type(module).__name__ for module in model.modules() if next(module.children(), None) is None)
    some = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(8))
    looked = "\n".join(f"  {form}: {what}" for form, what in FORMS.items())
    message = (
        f"{type(model).__name__} has no feedforward block that can be replaced. Looked for\n{looked}\namong {some}."
    )
    return message + (f"\nSkipped:\n{_list(skipped)}" if skipped else "")


def _list(skipped: list[Skipped]) -> str:
    return "\n".join(f"  {s.name or 'the model'}: {s.why}" for s in skipped[:8])
