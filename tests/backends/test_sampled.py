"""The sampled pass: its output is the hard pass's, and its expected gradient what backends/sampled.py states."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastff
from fastff import functional, sampling
from fastff.backends import paths, sampled
from fastff.sampling import ESTIMATORS
from helpers import make

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def gradients(layer, x, g, output):
    """The gradients of all parameters and of x."""
    layer.zero_grad()
    x.grad = None
    output().backward(g)
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in (*layer.parameters(), x)]


def problem(features=6, **options):
    """With 20 features, and nodes of one neuron, all logits are computed at once; else those on paths."""
    torch.manual_seed(0)
    layer = make(features, 3, leaf_width=4, scale=3.0, **({"depth": 3} | options))
    return layer, torch.randn(4, features, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def force(monkeypatch, levels, others):
    """Make the draws leave the path at these levels, and walk on to these leaves."""
    real, others = sampling.draw, itertools.cycle(others)

    def draw(logits, estimator, alternatives):
        at = torch.tensor(levels).expand(len(logits), -1)
        _, weight = real(logits, estimator, alternatives)
        return at, weight

    def thresholds(logits):
        turns = paths.turns(torch.tensor([next(others)]), logits.shape[1])
        return torch.where(turns, -1e9, 1e9).to(logits.dtype).expand(len(logits), -1)

    monkeypatch.setattr(sampled, "draw", draw)
    monkeypatch.setattr(sampled, "thresholds", thresholds)


@pytest.mark.parametrize("options", [{}, {"features": 20}, {"node_width": 2}, {"activation": "geglu", "bias": False}])
def test_the_mixture_estimator_is_unbiased(options, monkeypatch):
    """Over all alternatives, enumerated, the gradient of every parameter and of x is the straight-through gradient."""
    layer, data, grad = problem(**options)
    for b in range(len(data)):
        x, g = data[b : b + 1].requires_grad_(), grad[b : b + 1]
        arguments = {"activation": layer.activation, "temperature": 1.7}
        wanted = gradients(
            layer,
            x,
            g,
            lambda x=x, a=arguments: functional.soft(x, layer.tree, layer.leaves, straight_through=True, **a).output,
        )
        mixture = functional.mixture(1.7 * layer.node_logits(x.detach()))[0]
        leaf = int(layer.route(x))
        total = [torch.zeros_like(t) for t in wanted]
        for other in range(8):
            if other == leaf:
                continue
            level = next(m for m in range(3) if other >> (2 - m) != leaf >> (2 - m))
            force(monkeypatch, [level], [other])
            probability = mixture[other] / (1 - mixture[leaf])
            found = gradients(
                layer, x, g, lambda x=x, a=arguments: functional.sampled(x, layer.tree, layer.leaves, **a).output
            )
            total = [t + probability * f for t, f in zip(total, found, strict=True)]
        for got, right in zip(total, wanted, strict=True):
            torch.testing.assert_close(got, right, **TOLERANCE)


@pytest.mark.parametrize(
    ("alternatives", "transposed", "features"),
    [(2, False, 6), (3, False, 5), (3, False, 20), (2, True, 5), (2, True, 6)],
)
def test_alternatives_that_are_compared_are_unbiased(alternatives, transposed, features, monkeypatch):
    """Over all tuples of alternatives, enumerated, with the probabilities of independent draws."""
    depth, leaves = (2, 4) if alternatives == 2 else (3, 8)
    layer, data, grad = problem(features, depth=depth)
    if transposed:  # all children swapped; the oracle is the tree of the opposite logits
        monkeypatch.setattr(sampled, "_swaps", lambda x, depth, _: torch.ones(len(x), depth, dtype=torch.bool))
    sign = -1 if transposed else 1
    x, g = data[:1].requires_grad_(), grad[:1]
    opposite = layer.tree._replace(weight=sign * layer.node_weight, bias=sign * layer.node_bias)
    wanted = gradients(layer, x, g, lambda: functional.soft(x, opposite, layer.leaves, straight_through=True).output)
    logits = sign * layer.node_logits(x.detach())
    mixture, leaf = functional.mixture(logits)[0], int(functional.walk(logits))
    path = logits.gather(1, paths.nodes(torch.tensor([leaf]), depth))
    mixture, chance = mixture.detach(), sampling.level_chances(path.detach(), alternatives)[0]
    level = {
        a: next(m for m in range(depth) if a >> (depth - 1 - m) != leaf >> (depth - 1 - m))
        for a in range(leaves)
        if a != leaf
    }
    mass = {m: sum(mixture[a] for a in level if level[a] == m) for m in range(depth)}
    total, sure = [torch.zeros_like(t) for t in wanted], 0.0
    for others in itertools.product(level, repeat=alternatives):
        probability = math.prod(float(chance[i, level[a]] * mixture[a] / mass[level[a]]) for i, a in enumerate(others))
        if not probability:
            continue
        force(monkeypatch, [level[a] for a in others], others)
        found = gradients(
            layer, x, g, lambda: functional.sampled(x, layer.tree, layer.leaves, alternatives=alternatives).output
        )
        total, sure = [t + probability * f for t, f in zip(total, found, strict=True)], sure + probability
    assert sure == pytest.approx(1)
    for got, right in zip(total, wanted, strict=True):
        torch.testing.assert_close(got, right, **TOLERANCE)


def test_the_expectation_of_the_even_estimator_is_the_sum_over_the_path(monkeypatch):
    """Over all levels, enumerated: the gradient of the sum over the path of p L_right + (1 - p) L_left, both hard."""
    layer, data, grad = problem()

    def local(x):
        """The visited leaf, and a zero with that gradient for the decisions of its path."""
        leaf = layer.route(x)
        y = functional.visit(x, leaf, layer.leaves, "relu")
        z = paths.logits(x, paths.nodes(leaf, 3), layer.tree, "relu")
        for m, (node, right) in enumerate(zip(paths.nodes(leaf, 3)[0], paths.turns(leaf, 3)[0], strict=True)):
            with torch.no_grad():
                start = (2 * node + 1 + ~right).unsqueeze(0)
                other = paths.descend(x, layer.tree, "relu", start)
                outputs = [functional.visit(x, j, layer.leaves, "relu") for j in (leaf, other)]
            left, right_output = outputs[::-1] if right else outputs
            p = torch.sigmoid(z[:, m])
            mixed = p * right_output + (1 - p) * left
            y = y + mixed - mixed.detach()
        return y

    for b in range(len(data)):
        x, g = data[b : b + 1].requires_grad_(), grad[b : b + 1]
        wanted = gradients(layer, x, g, lambda x=x: local(x))
        total = [torch.zeros_like(t) for t in wanted]
        for level in range(3):
            force(monkeypatch, [level], [0])
            found = gradients(
                layer,
                x,
                g,
                lambda x=x: functional.sampled(x, layer.tree, layer.leaves, estimator="even").output,
            )
            total = [t + f / 3 for t, f in zip(total, found, strict=True)]
        # The visited leaf's part is in each draw in full, and the shares sum to 1.
        for got, right in zip(total, wanted, strict=True):
            torch.testing.assert_close(got, right, **TOLERANCE)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_few_nodes_are_all_seen(estimator):
    """With a running mean over paths in their place, trees of depth 7 with leaves of 1 lost a point of accuracy."""
    layer, x = make(20, 5, depth=3, estimator=estimator, scale=3.0), torch.randn(50, 20, dtype=torch.float64)
    layer.temperature = 1.7
    losses = (fastff.balance_loss, *(partial(fastff.hardening_loss, reduction=r) for r in ("mean", "sum", "path")))
    found = []
    for layer.decision in ("straight_through", "sampled"):
        numbers = []
        for loss in losses:
            layer.zero_grad()
            layer(x)
            value = loss(layer)
            value.backward()
            numbers += [value.detach(), layer.node_weight.grad]
        found.append([*numbers, fastff.training.entropies(layer)[""], fastff.usage(layer)[""].leaf_mass])
    for other, all_leaves in zip(*found, strict=True):
        torch.testing.assert_close(other, all_leaves, **TOLERANCE)
    assert layer.running_shares is None
    layer(x)
    with pytest.raises(ValueError, match="needs all leaves"):
        fastff.balance_loss(layer, kind="leaf")


def test_many_nodes_are_seen_on_paths():
    """Also by a layer that saw all of them before: its losses do not read what an earlier forward left."""
    layer = make(1022, 5, depth=9, leaf_width=1, decision="sampled", alternatives=3)
    x = torch.randn(50, 1022, dtype=torch.float64)
    layer(x)
    assert layer.last_logits.shape == (50, 511)
    layer.alternatives = 1  # 511 nodes are many for one alternative
    layer(x[:9])
    assert layer.last_logits is None
    fastff.balance_loss(layer)
    assert layer.running_shares.shape == (511, 2)
    assert fastff.usage(layer)[""].samples == 9
    for changed in (make(13, 5, depth=3, decision="sampled"), make(20, 5, depth=3, decision="sampled").bfloat16()):
        changed(torch.randn(9, changed.in_features, dtype=changed.node_weight.dtype))
        assert changed.last_logits is None


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_output_is_the_hard_pass(dtype, estimator):
    """In every dtype and for odd batches, with leading dimensions, and with a gradient for every parameter."""
    for batch, depth in ((0, 3), (1, 1), (63, 4), (257, 0)):
        layer = make(7, 5, depth=depth, leaf_width=3, dtype=dtype, decision="sampled", estimator=estimator)
        x = torch.randn(batch, 1, 7).to(dtype)
        y = layer(x)
        y.sum().backward()
        exact = layer.double().eval()(x.double()) if dtype is torch.float64 else layer.eval()(x)
        allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
        torch.testing.assert_close(y.double(), exact.double(), rtol=allowed, atol=allowed)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.leaf_parameters())
        assert depth == 0 or layer.node_weight.grad is not None


def test_the_same_seed_gives_the_same_gradient():
    layer, x = make(depth=4, decision="sampled"), torch.randn(50, 5, dtype=torch.float64)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        layer.zero_grad()
        layer(x).square().sum().backward()
        found.append(layer.node_weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_checkpointing_counts_a_batch_once():
    """A module behind the layer makes backward run all of it again. On a GPU the running mean changes in place."""
    layer, x = make(depth=4, decision="sampled"), torch.randn(50, 5).double().requires_grad_()
    model = torch.nn.Sequential(layer, torch.nn.Tanh())
    y = checkpoint(model, x, use_reentrant=False)
    (y.sum() + fastff.balance_loss(layer)).backward()
    before = layer.running_shares
    with torch.no_grad():
        fastff.balance_loss(layer)
        assert layer.running_shares is before
        layer(x)
        fastff.balance_loss(layer)
    assert layer.running_shares is not before


def test_checkpointing_draws_the_same_alternatives_again():
    layer, x = make(depth=4, decision="sampled", transposition=0.2, dropout=0.3), torch.randn(50, 5).double()
    x.requires_grad_()
    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        layer.zero_grad()
        layer.running_shares = None
        (run(x).square().sum() + fastff.balance_loss(layer)).backward()
        found.append([p.grad for p in layer.parameters()] + [layer.running_shares])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_autocast_runs_in_the_dtype_of_the_weights():
    layer, x = make(depth=3, decision="sampled", dtype=torch.float32), torch.randn(9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.bfloat16())
        loss = y.float().square().sum()
    loss.backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer.eval()(x.bfloat16().float()).bfloat16())
    assert layer.leaf_in_weight.grad.dtype == torch.float32


def test_a_backward_pass_under_autocast_is_not_rounded():
    layer, x = make(depth=3, decision="sampled", dtype=torch.float32), torch.randn(9, 5)
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            layer(x).sum().backward()
        found.append(layer.node_weight.grad)
    assert found[0].any()
    assert torch.equal(*found)


def test_transposition_swaps_the_decisions(monkeypatch):
    layer, x = make(depth=3, decision="sampled", transposition=0.5), torch.randn(40, 5, dtype=torch.float64)
    monkeypatch.setattr(sampled, "_swaps", lambda x, depth, _: torch.ones(len(x), depth, dtype=torch.bool))
    layer(x)
    assert torch.equal(layer.last_leaf[:, 0], functional.walk(-layer.node_logits(x)))
    assert torch.equal(layer.last_path[:, 0] >= 0, ~paths.turns(layer.last_leaf[:, 0], 3))  # from before the swap


def test_nothing_is_drawn_where_the_tree_does_not_learn():
    layer, x = make(depth=3, decision="sampled").freeze_tree_(), torch.randn(9, 5, dtype=torch.float64)
    state = torch.get_rng_state()
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.node_weight.grad is None
    assert layer.leaf_in_weight.grad is not None


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_second_derivative_of_the_tree_alone_is_refused(estimator):
    """With frozen leaves it was silently wrong: it held the leaves' outputs and the draws constant."""
    layer, x, _ = problem(decision="sampled", estimator=estimator)
    for parameter in layer.leaf_parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match='decision="sampled" has no second derivative'):
        torch.autograd.grad(layer(x).square().sum(), layer.node_weight, create_graph=True)


@pytest.mark.parametrize("estimator", ["mixture", "even"])
def test_no_graph_is_kept_after_backward(estimator):
    """Also when no loss has read the paths: the gradient of the output passes them."""
    layer = make(depth=3, decision="sampled", estimator=estimator)
    layer(torch.randn(9, 5, dtype=torch.float64)).sum().backward()
    assert layer.last_path.grad_fn is None
    with pytest.raises(RuntimeError, match="has no gradient: backward has passed it"):
        fastff.balance_loss(layer)


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that an operation makes, besides rows of parameters: one for each node or leaf."""

    def __init__(self, layer):
        super().__init__()
        self.counts = {layer.num_nodes, layer.num_leaves}
        self.largest, self.shape = 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor) and t.numel() > self.largest and not {*t.shape[:1]} & self.counts:
                self.largest, self.shape = t.numel(), tuple(t.shape)
        return found


@pytest.mark.parametrize("estimator", ["mixture", "even"])
def test_no_tensor_grows_with_the_number_of_leaves(estimator):
    """No operation of a step makes a tensor as large as (batch, leaves) or (batch, nodes), up to depth 12, unless it is
    smaller than the input."""
    batch, width = 96, 16  # all nodes at depth 3, paths at 5 and 12
    for depth in (3, 5, 12):
        layer = fastff.FFF(width, 7, depth=depth, leaf_width=2, decision="sampled", estimator=estimator)
        x = torch.randn(batch, width, requires_grad=True)
        with Sizes(layer) as sizes:
            (layer(x).square().sum() + fastff.balance_loss(layer) + fastff.hardening_loss(layer)).backward()
        # (batch, in) rows, and two numbers for each level of two paths.
        assert sizes.largest <= batch * max(width, 4 * depth), sizes.shape


class Names(TorchDispatchMode):
    """Remembers which operations ran."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("alternatives", [1, 2])
def test_a_step_can_be_deterministic_on_a_gpu(alternatives):
    """torch.use_deterministic_algorithms(True) made a GPU refuse "mixture", for its cumsum of floats."""
    layer = make(depth=3, decision="sampled", alternatives=alternatives)
    with Names() as names:
        (layer(torch.randn(9, 5, dtype=torch.float64)).sum() + fastff.balance_loss(layer)).backward()
    assert not {"cumsum", "cumprod", "logcumsumexp", "put", "histc", "median"} & names.found


def test_memory_for_backward_does_not_depend_on_the_number_of_leaves():
    """What autograd keeps, besides the parameters, grows with the depth: by a few numbers per sample and level."""
    kept = {}
    for depth in (4, 12):
        layer = fastff.FFF(9, 7, depth=depth, leaf_width=2, decision="sampled")  # paths: 15 nodes and more
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        seen = {}

        def pack(t, own=own, seen=seen):
            if t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(torch.randn(64, 9))
        kept[depth] = sum(seen.values())
        y.sum().backward()
    assert kept[12] - kept[4] <= 64 * 8 * (12 - 4) * 16  # 16 numbers of 8 bytes
    assert kept[12] < 64 * 2**12 * 4  # less than one number per sample and leaf


@pytest.mark.parametrize(
    "options",
    [{}, {"estimator": "even"}, {"alternatives": 2, "activation": "swiglu"}, {"transposition": 0.2, "dropout": 0.1}],
)
def test_compiled_equals_eager(options):
    """A compiler used to draw in forward and again in backward, as no output of forward depends on the draws."""
    torch._dynamo.reset()
    layer, x = make(depth=3, decision="sampled", **options), torch.randn(17, 5, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (x, x[:9]):  # another batch size, too
        found = []
        for run in (layer, compiled):
            torch.manual_seed(1)
            layer.zero_grad()
            layer.running_shares = None
            y = run(rows)
            (y.square().sum() + fastff.balance_loss(layer)).backward()
            found.append([y.detach(), *(p.grad for p in layer.parameters())])
        for eager, other in zip(*found, strict=True):
            torch.testing.assert_close(other, eager, **TOLERANCE)


def test_wrong_choices_are_named():
    with pytest.raises(ValueError, match="decision must be 'soft', 'straight_through' or 'sampled'; got 'hard'"):
        fastff.FFF(5, 4, depth=2, leaf_width=3, decision="hard")
    with pytest.raises(ValueError, match="estimator must be 'mixture' or 'even'; got 'odd'"):
        fastff.FFF(5, 4, depth=2, leaf_width=3, estimator="odd")
    with pytest.raises(ValueError, match="at most 3, the other leaves of a tree of depth 2; got 4"):
        fastff.FFF(5, 4, depth=2, leaf_width=3, alternatives=4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decision", "smapled", "decision must be 'soft', 'straight_through' or 'sampled'; got 'smapled'"),
        ("estimator", "odd", "estimator must be"),
        ("alternatives", 0, "alternatives must be at least 1; got 0"),
        ("alternatives", "2", "alternatives must be an integer; got '2'"),
    ],
)
def test_attributes_that_are_set_later_are_checked(name, value, message):
    """A misspelt decision used to train softly, without a word."""
    layer = make(depth=3, decision="sampled")
    setattr(layer, name, value)
    with pytest.raises((ValueError, TypeError), match=message):
        layer(torch.randn(3, 5, dtype=torch.float64))
    layer.eval()(torch.randn(3, 5, dtype=torch.float64))  # where it has no effect
