"""benchmarks/sampled_gradient.py: the mixture estimator is unbiased there, too, and more alternatives vary less."""

import csv

import sampled_gradient


def test_rows(tmp_path):
    path = tmp_path / "rows.csv"
    given = ["--depths", "2", "--temperatures", "3", "--draws", "40", "--steps", "20", "--commit", "abc"]
    sampled_gradient.main([*given, "--output", str(path)])
    with path.open(newline="") as file:
        rows = {(row["estimator"], row["alternatives"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    one, all_levels = rows["mixture", "1"], rows["mixture", "2"]
    assert float(all_levels["deviation"]) < float(one["deviation"])
    assert float(rows["even", "2"]["deviation"]) == 0
    assert float(one["bias"]) < float(one["deviation"])
