"""A dense transformer as the teacher of one with trees, of the same training width.

The teacher trains first, with the same settings except its length, rate and weight decay, and without averaging. A copy
of it becomes the student: trees fitted to its blocks replace them (`fastff.replace_`, init="data"), their leaves may
learn the outputs of these blocks (`fastff.distill_`), and the whole model trains on the teacher's answers instead of
the labels. The teacher answers the very images that the student sees: changed at random, and mixed. A trained teacher
stays in a file and teaches trees of all leaf widths.
"""

import copy
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fastff.surgery import distill_, replace_

from . import resume
from .build import build
from .resume import Damaged
from .runs import Case, name_of
from .settings import of_trees

FIT_BATCH = 4096  # tokens in a step of fit_steps


def has_teacher(case: Case) -> bool:
    """Whether a case needs a teacher."""
    return case.model == "ViT-FFF" and bool(dict(case.settings).get("teacher_share"))


def teacher_of(case: Case) -> Case:
    """The teacher of a case. Its settings do not depend on the student's leaf width or tree settings."""
    settings = dict(case.settings)
    own = settings | of_trees() | {"weight_decay": settings["teacher_decay"], "averaging": 0.0}
    own |= {"rate": settings["teacher_rate"] or settings["rate"]}
    own |= {"teacher_share": 0.0, "teacher_rate": 0.0, "teacher_decay": 0.0}
    for name in ("epochs", "steps"):
        length = round(settings["teacher_share"] * settings[name], 6)  # 0.07 * 100 is a little more than 7
        own[name] = math.ceil(length)
    return dataclasses.replace(case, model="ViT-FF", leaf_width=case.width, depth=0, settings=tuple(own.items()))


def path_of(folder: Path, case: Case) -> Path:
    """The file of a trained teacher."""
    return folder / f"{name_of([case])}.dense.pt"


def blamed(cases: Sequence[Case], reasons: Mapping[Case, str]) -> dict[Case, str]:
    """Why cases cannot train whose teachers trained together: their own teacher diverged, or another one did."""
    made = {}
    for case in cases:
        cause = teacher_of(case) if teacher_of(case) in reasons else next(iter(reasons))
        made[case] = f"the teacher, {cause.title} seed {cause.seed}, diverged: {reasons[cause]}"
    return made


def load(folder: Path, case: Case, image: tuple[int, ...], classes: int, device: str) -> nn.Module:
    """A trained teacher from its file, in evaluation mode."""
    model = build(case, image, classes).to(device)
    path = path_of(folder, case)
    try:
        model.load_state_dict(resume.load(path, device))
    except (Damaged, RuntimeError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is not the teacher {case.title}. Remove it: the teacher is trained again.") from error
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise Damaged(f"{path} has weights that are not finite. Remove it: the teacher is trained again.")
    return model.eval().requires_grad_(False)


class Teachers:
    """The trained teachers of a few cases."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self._run = [torch.compile(model) if next(model.parameters()).is_cuda else model for model in models]

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        """The class probabilities of each teacher for its images x (members, batch, ...): (members, batch, classes)."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            found = [run(images) for run, images in zip(self._run, x, strict=True)]
        return torch.stack(found).float().softmax(-1)

    def student(self, i: int, case: Case, x: Tensor) -> nn.Module:
        """A copy of teacher i with trees as blocks, fitted to the inputs and outputs of its blocks on images x."""
        model, settings = copy.deepcopy(self.models[i]).requires_grad_(), dict(case.settings)
        images = list(x.split(256))
        report = replace_(
            model,
            depth=case.depth,
            leaf_width=case.leaf_width,
            init="data",
            data=images,
            samples=sys.maxsize,
            decision=settings["decision"],
        )
        if steps := settings["fit_steps"]:
            distill_(model, report, images, steps=steps, batch=FIT_BATCH, samples=sys.maxsize, progress=False)
        return model
