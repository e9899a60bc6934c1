"""What a measurement finds: one result per model, and the ratios between them."""

from dataclasses import dataclass, field

from .case import Case, floor_bytes
from .timing import Times


@dataclass
class Result:
    """One model on one case. `times` is None if its output is wrong or it was skipped; `note` says why."""

    model: str
    backend: str
    status: str = "ok"  # ok, wrong, skipped
    times: Times | None = None
    error: float | None = None
    allowed: float | None = None
    note: str = ""

    def skip(self, why: str) -> None:
        self.status, self.note = "skipped", why


@dataclass
class Measurement:
    """A case and all its results."""

    case: Case
    results: list[Result] = field(default_factory=list)
    leaves: float = 0.0  # distinct leaves that a batch visits, on average
    nodes: float = 0.0
    bandwidth: float = 0.0  # bytes per second
    other_load: float | None = None  # cores that other processes kept busy meanwhile

    @property
    def floor_us(self) -> float | None:
        """The byte floor as a time."""
        if not self.bandwidth or not self.leaves:
            return None
        return 1e6 * floor_bytes(self.case, self.leaves, self.nodes) / self.bandwidth

    def median(self, model: str, backend: str = "") -> float | None:
        """The median of a model with this backend, or of its fastest backend."""
        found = [r.times.median for r in self.results if r.model == model and r.times and backend in ("", r.backend)]
        return min(found, default=None)

    def speedup(self, result: Result, over: str) -> float | None:
        """How many times faster than another model. MoE runs the same leaf kernel; against auto, its fastest one."""
        if result.times is None:
            return None
        same = result.backend if over == "MoE" and result.backend != "auto" else ""
        other = self.median(over, same)
        return None if other is None else other / result.times.median

    def times_floor(self, result: Result) -> float | None:
        """The median as a multiple of the byte floor."""
        floor = self.floor_us
        return None if floor is None or result.times is None else result.times.median / floor
