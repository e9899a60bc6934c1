import pytest
import torch

from fastff.checks import allocate, check_int, check_probability


def test_integers():
    assert check_int("depth", torch.tensor(3), 0) == 3
    for value in (2.0, "2", None, True):
        with pytest.raises(TypeError, match="depth must be an integer; got"):
            check_int("depth", value, 0)


@pytest.mark.parametrize("value", [-1e-9, 1, 1.5, float("nan")])
def test_probabilities(value):
    check_probability("dropout", 0)
    with pytest.raises(ValueError, match=r"dropout is a probability and must be in \[0, 1\); got"):
        check_probability("dropout", value)


def test_allocation():
    tensors = allocate({"a": (2, 3), "b": None}, "cpu", torch.bfloat16, "Layer")
    assert tensors["a"].shape == (2, 3)
    assert tensors["a"].dtype == torch.bfloat16
    assert tensors["b"] is None
    with pytest.raises(
        MemoryError, match=r"Layer takes 1 PiB \(1125899906842624 bytes\) of torch.float32 parameters on cpu"
    ):
        allocate({"a": (2**40,), "b": (2**48 - 2**40,)}, "cpu", None, "Layer")
