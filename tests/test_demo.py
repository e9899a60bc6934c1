import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


def test_the_demo_prints_its_table_and_saves_its_picture(tmp_path):
    picture = tmp_path / "new" / "demo.png"
    command = [sys.executable, str(DEMO), "--quick", "--epochs", "8", "--output", str(picture)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    rows = [line.split("│")[1:-1] for line in run.stdout.splitlines() if line.startswith("│")]
    table = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert list(table) == ["FF", "MoE", "FFF"]
    assert [table[name][2] for name in table] == ["128", "32", "12"]  # neurons at inference
    assert all(float(row[1].rstrip("%")) > 85 for row in table.values())  # G_A; chance is 10
    assert "16 of 16 leaves used" in run.stdout
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
