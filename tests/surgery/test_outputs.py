"""The operated model's outputs are compared with the dense model's."""

import pytest
import torch
from torch import nn

import fastff
from surgery_models import Mlp, assert_untouched, snapshot, stack


class Asking(nn.Module):
    """It asks more of its block than f(x)."""

    class Scaled(Mlp):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    def __init__(self):
        super().__init__()
        self.mlp = self.Scaled()

    def forward(self, x):
        return x + self.mlp(x, scale=2.0)


class Squeezing(Mlp):
    def forward(self, x):
        return super().forward(x).squeeze(1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Asking, {"example": torch.randn(5, 16)}, "the model does not run with FFF layers: .*scale"),
        (
            lambda: nn.Sequential(Squeezing()),
            {"example": torch.randn(5, 1, 16)},
            r"16\)\] instead of \[\(5, 16",
        ),
        (lambda: nn.Sequential(Squeezing()), {"init": "data", "data": torch.randn(50, 1, 16)}, "instead of"),
    ],
)
def test_what_an_example_shows_is_checked_after_the_surgery(make, options, message):
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        fastff.replace_(model, depth=1, **options)
    assert_untouched(model, before)


def test_an_example_that_does_not_run_is_said():
    """It was passed over without a word, and nothing was checked."""
    model = stack(Mlp())
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"the model does not run on example=.*Pass a batch as the model takes it"):
        fastff.replace_(model, depth=1, example=torch.randn(4, 5))
    assert_untouched(model, before)
