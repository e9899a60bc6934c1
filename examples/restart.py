"""Train on several processes, and survive the loss of one: restart from the last checkpoint, with the same numbers.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart.py checkpoints
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart.py others --kill-at 25 --check

Without the first line, a restart may wait for a process that is gone (github.com/pytorch/pytorch/issues/135712): torch
2.13 leaves its address in the store.

The last command kills a worker at step 25. torchrun stops the others and starts all of them again; they load the last
checkpoint and go on. Then they train once more without interruption, and compare the weights, bit by bit.

A checkpoint holds what the next steps depend on: model and optimizer (each rank writes its part), the recipe's state,
the step, which gives the position in the data, and the random generator of each rank.
"""

import argparse
import io
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastff

SAMPLES, BATCH = 512, 64


def data() -> tuple[Tensor, Tensor]:
    """Inputs, and targets of a random network."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(SAMPLES, 8, generator=generator), torch.randn(8, 3, generator=generator)
    return x, (x @ weight).sin()


def batch_of(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch: the order of an epoch is drawn from the epoch's number."""
    epoch, place = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(BATCH)[place]
    own = order.chunk(dist.get_world_size())[dist.get_rank()]
    return x[own], y[own]


class Checkpoint:
    """Saves and loads a training; only a save that has ended counts."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: fastff.Recipe) -> None:
        self.folder, self.model, self.optimizer, self.recipe = folder, model, optimizer, recipe

    def save(self, step: int) -> None:
        rest = io.BytesIO()
        torch.save({"step": step, "recipe": self.recipe.state_dict(), "random": torch.get_rng_state()}, rest)
        dcp.save(self._state() | {self._rest: rest.getvalue()}, checkpoint_id=self.folder / f"{step:06}")

    def load(self) -> int:
        """The step to go on with: 0 without a checkpoint."""
        ended = sorted(path.parent for path in self.folder.glob("*/.metadata"))  # written last
        if not ended:
            return 0
        state = self._state() | {self._rest: b""}
        dcp.load(state, checkpoint_id=ended[-1])
        options = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **options)
        rest = torch.load(io.BytesIO(state[self._rest]))
        self.recipe.load_state_dict(rest["recipe"])
        torch.set_rng_state(rest["random"])
        return int(rest["step"])

    @property
    def _rest(self) -> str:
        return f"rank {dist.get_rank()}"

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def train(folder: Path, steps: int, every: int, kill_at: int = -1) -> dict[str, Tensor]:
    """Train to the end, from the last checkpoint if there is one; the weights, whole."""
    torch.set_num_threads(1)
    torch.manual_seed(1 + dist.get_rank())
    x, y = data()
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), fastff.FFF(16, 3, depth=4, leaf_width=4, decision="sampled"))
    fastff.parallel.shard_leaves_(model)  # or synchronize_, to keep all leaves on all ranks
    recipe = fastff.Recipe(model, batch_of(0, x, y)[0], steps=steps, decision="sampled", noise=0.2)
    wrapped = DistributedDataParallel(model)
    leaves = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": leaves}, {"params": rest}], lr=1e-2)
    checkpoint = Checkpoint(folder, model, optimizer, recipe)
    for step in range(checkpoint.load(), steps):
        if step == kill_at and dist.get_rank() == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, target = batch_of(step, x, y)
        loss = (wrapped(inputs) - target).square().mean() + recipe.loss()
        optimizer.zero_grad()
        loss.backward()
        fastff.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recipe.step()
        if (step + 1) % every == 0:
            checkpoint.save(step + 1)
    fastff.parallel.gather_leaves_(model)
    return model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--kill-at", type=int, default=-1, help="kill a worker at this step, in the first attempt")
    parser.add_argument("--check", action="store_true", help="train again without interruption, and compare")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    weights = train(options.folder, options.steps, options.every, options.kill_at)
    total = sum(float(value.double().abs().sum()) for value in weights.values())
    if dist.get_rank() == 0:
        print(f"{options.steps} steps, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}: sum of weights {total:.12f}")
    if options.check:
        again = train(options.folder / "again", options.steps, options.every)
        same = all(torch.equal(value, weights[name]) for name, value in again.items())
        print(f"rank {dist.get_rank()}: {'the same weights' if same else 'OTHER WEIGHTS'} without interruption")
    dist.barrier()  # a rank that left alone could end the other's connections while it still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
