"""`fastff explore`: an HTML page about the regions of a trained layer."""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from ..regions import explore as write
from ..regions.estimators import is_estimator
from . import printing
from .explore_files import Table, read_data, read_model
from .flags import apart, bad_flags, words


def explore(
    model: Annotated[
        Path, typer.Argument(help="a state dict (.pt), a directory by fastff.save, or an estimator (.joblib)")
    ],
    data: Annotated[Path, typer.Option(help="inputs: a .npz or .pt file with x and y, or a .csv file with a header")],
    output: Annotated[Path, typer.Option(help="the page to write")] = Path("regions.html"),
    layer: Annotated[str, typer.Option(help="name of the FFF layer, if the model has several")] = "",
    target: Annotated[str, typer.Option(help="column or array of labels; in .npz and .pt files, y is found")] = "",
    image: Annotated[str, typer.Option(help="size of flattened images, such as 28x28 or 32x32x3")] = "",
    class_names: Annotated[str, typer.Option(help="list of names, in the order of the labels")] = "",
    title: Annotated[str, typer.Option(help="title of the page")] = "",
    examples: Annotated[int, typer.Option(help="examples of each kind for a node or leaf", min=0)] = 4,
    factory: Annotated[str, typer.Option(help="package.module:function that makes the model")] = "",
    activation: Annotated[str, typer.Option(help="of the leaves, if MODEL is the state dict of a layer")] = "relu",
    trust: Annotated[bool, typer.Option("--trust", help="load pickles, which can run any code")] = False,
) -> None:
    """Write a page about the regions of a trained layer: its tree, what reaches each leaf, and examples.

    The page is one file and works offline. It contains inputs of --data.
    """
    apart({"MODEL": model, "--data": data}, {"--output": output})
    shape = _shape(image)
    with bad_flags():
        found = read_model(model, factory, activation, trust)
        table = read_data(data, target)
        names = words(class_names) or table.class_names
        options: dict[str, Any] = {"layer": layer or None, "image_shape": shape, "examples": examples}
        options |= {"class_names": names, "feature_names": table.feature_names, "title": title or None}
        if is_estimator(found):
            made = write(found, _arrays(table), output, **options)
        else:
            made = write(found, _cast(found, table).batches(), output, loss=_loss(table), **options)
    printing.console.print(f"wrote {made}", soft_wrap=True, highlight=False)


def _shape(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d{1,5}x\d{1,5}(x[13])?", text):
        raise typer.BadParameter(f"--image is a size such as 28x28 or 32x32x3; got {text!r}.")
    return tuple(int(side) for side in text.split("x"))


def _cast(model: nn.Module, table: Table) -> Table:
    """Real inputs in the dtype of the model; integers, such as tokens, unchanged if the model embeds them."""
    dtype = next(model.parameters()).dtype
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    return table if embeds and not table.x.is_floating_point() else table._replace(x=table.x.to(dtype))


def _arrays(table: Table) -> Any:
    """The data as the estimator takes it, with the labels that it was fitted with."""
    if table.y is None:
        return table.x.numpy()
    y = table.y.numpy()
    if table.class_names is not None:
        import numpy as np

        y = np.array(table.class_names)[y]
    return table.x.numpy(), y


def _loss(table: Table) -> Any:
    """The cross entropy, if targets are labels."""
    if table.y is None or table.y.is_floating_point() or table.y.dim() != 1:
        return None
    classes = int(table.y.max()) + 1

    def loss(output: Any, y: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < classes:
            return torch.full((len(y),), torch.nan)  # no score for each label
        return F.cross_entropy(output, y, reduction="none")

    return loss
