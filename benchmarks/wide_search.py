"""Choose settings of Table 2's single layers by validation.

Two rounds for each kind of layer. Each trial trains the layer's recipe with some settings changed, two seeds at once.
Three reasons why trees fall behind dense layers were written down first, with one experiment each:

- data: leaves overfit the images they see. Shifted and mixed images, smoothed labels (round 1)
- length: mixed images need longer trainings (round 2)
- leaves: a leaf sees few samples. Sharing, noise and weight decay (round 2)

Dense layers and MoE get the same trials, less those that only a tree has. Round 2 starts from the best of round 1.
The best trial of both goes to --choice, a JSON file: {model: settings}. Seeds below 100 belong to the tables.

    python benchmarks/wide_search.py --device cuda --processes 3 --output results/search.csv --choice table2.json
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

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
MODELS = ("FFF", "MoE", "FF")


class Trial(NamedTuple):
    model: str
    changes: Changes
    cases: tuple[Case, ...]  # one for each seed; they train together


def trial(dataset: str, width: int, model: str, changes: Changes) -> Trial:
    cases = EXPERIMENTS["table2"].cases(
        [dataset], [width], recipes=["fastff"], seeds=SEEDS, changes=changes, models=[model]
    )
    return Trial(model, changes, tuple(case for case in cases if case.goal == "G_A"))


def second(first: Trial) -> list[Changes]:
    """Round 2: the best changes of round 1, and one more."""
    settings = dict(first.cases[0].settings)
    scaled = [
        {name: type(settings[name])(settings[name] * factor) for name, factor in factors.items()} for factors in FACTORS
    ]
    return [first.changes | more for more in (*scaled, *(OF_TREES if first.model == "FFF" else []))]


def run(one: Trial, device: str, root: Path | None, commit: str) -> dict[str, object]:
    """Train a trial; returns its row, with means over the seeds."""
    with one_thread():
        results = train(list(one.cases), device=device, root=root)
    row = as_row(results[0], machine(device), commit)
    row |= {"seeds": " ".join(str(case.seed) for case in one.cases)}
    row |= {"validation": round(statistics.fmean(max(result.history["validation"]) for result in results), 3)}
    return row | {"G_A": round(statistics.fmean(result.G_A or 0.0 for result in results), 3)}


def search(options: argparse.Namespace) -> dict[str, Changes]:
    """Train all trials; returns the changes of the best one of each model."""
    best: dict[str, tuple[float, Trial]] = {}
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    common: Changes = {"epochs": options.epochs, "evaluate_every": options.evaluate_every}
    commit = options.commit or checkout()
    with shared_gpu(options.device), ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        waiting: dict[Future[dict[str, object]], Trial] = {}
        left = dict.fromkeys(options.models, 0)

        def submit(model: str, lists: Sequence[Changes]) -> None:
            for changes in lists:
                one = trial(options.dataset, options.width, model, common | changes)
                waiting[pool.submit(run, one, options.device, options.data, commit)] = one
            left[model] = len(lists)

        first = set(options.models)  # whose second round is still to come
        for model in options.models:
            submit(model, DATA)
        while waiting:
            done = next(as_completed(waiting))
            one, row = waiting.pop(done), done.result()
            score = float(str(row["validation"]))
            print(f"{one.model:<4} validation {score:6.2f}  {show(one.changes)}", flush=True)
            if options.output is not None:
                csv_rows.append(options.output, [row])
            if one.model not in best or score > best[one.model][0]:
                best[one.model] = (score, one)
            left[one.model] -= 1
            if not left[one.model] and one.model in first:
                first.remove(one.model)
                if not options.one_round:
                    submit(one.model, second(best[one.model][1]))
    return {model: one.changes for model, (_, one) in best.items()}


def main(words: Sequence[str] | None = None) -> int:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--models", type=lambda s: s.split(","), default=list(MODELS), help="as in FFF,FF")
    parser.add_argument("--width", type=int, default=1024, help="training width")
    parser.add_argument("--dataset", default="cifar10", help="data set")
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
    if wrong := [model for model in options.models if model not in MODELS]:
        parser.error(f"unknown model {wrong[0]!r}; choose from {', '.join(MODELS)}.")
    chosen = search(options)
    print(json.dumps(chosen, indent=1))
    if options.choice is not None:
        options.choice.write_text(json.dumps(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
