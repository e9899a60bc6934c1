"""How long `fastff.regions.explore` takes, and how fast its page moves in a headless Chromium.

    python benchmarks/explore_page.py --output results/explore_page.csv

Random inputs on balanced trees. A move selects another node or leaf; its time is the script, the drawing and the
layout, without the wait for the screen. The browser draws without a GPU, so a desktop is faster.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from csv_rows import about, append

import fastff
from fastff.progress import progress

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import Browser, find

FEATURES, CLASSES, BATCH = 784, 10, 500
MOVES = """(() => { const times = []; let seed = 1;
  for (let i = 0; i < 200; i++) { seed = seed * 48271 % 2147483647; const start = performance.now();
    select(seed % groups); paint(); document.body.offsetHeight; times.push(performance.now() - start); }
  return times.sort((a, b) => a - b); })()"""


def measure(depth: int, inputs: int) -> dict[str, object]:
    """One page: the seconds to make it, its bytes, the milliseconds to load it and to move in it."""
    torch.manual_seed(0)
    layer = fastff.FFF(FEATURES, CLASSES, depth=depth, leaf_width=4).eval()
    fastff.initialize_tree_(layer, torch.randn(16 * 2**depth, FEATURES))

    def data():
        generator = torch.Generator().manual_seed(1)
        for _ in range(inputs // BATCH):
            yield (
                torch.randn(BATCH, FEATURES, generator=generator),
                torch.randint(CLASSES, (BATCH,), generator=generator),
            )

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = fastff.regions.explore(layer, data(), Path(folder) / "page.html", image_shape=(28, 28), progress=False)
        seconds = time.perf_counter() - start
        with Browser() as browser:
            page = browser.open(path)
            load = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventStart")
            moves = page.evaluate(MOVES)
            if page.errors():
                raise SystemExit(f"the page has errors: {page.errors()}")
        sizes = {"leaves": 2**depth, "inputs": inputs, "features": FEATURES, "bytes": path.stat().st_size}
    times = {"make_s": round(seconds, 2), "load_ms": round(load)}
    return sizes | times | {"move_p50_ms": round(moves[100], 1), "move_p95_ms": round(moves[190], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 7, 10])
    parser.add_argument("--inputs", type=int, default=20000)
    parser.add_argument("--output", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--commit", default="", help="commit to write into the rows; default: the checkout's")
    options = parser.parse_args()
    if find() is None:
        raise SystemExit("no browser was found. Install chromium, or set FASTFF_BROWSER to its path.")
    rows = []
    with progress("pages", len(options.depths), unit="pages") as advance:
        for depth in options.depths:
            found = measure(depth, options.inputs)
            rows.append(found | about("cpu", "python benchmarks/explore_page.py", options.commit))
            print(found)
            advance()
    if options.output:
        append(options.output, rows)


if __name__ == "__main__":
    main()
