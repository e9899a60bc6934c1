"""Read a model and its data from files, for `fastff explore`.

A pickle can run any code when it is loaded, so files that need one are read with --trust only.
"""

import csv
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from ..extras import install
from ..layer import FFF, mark_fitted
from ..surgery import load_
from ..surgery.files import WEIGHTS

BATCH = 1024
INPUTS, TARGETS = ("x", "X", "inputs", "images", "data"), ("y", "Y", "labels", "targets", "target")


class Table(NamedTuple):
    """A data set: inputs, targets if there are any, and names."""

    x: Tensor
    y: Tensor | None = None
    feature_names: list[str] | None = None
    class_names: list[str] | None = None

    def batches(self) -> list[Any]:
        parts = self.x.split(BATCH)
        return list(parts) if self.y is None else list(zip(parts, self.y.split(BATCH), strict=True))


def read_model(path: Path, factory: str, activation: str, trust: bool) -> Any:
    """A model: a directory by `fastff.save`, a state dict, or with `trust` a pickled model or estimator."""
    if not path.exists():
        raise typer.BadParameter(f"MODEL must be a file or a directory; {path} does not exist.")
    if path.is_dir() or path.name == WEIGHTS:
        if not factory:
            raise typer.BadParameter(
                f"{path} holds weights, and the model's code is elsewhere. Pass --factory package.module:function, "
                "which returns the model before its surgery."
            )
        model = _make(factory)
        load_(model, path if path.is_dir() else path.parent)
        return model
    if path.suffix in (".pkl", ".pickle", ".joblib"):
        return _estimator(path, trust)
    try:
        found = torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:  # torch raises pickle's errors, and its own
        remedy = "" if trust else " If it is a whole model from a source that you trust, pass --trust."
        raise typer.BadParameter(f"{path} is no state dict: {str(error).splitlines()[0]:.200}{remedy}") from None
    if isinstance(found, nn.Module):
        return found
    state = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise typer.BadParameter(f"{path} must hold a state dict or a model; got a {type(found).__name__}.")
    return _from_state(path, state, factory, activation)


def _from_state(path: Path, state: dict[str, Tensor], factory: str, activation: str) -> nn.Module:
    if factory:
        model = _make(factory)
        model.load_state_dict(state)
        return model
    if "node_weight" not in state or "leaf_in_weight" not in state:
        raise typer.BadParameter(
            f"{path} holds more than one FFF layer. Pass --factory package.module:function, which returns the model."
        )
    nodes, width = state["node_weight"], state["leaf_in_weight"]
    layer = FFF(
        width.shape[2],
        state["leaf_out_weight"].shape[2],
        depth=len(width).bit_length() - 1,
        leaf_width=width.shape[1],
        node_width=1 if nodes.dim() == 2 else nodes.shape[1],
        activation=activation,
        bias="leaf_in_bias" in state,
        dtype=nodes.dtype,
    )
    layer.load_state_dict(state)
    mark_fitted(layer)
    return layer.eval()


def _make(factory: str) -> nn.Module:
    """Call a function by its name, package.module:function."""
    module, _, name = factory.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
    try:
        model = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(f"--factory is package.module:function; got {factory!r}: {error}.") from None
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise typer.BadParameter(f"--factory must return a model, an nn.Module; got {type(model).__name__}.")
    return model


def _estimator(path: Path, trust: bool) -> Any:
    if not trust:
        raise typer.BadParameter(f"{path} is a pickle, which can run any code. If you trust its source, pass --trust.")
    try:
        import joblib  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise typer.BadParameter(f"estimators need scikit-learn: {install('sklearn')}") from None
    return joblib.load(path)


def read_data(path: Path, target: str) -> Table:
    """A data set in a .npz or .pt file with arrays x and y, or in a .csv file with a header."""
    if not path.is_file():
        raise typer.BadParameter(f"--data must be a file; {path} does not exist.")
    readers = {".csv": _csv, ".npz": _npz, ".pt": _pt}
    if path.suffix not in readers:
        raise typer.BadParameter(f"--data must be one of {', '.join(readers)}; got {path.name}.")
    return readers[path.suffix](path, target)


def _npz(path: Path, target: str) -> Table:
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise typer.BadParameter(f".npz files need numpy: {install('cli')}") from None
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    names = None
    for name, array in arrays.items():
        if array.dtype.kind in "US":  # labels as text
            texts, arrays[name] = np.unique(array, return_inverse=True)
            names = [str(text) for text in texts]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind in "fiub"}
    return _pick(path, tensors, target)._replace(class_names=names)


def _pt(path: Path, target: str) -> Table:
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} must hold a dict of tensors x and y; got a {type(found).__name__}.")
    return _pick(path, {name: value for name, value in found.items() if isinstance(value, Tensor)}, target)


def _pick(path: Path, tensors: dict[str, Tensor], target: str) -> Table:
    x = next((tensors[name] for name in INPUTS if name in tensors), None)
    if x is None:
        raise typer.BadParameter(f"{path} must hold inputs called x; it has {', '.join(tensors) or 'no arrays'}.")
    if target and target not in tensors:
        raise typer.BadParameter(f"--target must be one of {', '.join(tensors)}; got {target!r}.")
    y = next((tensors[name] for name in ((target,) if target else TARGETS) if name in tensors), None)
    if y is not None and len(y) != len(x):
        raise typer.BadParameter(f"{path} must hold as many targets as inputs; got {len(y)} and {len(x)}.")
    return Table(x, y)


def _csv(path: Path, target: str) -> Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2:
        raise typer.BadParameter(f"{path} must have a header and at least one row.")
    header, *rows = rows
    if target and target not in header:
        raise typer.BadParameter(f"--target must be a column of {path}: {', '.join(header)}; got {target!r}.")
    at = header.index(target) if target else -1
    values, targets = [], []
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise typer.BadParameter(f"{path}, line {line}: {len(row)} fields, but the header has {len(header)}.")
        try:
            values.append([float(value) for i, value in enumerate(row) if i != at])
        except ValueError as error:
            raise typer.BadParameter(f"{path}, line {line}: {error}. Name the column of labels by --target.") from None
        targets.append(row[at])
    names = [name for i, name in enumerate(header) if i != at]
    table = Table(torch.tensor(values, dtype=torch.float64), feature_names=names)
    return table if at < 0 else table._replace(**_labels(targets))


def _labels(texts: list[str]) -> dict[str, Any]:
    """A column of targets: integers and texts are labels, other numbers are real targets."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        names = sorted(set(texts))
        return {"y": torch.tensor([names.index(text) for text in texts]), "class_names": names}
    if all(number.is_integer() and number >= 0 for number in numbers):
        return {"y": torch.tensor([int(number) for number in numbers])}
    return {"y": torch.tensor(numbers, dtype=torch.float64)}
