"""benchmarks/sampled_search.py: every kind of way trains, on held-out data apart from the rest; a row is made once."""

import csv
import json

import sampled_search
import torch
from test_sampled_mnist import clusters

WAYS = [
    {"decision": "straight_through", "balance_from": "paths"},
    {"alternatives": 2, "node_rate": 0.5, "temperature": [1, 3], "first": 1},
    {"balance_from": "nodes", "average": 0.9},
    {"balance_from": {"flat": True, "window": 16}},
    {"balance_from": {"visited": True, "keep": 0.9}},
]


def test_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(sampled_search, "data", clusters)
    path = tmp_path / "rows.csv"
    given = ["--cells", "mnist:2x4", "--epochs", "20", "--batch", "16", "--commit", "abc", "--output", str(path)]
    for _ in range(2):
        sampled_search.main([*given, "--ways", *map(json.dumps, WAYS)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [json.loads(row["way"]) for row in rows] == WAYS
    assert all(float(row["validation"]) > 80 for row in rows)


def test_held_out_images_are_not_trained_on():
    x = torch.arange(120.0).unsqueeze(1)
    (train, _), (held, _) = sampled_search.split((x, x.squeeze(1)))
    assert len(held) == 20
    assert sorted(torch.cat([train, held]).flatten().tolist()) == list(range(120))
