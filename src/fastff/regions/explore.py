"""One self-contained HTML page about the regions of a trained layer: `explore`.

The page holds the statistics as JSON, and draws them with the scripts in page/. It loads nothing else, so it works
offline and can be sent to others. It shows all its examples: do not share a page of private data.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..atomic import replacing
from ..checks import check_int
from .collect import Example, Loss
from .contents import COLUMNS, Contents, Decode, label_name, short, token_text
from .counts import Histogram
from .diagnosis import diagnose
from .estimators import is_estimator, opened
from .statistics import KINDS, Statistics, find_layer, statistics

SHOWN = 12  # labels or tokens of a node or leaf
FOLLOWED = 100  # inputs
PAGE = 2**24  # bytes for the contents of examples, at most


def explore(
    model: Any,
    data: Any,
    path: str | os.PathLike[str] = "regions.html",
    *,
    layer: str | None = None,
    loss: Loss | None = None,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | Mapping[int, str] | None = None,
    image_shape: Sequence[int] | None = None,
    decode: Decode | Any = None,
    title: str | None = None,
    examples: int = 4,
    context: int = 8,
    follow: Any = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Path:
    """Write an HTML page about the regions of one FFF layer, and return its path.

    Args:
        model: a model with an FFF layer, a layer, or an FFFClassifier or FFFRegressor.
        data: as for `statistics`: a DataLoader, a batch (input, target) or an iterable of batches. For an estimator:
            (X, y) or X, as for its fit.
        path: the file to write. An existing page is replaced when the new one is complete.
        layer, loss, examples, context, progress: as for `statistics`.
        feature_names: of inputs that are rows of numbers.
        class_names: a list, or a mapping from labels to names.
        image_shape: (height, width) or (height, width, 3), if inputs are flattened images. Inputs of two or three
            dimensions are images by themselves.
        decode: the text of a token: a tokenizer, a function, a list or a mapping.
        title: of the page.
        follow: a batch of inputs to list on the page, so that their paths can be followed: at most 100 are shown.
        batch_size: of training, for `diagnose`. Without it, shrinking batches are not reported.
    """
    path = Path(path)
    if is_estimator(model):
        follow = None if follow is None else opened(model, follow, None, None, None)[1]
        model, data, loss, feature_names, class_names = opened(model, data, loss, feature_names, class_names)
    found = statistics(
        model,
        data,
        layer,
        loss=loss,
        examples=check_int("examples", examples, 0),
        context=context,
        progress=progress,
    )
    _, fff = find_layer(model, layer)
    about = (
        f"{fff.in_features} → {fff.out_features}, depth {fff.depth}, {fff.num_leaves} leaves of width {fff.leaf_width}"
    )
    payload = page_data(
        found,
        feature_names=feature_names,
        class_names=class_names,
        image_shape=image_shape,
        decode=decode,
        title=title or (f"Regions of {found.layer}" if found.layer else "Regions"),
        about=about,
        batch_size=batch_size,
        followed=_followed(model, follow, layer, context),
    )
    write_page(path, payload)
    return path


def page_data(
    found: Statistics,
    *,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | Mapping[int, str] | None = None,
    image_shape: Sequence[int] | None = None,
    decode: Decode | Any = None,
    title: str = "Regions",
    about: str = "",
    batch_size: int | None = None,
    followed: Sequence[Example] = (),
) -> dict[str, Any]:
    """The page's data, as types of JSON."""
    first = next((one for kind in found.examples.values() for group in kind for one in group), None)
    contents = Contents(first, image_shape=image_shape, decode=decode, tokens=found.tokens is not None)
    shown, kept = _choose(found, contents)
    contents.measure([*kept, *followed])
    labels = found.labels.values if found.labels else []
    return {
        "title": title,
        "about": about,
        "depth": found.depth,
        "samples": found.samples,
        "effective": short(found.effective_leaves),
        "distance": found.margin_is_distance,
        "dead": found.dead_leaves(),
        "overloaded": found.overloaded_leaves(),
        "findings": _findings(found, batch_size),
        "classes": {label: label_name(class_names, label) for label in labels},
        "features": _feature_names(feature_names, kept, contents.kind),
        "count": found.count.tolist(),
        **{
            name: _numbers(getattr(found, name))
            for name in ("entropy", "margin", "purity", "accuracy", "loss", "target")
        },
        "labels": _top(found.labels, len(found.count)),
        "tokens": _top(found.tokens, len(found.count)),
        "texts": _texts(found, decode),
        "kinds": {kind: KINDS[kind] for kind in shown},
        "examples": shown,
        "content": contents.kind,
        "shape": list(contents.shape),
        "inputs": [_input(one, contents) for one in (*kept, *followed)],
        "followed": len(followed),  # the last inputs
    }


def _followed(model: Any, follow: Any, layer: str | None, context: int) -> list[Example]:
    """The inputs to follow, in their order."""
    if follow is None:
        return []
    found = statistics(model, follow, layer, examples=FOLLOWED, context=context, progress=False)
    return sorted(found.examples["random"][0], key=lambda one: (one.index, one.position))


def _findings(found: Statistics, batch_size: int | None) -> list[dict[str, str]]:
    """The diagnosis. The batches of a page's data say nothing about training."""
    findings = diagnose(found, batch_size=batch_size)
    return [vars(one) for one in findings if batch_size is not None or one.problem != "shrinking batches"]


def write_page(path: Path, payload: Mapping[str, Any]) -> None:
    """Write the page; no text of the payload can become a part of its markup."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    page = _file("explore.html").replace("{{title}}", html.escape(str(payload["title"])))
    before, rest = page.split("{{css}}")
    between, rest = rest.split("{{data}}")
    middle, after = rest.split("{{js}}")
    with replacing(path) as file:
        file.writelines([before, _file("explore.css"), between, text, middle])
        file.writelines([_file("tree.js"), _file("explore.js"), after])


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _choose(found: Statistics, contents: Contents) -> tuple[dict[str, list[list[int]]], list[Example]]:
    """The examples for the page, as numbers into a list without duplicates."""
    groups, kinds = len(found.count), max(len(found.examples), 1)
    each = max(1, PAGE // (groups * kinds * contents.size))
    numbers: dict[tuple[int, int], int] = {}
    kept: list[Example] = []
    shown: dict[str, list[list[int]]] = {}
    for kind, by_group in found.examples.items():
        shown[kind] = []
        for group in by_group:
            for one in group[:each]:
                if numbers.setdefault((one.index, one.position), len(kept)) == len(kept):
                    kept.append(one)
            shown[kind].append([numbers[one.index, one.position] for one in group[:each]])
    return shown, kept


def _input(one: Example, contents: Contents) -> list[Any]:
    """One input: index, position, leaf, margins, label, prediction, loss, target, content."""
    margins = [short(value) for value in one.margins.tolist()]
    numbers = [one.label, one.prediction, short(one.loss), short(one.target)]
    return [one.index, one.position, one.leaf, margins, *numbers, contents.json(one)]


def _numbers(values: Any) -> list[float | None] | None:
    return None if values is None else [short(value) for value in values.tolist()]


def _top(histogram: Histogram | None, groups: int) -> list[list[list[int]]] | None:
    """The most frequent values of every group with their counts, and how many values and counts are left."""
    if histogram is None:
        return None
    found = []
    for group in range(groups):
        pairs = [list(pair) for pair in histogram.of(group).items()]
        rest = pairs[SHOWN:]
        found.append([*pairs[:SHOWN], *([[-1, sum(count for _, count in rest)]] if rest else [])])
    return found


def _texts(found: Statistics, decode: Any) -> dict[int, str]:
    """The text of every token that a list of the page names."""
    text = token_text(decode)
    shown = _top(found.tokens, len(found.count)) or []
    return {token: text(token) for token in sorted({pair[0] for group in shown for pair in group}) if token >= 0}


def _feature_names(names: Sequence[str] | None, kept: Sequence[Example], kind: str) -> list[str]:
    """A name for each number of a row."""
    if kind != "row" or not kept or kept[0].content is None:
        return []
    size = kept[0].content.numel()
    if names is not None and len(names) != size:
        raise ValueError(f"feature_names must name each of the {size} numbers of an input; got {len(names)} names.")
    return [str(name) for name in (names if names is not None else [f"x{i}" for i in range(size)])[:COLUMNS]]
