"""Find the feedforward blocks of a model by what they compute, not by their names.

Linear layers with fitting sizes are candidates. A candidate runs on a probe, and its weights are read in each way that
FORMS names. It is a block if exactly one reading reproduces what the model's modules compute, in evaluation and in
training with nn.Dropout off. Everything else is left alone, with a reason if it looked like a block.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import function
from ..baselines import FF
from ..layer import FFF
from .blocks import Block, CannotRun, Skip, recognise
from .dropouts import check_dropout_place, functional_rates, hidden_dropout
from .inventory import Inventory
from .match import Match, match
from .trace import Call, probe, required, run, run_example

_RANDOM = "in training its output is random or differs, and no dropout that FFF has explains it"


class Finder:
    """One search. blocks: found. skipped: (path, reason). present: FFF layers that the model already has."""

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model, self.example = model, example
        self.blocks: list[Block] = []
        self.skipped: list[tuple[str, str]] = []
        self.present: list[str] = []
        self.covered: set[nn.Module] = set()
        self.examples: dict[bool, list[Call]] = {}
        self.inventory = Inventory(model)
        self.paths, self.linears = self.inventory.paths, self.inventory.linears
        self._visit(model)

    def _visit(self, module: nn.Module) -> None:
        if module in self.covered:
            return
        path = self.paths[module]
        if isinstance(module, FFF):
            self.present.append(path)
            self.covered.update(module.modules())
            return
        self._attempt(module, path, self._check_experts)
        inside = self.inventory.linears_of_block(module)
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
            if not isinstance(reason, CannotRun) or self.inventory.shows_activation(module):
                self.skipped.append((path, str(reason)))
            return
        if block is not None:
            self.blocks.append(block)

    def _check_experts(self, module: nn.Module) -> None:
        """Skip a mixture of experts whose weights are 3-D: its own, or one in each of its children (JetMoE)."""
        bare = [child for child in module.children() if not hasattr(child, "kernel_size") and not [*child.children()]]
        alone = [parameters[0] for child in bare if len(parameters := [*child.parameters()]) == 1]
        own = [p.shape for p in [*module.parameters(recurse=False), *alone] if p.dim() == 3 and min(p.shape) > 1]
        if len(own) >= 2 and len({shape[0] for shape in own}) == 1:
            raise Skip("it is a mixture of experts with 3-D weights; an FFF replaces a single network")

    def _whole(self, owner: nn.Module, linears: list[nn.Module]) -> Block | None:
        """A block that is a whole module."""
        path = self.paths[owner]
        self.inventory.check_removable(owner, linears)
        if not path:
            raise Skip("it is the model itself, which cannot be replaced in place; build an FFF instead")
        if required(owner) > 1:
            return self._with_more_inputs(owner)
        if self.inventory.is_expert(owner):
            raise Skip("it is one expert of a mixture, beside a router")
        first = self.linears[linears[0]]
        x = probe(first.in_features, first.weight)
        spread = (x @ first.weight.T).std()
        if spread > 0:
            x = x * (2 / spread)  # here activations differ from each other and from straight lines
        y, calls = self._run(owner, x, training=False)
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
            return None
        order = [call.module for call in calls if call.module in self.linears]
        if sorted(map(id, order)) != sorted(map(id, linears)):
            raise Skip("its forward does not call each of its linear layers exactly once")
        found = self._match(order, owner, calls, x, y)
        far = x * (20 if x.dtype == torch.float16 else 500)  # here a clipped activation shows
        if not found.weights.explain(far, self._run(owner, far, training=False)[0], found.function):
            raise Skip("at large inputs its output differs from the one recomputed from its weights: it is clipped")
        after: list[nn.Module | float]
        after = [call.module for call in calls[_at(calls, order[-1]) + 1 :] if isinstance(call.module, nn.Dropout)]
        inner = calls[: _at(calls, order[-1])]
        hidden = [call.module for call in inner if isinstance(call.module, nn.Dropout)]
        dropout = hidden_dropout(hidden)
        if isinstance(owner, FF):
            dropout = owner.dropout
        elif not found.weights.explain(x, self._run(owner, x, training=True)[0], found.function):
            functional = self._functional(owner, order, found, probe(first.in_features, x, (16, 16)) * x.std())
            if dropout and functional[0]:
                raise Skip("it has more than one dropout on its hidden layer")
            dropout = dropout or functional[0]
            after += [rate for rate in functional[1:] if rate]
        if any(call.module in hidden for call in calls[: _at(calls, order[0])]):
            raise Skip("it has dropout on its inputs, which FFF does not support")
        check_dropout_place(inner, found, x)
        if len(after) > 1:
            raise Skip("it has more than one dropout on its outputs")
        return self._block(path, owner, order, found, dropout, after=after[0] if after else None)

    def _functional(self, owner: nn.Module, order: list[nn.Module], found: Match, x: Tensor) -> tuple[float, float]:
        """The rates of functional dropout on the hidden layer and on the output of a whole block."""
        y, calls = self._run(owner, x, training=True)
        inputs = [call.input for module in order for call in calls if call.module is module]
        rates = functional_rates(found.weights, found.function, x, inputs[:-1], inputs[-1], y)
        if rates is None or len(inputs) != len(order):
            raise Skip(_RANDOM)
        return rates

    def _with_more_inputs(self, owner: nn.Module) -> Block:
        """A block in a module that also takes, say, the residual (BLOOM, MPT): only the module's parts are replaced."""
        block = self._in_place(owner)
        if block is None:
            raise CannotRun("it takes more than one input, and is not two linear layers with an activation between")
        return block

    def _in_place(self, scope: nn.Module) -> Block | None:
        """A block with parts in different children of a larger module, at most two levels down."""
        if isinstance(scope, nn.ModuleList | nn.ModuleDict):
            return None
        near = {n: m for n, m in scope.named_modules() if n and n.count(".") < 2 and m not in self.covered}
        pairs = [
            (m, k)
            for (a, m), (b, k) in itertools.permutations([(n, m) for n, m in near.items() if m in self.linears], 2)
            if a.split(".")[0] != b.split(".")[0]
            and self.linears[m].out_features == self.linears[k].in_features
            and self.linears[m].in_features == self.linears[k].out_features
        ]
        if not pairs:
            return None
        widening = [pair for pair in pairs if self.linears[pair[0]].out_features > self.linears[pair[0]].in_features]
        if not self.inventory.shows_activation(scope, near.values()):
            if widening and sum(m in self.linears for m in near.values()) == 2:
                raise Skip("its activation is written inside a forward or has parameters, so it cannot be taken out")
            return None
        first = self.linears[pairs[0][0]]
        if any(linear.trouble for m in near.values() if (linear := self.linears.get(m))):
            if widening:
                self.inventory.check_removable(scope, [*widening[0]])
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
        parents = [self.inventory.parent(m) for m in modules]
        try:
            self.inventory.check_removable(scope, modules)
            holders = [*parents, scope]
            found = self._match(modules, scope, calls[i + 1 : j], up.input, down.output, holders)
        except Skip:
            if required:
                raise
            return None
        acting = [self.inventory.path_within(scope, m) for m in others]
        if not acting:
            functions = self.inventory.functions([*parents, scope])
            acting = [path for path, f in functions.items() if recognise(f) == found.activation][:1]
        if len(acting) > 1:
            raise Skip("more than an activation lies between its two linear layers")
        if not acting:
            raise Skip("its activation is written inside a forward and cannot be removed from there")
        if any(call.module is m for m in [*modules, *others] for call in [*calls[:i], *calls[j + 1 :]]):
            raise Skip("one of its linear layers, or its activation, is used twice in the same layer")
        again = self._calls(scope, probe(up.input.shape[-1], up.input), training=True)
        then = {call.module: call for call in again}
        if not found.weights.explain(then[up.module].input, then[down.module].output, found.function):
            raise Skip(_RANDOM)
        elsewhere = {call.module for call in [*calls[:i], *calls[j + 1 :]]}
        if any(m in elsewhere and m.p > 0 for m in drops):
            raise Skip("the dropout on its hidden layer is used elsewhere too")
        own = [m for m in drops if m not in elsewhere]
        check_dropout_place(calls[i + 1 : j], found, up.input)
        identity = [*acting, *(self.inventory.path_within(scope, m) for m in own), self.paths[down.module]]
        split = parents[0] is not parents[1]
        found = found._replace(form="split" if split else "in-layer")
        self.covered.update(modules)
        dropout = hidden_dropout(own)
        return self._block(self.paths[up.module], scope, modules, found, dropout, identity=identity)

    def _match(
        self,
        linears: list[nn.Module],
        owner: nn.Module,
        calls: list[Call],
        x: Tensor,
        y: Tensor,
        holders: Iterable[nn.Module] | None = None,
    ) -> Match:
        """Match y at x; candidate activations are the modules that were called, or else the holders' functions."""
        called = [c.module for c in calls if c.module not in self.linears]
        candidates: list[Any] = [m for m in called if not isinstance(m, nn.Dropout | nn.Identity)]
        if not candidates:
            candidates = list(self.inventory.functions(owner.modules() if holders is None else holders).values())
        if isinstance(owner, FF):
            candidates = [function(owner.activation)]
        return match([self.linears[m] for m in linears], candidates, x, y)

    def _block(
        self,
        path: str,
        scope: nn.Module,
        linears: list[nn.Module],
        found: Match,
        dropout: float,
        *,
        identity: Iterable[str] = (),
        after: nn.Module | float | None = None,
    ) -> Block:
        """The block that replaces these linear layers, in the order of their calls, by an FFF at `path`."""
        at = ""
        if not isinstance(found.activation, str):
            if isinstance(found.activation, nn.Module):
                at = self.inventory.path_within(scope, found.activation)
            else:
                functions = self.inventory.functions(scope.modules())
                at = next(path for path, value in functions.items() if value is found.activation)
        parts = [("up", linears[0]), ("down", linears[-1])] if len(linears) == 2 else []
        if len(linears) == 3:
            first_is_gate = found.weights.gate is self.linears[linears[0]].weight
            gate, up = linears[:2] if first_is_gate else linears[1::-1]
            parts = [("up", up), ("gate", gate), ("down", linears[2])]
        grads = {f"{role}.{n}": p.requires_grad for role, m in parts for n, p in m.named_parameters(recurse=False)}
        if found.form == "packed":
            grads |= {key.replace("up", "gate"): value for key, value in grads.items() if key.startswith("up")}
        return Block(
            path,
            found.form,
            found.weights,
            found.activation,
            tuple(self.paths[m] for m in linears),
            activation_at=at,
            identity=tuple(identity),
            dropout=dropout,
            dropout_after=self.paths[after] if isinstance(after, nn.Module) else after or "",
            requires_grad=grads,
        )

    def _run(self, scope: nn.Module, x: Tensor, *, training: bool) -> tuple[Any, list[Call]]:
        try:
            return run(scope, x, training=training)
        except Exception as error:  # foreign code, which may raise anything
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotRun(f"it could not be run on a probe of shape {tuple(x.shape)} ({told})") from error

    def _calls(self, scope: nn.Module, x: Tensor, *, training: bool) -> list[Call]:
        """The calls in a part of the model, run alone or, if that fails, in the model on the example."""
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


def _at(calls: list[Call], module: nn.Module) -> int:
    return next(i for i, call in enumerate(calls) if call.module is module)
