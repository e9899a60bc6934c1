"""Leaves over ranks: two and four processes under torchrun compute what one does, and checkpoints move between them."""

import os
import subprocess
import sys
from pathlib import Path

import leaf_parallel_worker as worker
import pytest
import torch
import torch.distributed as dist

import fastff
from fastff.layer import FFF
from helpers import make, one_rank

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # float64; Adam divides by the root of small squares
LIMIT = 150  # seconds; 10 are needed on two idle cores


def launch(*arguments, processes):
    """torchrun, without a network address that another run on this machine may hold."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False, env=environment
    )


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def assert_steps(results, expected):
    """The mean of the ranks' losses, and every rank's norm of the gradient."""
    for i, (loss, norm) in enumerate(expected):
        torch.testing.assert_close(sum(steps[i][0] for steps in results) / len(results), loss, **TOLERANCE)
        for steps in results:
            torch.testing.assert_close(steps[i][1], norm, **TOLERANCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the four ranks have left their numbers and checkpoints."""
    folder = tmp_path_factory.mktemp("leaf_parallel")
    run = launch(str(Path(worker.__file__)), str(folder), processes=4)
    assert run.returncode == 0, run.stderr[-4000:]
    return folder


@needs_gloo
@pytest.mark.slow
def test_two_four_and_one_process(folder):
    """Trained by two ranks, saved, trained on by four, saved, loaded into one: as one process all along.

    One test, so that the four processes start once, wherever pytest-xdist sends it.
    """
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]
    model = worker.build()
    optimizer = worker.optimizer_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = [worker.step(model, model, optimizer, worker.batch(i)) for i in range(2)]
    assert min((before[name] - p).abs().max() for name, p in model.named_parameters()) > 1e-3
    assert_steps([result["pair"] for result in found[:2]], expected)
    for result in found:
        assert result["here"] == 4
        assert_same(result["pair weights"], dict(model.named_parameters()))
        assert_same(result["loaded weights"], dict(model.named_parameters()))

    forget_shares(model)
    assert_steps(
        [result["four"] for result in found],
        [worker.step(model, model, optimizer, worker.batch(i)) for i in (2, 3)],
    )
    single = worker.build()
    other = worker.optimizer_of(single)
    worker.load(single, other, folder / "four")
    assert_same(dict(single.named_parameters()), dict(model.named_parameters()))
    torch.testing.assert_close(torch.cat([result["hard"] for result in found]), model.eval()(worker.batch(0)))
    usage = fastff.usage(model, worker.batch(0))["1"].leaf_count
    assert all(torch.equal(result["usage"], usage) for result in found)
    for one, own in ((model.train(), optimizer), (single, other)):  # the moments have come along
        forget_shares(one)
        worker.step(one, one, own, worker.batch(4))
    assert_same(dict(single.named_parameters()), dict(model.named_parameters()))

    check_random_parts(found)
    check_errors(found)


def forget_shares(model):
    """The running shares are part of a recipe's state, not of the model's."""
    for layer in model[1:]:
        layer.running_shares = None


def check_random_parts(found):
    """With draws there is nothing to compare with but the other ranks."""
    for result in found:
        assert_same(result["after"], found[0]["after"])
        assert all(value.isfinite().all() for value in result["after"].values())
        types, state, y = result["gathered"]
        assert types == [FFF, FFF]
        plain = worker.build()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain.eval()(worker.batch(0)), y)
        assert_same(result["late"], found[0]["late"])
    late = found[0]["late"]["leaf_in_weight"]
    assert late.abs().max() <= 6**-0.5
    assert len(late.flatten().unique()) == late.numel(), "each rank draws its own leaves"


def check_errors(found):
    for result in found:
        soft, sharing, twice, lazy = result["errors"]
        assert "got decision='soft', sharing=0.0" in soft
        assert "sharing=0.5" in sharing
        assert "gather_leaves_" in sharing
        assert "sharded already" in twice
        assert "Use an optimizer of torch.optim" in lazy


def test_a_process_group_is_needed():
    layer = fastff.FFF(6, 5, depth=3, leaf_width=3, decision="sampled")
    for call in (fastff.parallel.shard_leaves_, fastff.parallel.synchronize_):
        with pytest.raises(RuntimeError, match=r"needs a process group\. Start the script with torchrun"):
            call(layer)
    assert type(layer) is FFF


@needs_gloo
def test_layers_that_share_leaves_are_refused(tmp_path):
    """They were once two after sharding, and trained apart."""
    first, second = make(5, 5), make(5, 5)
    second.leaf_in_weight = first.leaf_in_weight
    model = torch.nn.Sequential(first, second)
    with one_rank(tmp_path), pytest.raises(ValueError, match="the FFF layers '0' and '1' share leaves"):
        fastff.parallel.shard_leaves_(model)
    assert first.leaf_in_weight is second.leaf_in_weight


@needs_gloo
def test_other_groups_and_meshes_are_named(tmp_path):
    layer = make(5, 5)
    with one_rank(tmp_path):
        with pytest.raises(TypeError, match=r"group must be a process group that this rank is in, .* got 'workers'"):
            fastff.parallel.synchronize_(layer, "workers")
        with pytest.raises(TypeError, match=r"mesh must be a DeviceMesh, .* got 3"):
            fastff.parallel.shard_leaves_(layer, 3)
        fastff.parallel.shard_leaves_(fastff.parallel.synchronize_(layer, torch.distributed.group.WORLD))
