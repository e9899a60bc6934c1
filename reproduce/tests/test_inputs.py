"""How inputs are standardised."""

import pytest
import torch

from fastff_reproduce import inputs


@pytest.mark.parametrize("shape", [(50, 6), (50, 2, 3, 3)])
def test_inputs_are_standardised_pixel_by_pixel(shape):
    torch.manual_seed(0)
    scale, shift = 3 * torch.rand(shape[1:]) + 0.1, torch.randn(shape[1:])
    scale.view(-1)[4] = 0  # this one never changes
    x, test = torch.randn(shape) * scale + shift, torch.randn(shape) * scale + shift
    means, deviations, before = x.double().mean(0), x.double().std(0), test.clone()
    inputs.standardise(x, test, by_pixel=True)
    one = torch.ones(shape[1:])
    one.view(-1)[4] = 0
    torch.testing.assert_close(x.mean(0), torch.zeros(shape[1:]), rtol=0, atol=1e-6)
    torch.testing.assert_close(x.std(0), one, rtol=1e-5, atol=1e-6)
    expected = (before.double() - means) / torch.where(one > 0, deviations, 1)
    torch.testing.assert_close(test.double(), expected, rtol=0, atol=1e-5)


def test_flat_inputs_have_the_mean_of_each_pixel_and_one_deviation_for_all():
    torch.manual_seed(0)
    scale, shift = torch.tensor([0.01, 1, 3, 0]), torch.tensor([5.0, -2, 0, 7])
    x, test = torch.randn(60, 4) * scale + shift, torch.randn(30, 4) * scale + shift
    means, before, after = x.double().mean(0), x.double(), test.double()
    inputs.standardise(x, test, by_pixel=False)
    deviation = (before - means).std()
    torch.testing.assert_close(x.double(), (before - means) / deviation, rtol=0, atol=1e-6)
    torch.testing.assert_close(test.double(), (after - means) / deviation, rtol=0, atol=1e-6)


def test_images_are_standardised_by_channel():
    torch.manual_seed(0)
    scale, shift = torch.tensor([0.5, 3]).view(2, 1, 1), torch.tensor([1.0, -4]).view(2, 1, 1)
    x, test = torch.randn(50, 2, 3, 3) * scale + shift, torch.randn(20, 2, 3, 3) * scale + shift
    before, after = x.double(), test.double()
    inputs.standardise(x, test, by_pixel=False)
    mean, deviation = (getattr(before, name)((0, 2, 3), keepdim=True) for name in ("mean", "std"))
    torch.testing.assert_close(x.double(), (before - mean) / deviation, rtol=0, atol=1e-5)
    torch.testing.assert_close(test.double(), (after - mean) / deviation, rtol=0, atol=1e-5)
