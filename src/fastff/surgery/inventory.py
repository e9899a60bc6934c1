"""An inventory of a model: the path of every module, its linear layers, its tied weights, its activations.

It tells the search in find.py which modules consist of two or three linear layers, where an activation is, and whether
linear layers can be removed without breaking something else.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..layer import FFF
from .blocks import Skip, form_of
from .linears import read_linear
from .specification import is_activation_name

_HOOKS = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"]
_HOOKS += ["_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"]


class Inventory:
    """The modules of a model. paths: each module's first path. linears: the linear layers, read."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: dict[nn.Module, str] = {}
        self.places: dict[nn.Module, dict[tuple[int, str], str]] = {}  # (parent, attribute) -> path
        self.owners: dict[int, dict[tuple[nn.Module, str], str]] = {}  # of parameters, by memory
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, path)
            for name, child in module.named_children():
                self.places.setdefault(child, {}).setdefault((id(module), name), join(path, name))
            for name, parameter in module.named_parameters(recurse=False):
                self.owners.setdefault(_memory(parameter), {}).setdefault((module, name), join(path, name))
        self.linears = {m: linear for m in self.paths if (linear := read_linear(m)) is not None}

    def parent(self, module: nn.Module) -> nn.Module:
        return self.model.get_submodule(self.paths[module].rpartition(".")[0])

    def path_within(self, scope: nn.Module, module: nn.Module) -> str:
        """A module's path through `scope`: an activation may be shared between layers."""
        inside = {id(m) for m in scope.modules()}
        return next(path for (parent, _), path in self.places[module].items() if parent in inside)

    def functions(self, modules: Iterable[nn.Module]) -> dict[str, Any]:
        """Functions kept as attributes whose names say that they are activations, by path."""
        return {
            join(self.paths[m], name): value
            for m in dict.fromkeys(modules)
            for name, value in vars(m).items()
            if is_activation_name(name) and callable(value) and not isinstance(value, type)
        }

    def shows_activation(self, owner: nn.Module, modules: Iterable[nn.Module] | None = None) -> bool:
        """Whether something here may be an activation: a module without children and tensors, or a function."""
        inside = [owner, *(owner.modules() if modules is None else modules)]
        return bool(self.functions(inside)) or any(
            next(m.children(), None) is None
            and not isinstance(m, nn.Dropout | nn.Identity)
            and next(m.parameters(), None) is None
            and next(m.buffers(), None) is None
            for m in inside
        )

    def is_expert(self, owner: nn.Module) -> bool:
        """Whether a module is one of several in a list, beside a linear layer with as many outputs: a router."""
        holder = self.parent(owner)
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict) or len(holder) < 2:
            return False
        beside = [m for child in self.parent(holder).children() if child is not holder for m in child.modules()]
        return any((linear := self.linears.get(m)) is not None and linear.out_features == len(holder) for m in beside)

    def linears_of_block(self, module: nn.Module) -> list[nn.Module]:
        """The two or three linear layers that a module consists of; [] if it has other tensors or sizes do not fit."""
        if module in self.linears or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return []
        found: list[nn.Module] = []
        branches = [self._only_linears(child, found) for child in module.children()]
        if _has_own_tensors(module) or not all(b is not None for b in branches) or len(found) not in (2, 3):
            return []
        if max(b or 0 for b in branches) == len(found):
            return []  # all in one child: that child is the block
        return found if any(map(form_of, itertools.permutations(self.linears[m] for m in found))) else []

    def _only_linears(self, module: nn.Module, found: list[nn.Module]) -> int | None:
        """The number of linear layers in a module; None if it has other parameters too."""
        if module in self.linears:
            found.append(module)
            return 1
        if isinstance(module, FFF) or _has_own_tensors(module) or len(found) > 3:
            return None
        counts = [self._only_linears(child, found) for child in module.children()]
        return None if None in counts else sum(c or 0 for c in counts)

    def check_removable(self, owner: nn.Module, linears: list[nn.Module]) -> None:
        """Skip linear layers that cannot be removed without breaking something else."""
        for module in linears:
            if self.linears[module].trouble:
                raise Skip(self.linears[module].trouble)
        weights = [self.linears[module].weight for module in linears]
        kinds = {(w.dtype, w.device) for w in weights}
        if len(kinds) > 1:
            raise Skip(f"its linear layers differ in dtype or device: {', '.join(sorted(map(str, kinds)))}")
        whole = set(linears) <= set(owner.modules()) and self.linears_of_block(owner) != []
        for module in [owner, *linears] if whole else linears:
            places = list(self.places.get(module, {}).values())
            if len(places) > 1:
                raise Skip(f"the same module is used in several places: {', '.join(places)}")
            if any(getattr(module, hooks) for hooks in _HOOKS) or any(
                p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()
            ):
                raise Skip("it has hooks, which would be lost; remove them, or register them after the replacement")
            if "forward" in vars(module):
                raise Skip("its forward was overwritten, as accelerate does; call replace_ before that")
        for module in linears:
            for parameter in module.parameters():
                tied = list(self.owners[_memory(parameter)].values())
                if len(tied) > 1:
                    raise Skip(f"its weights are tied: {' and '.join(tied)} are one parameter")


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _has_own_tensors(module: nn.Module) -> bool:
    return any(True for tensors in (module.parameters, module.buffers) for _ in tensors(recurse=False))


def _memory(parameter: Tensor) -> int:
    """The address of a parameter's values: a view of another parameter has the same one, and is tied."""
    try:
        return (0 if parameter.is_meta else parameter.data_ptr()) or id(parameter)
    except RuntimeError:  # no memory: a sparse tensor, or a subclass that wraps others
        return id(parameter)
