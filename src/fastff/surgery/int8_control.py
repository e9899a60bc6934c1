"""int8 for a model: the original, as the control that needs no training, or one with FFF layers.

"int8" is torch's dynamic quantisation, for float32 on CPUs: it also rounds the inputs of each product, and multiplies
int8 by int8. "int8 weights" is torchao's weight-only quantisation: it stays closer to the model, and multiplies in the
model's dtype. Both act on nn.Linear layers. FFF layers get int8 leaves; everything else stays the same.
"""

import copy
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..activations import apply
from ..layer import FFF
from ..tensors import Leaves
from .blocks import Block
from .quantize import quantize_

MISSING = "torchao is not installed"


class NoInt8(Exception):
    """Why a model cannot be quantised here. parameters: the model's, if it is not the original."""

    parameters: int | None = None


def int8_copy(method: str, original: nn.Module, blocks: Sequence[Block]) -> tuple[nn.Module, str]:
    """A copy of the model with int8 linear layers, and the tool that made it; raises NoInt8 with why if it cannot."""
    layers = [original.get_submodule(path) for block in blocks for path in block.linears]
    if not any(type(layer) is nn.Linear for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise NoInt8(f"int8 quantises nn.Linear; the linear layers of the blocks are {kinds}")
    return _int8_linears(original, method)


def int8_trained(model: nn.Module, check_runs: Callable[[nn.Module], None]) -> tuple[nn.Module, str]:
    """A copy of a model with FFF layers in int8, and the tools that made it; raises NoInt8 with why if none can.

    Leaves become int8, layers of depth 0 become linear layers, and these and all others int8, by the first tool whose
    model runs. check_runs: raises ValueError if a model does not.
    """
    made = copy.deepcopy(model)
    layers = {path: module for path, module in made.named_modules() if isinstance(module, FFF)}
    for path, layer in layers.items():
        if not layer.depth:
            made.set_submodule(path, Dense(layer))
    trees = any(layer.depth for layer in layers.values())
    if trees:
        try:
            quantize_(made)
        except ValueError as why:
            raise NoInt8(str(why)) from None
    if not any(type(module) is nn.Linear for module in made.modules()):
        return made, "fastff"
    whys = []
    for method in _TOOLS:
        try:
            with_linears, how = _int8_linears(made, method)
            check_runs(with_linears)
        except (NoInt8, ValueError) as why:
            whys.append(str(why))
        else:
            return with_linears, f"fastff and {how}" if trees else how
    if not trees:
        raise NoInt8("; ".join(whys))
    return made, f"fastff, the leaves alone: {'; '.join(whys)}"


class Dense(nn.Module):
    """An FFF of depth 0 as linear layers, which the tools quantise."""

    def __init__(self, layer: FFF) -> None:
        super().__init__()
        weights = Leaves._make(None if t is None else t.detach()[0] for t in layer.leaves)
        self.activation = layer.activation
        self.up = _linear(weights.in_weight, weights.in_bias)
        self.gate = None if weights.gate_weight is None else _linear(weights.gate_weight, weights.gate_bias)
        self.down = _linear(weights.out_weight.T, weights.out_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(apply(self.activation, self.up(x), None if self.gate is None else self.gate(x)))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


def _int8_linears(model: nn.Module, method: str) -> tuple[nn.Module, str]:
    """A copy of the model with int8 nn.Linear layers, and the tool that made it; raises NoInt8 with why."""
    how, make = _TOOLS[method]
    try:
        made = make(copy.deepcopy(model))
    except NoInt8:
        raise
    except Exception as error:  # foreign code, which may raise anything
        why = f"{how}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise NoInt8(why.rstrip()) from None
    return _without_fused_path(made), how


def _by_torchao(model: nn.Module) -> nn.Module:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise NoInt8(MISSING) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, Int8WeightOnlyConfig())
    return model


def _by_torch(model: nn.Module) -> nn.Module:
    first = next(model.parameters())
    if first.device.type != "cpu":
        raise NoInt8(f"torch's own dynamic quantisation runs on CPUs; the model is on {first.device}")
    linears = [layer.weight for layer in model.modules() if type(layer) is nn.Linear]
    if other := {weight.dtype for weight in linears} - {torch.float32}:
        raise NoInt8(f"torch's own dynamic quantisation takes float32; the model has {other.pop()}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove it in favour of torchao
        try:
            from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
        except ImportError:
            raise NoInt8("this torch has no dynamic quantisation") from None
        # One scale per neuron, as in FFF leaves; torch's default is one per matrix.
        return quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)


def _without_fused_path(model: nn.Module) -> nn.Module:
    """Switch off the fused kernel of torch.nn's encoder, which reads the weights of linear1 and linear2 directly."""
    for module in model.modules():
        for name, off in (("activation_relu_or_gelu", 0), ("use_nested_tensor", False)):
            if hasattr(module, name):
                setattr(module, name, off)
    return model


_TOOLS = {"int8": ("torch, dynamic", _by_torch), "int8 weights": ("torchao", _by_torchao)}
