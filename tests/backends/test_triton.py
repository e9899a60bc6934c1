"""The Triton hard pass: by the interpreter where there is no GPU, and compiled ahead of time for one."""

import pytest
import torch

import fastff
from fastff.backends import reference, triton, triton_hard
from fastff.backends.triton_hard import Launch
from helpers import ACTIVATIONS, make, plain_hard, relative_error, request, without_interpreter

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALONE = Launch(False, round=2, warps=4)
GROUPED = Launch(True, tile=16, leaf_tile=16, k=16, n=16, splits=2)
WAYS = {"alone": ALONE, "grouped": GROUPED}


def layer_of(*sizes, **options):
    layer = make(*sizes, **({"dtype": torch.float32, "scale": 2.0} | options))
    return layer.to(DEVICE).eval().requires_grad_(False)


def check(layer, x, way=None):
    """The kernels against the reference in float64, to float32 rounding, from memory that held NaN before."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        y, leaf = triton.hard(x, layer.tree, layer.leaves, layer.activation, way)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = layer_of(
        layer.in_features, layer.out_features, depth=layer.depth, leaf_width=layer.leaf_width,
        node_width=layer.node_width, activation=layer.activation, bias=layer.bias, dtype=torch.float64,
    )  # fmt: skip
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    expected = reference.route(x.double(), wide.tree, layer.activation)
    assert leaf.dtype == torch.int64
    assert torch.equal(leaf, expected)
    assert y.dtype == x.dtype
    assert y.shape == (len(x), layer.out_features)
    exact = reference.visit(x.double(), expected, wide.leaves, layer.activation)
    # Sums of at most a few hundred terms of order one.
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("node_width", "bias"), [(1, True), (2, False)])
def test_equals_the_reference(way, activation, node_width, bias):
    layer = layer_of(7, 5, depth=3, leaf_width=3, node_width=node_width, activation=activation, bias=bias)
    batch = 17 if way == "grouped" else 4  # the interpreter takes a tenth of a second a program
    check(layer, torch.randn(batch, 7, device=DEVICE), WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_depths_and_batches(way, depth, batch):
    check(layer_of(5, 3, depth=depth, leaf_width=2), torch.randn(batch, 5, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(
    ("sizes", "leaf_width"), [((1, 1), 1), ((150, 1), 33), ((9, 1030), 2), ((20, 19), 130), ((130, 40), 32)]
)
def test_sizes(way, activation, sizes, leaf_width):
    """Beyond one block in each direction: features, outputs, and neurons (a leaf that is added up block by block)."""
    layer = layer_of(*sizes, depth=2, leaf_width=leaf_width, activation=activation)
    check(layer, torch.randn(5, sizes[0], device=DEVICE), WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("node_width", [1, 2])
def test_inputs_that_do_not_fit_into_registers(way, node_width, monkeypatch):
    monkeypatch.setattr(triton_hard, "_fits", lambda *_: False)
    layer = layer_of(150, 6, depth=4, leaf_width=5, node_width=node_width, activation="geglu")
    check(layer, torch.randn(9, 150, device=DEVICE), WAYS[way])


@pytest.mark.parametrize("batch", [1, 33])
def test_sorted(batch, monkeypatch):
    """With more leaves than lists have room for."""
    monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    check(layer_of(7, 5, depth=3, leaf_width=3), torch.randn(batch, 7, device=DEVICE), GROUPED)


@pytest.mark.parametrize("rounds", [1, 3, 4])
@pytest.mark.parametrize("warps", [2, 8])
def test_rounds(rounds, warps):
    layer = layer_of(7, 5, depth=5, leaf_width=3)
    check(layer, torch.randn(6, 7, device=DEVICE), Launch(False, round=rounds, warps=warps))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["alone", "grouped", "sorted"])
def test_one_leaf_takes_all(way, monkeypatch):
    if way == "sorted":
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    layer = layer_of(7, 5, depth=3, leaf_width=3)
    layer.node_weight.zero_()
    check(layer, torch.randn(33, 7, device=DEVICE), WAYS.get(way, GROUPED))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_logit_of_zero_goes_right_and_nan_left(way):
    layer = layer_of(7, 5, depth=3, leaf_width=3)
    x = torch.randn(17, 7, device=DEVICE)
    y, leaf = triton.hard(x, layer.tree, layer.leaves, "relu", WAYS[way])
    bad = x.clone()
    bad[4, 2] = torch.nan
    y_bad, leaf_bad = triton.hard(bad, layer.tree, layer.leaves, "relu", WAYS[way])
    assert leaf_bad[4] == 0
    assert y_bad[4].isnan().all()
    rest = torch.arange(17, device=DEVICE) != 4
    assert torch.equal(y_bad[rest], y[rest])
    assert torch.equal(leaf_bad[rest], leaf[rest])
    layer.node_weight.zero_()
    layer.node_bias.zero_()
    assert (triton.hard(x, layer.tree, layer.leaves, "relu", WAYS[way])[1] == 7).all()


@pytest.mark.parametrize("way", WAYS)
def test_infinite_input(way):
    """What torch makes of it: relu(-inf) is 0, and so is the output of such a neuron."""
    layer = layer_of(7, 5, depth=0, leaf_width=33)
    layer.leaf_in_weight[:, :, 2] = layer.leaf_in_weight[:, :, 2].abs()
    x = torch.randn(3, 7, device=DEVICE)
    x[1, 2] = -torch.inf
    y = triton.hard(x, layer.tree, layer.leaves, "relu", WAYS[way])[0]
    torch.testing.assert_close(y, reference.hard(x, layer.tree, layer.leaves, "relu")[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("listed", [True, False])
def test_visit_and_route(grouped, listed, monkeypatch):
    """Alone, as MoE and `layer.route` use them; also with inputs and leaves that are not contiguous."""
    monkeypatch.setattr(triton_hard, "choose_launch", lambda *_: GROUPED if grouped else ALONE)
    if not listed:
        monkeypatch.setattr(triton_hard, "_MOST_LISTED", 0)
    layer = layer_of(7, 5, depth=3, leaf_width=3, activation="tanh")
    x = torch.randn(7, 23, device=DEVICE).T
    assert torch.equal(triton.route(x, layer.tree, "tanh"), reference.route(x, layer.tree, "tanh"))
    assert triton.route(x[:0], layer.tree, "tanh").shape == (0,)
    leaf = torch.randint(8, (23, 2), device=DEVICE)[:, 0]
    before = leaf.clone()
    expected = reference.visit(x, leaf, layer.leaves, "tanh")
    torch.testing.assert_close(triton.visit(x, leaf, layer.leaves, "tanh"), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(leaf, before)
    assert triton.visit(x[:0], leaf[:0], layer.leaves, "tanh").shape == (0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("way", [ALONE, GROUPED, GROUPED._replace(top=3), GROUPED._replace(top=6, tile=32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, way):
    """No worse than twice plain torch in that dtype, both against float64. The tops of trees in one product."""
    if way.grouped and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 matrices as integers")
    depth = 6 if way.top == 6 else 4
    layer = layer_of(37, 29, depth=depth, leaf_width=8, activation="gelu", dtype=dtype)
    exact = layer_of(37, 29, depth=depth, leaf_width=8, activation="gelu", dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    x = torch.randn(33, 37, device=DEVICE).to(dtype)
    y, leaf = triton.hard(x, layer.tree, layer.leaves, "gelu", way)
    route = reference.route(x.double(), exact.tree, "gelu")
    assert torch.equal(leaf, route)  # sums are float32: no logit here is within their rounding of zero
    assert y.dtype == dtype
    expected = reference.visit(x.double(), route, exact.leaves, "gelu")
    assert relative_error(y, expected) <= 2 * relative_error(plain_hard(layer, x, route), expected)


def test_choice_of_the_way():
    """Grouped where it spares reading leaves again: many samples a leaf, and leaves that weigh something."""

    def choose(batch, depth, leaf_width=32, dtype=torch.bfloat16, node_width=1, features=768):
        x = torch.empty(batch, features, dtype=dtype, device="meta")
        return triton_hard.choose_launch(x, 2**depth, 2 * leaf_width * features, node_width)

    assert not choose(1, 5).grouped
    assert not choose(32, 15).grouped
    assert not choose(2048, 15).grouped
    assert not choose(2048, 3, leaf_width=1, features=64).grouped
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose(2048, 5, dtype=dtype).grouped
        assert choose(65536, 11, dtype=dtype).grouped
        for batch in (2048, 65536):
            # A decision in float32 never sees TF32, which the product with all nodes at once would use.
            assert choose(batch, 5, dtype=torch.float32).top == 0
            assert choose(batch, 5, dtype=dtype, node_width=2).top == 0
            assert choose(batch, 5, dtype=dtype, features=100).top <= 5
    layer = layer_of(768, 768, depth=5, leaf_width=1)
    for batch, words in ((1, "one program a sample"), (2**16, "listed by leaf"), (2**21, "sorted by leaf")):
        x = torch.empty(batch, 768, device="meta")
        assert words in triton.describe(request(x, layer.tree, layer.leaves))


def test_why_not():
    layer = layer_of(7, 5, depth=2, leaf_width=3)
    reason = triton.why_not(request(torch.empty(3, 7, device="meta"), layer.tree, layer.leaves))
    assert reason == "needs a CUDA tensor; got device meta"
    if DEVICE == "cpu":
        assert "triton" not in fastff.backends.available()
        with pytest.raises(ValueError, match="backend='triton' is not available here"):
            fastff.backend("triton")


AHEAD_OF_TIME = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import fastff
from fastff.backends import triton_hard as launch, triton_kernels as kernels

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
SHARED = 227 * 1024  # bytes that a program may have on sm_90

class Build:
    '''Stands for a kernel, and compiles it for what it is called with.'''

    def __init__(self, name):
        self.kernel = getattr(kernels, name)
        setattr(kernels, name, self)
        self.built = 0

    def __getitem__(self, grid):
        assert all(0 < n < 2**31 for n in grid), grid
        return self.build

    def build(self, *arguments, num_warps, launch_pdl=False, **options):
        names = self.kernel.arg_names
        types = {name: NAMES[a.dtype] if isinstance(a, torch.Tensor) else "i32" for name, a in zip(names, arguments)}
        types |= {name: "constexpr" for name in options}
        constants = {(names.index(name),): value for name, value in options.items()}
        source = ASTSource(fn=self.kernel, signature={name: types[name] for name in names}, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert len(built.asm["cubin"]) > 0
        assert built.metadata.shared <= SHARED, (self.kernel, options, built.metadata.shared)
        self.built += 1

all_kernels = [Build(name) for name in ("descend", "group", "leaf_tiles")]
cases = [(768, 768, 8, 32, 1, "relu"), (37, 29, 3, 20, 2, "swiglu")]
for dtype in (torch.float32, torch.bfloat16):
    for fan_in, fan_out, depth, width, node_width, activation in cases:
        layer = fastff.FFF(
            fan_in, fan_out, depth=depth, leaf_width=width, node_width=node_width, activation=activation,
            device="meta", dtype=dtype,
        )
        tree, leaves = layer.tree, layer.leaves
        for batch in (1, 4096, 65536) if (fan_in, dtype) == (768, torch.bfloat16) else (1, 65536):
            x = torch.empty(batch, fan_in, device="meta", dtype=dtype)
            leaf = torch.empty(batch, device="meta", dtype=torch.int64)
            way = launch.choose_launch(x, 2**depth, launch._leaf_weights(leaves), node_width)
            if not way.grouped:
                launch._descend(x, leaf, tree, leaves, activation, way)
            else:
                listed, count = launch._group(x, leaf, tree, 2**depth, activation, way)
                launch._leaf_tiles(x, listed, count, leaves, activation, way, False)
assert [kernel.built >= 3 for kernel in all_kernels] == [True] * 3, [kernel.built for kernel in all_kernels]
print("built")
"""


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    """With the launch parameters of small, middling and large batches."""
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
