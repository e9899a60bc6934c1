"""Measure cases: build the models, check their outputs, time them in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..backends import available, check_name
from .case import Case, lacking
from .hardware import OtherLoad, free_memory
from .models import Problem, working_bytes
from .results import Measurement, Result
from .runners import Runner
from .timing import interleave
from .workbench import Workbench

MODELS = ("FF", "gather", "MoE", "FFF")
_SHORT_US = 100.0  # a sample where many layers are compared: some are undisturbed, however busy the machine


def backends_for(names: Sequence[str] = ()) -> list[str]:
    """The given names, checked; by default every backend that can run here, and auto."""
    for name in names:
        check_name(name)
    return list(dict.fromkeys(names)) if names else [*available(), "auto"]


def planned(models: Sequence[str], backends: Sequence[str]) -> list[tuple[str, str]]:
    """The (model, backend) pairs of a case, in the order of its results. MoE runs on named backends only, not auto."""
    pairs = []
    for model in models:
        if model in ("FF", "gather"):
            pairs.append((model, ""))
        else:
            pairs += [(model, name) for name in backends if (model, name) != ("MoE", "auto")]
    return pairs


def measure(
    case: Case,
    *,
    backends: Sequence[str] = (),
    models: Sequence[str] = MODELS,
    bandwidth: float = 0.0,
    budget: float = 20.0,
    samples: int = 100,
    opponent: nn.Module | None = None,
) -> Measurement:
    """All results of a case.

    Args:
        backends: default: every backend that can run here, and auto.
        bandwidth: bytes per second of this machine, for the byte floor.
        budget: about the seconds that timing takes. A model that needs more is skipped, and its note says so.
        opponent: takes the place of FF. Its output is not checked.
    """
    backends = backends_for(backends)
    found = Measurement(case, [Result(*pair) for pair in planned(models, backends)], bandwidth=bandwidth)
    if lack := lacking(case):
        for result in found.results:
            result.skip(lack)
        return found
    with own_stream(case.device), torch.inference_mode():
        workbench = Workbench(_problem(case), opponent, budget)
        found.leaves, found.nodes = workbench.leaves, workbench.nodes
        runners = {}
        for i, result in enumerate(found.results):
            runner = workbench.prepare(result)
            if runner is not None:
                runners[str(i)] = runner
        load = OtherLoad()
        times, skipped = interleave(runners, budget=budget, samples=samples)
        found.other_load = load.cores() if case.device == "cpu" else None
        for i, result in enumerate(found.results):
            result.times = times.get(str(i))
            if str(i) in skipped:
                result.skip(skipped[str(i)])
    return found


def together(
    cases: Sequence[Case],
    opponent: nn.Module,
    *,
    seconds: float,
    samples: int = 30,
    progress: Callable[[int, int], None] | None = None,
) -> list[Measurement]:
    """The FFF of every case beside one dense layer, all timed in turn in one loop, about `seconds` for each.

    A machine that is busy for a while is then slow for all of them alike, and no ratio compares two moments. Cases that
    do not fit into half of the memory at once are timed in several loops, each with the dense layer in it.
    """
    found = [Measurement(case, [Result("FF", ""), Result("FFF", "auto")]) for case in cases]
    done = 0
    for group in _groups(found):
        case = group[0].case
        with own_stream(case.device), torch.inference_mode():
            runners: dict[str, Runner] = {}
            for i, each in enumerate(group):
                done += 1
                if lack := lacking(each.case):
                    for result in each.results:
                        result.skip(lack)
                else:
                    workbench = Workbench(_problem(each.case), opponent, seconds)
                    each.leaves, each.nodes = workbench.leaves, workbench.nodes
                    if (runner := workbench.prepare(each.results[1])) is not None:
                        runners[str(i)] = runner
                        if "FF" not in runners and (dense := workbench.prepare(each.results[0])) is not None:
                            runners["FF"] = dense
                if progress is not None:
                    progress(done, len(cases))
            load = OtherLoad()
            times, skipped = interleave(runners, budget=seconds * len(group), samples=samples, sample_us=_SHORT_US)
            other_load = load.cores() if case.device == "cpu" else None
            for i, each in enumerate(group):
                each.other_load = other_load
                for result, name in zip(each.results, ("FF", str(i)), strict=True):
                    result.times = times.get(name)
                    if name in skipped:
                        result.skip(skipped[name])
    return found


def _groups(found: Sequence[Measurement]) -> list[list[Measurement]]:
    """Measurements that are in memory at once: as many as fit into half of the free memory, at least one."""
    made: list[list[Measurement]] = []
    left = 0.0
    for each in found:
        need = each.case.parameter_bytes + working_bytes(each.case, "FF")
        if not made or need > left:
            made.append([])
            left = 0.5 * free_memory(each.case.device)
        made[-1].append(each)
        left -= need
    return made


@torch.inference_mode(False)
def _problem(case: Case) -> Problem:
    with torch.random.fork_rng():
        return Problem(case)


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """Graphs cannot be captured on the default stream."""
    if device != "cuda":
        yield
        return
    torch.cuda.empty_cache()  # the graphs of the case before
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()
