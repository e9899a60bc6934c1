"""Find the feedforward blocks of a model by what they compute, not by what they are called.

Linear layers whose sizes fit are candidates. A candidate is run on a probe and its weights are read in each of the
ways that FORMS names: it is a block if exactly one reading reproduces what the model's own modules computed, in
evaluation and in training with nn.Dropout off. Everything else is left alone, with a reason where it looked like one.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..activations import PLAIN, Activation, function
from ..baselines import FF
from ..layer import FFF
from .blocks import Block, Function, Linear, Weights, form_of, gated_name, read_linear, readings, recognise
from .specification import is_activation_name
from .trace import Call, probe, required, run, run_example


class Skip(Exception):
    """Why something that looks like a feedforward block is left as it is."""


class CannotRun(Skip):
    """It does not run on a probe: then only a visible activation says that it looks like a feedforward block."""


class Match(NamedTuple):
    form: str
    weights: Weights
    activation: Activation
    function: Function


_HOOKS = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"]
_HOOKS += ["_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"]


class Finder:
    """One search: `blocks` and `skipped` are its results, `present` the FFF layers that are already there."""

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model, self.example = model, example
        self.blocks: list[Block] = []
        self.skipped: list[tuple[str, str]] = []
        self.present: list[str] = []
        self.paths: dict[nn.Module, str] = {}
        self.places: dict[nn.Module, dict[tuple[int, str], str]] = {}  # (parent, attribute) -> path
        self.owners: dict[int, dict[tuple[nn.Module, str], str]] = {}  # of a parameter, by its memory
        self.covered: set[nn.Module] = set()
        self.examples: dict[bool, list[Call]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(module, path)
            for name, child in module.named_children():
                self.places.setdefault(child, {}).setdefault((id(module), name), join(path, name))
            for name, parameter in module.named_parameters(recurse=False):
                self.owners.setdefault(_memory(parameter), {}).setdefault((module, name), join(path, name))
        self.linears = {m: linear for m in self.paths if (linear := read_linear(m)) is not None}
        self._visit(model)

    def _visit(self, module: nn.Module) -> None:
        if module in self.covered:
            return
        path = self.paths[module]
        if isinstance(module, FFF):
            self.present.append(path)
            self.covered.update(module.modules())
            return
        self._attempt(module, path, self._expert)
        inside = self._linears_of_block(module)
        if inside:
            self._attempt(module, path, lambda m: self._whole(m, inside))
            self.covered.update(module.modules())
            return
        for child in module.children():
            if child not in self.linears:
                self._visit(child)
        self._attempt(module, path, self._in_place)

    def _attempt(self, module: nn.Module, path: str, read: Callable[[nn.Module], Block | None]) -> None:
        try:
            block = read(module)
        except Skip as reason:
            if not isinstance(reason, CannotRun) or self._visible(module):
                self.skipped.append((path, str(reason)))
            return
        if block is not None:
            self.blocks.append(block)

    def _expert(self, module: nn.Module) -> None:
        own = [p.shape for p in module.parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]
        if len(own) >= 2 and len({shape[0] for shape in own}) == 1:
            raise Skip("it is a mixture of experts, in 3-D weights; an FFF takes the place of one network")

    def _linears_of_block(self, module: nn.Module) -> list[nn.Module]:
        """The two or three linear layers that are all of a module, if they are and their sizes fit."""
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
        """How many linear layers a module has; None if it has other parameters too."""
        if module in self.linears:
            found.append(module)
            return 1
        if isinstance(module, FFF) or _has_own_tensors(module) or len(found) > 3:
            return None
        counts = [self._only_linears(child, found) for child in module.children()]
        return None if None in counts else sum(c or 0 for c in counts)

    def _whole(self, owner: nn.Module, linears: list[nn.Module]) -> Block | None:
        """A block that is a module of its own."""
        path = self.paths[owner]
        self._check(owner, linears)
        if not path:
            raise Skip("it is the model itself, which cannot be replaced in place; build an FFF instead of it")
        if required(owner) > 1:
            raise CannotRun("it takes more inputs than one")
        if self._is_expert(owner):
            raise Skip("it is one expert of a mixture, beside a router")
        first = self.linears[linears[0]]
        x = probe(first.in_features, first.weight)
        spread = (x @ first.weight.T).std()
        if spread > 0:
            x = x * (2 / spread)  # where activations differ from each other and from straight lines
        y, calls = self._run(owner, x, training=False)
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
            return None
        order = [call.module for call in calls if call.module in self.linears]
        if sorted(map(id, order)) != sorted(map(id, linears)):
            raise Skip("a forward does not call each of its linear layers once")
        match = self._match([self.linears[m] for m in order], owner, calls, x, y)
        far = x * (20 if x.dtype == torch.float16 else 500)  # where a clipped activation is found out
        if not match.weights.explain(far, self._run(owner, far, training=False)[0], match.function):
            raise Skip("at large inputs it gives something else than recomputed from its weights: it is clipped")
        train = self._run(owner, x, training=True)[0]
        after = [call.module for call in calls[_at(calls, order[-1]) + 1 :] if isinstance(call.module, nn.Dropout)]
        inner = calls[: _at(calls, order[-1])]
        hidden = [call.module for call in inner if isinstance(call.module, nn.Dropout)]
        if isinstance(owner, FF):
            dropout = owner.dropout
        elif not match.weights.explain(x, train, match.function):
            raise Skip("in training it is random, or differs in another way, without an nn.Dropout that does so")
        else:
            dropout = self._hidden_dropout(hidden)
        if any(call.module in hidden for call in calls[: _at(calls, order[0])]):
            raise Skip("it drops out its inputs, which FFF does not")
        _check_dropped(inner, match, x)
        if len(after) > 1:
            raise Skip("it has more than one dropout on its outputs")
        return self._block(path, owner, order, match, dropout, after=after[0] if after else None)

    def _in_place(self, scope: nn.Module) -> Block | None:
        """A block whose parts lie in a larger module: at most two levels down, and in different children of it."""
        near = {n: m for n, m in scope.named_modules() if n and n.count(".") < 2 and m not in self.covered}
        pairs = [
            (m, k)
            for (a, m), (b, k) in itertools.permutations([(n, m) for n, m in near.items() if m in self.linears], 2)
            if a.split(".")[0] != b.split(".")[0]
            and self.linears[m].out_features == self.linears[k].in_features
            and self.linears[m].in_features == self.linears[k].out_features
        ]
        if not pairs or not self._visible(scope, near.values()):
            return None
        widening = [pair for pair in pairs if self.linears[pair[0]].out_features > self.linears[pair[0]].in_features]
        first = self.linears[pairs[0][0]]
        if any(linear.trouble for m in near.values() if (linear := self.linears.get(m))):
            if widening:
                self._check(scope, [*widening[0]])
            return None
        try:
            calls = self._calls(scope, probe(first.in_features, first.weight), training=False)
        except Skip:
            if widening:
                raise
            return None
        order = [i for i, call in enumerate(calls) if call.module in self.linears]
        for i, j in itertools.pairwise(order):
            up, down = calls[i], calls[j]
            if (up.module, down.module) in pairs:
                block = self._pair(scope, calls, i, j, required=(up.module, down.module) in widening)
                if block is not None:
                    return block
        return None

    def _pair(self, scope: nn.Module, calls: list[Call], i: int, j: int, *, required: bool) -> Block | None:
        """The block from call i, of the first linear layer, to call j, of the second one."""
        up, down, between = calls[i], calls[j], [call.module for call in calls[i + 1 : j]]
        modules = [up.module, down.module]
        drops = [m for m in between if isinstance(m, nn.Dropout)]
        others = [m for m in between if not isinstance(m, nn.Dropout | nn.Identity)]
        parents = [self.model.get_submodule(self.paths[m].rpartition(".")[0]) for m in modules]
        try:
            self._check(scope, modules)
            match = self._match(
                [self.linears[m] for m in modules], scope, calls[i + 1 : j], up.input, down.output, [*parents, scope]
            )
        except Skip:
            if required:
                raise
            return None
        actor = [self._place(m, scope) for m in others]
        if not actor:
            actor = [p for p, f in self._functions([*parents, scope]).items() if recognise(f) == match.activation][:1]
        if len(actor) != 1:
            raise Skip("its activation is written into a forward, where it cannot be taken out")
        if any(call.module is m for m in [*modules, *others] for call in [*calls[:i], *calls[j + 1 :]]):
            raise Skip("a linear layer or activation of it is used a second time in the same layer")
        again = self._calls(scope, probe(up.input.shape[-1], up.input), training=True)
        then = {call.module: call for call in again}
        if not match.weights.explain(then[up.module].input, then[down.module].output, match.function):
            raise Skip("in training it is random, or differs in another way, without an nn.Dropout that does so")
        elsewhere = {call.module for call in [*calls[:i], *calls[j + 1 :]]}
        if any(m in elsewhere and m.p > 0 for m in drops):
            raise Skip("the dropout on its hidden layer is used elsewhere too")
        own = [m for m in drops if m not in elsewhere]
        _check_dropped(calls[i + 1 : j], match, up.input)
        identity = [*actor, *(self._place(m, scope) for m in own), self.paths[down.module]]
        split = parents[0] is not parents[1]
        match = match._replace(form="split" if split else "in-layer")
        self.covered.update(modules)
        dropout = self._hidden_dropout(own)
        return self._block(self.paths[up.module], scope, modules, match, dropout, identity=identity)

    def _match(
        self,
        linears: list[Linear],
        owner: nn.Module,
        calls: list[Call],
        x: Tensor,
        y: Tensor,
        holders: Iterable[nn.Module] | None = None,
    ) -> Match:
        """The one reading of the weights that explains the output y at x."""
        called = [c.module for c in calls if c.module not in self.linears]
        candidates: list[Any] = [m for m in called if not isinstance(m, nn.Dropout | nn.Identity)]
        if not candidates:
            candidates = list(self._functions(owner.modules() if holders is None else holders).values())
        if isinstance(owner, FF):
            candidates = [function(owner.activation)]
        known = [a for c in candidates if (a := recognise(c)) is not None]
        for tried in (list(dict.fromkeys(known)), list(PLAIN)):
            found = [
                Match(form, weights, a, function(a))
                for form, weights in readings(linears)
                for a in tried
                if weights.explain(x, y, function(a))
            ]
            if len(found) == 1:
                return self._gated(found[0])
            if found:
                ways = ", ".join(f"{m.form} {call_name(m.activation)}" for m in found)
                raise Skip(f"its output on a probe can be explained in several ways ({ways})")
        tensors = [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise Skip("its weights hold NaN or infinity; load weights that are finite")
        raise Skip("recomputed from its weights on a probe, plain or gated, it gives something else")

    def _gated(self, match: Match) -> Match:
        if match.weights.gate is None:
            return match
        name = gated_name(match.activation)
        if name is None:
            act = call_name(match.activation)
            raise Skip(f"it is gated by {act}; FFF has gates with silu (swiglu) and gelu (geglu)")
        return match._replace(activation=name)

    def _block(
        self,
        path: str,
        scope: nn.Module,
        linears: list[nn.Module],
        match: Match,
        dropout: float,
        *,
        identity: Iterable[str] = (),
        after: nn.Module | None = None,
    ) -> Block:
        at = ""
        if not isinstance(match.activation, str):
            if isinstance(match.activation, nn.Module):
                at = self._place(match.activation, scope)
            else:
                at = next(p for p, value in self._functions(scope.modules()).items() if value is match.activation)
        parts = [("up", linears[0]), ("down", linears[-1])] if len(linears) == 2 else []
        if len(linears) == 3:
            first_is_gate = match.weights.gate is self.linears[linears[0]].weight
            gate, up = linears[:2] if first_is_gate else linears[1::-1]
            parts = [("up", up), ("gate", gate), ("down", linears[2])]
        grads = {f"{role}.{n}": p.requires_grad for role, m in parts for n, p in m.named_parameters(recurse=False)}
        if match.form == "packed":
            grads |= {key.replace("up", "gate"): value for key, value in grads.items() if key.startswith("up")}
        return Block(
            path,
            match.form,
            match.weights,
            match.activation,
            tuple(self.paths[m] for m in linears),
            activation_at=at,
            identity=tuple(identity),
            dropout=dropout,
            dropout_after="" if after is None else self.paths[after],
            requires_grad=grads,
        )

    def _place(self, module: nn.Module, scope: nn.Module) -> str:
        """The path of a module by way of one that has it: an activation may be shared between layers."""
        inside = {id(m) for m in scope.modules()}
        return next(path for (parent, _), path in self.places[module].items() if parent in inside)

    def _check(self, owner: nn.Module, linears: list[nn.Module]) -> None:
        """Skip what cannot be taken out of the model without breaking something else."""
        for module in linears:
            if self.linears[module].trouble:
                raise Skip(self.linears[module].trouble)
        weights = [self.linears[module].weight for module in linears]
        kinds = {(w.dtype, w.device) for w in weights}
        if len(kinds) > 1:
            raise Skip(f"its linear layers differ in dtype or device: {', '.join(sorted(map(str, kinds)))}")
        whole = set(linears) <= set(owner.modules()) and self._linears_of_block(owner) != []
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

    def _is_expert(self, owner: nn.Module) -> bool:
        path = self.paths[owner]
        holder = self.model.get_submodule(path.rpartition(".")[0])
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict) or len(holder) < 2:
            return False
        above = self.model.get_submodule(self.paths[holder].rpartition(".")[0])
        beside = [m for child in above.children() if child is not holder for m in child.modules()]
        return any((linear := self.linears.get(m)) is not None and linear.out_features == len(holder) for m in beside)

    def _hidden_dropout(self, drops: list[nn.Dropout]) -> float:
        rates = [m.p for m in drops if m.p > 0]
        if 1 in rates:
            raise Skip("its dropout leaves nothing of its hidden layer")
        if len(rates) > 1:
            raise Skip("it has more than one dropout on its hidden layer")
        return float(rates[0]) if rates else 0.0

    def _visible(self, owner: nn.Module, modules: Iterable[nn.Module] | None = None) -> bool:
        """Whether there is something that may be an activation: a module with nothing in it, or a function."""
        inside = [owner, *(owner.modules() if modules is None else modules)]
        return bool(self._functions(inside)) or any(
            next(m.children(), None) is None
            and not isinstance(m, nn.Dropout | nn.Identity)
            and next(m.parameters(), None) is None
            and next(m.buffers(), None) is None
            for m in inside
        )

    def _functions(self, modules: Iterable[nn.Module]) -> dict[str, Any]:
        """Functions kept as attributes whose name says that they are activations, by path."""
        return {
            join(self.paths[m], name): value
            for m in dict.fromkeys(modules)
            for name, value in vars(m).items()
            if is_activation_name(name) and callable(value) and not isinstance(value, type)
        }

    def _run(self, scope: nn.Module, x: Tensor, *, training: bool) -> tuple[Any, list[Call]]:
        try:
            return run(scope, x, training=training)
        except Exception as error:  # someone else's forward, which may raise anything
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotRun(f"it could not be run on a probe of shape {tuple(x.shape)} ({told})") from error

    def _calls(self, scope: nn.Module, x: Tensor, *, training: bool) -> list[Call]:
        """The calls in a part of the model: run alone, or within the model on the example where that fails."""
        try:
            return self._run(scope, x, training=training)[1]
        except Skip as reason:
            if self.example is None:
                raise CannotRun(
                    f"{reason}; pass example=, a small batch for the whole model, to verify it there"
                ) from None
        if training not in self.examples:
            self.examples[training] = run_example(self.model, self.example, training=training)[1]
        inside = set(scope.modules())
        return [call for call in self.examples[training] if call.module in inside]


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def call_name(activation: Activation) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


def _has_own_tensors(module: nn.Module) -> bool:
    return any(True for tensors in (module.parameters, module.buffers) for _ in tensors(recurse=False))


def _at(calls: list[Call], module: nn.Module) -> int:
    return next(i for i, call in enumerate(calls) if call.module is module)


def _memory(parameter: Tensor) -> int:
    """Where the numbers of a parameter are: those of a view of another one are there too, and tied to it."""
    try:
        return (0 if parameter.is_meta else parameter.data_ptr()) or id(parameter)
    except RuntimeError:  # it has no memory of its own: a sparse one, or a subclass that wraps others
        return id(parameter)


def _check_dropped(calls: list[Call], match: Match, x: Tensor) -> None:
    """Skip a block whose dropout, in these calls, is not on the hidden layer that leads to its output."""
    if match.activation in ("relu", "identity"):
        return  # before or after, these let the same through
    hidden = match.weights.hidden(x, match.function).double()
    for call in calls:
        if not isinstance(call.module, nn.Dropout) or not call.module.p:
            continue
        seen = call.input.double()
        if seen.shape != hidden.shape or (seen - hidden).norm() > 0.01 * hidden.norm():
            raise Skip("its dropout comes before the activation, where FFF has none")
