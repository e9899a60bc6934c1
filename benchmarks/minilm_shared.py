"""A part that every token uses beside its leaf, in MiniLM: does it bring anything, at the same number of neurons?

    python benchmarks/minilm_shared.py --output results/minilm_shared.csv
    python benchmarks/minilm_shared.py --sizes 2x12+0,2x8+4 --samples 500 --sentences 200 --held-out 40      # a try

A size 4x144+48 is a tree of depth 4 with leaves of 144 neurons beside 48 shared ones. Shared are the neurons that
matter in all leaves: those with the largest share of a leaf's variance, in the mean over the leaves. The tree is fitted
to what is left of the block, the shared output weights then to what the tree misses. Embeddings of held-out text are
compared with the original's right after the fit. Model and text are those of examples/minilm.py. Rows that the file has
are not run again.
"""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from csv_rows import about, append, read
from minilm_controls import examples
from torch import Tensor, nn

import fastff
from fastff.backends.reference import leaf_hidden
from fastff.surgery.blocks import Block
from fastff.surgery.choose import choose
from fastff.surgery.closeness import hold_out
from fastff.surgery.controls import first_linears
from fastff.surgery.fit import dense_layer
from fastff.surgery.inputs import inputs_of
from fastff.surgery.leaves import fit_leaves_, principal_tree_

SETTINGS = ("samples", "sentences", "held_out", "seed")
RIDGE = 1e-3  # as for leaves


class Shared(nn.Module):
    """A tree, and neurons beside it that every input uses."""

    def __init__(self, tree: fastff.FFF, beside: fastff.FFF) -> None:
        super().__init__()
        self.tree, self.beside = tree, beside

    def forward(self, x: Tensor) -> Tensor:
        return self.tree(x) + self.beside(x)


def part(dense: fastff.FFF, neurons: Tensor) -> fastff.FFF:
    """Some neurons of a dense layer, as a layer without output biases."""
    made = fastff.FFF(
        dense.in_features, dense.out_features, depth=0, leaf_width=len(neurons), activation=dense.activation
    )
    for name in ("leaf_in_weight", "leaf_in_bias", "leaf_out_weight"):
        getattr(made, name).copy_(getattr(dense, name)[:, neurons])
    made.leaf_out_bias.zero_()
    return made.eval()


@torch.no_grad()
def fit(block: Block, depth: int, leaf_width: int, shared: int, x: Tensor) -> nn.Module:
    """A tree with a shared part, fitted to the block at its inputs x (samples, in)."""
    dense = dense_layer(block)
    tree = fastff.FFF(
        block.in_features, block.out_features, depth=depth, leaf_width=leaf_width, activation=block.activation
    ).eval()
    principal_tree_(tree, x)
    if not shared:
        fit_leaves_(tree, dense, x)
        return tree
    leaf, weight = tree.route(x), dense.leaf_out_weight[0].square().sum(1)  # (width,)
    shares = []
    for j in range(tree.num_leaves):
        size = leaf_hidden(x[leaf == j], dense.leaves, dense.activation)[:, 0].var(0) * weight
        shares.append(size / size.sum())
    order = torch.stack(shares).mean(0).argsort(descending=True)
    beside, rest = part(dense, order[:shared]), part(dense, order[shared:])
    rest.leaf_out_bias.copy_(dense.leaf_out_bias)
    fit_leaves_(tree, rest, x)
    hidden = leaf_hidden(x, beside.leaves, beside.activation)[:, 0]  # (samples, shared)
    missing = rest(x) - tree(x)
    hidden, missing = (hidden - hidden.mean(0)).double(), (missing - missing.mean(0)).double()
    gram = hidden.mT @ hidden
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    beside.leaf_out_weight[0] += torch.linalg.solve(gram, hidden.mT @ missing).float()
    return Shared(tree, beside)


def measure(sizes: Sequence[tuple[int, int, int]], o: argparse.Namespace) -> None:
    minilm = examples()
    dense, text = minilm.prepare(o)
    train, held = minilm.batches(text.train, 32, text.pad, seed=o.seed), minilm.batches(text.held_out, 32, text.pad)
    original = minilm.embed(dense, held)
    blocks, _ = choose(dense, None, None)
    inputs = inputs_of(dense, first_linears(dense, blocks), train, o.samples)
    for depth, leaf_width, shared in sizes:
        torch.manual_seed(o.seed)
        model = copy.deepcopy(dense)
        report = fastff.replace_(model, depth=depth, leaf_width=leaf_width, init="random")
        for block in blocks:
            made = fit(block, depth, leaf_width, shared, hold_out(inputs[block.name])[1])
            owner, _, name = block.name.rpartition(".")
            setattr(model.get_submodule(owner), name, made)
        cosine, lowest, overlap = minilm.compare(model.eval(), original, held)
        row: dict[str, object] = {"depth": depth, "leaf_width": leaf_width, "shared": shared}
        row |= {"neurons": depth + leaf_width + shared, "blocks": len(report.replaced)}
        row |= {name: getattr(o, name) for name in SETTINGS}
        row |= {"cosine": round(cosine, 6), "lowest": round(lowest, 6), "overlap": round(overlap, 6)}
        append(o.output, [row | about("cpu", "python benchmarks/minilm_shared.py")])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", default="4x192+0,4x144+48,5x95+96,4x376+0,4x280+96,5x185+190", help="depth x leaf width + shared")
    add("--samples", type=int, default=32768)
    add("--sentences", type=int, default=24000)
    add("--held-out", type=int, default=500)
    add("--seed", type=int, default=0)
    add("--model", type=Path, help="folder of another sentence encoder with mean pooling")
    add("--output", type=Path, default=Path("minilm_shared.csv"), help="rows (default: minilm_shared.csv)")
    o = parser.parse_args(arguments)
    wanted = [tuple(int(n) for n in size.replace("+", "x").split("x")) for size in o.sizes.split(",")]
    settings = {name: str(getattr(o, name)) for name in SETTINGS}
    rows = [row for row in read(o.output) if all(row[name] == value for name, value in settings.items())]
    done = {tuple(int(row[name]) for name in ("depth", "leaf_width", "shared")) for row in rows}
    if missing := [size for size in wanted if size not in done]:
        measure(missing, o)


if __name__ == "__main__":
    main()
