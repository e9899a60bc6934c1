"""Edit a layer: correct its output at given inputs by changing only the leaves that they reach.

A leaf's output is linear in its second matrix and bias. Let the rows of H be the hidden layers of the inputs in one
leaf, with a column of ones for the bias, and the rows of R the wanted corrections. The least change D solves

    H D = R,  |D| as small as possible         (least squares where no D solves it)

in float64. No other leaf changes, so inputs elsewhere keep their outputs bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import activations
from ..batches import batches as batches_in
from ..batches import evaluation_mode, feed, watch_inputs
from ..checks import check_int, check_number
from ..functional import hard
from ..layer import FFF
from ..tensors import LEAF_PARAMETERS, no_autocast
from .records import Edit, LeafChange, changes_of, editable, written

_RIDGE = 1e-3  # of the mean square of the hidden layer at `keep`: neurons silent there are not free to change


@torch.inference_mode(False)
@torch.no_grad()
def edit_(
    layer: FFF,
    x: Tensor,
    target: Tensor,
    *,
    keep: Tensor | None = None,
    steps: int = 0,
    tolerance: float | None = None,
    note: str = "",
    model: nn.Module | None = None,
) -> Edit:
    """Make the hard pass of a layer give `target` at x, by changing only the leaves that x reaches.

    Outputs of all other leaves keep every bit. An error, or Ctrl-C, leaves the layer unchanged. With more inputs in a
    leaf than it has neurons, targets may conflict: the result is their least-squares fit, and the record's `error`
    says how far off it is.

    Args:
        x: inputs of the layer, (..., in); `layer_inputs` finds them for a layer inside a model.
        target: the wanted outputs of the layer, (..., out).
        keep: inputs, (..., in), whose outputs should move as little as possible. Without them, the weights change as
            little as possible.
        steps: steps of L-BFGS on all weights of the touched leaves, if the closed form does not reach the target.
        tolerance: the largest accepted difference to a target. Past it, nothing changes and the call raises.
        note: a text for the record.
        model: the model that has the layer; leaves tied to another module of it are then refused.
    """
    steps = check_int("steps", steps, 0)
    if tolerance is not None:
        tolerance = check_number("tolerance", tolerance, 0)
    if not isinstance(note, str):
        raise TypeError(f"note must be a text; got {type(note).__name__}.")
    own = editable(layer, _names(layer, steps > 0), model)
    x, target = _check_pairs(layer, x, target)
    kept = x[:0] if keep is None else _check_inputs(layer, keep, "keep")
    with no_autocast(x):
        before = _hard(layer, x)
        leaves, rows = _solve_leaves(layer, list(own), x, target, kept, steps)
        old = {name: own[name].detach()[leaves] for name in own}
        changed = [name for name in own if not torch.equal(rows[name], old[name])]
        if overflown := [name for name in changed if not rows[name].isfinite().all()]:
            raise ValueError(f"the edit overflows {', '.join(overflown)} in {layer.node_weight.dtype}.")
        old, new = ({name: values[name] for name in changed} for values in (old, rows))
        with written(layer, leaves, new, changes_of(layer)) as changes:
            errors = [float((y.to("cpu", torch.float64) - target).abs().max()) for y in (before, _hard(layer, x))]
            if tolerance is not None and not errors[1] <= tolerance:
                raise ValueError(
                    f"the edit reaches its targets within {errors[1]:.4g}; tolerance={tolerance:g} was asked for. Pass "
                    "steps=100, fewer inputs for one leaf, or a larger tolerance. Nothing has changed."
                )
            number = max((change.number for change in changes), default=0) + 1
            changes.append(LeafChange(number, note, len(x), tuple(leaves), old, new, *errors))
    layer.fitted_tree = layer.fitted_leaves = True  # a Recipe keeps both
    return Edit(layer, changes[-1])


def edit_class_(layer: FFF, x: Tensor, classes: Tensor | int, *, margin: float = 1.0, **options: Any) -> Edit:
    """Make `classes` the largest outputs of a layer at x, by `margin` up to rounding, with the least change.

    For a layer whose outputs are the logits of a classifier. classes: (...,) integers, or one for all. `options` go to
    `edit_`.
    """
    with torch.no_grad():
        flat = _check_inputs(layer, x, "x")
        with no_autocast(flat):
            target = class_target(_hard(layer, flat), classes, margin)
    return edit_(layer, flat, target, **options)


def class_target(output: Tensor, classes: Tensor | int, margin: float = 1.0) -> Tensor:
    """The nearest outputs at which `classes` lead all others by at least `margin`: (..., out), float64 on the CPU."""
    margin = check_number("margin", margin, 0)
    if not margin:
        raise ValueError("margin must be above 0: at 0 two classes are equal, and rounding decides.")
    z, wanted = output.detach().to("cpu", torch.float64), torch.as_tensor(classes, device="cpu")
    if wanted.is_floating_point() or wanted.dtype == torch.bool:
        raise TypeError(f"classes must be integers; got {wanted.dtype}.")
    wanted = wanted.long().reshape(-1).expand(output.shape[:-1].numel()) if wanted.numel() == 1 else wanted.long()
    if wanted.numel() != output.shape[:-1].numel():
        raise ValueError(f"classes must have shape {tuple(output.shape[:-1])}; got {tuple(wanted.shape)}.")
    wanted = wanted.reshape(output.shape[:-1]).unsqueeze(-1)
    if wanted.numel() and not (int(wanted.min()) >= 0 and int(wanted.max()) < z.shape[-1]):
        raise IndexError(f"classes must be within 0..{z.shape[-1] - 1}; got {int(wanted.min())}..{int(wanted.max())}.")
    own = z.gather(-1, wanted)
    others = z.scatter(-1, wanted, -torch.inf).sort(-1, descending=True).values[..., :-1] + margin
    # Meeting the j largest others halfway gives the class this value; the right j gives the largest value.
    counts = torch.arange(2, z.shape[-1] + 1, device=z.device)
    level = torch.cat([own, (own + others.cumsum(-1)) / counts], -1).amax(-1, keepdim=True)
    return torch.minimum(z, level - margin).scatter(-1, wanted, level)


def layer_inputs(model: nn.Module, layer: FFF, data: Any) -> Tensor:
    """The inputs of a layer inside a model when data runs through it, (inputs, in): the x of `edit_`.

    In the order of the batches; a sequence gives one input for each token.
    """
    if not any(module is layer for module in model.modules()):
        raise ValueError("the model does not have this layer. Pass the model that it is part of.")
    found: list[Tensor] = []
    with evaluation_mode(model), watch_inputs({"": layer}, lambda _, __, x: found.append(x.detach().clone())):
        for batch in batches_in(data):
            feed(model, batch)
    if not found:
        raise ValueError("no sample in data reaches the layer. Pass data that runs through it.")
    return torch.cat(found)


def _names(layer: Any, first: bool) -> list[str]:
    """The parameters that an edit may change: the second matrix's or, with `first`, all."""
    names = LEAF_PARAMETERS if first else ("leaf_out_weight", "leaf_out_bias")
    present = getattr(layer, "_parameters", {})
    return [name for name in names if name == "leaf_out_weight" or present.get(name) is not None]


def _hard(layer: FFF, x: Tensor) -> Tensor:
    return hard(x, layer.tree, layer.leaves, activation=layer.activation)


def _check_inputs(layer: FFF, x: Tensor, name: str) -> Tensor:
    """Inputs of a layer, (inputs, in), in its dtype; raises for anything else."""
    if not isinstance(layer, FFF):
        raise TypeError(f"an edit needs an FFF layer; got {type(layer).__name__}. Pass one of the model's FFF layers.")
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or x.shape[-1] != layer.in_features:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be inputs of the layer, floats (..., {layer.in_features}); got {got}.")
    x = x.detach().reshape(-1, layer.in_features).to(layer.node_weight)
    if not x.isfinite().all():
        raise ValueError(f"{name} has numbers that are not finite in {x.dtype}.")
    return x


def _check_pairs(layer: FFF, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (inputs, in), and targets (inputs, out) in float64 on the CPU: not every device has float64."""
    flat = _check_inputs(layer, x, "x")
    if not len(flat):
        raise ValueError(f"x has no input; got {tuple(x.shape)}. Pass at least one.")
    wanted = (*x.shape[:-1], layer.out_features)
    if not isinstance(target, Tensor) or target.shape != wanted or target.is_complex():
        got = f"{target.dtype} {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be outputs of the layer, {tuple(wanted)} here; got {got}.")
    target = target.detach().reshape(-1, layer.out_features).to("cpu", torch.float64)
    if not target.isfinite().all():
        raise ValueError("target has numbers that are not finite.")
    return flat, target


class _LeafCopy:
    """One leaf in float64 on the CPU, by the names of its parameters."""

    def __init__(self, layer: FFF, leaf: int) -> None:
        self.activation, self.like = layer.activation, layer.node_weight
        names = [name for name in LEAF_PARAMETERS if layer._parameters.get(name) is not None]
        self.own = {name: getattr(layer, name).detach()[leaf].double().cpu() for name in names}

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden layer at x, with a column of ones where the leaf has a bias: (inputs, l or l + 1)."""
        parts = [
            F.linear(x, self.own[f"leaf_{part}_weight"], self.own.get(f"leaf_{part}_bias"))
            for part in ("in", "gate")
            if f"leaf_{part}_weight" in self.own
        ]
        if not isinstance(self.activation, str):  # it may have its own parameters
            parts = [part.to(self.like) for part in parts]
        hidden = activations.apply(self.activation, *parts).to("cpu", torch.float64)
        return F.pad(hidden, (0, 1), value=1.0) if "leaf_out_bias" in self.own else hidden

    @property
    def second(self) -> Tensor:
        """The second matrix, with the bias as its last row."""
        bias = self.own.get("leaf_out_bias")
        weight = self.own["leaf_out_weight"]
        return weight if bias is None else torch.cat([weight, bias.unsqueeze(0)])

    def add_(self, change: Tensor) -> None:
        """Change the second matrix and the bias."""
        width = len(self.own["leaf_out_weight"])
        self.own["leaf_out_weight"] = self.own["leaf_out_weight"] + change[:width]
        if "leaf_out_bias" in self.own:
            self.own["leaf_out_bias"] = self.own["leaf_out_bias"] + change[width]


def _solve_leaves(
    layer: FFF, names: Sequence[str], x: Tensor, target: Tensor, keep: Tensor, steps: int
) -> tuple[list[int], dict[str, Tensor]]:
    """The leaves that x reaches, and their new rows of these parameters, in the layer's dtype."""
    leaf = layer.route(x).cpu()
    leaf_kept = layer.route(keep).cpu() if len(keep) else leaf[:0]
    leaves, solved = leaf.unique().tolist(), []
    for j in leaves:
        here = leaf == j
        solved.append(_solve(_LeafCopy(layer, j), x[here], target[here], keep[leaf_kept == j], steps))
    return leaves, {name: torch.stack([one[name] for one in solved]).to(getattr(layer, name)) for name in names}


def _solve(leaf: _LeafCopy, x: Tensor, target: Tensor, keep: Tensor, steps: int) -> dict[str, Tensor]:
    """The parameters of a leaf with these targets at x."""
    eps = torch.finfo(leaf.like.dtype).eps
    x, target, keep = (t.to("cpu", torch.float64) for t in (x, target, keep))
    held = leaf.hidden(keep) @ leaf.second

    def correct() -> Tensor:
        hidden = leaf.hidden(x)
        leaf.add_(least_change(hidden, target - hidden @ leaf.second, leaf.hidden(keep), eps))
        return (leaf.hidden(x) @ leaf.second - target).abs().max()

    error = correct()
    if steps and error > eps * target.abs().max().clamp(min=1.0):
        _descend_(leaf, x, target, keep, held, steps)
        correct()
    return leaf.own


def least_change(hidden: Tensor, wanted: Tensor, keep: Tensor, eps: float) -> Tensor:
    """The D of smallest norm that solves hidden D = wanted, by least squares if none solves it.

    With rows in `keep`, the norm is keep D's, the change of the outputs there. Directions in which the inputs
    differ by less than eps are ignored.
    """
    cut = eps * max(hidden.shape)
    if not len(keep):
        return torch.linalg.lstsq(hidden, wanted, rcond=cut, driver="gelsd").solution
    second = keep.T @ keep / len(keep)
    second += _RIDGE * second.diagonal().mean().clamp(min=1e-12) * torch.eye(len(second), dtype=second.dtype)
    root = torch.linalg.cholesky(second)  # keep D is as large as root' D
    scaled = torch.linalg.solve_triangular(root, hidden.T, upper=False).T
    found = torch.linalg.lstsq(scaled, wanted, rcond=cut, driver="gelsd").solution
    return torch.linalg.solve_triangular(root.T, found, upper=True)


@torch.enable_grad()
def _descend_(leaf: _LeafCopy, x: Tensor, target: Tensor, keep: Tensor, held: Tensor, steps: int) -> None:
    """Steps of L-BFGS on all parameters of a leaf."""
    start = leaf.own
    leaf.own = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    optimizer = torch.optim.LBFGS([*leaf.own.values()], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.mse_loss(leaf.hidden(x) @ leaf.second, target)
        if len(keep):
            value = value + F.mse_loss(leaf.hidden(keep) @ leaf.second, held)
        value.backward()
        return value

    optimizer.step(loss)
    found = {name: tensor.detach() for name, tensor in leaf.own.items()}
    leaf.own = found if all(tensor.isfinite().all() for tensor in found.values()) else start
