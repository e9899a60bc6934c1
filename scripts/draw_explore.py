"""The screenshots of docs/guides/explore.md: the page of the quickstart's digits model, wide and on a phone.

python scripts/draw_explore.py    # needs chromium; writes docs/pictures/explore.png and explore-phone.png
"""

import re
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from browser import Browser  # noqa: E402


def page_of_the_guide(folder: Path) -> Path:
    """Run the Python blocks of the guide up to its call of `explore`."""
    text = (ROOT / "docs" / "guides" / "explore.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(block.replace('"digits.html"', repr(str(folder / "digits.html"))), namespace)
        if (folder / "digits.html").exists():
            return folder / "digits.html"
    raise SystemExit("docs/guides/explore.md does not write digits.html.")


def shoot(browser: Browser, page: Path, name: str, width: int, height: int, dark: bool) -> None:
    """A screenshot with a leaf chosen and one of its inputs followed."""
    opened = browser.open(page, width=width, height=height, dark=dark)
    opened.evaluate("select(nodes + 5); follow(data.examples.boundary[nodes + 5][0])")
    opened.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    path = ROOT / "docs" / "pictures" / name
    opened.screenshot(path)
    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = page_of_the_guide(Path(folder))
        shoot(browser, page, "explore.png", 1280, 1290, dark=False)
        shoot(browser, page, "explore-phone.png", 390, 900, dark=True)
