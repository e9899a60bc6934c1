"""Compare a model's outputs before and after surgery: it must still run, and an exact surgery must not change them.

A verified block may sit in a model that uses it in other ways: with other arguments, or with other operations between
its parts, which a probe does not show. So the model runs again, on the example if there is one, and so does every
larger layer in which parts were replaced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Block
from .trace import probe, run_example, tensors_of
from .trace import run as run_part


class OutputCheck:
    """Records a model's outputs when it is created; `check` compares.

    The model is in eval(), where nothing is random, with the soft pass of its FFF layers: the one that can be exact.
    """

    def __init__(self, model: nn.Module, blocks: list[Block], example: Any) -> None:
        self.before: list[tuple[str, Callable[[], Any], list[Tensor]]] = []
        if example is not None:
            self._add("the model", lambda: run_example(model, example, training=False, soft=True)[0])
        for block in blocks:
            if block.identity:
                scope = model.get_submodule(_common(block.linears))
                self._add(block.name, partial(_alone, scope, probe(block.in_features, block.weights.up)))

    def _add(self, name: str, run: Callable[[], Any]) -> None:
        try:
            self.before.append((name, run, tensors_of(run())))
        except Exception:  # foreign code, which may raise anything: cannot run alone
            return

    def check(self, exact: bool) -> None:
        """Raise unless everything still runs with outputs of the same shapes and, if `exact`, the same values."""
        for name, run, before in self.before:
            leave = "Exclude the block with filter=."
            try:
                after = tensors_of(run())
            except Exception as error:
                raise ValueError(f"{name} does not run with FFF layers: {error}. {leave}") from error
            shapes = [[tuple(t.shape) for t in tensors] for tensors in (before, after)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name} returns {shapes[1]} instead of {shapes[0]} after the replacement. {leave}")
            for old, new in zip(before, after, strict=True):
                if exact and old.is_floating_point() and not _same(old, new):
                    raise ValueError(f"{name} returns other values after an exact replacement. {leave}")


def _alone(scope: nn.Module, x: Tensor) -> Any:
    return run_part(scope, x, training=False, soft=True)[0]


def _same(old: Tensor, new: Tensor) -> bool:
    eps = torch.finfo(old.dtype).eps
    a, b = old.double(), new.double()
    return bool((a - b).norm() <= eps**0.5 * a.norm()) or not bool(a.isfinite().all())


def _common(paths: tuple[str, ...]) -> str:
    """The path of the smallest module that contains all of these."""
    parts = []
    for names in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        parts.append(names[0])
    return ".".join(parts)
