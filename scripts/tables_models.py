"""Tables of the examples: minilm.csv, language.csv and language_choice.csv."""

import json
from collections.abc import Callable

from rows import Row, read, table

FAMILIES = {"gpt2": "GPT-2", "llama": "Llama"}
PARTS = [(part, batch) for part in ("blocks", "model") for batch in (1, 32)]


def minilm() -> str:
    header = ["FFF", "neurons used", "steps", "cosine", "overlap@10"]
    header += [f"{part}, {batch} x 64" for part, batch in PARTS]
    order = sorted(read("minilm"), key=lambda row: (-int(row["neurons"]), int(row["depth"]), int(row["steps"])))
    body = []
    for row in order:
        cells = [f"{row['neurons']} of {row['dense_neurons']}", row["steps"]]
        cells.append(f"{float(row['cosine']):.3f} ({float(row['fitted_cosine']):.3f})")
        cells.append(f"{float(row['overlap']):.2f} ({float(row['fitted_overlap']):.2f})")
        # Times that were taken beside other programs say nothing.
        quiet = float(row["other_load"]) < 0.1
        for part, batch in PARTS:
            dense, ours = (row[f"{part}_{batch}_us{which}"] for which in ("_dense", ""))
            cells.append(f"{float(dense) / float(ours):.2f}x" if quiet and dense and ours else "-")
        body.append([tree(row), *cells])
    return table(header, body)


def tree(row: Row) -> str:
    return f"{1 << int(row['depth'])} leaves of {row['leaf_width']}"


def blocks(row: Row) -> str:
    return f"FFF, {tree(row)}" if row["depth"] else f"dense {row['width']}"


def language() -> str:
    header = ["", "blocks", "neurons used", "parameters", "loss", "soft pass", "perplexity", "bits per byte", "leaves"]
    body = []
    for row in read("language"):
        leaves = f"{row['leaves_used']} of {1 << int(row['depth'])}" if row["depth"] else ""
        cells = [row["neurons"], f"{int(row['parameters']) / 1e6:.2f} M", f"{float(row['loss']):.3f}"]
        cells += [f"{float(row['soft_loss']):.3f}" if row["soft_loss"] else "", f"{float(row['perplexity']):.1f}"]
        body.append([FAMILIES[row["model"]], blocks(row), *cells, f"{float(row['bits_per_byte']):.2f}", leaves])
    return table(header, body)


def language_speed() -> str:
    header = ["", "blocks", *(f"{part}, {batch} x 64" for part, batch in PARTS)]
    first = {row["model"]: row for row in reversed(read("language")) if not row["depth"]}
    first |= {row["model"]: row for row in read("language") if row["width"] == "512" and not row["depth"]}
    body = []
    for row in read("language"):
        cells = []
        for part, batch in PARTS:
            ours, dense = (float(one[f"{part}_{batch}_us"]) for one in (row, first[row["model"]]))
            cells.append(f"{ours / 1e3:.2f} ms ({dense / ours:.1f}x)")
        body.append([FAMILIES[row["model"]], blocks(row), *cells])
    return table(header, body)


CHOICES: dict[str, dict[str, object]] = {
    '`decision="soft"`, `temperature=(1, 30)`, `balance=0.1`, `init="random"`': {},
    "`temperature=(1, 10)`: chosen": {"temperature": [1.0, 10.0]},
    "`temperature=(1, 100)`": {"temperature": [1.0, 100.0]},
    "`temperature=(3, 30)`": {"temperature": [3.0, 30.0]},
    "`balance=0.01`": {"balance": 0.01},
    "`balance=0.03`": {"balance": 0.03},
    "`balance=0.3`": {"balance": 0.3},
    "`logit_std=2.0`": {"logit_std": 2.0},
    '`decision="straight_through"`': {"decision": "straight_through", "temperature": [1.0, 1.0]},
}


def language_choice() -> str:
    """Validation loss of an FFF (in the file: 3x128, depth and leaf width) at a rate of 3e-3, and of dense blocks."""
    rows = [row for row in read("language_choice") if row["rate"] == "3e-3" and row["heads"] == "4"]

    def loss(family: str, name: str, init: str, recipe: dict[str, object] | None) -> str:
        for row in rows:
            same = (row["model"], row["blocks"], row["init"]) == (family, name, init)
            if same and (recipe is None or json.loads(row["recipe"]) == recipe):
                return row["validation_loss"]
        raise LookupError(f"results/language_choice.csv has no row for {family}, {name}, {init!r}, {recipe}.")

    base = {"decision": "soft", "temperature": [1.0, 30.0], "noise": 0.0, "balance": 0.1}
    lines = [(name, "FFF 3x128", "random", base | changes) for name, changes in CHOICES.items()]
    lines.append(('`init="dense"`', "FFF 3x128", "dense", base))
    lines += [(f"dense {width}", f"dense {width}", "", None) for width in (1024, 128)]
    body = [[name, *(loss(family, *rest) for family in FAMILIES)] for name, *rest in lines]
    return table(["FFF, 8 leaves of 128, changed by", *FAMILIES.values()], body)


TABLES: dict[str, Callable[[], str]] = {
    "minilm": minilm,
    "language": language,
    "language-speed": language_speed,
    "language-choice": language_choice,
}
