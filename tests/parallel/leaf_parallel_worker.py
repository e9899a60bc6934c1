"""What four ranks do for test_shards.py: torchrun --nproc-per-node 4 leaf_parallel_worker.py FOLDER.

Two ranks of them train sharded leaves and save; four load that, train on and save; the test loads it into one process.
Both pairs of ranks do the same, as copies of each other. Every rank leaves a file of numbers.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fastff

BATCH = 24
OPTIONS = {"decision": "sampled", "estimator": "even", "dtype": torch.float64}


def build():
    """All alternatives with the estimator "even": nothing is drawn, so one process computes the same."""
    torch.manual_seed(3)
    first = fastff.FFF(6, 5, depth=3, leaf_width=3, alternatives=3, activation="swiglu", **OPTIONS)
    second = fastff.FFF(5, 2, depth=2, leaf_width=2, alternatives=2, node_width=2, bias=False, **OPTIONS)
    return nn.Sequential(nn.Linear(6, 6).double(), first, second)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)


def optimizer_of(model):
    """Two groups: torch takes DTensors and plain tensors one kind at a time."""
    leaves = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return torch.optim.AdamW([{"params": group} for group in (leaves, rest) if group], lr=1e-2)


def step(model, wrapped, optimizer, x):
    """A step with clipping; the loss before."""
    loss = (wrapped(x) - 1).square().mean() + 0.3 * fastff.balance_loss(model)
    optimizer.zero_grad()
    loss.backward()
    norm = fastff.optim.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def full(model):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for n, p in model.named_parameters()}


def state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load(model, optimizer, folder):
    found = state(model, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


class Traffic:
    """Bytes that all-to-alls send from this rank, to itself too, and rows that arrive."""

    def __init__(self):
        self.sent = self.rows = 0
        self.call, dist.all_to_all_single = dist.all_to_all_single, self.count

    def count(self, output, rows, *splits, **options):
        self.sent += rows.nbytes
        self.rows += len(output) if rows.dim() == 2 else 0
        return self.call(output, rows, *splits, **options)


def main(folder):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, found = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "leaf"))
    pair = mesh["leaf"]

    model = fastff.parallel.shard_leaves_(build(), pair)
    found["here"] = len(model[1].leaf_in_weight.to_local())
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=pair.get_group())
    optimizer = optimizer_of(model)
    found["pair"] = [step(model, wrapped, optimizer, batch(i).chunk(2)[rank % 2]) for i in range(2)]
    found["pair weights"] = full(model)
    if rank < 2:
        dcp.save(state(model, optimizer), checkpoint_id=f"{folder}/two", process_group=pair.get_group())
    dist.barrier()

    model = build()
    for parameter in model.parameters():
        parameter.data.zero_()
    model = fastff.parallel.shard_leaves_(model)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), optimizer_of(model)
    load(model, optimizer, f"{folder}/two")
    found["loaded weights"] = full(model)
    traffic = Traffic()
    found["four"] = [step(model, wrapped, optimizer, batch(i).chunk(4)[rank]) for i in range(2, 4)]
    found["sent"], found["rows"] = traffic.sent, traffic.rows
    dcp.save(state(model, optimizer), checkpoint_id=f"{folder}/four")

    # Any part of a batch, also none; under autocast; with every estimator; a recipe's start and rebalancing.
    x = batch(0).split([0, 1, 3, 20])[rank]
    with torch.no_grad():
        found["hard"] = model.eval()(x)
    found["usage"] = fastff.parallel.usage(model, batch(0).chunk(4)[rank])["1"].leaf_count
    recipe = fastff.Recipe(model.train(), batch(0).chunk(4)[rank], steps=1, decision="sampled", noise=0.1)
    for layer, estimator in zip(model[1:], ("mixture", "even"), strict=True):
        layer.estimator, layer.alternatives, layer.dropout, layer.transposition = estimator, 2, 0.1, 0.1
    step(model, wrapped, optimizer, batch(9).chunk(4)[rank])
    recipe.step()
    found["after"] = full(model)

    errors = []
    for change in ({"decision": "soft"}, {"sharing": 0.5}):
        old = {name: getattr(model[1], name) for name in change}
        vars(model[1]).update(change)
        try:
            model(x)
        except ValueError as error:
            errors.append(str(error))
        vars(model[1]).update(old)
    for call in (lambda: fastff.parallel.shard_leaves_(model), lambda: fastff.optim.LazyAdamW(model)):
        try:
            call()
        except TypeError as error:
            errors.append(str(error))
    found["errors"] = errors

    late = fastff.FFF(6, 5, depth=3, leaf_width=3, decision="sampled", device="meta")
    fastff.parallel.shard_leaves_(late).to_empty(device="cpu").reset_parameters()
    found["late"] = full(late)
    fastff.parallel.gather_leaves_(model)
    found["gathered"] = [type(layer) for layer in model[1:]], model.state_dict(), model.eval()(batch(0))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
