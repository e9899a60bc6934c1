import pytest

from fastff.bench import Case, presets
from fastff.bench import rows as store

SMALL = Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)


@pytest.mark.slow
def test_figures_are_drawn_from_rows(tmp_path):
    """Figures of the size that has three depths, of its last rows; the other size has too few."""
    pytest.importorskip("matplotlib")
    from fastff.bench import plots

    rows = []
    for case in (*presets.blocks(depths=range(1, 5)), SMALL):
        for model, name, us in (("FF", "", 9.0), ("MoE", "aten", 8.0), ("MoE", "native", 4.0), ("FFF", "auto", 2.0)):
            times = {"median_us": us, "p20_us": us - 1, "p80_us": us + 1, "speedup_dense": 9 / us}
            row = store.about("cpu", "test", "c0ffee") | case.columns | times
            rows.append(row | {"model": model, "backend": name, "status": "ok"})
    kept = plots._latest([*rows, rows[0] | {"median_us": 5.0}, rows[0] | {"status": "wrong", "median_us": None}])
    assert len(kept) == 5 * 3
    assert kept[0]["median_us"] == 5.0
    assert {row["backend"] for row in kept if row["model"] == "MoE"} == {"native"}
    written = plots.draw(rows, tmp_path / "figures")
    assert [path.name.split("-")[0] for path in written] == ["blocks", "closeup", "speedup"]
    for path in written:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
