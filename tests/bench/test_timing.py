from fastff.bench.timing import fastest, interleave


class Clock:
    """A runner whose calls take what it says, and that tells when it ran."""

    def __init__(self, name, us, log):
        self.name, self.us, self.log = name, us, log

    def __len__(self):
        return 10

    def sample(self, calls):
        self.log.append(self.name)
        return self.us


def test_of_two_layouts_the_faster_counts():
    slow, fast = Clock("slow", 50.0, []), Clock("fast", 40.0, [])
    assert fastest([slow, fast]) is fast
    assert fastest([fast, slow]) is fast


def test_models_take_turns_and_slow_ones_are_left_out():
    log = []
    runners = {name: Clock(name, us, log) for name, us in (("a", 100.0), ("b", 4000.0), ("c", 1e7))}
    times, skipped = interleave(runners, budget=20.0, samples=10)
    assert list(skipped) == ["c"]
    assert "10 s a call: 5 calls exceed the budget of 20 s" in skipped["c"]
    assert times["a"].median == 100
    assert times["b"].samples == 10
    assert times["a"].samples == 80  # a fast one gets more samples a turn
    turns = log[6:]
    runs = [name for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name]
    assert 10 <= len(runs) <= 20  # neither does all its work before the other; the order changes
    assert runs.count("a") >= 5


def test_a_pause_of_the_machine_leaves_no_model_out():
    """The first sample decided; one that fell into a pause left its model out."""
    pauses = [0.0, 41e6]

    class Paused(Clock):
        def sample(self, calls):
            return (pauses.pop(0) if pauses else 0.0) + super().sample(calls)

    times, skipped = interleave({"paused": Paused("paused", 100.0, [])}, budget=200.0, samples=10)
    assert not skipped
    assert times["paused"].median == 100.0
