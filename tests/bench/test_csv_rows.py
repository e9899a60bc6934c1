"""benchmarks/csv_rows.py: rows appended to a file."""

import csv_rows
import pytest


def test_rows_are_added_to_those_with_the_same_columns(tmp_path):
    path = tmp_path / "rows.csv"
    csv_rows.append(path, [{"way": "dense", "ms": 1}])
    csv_rows.append(path, [{"way": "sampled", "ms": 2}])
    assert [row["way"] for row in csv_rows.read(path)] == ["dense", "sampled"]
    with pytest.raises(SystemExit, match="has other columns than these rows"):
        csv_rows.append(path, [{"way": "dense"}])


def test_no_rows_leave_the_file_alone(tmp_path):
    """A depth at which every way was skipped ended the benchmark."""
    csv_rows.append(tmp_path / "rows.csv", [])
    assert not (tmp_path / "rows.csv").exists()
