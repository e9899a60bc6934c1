"""replace_ and apply_: change a model's feedforward blocks into FFF layers, all of them or none.

Everything is found, verified, built and initialised first; the model changes in one go at the end. What was done is
written down as a specification, one dict a block, from which apply_ does the same to a fresh model.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..activations import Activation, identity
from ..capture import batches
from ..checks import check_int, check_probability
from ..interrupts import keeps_grad_mode
from ..layer import FFF
from .answers import Answers
from .blocks import FORMS, Block
from .carry import INITS, Init, from_data_
from .distill import inputs_of
from .find import Finder, call_name
from .report import Replaced, Report, Skipped
from .specification import MEMORY, SIZES, Specification, check_fit, check_specification, part_at

Filter = str | Iterable[str] | Callable[[str, Block], bool]


@keeps_grad_mode
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
    Parameters are new, so make the optimiser afterwards. An error leaves the model as it was.

    Args:
        depth, node_width, transposition, decision: of the FFF layers, as in `FFF`.
        leaf_width: the hidden neurons of a leaf; by default the block's width / 2**depth, which keeps the number of
            hidden neurons.
        filter: which blocks: a glob on the name ("*.layers.1?.mlp"), several of them, or a function of (name, block).
        init: "dense" carries the weights over so that the soft pass (train mode) computes what the block did;
            evaluation does not, until the tree has been trained. "data" builds each tree on the inputs that the block
            has seen, and gives every leaf the neurons that matter most in its region, so that evaluation is near the
            block's at once; the report says how near. "random" draws them anew. Or a function of (block, layer) that
            fills the layer and returns how, in words.
        data: for init="data", batches for the model, as in `initialize_tree_`.
        samples: how many inputs of a block are enough; batches past that are not read. All blocks' inputs are in memory
            at once.
        example: a small batch for the whole model, needed only to verify blocks that lie inside a layer which does not
            run on its own; the report says so.
    """
    _check_mode()
    check_model(model)
    depth = check_int("depth", depth, 0)
    leaf_width = None if leaf_width is None else check_int("leaf_width", leaf_width, 1)
    node_width = check_int("node_width", node_width, 1)
    check_probability("transposition", transposition)
    if isinstance(init, str) and init not in (*INITS, "data"):
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
    skipped += [Skipped(block.name, "excluded by the filter") for block in rest]

    fill = _filler(model, init, chosen, data, samples)
    replaced, specification, edits = [], [], []
    for block in chosen:
        width = _leaf_width(block, depth, leaf_width)
        entry = _entry(block, depth, width, node_width, transposition, decision)
        layer = _build(model, entry)
        how = fill(block, layer)
        if not isinstance(how, str):
            raise TypeError(f"init must return a string that says what it did; got {how!r} for {block.name}.")
        layer.fitted_tree, layer.fitted_leaves = init not in INITS, init != "random"
        _keep_requires_grad(block, layer)
        edits += _edits(model, entry, layer)
        specification.append(entry)
        sizes = block.in_features, block.width, block.out_features, depth, width
        replaced.append(Replaced(block.name, block.form, *sizes, call_name(block.activation), how))

    before = _parameters(model)
    exact = init == "dense" and all(r.leaf_width << depth >= r.width for r in replaced)
    exact = exact and not any(block.dropout for block in chosen)
    answers = Answers(model, chosen, example if example is not None else _first(data))
    undo = commit([*edits, _remember(model, specification)])
    try:
        answers.check(exact)
    except BaseException:
        commit(undo)
        raise
    dense, fast = sum(b.width for b in chosen), sum(depth * node_width + r.leaf_width for r in replaced)
    kept = {block.name: block for block in chosen}
    return Report(replaced, skipped, before, _parameters(model), dense, fast, specification, kept)


def _first(data: Any) -> Any:
    """A batch of data that can be read again, if there is one."""
    if data is None or isinstance(data, Iterator):
        return None
    return next(iter(batches(data)), None)


def _filler(model: nn.Module, init: str | Init, chosen: list[Block], data: Any, samples: int) -> Init:
    """What fills the new layers."""
    if not isinstance(init, str):
        return init
    if init != "data":
        return INITS[init]
    check_int("samples", samples, 2)
    inputs = inputs_of(model, {block.name: model.get_submodule(block.linears[0]) for block in chosen}, data, samples)
    return lambda block, layer: from_data_(block, layer, inputs[block.name])


def apply_(model: nn.Module, specification: Specification) -> None:
    """Do to a fresh `model` what `replace_` did to another: FFF layers of the same sizes at the same places.

    Their weights are random: load the state dict of the other model afterwards, which fits strictly. The model may be
    on the meta device. An error leaves it as it was.
    """
    commit(plan(model, specification))


def plan(model: nn.Module, specification: Specification) -> list["Edit"]:
    """What apply_ changes, all checked and built."""
    _check_mode()
    check_model(model)
    check_specification(specification)
    for entry in specification:
        check_fit(model, entry)
    edits = [edit for entry in specification for edit in _edits(model, entry, _build(model, entry))]
    return [*edits, _remember(model, specification)]


def _check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise ValueError("parameters made within torch.inference_mode() never train. Call it outside.")


def check_model(model: nn.Module) -> None:
    """Raise where the modules of a model are no longer its own to change."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    for path, module in model.named_modules():
        at = f"{type(model).__name__} is" if not path else f"{path} is"
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
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


def commit(edits: list[Edit]) -> list[Edit]:
    """Make the changes, all of them or none; returns those that take them back."""
    undo: list[Edit] = []
    try:
        for edit in edits:
            undo.insert(0, edit._replace(value=getattr(edit.owner, edit.name, None)))
            setattr(*edit)
    except BaseException:
        for edit in undo:
            setattr(*edit)
        raise
    return undo


def _remember(model: nn.Module, specification: Specification) -> Edit:
    """What was done to a model stays with it, after what was done before."""
    return Edit(model, MEMORY, [*(getattr(model, MEMORY, None) or []), *copy.deepcopy(specification)])


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


def _entry(
    block: Block, depth: int, leaf_width: int, node_width: int, transposition: float, decision: str
) -> dict[str, Any]:
    return {
        "name": block.name,
        "form": block.form,
        "in_features": block.in_features,
        "width": block.width,
        "out_features": block.out_features,
        "depth": depth,
        "leaf_width": leaf_width,
        "node_width": node_width,
        # A callable is taken from where it stands in the model.
        "activation": block.activation if isinstance(block.activation, str) else {"at": block.activation_at},
        "bias": block.bias,
        "dropout": block.dropout,
        "transposition": float(transposition),
        "decision": decision,
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
