"""What the losses make of the visits that shedding leaves behind."""

import math

import pytest
import torch

import fastff
from fastff import functional
from fastff.training.losses import REDUCTIONS, bernoulli_entropy
from fastff.visits import check_epsilon, leaf_mass, log_flow, visits
from helpers import make

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
KINDS = ("node", "leaf")


def forward(epsilon, batch=60, **options):
    torch.manual_seed(0)
    layer = make(**{"depth": 4, "scale": 6.0} | options, epsilon=epsilon)
    x = torch.randn(batch, 5, dtype=torch.float64)
    layer(x)
    return layer, x


def losses(layer):
    return [fastff.hardening_loss(layer, r) for r in REDUCTIONS] + [fastff.balance_loss(layer, k) for k in KINDS]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_where_nothing_is_shed_all_losses_and_their_gradients_are_the_soft_ones(backend, depth):
    found = []
    with fastff.backend(backend):
        for epsilon in (0.0, 1e-300):
            layer, _ = forward(epsilon, depth=depth)
            values = losses(layer)
            sum(k * value for k, value in enumerate(values, 1)).backward()
            used = fastff.usage(layer)[""]
            gradient = torch.zeros_like(layer.node_weight) if layer.node_weight.grad is None else layer.node_weight.grad
            found.append([*values, gradient, fastff.training.entropies(layer)[""]])
            found[-1] += [used.leaf_count, used.leaf_mass, used.node_count, used.node_mass]
            assert used.samples == 60
    for plain, shed in zip(*found, strict=True):
        torch.testing.assert_close(shed, plain, **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"transposition": 0.3}, {"decision": "straight_through"}])
def test_the_walk_leaves_what_the_specification_leaves(options, monkeypatch):
    monkeypatch.setattr("fastff.backends.reference.torch.rand_like", lambda t: (t.detach().abs() * 1e3) % 1)
    found = []
    for backend in ("auto", "reference"):
        with fastff.backend(backend):
            layer, _ = forward(0.3, **options)
        values = losses(layer)
        sum(values).backward()
        used = fastff.usage(layer)[""]
        found.append([*values, layer.node_weight.grad, fastff.training.entropies(layer)[""]])
        found[-1] += [used.leaf_count, used.leaf_mass, used.node_count, used.node_mass]
    for walk, specification in zip(*found, strict=True):
        torch.testing.assert_close(walk, specification, **TOLERANCE)


def test_nodes_that_a_sample_does_not_visit_do_not_count():
    """Against a loop over samples and nodes."""
    layer, x = forward(0.3)
    logits = layer.node_logits(x).detach()
    entropy, total, visited, weighted = bernoulli_entropy(logits), 0.0, 0, 0.0
    of_node: list[list[float]] = [[] for _ in range(15)]
    for b in range(60):
        reach = {0: 1.0}
        for i in range(15):
            if i in reach:
                p = torch.sigmoid(logits[b, i]).item()
                sides = {2 * i + 1: reach[i] * (1 - p), 2 * i + 2: reach[i] * p}
                reach |= {child: weight for child, weight in sides.items() if weight >= 0.3 / 16}
                total, visited = total + entropy[b, i].item(), visited + 1
                weighted += reach[i] * entropy[b, i].item()
                of_node[i].append(entropy[b, i].item())
    assert visited < 60 * 15
    assert fastff.hardening_loss(layer, "sum").item() == pytest.approx(total)
    assert fastff.hardening_loss(layer, "mean").item() == pytest.approx(total / visited)
    assert fastff.hardening_loss(layer, "path").item() == pytest.approx(weighted / 60)
    means = [sum(values) / max(len(values), 1) for values in of_node]
    torch.testing.assert_close(fastff.training.entropies(layer)[""], torch.tensor(means, dtype=torch.float64))


def test_the_path_entropy_and_the_balance_are_near_the_soft_ones():
    """The entropy that is left out: less than epsilon of a sample ends below shed nodes, with at most depth * log 2."""
    plain = losses(forward(0.0)[0])
    for epsilon in (0.3, 0.03, 0.003):
        layer = forward(epsilon)[0]
        entropy = fastff.hardening_loss(layer, "path")
        assert plain[2] - epsilon * 4 * math.log(2) < entropy <= plain[2] + 1e-12
        for kind, wanted in zip(KINDS, plain[3:], strict=True):
            assert abs(fastff.balance_loss(layer, kind) - wanted) < epsilon * wanted


def test_a_collapsed_tree_is_brought_back():
    """No sample visits the right half: its nodes have the least value and no gradient, and the root a finite one."""
    layer, x = forward(0.1, scale=0.0)
    with torch.no_grad():
        layer.node_bias[0] = -1e4
    layer(x)
    loss = fastff.balance_loss(layer)
    loss.backward()
    assert 1000 < loss < 1e5
    assert layer.node_bias.grad[0] < 0  # descent raises the bias, towards the right
    assert layer.node_bias.grad.isfinite().all()
    assert not layer.node_bias.grad[[2, 5, 6]].any()
    assert fastff.training.entropies(layer)[""][2] == 0
    assert fastff.usage(layer)[""].leaves_used == 1


def test_rows_with_a_reach_of_zero_are_no_visits():
    logits, reach = torch.tensor([0.3, -2.0, 5.0]), torch.tensor([1.0, 0.5, 0.0])
    node = torch.tensor([0, 2, 2])
    flow = log_flow(logits, reach, node, 3).exp()
    sides = torch.sigmoid(torch.stack([-logits, logits], 1)) * reach.unsqueeze(1)
    torch.testing.assert_close(flow, torch.stack([sides[0], torch.zeros(2), sides[1]]))
    torch.testing.assert_close(leaf_mass(logits, reach, node, 1, 2), torch.cat([torch.zeros(2), sides[1]]))
    torch.testing.assert_close(leaf_mass(logits, reach, node, 5, 0), torch.tensor([5.0]))


def test_no_graph_is_kept_after_backward():
    """Neither when the losses were used, nor when they were not; nothing is copied or saved."""
    for use in (True, False):
        layer, x = forward(0.1)
        (layer(x).square().sum() + (fastff.hardening_loss(layer) if use else 0)).backward()
        assert layer.last_visits.grad_fn is None
        assert layer.last_reach.grad_fn is None
        with pytest.raises(RuntimeError, match="has no gradient: backward has passed it"):
            fastff.hardening_loss(layer)
        with torch.no_grad():
            assert fastff.hardening_loss(layer) > 0
    assert all(t is not None for t in visits(layer, layer.last_visits))
    assert torch.nn.Module.__getstate__ is not type(layer).__getstate__
    assert layer.__getstate__()["last_reach"] is None


def test_empty_batches_have_losses():
    layer, _ = forward(0.1, batch=0)
    assert all(value == 0 for value in losses(layer)[:4])


def test_wrong_choices_are_named():
    layer, x = forward(0.1)
    assert check_epsilon(0, "sampled") == 0
    with pytest.raises(ValueError, match=r"epsilon is a probability and must be in \[0, 1\); got 1"):
        fastff.FFF(5, 4, depth=2, leaf_width=3, epsilon=1)
    with pytest.raises(ValueError, match=r'decision="sampled" runs few leaves anyway; got epsilon=0.1. Set epsilon=0'):
        fastff.FFF(5, 4, depth=2, leaf_width=3, epsilon=0.1, decision="sampled")
    with pytest.raises(ValueError, match="epsilon is a probability"):
        functional.shed(x, layer.tree, layer.leaves, epsilon=-1)
    layer.decision = "sampled"
    with pytest.raises(ValueError, match="Set epsilon=0"):
        layer(x)
    assert "epsilon=0.1" in repr(layer)


def test_localised_optimizers_refuse_it():
    layer, x = forward(0.1)
    optimizer = fastff.optim.LocalSGD(layer, lr=0.1, local_batch=4)
    layer(x).sum().backward()
    with pytest.raises(ValueError, match=r"has epsilon=0.1, which sheds some. Set it to 0, or use torch.optim"):
        optimizer.step()


@pytest.mark.parametrize("decision", ["soft", "straight_through"])
def test_a_recipe_sheds(decision):
    layer, x = forward(0.0)
    recipe = fastff.Recipe(layer, x, steps=3, decision=decision, epsilon=0.2, temperature=(1.0, 30.0), hardening=0.1)
    assert (layer.epsilon, layer.decision) == (0.2, decision)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        loss = layer(x).square().mean() + recipe.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()
    assert len(layer.last_leaf) == 60
    with pytest.raises(ValueError, match="Set epsilon=0"):
        fastff.Recipe(layer, x, steps=3, decision="sampled", epsilon=0.2)
    fastff.Recipe(layer, x, steps=3)
    assert layer.epsilon == 0
