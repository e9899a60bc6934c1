"""Problems of a tree, in the paper's words, and the settings that help.

- Collapse: nearly all inputs go to a few leaves. The paper does not name it; its own recipe shows it here.
- Overfragmentation: too many regions for the data. Leaves overfit what little they see (localised overfitting).
- Shrinking batches: a leaf sees too little of a batch for a good gradient.
- Soft boundaries: decisions are not clear, so the hard pass differs from the soft one.
"""

from dataclasses import dataclass

import torch

from ..checks import check_int
from .statistics import Statistics

COLLAPSED = 0.25  # of the leaves, counted by the entropy of their shares
FEW_INPUTS = 16  # of a leaf in the whole data
FEW_IN_BATCH = 8  # of a leaf in a batch; LocalAdam gathers more before it steps
OVERFITTED = 1.5  # the loss on held-out data over the loss on training data
SOFT = 0.10  # nats; the paper: below it, rounding decisions is nearly free


@dataclass(frozen=True)
class Finding:
    """One problem of a tree, and what to do about it."""

    problem: str  # "collapse", "overfragmentation", "shrinking batches" or "soft boundaries"
    evidence: str
    remedy: str  # what the paper advises
    setting: str  # how to do it with this package

    def __str__(self) -> str:
        return f"{self.problem}: {self.evidence} {self.remedy} Setting: {self.setting}"


def diagnose(
    training: Statistics, held_out: Statistics | None = None, *, batch_size: int | None = None
) -> list[Finding]:
    """The problems of a tree, most severe first; an empty list if none is found.

    Args:
        training: statistics of the training data.
        held_out: statistics of other data. If both have a loss, localised overfitting is found too.
        batch_size: inputs of the layer in a training batch: samples times positions. Default: as in `training`'s data.
    """
    if held_out is not None and held_out.depth != training.depth:
        raise ValueError(f"both statistics must be of one layer; got depths {training.depth} and {held_out.depth}.")
    size = training.batch_size if batch_size is None else check_int("batch_size", batch_size, 1)
    found = [_collapse(training), _fragments(training, held_out), _batches(training, size), _soft(training)]
    return [finding for finding in found if finding is not None]


def _collapse(found: Statistics) -> Finding | None:
    leaves, effective = found.num_leaves, found.effective_leaves
    # The fewest leaves that a tree can use is one, so a small tree needs a bound above it.
    if leaves == 1 or effective > max(COLLAPSED * leaves, 1.25):
        return None
    fullest = float(found.leaf_count.max()) / found.samples
    return Finding(
        "collapse",
        f"the inputs use {effective:.1f} of {leaves} leaves effectively; {len(found.dead_leaves())} are dead, and the "
        f"fullest takes {fullest:.0%}.",
        "The paper has no remedy. Start from a balanced tree and keep it balanced.",
        "fastff.Recipe(model, data, steps=...) with balance=0.3 or more; or fastff.rebalance_(model, data).",
    )


def _fragments(training: Statistics, held_out: Statistics | None) -> Finding | None:
    leaves = training.num_leaves
    evidence = []
    used = training.leaf_count[training.leaf_count > 0]
    few = int((used < FEW_INPUTS).sum())
    if leaves > 1 and 2 * few > len(used):
        evidence.append(f"{few} of {len(used)} used leaves see fewer than {FEW_INPUTS} inputs of the whole data.")
    if leaves > 1 and held_out is not None and held_out.loss is not None and training.loss is not None:
        both = torch.stack([training.loss, held_out.loss])[:, leaves - 1 :]
        both = both[:, both.isfinite().all(0)]
        worse = int((both[1] > OVERFITTED * both[0]).sum())
        if 2 * worse > both.shape[1]:
            told = f"the held-out loss exceeds {OVERFITTED:g} times the training loss"
            evidence.append(f"{told} in {worse} of {both.shape[1]} leaves.")
    if not evidence:
        return None
    return Finding(
        "overfragmentation",
        " ".join(evidence),
        "The paper transposes children at random, so that leaves also see their neighbours' inputs.",
        "Recipe(transposition=0.05), Recipe(sharing=0.5) or a smaller depth with a larger leaf_width in FFF.",
    )


def _batches(found: Statistics, batch_size: int) -> Finding | None:
    leaves = found.num_leaves
    share = float(found.leaf_count[found.leaf_count > 0].double().median()) / found.samples
    inputs = batch_size * share
    if leaves == 1 or inputs >= FEW_IN_BATCH:
        return None
    return Finding(
        "shrinking batches",
        f"a batch of {batch_size} inputs gives the median leaf {inputs:.1f} of them.",
        "The paper advises larger batches, gradient accumulation or a smaller learning rate; in full generality, "
        "localised optimisation.",
        "fastff.optim.LocalAdam(model, local_batch=32), or LocalSGD: each leaf steps when it has seen enough.",
    )


def _soft(found: Statistics) -> Finding | None:
    nodes = found.num_leaves - 1
    entropy, count = found.entropy[:nodes], found.count[:nodes].double()
    reached = count > 0
    mean = float((entropy[reached] * count[reached]).sum() / count.sum().clamp(min=1))
    if mean <= SOFT:
        return None
    return Finding(
        "soft boundaries",
        f"the mean entropy of a decision is {mean:.2f} nats; up to {SOFT:.2f}, rounding is nearly free.",
        "The paper adds a hardening loss.",
        'Recipe\'s default, decision="straight_through", needs none; otherwise Recipe(hardening=3.0), or add '
        "3 * fastff.hardening_loss(model) to your loss.",
    )
