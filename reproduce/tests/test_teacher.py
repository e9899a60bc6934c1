"""Dense transformers that teach those with trees."""

import dataclasses
from functools import partial

import pytest
import torch

from fastff_reproduce import teacher, trainer
from fastff_reproduce.loop import Training
from fastff_reproduce.runs import Case
from fastff_reproduce.settings import Settings

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


def test_a_taught_tree_may_be_frozen(stripes):
    settings = dataclasses.replace(TAUGHT, epochs=1, frozen=True)
    teachers = trainer._teachers(taught(settings=settings), "cpu", None, None, None)
    training = Training(taught(settings=settings), torch.device("cpu"), stripes, teachers)
    before = {name: tensor.clone() for name, tensor in training.ensemble.state_dict().items()}
    training.advance()
    for name, tensor in training.ensemble.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("node_" in name) or "temperature" in name


def test_a_damaged_twin_is_named(stripes, tmp_path):
    settings = dataclasses.replace(TAUGHT, epochs=1)
    for case in twins(settings):
        teacher.path_of(tmp_path, case).write_text("no transformer")
    with pytest.raises(ValueError, match=r"dense\.pt is not the teacher stripes ViT-FF .* Remove it"):
        trainer.train(taught(settings=settings), device="cpu", root=None, checkpoint=tmp_path / "own.pt")
