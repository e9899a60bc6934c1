"""A soft training step (forward, backward) with and without `epsilon`, as the tree hardens: time, error, mass left out.

    OMP_NUM_THREADS=1 python benchmarks/shedding_step.py --output results/shedding_step.csv
    python benchmarks/shedding_step.py --depths 5 --temperatures 10 --batch 256 --repetitions 3       # a try

768 -> 2**depth * 32 -> 768 by default. The tree is balanced on the data, and its temperature set. All values of epsilon
alternate in one process on rotating inputs with epsilon = 0, which is plain soft training. On a busy machine only the
ratio of the medians, `over_soft`, means something. The errors are those of the output and of the gradient of the node
weights for a given gradient at the output, relative to plain soft training's. An output beyond its bound, the mass left
out times the largest distance between two leaves' outputs, is an error.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from csv_rows import about, append
from torch import Tensor

import fastff
from fastff.backends.shed import is_dense, soft_walk
from fastff.tensors import SoftOptions


def step(layer: fastff.FFF, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the node weights."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad)
    assert layer.node_weight.grad is not None
    return y.detach(), layer.node_weight.grad


def timed(layer: fastff.FFF, x: Tensor, grad: Tensor) -> float:
    begin = time.perf_counter()
    step(layer, x, grad)
    return 1e3 * (time.perf_counter() - begin)


@torch.no_grad()
def spread(layer: fastff.FFF, x: Tensor) -> Tensor:
    """The largest distance between the outputs of two leaves: (batch,)."""
    every = torch.arange(layer.num_leaves).unsqueeze(1).expand(-1, len(x))
    outputs = [fastff.functional.visit(x, leaf, layer.leaves, layer.activation) for leaf in every]
    return torch.cdist(*[torch.stack(outputs, 1)] * 2).amax((1, 2))


def measure(o: argparse.Namespace, depth: int, temperature: float) -> list[dict[str, object]]:
    torch.manual_seed(0)
    data, grad = torch.randn(3, o.batch, o.features), torch.randn(o.batch, o.features) / o.batch
    layer = fastff.FFF(o.features, o.features, depth=depth, leaf_width=o.leaf_width)
    fastff.initialize_tree_(layer, data.flatten(0, 1))
    layer.temperature = temperature
    values = [0.0, *(float(value) for value in o.epsilons.split(","))]
    times: dict[float, list[float]] = {value: [] for value in values}
    for i in range(1 + o.repetitions):
        for value, found in times.items():
            layer.epsilon = value
            found.append(timed(layer, data[i % len(data)], grad))
    medians = {value: statistics.median(found[1:]) for value, found in times.items()}
    layer.epsilon = 0.0
    y, slope = (t.clone() for t in step(layer, data[0], grad))
    few = slice(0, 64)
    widest = spread(layer, data[0][few])
    rows = []
    for value in values:
        layer.epsilon = value
        with torch.no_grad():
            walk = soft_walk(data[0], layer.tree, layer.activation, SoftOptions(temperature), value)
        dropped = (1 - torch.zeros(o.batch).index_add(0, walk.sample, walk.reach)).clamp(min=0)
        other, other_slope = step(layer, data[0], grad)
        error = (other - y).norm(dim=1)
        if bool((error[few] > dropped[few] * widest + 1e-5 * y[few].norm(dim=1)).any()):
            raise SystemExit(f"depth {depth}, temperature {temperature}, epsilon {value}: the output is out of bounds.")
        row: dict[str, object] = {"epsilon": value, "depth": depth, "temperature": temperature}
        row |= {"leaf_width": o.leaf_width, "features": o.features, "batch": o.batch}
        row |= {"threads": torch.get_num_threads(), "repetitions": o.repetitions}
        row |= {"kept_leaves": round(len(walk.leaf) / o.batch, 2)}
        row |= {"runs_all": value == 0 or is_dense(len(walk.leaf), o.batch, layer.leaves)}
        row |= {"mean_dropped": f"{float(dropped.mean()):.3g}", "most_dropped": f"{float(dropped.max()):.3g}"}
        row |= {"output_error": f"{float(error.norm() / y.norm()):.3g}"}
        row |= {"tree_error": f"{float((other_slope - slope).norm() / slope.norm()):.3g}"}
        row |= {"median_ms": round(medians[value], 2), "over_soft": round(medians[value] / medians[0.0], 4)}
        rows.append(row)
        print(", ".join(f"{key} {cell}" for key, cell in row.items()), flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="5,8")
    parser.add_argument("--temperatures", default="1,3,10,30,100")
    parser.add_argument("--epsilons", default="0.01,0.1")
    parser.add_argument("--leaf-width", type=int, default=32)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    origin = about("cpu", "python benchmarks/shedding_step.py", o.commit)
    for depth in o.depths.split(","):
        for temperature in o.temperatures.split(","):
            rows = measure(o, int(depth), float(temperature))
            if o.output:
                append(o.output, [row | origin for row in rows])


if __name__ == "__main__":
    main()
