"""Choose settings of single layers on CIFAR10 by validation: Table 2, or the inference counterparts.

Two rounds for each kind of layer. Each trial trains the layer's recipe with some settings changed, two seeds at once.
Three reasons why trees fall behind dense layers were written down first, with one experiment each:

- data: leaves overfit the images they see. Shifted and mixed images, smoothed labels (round 1)
- length: mixed images need longer trainings (round 2)
- leaves: a leaf sees few samples. Sharing, noise and weight decay (round 2)

Dense layers and MoE get the same trials, less those that only a tree has. Round 2 starts from the best of round 1.
The best trial of both goes to --choice, a JSON file: {model: settings}. Seeds below 100 belong to the tables.

    python benchmarks/wide_search.py --experiment table2 --device cuda --processes 3 \\
        --output results/search.csv --choice table2.json
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import csv_rows
from vit_search import Changes, as_row, shared_gpu, show

from fastff.provenance import checkout, machine
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.runs import Case
from fastff_reproduce.threads import one_thread
from fastff_reproduce.trainer import train

SEEDS = (100, 101)
MIXED = {"shift": 0.125, "cutmix": 0.5, "mixup": 0.5, "smoothing": 0.1}
DATA: list[Changes] = [
    {},
    {"shift": 0.0625},
    {"shift": 0.125},
    {"shift": 0.0625, "mixup": 0.5, "smoothing": 0.1},
    MIXED,
]
# Factors on the recipe's own values, for every layer and for trees alone.
FACTORS: list[dict[str, float]] = [{"epochs": 3}, {"weight_decay": 0.5}, {"weight_decay": 2}, {"rate": 0.5}]
OF_TREES: list[Changes] = [{"sharing": 0.8}, {"sharing": 0.98}, {"noise": 0.8}]
# The sizes that speak for a kind of layer: (width, leaf width).
SIZES = {
    "table2": {"FFF": [(1024, 32)], "MoE": [(1024, 16)], "FF": [(1024, 1024)]},
    "inference_counterparts": {"FFF": [(2048, 32), (256, 4)], "FF": [(38, 38), (10, 10)]},
}


class Trial(NamedTuple):
    model: str
    changes: Changes
    groups: tuple[tuple[Case, ...], ...]  # seeds of one size train together


def trial(experiment: str, model: str, changes: Changes) -> Trial:
    """A trial of a kind of layer, at all of its sizes."""
    groups = []
    for width, leaf in SIZES[experiment][model]:
        size = {"widths": [width]} if experiment == "table2" else {}
        leaves = {"leaf_widths": [leaf]} if model == "FFF" else {}
        cases = EXPERIMENTS[experiment].cases(
            ["cifar10"], recipes=["fastff"], seeds=SEEDS, changes=changes, models=[model], **size, **leaves
        )
        groups.append(tuple(case for case in cases if case.goal == "G_A" and case.width == width))
    return Trial(model, changes, tuple(groups))


def second(experiment: str, model: str, best: Changes) -> list[Changes]:
    """Round 2: the best changes of round 1, and one more."""
    settings = dict(trial(experiment, model, best).groups[0][0].settings)
    scaled = [
        {name: type(settings[name])(settings[name] * factor) for name, factor in factors.items()} for factors in FACTORS
    ]
    return [best | more for more in (*scaled, *(OF_TREES if model == "FFF" else []))]


def run(one: Trial, device: str, root: Path | None, commit: str) -> tuple[float, list[dict[str, object]]]:
    """Train a trial; returns its mean validation accuracy, and a row for each size."""
    rows, scores = [], []
    with one_thread():
        for cases in one.groups:
            results = train(list(cases), device=device, root=root)
            validation = [max(result.history["validation"]) for result in results]
            row = as_row(results[0], machine(device), commit)
            row |= {"seeds": " ".join(str(case.seed) for case in cases)}
            row |= {"validation": round(statistics.fmean(validation), 3)}
            row |= {"G_A": round(statistics.fmean(result.G_A or 0.0 for result in results), 3)}
            rows.append(row)
            scores += validation
    return statistics.fmean(scores), rows


def search(options: argparse.Namespace) -> dict[str, Changes]:
    best: dict[str, tuple[float, Changes]] = {}
    context = multiprocessing.get_context("spawn")
    common: Changes = {"epochs": options.epochs, "evaluate_every": options.evaluate_every}
    commit = options.commit or checkout()
    with shared_gpu(options.device), ProcessPoolExecutor(options.processes, mp_context=context) as pool:

        def submit(model: str, lists: Sequence[Changes]) -> None:
            for changes in lists:
                one = trial(options.experiment, model, common | changes)
                waiting[pool.submit(run, one, options.device, options.data, commit)] = one

        waiting: dict[Any, Trial] = {}
        for model in SIZES[options.experiment]:
            submit(model, DATA)
        left = {model: len(DATA) for model in SIZES[options.experiment]}
        rounds = dict.fromkeys(left, 1)
        while waiting:
            done = next(as_completed(waiting))
            one = waiting.pop(done)
            score, rows = done.result()
            print(f"{one.model:<4} validation {score:6.2f}  {show(one.changes)}", flush=True)
            if options.output is not None:
                csv_rows.append(options.output, rows)
            if one.model not in best or score > best[one.model][0]:
                best[one.model] = (score, one.changes)
            left[one.model] -= 1
            if left[one.model] == 0 and rounds[one.model] == 1 and not options.one_round:
                lists = second(options.experiment, one.model, best[one.model][1])
                rounds[one.model], left[one.model] = 2, len(lists)
                submit(one.model, lists)
    return {model: changes for model, (_, changes) in best.items()}


def main(words: Sequence[str] | None = None) -> int:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--experiment", choices=list(SIZES), default="table2", help="whose layers")
    parser.add_argument("--epochs", type=int, default=30, help="length of a trial; one trial of round 2 is longer")
    parser.add_argument("--evaluate-every", type=int, default=2, help="epochs from one evaluation to the next")
    parser.add_argument("--one-round", action="store_true", help="no second round")
    parser.add_argument("--processes", type=int, default=1, help="trials at once")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device to train on")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file to append rows to")
    parser.add_argument("--choice", type=Path, help="JSON file for the best settings")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    options = parser.parse_args(words)
    chosen = search(options)
    print(json.dumps(chosen, indent=1))
    if options.choice is not None:
        options.choice.write_text(json.dumps(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
