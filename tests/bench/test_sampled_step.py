"""benchmarks/sampled_step.py: its rows on a small layer."""

import csv

import sampled_step


def test_rows_have_the_ratio_to_dense(tmp_path):
    path = tmp_path / "rows.csv"
    sizes = ["--depths", "2,4", "--features", "6", "--leaf-width", "3", "--batch", "40", "--repetitions", "2"]
    sampled_step.main([*sizes, "--most-dense", "16", "--commit", "abc", "--output", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["depth"], row["way"]) for row in rows] == [
        *(("2", way) for way in sampled_step.WAYS),
        *(("4", way) for way in sampled_step.WAYS[2:]),  # 48 neurons are more than --most-dense
    ]
    assert float(rows[0]["over_dense"]) == 1
    assert rows[-1]["over_dense"] == ""
    assert all(float(row["peak_mb"]) >= 0 and float(row["median_ms"]) > 0 for row in rows)
