"""synchronize_: the FFF layers of a model see the samples of all ranks as one batch.

DistributedDataParallel or FSDP2 averages gradients. This module synchronises the rest: the balance loss reads the
shares of all ranks' samples, and trees are placed and rebalanced by the data of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import is_dtensor
from ..layer import fff_layers
from ..ranks import Ranks, alone, ranks_of
from ..regions import Usage
from ..regions import usage as local_usage


def synchronize_(model: nn.Module, group: Any = None) -> nn.Module:
    """Give the model the first rank's weights on all ranks, and make its FFF layers count the samples of all ranks.

    Call it on every rank, before you create a Recipe, place trees, or wrap the model for DDP or FSDP2. From then on all
    ranks must call `balance_loss`, `Recipe.step`, `initialize_tree_` and `rebalance_`, in the same order, each with its
    own part of the data. Forwards, the other losses and `fastff.usage` do not communicate.

    Args:
        group: the process group that shares the batch; None: the default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "synchronize_ needs a process group. Start the script with torchrun, and call "
            "torch.distributed.init_process_group() first."
        )
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group must be a process group that this rank is in, as from torch.distributed.new_group; got {group!r}."
        )
    layers, ranks = fff_layers(model), Ranks(group)
    if sparse := [name for name, layer in layers.items() if layer.sparse_gradients and ranks.size > 1]:
        raise TypeError(
            f"DistributedDataParallel cannot average the sparse gradients of the FFF layers {sparse[:4]}. Use an "
            "optimizer of torch.optim, and set layer.sparse_gradients = False."
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    form = str([(name, *tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()])
    real = [tensor for tensor in tensors.values() if not (tensor.is_meta or is_dtensor(tensor))]
    if real and not ranks.agree(form, real[0].device):
        raise ValueError(
            "synchronize_ needs the same model on all ranks; names, shapes, strides or dtypes of its tensors differ. "
            "Build it from the same sizes on each rank."
        )
    ranks.broadcast_(real)
    for layer in layers.values():
        layer.ranks = ranks
    return model


def usage(model: nn.Module, data: Any = None) -> dict[str, Usage]:
    """`fastff.usage`, summed over the ranks of a synchronised model. All ranks must call it."""
    ranks = ranks_of(model)
    device = next(iter(fff_layers(model).values())).node_weight.device
    with ranks.together(device) if ranks else alone():
        found = local_usage(model, data)
    return found if ranks is None else {name: _summed(used, ranks) for name, used in found.items()}


def _summed(used: Usage, ranks: Ranks) -> Usage:
    samples, tensors = torch.tensor(used.samples, device=used.leaf_count.device), list(vars(used).values())[1:]
    total, *sums = ranks.sum([samples, *tensors])  # in float64, where counts are exact
    return Usage(int(total), *sums)
