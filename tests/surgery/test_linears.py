"""Linear layers are read by what they compute: subclasses of nn.Linear, and what only looks like one."""

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.linears import read_linear
from surgery_models import VECTORS, between


class Product(nn.Linear):
    """As Falcon's: its own forward, the same result."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    def forward(self, x):
        return 1.001 * super().forward(x)


class Clipped(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-50, 50)


class Noisy(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return nn.functional.dropout(y, 0.1, self.training)


class Raising(nn.Linear):
    def forward(self, x):
        raise RuntimeError("needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_subclass_that_computes_the_same_is_linear(dtype, bias):
    module = Product(7, 5, bias=bias).to(dtype)
    linear = read_linear(module)
    assert not linear.trouble
    assert torch.equal(linear.weight, module.weight)
    assert (linear.bias is None) == (not bias)


@pytest.mark.parametrize("kind", [Scaled, Clipped, Noisy, Raising])
def test_a_subclass_that_computes_something_else_is_refused(kind):
    assert f"its {kind.__name__} has its own forward, which computes something else" in read_linear(kind(7, 5)).trouble
    with pytest.raises(ValueError, match=r"computes something else than nn\.Linear"):
        fastff.replace_(between(nn.GELU(), linear=kind)(), depth=1)


def test_a_block_of_such_layers_is_replaced():
    model = between(nn.GELU(), linear=Product)()
    dense = model(VECTORS)
    fastff.replace_(model, depth=1)
    torch.testing.assert_close(model.train()(VECTORS), dense)


def test_the_random_state_is_kept():
    module = Noisy(7, 5)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    read_linear(module)
    assert torch.equal(torch.rand(1), expected)


def test_a_quantised_layer_with_buffers_is_no_transposed_linear():
    """I-BERT's QuantLinear has a square weight, a bias and buffers, and returns a tuple: the search crashed on it."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
            self.register_buffer("integers", torch.zeros(4, 4))

    assert read_linear(Quantised()) is None
