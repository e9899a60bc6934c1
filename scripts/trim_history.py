"""Keep three series of the histories in an export: epoch, entropy and leaves_used. The rest is large and not drawn.

fastff report --export all.csv --history
python scripts/trim_history.py all.csv results/entropies.csv
"""

import csv
import json
import sys
from pathlib import Path

from rows import HISTORY

from fastff.atomic import replacing

KEPT = ("epoch", "entropy", "leaves_used")


def trim(history: str) -> str:
    return json.dumps({name: series for name, series in json.loads(history or "{}").items() if name in KEPT})


def main(source: Path, target: Path) -> None:
    csv.field_size_limit(HISTORY)
    with source.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), reader.fieldnames or []
    # Rows without a tree have no entropies.
    kept = [row | {"history": trim(row["history"])} for row in rows if '"entropy"' in row["history"]]
    with replacing(target) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    print(f"{len(kept)} of {len(rows)} rows")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: trim_history.py SOURCE.csv TARGET.csv")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
