"""The paper's user manual as a function: the leaf width and depth that replace a feedforward layer of width w.

Case 1, "I want faster inference": choose a leaf width l << w that fits the budget, then depths d >= log2(w / l).
Case 2, "I want a partition of the input space": choose d with 2**d regions, then leaf widths l >= w 2**-d.

    plan(768, 768, 3072, latency_us=20)
    plan(768, 768, 3072, regions=64)

The sizes are the paper's arithmetic. The times are measured on this machine, in turn with the dense layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..baselines import FF
from ..checks import check_int
from .case import Case, lacking
from .hardware import lack_of_memory
from .measuring import together
from .models import seconds_of, working_bytes
from .results import Measurement


@dataclass(frozen=True)
class Choice:
    """One way to build the layer. Sizes are in neurons, as in the paper."""

    leaf_width: int
    depth: int
    training_width: int
    training_size: int
    inference_width: int
    inference_size: int
    parameter_bytes: int
    time_us: float | None = None  # the median of a call
    p20_us: float | None = None
    p80_us: float | None = None
    dense_us: float | None = None  # the dense layer of width w, timed in turn with this one
    speedup: float | None = None  # over the dense layer, by the p20 of both: other processes only ever add time
    other_load: float | None = None  # cores that other processes kept busy meanwhile
    fits: bool | None = None  # None without a budget
    note: str = ""  # why it was not measured


def plan(
    in_features: int,
    out_features: int,
    width: int,
    *,
    latency_us: float | None = None,
    speedup: float | None = None,
    neurons: int | None = None,
    regions: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    activation: str = "relu",
    node_width: int = 1,
    deeper: int = 1,
    timed: bool = True,
    seconds: float = 0.1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Choice]:
    """The sizes of an FFF that can replace a dense layer of this width, best first.

    Args:
        latency_us: the maximum time of one call on the batch, in microseconds.
        speedup: the minimum speed-up over the dense layer.
        neurons: the maximum inference size, depth * node_width + leaf_width.
        regions: the minimum number of leaves, for a partition of the input space (the paper's Case 2).
        deeper: the number of levels to try beyond those that the width needs (the paper's Case 1).
        timed: whether to measure; a latency or a speed-up needs it.
        seconds: the approximate timing budget per choice. All choices and the dense layer are timed alternately.
        progress: called as progress(done, total) after each choice is built and checked.

    A choice fits if it meets all budgets. Those that fit come first, the widest leaf before the others, because a leaf
    that is too narrow for its region costs accuracy. The rest follows, the nearest to the budget first.
    """
    check_int("width", width, 1)
    for name, value in {"latency_us": latency_us, "speedup": speedup, "neurons": neurons, "regions": regions}.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive; got {value}.")
    if (latency_us is not None or speedup is not None) and not timed:
        raise ValueError(
            "latency_us and speedup have to be measured; got timed=False. Leave timed=True, or give neurons."
        )
    cases = [
        Case(in_features, out_features, leaf_width, depth, batch, dtype, device, node_width, activation)
        for leaf_width, depth in sizes(width, regions, deeper)
    ]
    lack = _lack_of_dense(cases[0], width)
    dense = _dense(cases[0], width) if timed and not lack else None
    if dense:
        # Enough for some calls of the dense layer, however slow.
        x = torch.zeros(batch, in_features, device=device, dtype=cases[0].torch_dtype)
        with torch.inference_mode():
            seconds = max(seconds, 10 * min(seconds_of(dense, x) for _ in range(2)))
    choices = [
        Choice(
            case.leaf_width,
            case.depth,
            case.training_width,
            (case.num_leaves - 1) * node_width + case.training_width,
            case.leaf_width,
            case.depth * node_width + case.leaf_width,
            case.parameter_bytes,
        )
        for case in cases
    ]
    if dense:
        # A size over the budget of neurons cannot fit it, whatever its time: only the nearest of them is measured.
        most = max(neurons or math.inf, min(choice.inference_size for choice in choices))
        measured = [i for i, choice in enumerate(choices) if choice.inference_size <= most]
        found = together([cases[i] for i in measured], dense, seconds=seconds, progress=progress)
        choices = [replace(choice, note="over the budget") for choice in choices]
        for i, each in zip(measured, found, strict=True):
            choices[i] = _timed(replace(choices[i], note=""), each)
    elif timed:
        choices = [
            replace(choice, note=lacking(case) or f"the dense layer to compare with {lack}")
            for choice, case in zip(choices, cases, strict=True)
        ]
    return rank(choices, latency_us, speedup, neurons)


def recommend(choices: list[Choice], regions: int | None = None) -> tuple[Choice, str]:
    """The choice to take, and why. Raises `MemoryError` if no choice can be measured."""
    if any(choice.note for choice in choices):  # some could not be built
        built = [choice for choice in choices if choice.time_us is not None]
        if not built:
            raise MemoryError(f"no layer can be measured here: {choices[0].note}. Choose a smaller width or batch.")
        choices = built
    first = choices[0]
    if first.fits is not None:
        return first, "the widest leaf that fits the budget" if first.fits else "the nearest to the budget"
    if regions is not None:
        return first, "the narrowest leaf that keeps the width"
    best = max((choice.speedup or 0.0 for choice in choices), default=0.0)
    if not best:
        return min(choices, key=lambda choice: choice.inference_size), "the smallest inference size"
    chosen = next(choice for choice in choices if choice.speedup and choice.speedup >= best / 2)
    return chosen, "the widest leaf with half of the best speed-up or more"


def sizes(width: int, regions: int | None = None, deeper: int = 1) -> list[tuple[int, int]]:
    """The (leaf_width, depth) pairs to consider.

    Case 1: for every depth the narrowest leaf with 2**depth * leaf_width >= width, and that leaf in deeper trees.
    Case 2: the least depth with enough leaves; the narrowest leaf for the width, and wider ones.
    """
    if regions is not None:
        depth = (regions - 1).bit_length()
        least = -(-width >> depth)
        return [(least * factor, depth) for factor in (1, 2, 4, 8)]
    found: dict[tuple[int, int], None] = {}
    for depth in range(1, max(2, (width - 1).bit_length() + 1)):
        for extra in range(deeper + 1):
            found[-(-width >> depth), depth + extra] = None
    return sorted(found, key=lambda size: (-size[0], size[1]))


def rank(
    choices: list[Choice], latency_us: float | None = None, speedup: float | None = None, neurons: int | None = None
) -> list[Choice]:
    """The choices with their `fits`, best first."""
    if latency_us is None and speedup is None and neurons is None:
        return choices
    marked = []
    for choice in choices:
        fits = (
            not choice.note
            and (neurons is None or choice.inference_size <= neurons)
            and (latency_us is None or (choice.time_us is not None and choice.time_us <= latency_us))
            and (speedup is None or (choice.speedup is not None and choice.speedup >= speedup))
        )
        marked.append(replace(choice, fits=fits))
    timed = latency_us is not None or speedup is not None

    def order(choice: Choice) -> tuple[float, ...]:
        if choice.fits:
            return (0, -choice.leaf_width, choice.depth)
        short = math.inf if choice.time_us is None else choice.time_us
        return (1, short if timed else choice.inference_size, choice.inference_size)

    return sorted(marked, key=order)


def _lack_of_dense(case: Case, width: int) -> str:
    """Why the dense layer, with an input, an output and hidden layers, does not fit into memory; empty if it does."""
    whole = replace(case, leaf_width=width, depth=0)
    values = case.batch * (case.in_features + case.out_features) * case.itemsize
    return lack_of_memory(whole.parameter_bytes + values + working_bytes(whole, "FF"), case.device)


def _dense(case: Case, width: int) -> FF:
    with torch.random.fork_rng():
        return FF(
            case.in_features,
            case.out_features,
            width=width,
            activation=case.activation,
            device=torch.device(case.device),
            dtype=case.torch_dtype,
        ).eval()


def _timed(choice: Choice, found: Measurement) -> Choice:
    """The choice with its times, or with a note that says why they are missing."""
    dense, layer = found.results
    times = layer.times
    if times is None:
        return replace(choice, note=layer.note)
    return replace(
        choice,
        time_us=times.median,
        p20_us=times.p20,
        p80_us=times.p80,
        dense_us=dense.times and dense.times.median,
        speedup=dense.times and dense.times.p20 / times.p20,
        other_load=found.other_load,
    )
