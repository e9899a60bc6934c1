"""Models that surgery can change or save: plain modules in this process, not compiled, scripted or sharded."""

import torch
from torch import nn

from .._torch import is_dtensor


def check_mode() -> None:
    """Raise within inference mode."""
    if torch.is_inference_mode_enabled():
        raise ValueError("parameters created within torch.inference_mode() never train. Call it outside.")


def check_model(model: nn.Module, *, saving: bool = False) -> None:
    """Raise if another library controls the model's modules, so that they cannot be changed or, for saving, named."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, an nn.Module; got {type(model).__name__}. Pass the model itself.")
    for path, module in model.named_modules():
        at = f"{type(model).__name__} is" if not path else f"{path} is"
        if saving and "_orig_mod" in module._modules:
            remedy = "Pass the model that you compiled: compiled._orig_mod."
            if path:
                remedy = f"Put the original module back: model.set_submodule({path!r}, compiled._orig_mod)."
            raise ValueError(f"{at} the result of torch.compile, which renames its tensors. {remedy}")
        if not saving and ("_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None):
            raise ValueError(f"{at} compiled. Call it before torch.compile, on the model itself.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{at} a TorchScript module, which cannot be changed. Pass the model it was made from.")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{at} wrapped by DistributedDataParallel. Call it before wrapping, on the model itself.")
        if "_fsdp_wrapped_module" in module._modules or any(is_dtensor(p) for p in module.parameters(recurse=False)):
            remedy = "Call it before sharding, on the whole model."
            if saving:
                remedy = (
                    "Call fastff.parallel.gather_leaves_ after shard_leaves_. After fully_shard, load torch's "
                    "get_model_state_dict with full_state_dict=True into a plain model, and save that."
                )
            raise ValueError(f"{at} sharded (FSDP, DTensor). {remedy}")
