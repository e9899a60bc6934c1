"""Published formats as tensors, and pickles that ask for more than arrays."""

import bz2
import os
import pickle

import numpy as np
import pytest
import torch
from published import CIFAR10, RANDOM, batches, equal, mnist, pickles, pixels, publish, put, python2, svhn, tar

from fastff_reproduce import readers
from fastff_reproduce.data import load


@pytest.mark.parametrize("name", ["mnist", "fashionmnist"])
def test_idx(tmp_path, monkeypatch, name):
    files, ((x, y), (test_x, test_y)) = mnist()
    publish(monkeypatch, name, files)
    put(tmp_path, name, files)
    loaded = load(name, tmp_path, download=False)
    assert (loaded.name, loaded.classes, loaded.largest) == (name, 10, 255)
    equal(loaded.train, x[:, None], y)
    equal(loaded.test, test_x[:, None], test_y)


def test_libsvm(tmp_path, monkeypatch):
    """Values are printed with six digits, labels are 1 to 10, and pixels are rounded down."""
    files, parts = {}, []
    for name, n in (("usps.bz2", 5), ("usps.t.bz2", 2)):
        values = RANDOM.uniform(-1, 1, (n, 256)).round(6)
        values[0, :3] = -1, 0, 1
        labels = RANDOM.integers(1, 11, n)
        lines = [
            f"{label} " + " ".join(f"{i + 1}:{v:.6f}" for i, v in enumerate(row)) + " \n"
            for label, row in zip(labels, values, strict=True)
        ]
        files[name] = bz2.compress("".join(lines).encode())
        parts.append((((values.astype(np.float32) + 1) / 2 * 255).astype(np.uint8).reshape(n, 1, 16, 16), labels - 1))
    publish(monkeypatch, "usps", files)
    put(tmp_path, "usps", files)
    loaded = load("usps", tmp_path, download=False)
    equal(loaded.train, *parts[0])
    equal(loaded.test, *parts[1])
    assert loaded.train.x[0].flatten()[:3].tolist() == [0, 127, 255]


def test_mat_where_ten_is_zero(tmp_path, monkeypatch):
    files, parts = svhn()
    publish(monkeypatch, "svhn", files)
    put(tmp_path, "svhn", files)
    loaded = load("svhn", tmp_path, download=False)
    equal(loaded.train, *parts[0])
    equal(loaded.test, *parts[1])


@pytest.mark.parametrize("form", CIFAR10)
def test_every_form_of_cifar10(tmp_path, monkeypatch, form):
    parts = batches()
    files = CIFAR10[form](parts)
    publish(monkeypatch, "cifar10", files)
    put(tmp_path, "cifar10", files)
    before = sorted(tmp_path.rglob("*"))
    loaded = load("cifar10", tmp_path, download=False)
    assert loaded.classes == 10
    equal(
        loaded.train,
        np.concatenate([x for x, _ in parts[:5]]).reshape(-1, 3, 32, 32),
        np.hstack([y for _, y in parts[:5]]),
    )
    equal(loaded.test, parts[5][0].reshape(-1, 3, 32, 32), parts[5][1])
    assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked


@pytest.mark.parametrize("archive", [False, True])
def test_cifar100_has_fine_labels(tmp_path, monkeypatch, archive):
    parts = [(pixels(n, 3072), RANDOM.integers(0, 100, n)) for n in (4, 3)]
    files = {
        f"cifar-100-python/{name}": python2(x, y, "fine_labels")
        for name, (x, y) in zip(("train", "test"), parts, strict=True)
    }
    if archive:
        files = tar(files, "cifar-100-python.tar.gz")
    publish(monkeypatch, "cifar100", files)
    put(tmp_path, "cifar100", files)
    loaded = load("cifar100", tmp_path, download=False)
    assert loaded.classes == 100
    equal(loaded.train, parts[0][0].reshape(-1, 3, 32, 32), parts[0][1])
    equal(loaded.test, parts[1][0].reshape(-1, 3, 32, 32), parts[1][1])


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_python_3_are_arrays_too(protocol):
    x = pixels(3, 3072)
    part = readers.pickled("a", pickle.dumps({"data": x, "labels": [1, 2, 3]}, protocol))
    equal(part, x.reshape(-1, 3, 32, 32), [1, 2, 3])


def test_digits_are_split_once_and_for_all():
    datasets = pytest.importorskip("sklearn.datasets")
    loaded = load("digits")
    assert (loaded.classes, loaded.largest) == (10, 16)
    assert (len(loaded.train.x), len(loaded.test.x)) == (1438, 359)
    assert loaded.test.y[:10].tolist() == [6, 5, 5, 7, 9, 9, 8, 4, 6, 8]
    x, y = datasets.load_digits(return_X_y=True)
    both = [torch.cat(pair) for pair in zip(loaded.train, loaded.test, strict=True)]
    rows = sorted((*image.flatten().tolist(), label.item()) for image, label in zip(*both, strict=True))
    assert rows == sorted((*map(int, image), int(label)) for image, label in zip(x, y, strict=True))


class Runs:
    """Unpickled by anything that trusts it, it calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.mkdir, exec, np.load, getattr])
def test_a_hostile_pickle_is_refused(tmp_path, monkeypatch, function, protocol):
    """Even one with the right md5, and even where the batch around it is fine."""
    door = tmp_path / "open"
    arguments = {
        os.mkdir: (str(door),),
        exec: (f"import os; os.mkdir({str(door)!r})",),
        np.load: ("x",),
        getattr: (1, "real"),
    }
    batch = {"data": Runs(function, *arguments[function]), "labels": [1]}
    files = {**pickles(batches()), "cifar-10-batches-py/data_batch_2": pickle.dumps(batch, protocol)}
    publish(monkeypatch, "cifar10", files)
    put(tmp_path, "cifar10", files)
    with pytest.raises(ValueError, match=r"data_batch_2 is not a pickle of arrays .* it asks for \w+\."):
        load("cifar10", tmp_path)
    assert not door.exists()


def test_a_pickle_cannot_reach_into_what_it_may_use():
    """Protocol 4 can ask for a dotted name: a method of the array type."""
    name = b"ndarray.tofile"
    with pytest.raises(ValueError, match=r"it asks for numpy\.ndarray\.tofile"):
        readers.pickled("a", b"\x80\x04\x8c\x05numpy\x8c" + bytes([len(name)]) + name + b"\x93.")
