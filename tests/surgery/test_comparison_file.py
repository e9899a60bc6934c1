"""The file of a comparison: rows come back, and rows of something else are refused."""

import copy

import pytest
import torch
from torch import nn

from fastff.surgery import Compared
from fastff.surgery.comparison_file import fingerprint, read_rows, write_rows
from surgery_models import Mlp, stack

X = torch.arange(35.0).view(7, 5)
ROWS = [Compared("original", "48", None, None, 48, 3072, 1000, quality=1.0), Compared("FFF", "2 x 6", 2, 6, 8, 1, 9)]


def small():
    torch.manual_seed(0)
    return stack(Mlp(), Mlp())


def test_a_file_keeps_rows_and_says_what_it_is_not(tmp_path):
    path = tmp_path / "rows.json"
    assert read_rows(path, {}) == []
    write_rows(path, {"steps": 5}, ROWS)
    assert read_rows(path, {"steps": 5}) == ROWS
    with pytest.raises(ValueError, match="steps 5 there, 6 now"):
        read_rows(path, {"steps": 6})
    for text in ("no json", "[]", '{"kind": "other"}', '{"kind": "fastff comparison", "rows": [{}], "settings": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no comparison"):
            read_rows(path, {})


def test_a_fingerprint_tells_contents_apart():
    one = small()
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))
    nn.init.zeros_(one[1].mlp.fc2.bias)
    assert fingerprint(one) != fingerprint(small())
    assert fingerprint([X]) != fingerprint([X + 1])
    assert fingerprint({"a": X}) != fingerprint({"b": X})


def test_a_fingerprint_sees_all_data_the_code_of_a_function_and_the_modules():
    """A file's rows were taken for one changed number, for another lambda, and for another activation."""
    x = torch.zeros(1000, 3)
    y = x.clone()
    y[517, 1] = 1
    assert fingerprint([x]) != fingerprint([y])
    assert fingerprint(lambda a: a + 1) != fingerprint(lambda a: a + 2)
    assert fingerprint(nn.Sequential(nn.ReLU())) != fingerprint(nn.Sequential(nn.GELU()))

    def nested(a):
        return [b + 1 for b in (lambda: a)()]

    assert fingerprint(nested) == fingerprint(copy.copy(nested))
