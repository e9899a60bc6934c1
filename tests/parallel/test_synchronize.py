"""synchronize_ in one process; two processes train as one in test_distributed.py."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastff
from helpers import make, one_rank, two_layers

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def test_a_rank_alone_computes_the_same(tmp_path):
    """No loss, tree or use of the model changes."""
    x = torch.randn(40, 5, dtype=torch.float64)
    model = two_layers()
    twin = copy.deepcopy(model)
    with one_rank(tmp_path):
        assert fastff.parallel.synchronize_(model) is model
        for one in (model, twin):
            torch.manual_seed(1)
            fastff.initialize_tree_(one, x)
            one(x)
        assert torch.equal(fastff.balance_loss(model), fastff.balance_loss(twin))
        fastff.rebalance_(model, x)
        fastff.rebalance_(twin, x)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        for name, used in fastff.parallel.usage(model, x).items():
            assert torch.equal(used.leaf_count, fastff.usage(twin, x)[name].leaf_count)
    fastff.balance_loss(model)  # the group is gone


def test_without_synchronize_nothing_communicates(tmp_path, monkeypatch):
    """A model beside the distributed one: a probe on the first rank alone must not wait for the others."""
    with one_rank(tmp_path):
        for name in ("all_reduce", "all_gather", "broadcast", "all_to_all_single"):
            monkeypatch.setattr(dist, name, None)
        model, x = two_layers(), torch.randn(40, 5, dtype=torch.float64)
        recipe = fastff.Recipe(model, x, steps=2, rebalance_every=1)
        (model(x).square().mean() + recipe.loss()).backward()
        recipe.step()
        fastff.parallel.usage(model, x)


def test_layers_of_one_model_are_synchronised_together(tmp_path):
    model = nn.Sequential(make(5, 5), make(5, 4))
    with one_rank(tmp_path):
        fastff.parallel.synchronize_(model[0])
        model(torch.randn(3, 5, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"Call fastff\.parallel\.synchronize_ on the whole model"):
            fastff.balance_loss(model)


def test_dtensors_are_refused_where_a_tree_is_placed(tmp_path):
    from torch.distributed.fsdp import fully_shard

    model, x = make(), torch.randn(40, 5, dtype=torch.float64)
    with one_rank(tmp_path):
        fully_shard(model)
        with pytest.raises(TypeError, match="or create the Recipe, before fully_shard"):
            fastff.initialize_tree_(model, x)
        with pytest.raises(TypeError, match=r"Call the model that was sharded, or its unshard\(\) first"):
            model.route(x)
        model.unshard()
        assert model.route(x).shape == (40,)


def test_a_sharded_model_says_how_to_save_it(tmp_path):
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6)), nn.LayerNorm(6)).eval()
    fastff.replace_(model, depth=2)
    model.train()
    x = torch.randn(8, 6)
    expected = model.eval()(x)
    with one_rank(tmp_path):
        fastff.parallel.shard_leaves_(model)
        with pytest.raises(ValueError, match=r"Call fastff\.parallel\.gather_leaves_ after shard_leaves_"):
            fastff.save(model, tmp_path / "saved")
        with pytest.raises(TypeError, match="cannot be pickled"):
            torch.save(model, tmp_path / "whole.pt")
        torch.testing.assert_close(model(x), expected)
        fastff.save(fastff.parallel.gather_leaves_(model), tmp_path / "saved")
    fresh = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6)), nn.LayerNorm(6)).eval()
    fastff.load_(fresh, tmp_path / "saved")
    torch.testing.assert_close(fresh(x), expected)
