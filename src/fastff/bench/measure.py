"""Measure a case: build, check, time in turn, compare."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import fastff

from ..backends import BACKENDS, Request, available, check_name
from .case import Case, count_visited, floor_bytes, free_memory, lack_of_memory, lacking
from .correctness import Answer, dense_answer, gate_answer, judge, tree_answer
from .models import Call, Problem, dense, dense_seconds, gather, mixture_of_experts, working_bytes
from .timing import EagerRunner, GraphRunner, OtherLoad, Runner, Times, fastest, interleave, too_slow

MODELS = ("FF", "gather", "MoE", "FFF")
_SHORT_US = 100.0  # a sample where many are compared: some are undisturbed, however busy the machine
_CHECKED_SAMPLES = 64  # at least, over several inputs if need be: the error of a few numbers is a matter of luck


@dataclass
class Result:
    """One model on one case. `times` is None if it is wrong or was left out; `note` says why."""

    model: str
    backend: str
    status: str = "ok"  # ok, wrong, skipped
    times: Times | None = None
    error: float | None = None
    allowed: float | None = None
    note: str = ""


@dataclass
class Measurement:
    """A case and all results on it."""

    case: Case
    results: list[Result] = field(default_factory=list)
    leaves: float = 0.0  # different ones that a batch visits
    nodes: float = 0.0
    bandwidth: float = 0.0  # bytes per second
    other_load: float | None = None  # cores that other processes kept busy meanwhile

    @property
    def floor_us(self) -> float | None:
        """The time of the byte floor."""
        if not self.bandwidth or not self.leaves:
            return None
        return 1e6 * floor_bytes(self.case, self.leaves, self.nodes) / self.bandwidth

    def median(self, model: str, backend: str = "") -> float | None:
        found = [r.times.median for r in self.results if r.model == model and r.times and backend in ("", r.backend)]
        return min(found, default=None)

    def speedup(self, result: Result, over: str) -> float | None:
        """How many times faster than another model. MoE has the same leaf kernel; against auto it has the best."""
        if result.times is None:
            return None
        same = result.backend if over == "MoE" and result.backend != "auto" else ""
        other = self.median(over, same)
        return None if other is None else other / result.times.median

    def times_floor(self, result: Result) -> float | None:
        floor = self.floor_us
        return None if floor is None or result.times is None else result.times.median / floor


def backends_for(names: Sequence[str] = ()) -> list[str]:
    """The names given, checked; by default every backend that can run here, and auto."""
    for name in names:
        check_name(name)
    return list(dict.fromkeys(names)) if names else [*available(), "auto"]


def planned(models: Sequence[str], backends: Sequence[str]) -> list[tuple[str, str]]:
    """The (model, backend) pairs of a case, in the order of its results."""
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
    """All results of a case. `bandwidth` in bytes per second gives the floor; `opponent` stands in for the FF.

    `budget` is about the seconds that the timing takes; a model that cannot be timed within it is left out and said so.
    """
    backends = backends_for(backends)
    found = Measurement(case, [Result(*pair) for pair in planned(models, backends)], bandwidth=bandwidth)
    if lack := lacking(case):
        for result in found.results:
            result.status, result.note = "skipped", lack
        return found
    with _own_stream(case), torch.inference_mode():
        problem = _problem(case)
        bench = _Bench(problem, opponent, budget)
        found.leaves, found.nodes = bench.leaves, bench.nodes
        runners = {}
        for i, result in enumerate(found.results):
            runner = bench.prepare(result)
            if runner is not None:
                runners[str(i)] = runner
        load = OtherLoad()
        times, skipped = interleave(runners, budget=budget, samples=samples)
        found.other_load = load.cores() if case.device == "cpu" else None
        for i, result in enumerate(found.results):
            result.times = times.get(str(i))
            if str(i) in skipped:
                result.status, result.note = "skipped", skipped[str(i)]
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

    A machine that is busy for a while is then slow for all of them alike, and no ratio compares two times. Cases that
    do not fit into half of the memory at once are timed in several loops, each with the dense layer in it.
    """
    found = [Measurement(case, [Result("FF", ""), Result("FFF", "auto")]) for case in cases]
    done = 0
    for group in _groups(found):
        case = group[0].case
        with _own_stream(case), torch.inference_mode():
            runners: dict[str, Runner] = {}
            for i, each in enumerate(group):
                done += 1
                if lack := lacking(each.case):
                    for result in each.results:
                        result.status, result.note = "skipped", lack
                else:
                    bench = _Bench(_problem(each.case), opponent, seconds)
                    each.leaves, each.nodes = bench.leaves, bench.nodes
                    if (runner := bench.prepare(each.results[1])) is not None:
                        runners[str(i)] = runner
                        if "FF" not in runners and (dense := bench.prepare(each.results[0])) is not None:
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
                        result.status, result.note = "skipped", skipped[name]
    return found


def _groups(found: Sequence[Measurement]) -> list[list[Measurement]]:
    """Those that are in memory at once: half of what is free, or one."""
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
def _own_stream(case: Case) -> Iterator[None]:
    """Graphs cannot be captured on the default stream."""
    if case.device != "cuda":
        yield
        return
    torch.cuda.empty_cache()  # the graphs of the case before
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


class _Bench:
    """Makes runners of a case and checks them."""

    def __init__(self, problem: Problem, opponent: nn.Module | None, budget: float) -> None:
        self.problem, self.case, self.opponent, self.budget = problem, problem.case, opponent, budget
        self.checked = min(len(problem.inputs), -(-_CHECKED_SAMPLES // self.case.batch))
        self.answers: dict[str, Answer] = {}
        tree, leaves, act = problem.tree, problem.leaves, self.case.activation
        x = self._stack(problem.inputs)
        self.answers["FFF"], leaf = tree_answer(x, tree, leaves, act)
        self.answers["gather"] = self.answers["FFF"]
        counts = [count_visited(part, self.case.depth) for part in leaf.split(self.case.batch)]
        self.leaves, self.nodes = (sum(column) / len(counts) for column in zip(*counts, strict=True))
        if self.case.device == "cuda":
            size = max(2**28, 4 * torch.cuda.get_device_properties().L2_cache_size)
            self.scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

    def prepare(self, result: Result) -> Runner | None:
        """A runner whose output is right; otherwise None, and the result says why."""
        reason = self._cannot(result)
        if reason:
            result.status, result.note = "skipped", reason
            return None
        try:
            return self._right(result)
        except torch.OutOfMemoryError as error:
            result.status, result.note = "skipped", str(error).splitlines()[0]
        except (RuntimeError, ValueError, TypeError) as error:  # as wrong as a wrong output, and worth going on
            result.status, result.note = "wrong", f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def _right(self, result: Result) -> Runner | None:
        runner = fastest([self._runner(call, result.backend or "auto") for call in self._calls(result)])
        if result.model == "FF" and self.opponent is not None:
            return runner
        answer = self._answer(result.model)
        if not len(answer.rows):
            result.status, result.note = "skipped", "no sample has its decisions above rounding: nothing to check by"
            return None
        verdict = judge(self._stack([runner.output(i) for i in range(self.checked)]), answer)
        result.error, result.allowed = verdict.error, verdict.allowed
        if not verdict.right:
            result.status = "wrong"
            result.note = f"relative error {verdict.error:.2g}, allowed {verdict.allowed:.2g}"
            return None
        if result.model == "FFF" and result.backend == "auto":
            result.note = " ".join(str(fastff.explain(self.problem.layer, self.problem.inputs[0])).split())
        return runner

    def _stack(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors[: self.checked]))

    def _answer(self, model: str) -> Answer:
        if model not in self.answers:
            problem, x = self.problem, self._stack(self.problem.inputs)
            if model == "FF":
                self.answers[model] = dense_answer(x, problem.leaves, self.case.activation, problem.out_bias)
            else:
                self.answers[model] = gate_answer(x, problem.gate, problem.leaves, self.case.activation)
        return self.answers[model]

    def _cannot(self, result: Result) -> str:
        backend = BACKENDS.get(result.backend)
        if backend is not None:
            x, leaves, activation = self.problem.inputs[0], self.problem.leaves, self.case.activation
            asked = Request.make("visit", x, None, leaves, activation)
            if result.model == "FFF":
                asked = Request.make("hard", x, self.problem.tree, leaves, activation)
            reason: str = backend.why_not(asked)
            if reason:
                return reason
        lack = lack_of_memory(working_bytes(self.case, result.model, result.backend), self.case.device)
        if lack or result.model != "FF" or self.opponent is not None:
            return lack
        return too_slow(1e6 * dense_seconds(self.problem), self.budget)

    def _calls(self, result: Result) -> Sequence[Call]:
        """Ways to run a model, of which the fastest counts."""
        if result.model == "FF":
            return dense(self.problem) if self.opponent is None else [self.opponent]
        if result.model == "gather":
            return [gather(self.problem)]
        if result.model == "MoE":
            return [mixture_of_experts(self.problem, BACKENDS[result.backend])]
        return [self.problem.layer]

    def _runner(self, call: Call, name: str) -> Runner:
        if self.case.device == "cuda":
            return GraphRunner(call, self.problem.inputs, name, self.scratch)
        return EagerRunner(call, self.problem.inputs, name)
