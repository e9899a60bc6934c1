"""The search for blocks: what is found, and what is refused with a reason."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.blocks import recognise
from surgery_models import (
    LLAMA,
    T5,
    VECTORS,
    Experts,
    Functional,
    Mlp,
    Wrong,
    assert_untouched,
    between,
    hf,
    snapshot,
    stack,
)


def test_half_precision_is_verified_too():
    """GELU and its tanh form differ by less than bfloat16 can show: the module is asked, not only the output."""
    for act, name in [(nn.GELU, "gelu"), (lambda: nn.GELU(approximate="tanh"), "gelu_tanh")]:
        report = fastff.replace_(stack(Mlp(act=act)).bfloat16(), depth=1)
        assert report.replaced[0].activation == name
    # Where none shows, only the output can tell, and in bfloat16 it cannot.
    hidden = stack(Functional(f=nn.functional.gelu))
    with pytest.raises(ValueError, match=r"several ways .*plain gelu, plain gelu_tanh"):
        fastff.replace_(copy.deepcopy(hidden).bfloat16(), depth=1)
    assert fastff.replace_(hidden, depth=1).replaced[0].activation == "gelu"


@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Identity, nn.Mish, nn.Softmax])
def test_recognise(act):
    names = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Identity: "identity"}
    made = act(-1) if act is nn.Softmax else act()
    assert recognise(made) is (names.get(act, made) if act is not nn.Softmax else None)


def two_places():
    mlp = Mlp()
    return stack(mlp, mlp)


def tied():
    model = stack(Mlp(), Mlp())
    model[0].mlp.fc1.weight = model[1].mlp.fc1.weight
    return model


def hooked():
    model = stack(Mlp())
    model[0].mlp.register_forward_hook(lambda *_: None)
    return model


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(stack(Mlp()), {nn.Linear})


def parametrised():
    model = stack(Mlp())
    nn.utils.parametrizations.weight_norm(model[0].mlp.fc1)
    return model


def mixed():
    model = stack(Mlp())
    model[0].mlp.fc2.double()
    return model


def hooked_parameter():
    model = stack(Mlp())
    model[0].mlp.fc1.weight.register_hook(lambda grad: None)
    return model


def tied_by_a_view():
    model = stack(Mlp())
    model[0].mlp.fc2.weight = nn.Parameter(model[0].mlp.fc1.weight.data.T)
    return model


class Adapted(nn.Linear):
    """As LoRA starts: with nothing to add, yet."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a = nn.Parameter(torch.randn(2, sizes[0]))
        self.b = nn.Parameter(torch.zeros(sizes[1], 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Clipped(Mlp):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu().clamp(max=100.0))


class Gained(nn.Module):
    """Its gain of one hides from a probe, and does not fit the outputs of an FFF."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)
        self.gain = nn.Parameter(torch.ones(48))

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)) * self.gain)


class Inline(nn.Module):
    """As ESM's layer: between two modules the forward itself calls an activation, which no attribute holds."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(48, 16)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class WithResidual(nn.Module):
    """As BLOOM's and MPT's block: it takes the residual and adds it."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)

    def forward(self, x, residual):
        return residual + self.down(self.act(self.up(x)))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), WithResidual()

    def forward(self, x):
        return self.mlp(self.norm(x), x)


def test_a_block_that_takes_the_residual_keeps_its_module():
    model = Outer()
    dense = copy.deepcopy(model)
    report = fastff.replace_(model, depth=1)
    assert [(r.name, r.form) for r in report.replaced] == [("mlp.up", "in-layer")]
    assert isinstance(model.mlp, WithResidual)
    torch.testing.assert_close(model(VECTORS), dense(VECTORS))


MIXTRAL = LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED = {
    "mixtral": (lambda: hf("Mixtral", **MIXTRAL), "layers.0.mlp.experts: it is a mixture of experts"),
    "fastff.baselines.MoE": (
        lambda: stack(fastff.baselines.MoE(16, 16, num_experts=2, expert_width=4)),
        "0.mlp: it is a mixture",
    ),
    "experts": (Experts, "experts.0: it is one expert of a mixture"),
    "wrong": (lambda: stack(Wrong()), "0.mlp: recomputed from its weights on a probe, .* its output differs"),
    "two places": (two_places, "the same module is used in several places: 0.mlp, 1.mlp"),
    "tied": (tied, "its weights are tied: 0.mlp.fc1.weight and 1.mlp.fc1.weight are one parameter"),
    "hooks": (hooked, "it has hooks"),
    "hook of a parameter": (hooked_parameter, "it has hooks"),
    "tied by a view": (tied_by_a_view, "its weights are tied"),
    "adapter": (
        lambda: nn.Sequential(nn.Sequential(Adapted(16, 48), nn.GELU(), Adapted(48, 16))),
        "its Adapted is more",
    ),
    "clipped": (lambda: stack(Clipped()), "at large inputs its output differs"),
    "dropout before": (between(nn.Dropout(0.5), nn.Sigmoid()), "its dropout comes before the activation"),
    "dropout of all": (between(nn.GELU(), nn.Dropout(1.0)), "its dropout rate is 1"),
    "gain": (lambda: nn.Sequential(Gained()), "0.fc1 does not run with FFF layers.*Exclude the block with filter="),
    "quantised": (quantised, "0.mlp: its Linear is quantised"),
    "parametrised": (parametrised, "0.mlp: its ParametrizedLinear is quantised, wrapped or parametrised"),
    "meta": (lambda: stack(Mlp()).to("meta"), "meta device"),
    "dtypes": (mixed, "its linear layers differ in dtype"),
    "stochastic depth": (lambda: stack(Functional(0.5, drop_rows=True)), "in training its output is random"),
    "gated relu": (lambda: hf("T5", **T5, feed_forward_proj="gated-relu"), "it is gated by relu"),
    "inline": (lambda: nn.Sequential(Inline()), "0: its activation is written inside a forward or has parameters"),
    "the model itself": (Mlp, "the model: it is the model itself"),
    "no block": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), "in 1 x Conv2d, 1 x Flatten"),
    "compiled": (lambda: torch.compile(stack(Mlp())), "Call it before torch.compile"),
    "compiled in place": (lambda: nn.Sequential(compiled()), "0 is compiled"),
}


def compiled():
    model = stack(Mlp())
    model.compile()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, message = REFUSED[case]
    model = make()
    before = None if case in ("meta", "quantised") else snapshot(model)
    with pytest.raises(ValueError, match=message):
        fastff.replace_(model, depth=1)
    if before:
        assert_untouched(model, before)


class Packed(torch.Tensor):
    """A weight as torchao's quantize_ leaves it: a subclass that says float32 and holds int8 and a scale."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        return func(*(a.numbers * a.scale if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize(
    "convert",
    [
        lambda w: Packed((w * 100).to(torch.int8), 0.01),
        lambda w: w.to(torch.int8),
        lambda w: w.to(torch.float8_e4m3fn),
        lambda w: w.to_sparse(),
    ],
    ids=["subclass", "int8", "float8", "sparse"],
)
def test_weights_that_cannot_be_read_are_skipped_with_the_reason(convert):
    """Of float8 and sparse weights there was a traceback from within torch."""
    model = stack(Mlp(), Mlp())
    for linear in (model[0].mlp.fc1, model[0].mlp.fc2):
        linear.weight = nn.Parameter(convert(linear.weight.detach()), requires_grad=False)
    old = list(model[0].parameters())
    report = fastff.replace_(model, depth=1)
    assert [r.name for r in report.replaced] == ["1.mlp"]
    (skipped,) = report.skipped
    assert skipped.name == "0.mlp"
    assert skipped.why.startswith("its Linear is quantised, wrapped or parametrised; its weights cannot be read")
    assert all(a is b for a, b in zip(old, model[0].parameters(), strict=True))


@pytest.mark.parametrize("act", [nn.Hardtanh(0, 20), nn.Hardtanh(-20, 20), nn.ReLU6(), nn.Hardshrink(0.1)])
def test_an_activation_that_looks_like_another_near_zero_is_kept_as_it_is(act):
    model = between(act)()
    x = 100 * torch.randn(64, 16)
    before = model(x)
    fastff.replace_(model, depth=1)
    assert model[0].activation is act
    torch.testing.assert_close(model.train()(x), before)


def test_dropout_before_a_relu_is_the_same_as_after_it():
    model = between(nn.Dropout(0.25), nn.ReLU())()
    fastff.replace_(model, depth=1)
    assert model[0].dropout == 0.25


def test_skipped_beside_replaced():
    model = nn.Sequential(*stack(Mlp(), Wrong(), Functional()), Experts())
    report = fastff.replace_(model, depth=1)
    assert [r.name for r in report.replaced] == ["0.mlp", "2.mlp"]
    assert [s.name for s in report.skipped] == ["1.mlp", "3.experts.0", "3.experts.1"]
    assert "one expert of a mixture" in str(report)


def test_convolutions_without_biases_are_no_experts():
    """Wav2Vec2's feature extractor, whose convolutions have 3-D weights of one first size, was called a mixture."""
    layers = [nn.Sequential(nn.Conv1d(16, 16, 3, padding=1, bias=False), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Sequential(*(m[0] for m in layers)), *stack(Mlp()))
    assert not fastff.replace_(model, depth=1).skipped


class NeedsMore(nn.Module):
    """An in-layer block in a layer that does not run on a probe alone."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.fc1, self.fc2, self.activation, self.norm = (
            nn.Linear(16, 48),
            nn.Linear(48, 16),
            nn.ReLU(),
            nn.LayerNorm(16),
        )
        self.drop = drop

    def forward(self, x, *, scale):
        hidden = self.activation(self.fc1(self.norm(x)))
        return x + scale["value"] * self.fc2(nn.functional.dropout(hidden, self.drop, self.training))


class Scaled(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = NeedsMore(**options)

    def forward(self, x):
        return self.layer(x, scale={"value": 0.5})


def test_example():
    model = Scaled()
    dense = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"layer: it could not be run on a probe .* pass example="):
        fastff.replace_(model, depth=1)
    report = fastff.replace_(model, depth=1, example=VECTORS)
    assert [(r.name, r.form) for r in report.replaced] == [("layer.fc1", "in-layer")]
    torch.testing.assert_close(model(VECTORS), dense(VECTORS))
    with pytest.raises(ValueError, match="in training its output is random"):
        fastff.replace_(Scaled(drop=0.5), depth=1, example=VECTORS)


def test_weights_that_are_not_finite_are_said():
    """The block "gives something else", it said."""
    model = stack(Mlp(), Mlp())
    linear = next(m for m in model[1].modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        linear.weight[0, 0] = torch.nan
    report = fastff.replace_(model, depth=1)
    assert [s.why for s in report.skipped] == ["its weights contain NaN or infinity; load finite weights"]
