"""Dense transformers that teach those with trees."""

import dataclasses
import shutil
from functools import partial

import pytest
import torch

from fastff_reproduce import engine, teacher, trainer
from fastff_reproduce.loop import Training
from fastff_reproduce.runs import Case
from fastff_reproduce.settings import Settings
from fastff_reproduce.store import Store, about
from fastff_reproduce.teacher import Teachers

TAUGHT = Settings(batch=64, epochs=6, rate=1e-2, augment=1.0, noise=0.0, teacher_share=1.0)


def taught(leaf=4, depth=2, settings=TAUGHT):
    return [Case("stripes", "ViT-FFF", 16, leaf, depth, "fastff", "G_A", seed, settings.items()) for seed in range(2)]


def twins(settings=TAUGHT):
    return [teacher.teacher_of(case) for case in taught(settings=settings)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_dense_twin_teaches(stripes, device, tmp_path):
    """A tree starts as its dense twin, learns from its answers and not from the labels, and shares it with others."""
    checkpoint = tmp_path / "own.pt"
    dense = trainer.train(twins(), device=device, root=None, checkpoint=checkpoint)
    assert len(list(tmp_path.glob("*.dense.pt"))) == 2
    teachers = trainer._teachers(taught(), device, None, checkpoint, None)
    images = (stripes.test.x.float() / 255).to(device)
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    answers = teachers.answers(images.expand(2, *images.shape))
    assert torch.allclose(answers.sum(-1), torch.ones(2, 150, device=device))
    right = (answers.argmax(-1).cpu() == stripes.test.y).float().mean(-1)
    assert right.tolist() == pytest.approx([one.G_A / 100 for one in dense], abs=0.05)
    assert not torch.allclose(*answers)

    training = Training(taught(), torch.device(device), stripes, teachers)
    training.samples.y.zero_()  # which it would learn, were it not for the teacher
    start = training.ensemble.member(0)(images).argmax(-1) == answers[0].argmax(-1)
    assert start.float().mean() > 0.6
    while not training.finished:
        training.advance()
    for i in range(2):
        agreed = training.ensemble.member(i)(images).argmax(-1) == answers[i].argmax(-1)
        assert agreed.float().mean() > 0.8


def test_a_dense_twin_does_not_depend_on_whom_it_teaches():
    own = dataclasses.replace(TAUGHT, epochs=3, teacher_share=0.0, weight_decay=0.2, noise=Settings().noise)
    assert twins(dataclasses.replace(TAUGHT, epochs=6, teacher_share=0.5, teacher_decay=0.2)) == [
        dataclasses.replace(case, model="ViT-FF", leaf_width=16, depth=0) for case in taught(settings=own)
    ]
    assert twins(dataclasses.replace(TAUGHT, epochs=30, teacher_share=0.1)) == twins(
        dataclasses.replace(TAUGHT, epochs=3)
    )
    assert dict(twins(dataclasses.replace(TAUGHT, epochs=100, teacher_share=0.07))[0].settings)["epochs"] == 7
    other = {"frozen": True, "hardening": 3.0, "noise": 0.5, "decision": "soft"}
    assert twins(dataclasses.replace(TAUGHT, **other)) == twins()


@pytest.mark.slow
def test_a_dense_twin_is_trained_once(stripes, monkeypatch, tmp_path):
    trained = []
    init = Training.__init__

    def count(self, cases, *args):
        trained.append((cases[0].model, cases[0].leaf_width))
        init(self, cases, *args)

    monkeypatch.setattr(Training, "__init__", count)
    settings = dataclasses.replace(TAUGHT, epochs=2)
    run = partial(trainer.train, device="cpu", root=None)
    first = run(taught(settings=settings), checkpoint=tmp_path / "a.pt")
    run(taught(leaf=2, depth=3, settings=settings), checkpoint=tmp_path / "b.pt")
    assert trained == [("ViT-FF", 16), ("ViT-FFF", 4), ("ViT-FFF", 2)]
    assert len(list(tmp_path.iterdir())) == 2  # the twins, for whoever comes next
    run(taught(leaf=1, depth=4, settings=settings)[1:], checkpoint=tmp_path / "one.pt")
    assert trained[3:] == [("ViT-FFF", 1)]  # one of them
    # Without a folder, and after a kill while the twin trained, it comes to the same.
    alone = run(taught(settings=settings))
    calls = iter(range(9))

    def kill(*_):
        if next(calls) == 1:
            raise KeyboardInterrupt

    (tmp_path / "c").mkdir()
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(taught(settings=settings), checkpoint=tmp_path / "c" / "a.pt", report=kill)
    again = run(taught(settings=settings), checkpoint=tmp_path / "c" / "a.pt")
    for results in (alone, again):
        assert [(one.G_A, one.ETT, one.history) for one in results] == [(o.G_A, o.ETT, o.history) for o in first]


@pytest.mark.slow
def test_a_store_and_its_checkpoints_can_be_carried_elsewhere(stripes, monkeypatch, tmp_path):
    """Dense twins trained in one place teach trees of all leaf widths in another."""
    settings, trained = dataclasses.replace(TAUGHT, epochs=1), []

    def run(folder, cases):
        with Store(tmp_path / folder / "store.sqlite") as store:
            engine.run(cases, store, device="cpu", root=None, about=about("cpu"), ensemble=1, progress=False)

    (tmp_path / "here").mkdir()
    run("here", twins(settings))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    init = Training.__init__

    def count(self, cases, *args):
        trained.append((cases[0].model, cases[0].leaf_width, cases[0].seed))
        init(self, cases, *args)

    monkeypatch.setattr(Training, "__init__", count)
    run("there", [*taught(settings=settings), *taught(leaf=2, depth=3, settings=settings)])
    assert sorted(trained) == [("ViT-FFF", leaf, seed) for leaf in (2, 4) for seed in (0, 1)]


def test_a_taught_tree_may_be_frozen(stripes):
    settings = dataclasses.replace(TAUGHT, epochs=1, frozen=True)
    teachers = trainer._teachers(taught(settings=settings), "cpu", None, None, None)
    training = Training(taught(settings=settings), torch.device("cpu"), stripes, teachers)
    before = {name: tensor.clone() for name, tensor in training.ensemble.state_dict().items()}
    training.advance()
    for name, tensor in training.ensemble.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("node_" in name) or "temperature" in name


def test_a_teacher_answers_the_mixed_images(stripes, monkeypatch):
    """Those that the student sees, not those of the data set; it learns these answers and no label."""
    settings = dataclasses.replace(TAUGHT, epochs=1, augment=0.0, mirror=True, shift=0.2, cutmix=0.5, mixup=0.5)
    teachers = trainer._teachers(taught(settings=settings), "cpu", None, None, None)
    training = Training(taught(settings=settings), torch.device("cpu"), stripes, teachers)
    seen, losses = [], training.ensemble.losses
    monkeypatch.setattr(training.ensemble, "losses", lambda loss, x, y: seen.append((x, y)) or losses(loss, x, y))
    training._train_epoch()
    whole = training.samples.x[training._order]
    for i, (x, y) in enumerate(seen):
        assert torch.equal(y, teachers.answers(x))
        untouched = (x == whole[:, i]).flatten(2).all(2).float().mean()
        assert untouched < 0.2


def test_a_teacher_has_its_own_rate_and_no_averaging():
    settings = dataclasses.replace(TAUGHT, teacher_rate=0.5, averaging=0.9, fit_images=99, fit_steps=3, cutmix=0.5)
    own = dict(twins(settings)[0].settings)
    assert (own["rate"], own["averaging"], own["teacher_rate"], own["cutmix"]) == (0.5, 0.0, 0.0, 0.5)
    assert (own["fit_images"], own["fit_steps"]) == (Settings().fit_images, 0)


def test_trees_may_learn_the_blocks_before_they_train(stripes):
    """With fit_steps, the student's blocks start closer to the teacher's; fit_images says on how many images."""
    torch.manual_seed(0)
    (case, *_), seen = taught(), []
    model = teacher.build(teacher.teacher_of(case), (3, 8, 8), 3).eval()
    x = torch.randn(300, 3, 8, 8)
    for steps in (0, 200):
        changed = dataclasses.replace(TAUGHT, fit_steps=steps)
        own = dataclasses.replace(case, settings=changed.items())
        torch.manual_seed(1)
        student = Teachers([model]).student(0, own, x).eval()
        with torch.no_grad():
            seen.append((student(x) - model(x)).square().mean().item())
    assert seen[1] < 0.9 * seen[0]


def test_a_damaged_twin_is_named(stripes, tmp_path):
    settings = dataclasses.replace(TAUGHT, epochs=1)
    for case in twins(settings):
        teacher.path_of(tmp_path, case).write_text("no transformer")
    with pytest.raises(ValueError, match=r"dense\.pt is not the teacher stripes ViT-FF .* Remove it"):
        trainer.train(taught(settings=settings), device="cpu", root=None, checkpoint=tmp_path / "own.pt")
