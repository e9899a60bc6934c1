import pytest
import torch

import oracle
from fastff import activations
from helpers import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_named_activations_are_what_they_are_called(name):
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    expected = [oracle.ACTIVATIONS[oracle.GATED.get(name, name)](value) for value in x.tolist()]
    torch.testing.assert_close(activations.function(name)(x), torch.tensor(expected, dtype=torch.float64))
    assert activations.is_gated(name) == (name in oracle.GATED)
    activations.check(name)


def test_a_callable_is_itself():
    assert activations.function(torch.sin) is torch.sin
    assert not activations.is_gated(torch.sin)
    activations.check(torch.nn.PReLU())


def test_the_error_lists_the_names():
    with pytest.raises(ValueError, match=f"one of {', '.join(ACTIVATIONS)}, or a callable; got 'mish'"):
        activations.check("mish")
