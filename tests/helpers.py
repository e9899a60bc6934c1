"""What several test files share."""

import os
import subprocess
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fastff
from fastff.activations import function
from fastff.backends import Request
from fastff.tensors import Leaves

ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity", "swiglu", "geglu", "geglu_tanh"]


def make(in_features=5, out_features=4, *, depth=3, leaf_width=3, scale=1.0, **options):
    """A float64 layer whose decisions are spread: `scale` multiplies the node weights."""
    options = {"dtype": torch.float64} | options
    layer = fastff.FFF(in_features, out_features, depth=depth, leaf_width=leaf_width, **options)
    with torch.no_grad():
        for parameter in layer.tree_parameters():
            parameter *= scale
    return layer


def state(layer):
    """The oracle's view of a layer."""
    names = ["node_weight", "node_bias", "node_out_weight", "node_out_bias"]
    names += [f"leaf_{part}_{kind}" for part in ("in", "out", "gate") for kind in ("weight", "bias")]
    return {name: None if getattr(layer, name) is None else getattr(layer, name).detach() for name in names}


def request(x, tree, leaves, activation="relu", **options):
    """The pass that these tensors ask for."""
    kind = "visit" if tree is None else "route" if leaves is None else "hard"
    return Request.make(options.pop("kind", kind), x, tree, leaves, activation, **options)


@contextmanager
def one_rank(folder):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def relative_error(value, exact):
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def two_layers():
    """A model with two FFF layers, named "0" and "2"."""
    return nn.Sequential(make(5, 6, depth=2), nn.Tanh(), make(6, 3, depth=3))


def without_interpreter(code):
    """Run code in a process in which Triton compiles its kernels and does not interpret them; tests/ is importable."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


class Block(nn.Module):
    """A residual block with one FFF layer."""

    def __init__(self):
        super().__init__()
        self.fff = fastff.FFF(8, 8, depth=3, leaf_width=4)

    def forward(self, x):
        return x + self.fff(x)


def stack(layers=4, shift=1.0):
    """Blocks whose trees were balanced and then disturbed; data; and a list that counts forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(layers)])
    x = list(torch.randn(1024, 8).split(256))
    fastff.initialize_tree_(model, x)
    with torch.no_grad():
        for block in model:
            block.fff.node_bias += shift * torch.randn(7)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    return model, x, forwards


def smallest_share(model, x):
    return min(used.smallest_share for used in fastff.usage(model, x).values())


def plain_leaf(layer, x, j):
    """One leaf in plain torch, in the dtype of the layer."""
    act = function(layer.activation)
    own = Leaves._make(None if t is None else t[j].to(x.dtype) for t in layer.leaves)

    def first(weight, bias, scale):
        if scale is None:
            return F.linear(x, weight, bias)
        return F.linear(x, weight) * scale + (0 if bias is None else bias)

    hidden = first(own.in_weight, own.in_bias, own.in_scale)
    gate = None if own.gate_weight is None else first(own.gate_weight, own.gate_bias, own.gate_scale)
    hidden = act(hidden) if gate is None else act(gate) * hidden
    return F.linear(hidden if own.out_scale is None else hidden * own.out_scale, own.out_weight.T, own.out_bias)


def plain_hard(layer, x, route):
    """The leaves of FORWARD_I in the dtype of the layer, where float64 says that they are."""
    return torch.stack([plain_leaf(layer, x[b], route[b]) for b in range(len(x))])
