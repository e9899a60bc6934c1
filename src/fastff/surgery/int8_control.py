"""int8 weights for a model: the original, as the control that needs no training, or one with FFF layers.

torch's dynamic quantisation, on CPUs, also rounds the inputs of each product to int8, and multiplies int8 by int8.
torchao's weight-only quantisation, elsewhere, keeps activations in their dtype: on a CPU it is no faster than float32.
Both act on nn.Linear layers; everything else stays the same, except that the leaves of FFF layers become int8 too.
"""

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from .blocks import Block
from .quantize import quantize_


class NoInt8(Exception):
    """Why the original cannot be quantised here."""


def int8_copy(original: nn.Module, blocks: Sequence[Block]) -> tuple[nn.Module, str]:
    """A copy of the model with int8 linear layers, and the tool that made it; raises NoInt8 with why if none can."""
    layers = [original.get_submodule(path) for block in blocks for path in block.linears]
    if not any(type(layer) is nn.Linear for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise NoInt8(f"int8 quantises nn.Linear; the linear layers of the blocks are {kinds}")
    return _int8_linears(original)


def int8_trees(model: nn.Module) -> tuple[nn.Module, str]:
    """A copy of a model with FFF layers: int8 leaves, and int8 linear layers where a tool can make them."""
    made = copy.deepcopy(model)
    quantize_(made)
    if not any(type(layer) is nn.Linear for layer in made.modules()):
        return made, "fastff"
    try:
        made, how = _int8_linears(made)
    except NoInt8 as why:
        return made, f"fastff, the leaves alone: {why}"
    return made, f"fastff and {how}"


def _int8_linears(model: nn.Module) -> tuple[nn.Module, str]:
    """A copy of the model with int8 nn.Linear layers, and the tool that made it; raises NoInt8 with why if none can."""
    whys = []
    for how, make in (("torch, dynamic", _by_torch), ("torchao", _by_torchao)):
        try:
            made = make(copy.deepcopy(model))
        except NoInt8 as why:
            whys.append(str(why))
        except Exception as error:  # foreign code, which may raise anything
            whys.append(f"{how}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip())
        else:
            return _without_fused_path(made), how
    raise NoInt8("; ".join(whys))


def _by_torchao(model: nn.Module) -> nn.Module:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise NoInt8("torchao is not installed") from None
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
        # One scale a neuron is as fast as torch's default, one a matrix, and halves what MiniLM's cosine loses.
        return quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig}, inplace=True)


def _without_fused_path(model: nn.Module) -> nn.Module:
    """Switch off the fused kernel of torch.nn's encoder, which reads the weights of linear1 and linear2 directly."""
    for module in model.modules():
        for name, off in (("activation_relu_or_gelu", 0), ("use_nested_tensor", False)):
            if hasattr(module, name):
                setattr(module, name, off)
    return model
