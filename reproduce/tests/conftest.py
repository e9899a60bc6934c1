"""Fixtures of several test files."""

import math
from functools import partial

import pytest
import torch

from fastff_reproduce import members, teacher, trainer
from fastff_reproduce.build import _block
from fastff_reproduce.data import Dataset, Part
from fastff_reproduce.vit import ViT


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
    monkeypatch.setattr(members, "build", build)
    monkeypatch.setattr(teacher, "build", build)
    monkeypatch.setattr(trainer, "_load", lambda name, root: dataset)
    return dataset
