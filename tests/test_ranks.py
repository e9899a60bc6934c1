"""Ranks in one process; two and four are in test_distributed.py and parallel/test_shards.py."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastff
from fastff._torch import is_dtensor
from fastff.ranks import Ranks, alone, ranks_of, reshard_, until_enough, whole
from helpers import make, one_rank

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def test_of_one_rank(tmp_path):
    x, y = torch.randn(3, 2), torch.randn(4, dtype=torch.float64)
    with one_rank(tmp_path):
        ranks = Ranks()
        for found in (ranks.sum([x, y]), ranks.log_sum([x, y])):
            assert [part.dtype for part in found] == [torch.float32, torch.float64]
            torch.testing.assert_close(found[0], x)
            torch.testing.assert_close(found[1], y)
        assert torch.equal(ranks.gather(x), x)
        assert torch.equal(ranks.gather(x[:0]), x[:0])
        assert ranks.first(True, x.device) is True
        with pytest.raises(ZeroDivisionError), ranks.together(x.device):
            print(1 / 0)
    assert ranks.size == 1


def test_reading_until_all_have_enough(tmp_path):
    read = []

    def is_enough():
        return len(read) == 2

    for everywhere in (alone(), None):
        read.clear()
        with one_rank(tmp_path), everywhere or Ranks().together(torch.device("cpu")) as asked:
            for item in until_enough([1, 2, 3], is_enough, asked):
                read += [item]
            assert read == [1, 2]
            assert [*until_enough([5], lambda: False, asked)] == [5]


def test_copies_share_the_group_and_pickles_leave_it_out(tmp_path):
    """A mean of the weights is a copy of the model, and is rebalanced over all ranks, too."""
    with one_rank(tmp_path):
        layer = fastff.parallel.synchronize_(make())
        assert copy.deepcopy(layer).ranks is layer.ranks is not None
        assert pickle.loads(pickle.dumps(layer)).ranks is None


def test_ranks_of_a_model():
    assert ranks_of(nn.Sequential(make(), make())) is None
    assert ranks_of(nn.Linear(2, 2)) is None


def test_a_dtensor_gets_what_is_written(tmp_path):
    """With FSDP2, also after a forward without a backward: the root keeps its parameters gathered then."""
    from torch.distributed.fsdp import fully_shard

    plain = torch.zeros(3)
    with whole(plain) as all_of_it:
        all_of_it += 1
    assert plain.tolist() == [1, 1, 1]
    with one_rank(tmp_path):
        layer = make()
        fully_shard(layer)
        layer.eval()(torch.randn(2, 5, dtype=torch.float64))
        assert not is_dtensor(layer.node_bias)
        reshard_(layer)
        assert is_dtensor(layer.node_bias)
        with torch.no_grad(), whole(layer.node_bias) as bias:
            bias.fill_(7)
        assert torch.equal(layer.node_bias.full_tensor(), torch.full((7,), 7.0, dtype=torch.float64))
