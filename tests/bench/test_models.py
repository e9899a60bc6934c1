import torch

from fastff.bench import Case
from fastff.bench.models import Problem, dense, gather, rotation

SMALL = Case(in_features=20, out_features=12, leaf_width=4, depth=3, batch=33)


def test_opponents_share_the_storage_of_the_layer():
    problem = Problem(SMALL)
    shared, own = dense(problem)
    for model in (shared, own):
        assert model.up.weight.data_ptr() == problem.layer.leaf_in_weight.data_ptr()
        assert model.width == problem.layer.training_width == 32
    assert shared.down.weight.data_ptr() == problem.layer.leaf_out_weight.data_ptr()
    assert own.down.weight.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(own(problem.inputs[0]), shared(problem.inputs[0]))
        torch.testing.assert_close(gather(problem)(problem.inputs[0]), problem.layer(problem.inputs[0]))


def test_inputs_rotate_enough_that_caches_do_not_flatter():
    """The leaves that a rotation visits at batch 1 fill the largest caches; inputs alone never fill the memory."""
    case = Case(768, 768, 32, 13, 1)
    assert rotation(case) * case.leaf_numel * 4 > 2**27
    assert rotation(Case(768, 768, 32, 5, 2**17)) == 4
