"""LocalSGD and LocalAdam on a tree: every leaf and every node has its own optimizer."""

import copy

import pytest
import torch
from torch import nn

import oracle
from fastff.optim import LocalAdam, LocalSGD
from helpers import make, state
from optim_helpers import NEVER, TOLERANCE, around, data, loss_of, parameters, same, train


class Blocks:
    """What the optimizers should do, block by block: sums over single samples, and one torch optimizer a block.

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
def test_each_block_is_an_optimizer_of_its_own(local, plain, options, decision, shape):
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
    with pytest.raises(ValueError, match=r"sharing=0\.5, so a leaf's gradient comes from the samples of all leaves"):
        optimizer.step()


def test_gradients_of_the_hard_pass_are_refused():
    """Leaves get gradients in evaluation too, but there is no count of the samples."""
    layer = make(depth=2)
    optimizer = LocalSGD(layer, 0.1)
    layer.eval()(torch.randn(3, 5).double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"no training forward.*in train\(\) mode"):
        optimizer.step()
