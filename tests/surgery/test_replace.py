"""replace_: every family of models, and what is kept."""

import copy
import json

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery.find import Finder
from helpers import relative_error
from surgery_models import (
    FAMILIES,
    VECTORS,
    Mlp,
    Residual,
    assert_untouched,
    build,
    encoder,
    families,
    output,
    snapshot,
    stack,
)


@families
def test_family(family):
    """Found, and the same function in train mode, as near to float64 as the dense model is; saved and loaded."""
    *_, form, activation, name = FAMILIES[family]
    model, batch = build(family)
    exact_model = copy.deepcopy(model).double()
    model.train(), exact_model.train()
    wide = (
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()} if isinstance(batch, dict) else None
    )
    exact = output(exact_model, batch.double() if wide is None else wide)
    dense = output(model, batch)
    before = snapshot(model)

    report = fastff.replace_(model, depth=2)
    assert [r[1:8] for r in report.replaced] == [(form, 16, 48, 16, 2, 12, activation)] * 2
    assert any(n.startswith(report.replaced[0].name) for n, m in model.named_modules() if isinstance(m, fastff.FFF))
    assert report.replaced[0].name.endswith(name)
    assert all(m.training for m in model.modules())
    assert (report.neurons_before, report.neurons_after) == (96, 2 * (2 + 12))
    assert report.parameters_before == sum(
        t.numel() for n, t in before[1].items() if n in dict(exact_model.named_parameters())
    )
    assert report.parameters_after == sum(p.numel() for p in model.parameters())

    # The soft pass multiplies by 2**-depth and back, and sums in another order.
    error, rounding = relative_error(output(model, batch), exact), relative_error(dense, exact)
    assert error <= 4 * rounding + 1e-7

    # Written down, a fresh model takes the same shape, and the weights fit strictly.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    fresh, _ = build(family, seed=7)
    fastff.apply_(fresh, json.loads(json.dumps(report.specification)))
    fresh.load_state_dict(model.state_dict(), strict=True)
    for mode in (True, False):
        assert torch.equal(output(model.train(mode), batch), output(fresh.train(mode), batch))

    with pytest.raises(ValueError, match="no dense feedforward block left: it has 2 FFF layers"):
        fastff.replace_(model, depth=2)


@families
def test_failure_leaves_the_model_as_it_was(family):
    model, _ = build(family)
    before = snapshot(model)
    seen = []

    def init(block, layer):
        seen.append(block.name)
        if len(seen) == 2:
            raise RuntimeError("no")
        return "yes"

    with pytest.raises(RuntimeError, match="no"):
        fastff.replace_(model, depth=1, init=init)
    with pytest.raises(ValueError, match="48 wide, which 2\\*\\*depth = 32 leaves do not divide"):
        fastff.replace_(model, depth=5)
    assert_untouched(model, before)
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        Finder(model)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_fused_encoder_runs_the_fff(activation):
    """torch.nn's encoder in eval has a fused way, alone and with nested tensors, that reads linear1 and linear2
    itself: a replaced block would be passed over without a word."""
    model = encoder(activation=activation).eval()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    fastff.replace_(model, depth=2)
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module.training for module in model.modules())
    for options in ({}, {"src_key_padding_mask": mask}):
        with torch.inference_mode():
            before = model(VECTORS, **options)
        with torch.no_grad():
            model.layers[1].linear1.leaf_out_weight[-1] *= 3  # zero nodes lead to the last leaf
        with torch.inference_mode():
            assert not torch.allclose(model(VECTORS, **options), before)


def test_decoder_layer_of_torch():
    """It takes two inputs, the target and the memory."""
    model = nn.ModuleList([nn.TransformerDecoderLayer(16, 2, 48, dropout=0.25, batch_first=True)]).eval()
    dense = copy.deepcopy(model[0])
    report = fastff.replace_(model, depth=1)
    assert report.replaced[0].name == "0.linear1"
    layer = model[0].linear1
    assert layer.dropout == 0.25
    assert isinstance(model[0].dropout, nn.Identity)  # it stood on the hidden layer
    assert model[0].dropout3.p == 0.25
    torch.testing.assert_close(layer.soft(VECTORS), dense.linear2(torch.relu(dense.linear1(VECTORS))))


@pytest.mark.parametrize(("leaf_width", "how"), [(20, "replicated"), (12, "exact in"), (5, "not exact: the 20 of 48")])
@pytest.mark.parametrize("family", ["timm", "eva02"])
def test_other_widths(family, leaf_width, how):
    model, batch = build(family)
    dense = copy.deepcopy(model)
    if leaf_width == 5:  # neurons that are zero are the ones to lose
        for block in dense:
            block.mlp.fc2.weight.data[:, 20:] = 0
        model = copy.deepcopy(dense)
    report = fastff.replace_(model, depth=2, leaf_width=leaf_width)
    assert all(how in r.weights for r in report.replaced)
    torch.testing.assert_close(output(model.train(), batch), output(dense.train(), batch))


@pytest.mark.parametrize("decision", ["straight_through", "sampled"])
def test_a_training_forward_that_visits_single_leaves_is_not_compared_with_the_dense_model(decision):
    """With dense weights only the soft pass is exact; surgery with other decisions was refused as a wrong result."""
    model, x = stack(Mlp()).train(), torch.randn(4, 16)
    dense = model(x)
    fastff.replace_(model, depth=2, decision=decision, example=x)
    (layer,) = fastff.layer.fff_layers(model).values()
    assert layer.decision == decision
    layer.decision = "soft"
    torch.testing.assert_close(model(x), dense)


def test_node_networks_and_random_weights():
    model, batch = build("timm")
    dense = output(copy.deepcopy(model).train(), batch)
    random = copy.deepcopy(model)
    fastff.replace_(model, depth=2, node_width=3, transposition=0.1, decision="straight_through")
    layer = model[0].mlp.fff
    assert (layer.node_width, layer.transposition, layer.decision) == (3, 0.1, "straight_through")
    torch.testing.assert_close(model[0].norm(VECTORS) @ layer.node_weight[0].T * 0, torch.zeros(2, 5, 3))
    assert not layer.node_logits(VECTORS).any()
    assert layer.node_weight.any()
    report = fastff.replace_(random, depth=2, init="random")
    assert report.replaced[0].weights == "random"
    assert not torch.allclose(output(random.train(), batch), dense)


def test_what_is_kept():
    model = stack(Mlp(drop=0.25)).to(torch.bfloat16)
    model[0].mlp.fc1.weight.requires_grad_(False)
    drop2 = model[0].mlp.drop2
    model.train()
    model[0].mlp.eval()
    report = fastff.replace_(model, depth=1)
    new = model[0].mlp
    layer = new.fff
    assert new.dropout is drop2
    assert (layer.dropout, drop2.p) == (0.25, 0.25)
    assert layer.leaf_in_weight.dtype == torch.bfloat16
    assert (layer.training, new.training, model.training) == (False, False, True)
    frozen = [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]
    assert frozen == ["leaf_in_weight"]
    assert "0.mlp" in str(report)
    assert "parameters: " in str(report)

    frozen_model = stack(Mlp()).requires_grad_(False)
    fastff.replace_(frozen_model, depth=1)
    assert not any(parameter.requires_grad for parameter in frozen_model.parameters())


def test_one_bias_of_two():
    mlp = nn.Sequential(nn.Linear(16, 48, bias=False), nn.ReLU(), nn.Linear(48, 8))
    model = nn.ModuleDict({"mlp": mlp})
    dense = copy.deepcopy(mlp)
    fastff.replace_(model, depth=3)
    assert not model["mlp"].leaf_in_bias.any()
    torch.testing.assert_close(model["mlp"].train()(VECTORS), dense(VECTORS))


@pytest.mark.parametrize(
    "chosen", ["1.*", ["1.mlp", "nothing"], lambda name, block: name[0] == "1" and block.width == 48]
)
def test_filter(chosen):
    model = stack(Mlp(), Mlp())
    report = fastff.replace_(model, depth=1, filter=chosen)
    assert [r.name for r in report.replaced] == ["1.mlp"]
    assert report.skipped == [("0.mlp", "excluded by the filter")]
    assert isinstance(model[0].mlp, Mlp)
    # The rest may follow, with other sizes; both specifications together rebuild the model.
    second = fastff.replace_(model, depth=2)
    assert [r.name for r in second.replaced] == ["0.mlp"]
    fresh = stack(Mlp(), Mlp())
    fastff.apply_(fresh, report.specification + second.specification)
    fresh.load_state_dict(model.state_dict())


def test_filter_that_lets_nothing_pass():
    with pytest.raises(ValueError, match=r"the filter excludes all 2 feedforward blocks: 0.mlp, 1.mlp"):
        fastff.replace_(stack(Mlp(), Mlp()), depth=1, filter="2.*")


def test_not_in_inference_mode():
    model = stack(Mlp())
    with torch.inference_mode(), pytest.raises(ValueError, match="never train"):
        fastff.replace_(model, depth=1)


class Layer(nn.Module):
    """An in-layer block whose activation and dropout may be those of other layers too."""

    def __init__(self, act, drop):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.act, self.drop = act, drop

    def forward(self, x):
        return self.norm(x + self.fc2(self.drop(self.act(self.fc1(x)))))


def test_layers_that_share_an_activation_and_a_dropout_are_all_replaced():
    act, drop = nn.GELU(), nn.Dropout(0.25)
    model = nn.Sequential(Layer(act, drop), Layer(act, drop), nn.Linear(16, 4), act)
    x = torch.randn(8, 16)
    before = model.eval()(x)
    report = fastff.replace_(model, depth=2)
    assert [r.name for r in report.replaced] == ["0.fc1", "1.fc1"]
    assert model[3] is act  # where it is not of a block it stays
    assert [model[i].fc1.dropout for i in range(2)] == [0.25, 0.25]
    fresh = nn.Sequential(Layer(act, drop), Layer(act, drop), nn.Linear(16, 4), act)
    fastff.apply_(fresh, report.specification)
    fresh.load_state_dict(model.state_dict())
    for m in (model, fresh):
        for i in range(2):
            m[i].fc1.dropout = 0.0
        torch.testing.assert_close(m.train()(x), before)


def test_one_module_under_two_names_of_its_parent_is_replaced_once():
    layer = Residual(Mlp())
    model = nn.Sequential(layer, layer)
    report = fastff.replace_(model, depth=1)
    assert [r.name for r in report.replaced] == ["0.mlp"]
    assert isinstance(model[1].mlp.fff, fastff.FFF)


def test_sharded_is_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = stack(Mlp())
        with pytest.raises(ValueError, match="wrapped by DistributedDataParallel"):
            fastff.replace_(nn.parallel.DistributedDataParallel(stack(Mlp())), depth=1)
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match=r"sharded \(FSDP, DTensor\)"):
            fastff.replace_(model, depth=1)
    finally:
        dist.destroy_process_group()


def test_bad_arguments():
    model = stack(Mlp())
    for filter in (5, b"0.*", ["0.*", 5]):
        with pytest.raises(TypeError, match="filter"):
            fastff.replace_(model, depth=1, filter=filter)
    with pytest.raises(TypeError, match="init must return a string"):
        fastff.replace_(model, depth=1, init=lambda block, layer: None)
    with pytest.raises(ValueError, match="init must be one of dense, random, data, or a function"):
        fastff.replace_(model, depth=1, init="magic")
    with pytest.raises(ValueError, match="init must be one of dense, random, data, or a function"):
        fastff.replace_(model, depth=1, init=None)
    with pytest.raises(ValueError, match="samples must be at least 2; got 1"):
        fastff.replace_(model, depth=1, init="data", data=VECTORS, samples=1)
    with pytest.raises(TypeError, match="data must be"):
        fastff.replace_(model, depth=1, init="data", data=3)
    with pytest.raises(TypeError, match="expected a model"):
        fastff.replace_("model", depth=1)
    with pytest.raises(ValueError, match="depth must be at least 0"):
        fastff.replace_(model, depth=-1)


def test_a_block_under_two_names_stays_shared():
    shared = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    other = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.Sequential(shared, shared, other)
    report = fastff.replace_(model, depth=2)
    assert model[0] is model[1] is shared
    assert isinstance(model[2], fastff.FFF)
    assert [(s.name, s.why) for s in report.skipped] == [("0", "its module is used in several places")]
    with pytest.raises(ValueError, match="used in several places"):
        fastff.replace_(nn.Sequential(shared, shared), depth=2)


def test_data_belongs_to_its_init():
    model = stack(Mlp())
    with pytest.raises(ValueError, match="belong together"):
        fastff.replace_(model, depth=1, init="data")
    with pytest.raises(ValueError, match="belong together"):
        fastff.replace_(model, depth=1, data=torch.randn(4, 8))


@pytest.mark.slow
def test_it_learns_and_hardens():
    """From dense weights to a tree whose evaluation is as good: the point of it all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)))
    x = 4 * torch.rand(512, 2) - 2
    y = (x[:, :1].sin() + x[:, 1:].cos()).detach()
    fastff.replace_(model, depth=2)
    fastff.initialize_tree_(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(300):
        fastff.training.set_temperature_(model, 30 ** (step / 300))
        loss = nn.functional.mse_loss(model(x), y) + 0.03 * fastff.balance_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert nn.functional.mse_loss(model.eval()(x), y) < 0.1 * y.var()
