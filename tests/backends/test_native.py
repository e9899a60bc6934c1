"""The native backend: every instruction set of this processor against float64; how it is built, loaded and shared."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fastff
from fastff.activations import function
from fastff.backends import native, ops, reference
from fastff.tensors import Leaves, Tree
from fastff.tree import path
from helpers import ACTIVATIONS, make, plain_hard, relative_error, request

ROOT = Path(__file__).parents[2]
BUILT = not isinstance(native.library(), str)
needs_library = pytest.mark.skipif(not BUILT, reason=f"native backend {native.status()}")
DTYPES = [torch.float32, torch.bfloat16]
leaf_kinds = pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])


def instruction_sets():
    lib = native.library()
    if not BUILT:
        return ["portable"]
    best = lib.fastff_isa()
    found = [isa for isa in ("portable", "avx2", "avx512") if lib.fastff_use_isa(isa.encode())]
    lib.fastff_use_isa(best)
    return found


@pytest.fixture(params=instruction_sets())
def isa(request):
    lib = native.library()
    best = lib.fastff_isa()
    assert lib.fastff_use_isa(request.param.encode())
    assert native.status() == request.param
    yield request.param
    lib.fastff_use_isa(best)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Fill memory that torch allocates and does not initialise with NaN, and integers with their largest value.

    A kernel that leaves an element of its output unwritten cannot pass on what an earlier call left in that memory.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def layer_of(*sizes, int8=False, **options):
    layer = make(*sizes, **({"dtype": torch.float32, "scale": 2.0} | options)).eval().requires_grad_(False)
    if int8:
        fastff.quantize_(layer)
    return layer


def hard(layer, x):
    assert native.why_not(request(x, layer.tree, layer.leaves, layer.activation)) == ""
    return native.hard(x, layer.tree, layer.leaves, layer.activation)


def assert_error(layer, x, leaf, y):
    """At most twice the error of plain torch in the same dtype, both against float64."""
    leaves = Leaves._make(None if t is None else t.double() for t in layer.leaves)
    expected = reference.visit(x.double(), leaf, leaves, layer.activation)
    assert relative_error(y, expected) <= 2 * relative_error(plain_hard(layer, x, leaf), expected)


def test_outputs_are_poisoned():
    """As the native backend allocates them: if torch stops filling them, the tests below prove less than they say."""
    for dtype in DTYPES:
        assert torch.ones(1, dtype=dtype).new_empty(63, 5).isnan().all()
    assert (torch.ones(1).new_empty(63, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()


def test_is_loaded_where_it_must_be():
    if os.environ.get("FASTFF_REQUIRE_NATIVE") == "1":
        assert native.status() in ("avx512", "avx2", "portable")


@needs_library
@leaf_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("sizes", "batch", "depth", "leaf_width", "options"),
    [
        ((37, 29), 63, 3, 5, {}),
        ((5, 3), 257, 2, 1, {"bias": False}),
        ((64, 10), 257, 4, 8, {"node_width": 3}),
        ((1100, 70), 63, 1, 13, {"node_width": 9}),
        ((96, 400), 63, 0, 32, {}),
    ],
)
def test_error_is_that_of_plain_torch(isa, dtype, activation, sizes, batch, depth, leaf_width, options, int8):
    """And the leaves of float64, wherever its logits are above rounding."""
    options = {"depth": depth, "leaf_width": leaf_width, "activation": activation, "dtype": dtype, **options}
    layer = layer_of(*sizes, int8=int8, **options)
    tree = Tree._make(None if t is None else t.double() for t in layer.tree)
    x = torch.randn(batch, sizes[0]).to(dtype)
    y, leaf = hard(layer, x)
    assert y.dtype == dtype
    route = reference.route(x.double(), tree, activation)
    visited = torch.tensor([[node for node, _ in path(j, depth)] for j in route.tolist()], dtype=torch.int64)
    logits = reference.node_logits(x.double(), tree, activation).gather(1, visited)
    clear = (logits.abs() > 1e-5).all(-1)  # bfloat16 is added up in float32, too
    assert clear.sum() > 0.9 * batch
    assert torch.equal(leaf[clear], route[clear])
    assert torch.equal(native.route(x, layer.tree, activation), leaf)
    assert torch.equal(native.visit(x, leaf, layer.leaves, activation), y)
    assert_error(layer, x, leaf, y)


@needs_library
@pytest.mark.parametrize("activation", ACTIVATIONS[:6])
def test_activations(isa, activation):
    """Point by point: as near to float64 as torch is, to a few roundings; NaN and infinities as torch has them."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.linspace(-130, 130, 501)])
    one = Leaves(torch.ones(1, 1, 1), None, torch.ones(1, 1, 1), None)
    leaf = torch.zeros(len(x), dtype=torch.int64)
    y = native.visit(x[:, None], leaf, one, activation)[:, 0]
    exact = function(activation)(x.double())
    rounding = torch.finfo(torch.float32).eps * x.abs().clamp(min=1)
    assert ((y - exact).abs() <= torch.maximum((function(activation)(x) - exact).abs(), rounding)).all()
    special = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, -0.0])[:, None]
    y = native.visit(special, leaf[:5], one, activation)
    assert torch.equal(y[1:], function(activation)(special.double())[1:].float())
    assert y[0].isnan()
    assert native.visit(-special[1:2], leaf[:1], one, "relu").item() == 0


@needs_library
@leaf_kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_alone(isa, dtype, int8):
    """Bit by bit, whatever the rows beside it, how many they are and which of them share its leaf."""
    for depth in (0, 2, 9):
        layer = layer_of(70, 50, depth=depth, leaf_width=13, dtype=dtype, int8=int8)
        x = torch.randn(97, 70).to(dtype)
        y, leaf = hard(layer, x)
        for rows in (torch.randperm(97), torch.arange(3, 60, 7), torch.zeros(11, dtype=torch.int64)):
            again, leaf_again = hard(layer, x[rows])
            assert torch.equal(again, y[rows])
            assert torch.equal(leaf_again, leaf[rows])


@needs_library
@leaf_kinds
def test_bad_values_stay_in_their_row(isa, int8):
    layer = layer_of(70, 50, depth=5, leaf_width=13, int8=int8)
    x = torch.randn(40, 70)
    y, leaf = hard(layer, x)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = x.clone()
        bad[7, 3] = value
        y_bad, leaf_bad = hard(layer, bad)
        rest = torch.arange(40) != 7
        assert torch.equal(y_bad[rest], y[rest])
        assert torch.equal(leaf_bad[rest], leaf[rest])
        assert 0 <= leaf_bad[7] < 32
        if value != value:
            assert leaf_bad[7] == 0
            assert y_bad[7].isnan().all()


@needs_library
@leaf_kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_skewed_leaves(isa, dtype, int8):
    """A popular leaf, alone and beside rare ones, on one thread and on several."""
    layer = layer_of(70, 50, depth=6, leaf_width=32, dtype=dtype, int8=int8)
    x = torch.randn(700, 70).to(dtype)
    for leaf in (torch.full((700,), 5), torch.randint(64, (700,)).clamp(max=3), torch.arange(700) % 64):
        torch.set_num_threads(1)
        y = native.visit(x, leaf, layer.leaves, "relu")
        assert_error(layer, x, leaf, y)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(native.visit(x, leaf, layer.leaves, "relu"), y)


@needs_library
@leaf_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("openmp", [True, False])
def test_threads_share_a_row(isa, dtype, openmp, int8):
    """Fewer rows than threads: the sum is added up in parts, always the same ones; with torch's threads or without."""
    layer = layer_of(1100, 900, depth=1, leaf_width=941, dtype=dtype, int8=int8)  # work for seven threads in one row
    lib = native.library()
    if not openmp:
        lib.fastff_use_openmp(None)
    try:
        for batch in (1, 2, 3):
            x = torch.randn(batch, 1100).to(dtype)
            torch.set_num_threads(1)
            alone, leaf = hard(layer, x)
            torch.set_num_threads(7)
            shared, leaf_shared = hard(layer, x)
            if dtype == torch.float32:  # the roundings of another order show that the row was shared
                assert not torch.equal(shared, alone)
            assert torch.equal(leaf_shared, leaf)
            assert_error(layer, x, leaf, shared)
            for _ in range(5):
                assert torch.equal(hard(layer, x)[0], shared)
            assert torch.equal(native.visit(x, leaf, layer.leaves, "relu"), shared)
    finally:
        lib.fastff_use_openmp(native._openmp())


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
def test_callers_share_the_library(threads):
    """Several Python threads at once, with layers of different sizes: what each gets alone, bit by bit."""
    cases = []
    torch.set_num_threads(threads)
    for i, activation in enumerate(ACTIVATIONS):
        layer = layer_of(33 + 70 * i, 20 + 50 * i, depth=i % 6, leaf_width=3 + 5 * i, activation=activation)
        for batch in (1, 3, 200):
            x = torch.randn(batch, 33 + 70 * i)
            cases.append((layer, x, hard(layer, x)[0]))

    def run(k):
        torch.set_num_threads(threads)  # in this thread
        return all(torch.equal(hard(layer, x)[0], y) for layer, x, y in cases[k % len(cases) :] + cases[: k % 5])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(24)))


@pytest.mark.slow
@needs_library
def test_survives_a_fork():
    """One thread needs no OpenMP, which hangs in a child of a process that has used it."""
    script = """
import os, torch, fastff
from fastff.backends import native
layer = fastff.FFF(300, 300, depth=4, leaf_width=32).eval().requires_grad_(False)
x = torch.randn(64, 300)
plan = native.Plan(layer.tree, layer.leaves, "relu")
torch.set_num_threads(2)
y = plan.run(x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(plan.run(x), y) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@needs_library
def test_inputs():
    layer = layer_of(9, 7, depth=2, leaf_width=3)
    assert hard(layer, torch.randn(0, 9))[0].shape == (0, 7)
    assert native.route(torch.randn(0, 9), layer.tree, "relu").shape == (0,)
    x = torch.randn(9, 12).t()
    assert not x.is_contiguous()
    assert torch.equal(hard(layer, x)[0], hard(layer, x.contiguous())[0])
    assert torch.equal(native.hard(x[::2], layer.tree, layer.leaves, "relu")[0], hard(layer, x)[0][::2])
    for leaf in (4, -1):
        with pytest.raises(IndexError, match=rf"within 0..3; got {leaf}"):
            native.visit(x, torch.full((12,), leaf), layer.leaves, "relu")


@needs_library
def test_why_not():
    layer = layer_of(9, 7, depth=2, leaf_width=3)
    tree, leaves, x = layer.tree, layer.leaves, torch.randn(2, 9)
    turned = leaves._replace(in_weight=leaves.in_weight.mT.contiguous().mT)
    assert native.why_not(request(x, None, leaves, "relu")) == native.why_not(request(x, tree, None, "relu")) == ""
    assert "float64" in native.why_not(request(x.double(), tree, leaves, "relu"))
    assert "named" in native.why_not(request(x, tree, leaves, torch.sin))
    assert "contiguous" in native.why_not(request(x, tree, turned, "relu"))
    assert "dtype" in native.why_not(request(x.bfloat16(), tree, leaves, "relu"))
    assert "device meta" in native.why_not(request(x.to("meta"), tree, leaves, "relu"))
    reasons = []
    torch.func.vmap(lambda row: reasons.append(native.why_not(request(row[None], tree, leaves, "relu"))) or row)(x)
    assert "transform" in reasons[0]


@needs_library
@leaf_kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_width_of_a_leaf(isa, dtype, activation, int8):
    """A leaf on its own: all neurons, the last few columns and the last few features."""
    for leaf_width, in_features, out_features in ((1, 3, 1), (2, 17, 66), (4, 64, 64), (7, 31, 127), (33, 1025, 1030)):
        layer = layer_of(in_features, out_features, depth=1, leaf_width=leaf_width, activation=activation, dtype=dtype,
                         int8=int8)  # fmt: skip
        x = torch.randn(63, in_features).to(dtype)
        y, leaf = hard(layer, x)
        assert_error(layer, x, leaf, y)


@needs_library
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@torch.no_grad()
def test_a_plan_of_int8_leaves_follows_its_parameters(activation):
    """Every weight and every scale, replaced in turn, in the layer's plan and in the compiler's operation."""
    layer, x = layer_of(9, 7, depth=2, leaf_width=3, activation=activation, int8=True), torch.randn(5, 9)

    def check():
        plain = Tree._make(layer.tree), Leaves._make(layer.leaves)
        expected = reference.hard(x, *plain, activation)[0]
        for _ in range(2):
            torch.testing.assert_close(layer(x), expected)
            torch.testing.assert_close(ops.hard(x, *layer.tree, *layer.leaves, activation), expected)
        assert layer._plans.plan is not None

    check()
    names = [name for name, p in layer.named_parameters() if name.endswith(("_scale", "_weight"))]
    assert len(names) == (7 if activation == "swiglu" else 5)
    for name in names:
        getattr(layer, name).data = getattr(layer, name).data.flip(0)  # elsewhere
        check()
        getattr(layer, name).data.neg_()  # in place
        check()
    layer.leaf_in_scale.data = torch._neg_view(layer.leaf_in_scale.data)
    torch.testing.assert_close(layer(x), reference.hard(x, layer.tree, layer.leaves, activation)[0])


@needs_library
def test_plan_knows_when_its_weights_have_moved():
    layer = layer_of(9, 7, depth=2, leaf_width=3)
    weights = [*layer.tree[:2], *layer.leaves[:4]]
    plan = native.Plan(layer.tree, layer.leaves, "relu")
    x = torch.randn(2, 9)
    assert torch.equal(plan.run(x), hard(layer, x)[0])
    assert plan.hold(weights)
    layer.leaf_in_bias.mul_(2)  # in place: the plan sees it
    assert torch.equal(plan.run(x), hard(layer, x)[0])
    assert plan.let_go().hold(weights)
    layer.leaf_in_bias.data = layer.leaf_in_bias.data.clone()
    assert plan.hold(weights) is None


@pytest.mark.slow
def test_installs_without_a_compiler(tmp_path):
    """It installs, imports, computes, and says why the native backend is not there."""
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed, and pip may not fetch it here")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "make"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    environment = {k: v for k, v in os.environ.items() if k != "FASTFF_REQUIRE_NATIVE"}
    environment |= {"CXX": "/bin/false", "CC": "/bin/false", "PATH": str(tools)}
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "results", "docs", "tests"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", *options, str(source)]
    subprocess.run(install, check=True, env=environment, capture_output=True)
    script = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # an editable install
sys.path.insert(0, sys.argv[1])
import torch, fastff
from fastff.backends import Request, native
assert fastff.__file__.startswith(sys.argv[1])
layer, x = fastff.FFF(5, 4, depth=2, leaf_width=3).eval(), torch.randn(3, 5)
assert layer(x).shape == (3, 4)
reason = native.why_not(Request.make("hard", x, layer.tree, layer.leaves, "relu"))
assert native.status() == reason and reason.startswith("not built: fastff was installed without a C++ compiler"), reason
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "site")], check=True, cwd=tmp_path)
    environment["FASTFF_REQUIRE_NATIVE"] = "1"
    assert subprocess.run(install, env=environment, capture_output=True).returncode != 0


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_refuses_msvc(tmp_path):
    """With what to do instead. The variable stands for the compiler, which no Linux has."""
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DMSVC=ON"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    message = " ".join(result.stderr.split())  # CMake breaks lines
    assert result.returncode != 0
    assert "needs GCC or Clang" in message
    assert "pip installs the package without the native backend" in message


@pytest.mark.slow
def test_sanitizers():
    """No read or write beside a buffer, no undefined behaviour: tests/native/check.cpp under ASan and UBSan."""
    if not shutil.which("cmake") or not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("clang++")):
        pytest.skip("needs cmake and a C++ compiler")
    build = ROOT / "build" / "sanitize"
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-DFASTFF_SANITIZE=ON"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True, capture_output=True)
    result = subprocess.run([build / "fastff_check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
