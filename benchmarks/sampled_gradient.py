"""Bias and variance of the sampled gradient of the tree, against the full straight-through gradient.

    python benchmarks/sampled_gradient.py --output results/sampled_gradient.csv
    python benchmarks/sampled_gradient.py --depths 3 --draws 50                     # a try

A layer of normal inputs and a random linear target, its tree balanced, its leaves trained for some steps so that they
differ; the gradient of the mean squared error with respect to the node weights, in float64. Columns, relative to the
norm of the straight-through gradient of the same batch:

bias         the distance of the mean over the draws, less what the draws' own spread explains
deviation    the root of the mean squared distance of a draw from the mean
cosine       between the mean and the straight-through gradient
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from csv_rows import about, append
from torch import Tensor, nn

import fastff
from fastff.sampling import ESTIMATORS

FEATURES, OUTPUTS, LEAF_WIDTH = 32, 8, 8


def trained(depth: int, steps: int) -> tuple[fastff.FFF, Tensor, Tensor]:
    """A layer whose leaves differ, and a batch."""
    torch.manual_seed(0)
    x, matrix = torch.randn(8192, FEATURES).double(), torch.randn(FEATURES, OUTPUTS).double()
    y = torch.tanh(x @ matrix)
    layer = fastff.FFF(FEATURES, OUTPUTS, depth=depth, leaf_width=LEAF_WIDTH, dtype=torch.float64)
    layer.decision = "straight_through"
    fastff.initialize_tree_(layer, x)
    optimizer = torch.optim.Adam(layer.leaf_parameters(), lr=1e-2)
    for _ in range(steps):
        at = torch.randint(len(x), (512,))
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x[at]), y[at]).backward()
        optimizer.step()
    return layer, x[:512], y[:512]


def gradient(layer: fastff.FFF, output: Callable[[], Tensor], y: Tensor) -> Tensor:
    layer.zero_grad()
    nn.functional.mse_loss(output(), y).backward()
    assert layer.node_weight.grad is not None
    return layer.node_weight.grad.clone()


def measure(o: argparse.Namespace, depth: int, temperature: float) -> list[dict[str, object]]:
    layer, x, y = trained(depth, o.steps)
    layer.temperature = temperature
    layer.decision = "straight_through"
    full = gradient(layer, lambda: layer(x), y)
    rows: list[dict[str, object]] = []
    layer.decision = "sampled"
    for estimator in ESTIMATORS:
        for alternatives in sorted({1, 2, depth}):
            layer.estimator, layer.alternatives = estimator, alternatives  # type: ignore[assignment]
            found = torch.stack([gradient(layer, lambda: layer(x), y) for _ in range(o.draws)])
            mean = found.mean(0)
            spread = (found - mean).square().sum() / (o.draws - 1)
            distance = max(float((mean - full).square().sum() - spread / o.draws), 0.0)
            cosine = nn.functional.cosine_similarity(mean.flatten(), full.flatten(), 0)
            row: dict[str, object] = {"depth": depth, "temperature": temperature, "estimator": estimator}
            row |= {"alternatives": alternatives, "draws": o.draws, "bias": round(math.sqrt(distance) / norm(full), 4)}
            row |= {"deviation": round(math.sqrt(float(spread)) / norm(full), 3), "cosine": round(float(cosine), 4)}
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def norm(values: Tensor) -> float:
    return float(values.norm())


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,7")
    parser.add_argument("--temperatures", default="1,10")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--steps", type=int, default=300, help="of training the leaves")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    torch.set_num_threads(1)
    origin = about("cpu", "python benchmarks/sampled_gradient.py", o.commit)
    for depth in o.depths.split(","):
        for temperature in o.temperatures.split(","):
            rows = measure(o, int(depth), float(temperature))
            if o.output:
                append(o.output, [row | origin for row in rows])


if __name__ == "__main__":
    main()
