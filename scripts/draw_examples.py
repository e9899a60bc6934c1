"""Draw docs/research/minilm.svg and language.svg from results/*.csv, as the examples draw them at their end.

python scripts/draw_examples.py
"""

import sys
from typing import Any

from rows import ROOT, read
from tables_models import blocks

sys.path.insert(0, str(ROOT / "examples"))


def main() -> None:
    import language
    import minilm

    minilm.draw(read("minilm"), ROOT / "docs" / "research" / "minilm.svg")
    rows: list[dict[str, Any]] = [row | {"name": blocks(row)} for row in read("language")]
    language.draw(rows, ROOT / "docs" / "research" / "language.svg")


if __name__ == "__main__":
    main()
