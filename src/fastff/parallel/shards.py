"""Leaf parallelism: each rank holds its part of the leaves of every FFF layer, and all of the nodes.

A sample finds its leaf on its own rank, since every rank has all nodes; its row then goes to the leaf's rank, and the
output back (exchange.py). Leaves are DTensors, sharded along their first dimension: torch's optimizers, gradient
clipping and, even with another number of ranks, `torch.distributed.checkpoint` take them.

As in fully_shard, layers change their class in place, and remain FFF layers.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import functional
from .._torch import is_dtensor
from ..layer import FFF, fff_layers, trainable_layers
from ..ranks import Ranks
from ..tensors import Leaves, no_autocast
from .exchange import at_owner
from .synchronize import synchronize_

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # names that DistributedDataParallel leaves alone


class ShardedFFF(FFF):
    """An FFF whose leaves are spread over ranks. `shard_leaves_` makes it; all ranks run it together."""

    owners: Any  # Ranks

    def forward(self, x: Tensor) -> Tensor:
        """The sampled pass in training, the hard pass in evaluation."""
        if not self.training:
            return self._hard(x)
        if self.decision != "sampled" or self.sharing or self.sparse_gradients:
            raise ValueError(
                'sharded leaves train with decision="sampled", sharing=0 and dense gradients; got '
                f"decision={self.decision!r}, sharing={self.sharing}, sparse_gradients={self.sparse_gradients}. Set "
                'them, for example with Recipe(..., decision="sampled"), or call fastff.parallel.gather_leaves_.'
            )
        options: dict[str, Any] = {"activation": self.activation, "temperature": self.temperature_tensor}
        options |= {"transposition": self.transposition, "dropout": self.dropout}
        return self._sampled(x, self.leaves, options | {"at_owner": partial(at_owner, self.owners)})

    def _hard(self, x: Tensor) -> Tensor:
        flat = functional.flatten(x, self.node_weight)
        leaf, dtype = functional.route(flat, self.tree, activation=self.activation), functional.autocast_dtype(flat)

        def run(rows: Tensor, leaf: Tensor, leaves: Leaves) -> Tensor:
            return functional.visit(rows, leaf, leaves, self.activation)

        with no_autocast(flat):
            y = at_owner(self.owners, flat.to(self.node_weight.dtype), leaf, self.leaves, run)
        return functional.restore(y if dtype is None else y.to(dtype), x)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an FFF with sharded leaves cannot be pickled: a rank has its own leaves alone. Use "
            "torch.distributed.checkpoint, or call fastff.parallel.gather_leaves_ first."
        )

    def soft(self, x: Tensor) -> Tensor:
        """Needs all leaves: an error."""
        raise TypeError("the soft pass needs all leaves; these are sharded. Call fastff.parallel.gather_leaves_ first.")

    def reset_parameters(self) -> None:
        """As in FFF. Each rank draws its own leaves and gets the first rank's nodes."""
        own = dict(self._parameters)
        seed = int(torch.randint(2**31, ()))
        try:
            self._parameters.update({n: p.to_local() for n, p in own.items() if is_dtensor(p)})  # type: ignore[union-attr]
            with torch.random.fork_rng():
                torch.manual_seed(seed + dist.get_rank(self.owners.group))
                super().reset_parameters()
        finally:
            self._parameters.update(own)
        self.owners.broadcast_(self.tree_parameters())


def shard_leaves_(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Spread the leaves of every FFF layer over the ranks: each keeps 2**depth / ranks of them, and all nodes.

    Training needs `decision="sampled"`. The model is synchronised first (`synchronize_`). Create the optimizer
    afterwards. All ranks must run the model together, each on its part of the batch, and equally many forwards.
    DistributedDataParallel(model) then averages the gradients of everything but the leaves. To build a model that fits
    on no rank: create it on the meta device, shard it, then `to_empty` and `reset_parameters`.

    Args:
        mesh: a DeviceMesh of one dimension; None: all ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    layers = trainable_layers(model)
    if not dist.is_initialized():
        raise RuntimeError(
            "shard_leaves_ needs a process group. Start the script with torchrun, and call "
            "torch.distributed.init_process_group() first."
        )
    if mesh is None:
        device = next(iter(layers.values())).node_weight.device.type
        mesh = init_device_mesh("cpu" if device == "meta" else device, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, as init_device_mesh makes one; got {mesh!r}.")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension; got {mesh.ndim}. Pass one of its dimensions: mesh['name'].")
    for name, layer in layers.items():
        if any(is_dtensor(parameter) for parameter in layer.parameters()):
            raise TypeError(
                f"the FFF layer {name!r} is sharded already. Call shard_leaves_ once, and before fully_shard."
            )
    owners: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        for parameter in layer.leaf_parameters():
            if (other := owners.setdefault(parameter, name)) != name:
                raise ValueError(
                    f"the FFF layers {other!r} and {name!r} share leaves, which would be two after sharding. Give each "
                    "layer its own parameters, or train on several processes with DistributedDataParallel."
                )
        if type(layer) is not FFF:
            raise TypeError(f"shard_leaves_ takes layers of class FFF; {name!r} is of {type(layer).__name__}.")
        if layer.num_leaves % mesh.size():
            raise ValueError(
                f"each rank holds the same number of leaves; the FFF layer {name!r} has {layer.num_leaves} for "
                f"{mesh.size()} ranks. Use 1, 2, 4, ... ranks, and at most as many as leaves."
            )
    synchronize_(model, mesh.get_group())
    for layer in layers.values():
        _shard_(layer, mesh)
    ignored = [f"{prefix}.{name}".lstrip(".") for prefix, name in _sharded(model)]
    setattr(model, _IGNORED, [*getattr(model, _IGNORED, ()), *ignored])
    return model


def gather_leaves_(model: nn.Module) -> nn.Module:
    """Undo `shard_leaves_`: every rank holds all leaves again, as plain parameters, and can save the model.

    All ranks must call it. An optimizer of the sharded model does not train the new parameters.
    """
    ignored = {f"{prefix}.{name}".lstrip(".") for prefix, name in _sharded(model)}
    for layer in fff_layers(model).values():
        if isinstance(layer, ShardedFFF):
            for name, parameter in layer._parameters.items():
                if is_dtensor(parameter):
                    full = parameter.full_tensor()  # type: ignore[union-attr]
                    layer._parameters[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)  # type: ignore[union-attr]
            del layer.owners
            layer.__class__ = FFF  # type: ignore[assignment]
    setattr(model, _IGNORED, [name for name in getattr(model, _IGNORED, ()) if name not in ignored])
    return model


def _shard_(layer: FFF, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    for name, parameter in layer._parameters.items():
        if parameter is not None and name.startswith("leaf_"):
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            layer._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    layer.__class__ = ShardedFFF
    layer.owners = Ranks(mesh.get_group())  # type: ignore[assignment]


def _sharded(model: nn.Module) -> list[tuple[str, str]]:
    """The modules and the names of the parameters that are spread over ranks."""
    return [
        (prefix, name)
        for prefix, layer in model.named_modules()
        if isinstance(layer, ShardedFFF)
        for name, parameter in layer._parameters.items()
        if is_dtensor(parameter)
    ]
