"""FFF layers in a model that PEFT has adapted, recognised by structure: PEFT need not be installed.

PEFT wraps modules: an adapter holds the adapted one as `base_layer`, and computes a weight by a parametrization while
it runs. modules_to_save trains a copy of a module, and keeps the original, unused, as `original_module`.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


def is_original(name: str, names: Iterable[str]) -> bool:
    """Whether a layer is the unused original of one that modules_to_save trains."""
    above, original, _ = name.partition("original_module")
    return bool(original) and any(other.startswith(f"{above}modules_to_save.") for other in names)


def outside_checkpoints(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The FFF layers of an adapted model that its checkpoints leave out: they hold adapters and modules_to_save."""
    adapted = hasattr(model, "peft_config")
    return [name for name in names if "modules_to_save" not in name.split(".")] if adapted else []


def check_int8(layer: nn.Module) -> None:
    """Raise if something computes the int8 weights of a layer: what it adds to them is rounded to whole numbers."""
    by: Any = layer._modules.get("parametrizations") or ()
    if computed := [name for name in by if name.startswith("leaf_")]:
        raise TypeError(
            "int8 leaves must be plain parameters; got a parametrization, such as a LoRA adapter, of "
            f"{', '.join(computed)}. Merge the adapters first, and call fastff.quantize_ last."
        )
