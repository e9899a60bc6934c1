"""What is trained, on what data and how (a case); and what came out (a result)."""

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
    """One training of one seed. Two cases are the same training if and only if they have the same key."""

    dataset: str
    model: str  # FF, MoE or FFF alone on flattened images; ViT-FF or ViT-FFF in a vision transformer
    width: int  # training width: all hidden neurons that give output
    leaf_width: int  # of a leaf or an expert; of FF, which has one block, the width
    depth: int  # of the tree; 0 where there is none
    recipe: str  # "paper" or "fastff"
    goal: Goal  # memorise, generalise, or measure both in one training
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()  # the recipe's numbers, sorted by name, with what a user changed

    @property
    def key(self) -> str:
        """The case as text: what a store finds it by. A setting that is as usual is left out, so that one which comes
        to the package later does not make old cases new."""
        told = dataclasses.asdict(self) | {"settings": shortened(self.settings)}
        return json.dumps(told, sort_keys=True, separators=(",", ":"))

    @property
    def group(self) -> "Case":
        """The case without its seed: those of one group train at once."""
        return dataclasses.replace(self, seed=-1)

    @property
    def title(self) -> str:
        """A short name for a progress bar."""
        return f"{self.dataset} {self.model} w={self.width} l={self.leaf_width} {self.recipe} {self.goal}"


@dataclass
class Result:
    """What a training came to. Accuracies are of the hard pass, in percent; what a goal does not measure is None."""

    case: Case
    M_A: float | None = None  # on training data, when it had stopped to improve
    G_A: float | None = None  # on test data, at the epoch of best validation accuracy
    ETT_M: int | None = None  # epochs until M_A was seen
    ETT: int | None = None  # epochs until the validation accuracy of G_A was seen
    soft_hard_gap: float | None = None  # accuracy of the mixture minus of the hard route, on the data of the goal
    leaves_used: int | None = None  # by training data; these three, of FFF alone, at that epoch or, for M_A, at the end
    smallest_share: float | None = None  # samples of the least used leaf, as a share of its fair number
    inference_size: int = 0
    epochs: int = 0  # trained in all
    seconds: float = 0.0  # of the whole group, divided by the number of its seeds
    history: dict[str, list[Any]] = field(default_factory=dict)  # per epoch: validation, entropy, leaves_used, ...


def name_of(cases: Sequence[Case]) -> str:
    """A name for the files of these cases, which train at once: others have another one."""
    text = "\n".join(case.key for case in cases)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
