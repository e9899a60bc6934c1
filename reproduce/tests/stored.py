"""Results to store, for the tests of stores."""

import dataclasses

from fastff_reproduce import result_rows
from fastff_reproduce.runs import Case, Result

ABOUT = {name: f"the {name}" for name in result_rows.ABOUT}
CASE = Case("usps", "FFF", 16, 8, 1, "paper", "G_A", 0, (("h", 3.0), ("steps", (1, 2))))


def result(case=CASE, **found):
    return Result(case, **{"G_A": 92.5, "ETT": 7, "seconds": 1.5, "history": {"entropy": [0.5, 0.25]}} | found)


def seeds(count, **changes):
    return [result(dataclasses.replace(CASE, seed=seed, **changes), G_A=90.0 + seed) for seed in range(count)]
