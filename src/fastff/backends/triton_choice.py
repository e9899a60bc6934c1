"""How the Triton kernels of a hard pass are launched: the ways there are, and their launch parameters for a size.

Samples go one by one or grouped by leaf; a leaf goes to one program, or is spread over several. `triton_cost` says
which of these ways is fastest for a size.
"""

import math
from typing import NamedTuple

from . import triton_tile
from .triton_size import Size, power_of_two

_MOST_HIDDEN = 2**31  # bytes of the hidden layers of all leaves
_MOST_WHOLE = 512  # neurons of all leaves, gates among them: the registers of 8 warps hold them for 64 samples


class Launch(NamedTuple):
    """A way to run a hard pass, and its launch parameters."""

    grouped: bool = False  # samples go by leaf; otherwise one by one
    spread: bool = False  # a leaf goes to several programs
    tiny: bool = False  # by the kernels of triton_tile
    dense: bool = False  # all leaves in two dense products, with a mask between them
    whole: bool = False  # nodes and all leaves at a tile of samples; with `splits`, their first products before
    pdl: bool = False  # programmatic dependent launch: begin while the last kernel ends, and wait for it then
    # the walk
    round: int = 3  # one by one: levels walked in one round
    warps: int = 8
    fence: bool = False  # one by one: rows of weights are on their way before the first is used
    tile: int = 16  # grouped: samples that walk together
    top: int = 0  # levels whose nodes all go in one product
    group_k: int = 128  # columns of that product at a time
    group_warps: int = 4
    splits: int = 0  # parts of that product, each a program's; 0: the walk's own kernel takes it
    product_tile: int = 16  # samples, nodes and columns of a program of that product
    product_nodes: int = 16
    product_k: int = 128
    # the leaves
    leaf_tile: int = 16  # grouped: samples that go through a leaf together
    per: int = 1  # tiles that every leaf has
    block: int = 128  # spread: neurons of a program
    k: int = 128  # columns of the first product at a time
    n: int = 128  # columns of the second
    out_k: int = 128  # spread: neurons of the second at a time
    span: int = 512  # output columns of a program
    stages: int = 3  # blocks of weights loaded ahead at a time
    out_stages: int = 3
    leaf_warps: int = 4


def launches(size: Size) -> dict[str, Launch]:
    """The ways that can run this size, by name."""
    ways = {"spread": _spread(size), "spread tiles": _spread_tiles(size)}
    if not triton_tile.why_not(size):
        ways["tiny"] = Launch(tiny=True)
    if _masks(size):
        ways["dense"] = walk_launch(size)._replace(dense=True)
    if _takes_whole(size):
        found = {"whole": _whole(size)}
        if found["whole"].block * (1 + size.gated) <= 128:  # beyond, the two kernels do the work of a dense layer
            found["split whole"] = _split_whole(size)
        ways |= {name: launch for name, launch in found.items() if _whole_bytes(size, launch) <= size.shared}
    # These hold a leaf's hidden layer in one program; the first unrolls its rows, which takes long to compile.
    if size.leaf_width <= 128:
        ways["tiles"] = _tiles(size)
        if size.leaf_width * size.features <= 2**17:
            ways["alone"] = _alone(size)
    return ways


def walk_launch(size: Size) -> Launch:
    """How samples walk where no leaf follows: one by one, or in tiles."""
    few = 64 if size.features >= 2048 and size.bytes == 2 else 256
    return _alone(size) if size.batch < few else _grouped(size)


def _masks(size: Size) -> bool:
    """Whether the hidden layers of all leaves fit into memory, and products take such weights.

    Not float32: there a library's product has up to 2.8 times the error of a product with one leaf.
    """
    hidden = (1 + size.gated) * size.batch * size.leaves * size.leaf_width * size.bytes
    return hidden <= _MOST_HIDDEN and size.weight_bytes == size.bytes == 2


def _takes_whole(size: Size) -> bool:
    neurons = power_of_two(size.leaves * size.leaf_width) * (1 + size.gated)
    one_node = size.walks and size.node_width == 1 and 0 < size.depth <= 6
    return one_node and size.weight_bytes == size.bytes == 2 and neurons <= _MOST_WHOLE


def _whole(size: Size) -> Launch:
    """All leaves at a tile of samples."""
    neurons = max(16, power_of_two(size.leaves * size.leaf_width))
    wide = neurons * (1 + size.gated)
    tile = 16 if size.batch < 2048 else 32 if size.batch < 8192 else 64
    n = min(max(16, power_of_two(size.out)), max(32, min(128, 16384 // neurons)))
    launch = Launch(whole=True, leaf_tile=tile, block=neurons, k=64, n=n, stages=4, out_stages=2)
    # Few tiles: several programs take one, and share its output columns.
    parts = max(1, min(-(-size.out // n), 132 * tile // size.batch))
    launch = launch._replace(span=-(-size.out // (parts * n)) * n, leaf_warps=8 if wide > 128 else 4)
    while _whole_bytes(size, launch) > size.shared and launch.k > 16:
        launch = launch._replace(stages=3) if launch.stages > 3 else launch._replace(k=launch.k // 2)
    return launch


def _split_whole(size: Size) -> Launch:
    """The same after a kernel that spreads the first products over the GPU: wide inputs, few tiles."""
    launch = _whole(size)
    tile = 16 if size.batch <= 1024 else 32 if size.batch <= 4096 else 64
    splits = max(1, min(8, size.features // 512, power_of_two(math.ceil(132 * tile / size.batch))))
    # The second kernel is short: enough programs to fill the GPU twice.
    span = max(launch.n, -(-size.out * size.batch // (264 * launch.leaf_tile * launch.n)) * launch.n)
    return launch._replace(splits=splits, product_tile=tile, span=span)


def _whole_bytes(size: Size, launch: Launch) -> int:
    """A bound on the shared memory of these kernels: blocks in flight, and the hidden layer between the products."""
    tile = launch.product_tile if launch.splits else launch.leaf_tile
    first = launch.stages * launch.k * (tile + launch.block * (1 + size.gated) + max(16, size.leaves))
    second = launch.block * (launch.out_stages * launch.n + launch.leaf_tile)
    return size.bytes * max(first, second) + 16 * 1024


def _alone(size: Size) -> Launch:
    """One program a sample."""
    few = size.depth <= 8 and size.features < 2048 if size.bytes == 2 else size.batch >= 1024
    return Launch(warps=4 if few else 8, fence=_fences(size))


def _fences(size: Size) -> bool:
    """Few samples, wide rows of float32: 11.7 to 5.1 us (4096 -> 512, depth 3, batch 1, H200). Others lose by it."""
    return size.bytes == 4 and size.features >= 1024 and size.batch <= 64


def _spread(size: Size) -> Launch:
    """The leaf of one sample spread over programs."""
    few = size.batch * size.leaf_width <= 1024
    launch = Launch(spread=True, block=4 if few else 8, fence=_fences(size))
    if size.batch < 24 or size.batch * size.out <= 2**15:
        return launch._replace(n=64, out_k=min(128 if size.batch < 4 else 64, power_of_two(size.leaf_width)))
    if size.weight_bytes < size.bytes:  # int8: 26 to 23 us (4096 wide, leaves of 64, depth 8, batch 64, H200)
        launch = launch._replace(block=2, fence=True)
    # Beyond this many columns, sums and weights of 16 rows leave the registers.
    n = min(2048 // size.weight_bytes, power_of_two(size.out))
    return launch._replace(n=n, out_k=min(32 if size.weight_bytes == 1 else 16, power_of_two(size.leaf_width)))


def _grouped(size: Size) -> Launch:
    """How the samples of each leaf are listed."""
    if size.bytes == 4:
        return Launch(True, group_warps=4 if size.depth <= 5 else 8)
    if size.node_width > 1 or not size.depth:
        return Launch(True)
    if size.features >= 2048:
        return _with_products(size)
    if size.batch >= 8192 and size.depth <= 5:
        return Launch(True, tile=32, top=size.depth)
    if size.batch >= 8192 and size.depth <= 8:
        return Launch(True, tile=128, top=size.depth, group_warps=8, group_k=64)
    return Launch(True, top=min(size.depth, 5), group_k=256)


def _with_products(size: Size) -> Launch:
    """Wide inputs: the top of the tree by products that are spread over the GPU, up to eight levels."""
    top = min(size.depth, 8)
    few = size.batch <= 512
    tile = min(64, max(16, power_of_two(size.batch)))
    nodes, k = max(16, min(32 if few else 128, 1 << top)), 128
    if size.shared < 200 * 1024:
        k = 64
    elif size.batch << top >= 2**22:  # wide blocks of nodes read inputs less often, and there are enough of them
        nodes, k = 256, 64
    programs = -(-size.batch // tile) * -(-(1 << top) // nodes)
    # Each part of a product is one more to add up.
    splits = max(1, min(8, size.features // k, power_of_two(math.ceil((64 if few else 128) / programs))))
    return Launch(True, top=top, splits=splits, product_tile=tile, product_nodes=nodes, product_k=k)


def _tiles(size: Size) -> Launch:
    """Both products of a leaf in one program, for a tile of its samples."""
    launch, per_leaf = _grouped(size), size.per_leaf
    if size.bytes == 4:
        # Short products: tensor cores cut off what they add up, and `precision` counts on 32 columns at a time.
        launch = launch._replace(k=32, n=64, stages=4)
    elif size.features >= 2048 and per_leaf < 48:
        launch = launch._replace(leaf_tile=32, k=256, n=256, stages=3, leaf_warps=4)
    elif size.features >= 2048:
        launch = launch._replace(leaf_tile=64, k=64, n=128, stages=4, leaf_warps=8)
    elif per_leaf < 12:
        launch = launch._replace(leaf_warps=2)
    elif size.batch < 8192 or per_leaf < 32:
        launch = launch._replace(leaf_tile=32, n=256, stages=4)
    else:
        launch = launch._replace(leaf_tile=64, k=64, n=64, stages=5)
    return _with_tiles(size, _fit(size, launch, power_of_two(size.leaf_width)))


def _spread_tiles(size: Size) -> Launch:
    """A tile of a leaf's samples spread over programs."""
    launch, per_leaf = _grouped(size), size.per_leaf
    tile = 16 if per_leaf < 12 else 32 if per_leaf < 64 else 64 if per_leaf < 192 or size.bytes == 4 else 128
    block, width = 128, power_of_two(size.leaf_width)

    def programs() -> float:
        return (size.used_leaves + size.batch / tile / 2) * max(1, size.leaf_width / block)

    while block > 16 and (programs() < 256 or block > width):
        block //= 2
    while tile > 16 and programs() < 128:
        tile //= 2
    launch = launch._replace(spread=True, leaf_tile=tile, block=block)
    if size.bytes == 4:
        launch = launch._replace(k=32, n=64, out_k=32, stages=4)
    elif tile >= 64:
        launch = launch._replace(k=64, n=256, out_k=64, stages=5, leaf_warps=8)
    else:
        each = (tile + launch.block * (1 + size.gated)) * 256 * size.bytes  # in flight, in each of two programs
        stages = 1 + max(1, min(6, 100 * 1024 // each))
        launch = launch._replace(k=256, n=128, out_k=128, stages=stages, leaf_warps=2 if launch.block == 16 else 4)
    return _with_tiles(size, _fit(size, launch, launch.block))


def _with_tiles(size: Size, launch: Launch) -> Launch:
    """Tiles for each leaf, more than an even tree needs; a power of two, so that few kernels are compiled."""
    return launch._replace(per=power_of_two(max(1, round(1.5 * size.per_leaf / launch.leaf_tile))))


def _fit(size: Size, launch: Launch, block: int) -> Launch:
    """The launch with fewer blocks in flight, smaller blocks and smaller tiles, until it fits into shared memory."""
    block = max(16, block)
    while _shared_bytes(size, launch, block) > size.shared:
        if launch.stages > 2:
            launch = launch._replace(stages=launch.stages - 1, out_stages=min(launch.out_stages, launch.stages - 1))
        elif max(launch.k, launch.n, launch.out_k) > 16:
            half = {name: max(16, getattr(launch, name) // 2) for name in ("k", "n", "out_k")}
            launch = launch._replace(**half)
        elif launch.leaf_tile > 16:
            launch = launch._replace(leaf_tile=launch.leaf_tile // 2)
        else:
            break  # 25 KiB at most: every GPU has them
    return launch


def _shared_bytes(size: Size, launch: Launch, block: int) -> int:
    """A bound on the shared memory of the leaves' kernels: blocks in flight, and a tile that changes its layout."""
    row = launch.leaf_tile * size.bytes + block * (1 + size.gated) * size.weight_bytes
    first = (launch.stages - 1) * launch.k * row
    if not launch.spread:
        second = (launch.stages - 1) * launch.n * (block * size.weight_bytes + 4)
    else:
        second = (launch.out_stages - 1) * launch.out_k * (launch.n * size.weight_bytes + launch.leaf_tile * size.bytes)
    converted = 4 * launch.leaf_tile * max(block, launch.n)
    # A block of int8 is converted on its way, and float32 goes in two or three parts.
    parts = max(launch.k * (launch.leaf_tile + block), launch.out_k * (launch.n + launch.leaf_tile)) * size.bytes
    return max(first, second) + converted + (parts if size.bytes == 4 or size.weight_bytes < size.bytes else 0)
