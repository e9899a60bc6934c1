"""Train rows of results/search.csv again, and print the new numbers beside the stored ones.

Each row is one setting of a search that chose a recipe. `settings` holds the values that differ from the defaults of
`fastff_reproduce.settings`; the numbers are means over `seeds`. A row with G_A is trained for test accuracy, a row with
M_A for training accuracy and without weight decay, a row with both twice.

    python benchmarks/search.py --list --dataset mnist       # the rows, with their numbers
    python benchmarks/search.py --rows 120-125 --device cuda
    python benchmarks/search.py --rows 57 --seeds 1 --steps 300    # a smoke test: a short training of one seed
"""

import argparse
import csv
import dataclasses
import json
import statistics
import sys
from pathlib import Path

from fastff.progress import progress
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import Settings
from fastff_reproduce.trainer import train

ROWS = Path(__file__).parent.parent / "results" / "search.csv"
SHOWN = ("validation", "G_A", "M_A", "ETT", "smallest_share")
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(text: str) -> list[int]:
    """3,7-9 are 3, 7, 8 and 9."""
    ends = [part.split("-") for part in text.split(",")]
    return [number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)]


def cases(row: Row, seeds: int | None, steps: int | None) -> list[list[Case]]:
    """The trainings of a row: a group for each goal, with a case for each seed."""
    changes = json.loads(row["settings"]) | ({"steps": steps, "epochs": 0} if steps else {})
    settings = Settings().changed(changes)
    sizes = {name: int(row[name]) for name in ("width", "leaf_width", "depth")}
    groups = []
    for goal in ("G_A", "M_A"):
        if not row[goal]:
            continue
        free = dataclasses.replace(settings, weight_decay=0.0) if goal == "M_A" else settings
        chosen = [int(seed) for seed in row["seeds"].split()][:seeds]
        same = {"dataset": row["dataset"], "model": row["model"], **sizes, "recipe": "search", "goal": goal}
        groups.append([Case(**same, seed=seed, settings=free.items()) for seed in chosen])
    return groups


def summary(results: list[Result]) -> dict[str, float]:
    """The columns of a row, as means over seeds; of the shares the least."""
    found: dict[str, list[float]] = {}
    for result in results:
        if result.case.goal == "G_A":
            found.setdefault("validation", []).append(max(result.history["validation"]))
        for name in ("G_A", "M_A", "ETT"):
            if (value := getattr(result, name)) is not None:
                found.setdefault(name, []).append(value)
        if result.smallest_share is not None:
            found.setdefault("smallest_share", []).append(result.smallest_share)
    return {name: min(some) if name == "smallest_share" else statistics.fmean(some) for name, some in found.items()}


def title(number: int, row: Row) -> str:
    size = f"w={row['width']} l={row['leaf_width']}"
    return f"{number}: {row['dataset']} {row['model']} {size}, {len(row['seeds'].split())} seeds, {row['settings']}"


def stored(row: Row) -> str:
    return ", ".join(f"{name} {row[name]}" for name in SHOWN if row[name])


def main() -> None:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--file", type=Path, default=ROWS, help="CSV file of rows")
    parser.add_argument("--rows", type=numbers, help="numbers of rows from 0, such as 3,7-9; all otherwise")
    parser.add_argument("--dataset", help="only rows of this data set")
    parser.add_argument("--list", action="store_true", help="print the rows and train nothing")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device to train on")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--seeds", type=int, help="first seeds of each row; all otherwise")
    parser.add_argument("--steps", type=int, help="optimizer steps, for a quick try; as stored otherwise")
    options = parser.parse_args()
    table = list(enumerate(read(options.file)))
    chosen = [(i, row) for i, row in table if options.rows is None or i in options.rows]
    chosen = [(i, row) for i, row in chosen if options.dataset in (None, row["dataset"])]
    if not chosen:
        parser.error(f"{options.file} has no such rows; it has {len(table)}.")
    for number, row in chosen:
        print(title(number, row))
        print(f"  stored: {stored(row)}", flush=True)
        if options.list:
            continue
        groups = cases(row, options.seeds, options.steps)
        with progress(f"row {number}", len(groups)) as advance:
            results = []
            for group in groups:
                results += train(group, device=options.device, root=options.data)
                advance()
        print("  now:    " + ", ".join(f"{name} {value:.4g}" for name, value in summary(results).items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
