"""The vision transformer and its training."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fastff
from fastff_reproduce import scoring
from fastff_reproduce.build import build
from fastff_reproduce.ensemble import Ensemble
from fastff_reproduce.loop import Training
from fastff_reproduce.recipes import TABLE3
from fastff_reproduce.runs import Case
from fastff_reproduce.settings import Settings
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Settings(batch=64, epochs=8, rate=1e-2, decision="soft", training_temperature=30.0, noise=0.3),
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
    x, y = training.samples.x[training.samples.training[:, :64]], training.samples.y[training.samples.training[:, :64]]
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
        counts = [
            used.leaf_count for used in fastff.usage(member, training.samples.x[training.samples.training[i]]).values()
        ]
        assert result.leaves_used == min(int((count > 0).sum()) for count in counts)
        assert result.smallest_share == pytest.approx(min(4 * count.min() / count.sum() for count in counts).item())


def shares(training, i):
    found = fastff.usage(training.ensemble.member(i), training.samples.x[training.samples.training[i]])
    return [used.smallest_share for used in found.values()]


def test_entropies_are_means_over_all_tokens(stripes):
    case = Case("stripes", "ViT-FFF", 16, 4, 2, "paper", "G_A", 0, TABLE3.items())
    training = Training([case], torch.device("cpu"), stripes)
    member = copy.deepcopy(training.ensemble.member(0)).train()
    member.dropout = 0.0
    x = training.samples.x[training.samples.validation[0]]
    ((first,), _) = training._measure_trees(scoring.entropies)
    with torch.no_grad():
        member(x)
    wanted = [nodes.mean().item() for nodes in fastff.training.entropies(member).values()]
    assert first == pytest.approx(wanted[0], rel=1e-5)  # the second layer sees what the first does softly
