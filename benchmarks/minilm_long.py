"""A long distillation of MiniLM with FFF layers on a GPU: examples/minilm.py with another training loop.

    python examples/minilm.py --pack packed --sentences 168000                                            # here
    python benchmarks/minilm_long.py --model packed --device cuda --tf32 --seconds 260 --save layers      # there
    python benchmarks/minilm_long.py --model packed --restore layers                # here: quality, times on a CPU

"There" needs torch, transformers and this checkout. Encoder, text, fit, comparison and rows are those of
examples/minilm.py, and so are all options that --help does not name, such as --sizes, --steps or --rate. What differs
is the training:

- Larger batches and a higher rate. Rate and end follow the clock (--seconds, for each size), a number of steps
  (--steps), or whichever ends first.
- In every epoch, batches are composed anew, and half of the sentences are new mixtures: a part of a sentence, half the
  time followed by a part of another one.
- In the loss, the inputs of the blocks have 4 times the weight, and padding has none. The variance is about the mean of
  each feature.
- All leaves of a layer run in one batched product. --tf32 lets products round to TF32, except for routing, validation
  and comparison.
- The last 1000 training sentences are for validation, ten times in a run. Held-out text measures the result alone.
"""

import argparse
import contextlib
import copy
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from minilm_controls import examples
from torch import Tensor, nn

import fastff
from fastff.activations import apply
from fastff.bench import rows as bench
from fastff.layer import fff_layers
from fastff.provenance import checkout

minilm = examples()
Row = dict[str, Any]

SETTINGS = ("rate", "batch", "samples", "sentences", "held_out", "seed")
DEFAULTS = "--steps 0 --rate 4e-4 --batch 256 --samples 262144 --sentences 168000 --rows minilm_long.csv"
VALIDATION, CHECKS = 1000, 10  # sentences, and times in a run


@contextlib.contextmanager
def products(kind: str) -> Iterator[None]:
    """Within the block, float32 products round as torch.set_float32_matmul_precision says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# The passes


def visited(layer: fastff.FFF, x: Tensor) -> Tensor:
    """The hard pass at x (..., in), for training, as distill_'s, but with all leaves in one batched product.

    Each leaf has a block of equal length, which its samples fill from the start. The host waits for that length.
    """
    flat = x.reshape(-1, layer.in_features)
    with products("highest"):
        leaf = layer.route(flat)
    one_hot = F.one_hot(leaf, layer.num_leaves)
    place = (one_hot.cumsum(0) - 1).gather(1, leaf.unsqueeze(1)).squeeze(1)  # of a sample among those of its leaf
    room = -(-int(one_hot.sum(0).max()) // 32) * 32
    slot = leaf * room + place
    blocks = flat.new_zeros(layer.num_leaves * room, layer.in_features).index_copy(0, slot, flat)
    blocks = blocks.unflatten(0, (-1, room))  # (leaves, room, in)
    hidden = apply(layer.activation, torch.baddbmm(layer.leaf_in_bias.unsqueeze(1), blocks, layer.leaf_in_weight.mT))
    out = torch.baddbmm(layer.leaf_out_bias.unsqueeze(1), hidden, layer.leaf_out_weight)  # (leaves, room, out)
    return out.flatten(0, 1).index_select(0, slot).reshape(*x.shape[:-1], layer.out_features)


class Pair:
    """A BERT encoder and its converted copy, which share all weights but the blocks'."""

    def __init__(self, dense: Any, layers: Sequence[fastff.FFF]) -> None:
        self.dense, self.layers, self.heads = dense, layers, dense.config.num_attention_heads
        self.qkv = []
        for layer in dense.encoder.layer:
            parts = [getattr(layer.attention.self, name) for name in ("query", "key", "value")]
            self.qkv.append((torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])))

    def run(self, x: Tensor, there: Tensor, converted: bool) -> tuple[list[Tensor], Tensor]:
        """The inputs of all blocks and the last states, from embedded tokens; there: where tokens are."""
        mask = torch.zeros(there.shape, device=x.device).masked_fill_(~there, -math.inf)
        mask = mask[:, None, None].expand(-1, 1, there.shape[1], -1)  # (batch, 1, tokens, tokens)
        seen = []
        for i, layer in enumerate(self.dense.encoder.layer):
            q, k, v = F.linear(x, *self.qkv[i]).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            x = layer.attention.output(mixed, x)
            seen.append(x)
            y = visited(self.layers[i], x) if converted else layer.output.dense(layer.intermediate(x))
            x = layer.output.LayerNorm(y + x)
        return seen, x

    def loss(self, ids: Tensor, there: Tensor, inputs: float) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its parts: 1 - cosine, drift of the last states and, with weight `inputs`, of all
        blocks' inputs on average."""
        weight, count = there.unsqueeze(2).float(), there.sum()

        def drift(ours: Tensor, theirs: Tensor) -> Tensor:
            variance = ((theirs - (theirs * weight).sum((0, 1)) / count) * weight).square().sum()
            return ((ours - theirs) * weight).square().sum() / variance

        with torch.no_grad():
            start = self.dense.embeddings(ids)
            theirs, last = self.run(start, there, converted=False)
        ours, last_ours = self.run(start, there, converted=True)
        far = 1 - F.cosine_similarity(*((x * weight).sum(1) / weight.sum(1) for x in (last_ours, last))).mean()
        parts = [far, drift(last_ours, last), sum(map(drift, ours, theirs)) / len(ours)]
        return parts[0] + parts[1] + inputs * parts[2], torch.stack([p.detach() for p in parts])


# Text


def endless(sentences: list[list[int]], size: int, augment: float, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of sentences of similar length, composed anew in every epoch: token ids, and where tokens are."""
    lengths = torch.tensor([len(one) for one in sentences])
    flat = torch.zeros(len(sentences), minilm.TOKENS, dtype=torch.long)
    flat[torch.arange(minilm.TOKENS) < lengths.unsqueeze(1)] = torch.tensor([t for one in sentences for t in one])
    own = flat.to(device), lengths.to(device)
    while True:
        ids, lengths = mixtures(*own, augment)
        order = (lengths + torch.rand(len(lengths), device=device)).argsort()
        parts = order[: len(order) // size * size].view(-1, size)
        longest = lengths[parts].amax(1).tolist()
        for i in torch.randperm(len(parts)).tolist():
            width = min(minilm.TOKENS, -(-longest[i] // 8) * 8)  # attention's kernels like multiples of 8
            yield ids[parts[i], :width], torch.arange(width, device=device) < lengths[parts[i]].unsqueeze(1)


def mixtures(ids: Tensor, lengths: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Sentences (count, TOKENS) and their lengths, this share of them mixed. First and last token stay the same."""
    if not share:
        return ids, lengths
    count, tokens = ids.shape

    def draw() -> Tensor:
        return torch.rand(count, device=ids.device)

    other = torch.randint(count, (count,), device=ids.device)
    inner, inner_other = lengths - 2, lengths[other] - 2  # between the first token and the last
    joined = draw() < 0.5
    part = ((0.3 + 0.7 * draw()) * inner).long().clamp_min(1)
    first = (draw() * (inner - part + 1)).long()
    part_other = (((0.3 + 0.7 * draw()) * inner_other).long() * joined).minimum(tokens - 2 - part)
    first_other = (draw() * (inner_other - part_other + 1)).long()
    part, first, part_other, first_other = (x.unsqueeze(1) for x in (part, first, part_other, first_other))
    at, size = torch.arange(tokens, device=ids.device).expand(count, -1), part + part_other + 2
    made = ids.gather(1, (first + at).clamp(max=tokens - 1))  # at 1 is the first of the part
    made = torch.where(at > part, ids[other].gather(1, (first_other + at - part).clamp(0, tokens - 1)), made)
    made[:, 0] = ids[:, 0]
    made = torch.where(at == size - 1, ids.gather(1, lengths.unsqueeze(1) - 1), made).masked_fill(at >= size, 0)
    changed = draw() < share
    return torch.where(changed.unsqueeze(1), made, ids), torch.where(changed, size.squeeze(1), lengths)


# Training


def train_(
    model: nn.Module, dense: nn.Module, ids: list[list[int]], validate: Callable[[], Any], o: argparse.Namespace
) -> list[dict[str, float]]:
    """Train all leaves; returns, for each validation, the mean losses since the last one and the quality."""
    for p in [*model.parameters(), *dense.parameters()]:
        p.requires_grad_(False)
    layers = [*fff_layers(model).values()]
    leaves = [p.requires_grad_() for layer in layers for p in layer.leaf_parameters()]
    pair, source = Pair(dense, layers), endless(ids, o.batch, o.augment, o.device)
    optimizer = torch.optim.Adam(leaves, lr=o.rate, fused=True)
    history: list[dict[str, float]] = []
    begin, done, share, sums, since = time.time(), 0, 0.0, torch.zeros(3, device=o.device), 0
    while share < 1:
        # A warm-up over a twentieth of the run, from more than 0, then a cosine down to 0.
        factor = min(1.0, 20 * share + 1 / (o.steps or 5000)) * (1 + math.cos(math.pi * share)) / 2
        optimizer.param_groups[0]["lr"] = o.rate * factor
        with products("high" if o.tf32 else "highest"):
            loss, parts = pair.loss(*next(source), o.inputs)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        sums, done, since = sums + parts, done + 1, since + 1
        seconds = time.time() - begin
        share = max(done / o.steps if o.steps else 0.0, seconds / o.seconds if o.seconds else 0.0)
        if share * CHECKS >= len(history) + 1:
            row = dict(zip(("embeddings", "states", "inputs"), (sums / since).tolist(), strict=True))
            sums, since = torch.zeros_like(sums), 0
            if not all(map(math.isfinite, row.values())):
                raise SystemExit(f"the loss is not finite after {done} steps: {row}. Pass a lower --rate.")
            row["cosine"], _, row["overlap"] = validate()
            history.append({"steps": done, "seconds": seconds} | row)
            minilm.say(", ".join(f"{name} {value:.5g}" for name, value in history[-1].items()))
    return history


# Layers that travel


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The FFF layers, for a file: leaf weights in float16, biases and trees in float32."""
    named = [(f"{name}.{key}", p) for name, one in fff_layers(model).items() for key, p in one.named_parameters()]
    return {name: p.detach().to("cpu", torch.float16 if p.dim() == 3 else p.dtype) for name, p in named}


def restore_(model: nn.Module, path: Path) -> Row:
    """Set the FFF layers of a converted model; returns the row of their training."""
    if not path.exists():
        raise SystemExit(f"there is no {path}. Train the layers first, with --save {path.parent} --sizes {path.stem}.")
    found = torch.load(path)
    if found["layers"].keys() != weights(model).keys():
        raise SystemExit(f"{path} has the layers of another model, {found['row']['model']}. Pass it as --model.")
    model.load_state_dict(found["layers"], strict=False)
    return found["row"]


# The run


def run(o: argparse.Namespace) -> None:
    dense, text = minilm.prepare(o)
    dense = dense.to(o.device)
    held = minilm.batches(text.held_out, 32, text.pad, device=o.device)
    original = minilm.embed(dense, held)
    ids, kept = text.train[:-VALIDATION], text.train[-VALIDATION:]
    if len(ids) < o.batch and not o.restore:
        raise SystemExit(f"{len(ids)} training sentences make no batch of {o.batch}. Pass more --sentences.")
    for depth, leaf_width in o.pairs:
        size, begin = f"{depth}x{leaf_width}", time.perf_counter()
        row: Row = {"model": minilm.name_of(o.model), "depth": depth, "leaf_width": leaf_width}
        row |= {name: getattr(o, name) for name in SETTINGS}
        if o.restore:
            model = copy.deepcopy(dense)
            report = fastff.replace_(model, depth=depth, leaf_width=leaf_width, init="random")
            row = restore_(model, o.restore / f"{size}.pt") | {"seconds": None}
            full = minilm.full_batch(text.held_out, max(minilm.TIMED) + 4, o.device)
            row |= minilm.times(dense, model, report, [full], o.budget) if o.budget else {}
        else:
            data = minilm.batches(ids, 32, text.pad, o.seed, o.device)
            model, report = minilm.operate(dense, (depth, leaf_width), data, o)
            row["fitted_cosine"], _, row["fitted_overlap"] = minilm.compare(model, original, held)
            minilm.say(f"{size}: fitted, cosine {row['fitted_cosine']:.4f}")
            check = minilm.batches(kept, 32, text.pad, device=o.device)
            validate = partial(minilm.compare, model, minilm.embed(dense, check), check)
            row["steps"] = train_(model, dense, ids, validate, o)[-1]["steps"]
            row["seconds"] = time.perf_counter() - begin
            neurons = (report.neurons_after, report.neurons_before)
            row["neurons"], row["dense_neurons"] = (count // len(report.replaced) for count in neurons)
            row["parameters"] = report.parameters_after
        row["cosine"], row["lowest_cosine"], row["overlap"] = minilm.compare(model, original, held)
        row |= bench.about(o.device, o.command, checkout()) | {"device": o.device}
        row["tf32"] = o.tf32 if o.device == "cuda" else ""
        minilm.append(o.rows, row)
        minilm.say(f"{size}: {row['steps']} steps, cosine {row['cosine']:.5f}, overlap {row['overlap']:.4f}")
        if o.save:
            o.save.mkdir(parents=True, exist_ok=True)
            torch.save({"row": minilm.words(row), "layers": weights(model)}, o.save / f"{size}.pt")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--seconds", type=float, default=0.0, help="time for training, after the fit; 0: by --steps alone")
    add("--inputs", type=float, default=4.0, help="weight of the inputs of all blocks (default: 4)")
    add("--augment", type=float, default=0.5, help="share of sentences that are mixtures (default: 0.5)")
    add("--tf32", action="store_true", help="TF32 products in training, on a GPU")
    add("--save", type=Path, help="folder to write the trained layers into")
    add("--restore", type=Path, help="no training: quality and times of the layers in this folder of --save")
    own, others = parser.parse_known_args(arguments)
    o = argparse.Namespace(**vars(minilm.options([*DEFAULTS.split(), *others])) | vars(own))
    for name in ("model", "restore"):
        if (path := getattr(o, name)) and not path.is_dir():
            parser.error(f"--{name} needs a folder; {path} is none. The commands at the top of --help make it.")
    if not o.restore and max(o.steps, o.seconds) <= 0:
        parser.error("training needs an end: pass --seconds, --steps or both.")
    o.command = shlex.join(["python", "benchmarks/minilm_long.py", *arguments])
    if o.device == "cuda" and not o.restore:
        fastff.backend("aten")  # validation by torch operations: nothing to compile
    run(o)


if __name__ == "__main__":
    main()
