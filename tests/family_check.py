"""Convert a tiny model of a family, and check that nothing was replaced wrongly."""

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastff
from family_models import OTHER, build, families, transformers
from fastff.batches import feed
from fastff.layer import FFF
from fastff.surgery.example import example_of
from fastff.surgery.trace import probe, run, run_example, tensors_of

EXPERTS = ("it is a mixture of experts", "it is one expert of a mixture")


# Names of feedforward blocks, or of their classes: whether a family has one is not asked of the code under test.
BLOCKS = re.compile(r"mlp|ffn|feed_?forward|intermediate|experts|convactivation|poolformeroutput", re.I)


class Outcome(NamedTuple):
    """What replace_ did to a family.

    outcome: "replaced"; "mixture" if all that was refused are mixtures of experts; "refused"; or "none" if no module
    is a feedforward block by its name or its class. checked: whether the outputs of the whole model were compared, or
    those of each block.
    """

    outcome: str
    blocks: int = 0
    forms: str = ""
    activations: str = ""
    checked: str = ""
    reason: str = ""


def tried_families() -> list[str]:
    """The families of text, vision and audio."""
    return [family for family in families() if family not in OTHER]


def row(family: str, kinds: list[str] | None = None) -> dict[str, str]:
    """The row of a family in results/families.csv: of the first of its model types that can be built here."""
    trouble = ""
    for kind in kinds or families()[family]:
        try:
            model = build(kind)
        except ImportError as error:  # a backbone of another library
            trouble = trouble or f"it needs {str(error).split('requires the ')[-1].split()[0]}"
            continue
        except Exception as error:  # a config that cannot be made small by the names of its fields
            trouble = trouble or f"its tiny config is not valid: {type(error).__name__}"
            continue
        return _cells(family, kind, attempt(model))
    return _cells(family, families()[family][0], Outcome("not built", reason=trouble))


def _cells(family: str, kind: str, outcome: Outcome) -> dict[str, str]:
    cells = {name: str(value) for name, value in outcome._asdict().items()}
    return {"family": family, "kind": kind, **cells, "transformers": transformers.__version__}


def attempt(model: nn.Module) -> Outcome:
    """Replace the blocks of a tiny model; raises AssertionError if its outputs change."""
    dense, example = copy.deepcopy(model), example_of(model)
    try:
        report = _replaced(model)
    except ValueError as error:
        return _refusal(str(error), _names_a_block(model))
    exact = None if example is None else in_float64(dense, example)
    if exact is not None:
        assert_same(outputs(dense, example), exact, outputs(model, example))
    for block in report.blocks.values() if exact is None else ():
        if example is None:
            check_alone(dense, model, block)
        else:
            check_within(dense, model, block, example)
    checked = "blocks" if exact is None else "model"
    forms = ", ".join(sorted({r.form for r in report.replaced}))
    activations = ", ".join(sorted({r.activation for r in report.replaced}))
    why = " / ".join(sorted({_short(skipped.why) for skipped in report.skipped}))
    return Outcome("replaced", len(report.replaced), forms, activations, checked, why)


def _names_a_block(model: nn.Module) -> bool:
    names = ((path.rpartition(".")[2], type(module).__name__) for path, module in model.named_modules())
    return any(BLOCKS.search(name) for pair in names for name in pair)


def _replaced(model: nn.Module) -> fastff.surgery.Report:
    try:
        return fastff.replace_(model, depth=1)
    except ValueError as error:
        if "do not divide evenly" not in str(error):
            raise
    return fastff.replace_(model, depth=0)


def in_float64(model: nn.Module, batch: Any) -> list[Tensor] | None:
    """The outputs in float64; None if the model has no float64 path, or gives no finite numbers on this batch."""
    try:
        exact = outputs(double(model), double(batch))
    except RuntimeError:  # a constant beyond its dtype, or float32 written into the model
        return None
    return exact if all(y.isfinite().all() for y in exact) else None


def assert_same(dense: list[Tensor], exact: list[Tensor], ours: list[Tensor]) -> None:
    """Our error against float64 is at most four times the dense model's own plus eight roundings, in each norm."""
    assert len(dense) == len(exact) == len(ours) > 0
    for plain, truth, new in zip(dense, exact, ours, strict=True):
        assert plain.shape == truth.shape == new.shape
        rounding = (plain.double() - truth).norm() + 8 * torch.finfo(plain.dtype).eps * truth.norm()
        assert (new.double() - truth).norm() <= 4 * rounding


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point outputs of a model in eval(), with the soft pass of its FFF layers, which can be exact."""
    return _tensors(model, lambda: feed(model, batch))


def check_within(dense: nn.Module, model: nn.Module, block: Any, example: Any) -> None:
    """A block's layer gives what its last linear layer gave, at what its first one got within the model."""
    first, last = (dense.get_submodule(block.linears[i]) for i in (0, -1))
    calls = run_example(dense, example, training=False)[1]
    x, y = (next(call for call in calls if call.module is m) for m in (first, last))
    layer = next(m for m in model.get_submodule(block.name).modules() if isinstance(m, FFF))
    exact = block.weights.to(torch.float64).compute(x.input.double(), block.activation)
    assert_same([y.output], [exact], _tensors(layer, lambda: layer(x.input)))


def check_alone(dense: nn.Module, model: nn.Module, block: Any) -> None:
    """The module that a block is, or the smallest one that contains its parts, computes what it did."""
    paths = block.linears if block.identity else (f"{block.name}.",)
    parts = [path.split(".")[:-1] for path in paths]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    old, new = (part.get_submodule(".".join(common)) for part in (dense, model))
    x = probe(block.in_features, block.weights.up)
    results = [
        _tensors(part, lambda part=part, x=x: run(part, x, training=False, soft=True)[0])
        for part, x in ((old, x), (double(old), x.double()), (new, x))
    ]
    assert_same(*results)


def _tensors(model: nn.Module, call: Callable[[], Any]) -> list[Tensor]:
    model.eval()
    for module in model.modules():
        if isinstance(module, FFF):
            module.train().dropout = 0.0
    torch.manual_seed(0)
    with torch.no_grad():
        y = call()
    return [t for t in tensors_of(y) if t.is_floating_point()]


def double(part: Any) -> Any:
    """A model, or a batch, in float64."""
    if isinstance(part, dict):
        return {k: v.double() if v.is_floating_point() else v for k, v in part.items()}
    return copy.deepcopy(part).double()


def _refusal(error: str, has_block: bool) -> Outcome:
    """The outcome of an error of replace_, with the reasons that it gives."""
    _, _, listed = error.partition("Skipped:\n")
    reasons = [line.strip().partition(": ")[2] for line in listed.splitlines()]
    if not reasons:
        seen = re.search(r"^in (\d+ x .*)\.$", error, re.M)
        said = f"no form that FFF replaces in {seen[1]}" if seen else error.splitlines()[0]
        return Outcome("refused" if has_block else "none", reason=said)
    mixture = all(reason.startswith(EXPERTS) for reason in reasons)
    return Outcome("mixture" if mixture else "refused", reason=" / ".join(sorted(set(map(_short, reasons)))))


def _short(reason: str) -> str:
    """A reason without what is particular to a model: shapes and another library's error."""
    return reason.split(" (")[0].split(" on a probe of shape")[0]
