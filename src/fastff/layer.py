"""FFF, the fast feedforward layer: a binary tree of small feedforward networks.

In training, the layer runs every leaf and mixes the outputs by the tree's soft decisions. In evaluation, it follows one
path from the root and runs one leaf: depth * node_width + leaf_width neurons, not 2**depth * leaf_width. With
`decision="sampled"`, a training step costs as much as two or three evaluations.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import activations, functional
from . import tree as heap
from .activations import Activation
from .adapters import check_int8, is_original
from .backends.plan_cache import PlanCache
from .checks import allocate, check_choice, check_int, check_probability, check_share
from .last_forward import LAST, remember
from .sampling import ESTIMATORS, Estimator, check_alternatives, most_alternatives
from .sharing import share
from .tensors import LEAF_PARAMETERS, Leaves, Tree, at_least_float32
from .visits import check_epsilon, shed

Decision = Literal["soft", "straight_through", "sampled"]
DECISIONS: tuple[str, ...] = get_args(Decision)


class FFF(nn.Module):
    """A fast feedforward layer, (..., in_features) -> (..., out_features).

    Args:
        depth: depth of the tree, which has 2**depth leaves. 0 is a plain feedforward layer of width leaf_width.
        leaf_width: hidden neurons of a leaf.
        node_width: hidden neurons of a node network; 1 makes a node linear, and its boundary a plane.
        activation: activation of the leaves (and inside nodes of node_width > 1): "relu", "gelu", "gelu_tanh", "silu",
            "tanh", "identity" or an elementwise callable; for gated leaves "swiglu", "geglu", "geglu_tanh".
        bias: whether leaves have biases. Nodes always do: they place the boundaries.
        dropout: probability of dropout on the hidden layer of the leaves, in training.
        transposition: probability that, in training, a node swaps its children for a sample. Counters localised
            overfitting.
        sharing: fraction of each leaf's gradient that is shared across leaves (0: independent). With sharing, leaves
            should start equal, as in `Recipe`.
        decision: "soft" mixes the leaves in training. "straight_through" uses the leaf that evaluation would use, and
            gives the tree the gradient of the soft mixture. "sampled" estimates that gradient from a few leaves per
            sample: with more leaves, activations do not grow, nor does a step's time if the optimizer is lazy.
        epsilon: in training, each sample skips the leaves whose weight is below `epsilon` times the even share,
            2**-depth. They weigh less than `epsilon` in total; the other weights are scaled to sum to 1. Steps get
            cheaper as the tree hardens. Not with "sampled".
        alternatives: with "sampled", how many other leaves each sample tries, for example one per level.
        estimator: with "sampled", how they are drawn: "mixture", whose expectation is the straight-through gradient,
            or "even", which is cheaper (`fastff.sampling`).

    Parameters are stored in the layout that inference reads: node_weight (nodes, in), node_bias (nodes,),
    leaf_in_weight (leaves, l, in), leaf_in_bias (leaves, l), leaf_out_weight (leaves, l, out), leaf_out_bias (leaves,
    out); with node_width n > 1 node_weight (nodes, n, in), node_bias (nodes, n), node_out_weight (nodes, n),
    node_out_bias (nodes,); with a gated activation also leaf_gate_weight (leaves, l, in), leaf_gate_bias (leaves, l).
    `fastff.quantize_` makes the leaf weights int8, and adds leaf_in_scale, leaf_out_scale, leaf_gate_scale (leaves, l).
    """

    node_weight: nn.Parameter
    node_bias: nn.Parameter
    node_out_weight: nn.Parameter | None
    node_out_bias: nn.Parameter | None
    leaf_in_weight: nn.Parameter
    leaf_in_bias: nn.Parameter | None
    leaf_out_weight: nn.Parameter
    leaf_out_bias: nn.Parameter | None
    leaf_gate_weight: nn.Parameter | None
    leaf_gate_bias: nn.Parameter | None
    leaf_in_scale: nn.Parameter | None
    leaf_out_scale: nn.Parameter | None
    leaf_gate_scale: nn.Parameter | None
    temperature_tensor: Tensor
    # Whether the tree's and the leaves' weights come from data, a dense block or a file: a Recipe keeps those.
    fitted_tree: bool = False
    fitted_leaves: bool = False
    # With decision="sampled": whether the parameters get sparse gradients. fastff.optim.LazyAdamW and LazySGD set it.
    sparse_gradients: bool = False
    epsilon: float = 0.0
    alternatives: int = 1
    estimator: Estimator = "mixture"
    last_path: Tensor | None = None  # of the last sampled pass: the logits of `Sampled`, their leaves and weights
    last_leaf: Tensor | None = None
    last_weight: Tensor | None = None
    shares_due: bool | None = None  # whether the running shares lack the last forward's
    last_visits: Tensor | None = None  # of the last pass with epsilon > 0: the logits of `Shed`, their reach and nodes
    last_reach: Tensor | None = None
    last_node: Tensor | None = None
    running_shares: Tensor | None = None  # (nodes, 2): see shares.py
    ranks: Any = None  # fastff.parallel.synchronize_ sets them: see ranks.py

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        depth: int,
        leaf_width: int,
        node_width: int = 1,
        activation: Activation = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        transposition: float = 0.0,
        sharing: float = 0.0,
        decision: Decision = "soft",
        epsilon: float = 0.0,
        alternatives: int = 1,
        estimator: Estimator = "mixture",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features = check_int("in_features", in_features, 1)
        self.out_features = out_features = check_int("out_features", out_features, 1)
        self.depth = depth = check_int("depth", depth, 0)
        self.leaf_width = leaf_width = check_int("leaf_width", leaf_width, 1)
        self.node_width = node_width = check_int("node_width", node_width, 1)
        check_probability("dropout", dropout)
        check_probability("transposition", transposition)
        check_share("sharing", sharing)
        activations.check(activation)
        check_choice("decision", decision, DECISIONS)
        check_choice("estimator", estimator, ESTIMATORS)
        self.epsilon = check_epsilon(epsilon, decision)
        self.alternatives = check_alternatives(alternatives, depth)
        self.estimator = estimator
        if bias not in (True, False):
            raise TypeError(f"bias must be True or False; got {bias!r}.")
        self.activation = activation
        self.bias = bool(bias)
        self.dropout, self.transposition, self.sharing = float(dropout), float(transposition), float(sharing)
        self.decision = decision

        nodes, leaves, n = heap.num_nodes(depth), heap.num_leaves(depth), node_width
        gated = activations.is_gated(activation)
        shapes: dict[str, tuple[int, ...] | None] = {
            "node_weight": (nodes, in_features) if n == 1 else (nodes, n, in_features),
            "node_bias": (nodes,) if n == 1 else (nodes, n),
            "node_out_weight": None if n == 1 else (nodes, n),
            "node_out_bias": None if n == 1 else (nodes,),
            "leaf_in_weight": (leaves, leaf_width, in_features),
            "leaf_in_bias": (leaves, leaf_width) if bias else None,
            "leaf_out_weight": (leaves, leaf_width, out_features),
            "leaf_out_bias": (leaves, out_features) if bias else None,
            "leaf_gate_weight": (leaves, leaf_width, in_features) if gated else None,
            "leaf_gate_bias": (leaves, leaf_width) if gated and bias else None,
            "leaf_in_scale": None,  # of int8 leaves: quantize_ sets them
            "leaf_out_scale": None,
            "leaf_gate_scale": None,
        }
        for name, tensor in allocate(
            shapes, device, dtype, what=f"FFF(depth={depth}, leaf_width={leaf_width})"
        ).items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        wide = at_least_float32(dtype or torch.get_default_dtype())
        self.register_buffer("temperature_tensor", torch.ones((), device=device, dtype=wide))
        self.last_logits: Tensor | None = None
        self.last_mixture: Tensor | None = None
        self._plans = self._no_plans()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters as nn.Linear would for the networks they belong to; set the temperature to 1."""
        if self.leaf_in_scale is not None:
            raise TypeError("int8 leaves cannot be reset. Build a new FFF.")
        self.fitted_tree = self.fitted_leaves = False
        fans = dict.fromkeys(("leaf_out_weight", "leaf_out_bias"), self.leaf_width)
        fans |= dict.fromkeys(("node_out_weight", "node_out_bias"), self.node_width)
        for name, parameter in self.named_parameters(recurse=False):
            bound = 1 / math.sqrt(fans.get(name, self.in_features))
            nn.init.uniform_(parameter, -bound, bound)
        nn.init.ones_(self.temperature_tensor)
        for module in self.activation.modules() if isinstance(self.activation, nn.Module) else ():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def forward(self, x: Tensor) -> Tensor:
        """The soft pass in training, the hard pass in evaluation."""
        if not self.training:
            y = None if is_compiling() else self._plans.hard(x, self._parameters, self.activation)
            if y is not None:
                return y
            if self.leaf_in_scale is not None:
                check_int8(self)
            return functional.hard(x, self.tree, self.leaves, activation=self.activation)
        check_choice("decision", self.decision, DECISIONS)  # it may have been set after construction
        leaves = share(self.leaves, check_share("sharing", self.sharing)) if self.sharing else self.leaves
        options: dict[str, Any] = {"activation": self.activation, "temperature": self.temperature_tensor}
        options |= {"transposition": self.transposition, "dropout": self.dropout}
        if self.epsilon:
            return shed(self, x, leaves, options)
        if self.decision == "sampled":
            return self._sampled(x, leaves, options)
        options["straight_through"] = self.decision == "straight_through"
        output, logits, mixture = functional.soft(x, self.tree, leaves, **options)
        remember(self, logits, last_logits=logits, last_mixture=mixture.detach())
        return output

    def _sampled(self, x: Tensor, leaves: Leaves, options: dict[str, Any]) -> Tensor:
        alternatives = min(check_int("alternatives", self.alternatives, 1), most_alternatives(self.depth))
        sparse = self.sparse_gradients and not self.sharing and not is_compiling()
        options |= {"alternatives": alternatives, "estimator": self.estimator, "sparse": sparse}
        output, path, leaf, weight, nodes = functional.sampled(x, self.tree, leaves, **options)
        paths = {"last_path": path, "last_leaf": leaf, "last_weight": weight}
        shares = self.running_shares if nodes is None else None  # with all logits, the losses read no running mean
        remember(self, output, **paths, last_logits=nodes, running_shares=shares, shares_due=nodes is None)
        return output

    def soft(self, x: Tensor) -> Tensor:
        """The soft pass, in any mode, without dropout, transposition or straight-through decisions."""
        tree, leaves, temperature = self.tree, self.leaves, self.temperature_tensor
        return functional.soft(x, tree, leaves, activation=self.activation, temperature=temperature).output

    def route(self, x: Tensor) -> Tensor:
        """The leaf that evaluation uses: (...,) int64."""
        return functional.route(x, self.tree, activation=self.activation)

    def mixture(self, x: Tensor) -> Tensor:
        """The soft weights of the leaves: (..., 2**depth), summing to one."""
        return functional.mixture(self.node_logits(x) * self.temperature_tensor)

    def node_logits(self, x: Tensor) -> Tensor:
        """The logits of the nodes, not scaled by the temperature: (..., 2**depth - 1), float32 at least."""
        return functional.node_logits(x, self.tree, activation=self.activation)

    @property
    def num_leaves(self) -> int:
        """2**depth."""
        return heap.num_leaves(self.depth)

    @property
    def num_nodes(self) -> int:
        """2**depth - 1."""
        return heap.num_nodes(self.depth)

    @property
    def training_width(self) -> int:
        """The leaf neurons: 2**depth * leaf_width."""
        return self.num_leaves * self.leaf_width

    @property
    def training_size(self) -> int:
        """All neurons, including the nodes."""
        return self.num_nodes * self.node_width + self.training_width

    @property
    def inference_width(self) -> int:
        """The leaf neurons that one input uses: leaf_width."""
        return self.leaf_width

    @property
    def inference_size(self) -> int:
        """All neurons that one input uses: depth * node_width + leaf_width."""
        return self.depth * self.node_width + self.leaf_width

    @property
    def temperature(self) -> float:
        """Scales the node logits in the soft pass. Raising it hardens the tree; the hard pass does not change."""
        return float(self.temperature_tensor)

    @temperature.setter
    def temperature(self, value: float) -> None:
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"temperature must be a number; got {value!r} of type {type(value).__name__}.")
        value, limits = float(value), torch.finfo(self.temperature_tensor.dtype)
        if not limits.tiny <= value <= limits.max:
            raise ValueError(
                f"temperature must be positive and finite in {self.temperature_tensor.dtype}; got {value}."
            )
        self.temperature_tensor.fill_(value)

    def freeze_tree_(self) -> "FFF":
        """Fix the boundaries: the leaves keep training, the nodes do not (the paper's h = infinity)."""
        for parameter in self.tree_parameters():
            parameter.requires_grad_(False)
        return self

    def unfreeze_tree_(self) -> "FFF":
        """Let the boundaries train again."""
        for parameter in self.tree_parameters():
            parameter.requires_grad_(True)
        return self

    def tree_parameters(self) -> list[nn.Parameter]:
        """The parameters of the nodes; the first dimension is the node."""
        return [p for name, p in self.named_parameters(recurse=False) if name.startswith("node_")]

    def leaf_parameters(self) -> list[nn.Parameter]:
        """The parameters of the leaves; the first dimension is the leaf."""
        return [p for name, p in self.named_parameters(recurse=False) if name.startswith("leaf_")]

    @property
    def tree(self) -> Tree:
        """The parameters of the nodes, as `fastff.functional` expects them."""
        return Tree(self.node_weight, self.node_bias, self.node_out_weight, self.node_out_bias)

    @property
    def leaves(self) -> Leaves:
        """The parameters of the leaves, as `fastff.functional` expects them."""
        return Leaves(*[getattr(self, name) for name in LEAF_PARAMETERS])

    def _no_plans(self) -> PlanCache:
        """An empty cache; disabled if a subclass computes its tree or leaves."""
        cls = type(self)
        return PlanCache(cls.tree is FFF.tree and cls.leaves is FFF.leaves)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        temperature = state_dict.get(f"{prefix}temperature_tensor")
        if type(temperature) is Tensor and not temperature.is_meta and temperature.numel() == 1:
            value = float(temperature)
            if not 0 < value < math.inf:
                args[-1].append(f"{prefix}temperature_tensor must be positive and finite; got {value}.")
                return
        weight = state_dict.get(f"{prefix}leaf_in_weight")
        if isinstance(weight, Tensor) and (weight.dtype == torch.int8) != (self.leaf_in_scale is not None):
            # copy_ would round the weights silently.
            remedy = (
                "Call fastff.quantize_ first." if self.leaf_in_scale is None else "Load it before fastff.quantize_."
            )
            args[-1].append(
                f"{prefix}leaf_in_weight is {weight.dtype}, in the layer {self.leaves.in_weight.dtype}. {remedy}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.fitted_tree |= f"{prefix}node_weight" in state_dict
        self.fitted_leaves |= f"{prefix}leaf_in_weight" in state_dict

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | dict.fromkeys(LAST)
        del state["_plans"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._plans = self._no_plans()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FFF":
        # FFF's own __getstate__, even where torch.nn.utils.parametrize put a subclass in front of FFF.
        made = memo[id(self)] = self.__new__(type(self))
        made.__dict__ = copy.deepcopy(FFF.__getstate__(self), memo)
        made._plans = made._no_plans()
        return made

    def extra_repr(self) -> str:
        defaults: dict[str, Any] = {"node_width": 1, "bias": True, "dropout": 0.0, "transposition": 0.0}
        defaults |= {"sharing": 0.0, "decision": "soft", "epsilon": 0.0, "alternatives": 1, "estimator": "mixture"}
        names = ["in_features", "out_features", "depth", "leaf_width"]
        names += [name for name, default in defaults.items() if getattr(self, name) != default]
        names += [] if isinstance(self.activation, nn.Module) else ["activation"]
        leaves = "int8 leaves; " if self.leaf_in_scale is not None else ""
        sizes = (
            f"training width {self.training_width}, size {self.training_size}; "
            f"inference width {self.inference_width}, size {self.inference_size}"
        )
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + f"; {leaves}{sizes}"


def fff_layers(model: nn.Module) -> dict[str, FFF]:
    """The FFF layers of a model by name; an error if there are none.

    PEFT's modules_to_save trains a copy of a layer, and keeps the original beside it, unused: only the copy counts.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    found = {_plain(name): module for name, module in model.named_modules() if isinstance(module, FFF)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no FFF layer. Add one, for example fastff.FFF(in_features, out_features, "
            "depth=..., leaf_width=...), or pass the model that has one."
        )
    return {name: layer for name, layer in found.items() if not is_original(name, found)}


def trainable_layers(model: nn.Module) -> dict[str, FFF]:
    """As fff_layers; an error if a layer cannot train: it has int8 leaves, or accelerate offloads it."""
    found = fff_layers(model)
    if names := [name or "the model itself" for name, layer in found.items() if layer.leaves.is_int8]:
        raise TypeError(
            f"int8 leaves do not train: {', '.join(names[:4])}{', ...' * (len(names) > 4)}. Call this before "
            "fastff.quantize_."
        )
    if names := [name for name, layer in found.items() if hasattr(layer, "_hf_hook") and layer.node_weight.is_meta]:
        raise ValueError(f"offloaded layers do not train: {', '.join(names[:4])}. Load the model without offloading.")
    return found


def mark_fitted(model: nn.Module) -> None:
    """Mark the FFF layers of a model as fitted, so that a Recipe keeps their trees and leaves."""
    for layer in fff_layers(model).values():
        layer.fitted_tree = layer.fitted_leaves = True


def _plain(name: str) -> str:
    """A module's name without the parts from torch.compile."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
