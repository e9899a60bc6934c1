"""The vision transformer, its training and its experiments."""

import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fastff
from fastff_reproduce import scoring, teacher, trainer
from fastff_reproduce.build import _block, build
from fastff_reproduce.data import Dataset, Part
from fastff_reproduce.ensemble import Ensemble
from fastff_reproduce.experiments import EXPERIMENTS, TABLE3, VIT
from fastff_reproduce.runs import Case
from fastff_reproduce.settings import Settings
from fastff_reproduce.trainer import Training
from fastff_reproduce.vit import ViT, patches

IMAGE = (3, 8, 12)


def tree(dim, depth=2, **options):
    return fastff.FFF(dim, dim, depth=depth, leaf_width=2, **options)


def small(feedforward=tree, **options):
    options = {"layers": 2, "dim": 16, "heads": 2, "dropout": 0.0} | options
    return ViT(IMAGE, 5, feedforward=feedforward, **options)


def images(*batch):
    return torch.rand(*batch, *IMAGE)


@pytest.mark.parametrize(("model", "leaf", "depth", "inference_size"), [("ViT-FF", 128, 0, 128), ("ViT-FFF", 8, 4, 12)])
def test_the_papers_model(model, leaf, depth, inference_size):
    vit = build(Case("cifar10", model, 128, leaf, depth, "paper", "G_A", 0), (3, 32, 32), 10)
    assert vit(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert vit.place.shape == (64, 128)  # 8 x 8 patches
    blocks = [layer.feedforward for layer in vit.layers]
    assert len(blocks) == 4
    assert {(block.training_width, block.inference_size) for block in blocks} == {(128, inference_size)}
    assert all(isinstance(block, fastff.FFF if depth else fastff.baselines.FF) for block in blocks)
    dropped = vit(torch.rand(1, 3, 32, 32).expand(2, -1, -1, -1))
    assert not torch.equal(*dropped)  # in training, by the dropout alone
    assert torch.equal(*vit.eval()(torch.rand(1, 3, 32, 32).expand(2, -1, -1, -1)))


def test_patches_are_squares_row_by_row():
    x = images(3)
    cut = patches(x, 4)
    assert cut.shape == (3, 6, 48)
    assert torch.equal(cut[1, 4].view(3, 4, 4), x[1, :, 4:8, 4:8])  # second row, second column


def test_sizes_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="patches of 5 must fill the image; got one of 8 x 12"):
        small(patch=5)
    with pytest.raises(ValueError, match="multiple of heads; got 16 and 3"):
        small(heads=3)


def test_attention_is_softmax_of_products():
    layer = small(dim=6, heads=2).layers[0]
    x = torch.randn(4, 7, 6)
    q, k, v = (part.view(4, 7, 2, 3) for part in layer.qkv(x).split(6, -1))
    weight = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(3)).softmax(-1)
    wanted = layer.join(torch.einsum("bhij,bjhd->bihd", weight, v).flatten(-2))
    torch.testing.assert_close(layer._attend(x), wanted)


@pytest.mark.parametrize("options", [{}, {"decision": "straight_through"}, {"feedforward": True}])
def test_an_ensemble_trains_as_each_would_alone(options):
    dense = options.pop("feedforward", False)
    make = partial(fastff.baselines.FF, out_features=16, width=8) if dense else partial(tree, **options)
    models = [small(make).double().train() for _ in range(3)]
    x, y = images(3, 4).double(), torch.randint(5, (3, 4))

    def loss(model, output, target):
        extra = 0 if dense else fastff.balance_loss(model) + fastff.hardening_loss(model, "path")
        return F.cross_entropy(output, target) + extra

    ensemble = Ensemble(models, large=True)
    losses = ensemble.losses(loss, x, y)
    grads = torch.autograd.grad(losses.sum(), list(ensemble.trained.values()))
    for i, model in enumerate(models):
        alone = loss(model, model(x[i]), y[i])
        torch.testing.assert_close(losses[i], alone)
        alone.backward()
        for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(grad[i], parameter.grad, msg=name)


def test_members_drop_different_inputs():
    ensemble = Ensemble([small(dropout=0.5)] * 2, large=True)
    x = images(1, 4).expand(2, -1, -1, -1, -1)
    outputs = []
    ensemble.losses(lambda model, output, target: outputs.append(output) or output.sum(), x, torch.zeros(2))
    first, second = outputs
    assert not torch.isclose(first, second).any()


def test_in_evaluation_a_leaf_answers_only_for_the_images_that_visit_it():
    vit = small(partial(tree, depth=5), layers=1).eval()
    x = images(64)
    layer = vit.layers[0].feedforward
    visited = []
    hook = layer.register_forward_hook(lambda layer, args, _: visited.append(layer.route(args[0])))
    with torch.no_grad():
        before = vit(x)
        hook.remove()
        (route,) = visited
        assert route.shape == (64, 6)
        leaf = min(range(32), key=lambda leaf: abs((route == leaf).any(-1).float().mean() - 0.5))  # for about half
        layer.leaf_out_bias[leaf] += torch.randn(16)  # the norm that follows would hide a constant
        changed = (vit(x) != before).any(-1)
    visits = (route == leaf).any(-1)
    assert 0 < visits.sum() < 64
    assert torch.equal(changed, visits)


def test_a_part_by_model():
    table1 = EXPERIMENTS["table1"].cases
    some = table1(seeds=[0], models=["FF"], datasets=["digits"], widths=[100])  # which no tree has
    assert {(case.model, case.width, case.depth) for case in some} == {("FF", 100, 0)}
    whole = table1(seeds=[0])
    assert table1(seeds=[0], models=["FFF"]) == [case for case in whole if case.model == "FFF"]
    with pytest.raises(ValueError, match="the experiment has no model 'MoE'; it has FF, FFF"):
        table1(seeds=[0], models=["FF", "MoE"])


def test_experiment_of_table3():
    cases = EXPERIMENTS["table3"].cases(seeds=range(2))
    assert len(cases) == len({case.key for case in cases}) == 2 * (1 + 1 + 6 * (3 + 1))
    assert {case.goal for case in cases} == {"G_A"}
    assert {case.width for case in cases} == {128}
    sizes = {(case.leaf_width, case.depth) for case in cases if case.model == "ViT-FFF"}
    assert sizes == {(32, 2), (16, 3), (8, 4), (4, 5), (2, 6), (1, 7)}
    ours = [case for case in cases if case.recipe == "fastff"]
    assert {case.settings for case in ours if case.model == "ViT-FFF"} == {VIT.items()}
    own = {"epochs": VIT.epochs // 4, "weight_decay": VIT.twin_decay, "taught": 0.0, "noise": Settings().noise}
    assert {case.settings for case in ours if case.model == "ViT-FF"} == {VIT.changed(own).items()}
    twins = {teacher.dense(case) for case in ours if case.model == "ViT-FFF"}
    assert twins == {case for case in ours if case.model == "ViT-FF"}
    paper = [dict(case.settings) for case in cases if case.recipe == "paper" and case.leaf_width == 8]
    assert (
        sorted((s["hardening"], s["frozen"]) for s in paper) == [(0, True)] * 2 + [(5, False)] * 2 + [(10, False)] * 2
    )
    for settings in paper:
        assert settings["augment"]
        assert (settings["optimizer"], settings["rate"], settings["schedule"]) == ("adam", 4e-4, "constant")
        assert (settings["plateau"], settings["plateau_of"]) == (50, "validation")


def test_experiments_in_part():
    table3, entropy = EXPERIMENTS["table3"], EXPERIMENTS["entropy_vit"]
    some = table3.cases(widths=[64], leaf_widths=[8], recipes=["fastff"], seeds=[7], changes={"epochs": 5})
    assert [(case.model, case.width, case.leaf_width, case.depth) for case in some] == [
        ("ViT-FF", 64, 64, 0),
        ("ViT-FFF", 64, 8, 3),
    ]
    assert [(case.seed, dict(case.settings)["epochs"]) for case in some] == [(7, 2), (7, 5)]
    steps = table3.cases(leaf_widths=[8], recipes=["fastff"], seeds=[0], changes={"steps": 1000, "taught": 0.1})
    assert [dict(case.settings)["steps"] for case in steps] == [100, 1000]
    alone = table3.cases(leaf_widths=[8], recipes=["fastff"], seeds=[0], changes={"taught": 0.0})
    assert {dict(case.settings)["twin_decay"] for case in alone} == {0.0}  # which would change nothing
    # By the paper's recipe, too, one dense transformer teaches all, and it is that of the table.
    paper = table3.cases(leaf_widths=[8], recipes=["paper"], seeds=[0], changes={"taught": 1.0})
    assert {teacher.dense(case) for case in paper[1:]} == {paper[0]}
    with pytest.raises(ValueError, match="twin_decay that of FF"):
        table3.cases(recipes=["fastff"], models=["ViT-FF"], changes={"weight_decay": 0.5})
    with pytest.raises(ValueError, match="follow from its leaf widths"):
        entropy.cases(widths=[64])
    with pytest.raises(ValueError, match="taught is for transformers"):
        EXPERIMENTS["table1"].cases(changes={"taught": 1.0})
    # Two of the three levels of hardening are now one, and are trained once.
    assert len(table3.cases(leaf_widths=[8], recipes=["paper"], seeds=[0], changes={"hardening": 7.0})) == 1 + 2
    (case,) = entropy.cases(recipes=["paper"], seeds=[0])
    assert (case.model, case.width, case.leaf_width, case.depth) == ("ViT-FFF", 128, 32, 2)
    settings = dict(case.settings)
    assert settings["hardening"] == 0.1
    assert settings | {"hardening": 0.0} == dict(TABLE3.items())
    # What Table 3 has trained, the figure of ours takes.
    assert set(entropy.cases(recipes=["fastff"])) <= set(table3.cases(recipes=["fastff"]))


@pytest.fixture
def stripes(monkeypatch):
    """Images of stripes that run in one of three directions, and transformers of a size for them."""

    def draw(count):
        y = torch.arange(count) % 3
        down, across = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        waves = torch.stack([down, across, down + across])[y]
        light = (waves * math.pi / 2 + 6.3 * torch.rand(count, 1, 1)).sin()[:, None] + 0.3 * torch.randn(count, 3, 8, 8)
        return Part((128 + 60 * light).clamp(0, 255).byte(), y)

    def build(case, shape, classes):
        return ViT(shape, classes, feedforward=partial(_block, case), layers=2, dim=16, heads=2)

    dataset = Dataset("stripes", draw(600), draw(150), 3, 255)
    monkeypatch.setattr(trainer, "build", build)
    monkeypatch.setattr(teacher, "build", build)
    monkeypatch.setattr(trainer, "_load", lambda name, root: dataset)
    return dataset


@pytest.mark.parametrize(
    "settings",
    [
        Settings(batch=64, epochs=8, rate=1e-2, decision="soft", last_temperature=30.0, noise=0.3),
        Settings(batch=64, epochs=8, rate=1e-2, frozen=True, augment=1.0, balance=0.0, balanced=False),
        Settings(batch=64, epochs=8, rate=1e-2, sharing=0.5, noise=0.0),
    ],
    ids=["soft", "frozen", "shared"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training(stripes, settings, device):
    """Losses fall, the hard pass learns, and what is measured of the tree is right for inputs of many tokens."""
    cases = [Case("stripes", "ViT-FFF", 16, 4, 2, "fastff", "G_A", seed, settings.items()) for seed in range(2)]
    training = Training(cases, torch.device(device), stripes)
    start = {name: tensor.clone() for name, tensor in training.ensemble.state_dict().items()}
    if settings.balanced:
        assert all(share > 0.8 for share in shares(training, 0))  # of a few tokens, but for those of the same patch
    x, y = training.x[training.training[:, :64]], training.y[training.training[:, :64]]
    before = training.ensemble.losses(lambda _, output, y: F.cross_entropy(output, y), x, y)
    while not training.finished:
        training.advance()
    after = training.ensemble.losses(lambda _, output, y: F.cross_entropy(output, y), x, y)
    assert (after < 0.8 * before).all()
    for name, tensor in training.ensemble.state_dict().items():
        assert torch.equal(tensor, start[name]) == (settings.frozen and "node_" in name) or "temperature" in name
    for i, result in enumerate(training.results()):
        assert result.G_A > 60  # by chance 33
        assert result.M_A is None
        assert result.inference_size == 2 + 4
        assert all(len(layers) == 2 for layers in result.history["entropy"])
        if not settings.frozen:
            assert abs(result.soft_hard_gap) <= 2.0
        member = training.ensemble.member(i, training.generalised.state)
        counts = [used.leaf_count for used in fastff.usage(member, training.x[training.training[i]]).values()]
        assert result.leaves_used == min(int((count > 0).sum()) for count in counts)
        assert result.smallest_share == pytest.approx(min(4 * count.min() / count.sum() for count in counts).item())


TAUGHT = Settings(batch=64, epochs=6, rate=1e-2, augment=1.0, noise=0.0, taught=1.0)


def taught(leaf=4, depth=2, settings=TAUGHT):
    return [Case("stripes", "ViT-FFF", 16, leaf, depth, "fastff", "G_A", seed, settings.items()) for seed in range(2)]


def twins(settings=TAUGHT):
    return [teacher.dense(case) for case in taught(settings=settings)]


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
    training.y.zero_()  # which it would learn, were it not for the teacher
    start = training.ensemble.member(0)(images).argmax(-1) == answers[0].argmax(-1)
    assert start.float().mean() > 0.6
    while not training.finished:
        training.advance()
    for i in range(2):
        agreed = training.ensemble.member(i)(images).argmax(-1) == answers[i].argmax(-1)
        assert agreed.float().mean() > 0.8


def test_a_dense_twin_does_not_depend_on_whom_it_teaches():
    own = dataclasses.replace(TAUGHT, epochs=3, taught=0.0, weight_decay=0.2, noise=Settings().noise)
    assert twins(dataclasses.replace(TAUGHT, epochs=6, taught=0.5, twin_decay=0.2)) == [
        dataclasses.replace(case, model="ViT-FF", leaf_width=16, depth=0) for case in taught(settings=own)
    ]
    assert twins(dataclasses.replace(TAUGHT, epochs=30, taught=0.1)) == twins(dataclasses.replace(TAUGHT, epochs=3))
    assert dict(twins(dataclasses.replace(TAUGHT, epochs=100, taught=0.07))[0].settings)["epochs"] == 7
    other = {"frozen": True, "hardening": 3.0, "noise": 0.5, "decision": "soft"}
    assert twins(dataclasses.replace(TAUGHT, **other)) == twins()


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
    with pytest.raises(ValueError, match=r"dense\.pt is no dense transformer of stripes ViT-FF .* Remove it"):
        trainer.train(taught(settings=settings), device="cpu", root=None, checkpoint=tmp_path / "own.pt")


def shares(training, i):
    found = fastff.usage(training.ensemble.member(i), training.x[training.training[i]])
    return [used.smallest_share for used in found.values()]


def test_entropies_are_means_over_all_tokens(stripes):
    case = Case("stripes", "ViT-FFF", 16, 4, 2, "paper", "G_A", 0, TABLE3.items())
    training = Training([case], torch.device("cpu"), stripes)
    member = copy.deepcopy(training.ensemble.member(0)).train()
    member.dropout = 0.0
    x = training.x[training.validation[0]]
    ((first,), _) = training._measure_trees(scoring.entropies)
    with torch.no_grad():
        member(x)
    wanted = [nodes.mean().item() for nodes in fastff.training.entropies(member).values()]
    assert first == pytest.approx(wanted[0], rel=1e-5)  # the second layer sees what the first does softly
