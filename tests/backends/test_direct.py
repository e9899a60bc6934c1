"""Calls that are checked and run in C++: the plan's numbers, and None for all that the function was not made for."""

import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastff
from fastff import _torch
from fastff.backends import direct, native, plan_cache
from helpers import ACTIVATIONS

needs_module = pytest.mark.skipif(
    direct.module() is None or isinstance(native.library(), str), reason="the extension module was not built"
)


def layer_of(activation="relu", *, dtype=torch.float32, int8=False, **options):
    options = {"depth": 3, "leaf_width": 4, "activation": activation, "dtype": dtype} | options
    layer = fastff.FFF(6, 5, **options).eval().requires_grad_(False)
    return fastff.quantize_(layer) and layer if int8 else layer


def prepared(layer, x):
    """The function of a layer for inputs like x, made by calls."""
    for _ in range(3):
        layer(x)
    function = layer._plans.direct
    assert function is not None
    return lambda x: function(x, layer._parameters, layer.activation)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def test_is_there_where_it_must_be():
    """CMakeLists.txt builds it for a plain CPython: not for a free-threaded one (cpython-313t-) or a debug one."""
    plain = re.match(r"cpython-\d+-", sysconfig.get_config_var("SOABI") or "")
    if os.environ.get("FASTFF_REQUIRE_NATIVE") == "1" and plain:
        assert direct.module() is not None


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_the_library_is_built_without_it(tmp_path):
    """A compiler that refuses the module, with its Python's headers, took the kernels away, too."""
    if direct.module() is None:
        pytest.skip("the extension module does not compile here, or needs Python's headers")
    root, source, folder = Path(__file__).parents[2], tmp_path / "source", tmp_path / "build"
    shutil.copytree(root / "csrc", source / "csrc")
    shutil.copy(root / "CMakeLists.txt", source)
    environment = {k: v for k, v in os.environ.items() if k != "FASTFF_REQUIRE_NATIVE"}

    def targets(**more):
        options = ["-DSKBUILD=1", f"-DPython_EXECUTABLE={sys.executable}"]
        command = ["cmake", "-S", source, "-B", folder, *options]
        subprocess.run(command, check=True, capture_output=True, env=environment | more)
        command = ["cmake", "--build", folder, "--target", "help"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [name for name in ("fastff_native", "fastff_direct") if name in listed]

    assert targets() == ["fastff_native", "fastff_direct"]
    (source / "csrc/direct.cpp").write_text("#error refused")
    assert targets() == ["fastff_native"]
    assert targets(FASTFF_REQUIRE_NATIVE="1") == ["fastff_native", "fastff_direct"]  # and its build fails


@needs_module
@pytest.mark.parametrize("missing", ["the description of tensors", "the check of tensors"])
def test_another_torch_goes_without(missing, monkeypatch):
    """What torch keeps private may have another form in another version: that was an error at the third call."""
    layer, x = layer_of(), torch.randn(7, 6)
    expected = layer(x)
    if missing == "the description of tensors":
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", 12345)
    else:
        monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", lambda tensors: None)
    layer._plans = layer._no_plans()
    for _ in range(4):
        assert torch.equal(layer(x), expected)
    assert layer._plans.direct is None


@needs_module
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gives_what_the_plan_gives(activation, dtype, int8):
    options = {"bias": activation != "tanh", "node_width": 1 if dtype == torch.float32 else 2}
    layer = layer_of(activation, dtype=dtype, int8=int8, **options)
    for shape in ((6,), (7, 6), (1, 6), (2, 3, 6), (2, 1, 3, 6)):
        x = torch.randn(shape).to(dtype)
        run = prepared(layer, x)
        wide = torch.randn(*shape[:-1], 9).to(dtype)
        for given in (x, torch.randn(3, *shape).to(dtype)[1], wide[..., :6].contiguous()):
            y = run(given)
            expected = native.hard(given.view(-1, 6), layer.tree, layer.leaves, activation)[0].view(*shape[:-1], 5)
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()
            assert y.dtype == dtype
        other = torch.randn(4, *shape[1:]).to(dtype) if len(shape) > 1 else x
        assert torch.equal(run(other), layer(other))  # another batch


@needs_module
def test_is_what_a_layer_calls(monkeypatch):
    """From the third call of a form on, and not for forms that take turns."""
    layer, x = layer_of(), torch.randn(7, 6)
    y = [layer(x), layer(x)]
    monkeypatch.setattr(native.Plan, "run", lambda *_: pytest.fail("not run directly"))
    assert all(torch.equal(layer(x), one) for one in y)
    monkeypatch.undo()
    for _ in range(3):
        layer(x), layer(x[None])
        assert layer._plans.direct is None


@needs_module
def test_without_the_module(monkeypatch):
    layer, x = layer_of(), torch.randn(7, 6)
    expected = prepared(layer, x)(x)
    monkeypatch.setattr(direct, "module", lambda: None)
    layer._plans = layer._no_plans()
    for _ in range(4):
        assert torch.equal(layer(x), expected)
    assert layer._plans.direct is None


def moments():
    """Contexts in which another way must be taken."""
    return {
        "gradients": torch.enable_grad,
        "inference mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "dual numbers": forward_ad.dual_level,
        "a dispatch mode": lambda: FlopCounterMode(display=False),
        "another backend": lambda: fastff.backend("aten"),
    }


@needs_module
@pytest.mark.parametrize("name", moments())
def test_steps_back_for_a_while(name):
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    y = run(x)
    with moments()[name]():
        assert run(x) is None
        torch.testing.assert_close(layer(x).to(y.dtype), y, rtol=2e-2, atol=2e-2)  # autocast gives bfloat16
    assert torch.equal(run(x), y)


@needs_module
def test_steps_back_for_transforms_and_tracers():
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    given = []
    torch.func.vmap(lambda row: given.append((run(row), run(x))) or row)(x)
    torch.jit.trace(lambda x: given.append((run(x),)) or x + 1, x, check_trace=False)
    assert len(given) >= 2
    assert all(y is None for ys in given for y in ys)


class Other(torch.Tensor):
    """A subclass, which may compute as it likes."""


@needs_module
def test_steps_back_for_other_inputs():
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    freed, cut = torch.randn(7, 6), torch.randn(7, 6)
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(8)
    others = [
        x[None], x[0], x[:0], x[:, :5], x.double(), x.to("meta"), x.as_subclass(Other), x.to_sparse(), freed, cut,
        torch.randn(6, 7).t(), torch.randn(14, 6)[::2], x[:1].expand(7, 6), torch._neg_view(x), [1.0], None,
        torch.complex(x, x).conj().imag,
    ]  # fmt: skip
    assert [i for i, other in enumerate(others) if run(other) is not None] == []
    assert run(x) is not None
    with pytest.raises(TypeError, match="expected x, parameters and activation; got 1"):
        layer._plans.direct(x)


@needs_module
def test_an_input_that_is_resized_meanwhile():
    """Torch hands out the memory of x through Python if a torch function mode is on: it may resize x, as may another
    thread. The output then had other sizes than the kernels wrote to."""
    layer, x = layer_of(), torch.randn(3, 6)
    run = prepared(layer, x)
    expected = run(x)

    class Resizes(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **kwargs or {})
            if getattr(function, "__name__", "") == "untyped_storage":
                x.resize_(3, 6)
            return found

    for shape in ((1, 6), (2, 6), (1, 1, 1, 1, 1, 1, 1, 6)):
        x.resize_(shape)
        with Resizes():
            y = run(x)
        assert y is not None
        assert torch.equal(y, expected)


@needs_module
@pytest.mark.parametrize("grad", [False, True])
def test_a_nested_tensor_is_an_error(grad):
    """Torch's check of tensors ended the process."""
    layer, x = layer_of(), torch.randn(2, 6)
    run = prepared(layer, x)
    nested = torch.nested.nested_tensor([torch.randn(6), torch.randn(6)])
    assert run(nested) is None
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="support sizes"):
        layer(nested)


def others():
    """Tensors that torch computes with, and that have no memory to read."""
    left = []
    torch.func.grad(lambda x: (left.append(x * 1), x.sum())[1])(torch.randn(7, 6))
    zeros, functional = torch._efficientzerotensor((7, 6)), torch._to_functional_tensor(torch.randn(7, 6))
    return {"zeros": zeros, "functional": functional, "left by a transform": left[0]}


@needs_module
@pytest.mark.parametrize("name", others())
def test_an_input_without_memory(name):
    """It was an error, where torch alone computes with it."""
    layer, x = layer_of(), torch.randn(7, 6)
    other = others()[name]
    with fastff.backend("reference"):
        expected = layer(other)
    torch.testing.assert_close(layer(other) + 0, expected + 0)
    run = prepared(layer, x)
    assert run(other) is None
    torch.testing.assert_close(layer(other) + 0, expected + 0)
    assert torch.equal(layer(x), run(x))


@needs_module
def test_rows_that_kernels_cannot_count(monkeypatch):
    """They count in 32 bits. A plan did not ask."""
    layer = fastff.FFF(1, 1, depth=1, leaf_width=1, dtype=torch.bfloat16).eval()
    run = prepared(layer, torch.zeros(3, 1, dtype=torch.bfloat16))
    x = torch.empty(2**31, 1, dtype=torch.bfloat16)  # memory that nobody touches
    plan = layer._plans.plan
    monkeypatch.setattr(plan, "_hard", lambda _: pytest.fail("not refused"))
    assert plan.run(x) is None
    assert run(x) is None
    assert run(x.view(2**16, 2**15, 1)) is None


@needs_module
@pytest.mark.parametrize("what", ["weight", "input"])
@pytest.mark.parametrize("late", range(4))
def test_a_form_that_changes_while_checks_are_made(what, late, monkeypatch):
    """The checks were made of what the tensors were by then, and the kernels told what they had been before."""
    layer, x = layer_of(depth=1, leaf_width=6), torch.randn(7, 6)
    made = []

    def alike_test(*tensors):
        """As another thread may: the same memory, with another meaning."""
        made.append(tensors)
        if len(made) == late + 1:
            if what == "weight":
                layer.leaf_in_weight.data = layer.leaf_in_weight.data.mT
            else:
                x.data = x.data.view(torch.int32)
        return _torch_alike_test(*tensors)

    _torch_alike_test = _torch.alike_test
    monkeypatch.setattr(_torch, "alike_test", alike_test)
    monkeypatch.setattr(plan_cache, "alike_test", alike_test)
    for _ in range(4):
        with contextlib.suppress(TypeError):  # integers
            layer(x)
    assert len(made) > late
    if what == "input":
        with pytest.raises(TypeError, match="int32"):
            layer(x)
        return
    for _ in range(4):
        with fastff.backend("reference"):
            expected = layer(x)
        torch.testing.assert_close(layer(x), expected)


def changes():
    """Changes of a layer that the function was not made for."""

    def moved(layer):
        layer.leaf_in_bias.data = layer.leaf_in_bias.data.clone()

    def freed(layer):
        layer.leaf_out_weight.untyped_storage().resize_(0)

    def cut(layer):
        layer.node_weight.untyped_storage().resize_(8)

    def longer(layer):
        """At the same address, or not."""
        layer.leaf_out_bias.untyped_storage().resize_(4096)

    def turned(layer):
        layer.leaf_in_weight.data = layer.leaf_in_weight.data.as_strided((8, 4, 6), (24, 1, 4))

    def negative(layer):
        layer.leaf_in_bias.data = torch._neg_view(layer.leaf_in_bias.data)

    def less(layer):
        layer.leaf_in_bias = None

    def more(layer):
        layer.leaf_gate_weight = torch.nn.Parameter(torch.randn(8, 4, 6), requires_grad=False)

    def deleted(layer):
        del layer.leaf_in_bias

    def of_another_class(layer):
        layer._parameters["leaf_in_bias"] = layer.leaf_in_bias.data.as_subclass(Other)

    def another_activation(layer):
        layer.activation = "gelu"

    return [moved, freed, cut, longer, turned, negative, less, more, deleted, of_another_class, another_activation]


@needs_module
@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_change_is_noticed(change):
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    change(layer)
    assert run(x) is None


@needs_module
def test_a_change_in_place_is_followed():
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    before = run(x)
    layer.leaf_out_weight.mul_(2)
    with fastff.backend("reference"):
        expected = layer(x)
    assert not torch.equal(run(x), before)
    torch.testing.assert_close(run(x), expected)


@needs_module
def test_holds_nothing():
    """Neither references nor memory are left behind by a call, whatever its answer; the function holds no weight."""
    layer, x = layer_of(), torch.randn(7, 6)
    run = prepared(layer, x)
    others = [x, x[None], x.double(), None]
    storages = [p.untyped_storage() for p in layer.parameters()]
    objects = [x, *layer.parameters(), *storages, torch.float32, layer._parameters]
    before = [sys.getrefcount(each) for each in objects]
    for other in others * 50:
        run(other)
    with torch.enable_grad():
        run(x)
    assert [sys.getrefcount(each) for each in objects] == before
    plan, function = weakref.ref(layer._plans.plan), layer._plans.direct
    storages = [weakref.ref(storage) for storage in storages]
    parameters = dict(layer._parameters)
    del objects, layer, run
    assert function(x, parameters, "relu") is not None
    del parameters
    gc.collect()
    assert plan() is None
    assert all(storage() is None for storage in storages)
    assert function(x, {}, "relu") is None


@needs_module
def test_weights_that_another_thread_replaces():
    """A call reads the weights of before or of after, and no memory that was freed meanwhile."""
    layer, x = layer_of(), torch.randn(64, 6)
    prepared(layer, x)
    first, ones = layer(x), torch.zeros_like(layer.leaf_out_bias)
    values = [layer.leaf_out_bias.clone(), ones]
    layer.leaf_out_bias.data = ones
    answers = [first, layer(x)]
    assert not torch.equal(*answers)

    def call(_):
        with torch.no_grad():
            return all(any(torch.equal(y, answer) for answer in answers) for y in (layer(x) for _ in range(300)))

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(call, i) for i in range(3)]
        while not all(future.done() for future in found):
            for value in values:
                layer.leaf_out_bias.data = value.clone()
        assert all(future.result() for future in found)
