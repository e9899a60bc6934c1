"""The cases of the paper's inference experiments with its speed-ups, and the regimes of our own speed tables."""

import dataclasses

from .case import Case

BERT = Case(in_features=768, out_features=768, leaf_width=32, depth=5, batch=256)

# Table 1: training widths, and speed-ups over FF at batch 2048, per leaf width, on an A100.
WIDTHS = (16, 32, 64, 128)
DATASETS = {"USPS": 256, "MNIST": 784, "FashionMNIST": 784}  # inputs; there are 10 outputs
TABLE1 = {
    "USPS": {
        8: (1.07, 1.16, 1.53, 2.56),
        4: (0.98, 1.08, 1.56, 2.40),
        2: (0.90, 1.07, 1.39, 2.22),
        1: (0.85, 0.99, 1.34, 2.12),
    },
    "MNIST": {
        8: (1.13, 1.50, 2.20, 3.39),
        4: (1.33, 1.35, 2.33, 3.29),
        2: (1.19, 1.48, 2.33, 3.47),
        1: (1.04, 1.26, 1.91, 3.93),
    },
    "FashionMNIST": {
        8: (1.34, 1.44, 2.02, 3.78),
        4: (1.27, 1.32, 2.02, 3.41),
        2: (1.24, 1.34, 2.01, 3.28),
        1: (1.04, 1.29, 1.90, 2.92),
    },
}
# Table 3: the feedforward layers of a vision transformer, 128 -> 128, training width 128: speed-up per leaf width.
TABLE3 = {32: 2.44, 16: 2.80, 8: 3.29, 4: 3.39, 2: 3.47, 1: 3.93}


def blocks(base: Case = BERT, depths: range = range(1, 16)) -> list[Case]:
    """FF, MoE and FFF over 2, 4, ... 2**15 blocks of 32 neurons at the size of BERT-base."""
    return [dataclasses.replace(base, depth=depth) for depth in depths]


def table1(base: Case = BERT) -> list[Case]:
    """The sizes of Table 1. MNIST and FashionMNIST have one shape: it is measured once."""
    return [
        dataclasses.replace(base, in_features=inputs, out_features=10, batch=2048, leaf_width=leaf, depth=depth)
        for inputs in dict.fromkeys(DATASETS.values())
        for width in WIDTHS
        for leaf in (8, 4, 2, 1)
        for depth in [depth_of(width, leaf)]
    ]


def table3(base: Case = BERT) -> list[Case]:
    """The sizes of Table 3."""
    base = dataclasses.replace(base, in_features=128, out_features=128, batch=2048)
    return [dataclasses.replace(base, leaf_width=leaf, depth=depth_of(128, leaf)) for leaf in TABLE3]


def regimes(base: Case = BERT) -> list[Case]:
    """From one sample to many samples per leaf, at the size of BERT-base; on a GPU at a large model's size too."""
    if base.device == "cpu":
        cells = [(depth, batch) for depth in (3, 5, 8, 10, 13) for batch in (1, 256, 2048)]
        return [dataclasses.replace(base, depth=d, batch=b) for d, b in cells if (d, b) != (13, 2048)]
    cells = [(depth, batch) for depth in (5, 8) for batch in (256, 2048, 16384)]
    cells += [(12, 2048), (15, 256), *((depth, 1) for depth in (5, 8, 12, 15))]
    cases = [dataclasses.replace(base, depth=depth, batch=batch) for depth, batch in cells]
    if base.dtype == "bfloat16":
        large = dataclasses.replace(base, in_features=4096, out_features=4096, leaf_width=64)
        cases += [dataclasses.replace(large, depth=d, batch=b) for d in (6, 9) for b in (1, 512, 8192)]
    return cases


def depth_of(width: int, leaf_width: int) -> int:
    return (width // leaf_width).bit_length() - 1
