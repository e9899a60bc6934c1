"""Soft training on MNIST or FashionMNIST with an annealed temperature, with and without `epsilon`: accuracy and time.

    OMP_NUM_THREADS=1 python benchmarks/shedding_mnist.py --output results/shedding_mnist.csv    # FASTFF_DATA: the data
    python benchmarks/shedding_mnist.py --depth 4 --epochs 1 --seeds 0                            # a try

All values of epsilon train side by side in one process, a step each in turn on the same batches: on a busy machine only
the ratio of their times, `over_soft`, means something. Every model has `fastff.Recipe(decision="soft")` with a
temperature from 1 to --temperature, AdamW, and a cosine schedule. Accuracy is the hard pass's, in percent, on the test
set, after the last epoch. `seconds` are of the steps alone.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from csv_rows import about, append
from sampled_mnist import Part, accuracy, data
from torch import Tensor, nn

import fastff
from fastff.backends.shed import soft_walk
from fastff.tensors import SoftOptions


class Training:
    """One model, its recipe and its optimizer."""

    def __init__(self, x: Tensor, classes: int, epsilon: float, steps: int, seed: int, o: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.layer = fastff.FFF(x.shape[1], classes, depth=o.depth, leaf_width=o.leaf_width)
        self.recipe = fastff.Recipe(
            self.layer, x, steps=steps, decision="soft", epsilon=epsilon, temperature=(1.0, o.temperature)
        )
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=o.rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.seconds = 0.0
        self.kept: list[float] = []  # leaves per sample, after each epoch

    def step(self, x: Tensor, y: Tensor) -> None:
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(self.layer(x), y) + self.recipe.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds += time.perf_counter() - begin
        self.schedule.step()
        self.recipe.step()

    @torch.no_grad()
    def see(self, x: Tensor) -> None:
        options = SoftOptions(temperature=self.recipe.temperature)
        walk = soft_walk(x, self.layer.tree, self.layer.activation, options, self.layer.epsilon)
        self.kept.append(len(walk.leaf) / len(x))


def measure(train: Part, test: Part, seed: int, o: argparse.Namespace) -> list[dict[str, object]]:
    x, y = train
    steps = o.epochs * (len(x) // o.batch)
    values = [0.0, *(float(value) for value in o.epsilons.split(","))]
    trainings = {value: Training(x, int(y.max()) + 1, value, steps, seed, o) for value in values}
    order = torch.Generator().manual_seed(seed)
    for _ in range(o.epochs):
        for at in torch.randperm(len(x), generator=order)[: len(x) // o.batch * o.batch].split(o.batch):
            for training in trainings.values():
                training.step(x[at], y[at])
        for training in trainings.values():
            training.see(test[0][:2048])
    rows = []
    for value, training in trainings.items():
        row: dict[str, object] = {"dataset": o.dataset, "depth": o.depth, "leaf_width": o.leaf_width, "epsilon": value}
        row |= {"temperature": o.temperature, "epochs": o.epochs, "batch": o.batch, "rate": o.rate, "seed": seed}
        row |= {"accuracy": round(accuracy(training.layer.eval(), test), 2)}
        row |= {"train_accuracy": round(accuracy(training.layer, train), 2)}
        row |= {"kept_leaves": " ".join(f"{kept:.1f}" for kept in training.kept)}
        row |= {"seconds": round(training.seconds, 1), "threads": torch.get_num_threads()}
        row |= {"over_soft": round(training.seconds / trainings[0.0].seconds, 3)}
        rows.append(row)
        print(", ".join(f"{key} {cell}" for key, cell in row.items()), flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "fashionmnist"))
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--leaf-width", type=int, default=8)
    parser.add_argument("--epsilons", default="0.1")
    parser.add_argument("--temperature", type=float, default=30.0, help="at the end; it begins at 1")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file of the rows")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    o = parser.parse_args(given)
    origin = about("cpu", "python benchmarks/shedding_mnist.py", o.commit)
    train, test = data(o.dataset, o.data)
    for seed in o.seeds.split(","):
        rows = measure(train, test, int(seed), o)
        if o.output:
            append(o.output, [row | origin for row in rows])


if __name__ == "__main__":
    main()
