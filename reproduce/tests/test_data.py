"""Data sets by name: where they are looked for, what a missing one says, and the real files where they are."""

import bz2
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from published import equal, mnist, publish, put, svhn

from fastff_reproduce import data
from fastff_reproduce.data import load

REAL = Path(os.environ.get("FASTFF_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path):
    """`--data /etc/passwd` said "Not a directory" of a path that nobody had typed."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is not a directory\. --data or FASTFF_DATA must name one"):
        load("usps", tmp_path / "file", download=False)


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("download", [False, True])
def test_offline_it_says_what_to_put_where(tmp_path, monkeypatch, download):
    files, _ = mnist()
    urls = [f"http://127.0.0.1:{closed_port()}/a/", f"http://127.0.0.1:{closed_port()}/b/"]
    publish(monkeypatch, "mnist", files, urls)
    here = {"train-labels-idx1-ubyte.gz": files.pop("train-labels-idx1-ubyte.gz")}
    put(tmp_path, "mnist", here)
    with pytest.raises(FileNotFoundError) as error:
        load("mnist", tmp_path, download=download, progress=False)
    message = str(error.value)
    for part in (*files, str(tmp_path / "mnist"), *urls, "FASTFF_DATA", "--data"):
        assert part in message
    assert "train-labels" not in message
    assert ("download=False" in message) != download
    assert ("refused" in message) == download
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == list(here)


def test_offline_it_names_the_other_forms(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load("cifar10", tmp_path, download=False)
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz\n" in str(error.value)
    others = "cifar-10-batches-py, cifar-10-batches-bin, cifar-10-binary.tar.gz, train_00.webp to test_labels.npy\n"
    assert others in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"'imagenet'.*digits, usps, mnist"):
        load("imagenet")


@pytest.mark.parametrize(
    ("name", "module", "package"), [("digits", "sklearn.datasets", "scikit-learn"), ("svhn", "scipy.io", "scipy")]
)
def test_a_package_that_is_not_there(tmp_path, monkeypatch, name, module, package):
    if name == "svhn":
        files, _ = svhn()
        publish(monkeypatch, name, files)
        put(tmp_path, name, files)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{name} needs .*pip install {package}"):
        load(name, tmp_path)


def test_the_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FASTFF_DATA", raising=False)
    assert data.directory() == Path("/home/someone/.cache/fastff")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data.directory() == Path("/cache/fastff")
    monkeypatch.setenv("FASTFF_DATA", "~/data")
    assert data.directory() == Path("/home/someone/data")


def test_files_are_looked_for_in_the_directory(tmp_path, monkeypatch):
    files, ((x, y), _) = mnist()
    publish(monkeypatch, "mnist", files)
    put(tmp_path, "mnist", files)
    monkeypatch.setenv("FASTFF_DATA", str(tmp_path))
    equal(load("mnist", download=False).train, x[:, None], y)


# The real files, where they are

FACTS = {
    "mnist": ((60000, 1, 28, 28), (10000, 1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    "usps": ((7291, 1, 16, 16), (2007, 1, 16, 16), [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]),
    "fashionmnist": ((60000, 1, 28, 28), (10000, 1, 28, 28), [6000] * 10),
    "cifar10": ((50000, 3, 32, 32), (10000, 3, 32, 32), [5000] * 10),
    "cifar100": ((50000, 3, 32, 32), (10000, 3, 32, 32), [500] * 100),
}
FIRST = {
    "mnist": ([5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
    "usps": ([6, 5, 4, 7, 3, 6, 3, 1, 0, 1], [9, 6, 3, 6, 6, 0, 0, 0, 6, 9]),
    "fashionmnist": ([9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]),
    "cifar10": ([6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]),
    "cifar100": ([19, 29, 0, 11, 1, 86, 90, 28, 23, 31], [49, 33, 72, 51, 71, 92, 15, 14, 23, 0]),
}


def real(name):
    if not (REAL / name).is_dir():
        pytest.skip(f"no real {name} here")
    return load(name, REAL, download=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS)
def test_real_files_hold_what_is_known_of_them(name):
    loaded = real(name)
    train, test, counts = FACTS[name]
    assert (loaded.train.x.shape, loaded.test.x.shape) == (train, test)
    assert loaded.train.y.bincount().tolist() == counts
    assert (loaded.train.y[:10].tolist(), loaded.test.y[:10].tolist()) == FIRST[name]


@pytest.mark.slow
def test_mean_and_deviation_of_real_mnist():
    """The 0.1307 and 0.3081 that everybody knows."""
    x = real("mnist").train.x.float() / 255
    assert x.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert x.std().item() == pytest.approx(0.3081, abs=5e-5)


@pytest.mark.slow
def test_real_usps_is_rounded_as_torchvision_does():
    loaded = real("usps")
    lines = bz2.decompress((REAL / "usps" / "usps.t.bz2").read_bytes()).decode().splitlines()
    values = np.asarray([[entry.split(":")[-1] for entry in line.split()[1:]] for line in lines], dtype=np.float32)
    equal(loaded.test, ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, 16, 16), loaded.test.y.tolist())
