"""LocalSGD and LocalAdam against optimisers of torch: one for a plain layer, one a block for a tree.

Almost all is in float64 with sums of a few dozen terms of order one, so that 1e-10 is rounding with room to spare.
"""

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastff
import oracle
from fastff.optim import LocalAdam, LocalSGD
from helpers import make, state

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
NEVER = 1e9  # a local batch that no block reaches


def loss_of(model, x, target):
    return (model(x) - target).square().sum(-1).mean()


def data(batches, size=13, in_features=5, out_features=4):
    """Batches of inputs and targets; `size` may be one number or one a batch."""
    sizes = [size] * batches if isinstance(size, int) else size
    return [(torch.randn(n, in_features).double(), torch.randn(n, out_features).double()) for n in sizes]


def train(model, optimizer, batches, run=None):
    for x, target in batches:
        optimizer.zero_grad()
        loss_of(run or model, x, target).backward()
        optimizer.step()


def snapshot(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def parameters(model):
    return snapshot(dict(model.named_parameters()))


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda m, n=name: n + m
        )


# Depth 0: an ordinary optimiser.


def around(layer):
    """A model with parameters that belong to no FFF layer, on both sides of one."""
    return nn.Sequential(nn.Linear(5, layer.in_features), nn.Tanh(), layer, nn.Linear(layer.out_features, 4)).double()


SAME = {
    "sgd": (LocalSGD, torch.optim.SGD, {"lr": 0.3}),
    "momentum": (LocalSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "momentum_decay": (LocalSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.2}),
    "adam": (LocalAdam, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.0}),
    "adam_decay": (LocalAdam, torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.3, "betas": (0.7, 0.9), "eps": 1e-3}),
}
same = pytest.mark.parametrize(("local", "plain", "options"), SAME.values(), ids=SAME)


@same
@pytest.mark.parametrize("local_batch", [13, 4.5])
def test_depth_0_is_the_optimiser_of_torch(local, plain, options, local_batch):
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    optimizer, reference = local(model, local_batch=local_batch, **options), plain(twin.parameters(), **options)
    for batch in data(7):
        train(model, optimizer, [batch])
        train(twin, reference, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)


def test_the_defaults_are_those_of_adam_without_decay():
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    batches = data(5, size=32)
    train(model, LocalAdam(model), batches)
    train(twin, torch.optim.Adam(twin.parameters()), batches)
    assert_same(parameters(model), parameters(twin), **TOLERANCE)


@same
def test_other_parameters_step_every_time(local, plain, options):
    """No block of the tree has seen enough and none moves; the linear layers around it move as under torch."""
    model = around(make(7, 3, depth=2))
    twin = copy.deepcopy(model)
    optimizer = local(model, local_batch=NEVER, **options)
    reference = plain([p for i in (0, 3) for p in twin[i].parameters()], **options)
    batches, before = data(6), parameters(model[2])
    for batch in batches:
        previous = parameters(model[0])
        train(model, optimizer, [batch])
        assert all(not torch.equal(previous[name], p) for name, p in model[0].named_parameters())
    train(twin, reference, batches)
    assert_same(parameters(model), parameters(twin), **TOLERANCE)
    assert_same(parameters(model[2]), before)


@same
def test_learning_rate_schedules(local, plain, options):
    """OneCycleLR changes the learning rate and the momentum (or the betas) of every group, and warns of lost steps."""
    model = around(make(7, 3, depth=0))
    twin = copy.deepcopy(model)
    optimizer, reference = local(model, local_batch=13, **options), plain(twin.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9) for o in (optimizer, reference)]
        for batch in data(8):
            train(model, optimizer, [batch])
            train(twin, reference, [batch])
            for schedule in schedules:
                schedule.step()
            assert_same(parameters(model), parameters(twin), **TOLERANCE)


def test_a_block_steps_with_the_learning_rate_of_that_moment():
    """Gathered over two batches at 1 and 1/2, the gradients are applied with 1/2: the rate is that of the step."""
    layer = make(depth=1)
    twin = copy.deepcopy(layer)
    before = parameters(layer)
    optimizer, fixed = LocalSGD(layer, 1.0, local_batch=14), LocalSGD(twin, 0.5, local_batch=14)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for batch in data(2):
        assert_same(parameters(layer), before)  # 13 samples are not enough
        train(layer, optimizer, [batch])
        train(twin, fixed, [batch])
        schedule.step()
    assert_same(parameters(layer), parameters(twin))
    assert not torch.equal(layer.node_weight, before["node_weight"])


# A tree: every leaf and every node is an optimiser of its own.


class Blocks:
    """What the optimisers should do, block by block: sums over single samples, and one torch optimiser a block.

    Gradients come from autograd, one sample at a time, at the parameters in force when the batch came. Masses come from
    the oracle. A leaf of a straight-through tree sums over the samples that it was chosen for and no others.
    """

    def __init__(self, layer, local_batch, plain, options):
        self.local_batch = local_batch
        self.hard = layer.decision == "straight_through"
        self.measure = {"leaf": "leaf_count" if self.hard else "leaf_mass", "node": "node_mass"}
        self.copies, self.sums, self.mass, self.optimizers, self.steps = {}, {}, {}, {}, {}
        for kind, size in (("leaf", layer.num_leaves), ("node", layer.num_nodes)):
            for b in range(size):
                own = {n: nn.Parameter(p[b].clone()) for n, p in parameters(layer).items() if n.startswith(kind)}
                self.copies[kind, b] = own
                self.sums[kind, b] = {name: torch.zeros_like(p) for name, p in own.items()}
                self.mass[kind, b] = 0.0
                self.optimizers[kind, b] = plain(own.values(), **options)
                self.steps[kind, b] = 0

    def see(self, layer, x, target):
        twin = copy.deepcopy(layer)
        named = dict(twin.named_parameters())
        leaf = oracle.route(x, state(layer), layer.activation).tolist()
        for i in range(len(x)):
            grads = torch.autograd.grad(loss_of(twin, x[i : i + 1], target[i : i + 1]), list(named.values()))
            for name, grad in zip(named, grads, strict=True):
                kind = name.partition("_")[0]
                for b in [leaf[i]] if kind == "leaf" and self.hard else range(len(grad)):
                    self.sums[kind, b][name] += grad[b]
        used = oracle.usage(x, state(layer), layer.activation)
        for kind, b in self.mass:
            self.mass[kind, b] += used[self.measure[kind]][b].item()

    def step(self):
        """The blocks that step."""
        ready = {block for block, mass in self.mass.items() if mass >= self.local_batch}
        for block in ready:
            for name, parameter in self.copies[block].items():
                parameter.grad = self.sums[block][name] / self.mass[block]
                self.sums[block][name] = torch.zeros_like(parameter)
            self.optimizers[block].step()
            self.mass[block] = 0.0
            self.steps[block] += 1
        return ready


def moments(optimizer, layer):
    """The moments of every parameter, and no more: what a block that waits must not lose."""
    return {
        f"{name}.{key}": value.clone()
        for name, parameter in layer.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if key not in ("mass", "gathered")
    }


LAYERS = {
    "linear": {"depth": 2},
    "wide_nodes": {"depth": 1, "node_width": 3, "activation": "tanh"},
    "gated": {"depth": 3, "leaf_width": 1, "activation": "swiglu"},
    "no_bias": {"depth": 2, "leaf_width": 2, "bias": False, "activation": "gelu"},
}


@same
@pytest.mark.parametrize("decision", ["soft", "straight_through"])
@pytest.mark.parametrize("shape", LAYERS.values(), ids=LAYERS)
def test_each_block_is_an_optimiser_of_its_own(local, plain, options, decision, shape):
    """A block steps exactly when the samples of its own have come to local_batch, with their mean; else it waits.

    A straight-through node has the gradient of the soft mixture, to which a sample contributes by its probability of
    reaching the node; so it counts them by that, and not only those that the hard pass brings to it.
    """
    layer = make(decision=decision, scale=2.0, **shape)
    # Whole samples are counted exactly; no sum of soft weights should come so near that rounding decides.
    local_batch = 36 // layer.num_leaves + (0 if decision == "straight_through" else 0.37)
    optimizer, blocks = local(layer, local_batch=local_batch, **options), Blocks(layer, local_batch, plain, options)
    waited = dict.fromkeys(blocks.steps, 0)
    for x, target in data(6, size=[11, 1, 7, 0, 23, 13]):
        blocks.see(layer, x, target)
        before, kept = parameters(layer), moments(optimizer, layer)
        optimizer.zero_grad()
        (loss_of(layer, x, target) if len(x) else layer(x).sum()).backward()
        optimizer.step()
        ready = blocks.step()
        for kind, b in blocks.steps:
            stepped = (kind, b) in ready
            waited[kind, b] += not stepped
            for name, expected in blocks.copies[kind, b].items():
                actual = layer.get_parameter(name)[b]
                torch.testing.assert_close(actual, expected, **TOLERANCE)
                if not stepped:
                    assert torch.equal(actual, before[name][b])
                    for key, value in moments(optimizer, layer).items():
                        if key.startswith(name + ".") and key in kept:
                            assert torch.equal(value[b], kept[key][b]), key
    for kind in ("leaf", "node"):
        mine = [block for block in blocks.steps if block[0] == kind]
        assert sum(blocks.steps[block] for block in mine) >= len(mine) / 2, "the data must make blocks step"
        assert sum(waited[block] for block in mine) >= len(mine), "and make them wait"


def test_a_leaf_that_is_never_chosen_never_moves():
    layer = make(depth=1, decision="straight_through")
    with torch.no_grad():
        layer.node_bias.fill_(-1e6)  # all go left
    before = parameters(layer)
    train(layer, LocalAdam(layer, 0.1, local_batch=1, weight_decay=0.5), data(4))
    for name, p in layer.named_parameters():
        if name.startswith("leaf"):
            assert torch.equal(p[1], before[name][1])
            assert not torch.equal(p[0], before[name][0])


def test_local_batch_of_a_group_can_be_changed():
    """A group says which blocks it holds and how many samples they wait for: nodes and leaves can differ."""
    layer = make(depth=2)
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    nodes = next(group for group in optimizer.param_groups if group["blocks"] == "node")
    nodes["local_batch"] = 1e-3
    before = parameters(layer)
    train(layer, optimizer, data(1))
    for name, p in layer.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("leaf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_root_has_seen_every_sample(dtype):
    """All of a batch passes the root, so with batch == local_batch it steps each time: a sum of soft weights that comes
    to 31.999998 for 32 samples is 32 samples. Compared exactly, one root in ten waited for a second batch."""
    late = []
    for seed in range(20):
        torch.manual_seed(seed)
        layer = make(depth=3, dtype=dtype)
        before = layer.node_bias[0].item()
        optimizer = LocalSGD(layer, 1.0, local_batch=32)
        loss_of(layer, torch.randn(32, 5, dtype=dtype), torch.randn(32, 4, dtype=dtype)).backward()
        optimizer.step()
        if layer.node_bias[0].item() == before:
            late.append(seed)
    assert late == []


def test_a_frozen_tree_keeps_its_nodes():
    layer = make(depth=2).freeze_tree_()
    before = parameters(layer)
    optimizer = LocalAdam(layer, 0.1, local_batch=1e-3, weight_decay=0.1)
    train(layer, optimizer, data(2))
    assert all(torch.equal(p, before[name]) == name.startswith("node") for name, p in layer.named_parameters())
    layer.unfreeze_tree_()
    train(layer, optimizer, data(1))
    assert all(not torch.equal(p, before[name]) for name, p in layer.named_parameters())


def test_a_layer_that_is_not_trained_does_not_stop_the_others():
    """A part of a model may be frozen and in evaluation mode; it has no training forward and no gradient, so nothing to
    step, and no claim on those that have."""
    model = nn.Sequential(make(5, 5), make(5, 4))
    optimizer = LocalSGD(model, 0.1, local_batch=1e-3)
    model[0].requires_grad_(False).eval()
    before = parameters(model)
    train(model, optimizer, data(1))
    assert all(torch.equal(p, before[name]) == name.startswith("0") for name, p in model.named_parameters())


def test_a_layer_that_is_left_out_does_not_stop_the_others():
    """As with stochastic depth; and with all of them left out or frozen, the other parameters still step."""
    model = around(make(7, 3, depth=2))
    model.append(make(4, 4))
    optimizer = LocalSGD(model, 0.1, local_batch=1e-3)
    train(model, optimizer, data(1))
    before = parameters(model)
    train(model, optimizer, data(1), run=model[:4])
    assert all(torch.equal(p, before[name]) == name.startswith("4") for name, p in model.named_parameters())
    model[2].requires_grad_(False).eval()
    before = parameters(model)
    train(model, optimizer, data(1), run=model[:4])
    assert all(torch.equal(p, before[name]) == (name[0] in "24") for name, p in model.named_parameters())


def test_shared_gradients_are_refused():
    layer = make(depth=2, sharing=0.5)
    optimizer = LocalSGD(layer, 0.1)
    layer(torch.randn(3, 5).double()).sum().backward()
    with pytest.raises(ValueError, match=r"sharing=0\.5: a leaf's gradient comes from the samples of all"):
        optimizer.step()


def test_gradients_of_the_hard_pass_are_refused():
    """Leaves get gradients in evaluation too, but there is no count of the samples."""
    layer = make(depth=2)
    optimizer = LocalSGD(layer, 0.1)
    layer.eval()(torch.randn(3, 5).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"no training forward.*in train\(\) mode"):
        optimizer.step()


# Forwards: what counts, and how often.


@pytest.mark.parametrize("decision", ["soft", "straight_through"])
@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_gradient_accumulation(local, decision):
    """Micro-batches of 5, 1 and 7, their losses weighted to the mean over all 13, are a batch of 13."""
    layer = make(depth=2, decision=decision)
    twin = copy.deepcopy(layer)
    optimizer, whole = local(layer, 0.1, local_batch=6.1), local(twin, 0.1, local_batch=6.1)
    for x, target in data(4):
        optimizer.zero_grad()
        for part, goal in zip(x.split([5, 1, 7]), target.split([5, 1, 7]), strict=True):
            (loss_of(layer, part, goal) * len(part) / 13).backward()
        optimizer.step()
        train(twin, whole, [(x, target)])
        assert_same(parameters(layer), parameters(twin), **TOLERANCE)
    masses = [[o.state[p]["mass"] for p in m.parameters()] for o, m in ((optimizer, layer), (whole, twin))]
    torch.testing.assert_close(*masses, **TOLERANCE)
    assert any(mass.count_nonzero() for mass in masses[0]), "something is still gathering"


def test_several_dimensions_of_samples():
    """(3, 4, 5) inputs are 12 samples."""
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    x, target = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 4).double()
    train(layer, LocalSGD(layer, 0.1, local_batch=2), [(x, target)])
    train(twin, LocalSGD(twin, 0.1, local_batch=2), [(x.flatten(0, 1), target.flatten(0, 1))])
    assert_same(parameters(layer), parameters(twin), **TOLERANCE)


def test_evaluation_does_not_count():
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    optimizer, quiet = LocalSGD(layer, 0.1, local_batch=8), LocalSGD(twin, 0.1, local_batch=8)
    for batch in data(3):
        layer.eval()
        layer(torch.randn(99, 5).double())
        layer.train()
        train(layer, optimizer, [batch])
        train(twin, quiet, [batch])
    assert_same(parameters(layer), parameters(twin))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_does_not_count_twice(use_reentrant):
    """The recomputation in backward is the same forward again, not another. Reentrant, it alone has a graph."""
    model = around(make(7, 3, depth=2))
    twin = copy.deepcopy(model)
    optimizer, plain = LocalAdam(model, 0.1, local_batch=7.3), LocalAdam(twin, 0.1, local_batch=7.3)

    def checkpointed(x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    for batch in data(4):
        train(model, optimizer, [batch], run=checkpointed)
        train(twin, plain, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)
        for p, q in zip(model[2].parameters(), twin[2].parameters(), strict=True):
            assert torch.equal(optimizer.state[p]["mass"], plain.state[q]["mass"])


@pytest.mark.parametrize(
    ("given", "decision"), [("model", "soft"), ("compiled", "soft"), ("compiled", "straight_through")]
)
def test_a_compiled_model_is_counted(given, decision):
    """Compiled code runs no hook; the optimiser reads what it left on the layer. Built for either, it steps alike."""
    torch._dynamo.reset()
    model = around(make(7, 3, depth=2, decision=decision))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = LocalSGD(model if given == "model" else compiled, 0.1, local_batch=7.3, momentum=0.5)
    plain = LocalSGD(twin, 0.1, local_batch=7.3, momentum=0.5)
    for batch in data(4):
        train(model, optimizer, [batch], run=compiled)
        train(twin, plain, [batch])
        assert_same(parameters(model), parameters(twin), **TOLERANCE)
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_zero_grad_may_come_between_forward_and_backward(compiled):
    torch._dynamo.reset()
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    optimizer, before = LocalSGD(layer, 0.1, local_batch=4.2), LocalSGD(twin, 0.1, local_batch=4.2)
    for batch in data(3):
        loss = loss_of(run, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train(twin, before, [batch])
    assert_same(parameters(layer), parameters(twin), **TOLERANCE)
    torch._dynamo.reset()


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    layer = make(depth=1)
    twin = copy.deepcopy(layer)
    (batch,) = data(1)
    optimizer = LocalSGD(layer, 0.1, local_batch=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(layer, *batch)
        loss.backward()
        return loss

    expected = loss_of(copy.deepcopy(layer), *batch)
    assert torch.equal(optimizer.step(closure), expected)
    train(twin, LocalSGD(twin, 0.1, local_batch=2), [batch])
    assert_same(parameters(layer), parameters(twin))


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_a_step_without_a_forward_is_an_error(local):
    """The gradients of the step before are still there; without a count they must not be gathered again."""
    model = around(make(7, 3, depth=2))
    optimizer = local(model, 0.1, local_batch=2)
    with pytest.raises(RuntimeError, match="the FFF layer '2' has had no training forward since the last step"):
        optimizer.step()
    train(model, optimizer, data(1))
    before = parameters(model)
    with pytest.raises(RuntimeError, match=r"Run the model that the optimiser was built for, in train\(\) mode"):
        optimizer.step()
    assert_same(parameters(model), before)
    train(model, optimizer, data(1))  # and a forward sets it right
    assert all(not torch.equal(before[name], p) for name, p in model[0].named_parameters(prefix="0"))


def test_a_forward_without_gradients_does_not_count():
    """In train() mode, under no_grad: to look at the loss or at the regions, between the batches or within one."""
    layer = make(depth=2)
    twin = copy.deepcopy(layer)
    optimizer, quiet = LocalSGD(layer, 0.1, local_batch=8), LocalSGD(twin, 0.1, local_batch=8)
    for batch in data(3):
        optimizer.zero_grad()
        loss_of(layer, *batch).backward()
        with torch.no_grad():
            layer(torch.randn(99, 5).double())
        optimizer.step()
        train(twin, quiet, [batch])
    assert_same(parameters(layer), parameters(twin))
    with torch.no_grad():
        layer(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()


def test_a_forward_inside_torch_func_does_not_count():
    """Its gradients are returned, not kept on the parameters, and what it left on the layer cannot be read later."""
    model = nn.Sequential(make(5, 5), make(5, 4))
    optimizer = LocalSGD(model, 0.1, local_batch=NEVER)
    for x, target in data(2):
        train(model[1:], optimizer, [(x, target)])
        torch.func.vmap(model)(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    assert optimizer.state[model[1].node_bias]["mass"][0].item() == pytest.approx(26)


def test_several_backward_passes_through_a_forward_count_once():
    """Two losses with a backward each are one batch, as is one whose first gradients were looked at and dropped."""
    layers = [make(depth=2)]
    layers += [copy.deepcopy(layers[0]) for _ in range(2)]
    ((x, target),) = data(1)
    masses = []
    for layer, parts, drop in zip(layers, [[1.0], [0.25, 0.75], [0.3, 1.0]], [False, False, True], strict=True):
        optimizer = LocalSGD(layer, 0.1, local_batch=3.3)
        loss = loss_of(layer, x, target)
        for part in parts:
            if drop:
                optimizer.zero_grad()
            (part * loss).backward(retain_graph=True)
        optimizer.step()
        masses.append([optimizer.state[p]["mass"] for p in layer.parameters()])
    for layer, mass in zip(layers[1:], masses[1:], strict=True):
        torch.testing.assert_close(mass, masses[0], rtol=0, atol=0)
        assert_same(parameters(layer), parameters(layers[0]), **TOLERANCE)


def test_a_loss_on_the_tree_alone():
    """Its gradients do not come through the output of the layer; the samples are those of the last forward."""
    layer = make(depth=2)
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    layer(torch.randn(13, 5).double())
    fastff.hardening_loss(layer).backward()
    optimizer.step()
    assert optimizer.state[layer.node_bias]["mass"][0].item() == pytest.approx(13)
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()


def test_transposed_samples_count_where_they_went():
    """A soft node gets its gradients through the weights that were used, which transposition has changed."""
    layer = make(depth=2, transposition=0.5, scale=5.0)
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    loss_of(layer, *data(1)[0]).backward()
    optimizer.step()
    leaf = layer.last_mixture.sum(0)
    node = torch.stack([leaf.sum(), leaf[:2].sum(), leaf[2:].sum()])
    torch.testing.assert_close(optimizer.state[layer.leaf_in_bias]["mass"], leaf, **TOLERANCE)
    torch.testing.assert_close(optimizer.state[layer.node_bias]["mass"], node, **TOLERANCE)


def test_a_step_that_the_gradient_scaler_skips_is_forgotten():
    """GradScaler leaves out the step of a batch whose gradients overflow, and the next zero_grad drops them. The
    samples of that batch have then given no gradient, so they must not count: ten of them made a leaf step for which
    the next batch had one sample, with 20/11 of that sample's gradient."""
    layer = make(depth=1, decision="straight_through", dtype=torch.float32)
    with torch.no_grad():
        layer.node_weight.copy_(torch.eye(1, 5))
        layer.node_bias.zero_()  # the sign of the first input decides
    optimizer = LocalSGD(layer, 0.1, local_batch=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    left, right = -torch.ones(10, 5), torch.ones(1, 5)
    before = parameters(layer)
    for x, factor in ((left, float("inf")), (torch.cat([left[:1], right.expand(9, 5)]), 1.0)):
        optimizer.zero_grad()
        scaler.scale(layer(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[layer.leaf_in_weight]["mass"].tolist() == [1, 0]
    assert torch.equal(layer.leaf_out_bias[0], before["leaf_out_bias"][0])
    assert not torch.equal(layer.leaf_out_bias[1], before["leaf_out_bias"][1])


# Copies and stored states.


@pytest.mark.parametrize(
    ("local", "options"), [(LocalSGD, {"lr": 0.1, "momentum": 0.9}), (LocalAdam, {"lr": 0.1, "weight_decay": 0.1})]
)
def test_a_stored_state_continues_bit_for_bit(local, options):
    """Stored while blocks are half-way to their next step, through a file, into a new model and a new optimiser."""
    model = around(make(7, 3, depth=2))
    optimizer = local(model, local_batch=9.2, **options)
    train(model, optimizer, data(4))
    masses = [optimizer.state[p]["mass"] for p in model[2].parameters()]
    assert any(mass.count_nonzero() for mass in masses), "blocks are gathering"
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    twin = around(make(7, 3, depth=2))
    twin.load_state_dict(stored["model"])
    resumed = local(twin, local_batch=1, **(options | {"lr": 9.0}))
    resumed.load_state_dict(stored["optimizer"])
    batches = data(5)
    before = parameters(model)
    train(model, optimizer, batches)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_copy_of_model_and_state_goes_its_own_way():
    """The copy has gathered the same and continues from there; the two share no memory."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalAdam(model, 0.1, local_batch=9.2)
    train(model, optimizer, data(3))
    twin, stored = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    before = parameters(twin)
    resumed = LocalAdam(twin, 0.1, local_batch=9.2)
    resumed.load_state_dict(stored)
    batches = data(4)
    train(model, optimizer, batches)
    assert_same(parameters(twin), before)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))


def test_a_stored_state_fits_the_model_however_it_is_wrapped():
    """torch.compile and DistributedDataParallel prefix the names of the modules. A run that resumes with or without
    them loads the same state, as it can with torch's optimisers; looking up the stored names was a KeyError."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=9.2, momentum=0.9)
    train(model, optimizer, data(3))
    wrapped = nn.ModuleDict({"module": copy.deepcopy(model)})
    resumed = LocalSGD(wrapped, 0.1, local_batch=9.2, momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batches = data(3)
    train(model, optimizer, batches)
    train(wrapped, resumed, batches, run=wrapped["module"])
    assert_same(parameters(model), parameters(wrapped["module"]))


copies = pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))], ids=["copy", "pickle"]
)


@copies
def test_a_copied_model_has_no_optimiser(how):
    """The optimiser watches its model through hooks, which a copy takes along: they must not report to the first
    optimiser, nor carry it."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=7)
    train(model, optimizer, data(2))
    twin = how(model)
    assert_same(parameters(twin), parameters(model))
    twin(torch.randn(99, 5).double())
    with pytest.raises(RuntimeError, match="no training forward since the last step"):
        optimizer.step()
    batches = data(3)
    train(twin, LocalSGD(twin, 0.1, local_batch=7), batches)
    train(model, LocalSGD(model, 0.1, local_batch=7), batches)
    assert_same(parameters(twin), parameters(model))


@copies
def test_copying_model_and_optimiser_together(how):
    """copy.deepcopy((model, optimiser)) keeps them together, as it does with torch's optimisers."""
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1, local_batch=9.2, momentum=0.9)
    train(model, optimizer, data(2))
    twin, resumed = how((model, optimizer))
    batches = data(3)
    train(model, optimizer, batches)
    train(twin, resumed, batches)
    assert_same(parameters(model), parameters(twin))


def test_a_model_does_not_keep_its_optimiser_alive():
    model = around(make(7, 3, depth=2))
    optimizer = LocalSGD(model, 0.1)
    train(model, optimizer, data(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert model(torch.randn(3, 5).double()).shape == (3, 4)


def test_two_optimisers_count_for_themselves():
    layer = make(depth=1)
    first, second = LocalSGD(layer, 0.0, local_batch=NEVER), LocalSGD(layer, 0.0, local_batch=NEVER)
    for size, optimizers in ((3, [first]), (4, [first, second])):
        layer(torch.randn(size, 5).double()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    seen = [optimizer.state[layer.node_bias]["mass"].item() for optimizer in (first, second)]
    assert seen == pytest.approx([7, 7])  # the second has not stepped in between, and gathers both


# Low precision.


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_bfloat16_parameters(local):
    """One step, against the same in float64 from the same gradients. LocalSGD may round the sample count, the sum, the
    mass, the quotient and the step (5 roundings of the step) and the new parameter (1 of it), each by at most 2**-8.
    LocalAdam's first step is lr in the direction of the gradient's sign, and not more roundings."""
    layer = make(depth=2, decision="straight_through", dtype=torch.bfloat16)
    before, lr = parameters(layer), 0.125
    optimizer = local(layer, lr, local_batch=63)
    x = torch.randn(257, 5).bfloat16()
    layer(x).float().square().mean().backward()
    count = torch.bincount(layer.route(x), minlength=4).double()  # (leaves,)
    reach = fastff.usage(layer)[""].node_mass
    optimizer.step()
    assert 0 < (count >= 63).sum() < 4
    mass = {"leaf": count, "node": reach}
    for name, p in layer.named_parameters():
        own = mass[name.partition("_")[0]]
        for b in range(len(p)):
            if own[b] < 63:
                assert torch.equal(p[b], before[name][b])
                continue
            grad = p.grad[b].double() * 257 / own[b]
            step = lr * (grad if local is LocalSGD else grad / (grad.abs() + 1e-8))
            exact = before[name][b].double() - step
            assert (p[b].double() - exact).abs().le(2**-8 * (exact.abs() + 5.1 * step.abs())).all(), name
            assert p.dtype == torch.bfloat16


def test_bfloat16_gathers_a_thousand_batches():
    """In bfloat16, 256 + 1 is 256: gathered in it, a thousand gradients of 1 had a mean of 0.256. The sum of many must
    be kept wider than the parameter."""
    layer = make(depth=0, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.leaf_out_bias.fill_(2)
    optimizer = LocalSGD(layer, 1.0, local_batch=1000)
    x = torch.randn(1, 5).bfloat16()
    for _ in range(1000):
        optimizer.zero_grad()
        layer(x).sum().backward()  # the gradient of the output bias is 1
        optimizer.step()
    assert layer.leaf_out_bias.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("local", [LocalSGD, LocalAdam])
def test_bfloat16_state_is_stored_as_it_is(local):
    """Optimizer.load_state_dict casts every floating-point state to the dtype of its parameter; rounded to bfloat16, a
    mass of 17.17 came back as 17.125, and one of 256 could never grow by single samples."""
    layer = make(depth=2, dtype=torch.bfloat16)
    optimizer = local(layer, 0.1, local_batch=29.3)
    batches = [(x.bfloat16(), target.bfloat16()) for x, target in data(9, size=33)]
    train(layer, optimizer, batches[:2])
    twin = copy.deepcopy(layer)
    resumed = local(twin, 0.1, local_batch=29.3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(resumed.state[q][key], value, rtol=0, atol=0)
    train(layer, optimizer, batches[2:])
    train(twin, resumed, batches[2:])
    assert_same(parameters(layer), parameters(twin))


def test_float16_batches_past_its_range():
    """float16 ends at 65504: a batch of 70001 samples, counted in it, was infinite and made every parameter NaN."""
    layer = make(2, 1, depth=1, leaf_width=1, dtype=torch.float16, decision="straight_through")
    before = parameters(layer)
    x = torch.randn(70001, 2).half()
    optimizer = LocalSGD(layer, 0.125, local_batch=10)
    (layer(x).float().mean() * 64).backward()  # every sample's gradient of its leaf's output bias is 64
    optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(layer.leaf_out_bias, before["leaf_out_bias"] - 8, rtol=4 * 2**-11, atol=0)


# Arguments.


@pytest.mark.parametrize(
    ("local", "options", "message"),
    [
        (LocalSGD, {"lr": -0.1}, "lr must be finite, and 0 or more; got -0.1"),
        (LocalSGD, {"lr": float("nan")}, "lr must be finite, and 0 or more; got nan"),
        (LocalSGD, {"lr": 0.1, "local_batch": 0}, "local_batch must be finite and positive; got 0"),
        (LocalSGD, {"lr": 0.1, "local_batch": float("nan")}, "local_batch must be finite and positive; got nan"),
        (LocalSGD, {"lr": 0.1, "momentum": 1.0}, r"momentum must be in \[0, 1\); got 1.0"),
        (LocalSGD, {"lr": 0.1, "momentum": -0.5}, r"momentum must be in \[0, 1\); got -0.5"),
        (LocalSGD, {"lr": 0.1, "weight_decay": -1}, "weight_decay must be finite, and 0 or more; got -1"),
        (LocalAdam, {"lr": -1e-3}, "lr must be finite, and 0 or more; got -0.001"),
        (LocalAdam, {"local_batch": -2}, "local_batch must be finite and positive; got -2"),
        (LocalAdam, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\); got \(0.9, 1.0\)"),
        (LocalAdam, {"eps": -1e-8}, "eps must be finite, and 0 or more; got -1e-08"),
        (LocalAdam, {"weight_decay": -0.1}, "weight_decay must be finite, and 0 or more; got -0.1"),
    ],
)
def test_bad_arguments(local, options, message):
    layer = make()
    with pytest.raises(ValueError, match=message):
        local(layer, **options)
    assert not layer._forward_hooks, "a failed construction leaves the model as it was"


@pytest.mark.parametrize("name", ["lr", "local_batch", "eps", "weight_decay", "betas"])
@pytest.mark.parametrize("value", ["1", None, True])
def test_arguments_that_are_no_numbers(name, value):
    layer = make()
    with pytest.raises(TypeError, match=f"{name} must be"):
        LocalAdam(layer, **{name: value})
    assert not layer._forward_hooks


def test_a_model_without_an_fff_is_an_error():
    with pytest.raises(ValueError, match="Linear has no FFF layer"):
        LocalSGD(nn.Linear(3, 2), 0.1)


def test_every_parameter_is_in_one_group():
    model = nn.Sequential(around(make(7, 3, depth=2)), around(make(5, 4, depth=0)), fastff.baselines.FF(4, 4, width=3))
    grouped = [id(p) for group in LocalSGD(model, 0.1).param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert all(a != b for a, b in itertools.pairwise(sorted(grouped)))


def test_a_group_that_is_added_steps_every_time():
    layer, head = make(depth=2), nn.Linear(4, 4).double()
    optimizer = LocalSGD(layer, 0.1, local_batch=NEVER)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    before = parameters(head)
    train(layer, optimizer, data(1), run=nn.Sequential(layer, head))
    for name, p in head.named_parameters():
        torch.testing.assert_close(p, before[name] - 0.5 * p.grad, **TOLERANCE)


def test_an_optimiser_that_is_gone_leaves_no_hook():
    layer = make(depth=2)
    for _ in range(3):
        optimizer = LocalSGD(layer, 0.1)
    assert len(layer._forward_hooks) == 1
    del optimizer
    assert not layer._forward_hooks
