import copy
import math
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import fastff


def test_noise_fades_and_is_for_training_alone():
    torch.manual_seed(0)
    layer = fastff.FFF(3, 2, depth=0, leaf_width=1, activation="identity", bias=False)
    layer.leaf_in_weight.data.fill_(1)
    layer.leaf_out_weight.data.fill_(1)
    x = 5 * torch.randn(20000, 3)
    recipe = fastff.Recipe(layer, steps=4, noise=0.5, balance=0)
    for share in (1, (1 + math.cos(math.pi / 4)) / 2, 0.5):
        change = layer.train()(x)[:, 0] - x.sum(1)
        assert change.std().item() == pytest.approx(0.5 * share * 5 * math.sqrt(3), rel=0.03)
        torch.testing.assert_close(layer.eval()(x)[:, 0], x.sum(1), rtol=1e-4, atol=1e-4)
        recipe.step()
    recipe.step()
    torch.testing.assert_close(layer.train()(x)[:, 0], x.sum(1), rtol=1e-4, atol=1e-4)


def test_a_layer_called_by_keyword_is_blurred_too():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    fastff.Recipe(layer, steps=4)
    x = torch.randn(8, 3)
    assert not torch.equal(layer.train()(x=x), layer(x=x))
    assert torch.equal(layer.eval()(x=x), layer(x=x))


def test_a_recipe_can_be_closed_early():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    recipe = fastff.Recipe(layer, steps=4)
    recipe.close()
    x = torch.randn(8, 3)
    assert torch.equal(layer.train()(x), layer(x))


def test_a_second_recipe_takes_over():
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    fastff.Recipe(layer, steps=4)
    recipe = fastff.Recipe(layer, steps=1)
    assert len(layer._forward_pre_hooks) == 1
    recipe.step()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_has_neither_the_noise_nor_the_data(copied):
    layer = fastff.FFF(3, 2, depth=1, leaf_width=1)
    # A loader with workers can be neither copied nor pickled; nor can a function without a name.
    loader = DataLoader(torch.randn(64, 3), batch_size=16, collate_fn=lambda batch: torch.stack(batch))
    recipe = fastff.Recipe(layer, loader, steps=4)
    twin, x = copied(layer), torch.randn(8, 3)
    assert torch.equal(twin.train()(x), twin(x))
    assert not torch.equal(layer.train()(x), layer(x)), "the layer itself is still blurred"
    recipe = fastff.Recipe(twin, steps=1, reset_trees=False)
    assert not torch.equal(twin.train()(x), twin(x)), "a copy may have a recipe of its own"
    recipe.step()
    assert torch.equal(twin(x), twin(x))
