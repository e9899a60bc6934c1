"""Give a new FFF its weights, from the dense block that it replaces.

Each function here takes the block and the new layer, fills the layer, and returns a description of what it did.
`replace_` takes a name from INITS, or any function like these.

With zero node weights every leaf has the weight 2**-depth at every input, so the soft pass is a dense layer of width
2**depth * leaf_width whose output weights are scaled by 2**-depth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..layer import FFF
from .blocks import Block
from .leaves import fit_leaves_, principal_tree_

Init = Callable[[Block, FFF], str]


@torch.no_grad()
def dense_(block: Block, layer: FFF) -> str:
    """Copy the dense block, so that the soft pass equals it. A narrower layer drops the neurons of smallest norm."""
    w, width, new = block.weights, block.width, layer.training_width
    neurons = torch.arange(new, device=w.up.device) % width
    how = "dense, exact in the soft pass"
    if new > width:
        how = f"dense, exact in the soft pass: {width} neurons replicated to {new}"
    if new < width:
        # An upper bound on a neuron's contribution to the output, for inputs of a given length.
        size = w.up.float().norm(dim=1) * w.down.float().norm(dim=0)
        size = size if w.gate is None else size * w.gate.float().norm(dim=1)
        neurons = size.topk(new).indices.sort().values
        how = f"dense, not exact: the {new} of {width} neurons with the largest norms"
    copies = torch.bincount(neurons, minlength=width)[neurons].to(w.down.dtype)
    out = w.down.T[neurons] * (layer.num_leaves / copies).unsqueeze(1)

    _fill(layer.leaf_in_weight, w.up[neurons])
    _fill(layer.leaf_in_bias, None if w.up_bias is None else w.up_bias[neurons])
    _fill(layer.leaf_out_weight, out)
    _fill(layer.leaf_out_bias, None if w.down_bias is None else w.down_bias.expand(layer.num_leaves, -1))
    _fill(layer.leaf_gate_weight, None if w.gate is None else w.gate[neurons])
    _fill(layer.leaf_gate_bias, None if w.gate_bias is None else w.gate_bias[neurons])
    # A node network keeps its hidden neurons: if they were zero too, it could not learn.
    for node in [layer.node_weight, layer.node_bias] if layer.node_width == 1 else layer.tree_parameters()[2:]:
        node.zero_()
    return how


def random_(block: Block, layer: FFF) -> str:
    """Keep the random weights."""
    return "random"


def dense_layer(block: Block) -> FFF:
    """The dense block as an FFF of depth 0, in eval()."""
    w = block.weights
    layer = FFF(
        block.in_features,
        block.out_features,
        depth=0,
        leaf_width=block.width,
        activation=block.activation,
        bias=block.bias,
        device=w.up.device,
        dtype=w.up.dtype,
    )
    dense_(block, layer)
    return layer.eval().requires_grad_(False)


def from_data_(block: Block, layer: FFF, x: Tensor) -> str:
    """Split the block's inputs x (samples, in) across their principal directions, and give every leaf the neurons that
    matter most to it, with output weights fitted by least squares."""
    out_of_range = ValueError(
        f"the tree or leaves for the inputs of {block.name} exceed the range of {x.dtype}: the inputs are too small or "
        "too large. Standardise the data, or fit the model in a wider dtype and convert it afterwards."
    )
    try:
        principal_tree_(layer, x)
        fit_leaves_(layer, dense_layer(block), x)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # sums that overflow
        raise out_of_range from None
    if not all(parameter.isfinite().all() for parameter in layer.parameters()):
        raise out_of_range
    return f"fitted to {len(x):,} input{'s' * (len(x) != 1)}"


INITS: dict[str, Init] = {"dense": dense_, "random": random_}


def _fill(parameter: Tensor | None, value: Tensor | None) -> None:
    """Set a parameter; a bias that the dense block lacks is zero."""
    if parameter is None:
        return
    if value is None:
        parameter.zero_()
    else:
        parameter.copy_(value.reshape(parameter.shape))
