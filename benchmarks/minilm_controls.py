"""MiniLM with FFF layers beside what a user would do instead, by quality alone.

    python benchmarks/minilm_controls.py --sizes 4x192,4x376 --output results/minilm_controls.csv
    python benchmarks/minilm_controls.py --sizes 2x8 --steps 2 --sentences 200 --samples 500      # a try
    python benchmarks/minilm_controls.py --model packed --device cuda --steps 20000    # see examples/minilm_pack.py

The model, its text and the loss are those of examples/minilm.py, whose requirements this has; the rows come from
`fastff.surgery.compare`. Embeddings of held-out text are compared with the original's, before and after distillation.
Times are not kept: `fastff compare` measures them on a quiet machine. Rows are written as soon as they are done, a
trained model together with its int8 form, and rows that the file has are not run again. int8 rows are left out on a
GPU: its tools differ from those of a CPU.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from csv_rows import about, append, read
from torch import Tensor, nn

import fastff
from fastff.surgery.controls import METHODS

Row = dict[str, object]

SCRIPT = "python benchmarks/minilm_controls.py"
SETTINGS = ("steps", "rate", "batch", "samples", "sentences", "held_out", "seed")
FOUND = ("cosine", "lowest", "overlap")


def examples() -> Any:
    """examples/minilm.py as a module."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import minilm

    return minilm


class Given(NamedTuple):
    """What all rows share: the original, batches to train on and to measure on, and its embeddings of the latter."""

    dense: nn.Module
    train: list[dict[str, Tensor]]
    held: list[dict[str, Tensor]]
    original: Tensor


def prepare(o: argparse.Namespace) -> Given:
    minilm = examples()
    dense, text = minilm.prepare(o)
    dense = dense.to(o.device)
    train = minilm.batches(text.train, o.batch, text.pad, seed=o.seed, device=o.device)
    held = minilm.batches(text.held_out, 32, text.pad, device=o.device)
    return Given(dense, train, held, minilm.embed(dense, held))


def measure(methods: list[str], size: tuple[int, int], given: Given, o: argparse.Namespace) -> list[Row]:
    """The rows of some methods at one size."""
    minilm = examples()
    found: dict[float, tuple[float, float, float]] = {}

    def cosine(model: nn.Module, data: Sequence[Any]) -> float:
        one = minilm.compare(model, given.original, data)
        print("cosine {:.4f}, lowest {:.4f}, overlap {:.4f}".format(*one), file=sys.stderr)
        found[one[0]] = one
        return one[0]

    made = fastff.surgery.compare(
        given.dense,
        [size],
        given.train,
        held_out=given.held,
        quality=cosine,
        steps=o.steps,
        rate=o.rate,
        loss=minilm.distance,
        samples=o.samples,
        methods=methods,
        timed={name: x[:1] for name, x in given.held[0].items()},
        budget=1e-3,
        seed=o.seed,
    )
    rows = []
    for one in made.rows[1:]:  # without the original
        row: Row = {name: getattr(one, name) for name in ("method", "size", "neurons", "flops", "parameters")}
        row |= {"tree": f"{size[0]} x {size[1]}"} | {name: getattr(o, name) for name in SETTINGS}
        for when, quality in (("fitted", one.fitted_quality), ("final", one.quality)):
            values = (None, None, None) if quality is None else found[quality]
            row |= {f"{when}_{name}": v and round(v, 6) for name, v in zip(FOUND, values, strict=True)}
        threads = torch.get_num_threads() if o.device == "cpu" else ""
        rows.append(row | {"note": one.note, "threads": threads} | about(o.device, SCRIPT))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="4x192,4x376", help="depth x leaf width (default: 4x192,4x376)")
    add("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default: all)")
    add("--steps", type=int, default=600)
    add("--rate", type=float, default=1.5e-4)
    add("--batch", type=int, default=32)
    add("--samples", type=int, default=131072)
    add("--sentences", type=int, default=24000)
    add("--held-out", type=int, default=1000)
    add("--seed", type=int, default=0)
    add("--model", type=Path, help="folder of another sentence encoder with mean pooling, or a packed one")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    add("--output", type=Path, default=Path("minilm_controls.csv"), help="rows (default: minilm_controls.csv)")
    o = parser.parse_args(arguments)
    o.methods = o.methods.split(",")
    if wrong := set(o.methods) - {*METHODS}:
        parser.error(f"--methods are some of {', '.join(METHODS)}; got {', '.join(sorted(wrong))}")
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use; it finds none. Pass --device cpu.")
    if o.device == "cuda" and any("int8" in method for method in o.methods):
        print("int8 is left out on a GPU. Run it with --device cpu --methods 'int8,int8 weights'.", file=sys.stderr)
        o.methods = [method for method in o.methods if "int8" not in method]
    given = None
    for depth, leaf_width in (size.split("x") for size in o.sizes.split(",")):
        wanted = {"tree": f"{depth} x {leaf_width}", "device": o.device} | {name: getattr(o, name) for name in SETTINGS}
        done = {row["method"] for row in read(o.output) if all(row[name] == str(v) for name, v in wanted.items())}
        missing = [method for method in METHODS if method in o.methods and method not in done]
        for _, group in groupby(missing, key=lambda method: method.removesuffix(" int8")):  # FFF int8 needs FFF
            given = given or prepare(o)
            append(o.output, measure([*group], (int(depth), int(leaf_width)), given, o))


if __name__ == "__main__":
    main()
