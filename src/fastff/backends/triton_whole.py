"""The hard pass of layers of few neurons: how the kernels that run all leaves at a tile of samples are launched."""

import torch
from torch import Tensor

from ..tensors import Leaves, Tree
from .triton_arguments import depth_of, launch_options, leaf_options
from .triton_choice import Launch
from .triton_launch import launch_kernel
from .triton_size import power_of_two


def run(x: Tensor, leaf: Tensor, tree: Tree, leaves: Leaves, activation: str, launch: Launch) -> Tensor:
    """Nodes and all leaves at a tile of samples."""
    from .triton_whole_kernels import whole_layer

    features, out = x.shape[1], leaves.out_weight.shape[-1]
    y = x.new_empty(len(x), out)
    parts = _first_products(x, tree, leaves, launch) if launch.splits else x
    k = min(launch.k, max(16, power_of_two(features)))
    options = leaf_options(leaves, activation)
    del options["INT8"]
    first = leaves.in_weight, leaves.in_bias, leaves.gate_weight, leaves.gate_bias
    weights = [x if t is None else t for t in (*first, leaves.out_weight, leaves.out_bias)]
    launch_kernel(
        whole_layer, (-(-len(x) // launch.leaf_tile), -(-out // launch.span)),
        x, parts, tree.weight, tree.bias, *weights, leaf, y, len(x), launch.span,
        IN=features, OUT=out, DEPTH=depth_of(tree), L=leaves.out_weight.shape[1], **options, BM=launch.leaf_tile,
        BL=launch.block, BK=k, BN=launch.n, EVEN=features % k == 0, SPLITS=launch.splits, STAGES=launch.stages,
        OUT_STAGES=launch.out_stages, **launch_options(launch, launch.leaf_warps),
    )  # fmt: skip
    return y


def _first_products(x: Tensor, tree: Tree, leaves: Leaves, launch: Launch) -> Tensor:
    """Parts of the logits of all nodes, and of the hidden neurons and gates of all leaves before their activation."""
    from .triton_whole_kernels import first_products

    batch, features = x.shape
    gates = leaves.gate_weight
    columns, neurons = max(16, len(tree.weight) + 1), leaves.in_weight.shape[0] * leaves.in_weight.shape[1]
    k = min(launch.k, max(16, power_of_two(features)))
    span = -(-features // (launch.splits * k)) * k
    row = columns + launch.block * (1 if gates is None else 2)
    parts = torch.empty(launch.splits, batch, row, dtype=torch.float32, device=x.device)
    launch_kernel(
        first_products, (-(-batch // launch.product_tile), launch.splits),
        x, tree.weight, leaves.in_weight, x if gates is None else gates, parts, batch, span,
        IN=features, NODES=len(tree.weight), NEURONS=neurons, COLUMNS=columns, BL=launch.block, GATED=gates is not None,
        BM=launch.product_tile, BK=k, EVEN=features % k == 0, STAGES=launch.stages,
        **launch_options(launch, launch.leaf_warps),
    )  # fmt: skip
    return parts
