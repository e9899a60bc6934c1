"""How the modules depend on each other: in one direction, and without reaching for another's underscores."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"fastff": ROOT / "src" / "fastff", "fastff_reproduce": ROOT / "reproduce" / "src" / "fastff_reproduce"}
CORE = ("layer", "functional", "tensors", "tree", "validate", "activations", "sharing", "last_forward", "backends")
CORE += ("sampling", "shares", "visits")  # of the sampled pass, and of the soft pass that sheds leaves


def modules(package):
    """Every module of a package, by name."""
    folder = PACKAGES[package]
    found = {}
    for path in folder.rglob("*.py"):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name, path, known):
    """The modules of the package that a module imports when it is imported itself, not later inside a function."""
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child)

    visit(ast.parse(path.read_text()))
    # `from . import x` in a module of a package names the package; that is no dependency on what its __init__ imports.
    return {one for one in found & known.keys() if one != name and not name.startswith(f"{one}.")}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_cycles(package):
    known = modules(package)
    graph = {name: imported(name, path, known) for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_core_imports_nothing_else():
    known = modules("fastff")
    core = {name for name in known if name.split(".")[1:2] and name.split(".")[1] in CORE}
    helpers = {"fastff._torch", "fastff.adapters", "fastff.checks"}  # which import torch alone
    for name in core:
        assert imported(name, known[name], known) <= core | helpers, name


def test_a_cycle_is_found(tmp_path):
    """The search itself works."""
    known = {name: tmp_path / f"{name.split('.')[1]}.py" for name in ("p.a", "p.b")}
    known["p.a"].write_text("from . import b")
    known["p.b"].write_text("def f(): from .a import g")
    assert imported("p.a", known["p.a"], known) == {"p.b"}
    assert imported("p.b", known["p.b"], known) == set()
    known["p.b"].write_text("if True:\n    from .a import g")
    assert imported("p.b", known["p.b"], known) == {"p.a"}


def test_no_module_reaches_for_the_layers_underscores():
    """`layer._x` and `model._x` of another module's class; torch's own underscore names are listed."""
    allowed = {"_forward_pre_hooks", "_forward_hooks", "_parameters", "_buffers", "_modules", "_get_name"}
    own = {"_plans", "_load_from_state_dict"}
    for package in PACKAGES:
        for name, path in modules(package).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "layer":
                    private = node.attr.startswith("_") and not node.attr.startswith("__")
                    assert not private or node.attr in allowed | own, f"{name}: layer.{node.attr}"


def test_files_are_short():
    """A file past 400 lines is probably two ideas."""
    lengths = {p: len(p.read_text().splitlines()) for package in PACKAGES for p in modules(package).values()}
    assert max(lengths.values()) <= 400, max(lengths, key=lengths.__getitem__)
    assert sorted(lengths.values())[len(lengths) // 2] <= 150


def test_stems_are_told_apart():
    """One grep finds a module: no stem stands in two folders, but for what a folder always has."""
    stems = [p.stem for package in PACKAGES for p in modules(package).values()]
    twice = {stem for stem in stems if stems.count(stem) > 1} - {"__init__", "__main__"}
    assert not twice
