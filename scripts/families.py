"""Try replace_ on a tiny model of every family of the installed transformers, and write results/families.csv.

    python scripts/families.py                # all of them, in a few minutes
    python scripts/families.py bert gemma3    # only these; the other rows stay

tests/surgery/test_families.py repeats every row and compares.
"""

import csv
import os
import sys
import warnings
from pathlib import Path

from rows import ROOT, Row, read

COLUMNS = ["family", "kind", "outcome", "blocks", "forms", "activations", "checked", "reason", "transformers"]


def main(chosen: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tests"))
    import transformers

    import family_check

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    path = Path(ROOT, "results", "families.csv")
    rows: dict[str, Row] = {row["family"]: row for row in read("families")} if chosen and path.exists() else {}
    for family in chosen or family_check.tried_families():
        rows[family] = family_check.row(family)
        print(*(rows[family][column] for column in COLUMNS[:4]), flush=True)
    with path.with_suffix(".part").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[family] for family in sorted(rows))
    os.replace(path.with_suffix(".part"), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
