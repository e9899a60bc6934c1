"""How the pages are built: `make docs`."""

import re

import fastff

project = "fastff"
copyright = "the fastff contributors"
version = release = fastff.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fastff {version}"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80


def paragraphs(app, what, name, obj, options, lines):
    """Docstrings are plain text, not reStructuredText: `2**depth` and `freeze_tree_` mean themselves.

    An indented paragraph is code. `Args:` and `Rarely changed:` precede "name: description" entries, 4 columns in.
    """
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = "\n\n".join(map(block_to_rst, blocks)).splitlines() if blocks != [""] else []


def block_to_rst(block: str) -> str:
    if block.startswith("    "):
        return "::\n\n" + block
    if group := re.match(r"(Args|Rarely changed):\n", block):
        entries = re.split(r"\n {4}(?=\w[\w, ]*: )", block[group.end() - 1 :])
        # Sphinx takes the first of several words for a type: names are joined without a blank.
        fields = [f":param {name.replace(' ', '')}: {text}" for name, text in map(entry, entries) if name]
        return "\n".join([*([] if group[1] == "Args" else [f"{group[1]}:", ""]), *fields])
    return escape(block)


def entry(text: str) -> tuple[str, str]:
    name, _, description = text.partition(": ")
    return name.strip(), escape(" ".join(description.split()))


def escape(text: str) -> str:
    """Only backticks keep a meaning: they mark code."""
    parts = re.split(r"`+([^`]+)`+", text)
    return "".join(f"``{p}``" if i % 2 else re.sub(r"([\\*_|])", r"\\\1", p) for i, p in enumerate(parts))


def setup(app):
    app.connect("autodoc-process-docstring", paragraphs)
