"""int8 leaves: what quantize_ makes, what every backend computes from it, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastff
from fastff.activations import apply
from fastff.backends import aten, available, reference
from fastff.layer import fff_layers
from fastff.surgery.quantize import quantize_rows
from fastff.tensors import Leaves, at_least_float32, dequantize
from helpers import ACTIVATIONS, make, two_layers

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def int8_layer(in_features=13, out_features=11, *, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = make(in_features, out_features, scale=3.0, dtype=dtype, **options).eval()
    fastff.quantize_(layer)
    return layer


def expected(layer, x):
    """The hard pass in float64, loop by loop, from the int8 numbers and the scales."""
    part = {name: None if p is None else p.detach().double() for name, p in layer._parameters.items()}
    y = []
    for row, j in zip(x.double(), layer.route(x).tolist(), strict=True):

        def first(name, row=row, j=j):
            z = torch.stack(
                [row @ q * s for q, s in zip(part[f"{name}_weight"][j], part[f"{name}_scale"][j], strict=True)]
            )
            return z if part[f"{name}_bias"] is None else z + part[f"{name}_bias"][j]

        gated = layer.leaf_gate_weight is not None
        hidden = apply(layer.activation, first("leaf_in"), *([first("leaf_gate")] if gated else []))
        out = (hidden * part["leaf_out_scale"][j]) @ part["leaf_out_weight"][j]
        y.append(out if part["leaf_out_bias"] is None else out + part["leaf_out_bias"][j])
    return torch.stack(y)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e-3, 1.0, 1e4])
def test_rows_round_to_nearest(dtype, size):
    """Every weight is within half a step of its number; a step is the row's largest weight / 127, rounded up."""
    weight = (torch.randn(7, 5, 33, dtype=torch.float64) * size).to(dtype)
    weight[2, 3] = 0
    numbers, scale = quantize_rows(weight)
    assert numbers.dtype == torch.int8
    assert scale.dtype == dtype
    assert numbers.abs().max() <= 127
    wide, step = weight.double(), scale.double().unsqueeze(-1)
    assert (step > 0).all()
    assert ((numbers * step - wide).abs() <= step * (0.5 + 1e-4)).all()
    least = 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny
    finest = wide.abs().amax(-1, keepdim=True) / 127
    assert (step <= finest * (1 + 1.01 * torch.finfo(dtype).eps) + 2 * least).all()
    assert (numbers[2, 3] == 0).all()


@pytest.mark.parametrize("backend", [name for name in available() if name != "triton"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_computes_the_specified_sums(backend, activation, bias):
    """In float64 the loops and torch differ by rounding alone; native has no float64."""
    layer = int8_layer(activation=activation, bias=bias, dtype=torch.float64, depth=3)
    x = torch.randn(9, 13, dtype=torch.float64)
    with fastff.backend("auto" if backend == "native" else backend):
        torch.testing.assert_close(layer(x), expected(layer, x))


@pytest.mark.parametrize("sizes", [(3, 2, 40, 3), (3, 2, 9, 60), (8, 6, 70, 50)], ids=["masked", "one", "grouped"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch", [0, 1, 63])
def test_torch_backends_agree(sizes, dtype, batch):
    """Sums are float32 at least; outputs are rounded once to the layer's dtype."""
    depth, leaf_width, in_features, out_features = sizes
    layer = int8_layer(in_features, out_features, depth=depth, leaf_width=leaf_width, dtype=dtype, bias=True)
    x = torch.randn(batch, in_features).to(dtype)
    leaf = layer.route(x)
    wide = Leaves._make(None if t is None else t.double() for t in dequantize(layer.leaves))
    truth = reference.visit(x.double(), leaf, wide, "relu")
    sizes = Leaves._make(None if t is None else t.abs() for t in wide)  # relu makes no number larger
    largest = reference.visit(x.double().abs(), leaf, sizes, "relu")
    sums = (in_features + leaf_width + 4) * torch.finfo(at_least_float32(dtype)).eps * largest
    for backend in (reference, aten):
        y = backend.visit(x, leaf, layer.leaves, "relu")
        assert y.dtype == dtype
        assert ((y.double() - truth).abs() <= torch.finfo(dtype).eps * truth.abs() + 2 * sums).all()


def test_float16_sums_do_not_overflow():
    """127 * 768 ones are past float16's 65504, before they are scaled."""
    layer = fastff.FFF(768, 4, depth=0, leaf_width=1, dtype=torch.float16, bias=False).eval()
    nn.init.constant_(layer.leaf_in_weight, 0.001)
    fastff.quantize_(layer)
    assert layer(torch.ones(1, 768, dtype=torch.float16)).isfinite().all()


def test_report_and_filter():
    model = two_layers().eval()
    sizes = {name: sum(p.nbytes for p in layer.parameters()) for name, layer in fff_layers(model).items()}
    report = fastff.quantize_(model, filter="2")
    assert [(one.name, one.bytes_before) for one in report.quantized] == [("2", sizes["2"])]
    assert report.bytes_after == sum(p.nbytes for p in model[2].parameters())
    assert report.bytes_after < report.bytes_before
    assert [tuple(one) for one in report.skipped] == [("0", "excluded by the filter")]
    assert "8 x 3" in str(report)
    assert "excluded by the filter" in str(report)
    assert not model[0].leaves.is_int8
    assert model[2].leaves.is_int8
    assert "int8 leaves" in repr(model)
    again = fastff.quantize_(model, filter=lambda name, layer: layer.depth > 0)
    assert [one.name for one in again.quantized] == ["0"]
    assert [tuple(one) for one in again.skipped] == [("2", "its leaves are int8 already")]


def test_explain_says_int8():
    layer = int8_layer()
    assert "int8 leaves" in str(fastff.explain(layer, torch.randn(3, 13)))


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_moves_and_copies(activation):
    """Casts leave int8 alone; copies, pickles and state dicts compute the same."""
    layer, x = int8_layer(activation=activation).requires_grad_(False), torch.randn(7, 13)
    y = layer(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        cast = copy.deepcopy(layer).to(dtype)
        assert cast.leaf_in_weight.dtype == cast.leaf_out_weight.dtype == torch.int8
        assert cast.leaf_out_scale.dtype == dtype
        assert cast(x.to(dtype)).dtype == dtype
    assert copy.deepcopy(layer).half().leaf_in_weight.dtype == torch.int8
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    other = fastff.FFF(13, 11, depth=3, leaf_width=3, activation=activation).eval()
    fastff.quantize_(other)
    other.load_state_dict(layer.state_dict())
    other.node_weight.data = layer.node_weight.data
    assert torch.equal(other(x), y)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.leaf_in_weight.dtype == torch.int8
    assert meta.leaf_in_weight.is_meta


@pytest.mark.parametrize("quantised", [True, False])
def test_state_dicts_of_the_other_kind_are_refused(quantised):
    """copy_ rounds float weights to int8 without a word, mostly to zeros."""
    plain, layer = make(13, 11, dtype=torch.float32), int8_layer()
    given, into = (plain, layer) if quantised else (layer, plain)
    before = copy.deepcopy(into.state_dict())
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"fastff\.quantize_"):
            into.load_state_dict(given.state_dict(), strict=strict)
    assert all(torch.equal(before[name], tensor) for name, tensor in into.state_dict().items())


def test_gradients_reach_what_is_not_int8():
    """In eval() inputs and biases have gradients: those of the dequantised leaves."""
    layer = int8_layer(dtype=torch.float64)
    wide = make(13, 11).eval()
    wide.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if "scale" not in k}
        | {f"leaf_{k}": v for k, v in dequantize(layer.leaves)._asdict().items() if v is not None}
    )
    x, grads = torch.randn(9, 13, dtype=torch.float64), []
    for one in (layer, wide):
        given = x.clone().requires_grad_()
        one(given).square().sum().backward()
        grads.append((given.grad, one.leaf_in_bias.grad, one.leaf_out_bias.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.skipif("native" not in available(), reason="native backend not built")
def test_native_kernels_read_int8():
    """In both of its dtypes, with gradients and without."""
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = int8_layer(dtype=dtype), torch.randn(7, 13, dtype=dtype)
        assert fastff.explain(layer, x).backend == "native"
        grads = []
        for backend in ("native", "aten"):
            with fastff.backend(backend):
                given = x.clone().requires_grad_()
                layer(given).square().sum().backward()
            grads.append(given.grad)
        torch.testing.assert_close(*grads)


def test_compiled_and_exported():
    layer, x = int8_layer().requires_grad_(False), torch.randn(7, 13)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_operations_check():
    layer = int8_layer(activation="swiglu").requires_grad_(False)
    args = (torch.randn(5, 13), *layer.tree, *layer.leaves, "swiglu")
    torch.library.opcheck(fastff.backends.ops.hard, args)


@pytest.mark.parametrize("train", ["forward", "soft", "explain"])
def test_no_soft_pass(train):
    layer, x = int8_layer(), torch.randn(3, 13)
    call = {"forward": layer.train(), "soft": layer.soft, "explain": lambda x: fastff.explain(layer, x)}[train]
    with pytest.raises(TypeError, match=r"train before fastff\.quantize_"):
        call(x)


def test_training_functions_refuse():
    layer, x = int8_layer(), torch.randn(64, 13)
    before = copy.deepcopy(layer.state_dict())
    for call in (
        lambda: fastff.initialize_tree_(layer, x),
        lambda: fastff.rebalance_(layer, x),
        lambda: fastff.Recipe(layer, x, steps=3),
        lambda: fastff.optim.LocalSGD(layer, lr=0.1, local_batch=8),
        layer.reset_parameters,
    ):
        with pytest.raises(TypeError, match="int8 leaves"):
            call()
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_distillation_refuses():
    model, data = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6), nn.LayerNorm(6)), torch.randn(256, 6)
    report = fastff.replace_(model, depth=1, init="data", data=data)
    fastff.quantize_(model)
    with pytest.raises(TypeError, match="int8 leaves"):
        fastff.distill_(model, report, data, steps=2, progress=False)


class Doubled(fastff.FFF):
    """Computes its leaves."""

    @property
    def leaves(self):
        return super().leaves


def not_finite(model):
    model[2].leaf_out_weight.data[0, 0, 0] = float("nan")


def computed(model):
    model[2] = Doubled(6, 3, depth=1, leaf_width=2)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model[2], "leaf_in_weight")


@pytest.mark.parametrize(
    ("spoil", "filter", "error", "match"),
    [
        (not_finite, None, ValueError, "leaf_out_weight that are not finite"),
        (computed, None, ValueError, "computes its leaves"),
        (parametrized, None, ValueError, "computes its leaves"),
        (fastff.quantize_, None, ValueError, "int8 already"),
        (None, "nothing.*", ValueError, "excludes all 2 FFF layers"),
        (None, 7, TypeError, r"function of \(name, layer\)"),
    ],
)
def test_errors_change_nothing(spoil, filter, error, match):
    model = two_layers().eval()
    if spoil:
        spoil(model)
    before = dict(model.named_parameters())
    with pytest.raises(error, match=match):
        fastff.quantize_(model, filter=filter)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_models_without_fff_layers():
    with pytest.raises(ValueError, match="has no FFF layer"):
        fastff.quantize_(nn.Linear(3, 3))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        fastff.quantize_(two_layers())


def converted(quantised=True, activation=nn.GELU):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 32), activation(), nn.Linear(32, 6)), nn.LayerNorm(6)).eval()
    fresh = copy.deepcopy(model)
    report = fastff.replace_(model, depth=2)
    if quantised:
        fastff.quantize_(model)
    return model, fresh, report


def test_save_and_load(tmp_path):
    pytest.importorskip("safetensors")
    model, fresh, _ = converted()
    fastff.save(model, tmp_path)
    fastff.load_(fresh, tmp_path)
    x = torch.randn(9, 6)
    assert fff_layers(fresh)["0"].leaves.is_int8
    assert fff_layers(fresh)["0"].leaf_in_weight.dtype == torch.int8
    assert torch.equal(fresh(x), model(x))


def test_save_and_load_in_bfloat16(tmp_path):
    pytest.importorskip("safetensors")
    model, fresh, _ = converted()
    fastff.save(model.bfloat16(), tmp_path)
    fastff.load_(fresh, tmp_path)
    x = torch.randn(9, 6, dtype=torch.bfloat16)
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("change", ["leaf_in_scale", "leaf_out_weight"])
def test_saves_that_do_not_fit_are_refused(tmp_path, change):
    """A file with int8 weights and no scale, or with int8 and float weights in one layer."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    safe_open = pytest.importorskip("safetensors").safe_open
    model, fresh, _ = converted()
    fastff.save(model, tmp_path)
    path = tmp_path / "fastff.safetensors"
    with safe_open(path, "pt") as file:
        tensors, note = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    if change == "leaf_in_scale":
        del tensors["0.leaf_in_scale"]
    else:
        tensors["0.leaf_out_weight"] = tensors["0.leaf_out_weight"].float()
    save_file(tensors, path, note)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match=f"0.{change}"):
        fastff.load_(fresh, tmp_path)
    assert fresh.state_dict().keys() == before.keys()


def test_shared_weights_are_left_alone():
    """Each of two layers with the same leaves got int8 leaves of its own: the memory grew, and the report denied it."""
    one, two, alone = (fastff.FFF(16, 8, depth=2, leaf_width=4).eval() for _ in range(3))
    two.leaf_out_weight = one.leaf_out_weight
    model = torch.nn.ModuleList([one, two, alone, alone])
    report = fastff.quantize_(model)
    assert [layer.name for layer in report.quantized] == ["2"]
    assert {skipped.name for skipped in report.skipped} == {"0", "1"}
    assert "tied to another module" in str(report)
    assert two.leaf_out_weight is one.leaf_out_weight
    with pytest.raises(ValueError, match="tied to other modules: 0, 1"):
        fastff.quantize_(torch.nn.ModuleList([one, two]))


def test_weights_in_another_layout_become_contiguous():
    layer = fastff.FFF(16, 8, depth=2, leaf_width=4).eval()
    layer.leaf_in_weight.data = layer.leaf_in_weight.data.mT.contiguous().mT
    fastff.quantize_(layer)
    assert layer.leaf_in_weight.is_contiguous()
    with pytest.raises(ValueError, match="int8 already: the model itself"):
        fastff.quantize_(layer)
