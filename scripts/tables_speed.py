"""Tables of times: inference.csv, large_layers.csv, cpu_layers.csv, train_step.csv and ensemble.csv."""

import statistics
from collections.abc import Callable

from rows import Row, matching, micro, one, read, table, times

from fastff.bench.presets import TABLE1, TABLE3

CPU_DEPTHS, CPU_BATCHES, LEAF = (3, 5, 8, 10, 13), (1, 256, 2048), 32
GPU_CELLS = ((5, 256), (5, 2048), (5, 16384), (8, 256), (8, 2048), (8, 16384), (12, 2048), (15, 256))
GPU_DEPTHS = (5, 8, 12, 15)
BACKEND = {"FF": "", "gather": "", "MoE": "triton", "FFF": "auto"}


def measured(preset: str, model: str, **values: object) -> Row | None:
    """The last row of a preset of `fastff bench`; None where it was not measured."""
    wanted = {key: str(value) for key, value in values.items()} | {"model": model, "status": "ok"}
    wanted["backend"] = BACKEND[model]
    found = [row for row in read("inference") if wanted.items() <= row.items() and row["command"].startswith(preset)]
    return found[-1] if found else None


def us(preset: str, model: str, **values: object) -> float:
    row = measured(preset, model, **values)
    if row is None:
        raise LookupError(f"results/inference.csv has no {model} of {preset} with {values}.")
    return float(row["median_us"])


def neurons(depth: int, leaf_width: int = LEAF) -> str:
    return f"{depth + leaf_width} of {leaf_width << depth}"


def cpu_speedup(depth: int, batch: int) -> str:
    row = measured("fastff bench regimes", "FFF", device="cpu", depth=depth, batch=batch, dtype="float32")
    return times(float(row["speedup_dense"])) if row and row["speedup_dense"] else "-"


def gpu_speedup(depth: int, batch: int = 256) -> str:
    row = measured("fastff bench blocks", "FFF", device="cuda", depth=depth, batch=batch)
    return times(float(row["speedup_dense"])) if row else "-"


def speed() -> str:
    header = ["depth", "neurons used", *(f"CPU, batch {batch}" for batch in CPU_BATCHES), "H200, batch 256"]
    body = [
        [str(depth), neurons(depth), *(cpu_speedup(depth, batch) for batch in CPU_BATCHES), gpu_speedup(depth)]
        for depth in CPU_DEPTHS
    ]
    return table(header, body)


def speed_cpu() -> str:
    header = ["depth", "neurons used", *(f"batch {batch}" for batch in CPU_BATCHES)]
    body = [[str(d), neurons(d), *(cpu_speedup(d, batch) for batch in CPU_BATCHES)] for d in CPU_DEPTHS]
    return table(header, body)


def speed_gpu() -> str:
    """Microseconds by depth and batch; the last column is batch 1, over the depths."""
    cells = [f"{depth}, {batch}" for depth, batch in GPU_CELLS]
    body = []
    for dtype in ("bfloat16", "float32"):
        for model in ("FFF", "FF", "MoE"):
            what = {"device": "cuda", "dtype": dtype, "in": 768}
            line = [us("fastff bench regimes", model, depth=d, batch=b, **what) for d, b in GPU_CELLS]
            single = [us("fastff bench regimes", model, depth=d, batch=1, **what) for d in GPU_DEPTHS]
            name = "dense" if model == "FF" else model
            body.append([dtype, name, *map(micro, line), f"{micro(min(single))} to {micro(max(single))}"])
    return table(["dtype", "layer", *cells, f"{GPU_DEPTHS[0]} to {GPU_DEPTHS[-1]}, 1"], body)


def speed_large() -> str:
    """The table of large_layers.py, in microseconds."""
    models = ("FF", "FFF", "same neurons", "MoE", "grouped_mm")
    header = ["in = out", "leaf width", "depth", "activation", "batch", "dense", "FFF", "same neurons", "MoE"]
    header += ["grouped_mm", "FFF over dense", "times the byte floor"]
    body = []
    for row in matching("large_layers", part="table", model="FFF"):
        found = [one("large_layers", part="table", model=model, cell=row["cell"])["median_us"] for model in models]
        size = [row[name] for name in ("in", "leaf_width", "depth", "activation", "batch")]
        ratios = [times(float(row["speedup_dense"])), times(float(row["times_floor"]))]
        body.append([*size, *(micro(float(found_us)) for found_us in found), *ratios])
    return table(header, body)


def speed_sweep() -> str:
    """FFF over dense at the random sizes of large_layers.py: by dtype."""
    body = []
    for dtype in ("bfloat16", "float16", "float32"):
        rows = [row for row in matching("large_layers", part="sweep", model="FFF", dtype=dtype) if row["speedup_dense"]]
        ratios = [float(row["speedup_dense"]) for row in rows]
        floors = [float(row["times_floor"]) for row in rows]
        slower = sum(ratio < 1 for ratio in ratios)
        shown = [statistics.median(ratios), min(ratios), statistics.median(floors)]
        body.append([dtype, str(len(rows)), str(slower), *map(times, shown)])
    return table(["dtype", "sizes", "slower than dense", "median", "worst", "median over the byte floor"], body)


def speed_llama() -> str:
    """A whole Llama with even trees over the dense one, by how it is called."""
    modes = {"eager": "eager", "graph": "CUDA graph", "compile": "compiled", "reduce-overhead": "compiled, CUDA graph"}
    body = []
    for tokens in ((1, 1), (16, 1), (1, 512), (16, 512)):
        line = []
        for mode in modes:
            cell = {"part": "llama", "mode": mode, "batch": tokens[0], "tokens": tokens[1]}
            if (mode, tokens) == ("reduce-overhead", (16, 512)):
                line.append("-")  # not measured
                continue
            rows = one("large_layers", **cell, model="FF"), one("large_layers", **cell, spread="even")
            dense, tree = (float(row["median_us"]) / 1e3 for row in rows)
            line.append(f"{dense:.2f} to {tree:.2f}: {times(dense / tree)}")
        body.append([f"{tokens[0]} x {tokens[1]}", *line])
    return table(["tokens", *modes.values()], body)


def speed_skew() -> str:
    """Uneven leaves, in microseconds."""
    body = []
    for even in matching("large_layers", part="skew", spread="even"):
        cell = {"part": "skew", "cell": even["cell"]}
        others = [one("large_layers", **cell, spread=spread) for spread in ("zipf", "one leaf")]
        size = [f"{even['in']}, {even['leaf_width']}, {even['depth']}, {even['activation']}", even["batch"]]
        ratios = [times(float(row["times_even"])) for row in others]
        body.append([*size, *(micro(float(row["median_us"])) for row in (even, *others)), *ratios])
    header = [
        "in = out, leaf width, depth",
        "batch",
        "even",
        "Zipf",
        "one leaf",
        "Zipf over even",
        "one leaf over even",
    ]
    return table(header, body)


def speed_int8() -> str:
    """int8 and bfloat16 leaves over float32 on a CPU."""
    body = []
    for threads in (1, 2):
        for depth in (8, 10):
            for batch in (1, 256):
                cell = {"part": "int8", "depth": depth, "batch": batch, "threads": threads}
                found = {m: one("cpu_layers", **cell, model=m) for m in ("FFF", "FFF int8", "FFF bfloat16")}
                us_of = [micro(float(row["median_us"])) for row in found.values()]
                ratios = [times(float(found[m]["over_float32"])) for m in ("FFF int8", "FFF bfloat16")]
                body.append([str(threads), str(depth), str(batch), *us_of, *ratios])
    header = ["threads", "depth", "batch", "float32", "int8", "bfloat16", "int8 over float32", "bfloat16 over float32"]
    return table(header, body)


def speed_cpu_large() -> str:
    """4096 wide on a CPU, beside dense layers: microseconds."""
    body = []
    for row in matching("cpu_layers", part="dense", model="FFF", threads=1, **{"in": 4096}):
        other = [one("cpu_layers", part="dense", size=row["size"], threads=1, model=m) for m in ("FF", "same neurons")]
        shown = [micro(float(r["median_us"])) if r["median_us"] else "-" for r in (row, *other)]
        ratios = [times(float(row[name])) if row[name] else "-" for name in ("over_dense", "over_same_neurons")]
        size = [f"{row['leaf_width']}, {row['depth']}, {row['activation']}", row["dtype"], row["batch"]]
        body.append([*size, *shown, *ratios])
    header = ["leaf width, depth", "dtype", "batch", "FFF", "dense", "same neurons", "over dense", "over same neurons"]
    return table(header, body)


def speed_blocks() -> str:
    """The paper's figure: time over the number of blocks."""
    body = []
    for depth in range(1, 16):
        dense, gather, moe, fff = (
            us("fastff bench blocks", model, depth=depth, batch=256) for model in ("FF", "gather", "MoE", "FFF")
        )
        ratios = [times(dense / fff), times(moe / fff)]
        body.append([f"{1 << depth}", *map(micro, (dense, gather, moe, fff)), *ratios])
    return table(["blocks", "dense", "gather", "MoE", "FFF", "FFF over dense", "FFF over MoE"], body)


def table1(cell: Callable[[int, int, int, list[float]], str]) -> str:
    """The sizes of Table 1: cell(inputs, leaf width, depth, the paper's speed-up for each data set of these inputs)."""
    widths = (16, 32, 64, 128)
    body = []
    for inputs, names in ((256, ["USPS"]), (784, ["MNIST", "FashionMNIST"])):
        for leaf in (8, 4, 2, 1):
            paper = [[TABLE1[name][leaf][i] for name in names] for i in range(len(widths))]
            depths = [(width // leaf).bit_length() - 1 for width in widths]
            line = [cell(inputs, leaf, depth, theirs) for depth, theirs in zip(depths, paper, strict=True)]
            body.append([", ".join(names), str(leaf), *line])
    return table(["data set", "leaf width", *(f"width {width}" for width in widths)], body)


def speed_table1() -> str:
    """Speed-ups at the sizes of Table 1 on a CPU; in brackets the paper's, on a GPU."""

    def cell(inputs: int, leaf: int, depth: int, theirs: list[float]) -> str:
        row = measured("fastff bench table1", "FFF", **{"in": inputs, "leaf_width": leaf, "depth": depth})
        return f"{times(float(row['speedup_dense']))} ({theirs[0]:g})" if row else "-"

    return table1(cell)


def on_gpu(inputs: int, leaf: int, depth: int) -> list[str]:
    """The speed-up of a layer of the paper's tables on the H200: in CUDA graphs, and called from Python."""
    cell = {"part": "eager", "model": "FFF", "in": inputs, "leaf_width": leaf, "depth": depth}
    return [times(float(one("large_layers", **cell, mode=mode)["speedup_dense"])) for mode in ("graph", "eager")]


def speed_table1_gpu() -> str:
    """Speed-ups at the sizes of Table 1 on the H200, in CUDA graphs and from Python; in brackets the paper's."""
    return table1(lambda i, leaf, depth, theirs: f"{', '.join(on_gpu(i, leaf, depth))} ({max(theirs):g})")


def speed_table3() -> str:
    body = []
    for leaf, theirs in TABLE3.items():
        row = measured("fastff bench table3", "FFF", device="cpu", leaf_width=leaf)
        assert row is not None
        gpu = on_gpu(128, leaf, (128 // leaf).bit_length() - 1)
        body.append([str(leaf), times(float(row["speedup_dense"])), *gpu, f"{theirs:.2f}x"])
    return table(["leaf width", "CPU", "H200, CUDA graph", "H200, from Python", "in the paper, on a GPU"], body)


def train_step() -> str:
    """Forward and backward over a dense layer of the same training width, batch 256."""
    header = ["leaf width, depth", "CPU, float32: time", "memory", "H200, bfloat16, compiled: time", "memory"]
    body = []
    for leaf, depth in ((32, 5), (8, 7), (32, 7)):
        size = {"leaf_width": leaf, "depth": depth, "batch": 256, "model": "fastff"}
        cpu = one("train_step", **size, dtype="float32", compile=False)
        gpu = one("train_step", **size, dtype="bfloat16", compile=True)
        ratios = [f"{float(row[name]):.2f}x" for row in (cpu, gpu) for name in ("ratio", "memory_ratio")]
        body.append([f"{leaf}, {depth}", *ratios])
    other = one("train_step", model="fastfeedforward 0.2.1")
    size = f"{other['leaf_width']}, {other['depth']}, `{other['model'].replace(' ', '` ')}"
    body.append([size, times(float(other["ratio"])), times(float(other["memory_ratio"])), "", ""])
    return table(header, body)


def ensemble() -> str:
    rows = [row for row in read("ensemble") if row["seeds"] == "10"]
    names = {"FF": "dense, {width} neurons", "FFF": "FFF, leaves of {leaf_width}"}
    body = [[names[row["model"]].format(**row), row["median_s"], f"{float(row['ratio']):.2f}x"] for row in rows]
    return table(["10 seeds of", "seconds", "over one seed"], body)


TABLES = {
    "speed": speed,
    "speed-cpu": speed_cpu,
    "speed-gpu": speed_gpu,
    "speed-large": speed_large,
    "speed-sweep": speed_sweep,
    "speed-llama": speed_llama,
    "speed-skew": speed_skew,
    "speed-int8": speed_int8,
    "speed-cpu-large": speed_cpu_large,
    "speed-blocks": speed_blocks,
    "speed-table1": speed_table1,
    "speed-table1-gpu": speed_table1_gpu,
    "speed-table3": speed_table3,
    "train-step": train_step,
    "ensemble": ensemble,
}
