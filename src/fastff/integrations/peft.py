"""PEFT's adapters beside FFF layers and on them, with a check of what the targets name.

    from peft import LoraConfig
    from fastff.integrations.peft import get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"])                       # beside the layers
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"])        # ... which train whole
    config = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.leaf_in_weight"])    # on their leaves
    model = get_peft_model(model, config)

target_parameters gives every leaf low-rank factors of its own, as PEFT does for the experts of an MoE. PEFT itself
ignores a target that is missing as long as another one is found: the name of a linear layer that surgery replaced would
get no adapter, and nothing would say so. And it adds to int8 leaves, which rounds what it adds.
"""

import re
from typing import Any

import peft
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ..layer import FFF
from ..surgery.history import history_of

_HEADS = ("classifier", "score", "qa_outputs")


def get_peft_model(model: nn.Module, config: Any, *args: Any, **options: Any) -> Any:
    """peft.get_peft_model, after `check_targets`."""
    check_targets(model, config)
    return peft.get_peft_model(model, config, *args, **options)


def check_targets(model: nn.Module, config: Any) -> None:
    """Raise if a config names an FFF as a linear layer, int8 leaves, or what surgery replaced or the model lacks."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FFF)}
    parameters = getattr(config, "target_parameters", None) or []
    for name, layer in layers.items():
        if _names(config, name):
            wanted = [key for key in layer._parameters if key.startswith("leaf_") and key.endswith("_weight")]
            last, present = name.rpartition(".")[2], [key for key in wanted if layer._parameters[key] is not None]
            raise ValueError(
                f"target_modules must name linear layers; got {name}, an FFF. For adapters on its leaves pass "
                f"target_parameters={[f'{last}.{key}' for key in present]}; to train it whole pass "
                f"modules_to_save=[{last!r}]."
            )
        if not layer.leaves.is_int8:
            continue
        on = [key for key in layer._parameters if any(f".{name}.{key}".endswith(f".{target}") for target in parameters)]
        whole = getattr(config, "modules_to_save", None) or []
        if on or any(re.match(rf"(^|.*\.){target}($|\..*)", name) for target in whole):
            raise ValueError(
                f"int8 leaves do not train; got {', '.join(on) or 'the whole layer'} of {name} as a target. Train "
                "before fastff.quantize_, or adapt the linear layers beside it alone."
            )
    _check_replaced(model, config)
    _check_present(model, config, parameters)


def _check_replaced(model: nn.Module, config: Any) -> None:
    """Raise if the targets name linear layers that surgery replaced, and none that is left."""
    gone = [path for entry in history_of(model) for path in entry["linears"] if _names(config, path)]
    left = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in gone and _names(config, name)}
    if missing := [path for path in gone if path.rpartition(".")[2] not in left]:
        names = sorted({path.rpartition(".")[2] for path in missing})
        raise ValueError(
            f"target_modules must name layers of the model; got {', '.join(names)}, which surgery replaced by an FFF "
            f"({missing[0]}{' and others' * (len(missing) > 1)}). Leave the name out; for adapters on the leaves use "
            "target_parameters, to train the FFF whole modules_to_save."
        )


def _check_present(model: nn.Module, config: Any, parameters: list[str]) -> None:
    """Raise if target_parameters or modules_to_save name what the model does not have: PEFT passes over it."""
    known = [f".{name}" for name, _ in model.named_parameters()]
    if missing := [target for target in parameters if not any(name.endswith(f".{target}") for name in known)]:
        raise ValueError(
            f"target_parameters must name parameters of the model; got {', '.join(missing)}. The leaves of an FFF are "
            "leaf_in_weight, leaf_gate_weight and leaf_out_weight, with its name before them."
        )
    modules = [name for name, _ in model.named_modules()]
    # PEFT adds the heads of its tasks to a config itself.
    whole = [target for target in getattr(config, "modules_to_save", None) or [] if target not in _HEADS]
    if missing := [target for target in whole if not any(re.match(rf"(^|.*\.){target}($|\..*)", m) for m in modules)]:
        raise ValueError(f"modules_to_save must name modules of the model; got {', '.join(missing)}.")


def _names(config: Any, path: str) -> bool:
    """Whether target_modules name a module at this path, by PEFT's own rule."""
    targets = getattr(config, "target_modules", None)
    if not targets or targets == "all-linear":
        return False
    found = check_target_module_exists(config, path)
    return isinstance(found, bool | re.Match) and bool(found)
