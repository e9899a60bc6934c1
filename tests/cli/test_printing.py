import json
import math

import pytest

pytest.importorskip("rich")
from rich.console import Console
from rich.table import Table

from fastff.cli import printing


@pytest.mark.parametrize(
    ("size", "text"), [(9028, "8.8 KiB"), (2**20, "1.0 MiB"), (1500 * 2**20, "1.5 GiB"), (2**41, "2048.0 GiB")]
)
def test_bytes(size, text):
    assert printing.bytes_(size) == text


def test_numbers_and_ratios_have_no_exponent():
    assert [printing.number(x) for x in (0.1234, 12.34, 99.99, 1234567.0)] == ["0.123", "12.3", "100", "1234567"]
    assert [printing.times(x) for x in (None, 0.5, 9.999, 12.34, 1234.0)] == ["", "0.50x", "10.00x", "12.3x", "1234x"]


def test_records_are_json_without_nan_and_csv_with_the_columns_asked_for(capsys):
    rows = [{"a": 1, "b": math.nan}, {"a": 0.123456789, "b": None}]
    printing.records(rows, ["a", "b"], "json")
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "b": None}, {"a": 0.123456789, "b": None}]
    printing.records(rows, ["a", "b"], "csv")
    assert capsys.readouterr().out == "a,b\n1,nan\n0.123457,\n"


def test_a_table_wider_than_the_terminal_loses_its_frame_and_no_number():
    console = Console(width=20)
    table = Table("name")
    for i in range(9):
        table.add_column(f"column {i}")
    table.add_row("x", *(str(10**i) for i in range(9)))
    with console.capture() as seen:
        printing.show(console, table)
    assert "│" not in seen.get()
    assert all(str(10**i) in seen.get() for i in range(9))
    assert console.width == 20
