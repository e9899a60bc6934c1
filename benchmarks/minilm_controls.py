"""MiniLM with FFF layers beside what a user would do instead, by quality alone.

    python benchmarks/minilm_controls.py --sizes 4x192,4x376 --output results/minilm_controls.csv
    python benchmarks/minilm_controls.py --sizes 2x8 --steps 2 --sentences 200 --samples 500      # a try

The model, its text and the loss are those of examples/minilm.py, whose requirements this has; the rows come from
`fastff.surgery.compare`. Embeddings of held-out text are compared with the original's, before and after distillation.
Times are not kept: `fastff compare` measures them on a quiet machine. Rows that the file has are not run again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from csv_rows import about, append, read
from torch import nn

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


def measure(size: tuple[int, int], o: argparse.Namespace) -> list[Row]:
    """The rows of one size."""
    minilm = examples()
    dense, text = minilm.prepare(o)
    train = minilm.batches(text.train, o.batch, text.pad, seed=o.seed)
    held = minilm.batches(text.held_out, 32, text.pad)
    original = minilm.embed(dense, held)
    found: dict[float, tuple[float, float, float]] = {}

    def cosine(model: nn.Module, data: Sequence[Any]) -> float:
        one = minilm.compare(model, original, data)
        print("cosine {:.4f}, lowest {:.4f}, overlap {:.4f}".format(*one), file=sys.stderr)
        found[one[0]] = one
        return one[0]

    made = fastff.surgery.compare(
        dense,
        [size],
        train,
        held_out=held,
        quality=cosine,
        steps=o.steps,
        rate=o.rate,
        loss=minilm.distance,
        samples=o.samples,
        methods=o.methods,
        timed={name: x[:1] for name, x in held[0].items()},
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
        rows.append(row | {"note": one.note, "threads": torch.get_num_threads()} | about("cpu", SCRIPT))
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
    add("--model", type=Path, help="folder of another sentence encoder with mean pooling")
    add("--output", type=Path, default=Path("minilm_controls.csv"), help="rows (default: minilm_controls.csv)")
    o = parser.parse_args(arguments)
    o.methods = o.methods.split(",")
    for depth, leaf_width in (size.split("x") for size in o.sizes.split(",")):
        wanted = {"tree": f"{depth} x {leaf_width}"} | {name: getattr(o, name) for name in SETTINGS}
        done = {row["method"] for row in read(o.output) if all(row[name] == str(v) for name, v in wanted.items())}
        if not done.issuperset(o.methods):
            append(o.output, measure((int(depth), int(leaf_width)), o))


if __name__ == "__main__":
    main()
