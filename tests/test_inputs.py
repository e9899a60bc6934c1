"""How inputs are standardised."""

import pytest
import torch

from fastff.experiments import inputs


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
