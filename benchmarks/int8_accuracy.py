"""Accuracy of int8 leaves: trained models before and after `fastff.quantize_`.

    python benchmarks/int8_accuracy.py mnist --output results/int8_accuracy.csv            # FASTFF_DATA: the data sets
    python benchmarks/int8_accuracy.py minilm --sizes 2x380,4x192 --output results/int8_accuracy.csv
    python benchmarks/int8_accuracy.py mnist --dataset digits --widths 16 --steps 100      # a try: seconds, no download

`mnist` trains the trees of Table 1 with our recipe, in fewer steps, and compares test accuracy in percent. `minilm`
converts the sentence encoder of examples/minilm.py, which has its requirements, and compares the mean cosine to the
original embeddings on held-out text. Each row also has

changed             share of predictions that changed; minilm: of each sentence's ten nearest neighbours
output_error        norm of the change over norm of the outputs
rerouted, ties      inputs that visit another leaf in any layer; those of them with a decision within rounding of a tie
same_after_loading  whether `fastff.save` and `fastff.load_` gave the same model back, bit for bit

Rows that the file has are not measured again.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from csv_rows import about, append, read
from torch import Tensor, nn

import fastff
from fastff import functional
from fastff.backends import choose, run
from fastff.batches import feed, watch_inputs
from fastff.bench.correctness import tree_answer
from fastff.layer import fff_layers
from fastff.progress import progress

Row = dict[str, object]
Save = Callable[[Row], None]

KEY = ("part", "model", "width", "leaf_width", "depth", "steps", "batch", "settings", "seed")
LIMITS = {"mnist": 0.1, "minilm": 0.002}  # of the difference: points of accuracy, cosine


# What both parts compare


def leaf(layer: fastff.FFF, x: Tensor) -> Tensor:
    """The leaf that each input visits in the hard pass, by the backend that runs it: (batch,)."""
    request = functional.hard_request(x, layer.tree, layer.leaves, layer.activation)
    return run(choose(request)[0], request)[1]


@torch.inference_mode()
def rerouted(model: nn.Module, quantised: nn.Module, data: Sequence[Any]) -> tuple[int, int]:
    """How many inputs, summed over layers, visit another leaf, and how many of these have a decision that is a tie.

    Both models' layers get the same inputs. A tie is within rounding of 0: another backend, which adds in another
    order, may decide it differently.
    """
    twins, count, ties = fff_layers(quantised), 0, 0

    def see(name: str, layer: fastff.FFF, x: Tensor) -> None:
        nonlocal count, ties
        x = x.reshape(-1, x.shape[-1])
        moved = x[leaf(layer, x) != leaf(twins[name], x)]
        count += len(moved)
        if len(moved):
            answer, _ = tree_answer(moved, layer.tree, layer.leaves, str(layer.activation))
            ties += len(moved) - len(answer.rows)

    with watch_inputs(fff_layers(model), see):
        for batch in data:
            feed(model, batch)
    return count, ties


def same_after_loading(quantised: nn.Module, fresh: nn.Module, batch: Any, outputs: Callable[..., Tensor]) -> bool:
    """Whether a model, saved and loaded into a fresh one, has the same tensors and outputs, bit for bit."""
    with TemporaryDirectory() as folder:
        fastff.save(quantised, folder)
        fastff.load_(fresh, folder)
    ours, theirs = quantised.state_dict(), fresh.eval().state_dict()
    same = ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )
    return same and torch.equal(outputs(quantised, [batch]), outputs(fresh, [batch]))


def compare(
    model: nn.Module,
    fresh: nn.Module,
    data: Sequence[Any],
    outputs: Callable[[nn.Module, Sequence[Any]], Tensor],
    score: Callable[[Tensor], float],
    unchanged: Callable[[Tensor, Tensor], float],
) -> Row:
    """The columns that quantising a model gives. `fresh`: the model before surgery."""
    quantised = copy.deepcopy(model)
    report = fastff.quantize_(quantised)
    before, after = outputs(model, data), outputs(quantised, data)
    scores = score(before), score(after)
    moved, ties = rerouted(model, quantised, data)
    return {
        "float32": round(scores[0], 6),
        "int8": round(scores[1], 6),
        "difference": round(scores[1] - scores[0], 6),
        "changed": round(1 - unchanged(before, after), 6),
        "output_error": round(((after - before).norm() / before.norm()).item(), 6),
        "rerouted": moved,
        "ties": ties,
        "same_after_loading": "yes" if same_after_loading(quantised, fresh, data[0], outputs) else "no",
        "bytes_float32": report.bytes_before,
        "bytes_int8": report.bytes_after,
    }


# mnist


def measure_mnist(o: argparse.Namespace, done: Callable[[Row], bool], save: Save) -> None:
    from fastff_reproduce.data import load
    from fastff_reproduce.experiments import EXPERIMENTS
    from fastff_reproduce.settings import Settings

    cells: dict[str, list[tuple[Row, Any]]] = {}
    for case in EXPERIMENTS["table1"].cases(
        datasets=[o.dataset],
        widths=o.widths,
        leaf_widths=o.leaf_widths,
        recipes=["fastff"],
        seeds=o.seeds,
        changes={"steps": o.steps},
    ):
        if case.model != "FFF" or case.goal != "G_A":
            continue
        sizes = {"width": case.width, "leaf_width": case.leaf_width, "depth": case.depth}
        batch = Settings(**dict(case.settings)).batch
        row = {"part": "mnist", "model": case.dataset, **sizes, "steps": o.steps, "batch": batch}
        if not done(row := row | {"settings": "recipe=fastff", "seed": case.seed}):
            cells.setdefault(case.title, []).append((row, case))
    dataset = load(o.dataset, o.data)
    with progress("mnist", sum(map(len, cells.values())), unit="models") as advance:
        for title, group in cells.items():
            begin = time.perf_counter()
            models, x, y = trained([case for _, case in group], dataset, lambda text: advance(0, text=text))
            seconds = round((time.perf_counter() - begin) / len(group), 1)
            for (row, _), layer in zip(group, models, strict=True):
                found = compare(*converted(layer), x.split(2000), logits, accuracy_for(y), agreement)
                save(row | {"inputs": len(x)} | found | {"seconds": seconds})
                advance(text=title)


def trained(cases: Sequence[Any], dataset: Any, say: Callable[[str], None]) -> tuple[list[Any], Tensor, Tensor]:
    """A trained layer for each case, as `fastff reproduce` scores it, and the test data."""
    from fastff_reproduce.loop import Training

    training = Training(cases, torch.device("cpu"), dataset)
    while not training.finished:
        training.advance()
        say(f"{cases[0].title}: epoch {training.epoch} of {training.most_epochs}, {training.describe()}")
    if training.watch.reasons:
        raise SystemExit(f"{cases[0].title} diverged: {training.watch.reasons}.")
    assert training.generalised is not None  # the goal of these cases is G_A
    state = training.generalised.state
    return [copy.deepcopy(training.ensemble.member(i, state)) for i in range(len(cases))], *training.samples.test


def converted(layer: fastff.FFF) -> tuple[nn.Module, nn.Module]:
    """A trained layer in a model that `fastff.save` takes, and that model before its surgery."""
    first, second = (
        nn.Linear(layer.in_features, layer.training_width),
        nn.Linear(layer.training_width, layer.out_features),
    )
    fresh = nn.Sequential(nn.Sequential(first, nn.ReLU(), second)).eval()
    model = copy.deepcopy(fresh)
    fastff.replace_(model, depth=layer.depth, leaf_width=layer.leaf_width)
    (own,) = fff_layers(model).values()
    assert own.activation == layer.activation
    own.load_state_dict(layer.state_dict())
    return model, fresh


@torch.inference_mode()
def logits(model: nn.Module, data: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(x) for x in data])


def accuracy_for(y: Tensor) -> Callable[[Tensor], float]:
    return lambda output: 100 * agreement(output, nn.functional.one_hot(y))


def agreement(a: Tensor, b: Tensor) -> float:
    """The share of rows with the same largest column."""
    return (a.argmax(-1) == b.argmax(-1)).double().mean().item()


# minilm


def measure_minilm(o: argparse.Namespace, done: Callable[[Row], bool], save: Save) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import minilm

    given = ["--sizes", o.sizes, "--steps", str(o.steps), "--samples", str(o.samples), "--sentences", str(o.sentences)]
    given += ["--held-out", str(o.held_out)] + (["--model", str(o.model)] if o.model else [])
    missing: list[tuple[Row, argparse.Namespace]] = []
    for seed in o.seeds:
        wanted = minilm.options([*given, "--seed", str(seed)])
        for depth, leaf_width in wanted.pairs:
            row = {"part": "minilm", "model": minilm.name_of(wanted.model)}
            row |= {"width": leaf_width << depth, "leaf_width": leaf_width, "depth": depth, "steps": wanted.steps}
            settings = f"samples={wanted.samples} sentences={wanted.sentences} rate={wanted.rate:g}"
            row |= {"batch": wanted.batch, "settings": settings, "seed": seed}
            if not done(row):
                missing.append((row, wanted))
    with progress("minilm", len(missing), unit="models") as advance:
        for row, model, dense, held, seconds in minilm_models(minilm, missing):
            original = minilm.embed(dense, held)
            found = compare(model, copy.deepcopy(dense), held, minilm.embed, cosine_to(original), minilm.overlap)
            save(row | {"inputs": len(original)} | found | {"seconds": seconds})
            advance(text=f"{row['depth']} x {row['leaf_width']}")


def cosine_to(original: Tensor) -> Callable[[Tensor], float]:
    """The mean cosine of embeddings of length 1 to the original ones."""
    return lambda ours: (ours * original).sum(1).double().mean().item()


def minilm_models(minilm: Any, missing: Sequence[tuple[Row, argparse.Namespace]]) -> Iterator[tuple[Any, ...]]:
    """For each row: the row, the model fitted and distilled, the original, held-out batches, seconds of fitting."""
    for row, o in missing:
        dense, text = minilm.prepare(o)
        train = minilm.batches(text.train, o.batch, text.pad, seed=o.seed)
        begin = time.perf_counter()
        model, report = minilm.operate(dense, (row["depth"], row["leaf_width"]), train, o)
        if o.steps:
            arguments = {"teacher": dense, "loss": minilm.distance, "steps": o.steps, "rate": o.rate}
            fastff.distill_(model, report, train, **arguments)
        seconds = round(time.perf_counter() - begin, 1)
        yield row, model.eval(), dense, minilm.batches(text.held_out, 32, text.pad), seconds


# Rows


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def line(row: Row) -> str:
    size = f"{1 << int(str(row['depth']))} leaves of {row['leaf_width']}, seed {row['seed']}"
    numbers = (
        f"{float(str(row['float32'])):.4f} -> {float(str(row['int8'])):.4f} ({float(str(row['difference'])):+.4f})"
    )
    kept = f"{row['rerouted']} rerouted ({row['ties']} of them ties), same after loading: {row['same_after_loading']}"
    over = " ABOVE THE LIMIT" if abs(float(str(row["difference"]))) > LIMITS[str(row["part"])] else ""
    return f"{row['part']}, {size}: {numbers}, {100 * float(str(row['changed'])):.2f} % changed, {kept}{over}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parts = parser.add_subparsers(dest="part", required=True)
    mnist = parts.add_parser(
        "mnist", help="the trees of Table 1", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    mnist.add_argument("--dataset", default="mnist", help="one of `fastff reproduce list`")
    mnist.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    mnist.add_argument("--widths", type=numbers, default=[16, 32, 64, 128], help="training widths")
    mnist.add_argument("--leaf-widths", type=numbers, default=[8, 4, 2, 1], help="leaf widths")
    mnist.add_argument("--steps", type=int, default=1500, help="training steps; Table 1 has 16800")
    minilm = parts.add_parser(
        "minilm", help="a converted sentence encoder", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    minilm.add_argument("--sizes", default="4x376", help="depth x leaf width, several with commas")
    minilm.add_argument("--steps", type=int, default=0, help="distillation steps after the fit")
    minilm.add_argument("--samples", type=int, default=131072, help="tokens to fit trees and leaves to")
    minilm.add_argument("--sentences", type=int, default=24000, help="training sentences")
    minilm.add_argument("--held-out", type=int, default=1000, help="held-out sentences")
    minilm.add_argument("--model", type=Path, help="folder of another sentence encoder")
    for part in (mnist, minilm):
        part.add_argument("--seeds", type=numbers, default=[0], help="seeds, separated by commas")
        part.add_argument("--commit", default="", help="commit to store in the rows outside of a checkout")
        part.add_argument("--output", type=Path, help="append the rows to this CSV file")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    o = arguments(given)
    where = about("cpu", "python benchmarks/int8_accuracy.py", o.commit)
    rows = [row for row in read(o.output) if row["part"] == o.part]
    known = {key(row) for row in rows}

    def save(row: Row) -> None:
        rows.append(row | where)
        if o.output:
            append(o.output, rows[-1:])

    measure = measure_mnist if o.part == "mnist" else measure_minilm
    try:
        measure(o, lambda row: key(row) in known, save)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; finished models have their rows in {o.output}.") from None
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
