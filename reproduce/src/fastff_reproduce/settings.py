"""The settings of a training: their names, defaults and limits. Their values in each experiment are in recipes.py."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import torch

from fastff.checks import check_int, check_number

POSITIVE = ("rate", "batch", "training_temperature", "final_temperature", "logit_std", "fit_images")
OF_TEACHERS = ("teacher_rate", "teacher_decay", "fit_images", "fit_steps")  # without a teacher they change nothing
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Settings:
    """How a model is trained. Settings after `teacher_decay` are for FFF layers, most of them as in `fastff.Recipe`."""

    optimizer: Literal["sgd", "adam"] = "adam"
    rate: float = 3e-3  # learning rate
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup: int = 0  # epochs in which the rate rises linearly from 0, before its schedule
    weight_decay: float = 0.0  # decoupled
    averaging: float = 0.0  # decay of a running mean of the weights, which is what is evaluated; 0: none
    batch: int = 256
    precision: Literal["highest", "high"] = "highest"  # of matrix products on a GPU: float32, or TF32
    epochs: int = 0  # the longest training; 0: `steps` says it
    steps: int = 0  # the same in optimizer steps, for data sets of any size
    evaluate_every: int = 0  # epochs from one evaluation to the next; 0: 1, or more if they are short (loop.py)
    patience: int = 0  # epochs without improvement after which a seed stops; 0: never
    patience_steps: int = 0  # the same in steps
    plateau: int = 0  # epochs without improvement after which a seed's rate is halved; 0: never
    plateau_of: Literal["training", "validation"] = "training"
    standardise: bool = True  # inputs have mean 0 and standard deviation 1 (samples.py); otherwise they are in [0, 1]
    by_pixel: bool = False  # standardise each pixel separately
    input_dropout: float = 0.0  # dropout on the inputs
    augment: float = 0.0  # strength of random image changes, 1: as in augment.py; 0: none
    mirror: bool = False  # flip images left to right with probability 1/2, never upside down
    shift: float = 0.0  # move images by whole pixels, up to this share of their width and height
    cutmix: float = 0.0  # share of the images that get a box of another one (mixing.py)
    mixup: float = 0.0  # share of the other images that are blended with another one
    smoothing: float = 0.0  # share of a label that is spread over all classes; a teacher's answers are not smoothed
    teacher_share: float = 0.0  # train a dense teacher first, for this multiple of the epochs (teacher.py); 0: none
    teacher_rate: float = 0.0  # the teacher's learning rate; 0: the same
    teacher_decay: float = 0.0  # the teacher's weight decay
    balanced: bool = True  # start from a balanced tree, and rebalance it before every evaluation
    frozen: bool = False  # the tree does not train: the paper's h = infinity
    decision: Literal["soft", "straight_through"] = "straight_through"
    transposition: float = 0.0
    noise: float = 0.8
    sharing: float = 0.0
    balance: float = 0.3
    hardening: float = 0.0
    reduction: Literal["mean", "sum", "path"] = "path"
    training_temperature: float = 1.0  # in the last epoch; it rises from 1
    final_temperature: float = 1000.0  # of the trained model
    logit_std: float = 1.0
    min_share: float = 0.1
    fit_images: int = 2048  # with a teacher: training images to which its trees are fitted
    fit_steps: int = 0  # with a teacher: steps in which each tree's leaves learn the outputs of the block it replaces

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
            raise ValueError(f"averaging must be below 1, where the mean would never move; got {self.averaging}.")
        if not self.input_dropout < 1:
            raise ValueError(f"input_dropout must be below 1, which leaves no input; got {self.input_dropout}.")
        if not self.augment < 10:
            raise ValueError(f"augment must be below 10, where images would shrink to nothing; got {self.augment}.")
        if not self.transposition < 1:
            raise ValueError(f"transposition must be below 1, which would swap all children; got {self.transposition}.")
        if not self.smoothing < 1:
            raise ValueError(f"smoothing must be below 1, which leaves nothing of a label; got {self.smoothing}.")
        for name in ("shift", "cutmix", "mixup", "sharing", "min_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be from 0 to 1; got {getattr(self, name)}.")

    def items(self) -> tuple[tuple[str, Any], ...]:
        """All settings, sorted by name: for a Case."""
        return tuple(sorted(dataclasses.asdict(self).items()))

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """A copy with some settings changed; unknown names and values of another type are errors."""
        kinds = {field.name: type(getattr(self, field.name)) for field in dataclasses.fields(self)}
        made = {}
        for name, value in changes.items():
            if name not in kinds:
                raise ValueError(f"unknown setting {name!r}; choose from {', '.join(kinds)}.")
            if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
                kind = "true or false" if kinds[name] is bool else f"of type {kinds[name].__name__}"
                raise ValueError(f"{name} must be {kind}; got {value!r}.")
            made[name] = kinds[name](value)
        # Epochs and steps are two units of one length: a new value in one replaces the other.
        for ours, other in (("epochs", "steps"), ("patience", "patience_steps")):
            if made.get(ours) and made.get(other):
                raise ValueError(f"{ours} and {other} set the same length; set one of them.")
            if ours in made and other not in made:
                made[other] = 0
            elif other in made and ours not in made:
                made[ours] = 0
        changed = dataclasses.replace(self, **made)
        if not changed.standardise:
            if made.get("by_pixel"):
                raise ValueError("by_pixel needs standardise=true; got standardise=false.")
            changed = dataclasses.replace(changed, by_pixel=False)
        if not changed.teacher_share:
            plain = Settings()
            changed = dataclasses.replace(changed, **{name: getattr(plain, name) for name in OF_TEACHERS})
        if not changed.steps and not changed.epochs:
            raise ValueError("a training needs steps or epochs; both are 0. Set one of them.")
        return changed


def of_trees() -> dict[str, Any]:
    """The settings for FFF layers alone, with their defaults."""
    names = [field.name for field in dataclasses.fields(Settings)]
    return {name: getattr(Settings(), name) for name in names[names.index("teacher_decay") + 1 :]}


def shortened(items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """A case's settings that differ from the defaults of `Settings`."""
    defaults = dict(Settings().items())
    return {name: value for name, value in items if name not in defaults or value != defaults[name]}


def completed(changes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """All settings of a case from those that differ from the defaults, each with the type it has in `Settings`.

    If a name is unknown to `Settings`, nothing is added.
    """
    defaults = dict(Settings().items())
    if not changes.keys() <= defaults.keys():
        return tuple(sorted(changes.items()))
    return tuple((name, type(default)(changes.get(name, default))) for name, default in defaults.items())
