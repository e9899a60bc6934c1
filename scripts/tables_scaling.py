"""Tables of the cost model of sampled training over ranks: predictions, and what they were compared with."""

from rows import one, read, table

from fastff.bench.scaling import H200, Machine, Step, seconds

SIZE = {"leaf_width": 32, "in_features": 768, "out_features": 768}
# Depth, ranks, and whether ranks share out the nodes, too.
PREDICTED = ((14, 1, False), (17, 8, False), (20, 64, False), (20, 64, True), (20, 256, False))
CPU_BYTES = 10e9  # bytes a second of one thread: an assumption


def prediction() -> str:
    """16,384 samples per rank in bfloat16."""
    body = []
    for depth, ranks, split in PREDICTED:
        step = Step(depth, **SIZE, batch=16384, ranks=ranks, itemsize=2, split_nodes=split)
        parts = {name: 1e3 * value for name, value in seconds(step, H200).items()}
        leaves = 4 * step.leaves * step.leaf_bytes
        cells = [f"2^{depth}", f"{ranks}{', nodes split (not built)' if split else ''}"]
        cells += [f"{leaves / 1e9:.1f}", f"{(step.resident - leaves) / 1e9:.1f}"]
        cells += [f"{step.exchanged / 1e6:.0f}" if ranks > 1 else "0", f"{step.reduced / 1e6:,.0f}"]
        cells += [f"{parts[name]:.1f}" for name in ("memory", "all-to-all", "all-reduce")]
        body.append([*cells, f"{sum(parts.values()):.0f}"])
    header = ["leaves", "GPUs", "GB leaves", "GB nodes", "MB all-to-all", "MB all-reduce"]
    return table([*header, "ms memory", "ms all-to-all", "ms all-reduce", "ms in all"], body)


def counted() -> str:
    """Bytes and rows, counted and predicted."""
    body = []
    for row in read("scaling"):
        size = f"depth {row['depth']}, leaf width {row['leaf_width']}, {row['in']} → {row['out']}"
        size += f", alternatives {row['alternatives']}"
        exact = row["what"].startswith("bytes")
        if not exact:
            size = (
                f"{2 ** int(row['depth'])} leaves, {'even' if row['exponent'] == '0.0' else 'Zipf ' + row['exponent']}"
            )
        cells = [f"{int(row[name]):,}" if exact else f"{float(row[name]):.2f}" for name in ("counted", "predicted")]
        body.append([row["what"], f"{size}, batch {row['batch']}", row["ranks"], *cells])
    return table(["what", "size", "ranks", "counted", "predicted"], body)


def small() -> str:
    """One rank with LazyAdamW, beside results/sampled_step.csv."""
    dense = one("sampled_step", depth=8, way="dense")
    width = int(dense["leaf_width"]) << 8
    flops = 6 * int(dense["batch"]) * width * 2 * int(dense["features"]) / (float(dense["median_ms"]) / 1e3)
    machine, body = Machine(flops=flops, memory=CPU_BYTES, network=1.0), []
    for depth in (5, 8, 10, 12):
        row = one("sampled_step", depth=depth, way="sampled-mixture-1")
        step = Step(depth, **SIZE, batch=int(row["batch"]), sparse=True)
        peak, time = f"{step.transient / 1e6:.0f}", f"{1e3 * sum(seconds(step, machine).values()):.0f}"
        body.append([str(depth), f"{float(row['peak_mb']):.0f}", peak, f"{float(row['median_ms']):.0f}", time])
    return table(["depth", "peak MB", "predicted", "ms", "predicted"], body)


TABLES = {"scaling": prediction, "scaling-counted": counted, "scaling-small": small}
