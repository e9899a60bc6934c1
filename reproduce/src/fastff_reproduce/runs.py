"""A case is one training: model, data, settings and seed. A result has its measured numbers."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .settings import shortened

Goal = Literal["M_A", "G_A", "both"]
GOALS = get_args(Goal)
MODELS = ("FF", "MoE", "FFF", "ViT-FF", "ViT-FFF")


@dataclass(frozen=True)
class Case:
    """One training of one seed. Two cases are the same training if and only if their keys are equal."""

    dataset: str
    model: str  # FF, MoE or FFF alone on flattened images; ViT-FF or ViT-FFF in a vision transformer
    width: int  # training width: all hidden neurons except nodes
    leaf_width: int  # of a leaf or an expert; for FF, the width
    depth: int  # of the tree; 0 without one
    recipe: str  # "paper" or "fastff"
    goal: Goal  # measure memorisation, generalisation, or both in one training
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()  # of the recipe, with the user's changes, sorted by name

    @property
    def key(self) -> str:
        """The case as text, by which a store finds it. Settings with default values are left out, so that a new setting
        does not change old keys."""
        told = dataclasses.asdict(self) | {"settings": shortened(self.settings)}
        return json.dumps(told, sort_keys=True, separators=(",", ":"))

    @property
    def group(self) -> "Case":
        """The case without its seed: cases of one group can train at once."""
        return dataclasses.replace(self, seed=-1)

    @property
    def title(self) -> str:
        """A short name for a progress bar."""
        return f"{self.dataset} {self.model} w={self.width} l={self.leaf_width} {self.recipe} {self.goal}"


@dataclass
class Result:
    """The numbers of a training. Accuracies are in percent, by the hard pass; None if the goal does not measure it."""

    case: Case
    M_A: float | None = None  # the best accuracy on training data
    G_A: float | None = None  # on test data, at the epoch of best validation accuracy
    ETT_M: int | None = None  # epochs until M_A
    ETT: int | None = None  # epochs until the best validation accuracy
    soft_hard_gap: float | None = None  # soft minus hard accuracy, on the data of the goal
    leaves_used: int | None = None  # by training data. These three: FFF alone, at the epoch of G_A; for M_A at the end
    smallest_share: float | None = None  # samples in the least used leaf, over samples / leaves
    inference_size: int = 0
    epochs: int = 0  # trained in total
    seconds: float = 0.0  # of the whole part, divided by its number of seeds
    history: dict[str, list[Any]] = field(default_factory=dict)  # per epoch: validation, entropy, leaves_used, ...


def name_of(cases: Sequence[Case]) -> str:
    """A file name for these cases, which train at once; different cases have different names."""
    text = "\n".join(case.key for case in cases)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
