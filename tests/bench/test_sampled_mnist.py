"""benchmarks/sampled_mnist.py: its rows on clusters in place of digits; a row is made once."""

import csv

import sampled_mnist
import torch


def clusters(name, root):
    torch.manual_seed(0)
    centre = torch.randn(4, 12)

    def part(count):
        y = torch.arange(count) % 4
        return centre[y] + 0.3 * torch.randn(count, 12), y

    return part(256), part(64)


def test_rows_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sampled_mnist, "data", clusters)
    path = tmp_path / "rows.csv"
    given = ["--sizes", "2x4", "--ways", "straight_through,sampled-mixture-2", "--epochs", "10", "--batch", "32"]
    given += ["--rate", "0.01", "--seeds", "0", "--commit", "abc", "--output", str(path)]
    sampled_mnist.main(given)
    said = capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == ["straight_through", "sampled-mixture-2"]
    assert all(float(row["accuracy"]) > 80 and row["leaves_used"] == "4" for row in rows)
    sampled_mnist.main(given)
    assert capsys.readouterr().out == said
