"""A transformer with trees that starts as a dense one of the same training width, and learns what that one answers.

The dense transformer is trained first, by the same settings but for its length and its weight decay. Its blocks are
replaced by trees that fit them (`fastff.replace_`, init="data"); then the whole transformer trains on, its labels being
the answers of the dense one. A dense transformer that has been trained stays in a file, so that it teaches trees of all
leaf widths.
"""

import copy
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fastff.surgery import replace_

from . import resume
from .build import build
from .resume import Damaged
from .runs import Case, name_of
from .settings import of_trees


def is_taught(case: Case) -> bool:
    """Whether a case needs a dense transformer first."""
    return case.model == "ViT-FFF" and bool(dict(case.settings).get("taught"))


def dense(case: Case) -> Case:
    """The dense transformer of a case that is taught: how it is trained does not tell whom it teaches."""
    settings = dict(case.settings)
    own = settings | of_trees() | {"weight_decay": settings["twin_decay"], "taught": 0.0, "twin_decay": 0.0}
    for name in ("epochs", "steps"):
        own[name] = math.ceil(round(settings["taught"] * settings[name], 6))  # 0.07 * 100 is a little more than 7
    return dataclasses.replace(case, model="ViT-FF", leaf_width=case.width, depth=0, settings=tuple(own.items()))


def path_of(folder: Path, case: Case) -> Path:
    """The file of a dense transformer, trained."""
    return folder / f"{name_of([case])}.dense.pt"


def blamed(cases: Sequence[Case], reasons: Mapping[Case, str]) -> dict[Case, str]:
    """Why cases whose teachers train at once cannot be taught: by the teacher's own divergence, or by another's."""
    made = {}
    for case in cases:
        twin = dense(case) if dense(case) in reasons else next(iter(reasons))
        made[case] = f"the teacher, {twin.title} seed {twin.seed}, diverged: {reasons[twin]}"
    return made


def load(folder: Path, case: Case, image: tuple[int, ...], classes: int, device: str) -> nn.Module:
    """A dense transformer from its file, in eval()."""
    model = build(case, image, classes).to(device)
    path = path_of(folder, case)
    try:
        model.load_state_dict(resume.load(path, device))
    except (Damaged, RuntimeError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is no dense transformer of {case.title}. Remove it: it is trained again.") from error
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise Damaged(f"{path} has weights that are not finite. Remove it: it is trained again.")
    return model.eval().requires_grad_(False)


class Teachers:
    """The dense transformers of a few cases."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self._run = [torch.compile(model) if next(model.parameters()).is_cuda else model for model in models]

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        """Each one's probabilities of the classes at its images x (members, batch, ...): (members, batch, classes)."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            found = [run(images) for run, images in zip(self._run, x, strict=True)]
        return torch.stack(found).float().softmax(-1)

    def student(self, i: int, case: Case, x: Tensor) -> nn.Module:
        """A copy of one of them with trees in it, fitted to what images x make of its blocks."""
        model = copy.deepcopy(self.models[i]).requires_grad_()
        replace_(
            model,
            depth=case.depth,
            leaf_width=case.leaf_width,
            init="data",
            data=list(x.split(256)),
            samples=sys.maxsize,
            decision=dict(case.settings)["decision"],
        )
        return model
