"""How inputs are scaled and split."""

import pytest
import torch
from small_cases import cases

from fastff_reproduce import samples, trainer
from fastff_reproduce.loop import Training
from fastff_reproduce.recipes import PAPER
from fastff_reproduce.trainer import train


@pytest.mark.parametrize("shape", [(50, 6), (50, 2, 3, 3)])
def test_inputs_are_standardised_pixel_by_pixel(shape):
    torch.manual_seed(0)
    scale, shift = 3 * torch.rand(shape[1:]) + 0.1, torch.randn(shape[1:])
    scale.view(-1)[4] = 0  # this one never changes
    x, test = torch.randn(shape) * scale + shift, torch.randn(shape) * scale + shift
    means, deviations, before = x.double().mean(0), x.double().std(0), test.clone()
    samples.standardise(x, test, by_pixel=True)
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
    samples.standardise(x, test, by_pixel=False)
    deviation = (before - means).std()
    torch.testing.assert_close(x.double(), (before - means) / deviation, rtol=0, atol=1e-6)
    torch.testing.assert_close(test.double(), (after - means) / deviation, rtol=0, atol=1e-6)


def test_images_are_standardised_by_channel():
    torch.manual_seed(0)
    scale, shift = torch.tensor([0.5, 3]).view(2, 1, 1), torch.tensor([1.0, -4]).view(2, 1, 1)
    x, test = torch.randn(50, 2, 3, 3) * scale + shift, torch.randn(20, 2, 3, 3) * scale + shift
    before, after = x.double(), test.double()
    samples.standardise(x, test, by_pixel=False)
    mean, deviation = (getattr(before, name)((0, 2, 3), keepdim=True) for name in ("mean", "std"))
    torch.testing.assert_close(x.double(), (before - mean) / deviation, rtol=0, atol=1e-5)
    torch.testing.assert_close(test.double(), (after - mean) / deviation, rtol=0, atol=1e-5)


def test_inputs_are_standardised_by_the_training_file():
    training = Training(cases(), torch.device("cpu"), trainer._load("digits", None))
    assert training.samples.x.mean().item() == pytest.approx(0, abs=1e-5)
    assert training.samples.x.std().item() == pytest.approx(1, abs=1e-5)
    raw = Training(cases(settings=PAPER), torch.device("cpu"), trainer._load("digits", None))
    assert (raw.samples.x.min().item(), raw.samples.x.max().item()) == (0, 1)


@pytest.mark.slow
def test_seeds_are_different_trainings_of_different_splits():
    training = Training(cases(), torch.device("cpu"), trainer._load("digits", None))
    both = [set(part.tolist()) for part in (*training.samples.training, *training.samples.validation)]
    assert both[0] != both[1]
    assert not both[0] & both[2]
    assert len(both[0] | both[2]) == len(training.samples.x)
    first, second = train(cases(), device="cpu", root=None)
    assert first.history != second.history
