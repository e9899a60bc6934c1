"""Short trainings on scikit-learn's digits, for the tests of the training loop."""

import dataclasses

from fastff_reproduce.recipes import FASTFF
from fastff_reproduce.runs import Case


def cases(seeds=(0, 1), model="FFF", depth=3, leaf_width=4, goal="both", settings=FASTFF, dataset="digits", **changes):
    settings = settings.changed({"steps": 200} | changes)
    width = leaf_width << depth
    return [Case(dataset, model, width, leaf_width, depth, "fastff", goal, seed, settings.items()) for seed in seeds]


def numbers(results):
    """All that a result says but for the time it took."""
    return [dataclasses.asdict(dataclasses.replace(result, seconds=0)) for result in results]
