"""Tables of trained models: minilm*.csv, language.csv, language_choice.csv and int8_accuracy.csv."""

import json
from collections.abc import Callable, Iterable

from rows import Row, matching, mean, read, table

FAMILIES = {"gpt2": "GPT-2", "llama": "Llama"}
PARTS = [(part, batch) for part in ("blocks", "model") for batch in (1, 32)]


def minilm() -> str:
    return models(read("minilm"))


def minilm_long() -> str:
    """The last row of each size: the one with times, if there is one."""
    return models({tree(row): row for row in read("minilm_long")}.values())


def models(rows: Iterable[Row]) -> str:
    header = ["FFF", "neurons used", "steps", "cosine", "overlap@10"]
    header += [f"{part}, {batch} x 64" for part, batch in PARTS]
    order = sorted(rows, key=lambda row: (-int(row["neurons"]), int(row["depth"]), int(row["steps"])))
    body = []
    for row in order:
        cells = [f"{row['neurons']} of {row['dense_neurons']}", row["steps"]]
        cells.append(f"{float(row['cosine']):.3f} ({float(row['fitted_cosine']):.3f})")
        cells.append(f"{float(row['overlap']):.2f} ({float(row['fitted_overlap']):.2f})")
        # Times that were taken beside other programs say nothing.
        quiet = float(row["other_load"] or 0) < 0.1
        for part, batch in PARTS:
            dense, ours = (row[f"{part}_{batch}_us{which}"] for which in ("_dense", ""))
            cells.append(f"{float(dense) / float(ours):.2f}x" if quiet and dense and ours else "-")
        body.append([tree(row), *cells])
    return table(header, body)


def minilm_controls() -> str:
    """The longest run of each model."""
    header = ["size", "", "neurons used", "FLOPs of a block", "parameters", "steps", "cosine", "overlap@10"]
    longest: dict[tuple[str, str], Row] = {}
    for row in sorted(read("minilm_controls"), key=lambda row: int(row["steps"])):
        longest[row["method"], row["size"]] = row
    order = ["FFF", "FFF int8", "dense", "dense int8", "low rank", "pruned", "int8 weights"]
    body = []
    for row in sorted(
        longest.values(), key=lambda row: ("int8" in row["method"], row["tree"], order.index(row["method"]))
    ):
        whole = row["method"] == "int8 weights"
        cells = ["" if whole else row["tree"], f"{row['method']}, {row['size']}"]
        cells += [f"{float(row['neurons']):.0f}", f"{float(row['flops']) / 1e6:.2f} M"]
        cells += [f"{int(row['parameters']) / 1e6:.1f} M", "" if whole else row["steps"]]
        for name, digits in (("cosine", 4), ("overlap", 2)):
            cell = f"{float(row[f'final_{name}']):.{digits}f}"
            if int(row["steps"]) and row[f"fitted_{name}"]:
                cell += f" ({float(row[f'fitted_{name}']):.{digits}f})"
            cells.append(cell)
        body.append(cells)
    return table(header, body)


def minilm_compare() -> str:
    """Two comparisons: one timed at 1 x 64 tokens, one at 32 x 64 and distilled, whose cosines these are."""
    header = ["", "neurons used", "cosine", *(f"{part}, {batch} x 64" for part, batch in PARTS)]
    found: dict[int, dict[tuple[str, str], Row]] = {1: {}, 32: {}}
    for row in read("minilm_compare"):
        found[32 if "--timed 32x64" in row["command"] else 1][row["method"], row["size"]] = row
    body = []
    for (method, size), row in found[32].items():
        cosine = f"{float(row['quality']):.4f}"
        if row["fitted_quality"]:
            cosine += f" ({float(row['fitted_quality']):.4f})"
        name = f"{method}, {tree(row) if 'FFF' in method else size}"
        column = {"blocks": "block_speedup", "model": "model_speedup"}
        speeds = [f"{float(found[batch][method, size][column[part]]):.2f}x" for part, batch in PARTS]
        body.append([name, f"{float(row['neurons']):.0f}", cosine, *speeds])
    return table(header, body)


def smollm() -> str:
    """SmolLM2-135M and what `fastff compare` made of it, without distillation."""
    header = ["", "fitted to, tokens", "neurons used", "parameters", "perplexity", "blocks", "model"]
    body = []
    for row in read("smollm"):
        fitted = f"{int(row['samples']):,}" if row["method"].startswith(("FFF", "dense")) else ""
        name = f"{row['method']}, {tree(row)}" if "FFF" in row["method"] else row["method"]
        cells = [name, fitted, f"{float(row['neurons']):.0f}", f"{int(row['parameters']) / 1e6:.0f} M"]
        perplexity = float(row["quality"])
        cells.append(f"{perplexity:.1f}" if perplexity < 1e4 else f"{perplexity:.0e}")
        body.append([*cells, *(f"{float(row[f'{part}_speedup']):.1f}x" for part in ("block", "model"))])
    return table(header, body)


def minilm_shared() -> str:
    header = ["neurons used", "tree", "shared neurons", "cosine", "overlap@10"]
    body = []
    for row in sorted(read("minilm_shared"), key=lambda row: (int(row["neurons"]), int(row["shared"]))):
        cells = [row["shared"], f"{float(row['cosine']):.3f}", f"{float(row['overlap']):.2f}"]
        body.append([row["neurons"], f"{row['depth']} x {row['leaf_width']}", *cells])
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


def int8_mnist() -> str:
    """Test accuracy in float32, and in brackets what int8 leaves add to it: means over seeds."""
    rows = matching("int8_accuracy", part="mnist")
    widths, leaves = ({int(row[name]) for row in rows} for name in ("width", "leaf_width"))
    body = []
    for leaf in sorted(leaves, reverse=True):
        cells = []
        for width in sorted(widths):
            seeds = matching("int8_accuracy", part="mnist", width=width, leaf_width=leaf)
            cells.append(f"{mean(seeds, 'float32'):.2f} ({mean(seeds, 'difference'):+.2f})")
        body.append([str(leaf), *cells])
    return table(["leaf width", *(f"w = {width}" for width in sorted(widths))], body)


def int8_minilm() -> str:
    header = ["FFF", "steps", "cosine, float32", "cosine, int8", "difference", "neighbours changed", "FFF layers, MB"]
    order = sorted(matching("int8_accuracy", part="minilm"), key=lambda row: (-int(row["width"]), int(row["steps"])))
    body = []
    for row in order:
        before, after = (int(row[f"bytes_{dtype}"]) / 1e6 for dtype in ("float32", "int8"))
        cells = [row["steps"], f"{float(row['float32']):.4f}", f"{float(row['int8']):.4f}"]
        cells += [f"{float(row['difference']):+.5f}", f"{100 * float(row['changed']):.1f} %"]
        body.append([tree(row), *cells, f"{before:.1f} to {after:.1f}"])
    return table(header, body)


TABLES: dict[str, Callable[[], str]] = {
    "minilm": minilm,
    "minilm-long": minilm_long,
    "minilm-controls": minilm_controls,
    "minilm-compare": minilm_compare,
    "minilm-shared": minilm_shared,
    "smollm": smollm,
    "language": language,
    "language-speed": language_speed,
    "language-choice": language_choice,
    "int8-mnist": int8_mnist,
    "int8-minilm": int8_minilm,
}
