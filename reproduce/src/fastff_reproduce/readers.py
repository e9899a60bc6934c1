"""The published file formats, read into tensors: idx, libsvm text, MATLAB, and CIFAR's pickles, records and archives.

Nothing is unpacked to disk, and the pickles of CIFAR can make arrays and nothing else.
"""

import importlib
import io
import pickle
import tarfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """The training or the test samples."""

    x: Tensor  # (samples, channels, height, width) uint8
    y: Tensor  # (samples,) int64


Contents = Mapping[str, bytes]  # the bytes of each file, by name, in order
Reader = Callable[[Contents], tuple[Part, Part]]


def needs(module: str, package: str, name: str) -> Any:
    """Import a module that only some data sets need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{name} needs {package}, which is not installed: pip install {package}") from error


def digits() -> tuple[Part, Part]:
    """The 1,797 digits of scikit-learn. A fixed fifth of them is the test set (359; torch's CPU generator, seed 0)."""
    images, labels = needs("sklearn.datasets", "scikit-learn", "digits").load_digits(return_X_y=True)
    x = torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return Part(x[train], y[train]), Part(x[test], y[test])


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _idx(data: bytes) -> Tensor:
    """idx: two zero bytes, the type, the number of dimensions, the dimensions as big-endian int32, then the values."""
    dimensions = data[3]
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    return _bytes(data[start:]).reshape(shape)


def read_idx(contents: Contents) -> tuple[Part, Part]:
    train, train_labels, test, test_labels = (_idx(data) for data in contents.values())
    return Part(train[:, None], train_labels.long()), Part(test[:, None], test_labels.long())


def libsvm(data: bytes) -> Part:
    """Lines of a label from 1 to 10 and 256 times index:value in [-1, 1], to whole pixels as torchvision does it."""
    words = data.replace(b":", b" ").split()
    labels = words[:: 1 + 2 * 256]
    del words[:: 1 + 2 * 256]
    values = torch.frombuffer(array("f", map(float, words[1::2])), dtype=torch.float32)
    x = ((values + 1) / 2 * 255).to(torch.uint8)
    return Part(x.reshape(-1, 1, 16, 16), torch.tensor([int(label) - 1 for label in labels]))


def mat(data: bytes) -> Part:
    """MATLAB: X (height, width, channels, samples) and y (samples, 1), where 10 stands for 0."""
    found = needs("scipy.io", "scipy", "svhn").loadmat(io.BytesIO(data))
    x = torch.from_numpy(found["X"]).permute(3, 2, 0, 1).contiguous()
    return Part(x, torch.from_numpy(found["y"]).flatten().long() % 10)


def read_two(part: Callable[[bytes], Part]) -> Reader:
    """Read a file of training and a file of test samples."""

    def read(contents: Contents) -> tuple[Part, Part]:
        train, test = map(part, contents.values())
        return train, test

    return read


class _Arrays(pickle.Unpickler):
    """Unpickles containers, strings, numbers and NumPy arrays; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        numpy = needs("numpy", "numpy", "this pickle")
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return numpy.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(numpy, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def pickled(name: str, data: bytes) -> Part:
    """A batch of CIFAR as Python 2 wrote it: a dict of an array and its labels."""
    try:
        batch = _Arrays(io.BytesIO(data), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{name} is not a pickle of arrays and is not loaded: {error}.") from error
    labels = batch["fine_labels" if "fine_labels" in batch else "labels"]
    return Part(torch.from_numpy(batch["data"]).reshape(-1, 3, 32, 32), torch.tensor(labels))


def _records(name: str, data: bytes) -> Part:
    """A batch of CIFAR10's binary version: for each image a byte for the label and 3 * 32 * 32 for the pixels."""
    records = _bytes(data).reshape(-1, 1 + 3 * 32 * 32)
    return Part(records[:, 1:].contiguous().reshape(-1, 3, 32, 32), records[:, 0].long())


def read_batches(contents: Contents) -> tuple[Part, Part]:
    """The last batch is the test set."""
    parts = [(_records if name.endswith(".bin") else pickled)(name, data) for name, data in contents.items()]
    *train, test = parts
    return Part(torch.cat([part.x for part in train]), torch.cat([part.y for part in train])), test


def read_archive(names: Sequence[str]) -> Reader:
    """Read batches from an archive that holds them under these names."""

    def read(contents: Contents) -> tuple[Part, Part]:
        (archive,) = contents.values()
        inside: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                if member.name in names and (file := tar.extractfile(member)):
                    inside[member.name] = file.read()
        return read_batches({name: inside[name] for name in names})

    return read
