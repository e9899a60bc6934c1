import pytest
import torch

import fastff
from fastff.backends import available, native
from helpers import make

needs_native = pytest.mark.skipif("native" not in available(), reason="native backend not built")


def test_evaluation():
    layer, x = make(dtype=torch.float32).eval(), torch.randn(2, 3, 5)
    with torch.no_grad():
        found = fastff.explain(layer, x)
    assert found.mode == "hard"
    assert found.backend == ("native" if "native" in available() else "aten")
    assert found.others["triton"] == "needs a CUDA tensor; got device cpu"
    lines = str(found).splitlines()
    assert lines[0] == f"hard pass by {found.backend} ({found.reason}): {found.how}"
    assert "not triton: needs a CUDA tensor; got device cpu" in lines
    assert found.reason == "auto: the fastest on cpu" or "native" not in available()


def test_training():
    layer, x = make(dtype=torch.float32), torch.randn(3, 5)
    found = fastff.explain(layer, x)
    assert (found.mode, found.backend) == ("soft", "aten")
    assert "needs a CUDA tensor" in found.reason
    assert str(found).startswith("soft pass by aten (auto: triton needs a CUDA tensor; got device cpu): two matrix")
    with fastff.backend("reference"):
        found = fastff.explain(layer, x)
    assert (found.backend, found.reason, found.how) == (
        "reference",
        "chosen by fastff.backend('reference')",
        "step by step, as the specification says",
    )


def test_sampled_training():
    layer, x = make(depth=3, decision="sampled", alternatives=2), torch.randn(3, 5, dtype=torch.float64)
    found = fastff.explain(layer, x)
    assert (found.mode, found.backend) == ("sampled", "aten")
    runs = "each sample runs the leaf that it visits; for the tree's gradient 2 others"
    small = "; all 8 leaves would take no longer: use decision='straight_through'"
    assert str(found).endswith(f"{runs}, and the nodes on the way{small}")
    wide = make(14, depth=3, decision="sampled", alternatives=2)  # two numbers for each node: no more than its input
    assert fastff.explain(wide, torch.randn(3, 14).double()).how == f"{runs}, and all nodes in one product{small}"
    deep = make(depth=7, leaf_width=8, decision="sampled", alternatives=2)
    assert fastff.explain(deep, x).how == f"{runs}, and the nodes on the way"
    with pytest.raises(ValueError, match="expects inputs of shape"):
        fastff.explain(layer, x[:, :2])


def test_shedding():
    """The leaves that this batch keeps are counted."""
    layer, x = make(depth=5, epsilon=0.1, leaf_width=64, scale=100.0), torch.randn(40, 5, dtype=torch.float64)
    words = fastff.explain(layer, x).how.split()
    assert words[:2] == ["epsilon=0.1", "keeps"]
    assert 1 <= float(words[2]) < 16
    assert " ".join(words[3:]) == "of 32 leaves a sample, few enough to run leaf by leaf"
    layer.temperature = 1e-6
    words = fastff.explain(layer, x).how.split(", ", 1)[1]
    assert words == "too many to run one by one: all leaves run, in two matrix products"
    with fastff.backend("reference"):
        assert fastff.explain(layer, x).how == "step by step, as the specification says"
    assert "keeps 0.0 of 32" in fastff.explain(layer, x[:0]).how


@needs_native
def test_why_native_is_not_chosen():
    x = torch.randn(3, 5)
    found = fastff.explain(make(dtype=torch.float32, activation=torch.sin).eval(), x)
    assert found.backend == "aten"
    assert found.others["native"] == "has kernels for named activations only"
    assert found.reason == "auto: native has kernels for named activations only"
    found = fastff.explain(make().eval(), x.double())
    assert found.backend == "aten"
    assert found.others["native"] == "has kernels for float32 and bfloat16; got torch.float64"
    with fastff.backend("aten"):
        found = fastff.explain(make(dtype=torch.float32).eval(), x)
    assert (found.backend, found.reason) == ("aten", "chosen by fastff.backend('aten')")
    assert "native" not in found.others
    with fastff.backend("native"), pytest.raises(ValueError, match="cannot run this hard pass"):
        fastff.explain(make().eval(), x.double())


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"depth": 2}, "runs all leaves"),
        ({"depth": 6}, "are copied together"),
        ({"in_features": 300, "leaf_width": 64}, "leaf by leaf"),
    ],
)
def test_what_torch_does_with_it(sizes, words):
    layer = make(**sizes).eval()
    with fastff.backend("aten"):
        assert words in fastff.explain(layer, torch.randn(9, layer.in_features, dtype=torch.float64)).how


@needs_native
def test_gradients_and_autocast():
    layer, x = make(dtype=torch.float32).eval(), torch.randn(3, 5)
    assert "backward" in fastff.explain(layer, x).how
    with torch.no_grad():
        assert "backward" not in fastff.explain(layer, x).how
        with torch.autocast("cpu", torch.bfloat16):
            assert fastff.explain(layer, x.bfloat16()).backend == "native"  # with the weights as they are
    assert "backward" not in fastff.explain(layer.requires_grad_(False), x).how
    with torch.autocast("cpu", torch.bfloat16):
        assert fastff.explain(layer.train(), x).backend == "aten"


def test_native_missing(monkeypatch):
    """It says so, and the layer works."""
    layer, x = make(dtype=torch.float32).eval(), torch.randn(3, 5)
    why = "not built: fastff was installed without a C++ compiler; install one, then fastff again"
    monkeypatch.setattr(native, "library", lambda: why)
    assert "native" not in available()
    with torch.no_grad():
        found = fastff.explain(layer, x)
        y = layer(x)
        with fastff.backend("reference"):
            torch.testing.assert_close(y, layer(x))
    assert (found.backend, found.reason) == ("aten", f"auto: native {why}")
    assert f"not native: {why}" in str(found)
    with pytest.raises(ValueError, match=r"backend='native' is not available here \(not built: fastff was installed"):
        fastff.backend("native")


def test_bad_arguments():
    layer = make().eval()
    with pytest.raises(TypeError, match="explain expects an FFF layer; got Linear"):
        fastff.explain(torch.nn.Linear(5, 4), torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"expects inputs of shape \(..., 5\)"):
        fastff.explain(layer, torch.randn(3, 4))
