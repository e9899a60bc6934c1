"""The numbers of a training: those of the paper, and ours."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import torch

from fastff.checks import check_int, check_number

POSITIVE = ("rate", "batch", "last_temperature", "final_temperature", "logit_std")
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Settings:
    """How a model is trained. What follows `twin_decay` is for FFF layers alone, most of it as in `fastff.Recipe`."""

    optimizer: Literal["sgd", "adam"] = "adam"
    rate: float = 3e-3  # learning rate
    schedule: Literal["constant", "cosine"] = "cosine"
    weight_decay: float = 0.0  # decoupled
    averaging: float = (
        0.0  # what is evaluated is a running mean of the weights; a step keeps this part of it, at first less
    )
    batch: int = 256
    precision: Literal["highest", "high"] = "highest"  # of products on a GPU: float32, or TF32
    epochs: int = 0  # at most
    steps: int = 0  # the same in steps of the optimiser, whatever the size of the data set
    patience: int = 0  # epochs without improvement after which a member stops; 0: none does
    patience_steps: int = 0  # the same in steps
    plateau: int = 0  # epochs without improvement after which a member's rate is halved; 0: never
    plateau_of: Literal["training", "validation"] = "training"
    standardise: bool = True  # inputs have mean 0 and deviation 1 (inputs.py); otherwise they are in [0, 1]
    by_pixel: bool = False  # each pixel is standardised by itself
    input_dropout: float = 0.0  # so many of the inputs are 0 in a step, others for each sample; the rest grow
    augment: float = 0.0  # how strongly images are changed, as a multiple of the usual (augment.py); 0: not
    mirror: bool = False  # images are flipped left to right with probability 1/2, and never upside down
    taught: float = 0.0  # a transformer starts as a dense twin that had so much of its epochs: teacher.py
    twin_decay: float = 0.0  # weight decay of that twin
    balanced: bool = True  # start from a balanced tree, and rebalance it before every evaluation
    frozen: bool = False  # the tree does not train: the paper's h = infinity
    decision: Literal["soft", "straight_through"] = "straight_through"
    transposition: float = 0.0
    noise: float = 0.8
    sharing: float = 0.0
    balance: float = 0.3
    hardening: float = 0.0
    reduction: Literal["mean", "sum", "path"] = "path"
    last_temperature: float = 1.0
    final_temperature: float = 1000.0  # temperature of the trained model
    logit_std: float = 1.0
    min_share: float = 0.1

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Settings).items():
            value = getattr(self, name)
            if choices := get_args(hint):
                if value not in choices:
                    raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
            elif hint is float:  # trainings are in float32
                check_number(name, value, TINY if name in POSITIVE else 0, HUGE)
            elif hint is int:
                check_int(name, value, 1 if name in POSITIVE else 0)
        if not self.averaging < 1:
            raise ValueError(f"averaging must be below 1, at which the mean would never move; got {self.averaging}.")
        if not self.input_dropout < 1:
            raise ValueError(f"input_dropout must be below 1, which leaves no input; got {self.input_dropout}.")
        if not self.augment < 10:
            raise ValueError(f"augment must be below 10, at which images would shrink to nothing; got {self.augment}.")
        if not self.transposition < 1:
            raise ValueError(f"transposition must be below 1, which would swap all; got {self.transposition}.")
        for name in ("taught", "sharing", "min_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be from 0 to 1; got {getattr(self, name)}.")

    def items(self) -> tuple[tuple[str, Any], ...]:
        """All settings, sorted by name: for a Case."""
        return tuple(sorted(dataclasses.asdict(self).items()))

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """With some of the settings changed; unknown names and values of another kind are errors."""
        kinds = {field.name: type(getattr(self, field.name)) for field in dataclasses.fields(self)}
        made = {}
        for name, value in changes.items():
            if name not in kinds:
                raise ValueError(f"a recipe has no setting {name!r}; it has {', '.join(kinds)}.")
            if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
                kind = "true or false" if kinds[name] is bool else f"of type {kinds[name].__name__}"
                raise ValueError(f"{name} must be {kind}; got {value!r}.")
            made[name] = kinds[name](value)
        # Of two ways to say how long, the one that is changed counts.
        for ours, other in (("epochs", "steps"), ("patience", "patience_steps")):
            if made.get(ours) and made.get(other):
                raise ValueError(f"{ours} and {other} are two ways to say how long; set one of them.")
            if ours in made and other not in made:
                made[other] = 0
            elif other in made and ours not in made:
                made[ours] = 0
        changed = dataclasses.replace(self, **made)
        if not changed.standardise:
            if made.get("by_pixel"):
                raise ValueError("by_pixel is a way to standardise inputs: it needs standardise=true.")
            changed = dataclasses.replace(changed, by_pixel=False)
        if not changed.taught:  # there is no twin
            changed = dataclasses.replace(changed, twin_decay=0.0)
        if not changed.steps and not changed.epochs:
            raise ValueError("a training needs steps or epochs; got 0 of both.")
        return changed


def of_trees() -> dict[str, Any]:
    """The settings for FFF layers alone, with their defaults."""
    names = [field.name for field in dataclasses.fields(Settings)]
    return {name: getattr(Settings(), name) for name in names[names.index("twin_decay") + 1 :]}


def shortened(items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Those of a case's settings that are not the defaults of `Settings`."""
    defaults = dict(Settings().items())
    return {name: value for name, value in items if name not in defaults or value != defaults[name]}


def completed(changes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A case's settings from those that are not the defaults, each of the type that it has there.

    Others than those of `Settings` stay as they are.
    """
    defaults = dict(Settings().items())
    if not changes.keys() <= defaults.keys():
        return tuple(sorted(changes.items()))
    return tuple((name, type(default)(changes.get(name, default))) for name, default in defaults.items())


# Ours, the same for every cell. To memorise, weight decay and transposition are left out.
FASTFF = Settings(schedule="constant", weight_decay=0.1, averaging=0.998, batch=512, steps=16800, input_dropout=0.2)
# The paper's, as far as it says; the rest is our choice. It does not say when a training "stops improving" in Table 1
# (3000 steps are 15 epochs of MNIST and 120 of USPS), nor how inputs are scaled, nor over what the hardening loss is
# averaged: h = 3 is far too much for the sum it writes, and the authors' code takes the mean over samples and nodes.
PAPER = Settings(
    optimizer="sgd",
    rate=0.2,
    schedule="constant",
    steps=21000,
    patience_steps=3000,
    standardise=False,
    balanced=False,
    decision="soft",
    noise=0.0,
    balance=0.0,
    hardening=3.0,
    reduction="mean",
    final_temperature=1.0,
    min_share=0.0,
)
