"""A small GPT-2 and a small Llama, trained from scratch on text: dense feedforward blocks and FFF side by side.

    python examples/language.py                      # both, about 12 minutes on 2 cores
    python examples/language.py --models gpt2        # one family
    python examples/language.py --device cuda --steps 3000

The text is the source of Python's standard library, which every machine has; whole files are held out. All models of a
family start from the same seed and see the same batches. `fastff.replace_` puts FFF layers into the fresh model, and
`fastff.Recipe` trains them. All losses use eval(), the hard pass: one leaf per token. There are two held-out sets: one
for the curves and for choosing settings, one for the final numbers.
"""

import argparse
import csv
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from language_text import Text, read_text
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import fastff
from fastff.atomic import replacing
from fastff.bench import EagerRunner, OtherLoad, interleave
from fastff.bench import rows as bench
from fastff.progress import progress
from fastff.provenance import checkout, machine

NAMES = {"gpt2": "GPT-2", "llama": "Llama"}
RECIPE = {"decision": "soft", "temperature": (1.0, 10.0), "noise": 0.0, "balance": 0.1}
TIMED = ((1, 64), (32, 64))  # sequences x tokens
SHOWN = ["loss", "perplexity", "bits_per_byte", "validation_loss", "soft_loss", "leaves_used", "smallest_share"]
TIMES = [f"{part}_{batch}_us" for part in ("blocks", "model") for batch, _ in TIMED]
WHAT = ["model", "width", "depth", "leaf_width", "neurons", "parameters", "settings", "seed", "steps", "batch", "rate"]
SIZES = ["dim", "layers", "context", "vocabulary"]
COLUMNS = [*WHAT, *SIZES, *SHOWN, "seconds", *TIMES, "other_load", "curve", "device", *bench.ABOUT]
KEY = ["model", "width", "depth", "leaf_width", "settings", "seed", "steps", "batch", "rate", *SIZES, "machine"]


class Blocks(NamedTuple):
    """The feedforward blocks of a model: dense ones of a width, or FFF layers where depth is not None."""

    width: int
    depth: int | None = None
    leaf_width: int | None = None

    @property
    def name(self) -> str:
        return f"dense {self.width}" if self.depth is None else f"FFF, {2**self.depth} leaves of {self.leaf_width}"

    @property
    def neurons(self) -> int:
        """At inference."""
        return self.width if self.depth is None else self.depth + (self.leaf_width or 0)


def build(family: str, blocks: Blocks, vocabulary: int, o: argparse.Namespace) -> PreTrainedModel:
    """A fresh model from its config; fastff.replace_ exchanges its feedforward blocks."""
    torch.manual_seed(o.seed)
    heads = o.heads or o.dim // 32
    same = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "tie_word_embeddings": True}
    # The families' default, 0.02, is for wider models: dense models of width 128 learn more slowly from it.
    same |= {"vocab_size": vocabulary, "initializer_range": o.dim**-0.5}
    if family == "gpt2":
        # gelu instead of GPT-2's tanh form: FFF has kernels for it.
        sizes = {
            "n_embd": o.dim,
            "n_layer": o.layers,
            "n_head": heads,
            "n_inner": blocks.width,
            "n_positions": o.context,
        }
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(activation_function="gelu", **sizes, **no_dropout, **same)
    else:
        sizes = {"hidden_size": o.dim, "num_hidden_layers": o.layers, "num_attention_heads": heads}
        sizes |= {"intermediate_size": blocks.width, "max_position_embeddings": o.context}
        config = LlamaConfig(**sizes, **same)
    model = AutoModelForCausalLM.from_config(config)
    if blocks.depth is not None:
        fastff.replace_(model, depth=blocks.depth, leaf_width=blocks.leaf_width, init=o.init)
    return model.to(o.device)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean over the tokens, in nats."""
    logits = model(windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, soft: bool = False) -> float:
    """The loss by eval(), the hard pass; or by the soft pass, of train(), where asked."""
    model.train(soft)
    device = next(model.parameters()).device
    parts = [(loss_of(model, part.to(device)).item(), len(part)) for part in windows.split(32)]
    return sum(loss * count for loss, count in parts) / len(windows)


def train(model: PreTrainedModel, text: Text, o: argparse.Namespace, advance: Callable[..., None]) -> dict[str, Any]:
    """Train a model; returns its losses, its use of leaves and the curve of (step, training loss, validation loss)."""
    generator = torch.Generator().manual_seed(o.seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.rate, betas=(0.9, 0.95))
    warm = max(1, o.steps // 20)
    scale = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / warm) * (0.05 + 0.95 * (1 + math.cos(math.pi * i / o.steps)) / 2)
    )
    recipe = None
    if any(isinstance(module, fastff.FFF) for module in model.modules()):
        sample = text.batch(torch.Generator().manual_seed(o.seed + 1), 32)[:, :-1]
        settings = {"rebalance_every": max(1, o.steps // 20)} | o.recipe
        recipe = fastff.Recipe(model, sample, steps=o.steps, **settings)
    curve, recent, seconds = [], [], 0.0
    for step in range(o.steps):
        if step % max(1, o.steps // 8) == 0:
            curve.append((step, mean(recent), evaluate(model, text.validation)))
            recent.clear()
        begin = time.perf_counter()
        model.train()
        task_loss = loss_of(model, text.batch(generator, o.batch).to(o.device))
        loss = task_loss + recipe.loss() if recipe else task_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scale.step()
        recent.append(task_loss.item())
        seconds += time.perf_counter() - begin
        if recipe and step == o.steps - 1:  # the last step of the recipe makes the soft pass hard
            soft_loss = evaluate(model, text.test, soft=True)
        if recipe:
            begin = time.perf_counter()
            recipe.step()
            seconds += time.perf_counter() - begin
        advance(text=f"loss {mean(recent):.2f}")
    curve.append((o.steps, mean(recent), evaluate(model, text.validation)))
    loss = evaluate(model, text.test)
    found = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / text.bytes_per_token}
    found |= {"validation_loss": curve[-1][-1], "seconds": seconds, "curve": json.dumps(rounded(curve))}
    if recipe:
        used = fastff.usage(model, text.test[:, :-1]).values()
        found["soft_loss"] = soft_loss
        found["leaves_used"] = min(one.leaves_used for one in used)  # of the layer that uses the fewest
        found["smallest_share"] = min(one.smallest_share for one in used)
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def rounded(curve: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [[None if math.isnan(value) else round(value, 4) for value in point] for point in curve]


def feedforward(model: nn.Module) -> list[nn.Module]:
    """The feedforward blocks: both families call them mlp."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


@torch.inference_mode()
def time_all(trained: dict[str, PreTrainedModel], text: Text, o: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Microseconds of all feedforward blocks and of the whole model, by TIMED. Models alternate.

    The blocks run on the inputs that reach them in their own model on test text: leaves are visited as in real use.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in trained}
    load = OtherLoad()
    for batch, length in TIMED:
        picks = [torch.arange(i, i + batch) % len(text.test) for i in range(4)]
        inputs = [text.test[pick, :length].to(o.device) for pick in picks]
        runners: dict[str, dict[str, EagerRunner]] = {"blocks": {}, "model": {}}
        for name, model in trained.items():
            model.eval()
            parts = feedforward(model)
            seen: list[list[Tensor]] = [[] for _ in inputs]
            for into, x in zip(seen, inputs, strict=True):
                hooks = [p.register_forward_pre_hook(lambda _, a, into=into: into.append(a[0])) for p in parts]
                model(x)
                for hook in hooks:
                    hook.remove()

            def run_blocks(each: list[Tensor], parts: list[nn.Module] = parts) -> None:
                for part, x in zip(parts, each, strict=True):
                    part(x)
                wait(o.device)

            def run_model(x: Tensor, model: PreTrainedModel = model) -> None:
                model(x)
                wait(o.device)

            runners["blocks"][name] = EagerRunner(run_blocks, seen, "auto")
            runners["model"][name] = EagerRunner(run_model, inputs, "auto")
        for part, each in runners.items():
            times, _ = interleave(each, budget=o.budget, samples=30)
            for name, one in times.items():
                found[name][f"{part}_{batch}_us"] = one.median
    for row in found.values():
        row["other_load"] = load.cores()
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def continuation(model: PreTrainedModel, text: Text, prompt: str, tokens: int = 24) -> str:
    """A greedy continuation of the prompt by the hard pass."""
    ids = text.tokenizer.encode(prompt).ids
    device, context = next(model.parameters()).device, text.test.shape[1] - 1
    model.eval()
    for _ in range(tokens):
        x = torch.tensor([ids[-context:]], device=device)
        ids.append(int(model(x).logits[0, -1].argmax()))
    return text.tokenizer.decode(ids)


def save(path: Path, new: Sequence[dict[str, Any]]) -> None:
    """Put rows into the file; they replace rows of the same training."""
    old: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            old = list(reader)
            if reader.fieldnames != COLUMNS:
                raise SystemExit(f"{path} has other columns than the rows of this script. Choose another --rows.")
    rows = {tuple(words(row)[name] for name in KEY): words(row) for row in [*old, *new]}
    with replacing(path) as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())


def words(row: dict[str, Any]) -> dict[str, str]:
    values = {name: "" if row.get(name) is None else row[name] for name in COLUMNS}
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in values.items()}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation loss of the hard pass over the steps; a panel for each family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fastff"}  # text as text: small files, the same every time

    families = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        1, len(families), figsize=(4.8 * len(families), 4), sharey=True, squeeze=False, layout="constrained"
    )
    greys, blues = iter(["#333333", "#9a9a9a"] * len(rows)), iter(["#7fb3d5", "#1b6ca8", "#0b3c5d"] * len(rows))
    colors = {name: next(blues if "FFF" in name else greys) for name in dict.fromkeys(row["name"] for row in rows)}
    lowest, highest = math.inf, 0.0
    for axes, family in zip(panels[0], families, strict=True):
        for row in (row for row in rows if row["model"] == family):
            step, _, loss = zip(*json.loads(row["curve"]), strict=True)
            label = f"{row['name']}: {row['neurons']} neurons"
            dashed = "-" if "FFF" in row["name"] else "--"
            axes.plot(step[1:], loss[1:], dashed, marker="o", markersize=3, color=colors[row["name"]], label=label)
            lowest, highest = min(lowest, *loss[1:]), max(highest, *loss[1:])
        axes.set(title=NAMES[family], xlabel="step", ylim=(lowest - 0.1, highest + 0.1))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0][0].set_ylabel("validation loss, nats per token (hard pass)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def show(rows: Sequence[dict[str, Any]], text: Text, console: Console) -> None:
    table = Table(
        title="The same text, steps and seed; every loss by the hard pass",
        caption=f"Loss: nats per token on test files; guessing by frequency scores {text.unigram_loss():.2f}. "
        "Soft: by the soft pass, before the last step hardens it. Leaves: used, in the layer with the fewest. "
        "Speed-up over the first dense model: feedforward blocks alone, then whole model; sequences x tokens.",
    )
    sizes = [f"{part} {batch}x{length}" for part in ("blocks", "model") for batch, length in TIMED]
    for header in ("", "blocks", "neurons", "parameters", "loss", "soft", "perplexity", "bits/byte", "leaves", *sizes):
        table.add_column(header, justify="right" if header else "left")
    for row in rows:
        dense = next(one for one in rows if one["model"] == row["model"])
        leaves = f"{row['leaves_used']} of {2 ** row['depth']}" if row["depth"] is not None else ""
        soft = f"{row['soft_loss']:.3f}" if leaves else ""
        cells = [f"{row['neurons']}", f"{row['parameters'] / 1e6:.2f} M", f"{row['loss']:.3f}", soft]
        cells += [f"{row['perplexity']:.1f}", f"{row['bits_per_byte']:.3f}", leaves]
        cells += [f"{dense[name] / row[name]:.2f}x" if row.get(name) and dense.get(name) else "" for name in TIMES]
        table.add_row(NAMES[row["model"]], row["name"], *cells, end_section=row is rows[-1])
    console.print(table)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="gpt2,llama", help="which families (default: gpt2,llama)")
    add("--dense", default="512,64", help="widths of dense models; the first is the reference (default: 512,64)")
    add("--sizes", default="3x64,5x64", help="FFF models, as depth x leaf width (default: 3x64,5x64)")
    add("--steps", type=int, default=500, help="optimizer steps of every model (default: 500)")
    add("--batch", type=int, default=8, help="sequences in a batch (default: 8)")
    add("--rate", type=float, default=3e-3, help="highest learning rate (default: 3e-3)")
    add("--seed", type=int, default=0)
    add("--dim", type=int, default=128, help="width of the residual stream, a multiple of 32 (default: 128)")
    add("--heads", type=int, help="attention heads; must divide --dim (default: one for 32 features)")
    add("--layers", type=int, default=4, help="(default: 4)")
    add("--context", type=int, default=128, help="tokens in a sequence, at least 64 (default: 128)")
    add("--vocabulary", type=int, default=1024, help="of the byte-level BPE that is trained first (default: 1024)")
    add("--init", choices=("random", "dense"), default="random", help="of the leaves (default: random)")
    add("--recipe", type=json.loads, default={}, help=f"changes of fastff.Recipe's settings, JSON; here {RECIPE}")
    add("--text", type=Path, help="a folder of .py, .rst, .txt and .md files (default: Python's standard library)")
    add("--limit", type=int, default=8_000_000, help="characters of text at most (default: 8,000,000)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--budget", type=float, default=4.0, help="seconds for each comparison of times, 4 a family (default: 4)")
    add("--output", type=Path, default=Path("language.svg"), help="the picture, .svg or .png (default: language.svg)")
    add("--rows", type=Path, default=Path("language.csv"), help="raw rows (default: language.csv)")
    o = parser.parse_args(arguments)
    o.recipe = RECIPE | o.recipe
    try:
        o.families = [{"gpt2": "gpt2", "llama": "llama"}[name] for name in o.models.split(",")]
        widths = [int(width) for width in o.dense.split(",")]
        pairs = [tuple(map(int, size.split("x"))) for size in o.sizes.split(",") if size]
        o.blocks = [*map(Blocks, widths), *(Blocks(widths[0], depth, leaf) for depth, leaf in pairs)]
    except (KeyError, ValueError):
        parser.error("--models are of gpt2 and llama, --dense widths, --sizes depth x leaf width, as in 3x64,5x64")
    if o.context < 64 or min(o.steps, o.batch, o.layers) < 1 or o.dim < 32 or o.dim % 32:
        parser.error("--context must be at least 64, --dim a multiple of 32, the other sizes at least 1")
    if o.heads is not None and (o.heads < 1 or o.dim % o.heads):
        parser.error(f"--heads must divide --dim, {o.dim}; got {o.heads}")
    o.command = shlex.join(["python", "examples/language.py", *(sys.argv[1:] if arguments is None else arguments)])
    return o


def run(o: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Train, measure and show all models; finished ones are in the file of rows at any time."""
    text = read_text(o.text, o.limit, o.vocabulary, o.context)
    vocabulary = text.tokenizer.get_vocab_size()
    console.print(f"{len(text.train):,} tokens to train on, {o.steps * o.batch * o.context:,} are seen by each model")
    about = bench.about(o.device, o.command, checkout()) | {"device": o.device}
    rows: list[dict[str, Any]] = []
    for family in o.families:
        trained: dict[str, PreTrainedModel] = {}
        for blocks in o.blocks:
            model = trained[blocks.name] = build(family, blocks, vocabulary, o)
            row = {"model": family, "name": blocks.name, "neurons": blocks.neurons, "vocabulary": vocabulary}
            row |= {name: getattr(o, name) for name in ("seed", "steps", "batch", "rate", "dim", "layers", "context")}
            row |= {"width": blocks.width, "depth": blocks.depth, "leaf_width": blocks.leaf_width}
            row["parameters"] = sum(p.numel() for p in model.parameters())
            row["settings"] = json.dumps({"init": o.init} | o.recipe) if blocks.depth is not None else "{}"
            with progress(f"{NAMES[family]}, {blocks.name}", o.steps) as advance:
                rows.append(about | row | train(model, text, o, advance))
            save(o.rows, rows[-1:])
        times = time_all(trained, text, o)
        for row in rows[-len(trained) :]:
            row |= times[row["name"]]
        save(o.rows, rows)
        prompt = "def __init__(self"
        for name, model in trained.items():
            console.print(f"[bold]{NAMES[family]}, {name}:[/bold]", end=" ")
            console.print(repr(continuation(model, text, prompt)), markup=False, highlight=False)
        draw(rows, o.output)
    show(rows, text, console)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    o = options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        run(o, console)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; models that were finished have their rows in {o.rows}.") from None
    where = f"{machine(o.device)}, {torch.get_num_threads()} threads; torch {torch.__version__}"
    console.print(f"{where}. Rows: {o.rows}, picture: {o.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
