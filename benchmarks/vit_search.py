"""Try settings of Table 3's trees: short trainings from one dense teacher, several at once on one GPU.

The teacher is a file that `fastff reproduce table3 --models ViT-FF` left in STORE.checkpoints. Its seed is the seed of
the trials: they hold out the same validation images. Seeds below 100 belong to the table and are refused. A trial is
recipe fastff with some settings changed; --causes are lists of trials, one for each reason why trees may lose accuracy:

- fit: they start too far from the teacher
- leaves: a leaf sees too few samples
- optimisation: rate, weight decay, averaged weights, soft decisions

Rows are printed as trainings end, and with --output appended to a file like results/search.csv. Choose by `validation`.

    python benchmarks/vit_search.py --teacher X.dense.pt --leaf-widths 8,1 --causes fit,leaves,optimisation \\
        --trial rate=2e-3,weight_decay=0.1 --device cuda --processes 6 --seconds 240 --output results/search.csv
"""

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import csv_rows

from fastff.provenance import checkout, machine
from fastff_reproduce.divergence import Diverged
from fastff_reproduce.experiments import EXPERIMENTS
from fastff_reproduce.recipes import VIT
from fastff_reproduce.runs import Case, Result
from fastff_reproduce.settings import shortened
from fastff_reproduce.teacher import path_of, teacher_of
from fastff_reproduce.threads import one_thread
from fastff_reproduce.trainer import train

Changes = dict[str, Any]
CAUSES: dict[str, list[Changes]] = {
    "fit": [{"fit_images": 2048}, {"fit_images": 32768}, {"fit_steps": 2000}],
    "leaves": [{"sharing": 0.5}, {"sharing": 0.8}, {"noise": 0.4}, {"noise": 0.8}],
    "optimisation": [
        {"rate": 1e-3},
        {"rate": 4e-3},
        {"weight_decay": 0.1},
        {"averaging": 0.998},
        {"decision": "soft", "training_temperature": 30.0},
    ],
}


class Trial(NamedTuple):
    case: Case
    changes: Changes


def parse(text: str) -> Changes:
    """name=value,name=value: numbers, true or false; any other value is a word. "" changes nothing."""
    made: Changes = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"a trial is name=value,name=value; got {part!r}.")
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made


def trials(options: argparse.Namespace) -> list[Trial]:
    """The recipe itself, and each list of changes, for every leaf width; all with the same teacher."""
    lists: list[Changes] = [{}, *(some for cause in options.causes for some in CAUSES[cause]), *options.trial]
    common = {"epochs": options.epochs, "teacher_share": options.teacher_epochs / options.epochs}
    made = []
    for leaf in options.leaf_widths:
        same = {"datasets": [options.dataset], "leaf_widths": [leaf], "models": ["ViT-FFF"], "seeds": [options.seed]}
        cases = [
            EXPERIMENTS["table3"].cases(**same, recipes=["fastff"], changes=common | options.common | changes)[0]
            for changes in lists
        ]
        for case, changes in zip(cases, lists, strict=True):
            if teacher_of(case) != teacher_of(cases[0]):
                raise ValueError(f"{show(changes)} needs another teacher. Put it into --common, with such a --teacher.")
            made.append(Trial(case, changes))
    return list({trial.case.key: trial for trial in made}.values())


def run(case: Case, teacher: Path, device: str, root: Path | None, seconds: float) -> tuple[Result, str]:
    """Train a case from this teacher; returns the result and the machine."""
    with TemporaryDirectory() as folder, one_thread():
        shutil.copy(teacher, path_of(Path(folder), teacher_of(case)))
        (result,) = train([case], device=device, root=root, checkpoint=Path(folder) / "own.pt", seconds=seconds)
    return result, machine(device)


def as_row(result: Result, machine: str, commit: str) -> dict[str, object]:
    """The columns of results/search.csv."""
    case = result.case
    row: dict[str, object] = {
        name: getattr(case, name) for name in ("dataset", "model", "width", "leaf_width", "depth")
    }
    row |= {"seeds": case.seed, "settings": json.dumps(shortened(case.settings), sort_keys=True)}
    row |= {"validation": round(max(result.history["validation"]), 3), "G_A": result.G_A, "M_A": "", "ETT": result.ETT}
    row |= {"soft_hard_gap": result.soft_hard_gap, "smallest_share": result.smallest_share}
    row |= {"inference_size": result.inference_size, "epochs": result.epochs}
    return row | {"machine": machine, "commit": commit}


def show(changes: Changes) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the recipe"


def line(trial: Trial, result: Result) -> str:
    history = result.history["validation"]
    numbers = f"validation {max(history):6.2f} (first {history[0]:.2f}, last {history[-1]:.2f})"
    times = f"{result.epochs} epochs, {result.seconds:.0f} s"
    return f"l={trial.case.leaf_width:<3} {numbers}  {times}  {show(trial.changes)}"


@contextmanager
def shared_gpu(device: str) -> Iterator[None]:
    """Processes share the GPU under MPS, if this machine has it; a server that runs already stays."""
    control = shutil.which("nvidia-cuda-mps-control") if device == "cuda" else None
    started = control and subprocess.run([control, "-d"], capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if control and started:
            subprocess.run([control], input="quit\n", text=True, capture_output=True, check=False)


def search(chosen: Sequence[Trial], options: argparse.Namespace) -> int:
    """Train all trials; returns how many failed."""
    failed = 0
    arguments = (options.teacher, options.device, options.data, options.seconds)
    # Spawned: a forked process cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    with shared_gpu(options.device), ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        waiting: dict[Future[tuple[Result, str]], Trial] = {
            pool.submit(run, trial.case, *arguments): trial for trial in chosen
        }
        for done in as_completed(waiting):
            trial = waiting[done]
            try:
                result, where = done.result()
            except (Diverged, ValueError, RuntimeError, OSError) as error:  # the others go on
                failed += 1
                print(f"l={trial.case.leaf_width:<3} failed  {show(trial.changes)}: {error}", flush=True)
                continue
            print(line(trial, result), flush=True)
            if options.output is not None:
                csv_rows.append(options.output, [as_row(result, where, options.commit or checkout())])
    return failed


def main(words: Sequence[str] | None = None) -> int:
    formats = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formats)
    parser.add_argument("--teacher", type=Path, required=True, help="file of a trained dense transformer")
    parser.add_argument("--teacher-epochs", type=int, default=round(VIT.teacher_share * VIT.epochs), help="its length")
    parser.add_argument("--seed", type=int, default=100, help="the teacher's seed, 100 or more")
    parser.add_argument("--dataset", default="cifar10", help="data set")
    parser.add_argument(
        "--leaf-widths", type=lambda s: [int(n) for n in s.split(",")], default=[8], help="as in 32,8,1"
    )
    parser.add_argument("--epochs", type=int, default=60, help="length of a trial")
    parser.add_argument("--common", type=parse, default={}, help="settings of all trials: name=value,name=value")
    parser.add_argument(
        "--causes", type=lambda s: s.split(","), default=[], help=f"lists of trials: {', '.join(CAUSES)}"
    )
    parser.add_argument("--trial", type=parse, nargs="+", default=[], help="further trials: name=value,name=value")
    parser.add_argument("--processes", type=int, default=1, help="trials at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="a trial ends at its first evaluation after this")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device to train on")
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, help="CSV file to append rows to")
    parser.add_argument("--commit", default="", help="of the checkout, if git cannot say")
    parser.add_argument("--list", action="store_true", help="print the trials and train nothing")
    options = parser.parse_args(words)
    if wrong := [cause for cause in options.causes if cause not in CAUSES]:
        parser.error(f"unknown cause {wrong[0]!r}; choose from {', '.join(CAUSES)}.")
    if options.seed < 100:
        parser.error(f"--seed must be 100 or more: lower ones belong to the table; got {options.seed}.")
    if not options.teacher.is_file():
        parser.error(f"--teacher: {options.teacher} is not a file. Train it: fastff reproduce table3 --models ViT-FF.")
    try:
        chosen = trials(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for trial in chosen:
            print(f"l={trial.case.leaf_width:<3} {show(trial.changes)}")
        return 0
    return 1 if search(chosen, options) else 0


if __name__ == "__main__":
    sys.exit(main())
