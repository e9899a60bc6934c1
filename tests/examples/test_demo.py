import re
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("matplotlib", "rich", "typer", "jinja2", "sklearn"):
    pytest.importorskip(needed)
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_prints_its_tables_and_ends_in_the_page(tmp_path):
    page = tmp_path / "new" / "report.html"
    command = [sys.executable, str(DEMO), "--quick", "--store", str(tmp_path / "demo.sqlite"), "--output", str(page)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.stdout.splitlines() if line[:1] == "│"]
    trained, (timed,) = rows[:-1], rows[-1:]
    # Model, leaf width, neurons at inference, recipe; then M_A and G_A of one seed.
    found = {(row[0], row[2], row[3], row[4]): (float(row[6]), float(row[7])) for row in trained}
    assert list(found) == [
        *(("FF", "64", "64", recipe) for recipe in ("paper", "fastff")),
        *(
            ("FFF", leaf, neurons, recipe)
            for leaf, neurons in (("8", "11"), ("2", "7"))
            for recipe in ("paper", "fastff")
        ),
        ("MoE", "16", "36", "fastff"),
    ]
    assert min(accuracy for key, both in found.items() if key[-1] == "fastff" for accuracy in both) > 65  # chance: 10
    assert found["FFF", "2", "7", "fastff"][1] > found["FFF", "2", "7", "paper"][1] + 20
    assert timed[:3] == ["5", "37 of 1024", "1"]
    assert float(timed[-1].rstrip("x")) > 1
    assert "11 of 11" in run.stderr

    text = page.read_text()
    assert "Other trainings: digits" in text
    # The cards: the best tree of the first table, its neurons, and the speed-up of the second.
    numbers = re.findall(r'<p class="number">(.*?)</p>', text)
    best = max((both[1], neurons) for (model, _, neurons, _), both in found.items() if model == "FFF")
    assert numbers[:2] == [f"{best[0]:.1f}\u00a0%", f"{best[1]} of 64"]
    assert float(numbers[2].rstrip("x")) == pytest.approx(float(timed[-1].rstrip("x")), abs=0.51)
    assert text.split('id="regions"')[1].split("</section>")[0].count("<svg") == 3
    assert run.stdout.rstrip().splitlines()[-1].endswith(str(page))
    assert "python examples/demo.py --quick" in text
    assert "--set steps=100" in text

    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr
    assert "of 11" not in again.stderr  # nothing is trained twice
    assert again.stdout.split("Where it pays")[0] == run.stdout.split("Where it pays")[0]
