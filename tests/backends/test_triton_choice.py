"""The ways to launch a hard pass: which sizes each takes, and that its kernels compile for a GPU and fit on it."""

import itertools

import pytest

from fastff.backends.triton_choice import _shared_bytes, _whole_bytes, launches
from fastff.backends.triton_size import HOPPER_SHARED, Size, power_of_two
from helpers import without_interpreter

pytest.importorskip("triton")
BYTES = {"float32": (4, 4), "bfloat16": (2, 2), "float32, int8": (4, 1), "bfloat16, int8": (2, 1)}


@pytest.mark.parametrize("shared", [48 * 1024, 64 * 1024, HOPPER_SHARED])
def test_launches_fit_smaller_gpus(shared):
    """With 64 KiB the search for blocks that fit never ended."""
    for batch, depth, leaf_width in itertools.product([2048, 16384, 65536], [0, 3, 5], [128, 512, 4096]):
        size = Size(batch, 768, 768, depth, leaf_width, 1, True, 2, 2, shared=shared)
        for name, launch in launches(size).items():
            if "tiles" in name:
                block = launch.block if launch.spread else max(16, power_of_two(leaf_width))
                assert _shared_bytes(size, launch, block) <= shared
    for batch, depth, leaf_width in itertools.product([300, 8192], [1, 3, 6], [1, 8, 256]):
        size = Size(batch, 512, 32, depth, leaf_width, 1, False, 2, 2, shared=shared)
        for launch in launches(size).values():
            assert not launch.whole or _whole_bytes(size, launch) <= shared


@pytest.mark.parametrize("numbers", BYTES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("leaf_width", [1, 3, 33, 128, 129, 1024, 8192])
def test_every_size_has_launches_that_fit(leaf_width, gated, numbers):
    cases = itertools.product([1, 64, 4096, 65536], [(1, 1), (768, 768), (8192, 100), (8192, 8192)], [0, 5, 11], [1, 2])
    for batch, (features, out), depth, node_width in cases:
        size = Size(batch, features, out, depth, leaf_width, node_width, gated, *BYTES[numbers])
        ways = launches(size)
        assert {"spread", "spread tiles"} <= {*ways}
        # One program holds the hidden layer of a leaf.
        assert ("tiles" in ways) == (leaf_width <= 128)
        assert "alone" in ways if leaf_width <= 16 else leaf_width <= 128 or "alone" not in ways
        # float32 and int8 have no dense products of the accuracy, or at all.
        assert "dense" not in ways or BYTES[numbers] == (2, 2)
        for name, launch in ways.items():
            assert (launch.tiny, launch.dense) == (name == "tiny", name == "dense")
            assert launch.whole == ("whole" in name)
            if launch.whole:
                assert _whole_bytes(size, launch) <= HOPPER_SHARED
                assert launch.block >= size.leaves * leaf_width
            if name not in ("tiny", "dense"):
                assert (launch.grouped, launch.spread) == ("tiles" in name, "spread" in name)
            if "tiles" in name:
                block = launch.block if launch.spread else max(16, power_of_two(leaf_width))
                assert _shared_bytes(size, launch, block) <= HOPPER_SHARED
                assert launch.per >= 1
                assert launch.top <= depth
                # A decision in float32 never sees TF32; and products are for nodes of width 1.
                assert launch.top == 0 or (size.bytes == 2 and node_width == 1)


AHEAD_OF_TIME = """
import torch, fastff
from fastff.backends import triton_dense_kernels, triton_group_kernels, triton_hard, triton_sample_kernels
from fastff.backends import triton_walk_kernels, triton_whole_kernels
from fastff.backends.triton_choice import launches
from fastff.backends.triton_size import size_of
from triton_build import Build

names = {
    triton_walk_kernels: ["clear", "node_products", "group", "sorted_tiles"],
    triton_sample_kernels: ["descend", "sample_hidden", "sample_output"],
    triton_group_kernels: ["leaf_tiles", "group_hidden", "group_output"],
    triton_dense_kernels: ["own_neurons"],
    triton_whole_kernels: ["first_products", "whole_layer"],
}
kernels = {name: Build(module, name) for module, its in names.items() for name in its}
F32, BF16 = torch.float32, torch.bfloat16

def build(batch, features, out, depth, leaf_width, activation, dtype, is_int8=False, **options):
    layer = fastff.FFF(
        features, out, depth=depth, leaf_width=leaf_width, activation=activation, device="meta", dtype=dtype, **options
    ).requires_grad_(False)
    if is_int8:
        fastff.quantize_(layer)
    x = torch.empty(batch, features, device="meta", dtype=dtype)
    for launch in launches(size_of(x, layer.tree, layer.leaves)).values():
        if not launch.tiny:  # test_triton_tile.py builds those
            triton_hard.hard(x, layer.tree, layer.leaves, activation, launch._replace(pdl=True))

build(1, 3, 2, 0, 1, "relu", F32)
build(64, 37, 29, 5, 20, "swiglu", F32, node_width=2)
build(4096, 768, 768, 5, 64, "gelu", F32, True)
build(64, 768, 768, 8, 32, "relu", BF16)
build(65536, 768, 768, 8, 33, "geglu", BF16)
build(4096, 4096, 4096, 5, 512, "swiglu", BF16, True)
build(64, 8192, 8192, 3, 1024, "swiglu", F32)
build(4096, 8192, 8192, 1, 8192, "swiglu", BF16)
build(10000, 512, 500, 2, 64, "swiglu", BF16)
build(4096, 300, 100, 5, 8, "relu", BF16)
build(394, 3000, 500, 1, 20, "swiglu", BF16)
triton_hard._MOST_LISTED = 0
build(4096, 300, 100, 9, 3, "relu", BF16)
assert all(kernel.built for kernel in kernels.values()), {name: len(k.built) for name, k in kernels.items()}
print("built")
"""


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    """Every way, from tiny layers to 8192 wide: shared memory suffices, and each kernel waits for the one before it."""
    run = without_interpreter(AHEAD_OF_TIME)
    assert run.stdout.strip() == "built", run.stderr
