"""int8 weights for the original model, the control that needs no training: by torchao if installed, else by torch.

torchao's weight-only quantisation keeps activations in their dtype. torch's dynamic quantisation, on CPUs, also rounds
the inputs of each product to int8. Both act on nn.Linear layers; everything else stays the same.
"""

import copy
import warnings
from collections.abc import Sequence

from torch import nn

from .blocks import Block


class NoInt8(Exception):
    """Why the original cannot be quantised here."""


def int8_copy(original: nn.Module, blocks: Sequence[Block]) -> tuple[nn.Module, str]:
    """A copy of the model with int8 linear layers, and the tool that made it; raises NoInt8 with why if none can."""
    layers = [original.get_submodule(path) for block in blocks for path in block.linears]
    if not any(type(layer) is nn.Linear for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise NoInt8(f"int8 quantises nn.Linear; the linear layers of the blocks are {kinds}")
    whys = []
    for how, make in (("torchao", _by_torchao), ("torch, dynamic", _by_torch)):
        try:
            made = make(copy.deepcopy(original))
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove it in favour of torchao
        try:
            from torch.ao.quantization import quantize_dynamic
        except ImportError:
            raise NoInt8("this torch has no dynamic quantisation") from None
        return quantize_dynamic(model, {nn.Linear}, inplace=True)


def _without_fused_path(model: nn.Module) -> nn.Module:
    """Switch off the fused kernel of torch.nn's encoder, which reads the weights of linear1 and linear2 directly."""
    for module in model.modules():
        for name, off in (("activation_relu_or_gelu", 0), ("use_nested_tensor", False)):
            if hasattr(module, name):
                setattr(module, name, off)
    return model
