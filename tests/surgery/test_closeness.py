"""What a report says about evaluation, and when nothing can be measured."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fastff
from surgery_models import VECTORS, Mlp, stack, varied


@pytest.mark.parametrize("options", [{}, {"example": VECTORS}, {"example": torch.randn(8, 10, 16)}])
def test_the_report_says_what_evaluation_is_worth(options):
    """`replace_(model, depth=3)` left eval() with 603 % of the variance missed, and the report said only "exact in the
    soft pass"."""
    model = stack(Mlp(), Mlp())
    dense = copy.deepcopy(model).eval()
    report = fastff.replace_(model, depth=3, **options)
    rows = options["example"].flatten(0, 1) if "example" in options else torch.empty(0, 16)
    on = "the example" if len(rows) >= 20 else "random inputs"
    assert [r.measured_on for r in report.replaced] == [on] * 2
    x = dense[0].norm(rows) if on == "the example" else torch.randn(5000, 16)
    y = dense[0].mlp(x)
    found = (model.eval()[0].mlp(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert report.replaced[0].missed == pytest.approx(found.item(), rel=1e-4 if on == "the example" else 0.2)
    assert report.missed == max(r.missed for r in report.replaced) > 1
    *_, verdict, remedy = str(report).splitlines()
    assert verdict.startswith(f"eval() is not usable yet: on {on}, the hard pass misses ")
    assert f"{report.missed:.0%}".replace("%", " %") in verdict.replace(",", "")
    assert "fastff.Recipe" in remedy
    assert 'init="data", data=...' in remedy


def test_the_report_of_an_evaluation_that_can_be_used():
    for options in ({"depth": 0}, {"depth": 2, "leaf_width": 48}):  # one leaf; leaves as wide as the block
        exact = fastff.replace_(stack(Mlp()), **options)
        assert exact.missed < 1e-6
        assert str(exact).endswith("eval() computes the same as the dense blocks: on random inputs, it misses nothing.")
    near = fastff.replace_(
        nn.Sequential(fastff.baselines.FF(16, 16, width=48)), depth=2, init="data", data=varied(None), leaf_width=40
    )
    assert 1e-6 < near.missed < 0.5
    assert "eval() approximates the dense blocks: on held-out inputs, the hard pass misses" in str(near)
    assert str(near).endswith("\nfastff.distill_ brings it closer.")
    far = fastff.replace_(stack(Mlp()), depth=3, init="data", data=torch.randn(200, 16), leaf_width=1)
    assert far.missed > 0.5
    assert "eval() is not usable yet: on held-out inputs" in str(far)
    assert "Wider leaves and more data miss less" in str(far)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 3])
def test_outputs_that_do_not_vary_are_not_measured(dtype, width):
    """One rounding unit of error was "misses 130 %" of a variance that was rounding, too."""
    torch.manual_seed(0)
    model = nn.Sequential(fastff.baselines.FF(width, 8, width=16, dtype=dtype))
    data = torch.ones(300, width, dtype=dtype)
    report = fastff.replace_(model, depth=1, init="data", data=data)
    assert report.missed is None
    assert "eval() was not measured: the outputs of 0 do not vary on held-out inputs. " in str(report)
    old = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"changed nothing.*do not vary on these data\). Pass data that varies"):
        (made,) = fastff.distill_(model, report, data, steps=3, progress=False)
    assert str(made) == "0: missed ? -> ?, leaves restored: the outputs of the dense block do not vary on these data"
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


def test_a_small_variance_is_a_variance():
    """Outputs that vary by far more than rounding are measured, however large their mean."""
    torch.manual_seed(0)
    model = nn.Sequential(fastff.baselines.FF(8, 8, width=16))
    with torch.no_grad():
        model[0].down.bias.fill_(1000.0)
    report = fastff.replace_(model, depth=1, init="data", data=torch.randn(300, 8))
    assert 0 < report.missed < 1


def test_one_input_is_too_few():
    """torch warned of degrees of freedom, and distill_ measured "inf %"."""
    model, one = nn.Sequential(fastff.baselines.FF(8, 8, width=16)), torch.randn(1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fastff.replace_(model, depth=1, init="data", data=one)
    assert report.replaced[0].weights == "fitted to 1 input"
    assert "eval() was not measured: 1 input is too few. " in str(report)
    with pytest.warns(UserWarning, match=r"changed nothing.*1 input is too few\). Pass data that varies"):
        (made,) = fastff.distill_(model, report, one, steps=3, progress=False)
    assert not made.kept
