"""Every public name, used as a user would. It imports fastff, torch and pytest alone.

`make wheel` runs this file against the installed wheel, in a folder from which the sources cannot be imported. With
FASTFF_REQUIRE_NATIVE=1 the native library must be there.
"""

import copy
import inspect
import os
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastff


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def blobs(samples=512):
    """Eight clusters in the plane, of two classes."""
    centre = torch.randint(8, (samples,))
    angle = centre * (torch.pi / 4)
    points = torch.stack([angle.cos(), angle.sin()], -1) * 3 + 0.3 * torch.randn(samples, 2)
    return points, centre % 2


def mlp():
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6))


def test_every_public_name_is_used_here():
    source = inspect.getsource(sys.modules[__name__])
    names = [f"fastff.{name}" for name in fastff.__all__]
    for module in (fastff.functional, fastff.training, fastff.surgery):
        names += [f"{module.__name__}.{name}" for name in module.__all__ if name not in fastff.__all__]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", source)] == []


def test_layer():
    layer = fastff.FFF(6, 5, depth=3, leaf_width=4)
    x = torch.randn(7, 3, 6)
    assert layer.train()(x).shape == (7, 3, 5)
    layer.eval().requires_grad_(False)
    assert layer(x).shape == (7, 3, 5)
    assert layer.route(x).shape == (7, 3)
    assert layer.mixture(x).sum(-1).allclose(torch.ones(7, 3))
    assert (layer.training_width, layer.inference_size) == (32, 7)


def test_explain_names_the_backend():
    """A float32 layer on the CPU runs on the native library, where there is one."""
    layer, x = fastff.FFF(6, 5, depth=3, leaf_width=4).eval().requires_grad_(False), torch.randn(9, 6)
    explanation = fastff.explain(layer, x)
    assert explanation.mode == "hard"
    if os.environ.get("FASTFF_REQUIRE_NATIVE") == "1":
        assert explanation.backend == "native"
        assert str(explanation).startswith("hard pass by native")


def test_backends_agree():
    layer, x = fastff.FFF(60, 50, depth=4, leaf_width=8).eval().requires_grad_(False), torch.randn(99, 60)
    y = layer(x)
    with fastff.backend("reference"):
        assert fastff.explain(layer, x).backend == "reference"
        torch.testing.assert_close(layer(x), y)


def test_a_page_about_regions(tmp_path):
    """Its template is a part of the package."""
    layer, x = fastff.FFF(6, 5, depth=3, leaf_width=4), torch.randn(40, 6)
    page = fastff.regions.explore(layer, x, tmp_path / "page.html", progress=False).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "{{" not in page


def test_functional():
    layer, x = fastff.FFF(6, 5, depth=3, leaf_width=4).eval(), torch.randn(9, 6)
    tree = fastff.functional.Tree(layer.node_weight, layer.node_bias)
    leaves = fastff.functional.Leaves(
        layer.leaf_in_weight, layer.leaf_in_bias, layer.leaf_out_weight, layer.leaf_out_bias
    )
    leaf = fastff.functional.route(x, tree)
    assert torch.equal(leaf, layer.route(x))
    y = fastff.functional.hard(x, tree, leaves)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(fastff.functional.visit(x, leaf, leaves, "relu"), y)
    soft = fastff.functional.soft(x, tree, leaves)
    assert isinstance(soft, fastff.functional.Soft)
    torch.testing.assert_close(soft.output, layer.soft(x))
    sampled = fastff.functional.sampled(x, tree, leaves)
    assert isinstance(sampled, fastff.functional.Sampled)
    assert torch.equal(sampled.leaf[:, 0], leaf)
    torch.testing.assert_close(sampled.output, y)
    shed = fastff.functional.shed(x, tree, leaves, epsilon=0.5)
    assert isinstance(shed, fastff.functional.Shed)
    assert torch.equal(shed.leaf, leaf)
    assert (shed.reach > 0.5 / 8).all()
    logits = fastff.functional.node_logits(x, tree)
    torch.testing.assert_close(fastff.functional.mixture(logits), soft.mixture)
    assert torch.equal(fastff.functional.walk(logits), leaf)


def test_recipe_learns():
    x, y = blobs()
    model = nn.Sequential(fastff.FFF(2, 16, depth=3, leaf_width=4), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    recipe = fastff.Recipe(model, x, steps=100)
    for _ in range(100):
        loss = F.cross_entropy(model(x), y) + recipe.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recipe.step()
    assert (model.eval()(x).argmax(-1) == y).float().mean() > 0.95
    assert fastff.usage(model, x)["0"].leaves_used == 8


@pytest.mark.parametrize("optimizer", ["LocalSGD", "LocalAdam"])
def test_own_loop(optimizer):
    x, y = blobs()
    model = fastff.FFF(2, 2, depth=3, leaf_width=8)
    fastff.initialize_tree_(model, x)
    optimizer = getattr(fastff.optim, optimizer)(model, lr=1e-2, local_batch=16)
    schedule = fastff.training.Schedule("exponential", 1.0, 10.0, steps=20)
    before = F.cross_entropy(model(x), y).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss + 0.1 * fastff.hardening_loss(model) + 0.1 * fastff.balance_loss(model)).backward()
        optimizer.step()
        fastff.training.set_temperature_(model, schedule.step())
    assert loss < before
    assert fastff.training.entropies(model)[""].shape == (7,)
    assert model.temperature == pytest.approx(10)
    fastff.rebalance_(model, x)
    assert fastff.usage(model, x)[""].leaves_used == 8


def test_parallel():
    """Without a process group, models train alone; several processes are in tests/test_distributed.py."""
    layer, (x, _) = fastff.FFF(2, 2, depth=3, leaf_width=8, decision="sampled"), blobs()
    with pytest.raises(RuntimeError, match="torchrun"):
        fastff.parallel.synchronize_(layer)
    assert fastff.parallel.usage(layer, x)[""].samples == 512


def test_baselines():
    x = torch.randn(9, 6)
    assert fastff.baselines.FF(6, 5, width=16)(x).shape == (9, 5)
    moe = fastff.baselines.MoE(6, 5, num_experts=4, expert_width=8)
    assert moe(x).shape == (9, 5)
    (fastff.baselines.importance_loss(moe) + fastff.baselines.load_loss(moe)).backward()
    assert moe.gate_weight.grad is not None


def test_surgery(tmp_path):
    """Replace, distill, save, load: the loaded model computes what the saved one does."""
    pytest.importorskip("safetensors")
    model, data = nn.Sequential(mlp(), nn.LayerNorm(6)).eval(), torch.randn(2048, 6)
    fresh, bare = copy.deepcopy(model), copy.deepcopy(model)
    report = fastff.replace_(model, depth=2, leaf_width=8, init="data", data=data)
    assert isinstance(report, fastff.surgery.Report)
    assert all(isinstance(block, fastff.surgery.Block) for block in report.blocks.values())
    result = fastff.distill_(model, report, data, steps=20, progress=False)
    assert isinstance(result, fastff.surgery.Distillation)
    assert isinstance(result[0], fastff.surgery.Distilled)
    fastff.save(model, tmp_path)
    fastff.load_(fresh, tmp_path)
    assert torch.equal(fresh(data), model(data))
    fastff.apply_(bare, report.specification)
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare(data), model(data))


def test_compare():
    """FFF beside its controls; the model is not changed."""
    model, data = nn.Sequential(mlp(), nn.LayerNorm(6)).eval(), torch.randn(600, 6)
    before = model(data)
    made = fastff.surgery.compare(
        model, [(2, 8)], data[:500], held_out=data[500:], steps=3, budget=0.02, progress=False
    )
    assert isinstance(made, fastff.surgery.Comparison)
    assert all(isinstance(row, fastff.surgery.Compared) for row in made.rows)
    assert [row.method for row in made.rows] == [
        "original",
        "FFF",
        "FFF int8",
        "dense",
        "dense int8",
        "low rank",
        "pruned",
        "int8",
        "int8 weights",
    ]
    assert torch.equal(model(data), before)


def test_quantize(tmp_path):
    """int8 leaves compute nearly the same, and a save keeps them."""
    pytest.importorskip("safetensors")
    model, x = nn.Sequential(mlp(), nn.LayerNorm(6)).eval(), torch.randn(64, 6)
    fresh = copy.deepcopy(model)
    fastff.replace_(model, depth=2)
    before = model(x)
    found = fastff.surgery.precision_of(model)
    assert isinstance(found, fastff.surgery.Precision)
    assert found.float_leaves == ["0"]
    report = fastff.quantize_(model)
    assert fastff.surgery.precision_of(model).float_leaves == []
    assert isinstance(report, fastff.surgery.Quantization)
    assert report.bytes_after < report.bytes_before
    assert (model(x) - before).norm() < 0.02 * before.norm()
    fastff.save(model, tmp_path)
    fastff.load_(fresh, tmp_path)
    assert torch.equal(fresh(x), model(x))


def test_reads_fastfeedforward():
    """The parameters of a fastfeedforward 0.2.1 layer, without that package."""
    old = {
        "node_weights": torch.randn(3, 6),
        "node_biases": torch.randn(3, 1),
        "w1s": torch.randn(4, 6, 8),
        "b1s": torch.randn(4, 8),
        "w2s": torch.randn(4, 8, 5),
        "b2s": torch.randn(4, 5),
    }
    layer = fastff.compat.from_fastfeedforward(old)
    assert layer.eval()(torch.randn(9, 6)).shape == (9, 5)
    layer.load_state_dict(fastff.compat.convert_state_dict(old))
