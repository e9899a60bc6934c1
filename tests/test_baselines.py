import copy
import math
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fastff
import oracle
from fastff.baselines import smooth_load, top_k_gates


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_ff_is_two_linear_layers(activation):
    layer = fastff.baselines.FF(5, 4, width=7, activation=activation, dropout=0.5).eval()
    x = torch.randn(3, 2, 5)
    hidden = torch.relu(layer.up(x)) if activation == "relu" else nn.functional.silu(layer.gate(x)) * layer.up(x)
    torch.testing.assert_close(layer(x), layer.down(hidden))
    assert not torch.equal(layer.train()(x), layer.eval()(x))
    sizes = (layer.training_width, layer.training_size, layer.inference_width, layer.inference_size)
    assert sizes == (7, 7, 7, 7)


@settings(max_examples=60, deadline=None)
@given(experts=st.integers(1, 6), batch=st.integers(1, 7), data=st.data(), seed=st.integers(0, 10**6))
def test_gates_and_losses_equal_the_loop(experts, batch, data, seed):
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, experts))
    clean, noise = torch.randn(2, batch, experts, dtype=torch.float64)
    std = torch.rand(batch, experts, dtype=torch.float64) + 0.1
    noisy = clean + noise * std
    gates, load = top_k_gates(noisy, k), smooth_load(clean, std, noisy, k)
    torch.testing.assert_close(gates, oracle.moe_gates(clean, std, noise, k), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(load, oracle.moe_load(clean, std, noise, k), rtol=1e-10, atol=1e-12)
    layer = fastff.baselines.MoE(3, 2, num_experts=experts, expert_width=2, k=k)
    layer.last_importance, layer.last_load = gates.sum(0).requires_grad_(), load.requires_grad_()
    assert fastff.baselines.importance_loss(layer).item() == pytest.approx(
        oracle.moe_importance_loss(gates), rel=1e-9, abs=1e-12
    )
    assert fastff.baselines.load_loss(layer).item() == pytest.approx(oracle.moe_load_loss(load), rel=1e-9, abs=1e-12)


def random_moe(**options):
    layer = fastff.baselines.MoE(5, 4, num_experts=6, expert_width=3, **({"dtype": torch.float64} | options))
    nn.init.normal_(layer.gate_weight)
    nn.init.normal_(layer.noise_weight)
    return layer


@pytest.mark.parametrize("backend", ["reference", "aten"])  # float64
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_eval_is_the_weighted_sum_of_the_k_best_without_noise(backend, k, activation):
    layer = random_moe(k=k, activation=activation).eval()
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    with fastff.backend(backend):
        y = layer(x)
        assert torch.equal(y, layer(x))
        assert layer(x[:0]).shape == (0, 9, 4)
    act = fastff.activations.function(activation)
    for b in range(2):
        for t in range(9):
            score = layer.gate_weight @ x[b, t]
            best = score.argsort(descending=True)[:k]
            share = torch.exp(score[best]) / torch.exp(score[best]).sum()
            expected = 0
            for j, s in zip(best, share, strict=True):
                hidden = layer.expert_in_weight[j] @ x[b, t] + layer.expert_in_bias[j]
                if activation == "geglu":
                    hidden = act(layer.expert_gate_weight[j] @ x[b, t] + layer.expert_gate_bias[j]) * hidden
                else:
                    hidden = act(hidden)
                expected = expected + s * (hidden @ layer.expert_out_weight[j] + layer.expert_out_bias[j])
            torch.testing.assert_close(y[b, t], expected)


def test_training_noise_has_the_learned_size():
    """With one logit fixed and k = 1, the chance of the other expert is Phi of the gap over the joint deviation."""
    layer = fastff.baselines.MoE(1, 1, num_experts=2, expert_width=1, k=1, dtype=torch.float64)
    with torch.no_grad():
        layer.gate_weight.copy_(torch.tensor([[1.0], [0.0]]))
    layer(torch.ones(40000, 1, dtype=torch.float64))
    std = math.log(2) + 1e-2  # softplus(0) and the floor
    chance = 0.5 * math.erfc(-1 / (std * math.sqrt(2)) / math.sqrt(2))
    assert layer.last_importance[0].item() / 40000 == pytest.approx(
        chance, abs=4 * math.sqrt(chance * (1 - chance) / 40000)
    )
    assert layer.last_load[0].item() / 40000 == pytest.approx(chance, abs=0.01)


def test_losses_train_the_gate_and_keep_no_graph():
    model = nn.Sequential(random_moe(k=2), fastff.baselines.MoE(4, 3, num_experts=4, expert_width=2).double())
    y = model(torch.randn(30, 5, dtype=torch.float64))
    (
        y.square().mean() + 0.1 * fastff.baselines.importance_loss(model) + 0.1 * fastff.baselines.load_loss(model)
    ).backward()
    for layer in model:
        for parameter in layer.parameters():
            assert parameter.grad.abs().sum() > 0
        assert layer.last_importance.grad_fn is None
        assert layer.last_load.grad_fn is None
    with pytest.raises(RuntimeError, match="backward has passed it"):
        fastff.baselines.load_loss(model)


def test_no_graph_is_kept_where_the_losses_are_not_used():
    layer = random_moe(k=2)
    layer(torch.randn(30, 5, dtype=torch.float64)).sum().backward()
    assert layer.last_importance.grad_fn is None
    assert layer.last_load.grad_fn is None
    for loss in (fastff.baselines.importance_loss, fastff.baselines.load_loss):
        with pytest.raises(RuntimeError, match="backward has passed it"):
            loss(layer)


def test_losses_of_an_empty_batch_are_0():
    layer = random_moe(k=2)
    layer(torch.randn(0, 5, dtype=torch.float64))
    assert fastff.baselines.importance_loss(layer) == fastff.baselines.load_loss(layer) == 0


def test_losses_balance_the_load():
    """Gradient descent on the two losses alone evens out a gate that prefers one expert."""
    layer = random_moe(k=2)
    x = torch.randn(500, 5, dtype=torch.float64) + 1
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    history = []
    for _ in range(150):
        layer(x)
        loss = fastff.baselines.importance_loss(layer) + fastff.baselines.load_loss(layer)
        history.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert history[-1] < 0.05 * history[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_moe_compiles_copies_and_casts(mode):
    torch._dynamo.reset()
    layer = getattr(random_moe(dtype=torch.float32), mode)()
    x = torch.randn(11, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    expected = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), expected)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.manual_seed(1)
        torch.testing.assert_close(twin(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_moe_sizes_and_start():
    layer = fastff.baselines.MoE(5, 4, num_experts=8, expert_width=16, k=2)
    assert (layer.training_width, layer.training_size) == (128, 144)
    assert (layer.inference_width, layer.inference_size) == (32, 40)
    assert not layer.gate_weight.any()
    assert "inference width 32, size 40" in repr(layer)


def test_errors():
    with pytest.raises(ValueError, match="k must be at most num_experts=4; got 5"):
        fastff.baselines.MoE(3, 3, num_experts=4, expert_width=2, k=5)
    with pytest.raises(ValueError, match="width must be at least 1; got 0"):
        fastff.baselines.FF(3, 3, width=0)
    with pytest.raises(MemoryError, match=r"MoE\(num_experts=1099511627776"):
        fastff.baselines.MoE(3, 3, num_experts=2**40, expert_width=64)
    layer = fastff.baselines.MoE(3, 3, num_experts=4, expert_width=2)
    with pytest.raises(ValueError, match=r"MoE expects inputs of shape \(..., 3\); got \(2, 4\)"):
        layer(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="the MoE layer '' has had no training forward"):
        fastff.baselines.load_loss(layer)
    with pytest.raises(ValueError, match="Linear has no MoE layer"):
        fastff.baselines.importance_loss(nn.Linear(2, 2))
