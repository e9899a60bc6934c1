"""What the tests of regions share."""

import itertools

import torch

from fastff import FFF


def draw_layer(seed, inputs, depth, whole=False, dtype=torch.float32):
    """A layer and inputs from a seed; whole numbers make every sum exact, and many inputs lie on boundaries."""
    generator = torch.Generator().manual_seed(seed)
    layer = FFF(inputs, 2, depth=depth, leaf_width=1, dtype=dtype)
    x = torch.randn(40, inputs, generator=generator)
    with torch.no_grad():
        # Unit normals times a number for each node: a bias is never large beside its weight, and rounding stays small.
        size = 0.1 + 10 * torch.rand(layer.num_nodes, 1, generator=generator)
        weight = torch.randn(layer.node_weight.shape, generator=generator)
        layer.node_weight.copy_(size * torch.nn.functional.normalize(weight, dim=-1))
        layer.node_bias.copy_(size[:, 0] * torch.randn(layer.node_bias.shape, generator=generator))
        if whole:
            layer.node_weight.round_()
            layer.node_bias.round_()
    return layer, (2 * x).round().to(dtype) if whole else x.to(dtype)


def nearest_distance(normals, offsets, x):
    """The distance to the nearest point that lies on some of the planes and satisfies all; None if there is none."""
    best = None
    for count in range(min(normals.shape) + 1):
        for rows in map(list, itertools.combinations(range(len(normals)), count)):
            gram = normals[rows] @ normals[rows].T
            if rows and torch.linalg.matrix_rank(gram, hermitian=True) < count:
                continue
            point = x - normals[rows].T @ torch.linalg.solve(gram, normals[rows] @ x + offsets[rows]) if rows else x
            if (normals @ point + offsets >= -1e-8).all():
                distance = (point - x).norm().item()
                best = distance if best is None else min(best, distance)
    return best
