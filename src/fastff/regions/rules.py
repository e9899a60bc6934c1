"""The tree as rules that people read, in the manner of scikit-learn's export_text.

    |--- 0.43*length - 1.2*width <  0.35
    |   |--- leaf 0
    |--- 0.43*length - 1.2*width >= 0.35
    |   |--- leaf 1

Numbers are in the units of the data. If inputs are standardised before they reach the layer, x = (X - mean) / scale, a
node's decision w . x + b >= 0 reads (w / scale) . X >= (w / scale) . mean - b. With digits=None and max_terms=None the
text is exact: it routes as the hard pass does, up to rounding at a boundary. Otherwise it is rounded around the mean,
where the data is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_int
from ..functional import hard
from ..layer import FFF
from .geometry import check_linear, norms, path


class Wording(NamedTuple):
    """How rules are written. mean, scale: of inputs' standardisation, (in,) in float64."""

    names: list[str]
    mean: Tensor
    scale: Tensor
    digits: int | None  # significant ones; None for all
    max_terms: int | None

    @classmethod
    def make(
        cls, layer: FFF, names: Sequence[str] | None, mean: Any, scale: Any, digits: int | None, max_terms: int | None
    ) -> "Wording":
        """Check all parts."""
        size = layer.in_features
        if isinstance(names, str):
            raise TypeError(f"feature_names must be a sequence of names; got the string {names!r}.")
        words = [f"x{i}" for i in range(size)] if names is None else [str(name) for name in names]
        if len(words) != size:
            raise ValueError(f"feature_names must have in_features={size} names; got {len(words)}.")
        center, spread = (
            torch.as_tensor(default if given is None else given, dtype=torch.float64).cpu().expand(size)
            for given, default in ((mean, 0.0), (scale, 1.0))
        )
        if not (center.isfinite().all() and spread.isfinite().all() and (spread > 0).all()):
            raise ValueError("mean and scale must be finite, and scale positive.")
        digits = None if digits is None else check_int("digits", digits, 1)
        return cls(words, center, spread, digits, None if max_terms is None else check_int("max_terms", max_terms, 1))

    def standardized(self, x: Tensor, layer: FFF) -> Tensor:
        """Inputs (..., in) in the data's units, scaled for the layer."""
        scaled = (x.double().cpu() - self.mean) / self.scale
        return scaled.to(layer.node_weight)

    def rule(self, weight: Tensor, bias: float, right: bool) -> str:
        """One turn at a node with this weight (in,) and bias, as text."""
        sides = self._sides(weight, bias)
        return f"{sides[0]} {'>= ' if right else '<  '}{sides[1]}"

    def here(self, weight: Tensor, bias: float, logit: float) -> str:
        """The value of a rule's left side where the node has this logit."""
        return self._rounded(float(self._sides(weight, bias)[1]) + logit, weight)

    def _sides(self, weight: Tensor, bias: float) -> tuple[str, str]:
        # By weight on the standardised features, largest first.
        order = weight.abs().argsort(descending=True, stable=True)
        order = order[weight[order] != 0]
        shown = order if self.max_terms is None else order[: self.max_terms]
        own, digits = weight / self.scale, self.digits
        factors = [repr(w) if digits is None else f"{w:.{digits}g}" for w in own[shown].tolist()]
        terms = [f"{factor}*{self.names[i]}" for factor, i in zip(factors, shown.tolist(), strict=True)]
        left = "".join([terms[0], *(f" - {term[1:]}" if term[0] == "-" else f" + {term}" for term in terms[1:])])
        if len(shown) == len(order) and digits is None:
            return left, repr(math.fsum([*(own * self.mean).tolist(), -bias]))
        left += f" + ... ({len(order) - len(shown)} smaller)" if len(shown) < len(order) else ""
        # The rounded plane agrees with the exact one at the mean.
        parts = [float(factor) * center for factor, center in zip(factors, self.mean[shown].tolist(), strict=True)]
        return left, self._rounded(math.fsum([*parts, -bias]), weight)

    def _rounded(self, value: float, weight: Tensor) -> str:
        """A value of a rule's left side, to a digit small against its spread over standardised inputs."""
        if self.digits is None or not value:
            return repr(value)
        unit = math.floor(math.log10(norms(weight.unsqueeze(0)).item()))
        digits = math.floor(math.log10(abs(value))) - unit + self.digits
        return f"{value:.{min(digits, 17)}g}" if digits > 0 else "0"


def export_text(
    layer: FFF,
    x: Tensor | None = None,
    *,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    mean: Any = None,
    scale: Any = None,
    digits: int | None = 3,
    max_terms: int | None = 10,
    max_depth: int | None = None,
    spacing: int = 3,
) -> str:
    """The tree of a layer as text: one line for each turn, and one for each leaf.

    Nodes without weights send all inputs one way; they are left out, with the leaves behind them. `FFFClassifier` and
    `FFFRegressor` have this as a method.

    Args:
        x: inputs (batch, in), in the units of the rules. Each leaf then shows its number of inputs and its answer: the
            most frequent class if there are class_names, else the mean output.
        feature_names: of the inputs; x0, x1, ... by default.
        class_names: of the outputs; the largest output is the class.
        mean, scale: of the standardisation before the layer, (in,). The rules are then in the data's own units.
        digits: significant digits of weights; None for all, which makes the rules exact.
        max_terms: features in a rule, those with the largest weights; None for all.
        max_depth: levels to print; None for all.
        spacing: width of an indentation.
    """
    check_linear(layer, "export_text")
    wording = Wording.make(layer, feature_names, mean, scale, digits, max_terms)
    if class_names is not None and len(class_names) != layer.out_features:
        raise ValueError(f"class_names must have out_features={layer.out_features} names; got {len(class_names)}.")
    notes = {}
    if x is not None:
        with torch.no_grad():
            inputs = wording.standardized(x, layer).reshape(-1, layer.in_features)
            leaf, outputs = layer.route(inputs), hard(inputs, layer.tree, layer.leaves, activation=layer.activation)
        names = None if class_names is None else [str(name) for name in class_names]
        notes = describe_leaves(leaf.cpu(), outputs.argmax(-1).cpu() if names else outputs.double().cpu(), names)
    return tree_text(layer, wording, notes, max_depth, spacing)


def describe_leaves(leaf: Tensor, answers: Tensor, names: Sequence[str] | None) -> dict[int, str]:
    """Leaves' answers, by number: answers (batch,) are classes if there are names, else outputs (batch, out)."""
    notes = {}
    for number in leaf.unique().tolist():
        own = answers[leaf == number]
        text = f"{len(own)} input{'s' * (len(own) != 1)}"
        if names is not None:
            count = torch.bincount(own, minlength=len(names))
            text += f", class {names[int(count.argmax())]} ({100 * count.max().item() / len(own):.0f} %)"
        else:
            mean = own.reshape(len(own), -1).mean(0).tolist()
            text += f", mean output {', '.join(f'{value:.3g}' for value in mean[:8])}{', ...' * (len(mean) > 8)}"
        notes[number] = text
    return notes


def tree_text(layer: FFF, wording: Wording, notes: Mapping[int, str], max_depth: int | None, spacing: int) -> str:
    """The lines of export_text; notes: a remark on leaves, by number."""
    limit = layer.depth if max_depth is None else check_int("max_depth", max_depth, 0)
    spacing = check_int("spacing", spacing, 1)
    weight, bias = layer.node_weight.detach().double().cpu(), layer.node_bias.detach().double().cpu().tolist()
    constant = ~weight.any(1)
    stem, branch = "|" + " " * spacing, "|" + "-" * spacing + " "

    def lines(node: int, level: int) -> Iterator[str]:
        while node < layer.num_nodes and constant[node]:
            node = 2 * node + 1 + (bias[node] >= 0)
        if node >= layer.num_nodes:
            leaf = node - layer.num_nodes
            note = f": {notes[leaf]}" if leaf in notes else ": 0 inputs" if notes else ""
            yield f"{stem * level}{branch}leaf {leaf}{note}"
        elif level == limit:
            yield f"{stem * level}{branch}truncated branch of depth {_height(node, layer, constant, bias)}"
        else:
            for right in (False, True):
                yield f"{stem * level}{branch}{wording.rule(weight[node], bias[node], right)}"
                yield from lines(2 * node + 1 + right, level + 1)

    return "\n".join(lines(0, 0)) + "\n"


def _height(node: int, layer: FFF, constant: Tensor, bias: list[float]) -> int:
    """The number of decisions on the longest path below a node."""
    if node >= layer.num_nodes:
        return 0
    if constant[node]:
        return _height(2 * node + 1 + (bias[node] >= 0), layer, constant, bias)
    return 1 + max(_height(2 * node + 1 + right, layer, constant, bias) for right in (0, 1))


def path_text(
    layer: FFF,
    x: Tensor,
    *,
    feature_names: Sequence[str] | None = None,
    mean: Any = None,
    scale: Any = None,
    digits: int | None = 3,
    max_terms: int | None = 10,
) -> str:
    """The path of an input x (in,) as rules, with its distance to each boundary. Arguments: as in export_text.

    "here" is the value of the rule's left side. Distances are Euclidean in the layer's inputs, which are standardised
    if mean and scale are given: then a distance of 1 is one standard deviation.
    """
    check_linear(layer, "path_text")
    if not isinstance(x, Tensor) or x.shape != (layer.in_features,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"path_text expects one input of shape ({layer.in_features},); got {got}. Pass a row.")
    wording = Wording.make(layer, feature_names, mean, scale, digits, max_terms)
    found = path(layer, wording.standardized(x, layer))
    weight, bias = layer.node_weight.detach().double().cpu(), layer.node_bias.detach().double().cpu().tolist()
    parts = (part.tolist() for part in (found.node, found.right, found.logit, found.distance))
    lines = []
    for node, right, logit, distance in zip(*parts, strict=True):
        if weight[node].any():
            rule = wording.rule(weight[node], bias[node], right)
            here = wording.here(weight[node], bias[node], logit)
            lines.append(f"node {node}: {rule} (here {here}, distance {distance:.3g})")
    nearest = f", {found.distance.min().item():.3g} from its nearest boundary" if lines else ", which has no boundary"
    return "\n".join([f"leaf {int(found.leaf)}{nearest}", *lines]) + "\n"
