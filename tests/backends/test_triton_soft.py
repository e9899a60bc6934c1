"""The Triton soft pass: by the interpreter where there is no GPU, and compiled ahead of time for one."""

import pytest
import torch

import fastff
from fastff.backends import choose, triton, triton_soft
from fastff.tensors import SoftOptions
from helpers import ACTIVATIONS, make, request, without_interpreter

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def everywhere(monkeypatch):
    """Let the kernels take CPU tensors, which the interpreter can run."""
    monkeypatch.setattr(triton, "why_not", lambda request: "")


def passes(layer, x, seed=0, **options):
    """Output, logits, mixture and all gradients, by the kernels and by the reference."""
    results = []
    for run in ("triton", "reference"):
        torch.manual_seed(seed)
        if run == "triton":
            y, logits, mixture = triton_soft.soft(
                x, layer.tree, layer.leaves, layer.activation, SoftOptions(layer.temperature_tensor, **options),
            )  # fmt: skip
        else:
            with fastff.backend("reference"):
                y, logits, mixture = fastff.functional.soft(
                    x,
                    layer.tree,
                    layer.leaves,
                    activation=layer.activation,
                    temperature=layer.temperature_tensor,
                    **options,
                )
        loss = (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum() + logits.square().sum()
        results.append((y, logits, mixture, *torch.autograd.grad(loss, [x, *layer.parameters()])))
    return results


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("depth", "leaf_width"), [(1, 1), (2, 3), (4, 2), (3, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("straight_through", [True, False])
def test_equals_the_reference(activation, depth, leaf_width, bias, straight_through):
    layer = make(7, 5, depth=depth, leaf_width=leaf_width, activation=activation, bias=bias, dtype=torch.float32)
    layer.to(DEVICE).temperature = 1.7
    x = torch.randn(6, 7, device=DEVICE, requires_grad=True)
    ours, expected = passes(layer, x, straight_through=straight_through)
    for value, wanted in zip(ours, expected, strict=True):
        # float32 on both sides, sums of at most a few dozen terms of order one, in another order.
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_transposition_uses_the_mask():
    """The same seed draws the same mask on both sides, so the outputs agree sample by sample."""
    layer = make(7, 5, depth=3, leaf_width=2, dtype=torch.float32, scale=4.0).to(DEVICE)
    x = torch.randn(50, 7, device=DEVICE, requires_grad=True)
    ours, expected = passes(layer, x, transposition=0.3)
    for value, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    untouched, _ = passes(layer, x)
    assert not torch.allclose(ours[0], untouched[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """No worse than twice the reference in that dtype, both against float64."""
    layer = make(37, 29, depth=4, leaf_width=8, activation="gelu", dtype=dtype).to(DEVICE)
    x = torch.randn(33, 37, device=DEVICE).to(dtype).requires_grad_()
    ours, reference = passes(layer, x)
    exact_layer = make(37, 29, depth=4, leaf_width=8, activation="gelu").to(DEVICE)
    exact_layer.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    with fastff.backend("reference"):
        wide = x.detach().double().requires_grad_()
        y, logits, mixture = fastff.functional.soft(wide, exact_layer.tree, exact_layer.leaves, activation="gelu")
        loss = (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum() + logits.square().sum()
        exact = (y, logits, mixture, *torch.autograd.grad(loss, [wide, *exact_layer.parameters()]))
    for value, other, wanted in zip(ours, reference, exact, strict=True):
        error, allowed = ((v.double() - wanted).norm() / wanted.norm() for v in (value, other))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_huge_logits_and_bad_values(size, everywhere):
    layer = make(5, 4, depth=3, leaf_width=2, dtype=torch.float32, scale=size).to(DEVICE)
    x = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in [x, *layer.parameters()])
    with torch.no_grad():
        clean = layer(x)
        x[2, 1] = torch.nan
        y = layer(x)
    assert y[2].isnan().all()
    rest = torch.arange(6, device=DEVICE) != 2
    torch.testing.assert_close(y[rest], clean[rest])


@pytest.mark.slow
def test_in_the_layer(everywhere):
    """Through FFF: losses, an empty batch, leading dimensions, torch.compile without a break."""
    torch._dynamo.reset()
    layer = make(7, 5, depth=3, leaf_width=3, dtype=torch.float32, transposition=0.2).to(DEVICE)
    assert layer(torch.randn(0, 7, device=DEVICE)).shape == (0, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for batch in (4, 9, 17):
        x = torch.randn(2, batch, 7, device=DEVICE, requires_grad=True)
        grads = []
        for run in (compiled, layer):
            torch.manual_seed(1)
            loss = run(x).square().sum() + fastff.hardening_loss(layer)
            grads.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
        for ours, expected in zip(*grads, strict=True):
            torch.testing.assert_close(ours, expected)


def test_second_derivatives_are_refused(everywhere):
    layer = make(5, 4, depth=2, leaf_width=2, dtype=torch.float32).to(DEVICE)
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative. Run the model under fastff.backend\('aten'\)"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(flip, bias):
    first, temperature = torch.randn(6, 32, device=DEVICE), torch.tensor(1.5, device=DEVICE)
    mask = torch.rand(6, 7, device=DEVICE) < 0.3 if flip else None
    options = (3, 3, "relu", bias, False)
    torch.library.opcheck(triton_soft.weigh, (first, temperature, mask, *options))
    d_packed, d_logits = torch.randn(6, 32 if bias else 24, device=DEVICE), torch.randn(6, 7, device=DEVICE)
    torch.library.opcheck(triton_soft.weigh_backward, (first, temperature, mask, d_packed, d_logits, *options))


def test_choice():
    layer = make(5, 4, depth=2, leaf_width=2)
    x = torch.randn(3, 5)
    asked = request(x, layer.tree, layer.leaves, kind="soft")
    chosen, reason = choose(asked)
    assert chosen.__name__ == "fastff.backends.aten"
    assert "needs a CUDA tensor; got device cpu" in reason
    with fastff.backend("reference"):
        assert choose(asked)[0].__name__ == "fastff.backends.reference"


AHEAD_OF_TIME = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastff.backends import triton_soft as launch, triton_soft_kernels as kernels

for kernel in (kernels.weigh_forward, kernels.weigh_backward):
    for number in ("bf16", "fp32"):
        for depth, leaf_width, activation in ((1, 1, "tanh"), (5, 32, "relu"), (7, 8, "swiglu")):
            options = launch._options(depth, leaf_width, activation, bias=True, flip=True, hard=True)
            warps = options.pop("num_warps")
            types = {name: "i32" if name.endswith("stride") else f"*{number}" for name in kernel.arg_names}
            types |= {"flip_ptr": "*i1", "temperature_ptr": "*fp32", "logits_ptr": "*fp32", "mixture_ptr": "*fp32"}
            types |= {"d_logits_ptr": "*fp32"} | {name: "constexpr" for name in options}
            types = {name: types[name] for name in kernel.arg_names}
            constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
            assert len(built.asm["cubin"]) > 0
print("built")
"""


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
