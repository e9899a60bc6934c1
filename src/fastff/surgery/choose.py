"""Choose which feedforward blocks to replace: search the model, apply the filter, set the leaf width."""

from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .blocks import FORMS, Block
from .find import Finder
from .report import Skipped

Filter = str | Iterable[str] | Callable[[str, Block], bool]
Checked = list[str] | Callable[[str, Any], bool] | None


def check_filter(filter: Any, what: str = "block") -> Checked:
    """A filter as a list of globs, as a function of (name, what), or None; raises for anything else."""
    if filter is None or callable(filter):
        return filter
    globs = [filter] if isinstance(filter, str) else list(filter) if isinstance(filter, Iterable) else [filter]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"filter must be a glob on the name, several, or a function of (name, {what}); got {globs}.")
    return globs


def choose(model: nn.Module, example: Any, filter: Checked) -> tuple[list[Block], list[Skipped]]:
    """The blocks to replace, and what was skipped; raises if nothing can be replaced."""
    finder = Finder(model, example)
    skipped = [Skipped(*pair) for pair in finder.skipped] + [Skipped(n, "it is already an FFF") for n in finder.present]
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    shared = [block for block in finder.blocks if places[id(model.get_submodule(block.name))] > 1]
    skipped += [Skipped(block.name, "its module is used in several places") for block in shared]
    chosen = [block for block in finder.blocks if block not in shared and passes(filter, block.name, block)]
    if shared and len(shared) == len(finder.blocks):
        raise ValueError(f"nothing can be replaced:\n{_list(skipped)}")
    if not chosen:
        raise ValueError(_nothing(model, finder, skipped))
    rest = (block for block in finder.blocks if block not in chosen and block not in shared)
    return chosen, [*skipped, *(Skipped(block.name, "excluded by the filter") for block in rest)]


def leaf_width_of(block: Block, depth: int, leaf_width: int | None) -> int:
    """The given leaf width, or the one that keeps the block's number of hidden neurons."""
    if leaf_width is not None:
        return leaf_width
    if block.width % 2**depth:
        raise ValueError(
            f"{block.name} is {block.width} wide, which 2**depth = {2**depth} leaves do not divide evenly. Choose "
            "another depth, or pass leaf_width."
        )
    return block.width // 2**depth


def passes(filter: Checked, name: str, part: Any) -> bool:
    """Whether a checked filter takes the part of a model with this name."""
    if filter is None:
        return True
    if callable(filter):
        return bool(filter(name, part))
    return any(fnmatchcase(name, glob) for glob in filter)


def _nothing(model: nn.Module, finder: Finder, skipped: list[Skipped]) -> str:
    """The error for a model that has nothing to replace."""
    if finder.blocks:
        names = ", ".join(block.name for block in finder.blocks[:8])
        return f"the filter excludes all {len(finder.blocks)} feedforward blocks: {names}, ..."
    if finder.present:
        return (
            f"{type(model).__name__} has no dense feedforward block left: it has {len(finder.present)} FFF layers "
            f"({', '.join(finder.present[:3])}, ...)"
            + (f" and these were skipped:\n{_list(skipped[: -len(finder.present)])}" if finder.skipped else ".")
        )
    kinds = Counter(type(module).__name__ for module in model.modules() if next(module.children(), None) is None)
    some = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(8))
    looked = "\n".join(f"  {form}: {what}" for form, what in FORMS.items())
    message = f"{type(model).__name__} has no feedforward block that can be replaced. Looked for\n{looked}\nin {some}."
    return message + (f"\nSkipped:\n{_list(skipped)}" if skipped else "")


def _list(skipped: list[Skipped]) -> str:
    return "\n".join(f"  {s.name or 'the model'}: {s.why}" for s in skipped[:8])
