"""Fill the tables of README.md and docs/ from results/*.csv, so that no number in them is typed by hand.

    python scripts/tables.py             # rewrite what has changed
    python scripts/tables.py --check     # exit 1 and name the files that would change
    python scripts/tables.py --print speed

A page marks the place of a table:

    <!-- table: speed -->
    <!-- end -->

The text between the two lines is replaced. Each table is a function of rows in one of the tables_*.py beside this file.
"""

import argparse
import difflib
import functools
import re
import sys
from pathlib import Path

import tables_families
import tables_learning
import tables_models
import tables_regions
import tables_sampled
import tables_scaling
import tables_search
import tables_shedding
import tables_speed
from rows import ROOT

TABLES = tables_speed.TABLES | tables_learning.TABLES | tables_search.TABLES | tables_models.TABLES
TABLES |= tables_regions.TABLES | tables_families.TABLES | tables_sampled.TABLES | tables_scaling.TABLES
TABLES |= tables_shedding.TABLES
PLACE = re.compile(r"^<!-- table: (?P<name>[\w-]+) -->\n.*?^<!-- end -->$", re.M | re.S)
MARK = re.compile(r"^<!-- (table:.*|end) -->$", re.M)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@functools.cache
def made(name: str) -> str:
    return TABLES[name]()


def filled(text: str, where: str) -> str:
    """The text of a page with its tables made anew."""

    def put(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in TABLES:
            raise SystemExit(f"{where}: there is no table {name!r}; choose from {', '.join(TABLES)}.")
        return f"<!-- table: {name} -->\n{made(name)}\n<!-- end -->"

    places = len(PLACE.findall(text))
    if len(MARK.findall(text)) != 2 * places:
        raise SystemExit(f"{where}: every <!-- table: NAME --> needs its own <!-- end -->, each alone on a line.")
    return PLACE.sub(put, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    parser.add_argument("--print", metavar="NAME", choices=TABLES, help="print one table")
    options = parser.parse_args(arguments)
    if options.print:
        print(made(options.print))
        return 0
    stale = 0
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        old = page.read_text(encoding="utf-8")
        new = filled(old, name)
        if new == old:
            continue
        stale += 1
        if options.check:
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "results/", n=0)
            )
        else:
            page.write_text(new, encoding="utf-8")
            print(f"{name} rewritten")
    if stale and options.check:
        print(f"{stale} pages differ from results/*.csv. Run: python scripts/tables.py", file=sys.stderr)
    return int(bool(stale and options.check))


if __name__ == "__main__":
    sys.exit(main())
