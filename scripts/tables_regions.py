"""The table of the page about regions: explore_page.csv."""

from rows import one, table


def explore() -> str:
    """Pages of three trees: how long they take to make, to load and to move in."""
    body = []
    for leaves in (16, 128, 1024):
        row = one("explore_page", leaves=leaves, inputs=20000)
        size = f"{int(row['bytes']) / 1e6:.1f} MB"
        times = [f"{float(row['make_s']):.1f} s", f"{row['load_ms']} ms", f"{float(row['move_p50_ms']):.0f} ms"]
        body.append([f"{leaves:,}", size, *times, f"{float(row['move_p95_ms']):.0f} ms"])
    return table(["leaves", "page", "made in", "loaded in", "a move, median", "95th percentile"], body)


TABLES = {"explore": explore}
