"""What is trained, stored and resumed. The training itself is a fake here; test_trainer.py has the real one."""

import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("rich")
from fastff_reproduce import engine, parts, store
from fastff_reproduce.claims import Claims
from fastff_reproduce.divergence import Diverged
from fastff_reproduce.resume import Damaged
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import Settings
from fastff_reproduce.store import Store
from fastff_reproduce.teacher import path_of, teacher_of

ABOUT = {name: f"the {name}" for name in store.ABOUT}
TRAINER = "fastff_reproduce.trainer"


def case(width=16, seed=0, goal="G_A", recipe="paper"):
    return Case("usps", "FFF", width, 8, 1, recipe, goal, seed, (("lr", 0.2),))


def cases(widths=(16, 32), seeds=3, goal="G_A"):
    return [case(width, seed, goal) for width in widths for seed in range(seeds)]


class Fake:
    """Trains nothing, and remembers what it was asked for."""

    def __init__(self):
        self.parts = []
        self.bad = ()
        self.diverged = ()  # (model, seed) pairs

    def train(self, cases, *, device, root, checkpoint=None, report=None, seconds=math.inf):
        self.parts.append([(case.width, case.seed) for case in cases])
        self.checkpoint = checkpoint
        assert len({case.group for case in cases}) == 1
        checkpoint.write_text("half way")
        report(1, 2, "so far")
        if cases[0].width in self.bad:
            raise ArithmeticError("loss is nan")
        lost = {case: "the loss was not finite" for case in cases if (case.model, case.seed) in self.diverged}
        results = [Result(c, G_A=c.width + c.seed / 10, seconds=1.0) for c in cases if c not in lost]
        if lost:
            raise Diverged(lost, results)
        return results


@pytest.fixture
def fake(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, TRAINER, SimpleNamespace(train=fake.train))
    return fake


@pytest.fixture
def results(tmp_path):
    with Store(tmp_path / "results.sqlite") as results:
        yield results


def run(wanted, results, **more):
    return engine.run(wanted, results, **{"device": "cpu", "root": None, "about": ABOUT, "progress": False} | more)


def test_the_seeds_of_a_group_train_at_once_and_are_stored(fake, results):
    found = run(reversed(cases()), results)
    assert [result.case for result in found] == cases()[::-1]
    assert fake.parts == [[(32, 2), (32, 1), (32, 0)], [(16, 2), (16, 1), (16, 0)]]
    assert [result.G_A for result in results.results()] == [16.0, 16.1, 16.2, 32.0, 32.1, 32.2]
    assert results.records()[0].about == ABOUT
    assert not list(engine.checkpoints(results).glob("*.pt"))


def test_nothing_is_trained_twice(fake, results):
    first = run(cases(seeds=2), results)
    fake.parts.clear()
    assert run(cases(seeds=2), results) == first
    assert fake.parts == []
    assert len(run(cases(seeds=4), results)) == 8
    assert fake.parts == [[(16, 2), (16, 3)], [(32, 2), (32, 3)]]
    run([case(), case(), case()], results)
    assert len(results.results()) == 8


def test_the_ensemble_is_the_most_that_train_at_once(fake, results):
    run(cases(widths=(16,), seeds=5), results, ensemble=2)
    assert fake.parts == [[(16, 0), (16, 1)], [(16, 2), (16, 3)], [(16, 4)]]
    with pytest.raises(ValueError, match="must be 1 or more; got 0"):
        run(cases(seeds=9), results, ensemble=0)


def test_cases_of_other_goals_or_recipes_are_other_groups():
    wanted = [case(), case(goal="M_A"), case(recipe="fastff"), case(seed=1)]
    assert [len(part) for part in parts.parts(wanted, 10)] == [2, 1, 1]


def taught(leaf_width, seeds=2):
    settings = Settings(epochs=1, teacher_share=1.0).items()
    depth = {8: 1, 4: 2}[leaf_width]
    return [Case("cifar10", "ViT-FFF", 16, leaf_width, depth, "fastff", "G_A", s, settings) for s in range(seeds)]


def test_who_teaches_is_trained_first_and_stored(fake, results):
    wanted = taught(4) + taught(8)
    found = run(wanted, results)
    assert [result.case for result in found] == wanted
    assert [(part[0].model, part[0].leaf_width) for part in parts.parts(parts.with_teachers(wanted), 9)] == [
        ("ViT-FF", 16),
        ("ViT-FFF", 4),
        ("ViT-FFF", 8),
    ]
    assert len(fake.parts) == 3
    run([teacher_of(case) for case in wanted], results)
    assert len(fake.parts) == 3  # it was one like any other
    assert parts.with_teachers(wanted, results.keys()) == wanted  # and is not needed again


def test_what_is_taught_waits_for_a_teacher_in_another_process(fake, results, monkeypatch):
    (teachers,) = parts.parts([teacher_of(case) for case in taught(4)], 9)
    take, naps = Claims.take, []

    def nap(_):
        """The other process is done."""
        naps.append(list(fake.parts))
        results.put_all([Result(case, G_A=1.0) for case in teachers], ABOUT)

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr(Claims, "take", lambda self, part: (part != teachers or bool(naps)) and take(self, part))
    assert len(run(taught(4), results)) == 2
    assert naps == [[]]  # nothing was trained before
    assert len(fake.parts) == 1


def test_a_teacher_that_is_stored_without_its_file_is_told(fake, results, capsys):
    twins = [teacher_of(case) for case in taught(4)]
    results.put_all([Result(case, G_A=1.0) for case in twins], ABOUT)
    folder = engine.checkpoints(results)
    folder.mkdir()
    path_of(folder, twins[0]).touch()
    run(taught(4), results)
    told = [line for line in capsys.readouterr().err.splitlines() if "its file is missing" in line]
    assert len(told) == 1
    assert "ViT-FF w=16 l=16 fastff G_A seed 1 is stored but its file is missing: it is trained again" in told[0]


def test_without_a_teacher_what_is_taught_is_tried(fake, results):
    fake.bad = (16,)
    with pytest.raises(engine.SomeFailed) as error:
        run(taught(4), results)
    assert len(error.value.failures) == 2  # and not a wait without an end


def test_an_error_ends_its_part_and_no_other(fake, results, capsys):
    fake.bad = (16,)
    with pytest.raises(
        engine.SomeFailed, match=r"3 trainings failed\. usps FFF w=16 l=8 paper G_A seeds 0 to 2"
    ) as info:
        run(cases(), results)
    assert [result.case.width for result in info.value.results] == [32, 32, 32]
    assert [result.case.width for result in results.results()] == [32, 32, 32]
    assert [str(failure.error) for failure in info.value.failures] == ["loss is nan"]
    said = " ".join(capsys.readouterr().err.split())
    assert "failed: usps FFF w=16 l=8 paper G_A seeds 0 to 2: ArithmeticError: loss is nan" in said
    assert "in train" in said  # where it was
    (left,) = engine.checkpoints(results).glob("*.pt")
    fake.bad = ()
    assert len(run(cases(), results)) == 6
    assert fake.checkpoint == left  # goes on from there
    assert not left.exists()


def test_what_diverges_fails_alone_and_leaves_nothing(fake, results, capsys):
    """A diverged training was stored as a result, with the exit code 0. The seeds beside it are results, it is none."""
    fake.diverged = [("FFF", 1)]
    with pytest.raises(engine.SomeFailed, match="2 trainings failed") as info:
        run(cases(), results, progress=True)
    assert [(found.case.width, found.case.seed) for found in results.results()] == [(16, 0), (16, 2), (32, 0), (32, 2)]
    assert info.value.results == results.results()
    assert not list(engine.checkpoints(results).glob("*.pt"))
    said = capsys.readouterr().err
    assert "failed: usps FFF w=16 l=8 paper G_A seed 1: the loss was not finite\n" in said
    assert "Traceback" not in said
    assert "2 of 2: usps FFF w=32 l=8 paper G_A seeds 0 to 2: 2.0 s" in said
    fake.diverged, fake.parts = [], []
    assert len(run(cases(), results)) == 6
    assert fake.parts == [[(16, 1)], [(32, 1)]]  # it was left to do


def test_a_teacher_that_diverged_fails_those_it_teaches_and_no_others(fake, results, capsys):
    fake.diverged = [("ViT-FF", 1)]
    with pytest.raises(engine.SomeFailed) as info:
        run(taught(4, seeds=3), results)
    assert [(found.case.model, found.case.seed) for found in results.results()] == [
        ("ViT-FF", 0),
        ("ViT-FF", 2),
        ("ViT-FFF", 0),
        ("ViT-FFF", 2),
    ]
    assert fake.parts == [[(16, 0), (16, 1), (16, 2)], [(16, 0), (16, 2)]]  # no one without a teacher was tried
    assert [failure.part[0].model for failure in info.value.failures] == ["ViT-FF", "ViT-FFF"]
    assert (
        "failed: cifar10 ViT-FFF w=16 l=4 fastff G_A seed 1: the teacher, cifar10 ViT-FF w=16 l=16 fastff G_A seed 1, "
        "diverged: the loss was not finite\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [Damaged("x.pt is damaged. Remove it."), OSError("x.pt cannot be written. Make room.")]
)
def test_a_file_that_is_no_use_is_told_in_a_sentence(fake, results, monkeypatch, capsys, error):
    def train(cases, *, device, root, checkpoint=None, report=None):
        raise error

    monkeypatch.setitem(sys.modules, TRAINER, SimpleNamespace(train=train))
    with pytest.raises(engine.SomeFailed):
        run(cases((16,)), results)
    assert capsys.readouterr().err == f"failed: usps FFF w=16 l=8 paper G_A seeds 0 to 2: {error}\n"


def test_a_checkpoint_belongs_to_its_seeds(tmp_path):
    paths = {parts.checkpoint(tmp_path, tuple(cases((16,), seeds))) for seeds in (1, 2, 3)}
    paths.add(parts.checkpoint(tmp_path, tuple(cases((32,), 3))))
    assert len(paths) == 4


def test_a_checkpoint_that_was_left_after_storing_goes(fake, results):
    run(cases((16,)), results)
    left = parts.checkpoint(engine.checkpoints(results), tuple(cases((16,))))
    left.write_text("killed between storing and removing")
    run(cases((16,)), results)
    assert not left.exists()


def test_progress_is_a_line_for_each_part_where_there_is_no_terminal(fake, results, capsys):
    run(cases(), results, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "1 of 2: usps FFF w=16 l=8 paper G_A seeds 0 to 2: 3.0 s",
        "2 of 2: usps FFF w=32 l=8 paper G_A seeds 0 to 2: 3.0 s",
    ]


def test_unknown_engines_are_refused(fake, results):
    with pytest.raises(ValueError, match="engine must be one of local, ray; got 'cloud'"):
        run(cases(), results, engine="cloud")


def test_the_trainer_takes_what_it_is_given():
    """The fake has its signature."""
    trainer = pytest.importorskip(TRAINER)
    assert list(inspect.signature(trainer.train).parameters) == list(inspect.signature(Fake().train).parameters)


def train_slowly(path, log, nap):
    """Says what it trains, and goes on from its checkpoint."""

    def train(cases, *, device, root, checkpoint=None, report=None):
        state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"epoch": 0, "total": 0}
        for epoch in range(state["epoch"], 4):
            state = {"epoch": epoch + 1, "total": state["total"] + epoch * cases[0].width}
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(json.dumps(state))
            draft.replace(checkpoint)
            with log.open("a") as file:
                file.write(f"{cases[0].width} {epoch}\n")
            time.sleep(nap)
        return [Result(case, G_A=state["total"] + case.seed) for case in cases]

    sys.modules[TRAINER] = SimpleNamespace(train=train)
    with Store(path) as results:
        run(cases((16, 32, 64)), results)


def process(*args):
    made = multiprocessing.get_context("fork").Process(target=train_slowly, args=args)
    made.start()
    return made


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path):
    """Kill -9 in the second part: the rows are those of a run without a kill, none twice, and no epoch is repeated."""
    whole, killed = tmp_path / "whole.sqlite", tmp_path / "killed.sqlite"
    log, log_again = tmp_path / "log", tmp_path / "again"
    victim = process(killed, log, 0.2)
    until = time.monotonic() + 30
    while not log.exists() or "32 1" not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    with Store(killed) as results:
        assert [result.case.width for result in results.results()] == [16, 16, 16]
    assert len(list((tmp_path / "killed.sqlite.checkpoints").glob("*.pt"))) == 1
    for each in (process(killed, log_again, 0), process(whole, tmp_path / "other", 0)):
        each.join()
        assert each.exitcode == 0
    assert log_again.read_text().splitlines() == ["32 2", "32 3", *(f"64 {epoch}" for epoch in range(4))]
    with Store(whole) as one, Store(killed) as two:
        assert len(one.results()) == 9
        assert one.results() == two.results()
    assert not list((tmp_path / "killed.sqlite.checkpoints").glob("*.pt"))


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path):
    """Each part is trained by one of them, and each of them trains; both end when all is stored."""
    logs = tmp_path / "first", tmp_path / "second"
    both = [process(tmp_path / "results.sqlite", log, 0.1) for log in logs]
    for each in both:
        each.join()
        assert each.exitcode == 0
    said = [log.read_text().splitlines() for log in logs]
    assert sorted(said[0] + said[1]) == sorted(f"{width} {epoch}" for width in (16, 32, 64) for epoch in range(4))
    with Store(tmp_path / "results.sqlite") as results:
        assert len(results.results()) == 9


def test_without_ray_an_error_says_what_to_install(fake, results, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r'engine ray needs ray: pip install "\./reproduce\[ray\]"'):
        run(cases(), results, engine="ray")


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray")
    code = """
import json, os, pathlib
def train(cases, *, device, root, checkpoint=None, report=None):
    from fastff_reproduce.runs import Result
    if cases[0].width == 32:
        raise ArithmeticError("loss is nan")
    if cases[0].width == 128:
        from fastff_reproduce.divergence import Diverged
        raise Diverged({cases[1]: "the loss was not finite"}, [Result(cases[0], G_A=1.0)])
    if cases[0].width == 64 and not checkpoint.exists():
        checkpoint.write_text("here")
        os.kill(os.getpid(), 9)
    return [Result(case, G_A=90.0 + case.seed, seconds=1.0) for case in cases]
"""

    def setup():
        import types

        fake = types.ModuleType(TRAINER)
        exec(code, fake.__dict__)
        sys.modules[TRAINER] = fake

    options = {"include_dashboard": False, "log_to_driver": False, "runtime_env": {"worker_process_setup_hook": setup}}
    try:
        ray.init(num_cpus=2, **options)
    except (OSError, RuntimeError) as error:  # OSError: connections and timeouts, too
        pytest.skip(f"no Ray cluster starts on this machine: {error}")
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_returns_rows_to_the_driver(cluster, results):
    """An error ends its part; a worker that is killed is replaced; of those that train at once one may diverge."""
    with pytest.raises(
        engine.SomeFailed, match=r"(?s)4 trainings.*w=128 l=8 paper G_A seed 1: the loss was not finite"
    ):
        run([*cases((16, 32, 64)), *cases((128,), 2)], results, engine="ray")
    assert [(found.case.width, found.G_A) for found in results.results()] == [
        *((16, 90.0 + seed) for seed in range(3)),
        *((64, 90.0 + seed) for seed in range(3)),
        (128, 1.0),
    ]
    assert {record.about["commit"] for record in results.records()} == {"the commit"}
    assert {record.about["machine"] for record in results.records()} != {"the machine"}  # the worker's
