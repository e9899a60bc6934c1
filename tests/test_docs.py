"""The documentation is right: Python blocks of README.md and docs/ run, links lead somewhere, the words are plain.

The blocks of a file run in order and share their names, as if a reader pasted them. A block after the comment
`<!-- skip -->` needs a GPU and is skipped elsewhere.
"""

import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest
import torch

import fastff

ROOT = Path(__file__).parent.parent
FILES = sorted([ROOT / "README.md", *(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts)])
API = ROOT / "docs" / "reference" / "api.md"
pages = pytest.mark.parametrize("page", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())

FENCE = re.compile(r"^ *(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^ *(?P=mark) *$", re.M | re.S)


def blocks(text):
    """(line of the first statement, code, whether it may be skipped) of every Python block."""
    for fence in FENCE.finditer(text):
        if fence["info"].strip().lower() in ("python", "py"):
            skip = text[: fence.start()].rstrip().endswith("<!-- skip -->")
            yield text.count("\n", 0, fence.start("body")) + 1, textwrap.dedent(fence["body"]), skip


@pytest.fixture
def fresh_settings(tmp_path, monkeypatch):
    """A temporary working directory, and no setting of torch or fastff that outlives the test."""
    import torch._dynamo

    monkeypatch.chdir(tmp_path)
    config = torch._dynamo.config
    dtype, before = torch.get_default_dtype(), config.get_config_copy()
    yield
    for name, value in config.get_config_copy().items():
        if value != before[name]:
            setattr(config, name, before[name])
    torch.set_default_dtype(dtype)
    torch._dynamo.reset()
    fastff.backend("auto")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # of a page that stopped half-way


def run(code, page, line, namespace):
    """Run a block so that tracebacks show its place in the page; a failure names file, line and statement."""
    try:
        # Empty lines in front give every statement the number of its line in the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    except Exception as error:
        here = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
        at = (error.lineno if isinstance(error, SyntaxError) else here[-1] if here else None) or line
        statement = code.splitlines()[at - line].strip()
        place = f"{page.relative_to(ROOT).as_posix()}, line {at}"
        raise AssertionError(f"{place}: {statement}\n{type(error).__name__}: {error}") from error


@pytest.mark.slow
@pages
def test_python_blocks_run(page, fresh_settings):
    namespace = {"__name__": "__main__"}
    for line, code, skip in blocks(page.read_text()):
        if skip:
            assert "cuda" in code, f"{page.name}, line {line}: only a block that needs a GPU may be skipped"
            if not torch.cuda.is_available():
                continue
        run(code, page, line, namespace)


def test_a_failing_block_is_named():
    """By the statement's line in the page: in a list, too, and for a block that is not Python."""
    text = "# Title\n\n- text\n\n  ```python\n  x = 1\n  assert x == 2, 'odd'\n  ```\n\n```python\nx = = 1\n```\n"
    (first, code, _), (second, wrong, _) = blocks(text)
    with pytest.raises(AssertionError, match=r"docs/page.md, line 7: assert x == 2, 'odd'\nAssertionError: odd"):
        run(code, ROOT / "docs/page.md", first, {})
    with pytest.raises(AssertionError, match=r"docs/page.md, line 11: x = = 1\nSyntaxError"):
        run(wrong, ROOT / "docs/page.md", second, {})


def test_blocks_are_found():
    """Python blocks, also inside lists, and not those inside a longer fence."""
    text = "```python\na\n```\n<!-- skip -->\n\n```python\nb\n```\n```text\n```\n"
    text += "````\n```python\nno\n```\n````\n  ```py\n  c\n  ```"
    assert list(blocks(text)) == [(2, "a\n", False), (7, "b\n", True), (17, "c\n", False)]
    assert not list(blocks("# fastff\n"))


@pytest.mark.parametrize("name", fastff.__all__)
def test_every_public_name_is_documented(name):
    """In the text or code of a page, and in the API reference."""
    pages = [path.read_text() for path in FILES if path != API]
    word = re.compile(rf"(fastff\.|`){name}(?!\w)")  # as code: some names are words of English too
    assert any(word.search(text) for text in pages), f"neither README.md nor docs/ explains fastff.{name}"
    listed = re.search(rf"^\.\. auto\w+:: fastff\.{name}(\.\w+)*$", API.read_text(), re.M)
    assert listed, f"docs/reference/api.md does not list fastff.{name}"


def links(text):
    """The targets of Markdown and HTML links and images outside of code."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    yield from re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    yield from re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", text, re.M)
    yield from re.findall(r"""(?:src|href)=["']([^"']+)""", text)


@pages
def test_relative_links_lead_to_files(page):
    for target in links(page.read_text()):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z][a-z0-9+.-]*:", target):
            assert (page.parent / path).exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"


def test_links_are_found():
    text = '[a](b.md#c) ![d](e.png "title") [f]: g.md\n[h]: i.md\n<img src="j.svg"> `[k](l)`\n```\n[m](n)\n```\n'
    assert list(links(text)) == ["b.md#c", "e.png", "i.md", "j.svg"]


def test_the_readme_is_short():
    """A newcomer reads it in a minute."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_picture_of_the_readme_shows_the_rows():
    script = ROOT / "scripts" / "draw_overview.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Phrases that no native speaker uses for what they mean here; docs/style.md says what to write instead.
TICS = [
    "so many",
    "as it is",
    "as it was",
    "that of",
    "those of",
    "comes to",
    "came to",
    "is to be had",
    "are to be had",
]
TICS += ["has nothing against", "what is not there", "for good"]
GAP = r"\s+(?:#\s+)?"  # phrases may cross a line break, also in a comment
TIC = re.compile(rf"\b(?:{'|'.join(tic.replace(' ', GAP) for tic in TICS)})\b", re.I)
WORDS = [path for path in FILES if path.name != "style.md"]
WORDS += [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "reproduce/README.md", "results/README.md")]
WORDS += sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("reproduce/src/**/*.py"), *ROOT.glob("scripts/*.py")])


def tics(text):
    return [f"line {text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}" for found in TIC.finditer(text)]


def test_the_words_are_plain():
    found = [f"{path.relative_to(ROOT)}, {tic}" for path in WORDS if path.exists() for tic in tics(path.read_text())]
    assert not found, "docs/style.md says what to write instead:\n" + "\n".join(found)


def test_tics_are_found():
    assert tics("a\n# for so\n# many steps, That  of X") == ["line 2: 'so\\n# many'", "line 3: 'That  of'"]
    assert not tics("somany, that often")
