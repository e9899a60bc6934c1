"""Two processes over gloo against one: the losses under DDP and FSDP2, and LocalSGD under DDP.

DDP and FSDP2 average the gradients of the ranks. With shards of equal size the mean over ranks of a mean over samples
is the mean over all samples, so the task loss and hardening_loss equal those of the whole batch; balance_loss is not a
mean over samples, so for it the single process averages the losses of the shards. All in float64: 1e-10 is rounding.

The two processes are started once, do everything, and leave files. They end within LIMIT seconds, or are ended.
"""

import copy
import datetime
import multiprocessing
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastff
from fastff.optim import LocalSGD
from helpers import make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
]

LIMIT = 120  # seconds; 6 to 13 are needed on two busy cores of a Xeon
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
RANKS, SHARD = 2, 11


def model_of(decision="soft"):
    """The same numbers wherever it is called."""
    torch.manual_seed(1)
    first, second = make(7, 5, depth=2, decision=decision), make(5, 3, depth=3, leaf_width=1, decision=decision)
    return nn.Sequential(nn.Linear(6, 7).double(), first, second)  # 3 and 7 nodes: FSDP2 shards them unevenly


def shard_of(rank, batch=0):
    generator = torch.Generator().manual_seed(100 * batch + rank)
    x, target = (torch.randn(SHARD, n, generator=generator, dtype=torch.float64) for n in (6, 3))
    return x, target


def loss_of(model, x, target, balance=0.1):
    """The training loss of the package's documentation; the FFF layers are found inside any wrapper."""
    task = (model(x) - target).square().mean()
    return task + 3.0 * fastff.hardening_loss(model) + balance * fastff.balance_loss(model)


def grads_of(model):
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


# What each rank does.


def ddp(rank, decision, balance):
    model = model_of(decision)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second time, the reducer has its buckets
        wrapped.zero_grad()
        loss_of(wrapped, *shard_of(rank), balance).backward()
    return grads_of(model)


def fsdp(rank, decision, each_layer):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = model_of(decision), init_device_mesh("cpu", (RANKS,))
    for layer in model[1:] if each_layer else []:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = model[1].leaf_in_weight.to_local().numel() < model[1].leaf_in_weight.numel()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, *shard_of(rank)).backward()
    grads = grads_of(model)
    with torch.no_grad():
        output = model.eval()(shard_of(rank)[0])
    return {"grads": grads, "output": output, "sharded": sharded}


LOCAL = {"lr": 0.1, "local_batch": 9, "momentum": 0.5}  # of 22 samples over 4 and 8 leaves


def local_sgd(rank, decision, accumulate):
    """Several steps; the parameters after each. With `accumulate`, two batches a step, the first not reduced."""
    model = model_of(decision)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = LocalSGD(wrapped, **LOCAL)
    history = []
    for step in range(5):
        optimizer.zero_grad()
        if accumulate:
            with wrapped.no_sync():
                (task_of(wrapped, *shard_of(rank, 10 + step)) / 2).backward()
        (task_of(wrapped, *shard_of(rank, step)) / (1 + accumulate)).backward()
        optimizer.step()
        history.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return history


def task_of(model, x, target):
    return (model(x) - target).square().sum(-1).mean()


def three_and_two(rank, local_batch):
    """One step where the first input's sign decides, and goes left for 3 samples of rank 0 and 2 of rank 1."""
    layer = make(6, 3, depth=1, decision="straight_through")
    with torch.no_grad():
        layer.node_weight.copy_(torch.eye(1, 6))
        layer.node_bias.zero_()
    wrapped = nn.parallel.DistributedDataParallel(layer)
    optimizer = LocalSGD(wrapped, 0.1, local_batch=local_batch)
    x, target = shard_of(rank)
    x[:, 0] = 1
    x[: 3 - rank, 0] = -1
    before = layer.leaf_out_bias.detach().clone()
    task_of(wrapped, x, target).backward()
    optimizer.step()
    return {"stepped": layer.leaf_out_bias.ne(before).any(-1), "mass": optimizer.state[layer.leaf_out_bias]["mass"]}


def one_layer():
    layer = make(6, 3, depth=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return layer


def one_idle(rank):
    """Only rank 0 has data; the gradients are shared out by hand."""
    layer = one_layer()
    optimizer = LocalSGD(layer, 0.1, local_batch=SHARD)
    if rank == 0:
        task_of(layer, *shard_of(0)).backward()
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return dict(layer.named_parameters())


def reductions(rank):
    """How often a step communicates, for a model of two FFF layers."""
    model = model_of()
    optimizer = LocalSGD(model, 0.1)
    task_of(model, *shard_of(rank)).backward()
    calls, all_reduce = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor: calls.append(len(tensor)) or all_reduce(tensor))
        optimizer.step()
    return calls


def sharded_local_sgd(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(TypeError) as error:
        LocalSGD(model, 0.1)
    return [str(error.value)]


def build_synchronised(decision):
    """A model of two trees; the leaves of the sampled one's path and all its alternatives, so nothing is drawn."""
    sampled = {"estimator": "even", "alternatives": 2} if decision == "sampled" else {}
    first = make(7, 5, depth=3, decision=decision, **sampled | ({"alternatives": 3} if sampled else {}))
    second = make(5, 3, depth=2, leaf_width=1, node_width=2, decision=decision, **sampled)
    return nn.Sequential(nn.Linear(6, 7).double(), first, second)


def train(model, wrapped, shard, recipe):
    """Losses, boundaries and balance over a few steps with rebalancing; the recipe's tree was placed before."""
    optimizer, found = torch.optim.SGD(wrapped.parameters(), 0.1), {"loss": [], "balance": []}
    for step in range(4):
        x, target = shard(step)
        task = (wrapped(x) - target).square().mean()
        loss, balance = recipe.loss(), fastff.balance_loss(model)
        optimizer.zero_grad()
        (task + loss).backward()
        optimizer.step()
        recipe.step()
        found["loss"].append((task + loss).detach())
        found["balance"].append(balance.detach())
    full = {name: p.detach() for name, p in model.named_parameters()}
    full = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in full.items()}
    return found, full, recipe.state_dict()


def recipe_of(model, data, decision):
    alternatives = {"alternatives": 2} if decision == "sampled" else {}
    options = {"noise": 0.0, "balance": 0.5, "hardening": 0.1, "min_share": 1.0, "rebalance_every": 2}
    recipe = fastff.Recipe(model, data, steps=4, decision=decision, final_temperature=2.0, **options, **alternatives)
    if alternatives:
        model[1].alternatives = 3  # every level: the estimator draws nothing
    return recipe


def synchronised(rank, decision, wrapper):
    """Each rank begins with other weights, and has its own part of the data."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7 + rank)
    model = fastff.parallel.synchronize_(build_synchronised(decision))
    recipe = recipe_of(model, [shard_of(rank, 50 + i)[0] for i in range(4)], decision)
    wrapped = model
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif wrapper == "fsdp":
        for layer in model[1:]:
            fully_shard(layer)
        fully_shard(model)
    else:
        fully_shard(model)
    found, full, state = train(model, wrapped, lambda step: shard_of(rank, step), recipe)
    used = fastff.parallel.usage(model.eval(), shard_of(rank)[0])["1"]
    return found, full, state, used.leaf_count


BALANCES = {  # by name: the kind, and the layer's options
    "leaf": ("leaf", {}),
    "node": ("node", {}),
    "sampled": ("node", {"decision": "sampled", "estimator": "even", "alternatives": 2}),
    "leaf, shed": ("leaf", {"epsilon": 0.5}),
    "node, shed": ("node", {"epsilon": 0.5}),
}


def balances(rank):
    """Parts of 5 and 17 samples, for every form of the loss; and an empty part on one rank."""
    found, x = {}, whole()[0]
    for name, (kind, options) in BALANCES.items():
        torch.manual_seed(7)
        model = fastff.parallel.synchronize_(make(6, 3, depth=2, **options))
        wrapped = nn.parallel.DistributedDataParallel(model)
        y = wrapped(x[:5] if rank == 0 else x[5:])
        loss = fastff.balance_loss(model, kind)
        (loss + 0 * y.sum()).backward()  # DistributedDataParallel wants gradients of all parameters
        found[name] = loss.detach(), model.node_weight.grad.clone()
    torch.manual_seed(7)
    model = fastff.parallel.synchronize_(make(6, 3, depth=2))
    x = shard_of(0)[0]
    model(x if rank == 0 else x[:0])
    loss = fastff.balance_loss(model)
    loss.backward()  # also where no sample is: a training loop calls it on every rank
    found["empty"] = loss.detach()
    return found


def uneven(rank, way):
    """Batches of 4 and 16 rows, where every forward is a collective: both ranks run as many. Usage of the leaves."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7 + rank)
    model = fastff.parallel.synchronize_(build_synchronised("sampled"))
    data = [torch.randn(4 + 12 * rank, 6).double() for _ in range(12)]
    recipe = recipe_of(model, data, "sampled")
    if way == "leaves":
        fastff.parallel.shard_leaves_(model)
        fastff.initialize_tree_(model, data, samples=40)
    else:
        fully_shard(model)
    fastff.rebalance_(model, data, min_share=1.0, samples=40)
    recipe.close()
    return {name: used.leaf_count for name, used in fastff.parallel.usage(model, data[:5]).items()}


def errors(rank):
    """An error on one rank alone is one on all, and nobody waits."""
    model = fastff.parallel.synchronize_(build_synchronised("sampled"))
    with pytest.raises(TypeError) as lazy:
        fastff.optim.LazyAdamW(model)
    x = shard_of(rank)[0]
    with pytest.raises(RuntimeError) as alone:
        fastff.rebalance_(model, x if rank == 0 else x[:, :2])
    with pytest.raises(RuntimeError) as used:
        fastff.parallel.usage(model, x if rank == 0 else x[:, :2])
    for call in (fastff.rebalance_, lambda model, data: fastff.Recipe(model, data, steps=3)):
        with pytest.raises((RuntimeError, ValueError)) as empty:  # before any forward
            call(model, x if rank == 0 else [])
        assert "1 of 2 ranks" in str(empty.value) if rank == 0 else "empty list" in str(empty.value)
    fastff.initialize_tree_(model, x)
    with pytest.raises(RuntimeError) as kept:  # no tree is placed: the recipe only estimates the work
        fastff.Recipe(model, x if rank == 0 else x[:, :2], steps=3)
    with pytest.raises(ValueError, match="some ranks have data, others have none"):
        fastff.Recipe(model, x if rank == 0 else None, steps=3)
    with pytest.raises(ValueError, match="needs the same model on all ranks"):
        fastff.parallel.synchronize_(make(6, 3, depth=2 + rank))
    turned = nn.Sequential(nn.Linear(6, 6), make(6, 3))
    if rank:
        turned[0].weight.data = turned[0].weight.data.mT  # a broadcast sends the memory, whatever the strides
    with pytest.raises(ValueError, match="strides"):
        fastff.parallel.synchronize_(turned)
    return [str(lazy.value), str(alone.value), str(used.value), str(kept.value)]


DECISIONS, WRAPPERS = ("soft", "straight_through", "sampled"), ("ddp", "fsdp", "fsdp-root")
JOBS = {
    **{f"ddp-{d}-{b}": (ddp, d, b) for d in ("soft", "straight_through") for b in (0.0, 0.1)},
    **{f"fsdp-{d}-{e}": (fsdp, d, e) for d in ("soft", "straight_through") for e in (False, True)},
    **{f"local_sgd-{d}-{a}": (local_sgd, d, a) for d in ("soft", "straight_through") for a in (False, True)},
    **{f"three_and_two-{n}": (three_and_two, n) for n in (5, 6)},
    "one_idle": (one_idle,),
    "reductions": (reductions,),
    "sharded_local_sgd": (sharded_local_sgd,),
    **{f"synchronised-{d}-{w}": (synchronised, d, w) for d in DECISIONS for w in WRAPPERS},
    "balances": (balances,),
    **{f"uneven-{way}": (uneven, way) for way in ("leaves", "fsdp")},
    "errors": (errors,),
}


def work(rank, folder):
    """All jobs in turn, a file each. An error is a result too, and the last: the other rank may be waiting in it."""
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet", datetime.timedelta(seconds=LIMIT / 4)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS, timeout=patience)
    for name, (job, *arguments) in JOBS.items():
        try:
            result = job(rank, *arguments)
        except Exception:
            torch.save(traceback.format_exc(), f"{folder}/{name}-{rank}")
            raise
        torch.save(result, f"{folder}/{name}-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A function from the name of a job to what rank 0 and rank 1 have to show for it."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(folder)), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT / RANKS)
    for process in processes:
        process.kill()
        process.join()

    def read(name):
        files = [folder / f"{name}-{rank}" for rank in range(RANKS)]
        results = [torch.load(f, weights_only=False) if f.exists() else "ended before this was done" for f in files]
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
        if failures:
            pytest.fail("\n".join([*failures, f"exit codes {[process.exitcode for process in processes]}"]))
        return results

    return read


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def mean_over_shards(decision, balance=0.1):
    model = model_of(decision)
    for rank in range(RANKS):
        (loss_of(model, *shard_of(rank), balance) / RANKS).backward()
    return grads_of(model)


def whole(batch=0):
    return tuple(torch.cat(parts) for parts in zip(*(shard_of(rank, batch) for rank in range(RANKS)), strict=True))


decisions = pytest.mark.parametrize("decision", ["soft", "straight_through"])


@pytest.mark.slow
@decisions
@pytest.mark.parametrize("balance", [0.0, 0.1])
def test_ddp_gives_the_gradients_of_one_process(ranks, decision, balance):
    """The losses are read outside of DDP's forward, from the layers: their gradients must be reduced as well."""
    expected = mean_over_shards(decision, balance)
    for grads in ranks(f"ddp-{decision}-{balance}"):
        assert_same(grads, expected, **TOLERANCE)
    if not balance:
        model = model_of(decision)
        loss_of(model, *whole(), balance).backward()
        assert_same(expected, grads_of(model), **TOLERANCE)


@decisions
def test_hardening_reaches_the_gradients_of_ddp(ranks, decision):
    """The comparison above is worth something only if the losses on the tree change the gradients of the nodes."""
    model = model_of(decision)
    for rank in range(RANKS):
        (task_of(model, *shard_of(rank)) / 3 / RANKS).backward()  # 3 outputs: the mean that loss_of takes
    grads, _ = ranks(f"ddp-{decision}-0.0")
    for name in ("1.node_weight", "2.node_bias"):
        assert (grads[name] - model.get_parameter(name).grad).abs().max() > 1e-3


@decisions
@pytest.mark.parametrize("each_layer", [False, True])
def test_fsdp_gives_the_gradients_of_one_process(ranks, decision, each_layer):
    """FSDP2 frees a layer's parameters after its forward; the losses come later, from what it has left behind."""
    expected = mean_over_shards(decision)
    model = model_of(decision).eval()
    for rank, result in enumerate(ranks(f"fsdp-{decision}-{each_layer}")):
        assert result["sharded"]
        assert_same(result["grads"], expected, **TOLERANCE)
        torch.testing.assert_close(result["output"], model(shard_of(rank)[0]), **TOLERANCE)


@decisions
@pytest.mark.parametrize("accumulate", [False, True])
def test_local_sgd_under_ddp_is_one_process_with_the_whole_batch(ranks, decision, accumulate):
    """Ranks stay equal to the bit, and step when the samples of both have come to local_batch, not those of each."""
    model = model_of(decision)
    optimizer = LocalSGD(model, **LOCAL)
    first, second = ranks(f"local_sgd-{decision}-{accumulate}")
    stepped, waited = set(), set()
    for step in range(5):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        for batch in [step, 10 + step] if accumulate else [step]:
            (task_of(model, *whole(batch)) / (1 + accumulate)).backward()
        optimizer.step()
        assert_same(first[step], second[step], rtol=0, atol=0)
        assert_same(first[step], dict(model.named_parameters()), **TOLERANCE)
        for i in (1, 2):
            moved = model[i].leaf_out_bias.ne(before[i].leaf_out_bias).any(-1)
            stepped |= {(i, leaf) for leaf in moved.nonzero().flatten().tolist()}
            waited |= {(i, leaf) for leaf in (~moved).nonzero().flatten().tolist()}
    assert len(stepped) >= 4
    assert len(waited) >= 4, "some steps must wait, or the counts have not been tested"


@pytest.mark.parametrize(("local_batch", "stepped", "mass"), [(5, [True, True], [0, 0]), (6, [False, True], [5, 0])])
def test_local_batch_is_reached_by_both_ranks_together(ranks, local_batch, stepped, mass):
    """3 samples here and 2 there are 5: enough for a leaf that waits for 5, on both ranks, and too few for one of 6."""
    for result in ranks(f"three_and_two-{local_batch}"):
        assert result["stepped"].tolist() == stepped
        assert result["mass"].tolist() == mass


def test_a_rank_without_a_forward_counts_none(ranks):
    """It must take part in the sum of the counts, for which the others wait, and steps with theirs."""
    layer = one_layer()
    optimizer = LocalSGD(layer, 0.1, local_batch=SHARD)
    task_of(layer, *shard_of(0)).backward()
    before = layer.node_bias.item()
    optimizer.step()
    assert layer.node_bias.item() != before
    for result in ranks("one_idle"):
        assert_same(result, dict(layer.named_parameters()), **TOLERANCE)


def test_a_step_communicates_once(ranks):
    """4 leaves, 3 nodes and the samples of one layer, 8, 7 and 1 of the other."""
    assert ranks("reductions") == [[24], [24]]


def test_sharded_parameters_are_refused(ranks):
    for (message,) in ranks("sharded_local_sgd"):
        assert "the FFF layer '1' has DTensors" in message
        assert "Use an optimizer of torch.optim, or DistributedDataParallel" in message


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_synchronised_ranks_train_as_one_process(ranks, decision, wrapper):
    """Losses, tree, weights and usage of two ranks are one process's with the whole batch, to rounding.

    The tree is placed by the data of both, the balance loss reads their shares, and rebalancing moves boundaries.
    """
    torch.manual_seed(7)
    model = build_synchronised(decision)
    recipe = recipe_of(model, [whole(50 + i)[0] for i in range(4)], decision)
    found, expected, state = train(model, model, whole, recipe)
    results = ranks(f"synchronised-{decision}-{wrapper}")
    used = fastff.usage(model.eval(), whole()[0])["1"].leaf_count
    for losses, parameters, own, count in results:
        assert_same(parameters, expected, **TOLERANCE)
        torch.testing.assert_close(losses["balance"], found["balance"], **TOLERANCE)
        assert own["count"] == state["count"] == 4
        assert torch.equal(count, used)
        if decision == "sampled":
            assert_same(own["running_shares"], state["running_shares"], **TOLERANCE)
    means = [(a + b) / 2 for a, b in zip(*(losses["loss"] for losses, *_ in results), strict=True)]
    torch.testing.assert_close(means, found["loss"], **TOLERANCE)


def test_rebalancing_moved_boundaries_in_the_test_above():
    torch.manual_seed(7)
    moved = []
    model = build_synchronised("sampled")
    recipe = recipe_of(model, [whole(50 + i)[0] for i in range(4)], "sampled")
    for step in range(4):
        loss = (model(whole(step)[0]) - whole(step)[1]).square().mean() + recipe.loss()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        before = model[1].node_bias.clone()
        recipe.step()
        moved.append(not torch.equal(model[1].node_bias, before))
    assert any(moved)


def test_the_balance_loss_counts_the_samples_of_all_ranks(ranks):
    """Each as much as another, though ranks have 5 and 17; and a rank without samples takes part."""
    expected = {}
    for name, (kind, options) in BALANCES.items():
        torch.manual_seed(7)
        model = make(6, 3, depth=2, **options)
        y = model(whole()[0])
        loss = fastff.balance_loss(model, kind)
        (loss + 0 * y.sum()).backward()
        expected[name] = loss.detach(), model.node_weight.grad.clone()
    torch.manual_seed(7)
    model = make(6, 3, depth=2)
    model(shard_of(0)[0])
    expected["empty"] = fastff.balance_loss(model).detach()
    for found in ranks("balances"):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", ["leaves", "fsdp"])
def test_parts_of_different_sizes_run_as_many_forwards(ranks, way):
    """Each rank once read until it had enough itself, and waited in a forward that the other did not run."""
    first, second = ranks(f"uneven-{way}")
    for name in first:
        assert torch.equal(first[name], second[name])
        assert first[name].sum() == 5 * (4 + 16)
        assert first[name].min() > 0


def test_an_error_on_one_rank_is_one_on_all(ranks):
    for rank, (lazy, *alone) in enumerate(ranks("errors")):
        assert "is synchronised over 2 ranks. Use an optimizer of torch.optim" in lazy
        for said in alone:
            assert said == "1 of 2 ranks raised an error here; read theirs." if rank == 0 else "mat" in said
