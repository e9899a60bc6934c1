"""benchmarks/split_mnist.py: its reservoir, and its rows on ten clusters in place of digits."""

import csv

import pytest
import split_mnist
import torch


def test_every_sample_is_in_the_reservoir_equally_often():
    counts = torch.zeros(40)
    x = torch.arange(40.0).unsqueeze(1).expand(-1, 784)
    for seed in range(300):
        memory = split_mnist.Uniform(10, seed)
        for part in range(0, 40, 8):
            memory.see(x[part : part + 8], torch.arange(part, part + 8))
        assert torch.equal(memory.x[:, 0].long(), memory.y)
        counts[memory.y] += 1
    assert counts.sum() == 3000
    assert (counts - 75).abs().max() < 5 * (300 * 0.25 * 0.75) ** 0.5  # five deviations


class Clusters:
    """Ten clusters that are easy to tell apart, and have much in common."""

    def __init__(self, root, samples):
        centre = 0.5 * torch.randn(784) + 0.5 * torch.randn(10, 784)  # what they share is what changes
        self.train, self.test = self.draw(centre, 1000), self.draw(centre, 300)

    def draw(self, centre, count):
        y = torch.arange(count) % 10
        return centre[y] + torch.randn(count, 784), y

    def parts(self, held_out):
        return self.train, self.test


@pytest.mark.slow
def test_memory_prevents_forgetting_and_rows_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(split_mnist, "Data", Clusters)
    settings = {kind: split_mnist.Settings(rate=1e-3, batch=16, epochs=20, moving=True) for kind in ("fff", "dense")}
    monkeypatch.setattr(split_mnist, "CHOSEN", settings)
    given = ["--memories", "50", "--seeds", "0", "--commit", "abc", "--output", str(tmp_path / "rows.csv")]
    split_mnist.main(given)
    said = capsys.readouterr().out
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    found = {(row["model"], row["method"]): row for row in rows}
    for kind in ("fff", "dense"):
        for method in ("uniform", "class", "region"):
            assert float(found[kind, method]["accuracy"]) > float(found[kind, "none"]["accuracy"]) + 10
    assert float(found["dense", "gdumb"]["accuracy"]) > 90
    assert {row["commit"] for row in rows} == {"abc"}
    split_mnist.main(given)
    assert capsys.readouterr().out == said


def test_settings_are_stored_by_what_differs():
    assert split_mnist.Settings().changes() == "{}"
    assert split_mnist.Settings(rate=3e-4, near=True).changes() == '{"rate": 0.0003, "near": true}'
