import math

import pytest
import torch

import fastff
from fastff.backends import reference
from fastff.bench import Case
from fastff.bench.correctness import dense_answer, gate_answer, judge, tree_answer
from fastff.bench.models import Problem, mixture_of_experts

SMALL = Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)


@pytest.mark.parametrize("broken", ["route", "bias", "nan"])
def test_the_check_sees_what_can_go_wrong(broken):
    """A wrong branch of one sample, a forgotten bias, a NaN: each is far beyond rounding."""
    problem = Problem(SMALL)
    x = problem.inputs[0]
    answer, leaf = tree_answer(x, problem.tree, problem.leaves, "relu")
    with torch.no_grad():
        y = reference.visit(x, leaf, problem.leaves, "relu")
        assert judge(y, answer).right
        if broken == "route":
            row = int(answer.rows[0])
            leaf[row] ^= 1
            y = reference.visit(x, leaf, problem.leaves, "relu")
        elif broken == "bias":
            y = reference.visit(x, leaf, problem.leaves._replace(out_bias=None), "relu")
        else:
            y[int(answer.rows[0]), 0] = math.nan
        assert not judge(y, answer).right


def test_answers_are_those_of_float64_layers():
    """Answers of the FFF, the dense layer and the mixture of experts, each as its own layer."""
    case = Case(20, 12, 4, 3, 33, node_width=2, activation="geglu")
    problem = Problem(case)
    x = problem.inputs[0]
    layer = fastff.FFF(20, 12, depth=3, leaf_width=4, node_width=2, activation="geglu", dtype=torch.float64)
    layer.load_state_dict({name: value.double() for name, value in problem.layer.state_dict().items()})
    answer, leaf = tree_answer(x, problem.tree, problem.leaves, "geglu")
    assert len(answer.rows) > 30
    with torch.no_grad(), fastff.backend("reference"):
        torch.testing.assert_close(answer.output, layer.eval()(x.double())[answer.rows])
        assert torch.equal(leaf, layer.route(x.double()))

        moe = fastff.baselines.MoE(
            20, 12, num_experts=8, expert_width=4, k=1, activation="geglu", dtype=torch.float64
        ).eval()
        moe.gate_weight.copy_(problem.gate)
        for name, value in problem.layer.named_parameters():
            if name.startswith("leaf_"):
                getattr(moe, name.replace("leaf", "expert")).copy_(value)
        answer = gate_answer(x, problem.gate, problem.leaves, "geglu")
        torch.testing.assert_close(answer.output, moe(x.double())[answer.rows])
        assert judge(mixture_of_experts(problem, reference)(x), answer).right

        ff = fastff.baselines.FF(20, 12, width=32, activation="geglu", dtype=torch.float64).eval()
        ff.up.weight.copy_(problem.layer.leaf_in_weight.flatten(0, 1))
        ff.up.bias.copy_(problem.layer.leaf_in_bias.flatten())
        ff.gate.weight.copy_(problem.layer.leaf_gate_weight.flatten(0, 1))
        ff.gate.bias.copy_(problem.layer.leaf_gate_bias.flatten())
        ff.down.weight.copy_(problem.layer.leaf_out_weight.flatten(0, 1).T)
        ff.down.bias.copy_(problem.out_bias)
        answer = dense_answer(x, problem.leaves, "geglu", problem.out_bias)
        torch.testing.assert_close(answer.output, ff(x.double())[answer.rows])


def test_a_decision_within_rounding_is_left_out():
    """An input on the boundary of the root may go either way; a clear one must not."""
    problem = Problem(Case(20, 12, 4, 1, 4))
    weight, bias = problem.layer.node_weight[0].detach(), problem.layer.node_bias[0].detach()
    x = problem.inputs[0]
    x[0] -= weight * (x[0] @ weight + bias) / (weight @ weight)  # onto the plane
    answer, _ = tree_answer(x, problem.tree, problem.leaves, "relu")
    assert 0 not in answer.rows.tolist()
    assert len(answer.rows) == 3


def test_few_samples_of_a_large_batch_are_compared():
    problem = Problem(Case(20, 12, 4, 3, 100))
    x = problem.inputs[0]
    everything, leaf = tree_answer(x, problem.tree, problem.leaves, "relu")
    some, same = tree_answer(x, problem.tree, problem.leaves, "relu", most=7)
    assert torch.equal(leaf, same)
    assert 1 < len(some.rows) <= 7 < len(everything.rows)
    assert some.rows[-1] > 50  # not the first ones alone
    assert torch.equal(some.output, everything.output[torch.isin(everything.rows, some.rows)])
