"""Write CIFAR10 or CIFAR100 as lossless WebP tile sheets, which the loader reads like the published files.

They hold the same pixels in about half the bytes, for machines to which files must be carried. Put all of them into
DATA/cifar10 or DATA/cifar100 there.

    python scripts/tile_sheets.py cifar10 --data ~/data --output sheets/a sheets/b
"""

import argparse
from pathlib import Path

import numpy

from fastff.progress import progress
from fastff_reproduce import data
from fastff_reproduce.sheets import COLUMNS, NAMES, ROWS, sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("dataset", choices=["cifar10", "cifar100"])
    parser.add_argument("--data", type=Path, help="folder of the data sets; also FASTFF_DATA")
    parser.add_argument("--output", type=Path, nargs="+", required=True, help="folders, each of which gets its share")
    options = parser.parse_args()
    loaded = data.load(options.dataset, options.data)
    for folder in options.output:
        folder.mkdir(parents=True, exist_ok=True)
    with progress("sheets", len(NAMES)) as advance:
        for i, name in enumerate(NAMES):
            part = loaded.train if name.startswith("train") else loaded.test
            path = options.output[i * len(options.output) // len(NAMES)] / name
            if path.suffix == ".npy":
                numpy.save(path, part.y.to("cpu").numpy().astype(numpy.uint8))
            else:
                images = part.x.split(ROWS * COLUMNS)[int(path.stem[-2:])]
                path.write_bytes(sheet(images))
            advance()


if __name__ == "__main__":
    main()
