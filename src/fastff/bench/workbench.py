"""Build the models of a case, and check their outputs: a model that passes is ready to be timed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..backends import BACKENDS, Request
from ..explain import explain
from .case import count_visited
from .correctness import Answer, dense_answer, gate_answer, judge, tree_answer
from .hardware import lack_of_memory
from .models import Call, Problem, dense, dense_seconds, gather, mixture_of_experts, working_bytes
from .results import Result
from .runners import EagerRunner, GraphRunner, QueueRunner, Runner
from .timing import fastest, too_slow

_CHECKED_SAMPLES = 64  # at least, over several inputs if need be: the error of a few numbers is a matter of luck


class Workbench:
    """Makes and checks the runners of one case.

    Args:
        opponent: takes the place of the dense layer.
        eager: on a GPU, calls from Python instead of CUDA graphs.
        most: samples of an FFF's output to check; by default all of the inputs that are checked.
    """

    def __init__(
        self,
        problem: Problem,
        opponent: nn.Module | None,
        budget: float,
        *,
        eager: bool = False,
        most: int | None = None,
    ) -> None:
        self.problem, self.case, self.opponent, self.budget = problem, problem.case, opponent, budget
        self.eager = eager
        self.checked = min(len(problem.inputs), -(-_CHECKED_SAMPLES // self.case.batch))
        self.answers: dict[str, Answer] = {}
        x = self.checked_inputs
        self.answers["FFF"], leaf = tree_answer(x, problem.tree, problem.leaves, self.case.activation, most)
        self.answers["gather"] = self.answers["FFF"]
        counts = [count_visited(part, self.case.depth) for part in leaf.split(self.case.batch)]
        self.leaves, self.nodes = (sum(column) / len(counts) for column in zip(*counts, strict=True))
        if self.case.device == "cuda" and not eager:
            size = max(2**28, 4 * torch.cuda.get_device_properties().L2_cache_size)
            self.scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

    def prepare(
        self, result: Result, calls: Sequence[Call] | None = None, answer: Answer | None = None
    ) -> Runner | None:
        """A runner with the right output; otherwise None, and the result says why.

        For a model that is none of `MODELS`, `calls` are ways to run it, the fastest of which counts, and `answer` is
        the right output.
        """
        if reason := self._why_not(result):
            result.skip(reason)
            return None
        try:
            return self._checked_runner(result, calls or self._calls(result), answer)
        except torch.OutOfMemoryError as error:
            result.skip(str(error).splitlines()[0])
        except (RuntimeError, ValueError, TypeError) as error:  # as bad as a wrong output; the other models go on
            result.status, result.note = "wrong", f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def _checked_runner(self, result: Result, calls: Sequence[Call], answer: Answer | None) -> Runner | None:
        runner = fastest([self._runner(call, result.backend or "auto") for call in calls])
        if result.model == "FF" and self.opponent is not None:
            return runner
        answer = answer or self._answer(result.model)
        if not len(answer.rows):
            result.skip("every sample has a decision within rounding of a tie: no output can be checked")
            return None
        verdict = judge(self._stack([runner.output(i) for i in range(self.checked)]), answer)
        result.error, result.allowed = verdict.error, verdict.allowed
        if not verdict.right:
            result.status = "wrong"
            result.note = f"relative error {verdict.error:.2g}, allowed {verdict.allowed:.2g}"
            return None
        if result.model == "FFF" and result.backend == "auto":
            result.note = "; ".join(str(explain(self.problem.layer, self.problem.inputs[0])).splitlines())
        return runner

    @property
    def checked_inputs(self) -> Tensor:
        """The samples whose outputs are checked: (samples, in)."""
        return self._stack(self.problem.inputs)

    def _stack(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors[: self.checked]))

    def _answer(self, model: str) -> Answer:
        if model not in self.answers:
            problem, x = self.problem, self.checked_inputs
            if model == "FF":
                self.answers[model] = dense_answer(x, problem.leaves, self.case.activation, problem.out_bias)
            else:
                self.answers[model] = gate_answer(x, problem.gate, problem.leaves, self.case.activation)
        return self.answers[model]

    def _why_not(self, result: Result) -> str:
        """Why a model cannot run here: its backend, the memory or the time. Empty if it can."""
        if result.backend in BACKENDS:
            x, leaves, activation = self.problem.inputs[0], self.problem.leaves, self.case.activation
            request = Request.make("visit", x, None, leaves, activation)
            if result.model == "FFF":
                request = Request.make("hard", x, self.problem.tree, leaves, activation)
            reason: str = BACKENDS[result.backend].why_not(request)
            if reason:
                return reason
        lack = lack_of_memory(working_bytes(self.case, result.model, result.backend), self.case.device)
        if lack or result.model != "FF" or self.opponent is not None:
            return lack
        return too_slow(1e6 * dense_seconds(self.problem), self.budget)

    def _calls(self, result: Result) -> Sequence[Call]:
        """Ways to run a model; the fastest counts."""
        if result.model == "FF":
            return dense(self.problem) if self.opponent is None else [self.opponent]
        if result.model == "gather":
            return [gather(self.problem)]
        if result.model == "MoE":
            return [mixture_of_experts(self.problem, BACKENDS[result.backend])]
        return [self.problem.layer]

    def _runner(self, call: Call, name: str) -> Runner:
        if self.case.device == "cuda" and self.eager:
            return QueueRunner(call, self.problem.inputs, name)
        if self.case.device == "cuda":
            return GraphRunner(call, self.problem.inputs, name, self.scratch)
        return EagerRunner(call, self.problem.inputs, name)
