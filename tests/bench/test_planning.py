from types import SimpleNamespace

import pytest

import fastff
from fastff.bench import Choice, hardware, measuring, plan, recommend, runners, timing
from fastff.bench.planning import rank, sizes


def test_case_1_sizes_cover_the_width():
    """Leaves l << w at depths d >= log2(w / l): nothing narrower than the layer that is replaced."""
    found = sizes(3072)
    assert (96, 5) in found
    assert (96, 6) in found  # one level deeper
    assert (1, 12) in found
    assert (1536, 1) in found
    for leaf_width, depth in found:
        assert leaf_width * 2**depth >= 3072
        assert leaf_width < 3072
    assert len(set(found)) == len(found)
    for leaf_width, depth in sizes(3072, deeper=0):
        assert (leaf_width - 1) * 2**depth < 3072  # the narrowest at its depth
    assert sizes(1) == [(1, 1), (1, 2)]
    assert sizes(100, deeper=0)[0] == (50, 1)


def test_case_2_sizes_have_the_regions():
    """2**d regions and l >= w 2**-d."""
    assert sizes(3072, regions=64) == [(48, 6), (96, 6), (192, 6), (384, 6)]
    assert sizes(3072, regions=65)[0] == (24, 7)
    assert sizes(100, regions=1)[0] == (100, 0)
    assert sizes(100, regions=64)[0] == (2, 6)


def test_sizes_are_those_of_the_layer_and_of_table_3():
    """The paper's Table 3: w = 128, l = 32, 16, 8, 4, 2, 1."""
    found = {(c.leaf_width, c.depth): c for c in plan(128, 128, 128, timed=False, deeper=0)}
    paper = {
        (32, 2): (128, 131, 32, 34),
        (16, 3): (128, 135, 16, 19),
        (8, 4): (128, 143, 8, 12),
        (4, 5): (128, 159, 4, 9),
        (2, 6): (128, 191, 2, 8),
        (1, 7): (128, 255, 1, 8),
    }
    for size, expected in paper.items():
        c = found[size]
        assert (c.training_width, c.training_size, c.inference_width, c.inference_size) == expected
    for (leaf_width, depth), c in found.items():
        layer = fastff.FFF(128, 128, depth=depth, leaf_width=leaf_width)
        assert c.training_size == layer.training_size
        assert c.inference_size == layer.inference_size
        assert c.parameter_bytes == 4 * sum(parameter.numel() for parameter in layer.parameters())
    wide = plan(12, 10, 16, timed=False, node_width=3, activation="swiglu", dtype="bfloat16")[0]
    layer = fastff.FFF(12, 10, depth=wide.depth, leaf_width=wide.leaf_width, node_width=3, activation="swiglu")
    assert wide.training_size == layer.training_size
    assert wide.inference_size == layer.inference_size
    assert wide.parameter_bytes == 2 * sum(parameter.numel() for parameter in layer.parameters())


def test_a_budget_of_neurons():
    found = plan(768, 768, 3072, neurons=64, timed=False)
    fitting = [choice for choice in found if choice.fits]
    assert fitting == found[: len(fitting)]
    assert (found[0].leaf_width, found[0].depth) == (48, 6)  # the widest leaf that fits
    assert all(choice.inference_size <= 64 for choice in fitting)
    rest = found[len(fitting) :]
    assert rest
    assert all(choice.inference_size > 64 for choice in rest)
    assert rest[0].inference_size == min(choice.inference_size for choice in rest)


def choice(leaf_width, time_us, dense_us=100.0):
    speedup = None if time_us is None else dense_us / time_us
    sizes = (leaf_width, 3, 8 * leaf_width, 0, leaf_width, leaf_width + 3, 0)
    return Choice(*sizes, time_us=time_us, dense_us=dense_us, speedup=speedup)


def test_budgets_of_time():
    """Several budgets hold together; what has no time fits no budget of time; without a budget nothing is marked."""
    choices = [choice(8, 30.0), choice(4, 10.0), choice(2, 5.0), choice(1, None)]
    assert [(c.leaf_width, c.fits) for c in rank(choices, latency_us=10)] == [
        (4, True),
        (2, True),
        (8, False),
        (1, False),
    ]
    assert [c.leaf_width for c in rank(choices, speedup=20) if c.fits] == [2]
    assert [c.leaf_width for c in rank(choices, speedup=2, neurons=7) if c.fits] == [4, 2]
    assert rank(choices) == choices


@pytest.mark.slow
def test_times_are_measured_beside_the_dense_layer():
    steps = []
    found = plan(24, 16, 64, speedup=1e-6, batch=3, seconds=0.02, progress=lambda *step: steps.append(step))
    assert all(c.time_us > 0 and c.dense_us > 0 and c.fits for c in found)
    assert [c.leaf_width for c in found] == sorted((c.leaf_width for c in found), reverse=True)
    assert steps == [(i + 1, len(found)) for i in range(len(found))]
    assert not any(c.fits for c in plan(24, 16, 64, latency_us=1e-6, seconds=0.02, regions=4))


class Clock:
    """A machine on which a dense call takes 1 ms and any FFF 50 µs, but for a time in which FFF is 80 times slower."""

    def __init__(self, start, end):
        self.now, self.start, self.end = 0.0, start, end

    def sample(self, runner, calls):
        us = 1000.0 if isinstance(runner.call, fastff.baselines.FF) else 50.0
        if us < 1000 and self.start <= self.now < self.end:
            us *= 80
        self.now += calls * us / 1e6
        return us


@pytest.mark.parametrize("start", [0.0, 0.2, 0.5])
def test_a_slow_phase_of_one_side_gives_no_wrong_ratio(start, monkeypatch):
    """0.24x was printed for sizes that had been measured at 10 to 80x seconds before: each was timed by itself, and
    what fell into a slow time of the machine was slow as a whole."""
    clock = Clock(start, start + 0.3)
    monkeypatch.setattr(runners.EagerRunner, "sample", lambda self, calls: clock.sample(self, calls))
    fake = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.now)
    monkeypatch.setattr(timing, "time", fake)
    monkeypatch.setattr(hardware, "time", fake)
    found = plan(24, 16, 64, seconds=0.1)
    assert len(found) > 8
    for choice in found:
        assert choice.speedup == pytest.approx(20)
        assert choice.time_us == pytest.approx(50)
        assert choice.dense_us == pytest.approx(1000)


def test_what_does_not_fit_at_once_is_timed_in_parts(monkeypatch):
    loops = []
    interleave = timing.interleave

    def count(runners, **options):
        loops.append(sorted(runners))
        return interleave(runners, **options)

    monkeypatch.setattr(measuring, "interleave", count)
    monkeypatch.setattr(measuring, "free_memory", lambda device: 60_000)
    found = plan(24, 16, 64, seconds=0.02, deeper=0)
    assert len(loops) > 1
    assert all("FF" in loop for loop in loops)  # the dense layer is in each of them
    assert all(choice.speedup and choice.p20_us <= choice.time_us <= choice.p80_us for choice in found)


def test_one_is_recommended_and_told_why():
    choices = [choice(8, 30.0), choice(4, 10.0), choice(2, 5.0), choice(1, None)]
    assert recommend(choices) == (choices[1], "the widest leaf with half of the best speed-up or more")
    assert recommend(choices, regions=8) == (choices[0], "the narrowest leaf that keeps the width")
    ranked = rank(choices, latency_us=10)
    assert recommend(ranked) == (ranked[0], "the widest leaf that fits the budget")
    ranked = rank(choices, latency_us=1)
    assert recommend(ranked) == (ranked[0], "the nearest to the budget")
    untimed = plan(64, 64, 64, timed=False)
    assert recommend(untimed)[0].inference_size == min(c.inference_size for c in untimed)


def test_what_does_not_fit_the_memory_says_so(monkeypatch):
    monkeypatch.setattr("fastff.bench.hardware.free_memory", lambda device: 10)
    found = plan(24, 16, 64, latency_us=1e9, deeper=0)
    assert all(c.time_us is None and not c.fits and "the layer needs" in c.note for c in found)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"latency_us": 0}, "latency_us must be positive; got 0"),
        ({"speedup": -1.0}, "speedup must be positive; got -1.0"),
        ({"regions": 0}, "regions must be positive; got 0"),
        ({"speedup": 2.0, "timed": False}, "have to be measured; got timed=False"),
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_arguments(options, error):
    with pytest.raises(ValueError, match=error):
        plan(**{"in_features": 8, "out_features": 8, "width": 16} | options)
