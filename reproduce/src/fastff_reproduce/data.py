"""The data sets of the paper: found or downloaded, checked, and read into tensors.

The files of a data set lie in `root/<name>/` under the names they were published with. A file is used only if it is the
published one by its md5, so that a damaged one is an error now and not a strange accuracy an hour later. Where somebody
compressed a file anew, the md5 of what is inside decides. Some data sets come in several forms; any one of them does.

Nothing is unpacked to disk, and the pickles of CIFAR can make arrays and nothing else.
"""

import bz2
import gzip
import hashlib
import importlib
import io
import os
import pickle
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES: tuple[str, ...] = ("digits", "usps", "mnist", "fashionmnist", "svhn", "cifar10", "cifar100")

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without an answer
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".bz2": bz2.decompress}


class Part(NamedTuple):
    """The training or the test samples."""

    x: Tensor  # (samples, channels, height, width) uint8
    y: Tensor  # (samples,) int64


class Dataset(NamedTuple):
    """A data set as it was published: whole pixels, no split for validation, no standardisation."""

    name: str
    train: Part
    test: Part
    classes: int
    largest: int  # the largest value that a pixel can have: 255, but 16 for digits


Contents = Mapping[str, bytes]  # what is in each file of a form, by its name, in order
Reader = Callable[[Contents], tuple[Part, Part]]


class File(NamedTuple):
    """A published file."""

    name: str  # its path below root/<data set>/
    md5: str
    contents: str = ""  # the md5 of what is inside, for a file that somebody compressed anew


class Form(NamedTuple):
    """One of the forms in which a data set was published: its files, and how to read them."""

    files: tuple[File, ...]
    read: Reader
    urls: tuple[str, ...] = ()  # the places that have all the files


def directory() -> Path:
    """Where the data sets lie: $FASTFF_DATA, or else fastff in the user's cache."""
    if chosen := os.environ.get("FASTFF_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fastff"


def load(name: str, root: Path | None = None, *, download: bool = True, progress: bool = True) -> Dataset:
    """The data set of that name, from the files in `root/<name>/` (`root`: see `directory`).

    Missing files are downloaded, with a progress bar, unless `download` is False. `FileNotFoundError` says which are
    missing and where to put them; `ValueError` says which is not the published one. digits comes with scikit-learn.
    """
    if name not in NAMES:
        raise ValueError(f"no data set is called {name!r}. There are: {', '.join(NAMES)}.")
    if name == "digits":
        return Dataset(name, *_digits(), classes=10, largest=16)
    forms = _FORMS[name]
    place = directory() if root is None else Path(root)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(f"{place} is no directory. --data or FASTFF_DATA is one with a folder per data set.")
    folder = place / name
    form = next((form for form in forms if not _missing(folder, form)), None)
    if form is None:
        form = forms[0]
        for file in _missing(folder, form):
            reasons = _download(folder, file, form.urls, progress) if download else ["download=False"]
            if reasons:
                raise FileNotFoundError(_advice(name, folder, reasons))
    contents = {file.name: _checked(folder, file, forms[0].urls) for file in form.files}
    return Dataset(name, *form.read(contents), classes=100 if name == "cifar100" else 10, largest=255)


def _missing(folder: Path, form: Form) -> list[File]:
    return [file for file in form.files if not (folder / file.name).is_file()]


def _advice(name: str, folder: Path, reasons: list[str]) -> str:
    """What is missing, and what to do about it."""
    first, *others = _FORMS[name]
    lines = [f"{name} needs files that are not here and could not be downloaded:"]
    lines += [f"  {first.urls[0]}{file.name}" for file in _missing(folder, first)]
    lines += [f"  the same from {url}" for url in first.urls[1:]]
    lines.append(f"Put them into {folder}")
    if others:
        names = [form.files[0].name.partition("/")[0] for form in others]
        lines.append(f"One of these in their place does, too: {', '.join(names)}")
    lines.append("Data in another directory: set FASTFF_DATA or give --data; it holds one folder per data set.")
    return "\n".join([*lines, "Why there was no download:", *(f"  {reason}" for reason in reasons)])


# Whole files


def _wrong(data: bytes, file: File) -> str:
    """What is wrong with a file of these bytes; "" if it is the published one."""
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found == file.md5:
        return ""
    if file.contents:
        try:
            inside = _UNPACK[Path(file.name).suffix](data)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            return f"its {len(data)} bytes have md5 {found}, expected {file.md5}, and do not decompress ({error})"
        if hashlib.md5(inside, usedforsecurity=False).hexdigest() == file.contents:
            return ""
    return f"its {len(data)} bytes have md5 {found}, expected {file.md5}"


def _checked(folder: Path, file: File, urls: tuple[str, ...]) -> bytes:
    """The bytes of a file, decompressed unless it is an archive, if it is the published one."""
    path = folder / file.name
    data = path.read_bytes()
    if reason := _wrong(data, file):
        raise ValueError(
            f"{path} is damaged, cut short or another file: {reason}. "
            f"Delete it and run again to download it, or put a good one there, from {urls[0]}"
        )
    return _UNPACK[path.suffix](data) if file.contents else data


def _download(folder: Path, file: File, urls: tuple[str, ...], progress: bool) -> list[str]:
    """Download a file from the first place that has it whole. Why none did; [] if one did.

    It gets its name when it is whole and checked. Until then it has a name of its own in the same folder, so that two
    processes do not disturb each other.
    """
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in (base + file.name for base in urls):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        try:
            with open(handle, "wb") as out:
                _fetch(url, out, progress)
            reason = _wrong(Path(temporary).read_bytes(), file)
            if not reason:
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
                return []
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
        finally:
            Path(temporary).unlink(missing_ok=True)
        reasons.append(f"{url}: {reason}")
    return reasons


def _fetch(url: str, out: io.BufferedWriter, progress: bool) -> None:
    """Write what is behind a URL to a file."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
        total = int(answer.headers.get("Content-Length", 0)) or None
        with _bar(url, total, progress) as advance:
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                advance(len(chunk))
    if total and out.tell() < total:
        raise ConnectionError(f"the connection ended after {out.tell()} of {total} bytes")


@contextmanager
def _bar(url: str, total: int | None, show: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, or a line where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        if show:
            print(f"downloading {url}", file=sys.stderr, flush=True)
        show = False
    if not show:
        yield lambda count: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(url.rsplit("/", 1)[-1], total=total)
        yield lambda count: bar.advance(task, count)


# What is in them


def _needs(module: str, package: str, name: str) -> Any:
    """A module that only some data sets need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{name} needs {package}, which is not installed: pip install {package}") from error


def _digits() -> tuple[Part, Part]:
    """The 1,797 digits of scikit-learn. A fifth, always the same 359 (torch's CPU generator, seed 0), is to test."""
    images, labels = _needs("sklearn.datasets", "scikit-learn", "digits").load_digits(return_X_y=True)
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


def _read_idx(contents: Contents) -> tuple[Part, Part]:
    train, train_labels, test, test_labels = (_idx(data) for data in contents.values())
    return Part(train[:, None], train_labels.long()), Part(test[:, None], test_labels.long())


def _libsvm(data: bytes) -> Part:
    """Lines of a label from 1 to 10 and 256 times index:value in [-1, 1], to whole pixels as torchvision does it."""
    words = data.replace(b":", b" ").split()
    labels = words[:: 1 + 2 * 256]
    del words[:: 1 + 2 * 256]
    values = torch.frombuffer(array("f", map(float, words[1::2])), dtype=torch.float32)
    x = ((values + 1) / 2 * 255).to(torch.uint8)
    return Part(x.reshape(-1, 1, 16, 16), torch.tensor([int(label) - 1 for label in labels]))


def _mat(data: bytes) -> Part:
    """MATLAB: X (height, width, channels, samples) and y (samples, 1), where 10 stands for 0."""
    mat = _needs("scipy.io", "scipy", "svhn").loadmat(io.BytesIO(data))
    x = torch.from_numpy(mat["X"]).permute(3, 2, 0, 1).contiguous()
    return Part(x, torch.from_numpy(mat["y"]).flatten().long() % 10)


def _two(part: Callable[[bytes], Part]) -> Reader:
    """Reads a file of training and a file of test samples."""

    def read(contents: Contents) -> tuple[Part, Part]:
        train, test = map(part, contents.values())
        return train, test

    return read


class _Arrays(pickle.Unpickler):
    """Unpickles containers, strings, numbers and NumPy arrays of them, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        numpy = _needs("numpy", "numpy", "this pickle")
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return numpy.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(numpy, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _pickled(name: str, data: bytes) -> Part:
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


def _read_batches(contents: Contents) -> tuple[Part, Part]:
    """The last batch is the test set."""
    parts = [(_records if name.endswith(".bin") else _pickled)(name, data) for name, data in contents.items()]
    *train, test = parts
    return Part(torch.cat([part.x for part in train]), torch.cat([part.y for part in train])), test


def _from_tar(members: tuple[File, ...]) -> Reader:
    """Reads batches from an archive that holds them under the names they have outside it."""
    names = [file.name for file in members]

    def read(contents: Contents) -> tuple[Part, Part]:
        (archive,) = contents.values()
        inside: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                if member.name in names and (file := tar.extractfile(member)):
                    inside[member.name] = file.read()
        return _read_batches({name: inside[name] for name in names})

    return read


# What was published


def _files(*rows: str) -> tuple[File, ...]:
    return tuple(File(*row.split()) for row in rows)


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10_PICKLES = _files(
    "cifar-10-batches-py/data_batch_1 c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2 d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3 54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4 634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5 482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch 40351d587109b95175f43aff81a1287e",
)
_CIFAR10_RECORDS = _files(
    "cifar-10-batches-bin/data_batch_1.bin 5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar-10-batches-bin/data_batch_2.bin 5ea93a67294ea407fff1d09f752e9692",
    "cifar-10-batches-bin/data_batch_3.bin 942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar-10-batches-bin/data_batch_4.bin ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar-10-batches-bin/data_batch_5.bin 53f37980c15c3d472c316c40844f3f0d",
    "cifar-10-batches-bin/test_batch.bin 803d5f7f4d78ea53de84dbe85f74fb6d",
)
_CIFAR100_PICKLES = _files(
    "cifar-100-python/train 16019d7e3df5f24257cddd939b257f8d",
    "cifar-100-python/test f0ef6b0ae62326f3e7ffdfab6717acfc",
)

# Of several forms the first is the one to download.
_FORMS: dict[str, tuple[Form, ...]] = {
    "usps": (
        Form(
            _files(
                "usps.bz2 ec16c51db3855ca6c91edd34d0e9b197 2084d5d2afb7e7be7c2a6f1808ac2ddd",
                "usps.t.bz2 8ea070ee2aca1ac39742fdd1ef5ed118 74ff1967c8db4cc0e927683b811dfc4e",
            ),
            _two(_libsvm),
            ("https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",),
        ),
    ),
    "mnist": (
        Form(
            _files(
                "train-images-idx3-ubyte.gz f68b3c2dcbeaaa9fbdd348bbdeb94873 6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte.gz d53e105ee54ea40749a09fcbcd1e9432 a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte.gz 9fb629c4189551a2d022fa330f9573f3 2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte.gz ec29112dd5afa0611ce80d1b7f02629c 27ae3e4e09519cfbb04c329615203637",
            ),
            _read_idx,
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
        ),
    ),
    "fashionmnist": (
        Form(
            _files(
                "train-images-idx3-ubyte.gz 8d4fb7e6c68d591d4c3dfef9ec88bf0d f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte.gz 25c81989df183df01b3e8a0aad5dffbe 9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte.gz bef4ecab320f06d8554ea6380940ec79 8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte.gz bb300cfdad3c16e7a12a480ee83cd310 15d484375f8d13e6eb1aabb0c3f46965",
            ),
            _read_idx,
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            ),
        ),
    ),
    "svhn": (
        Form(
            _files(
                "train_32x32.mat e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat eb5a983be6a315427106f1b164d9cef3",
            ),
            _two(_mat),
            ("http://ufldl.stanford.edu/housenumbers/",),
        ),
    ),
    "cifar10": (
        Form(_files("cifar-10-python.tar.gz c58f30108f718f92721af3b95e74349a"), _from_tar(_CIFAR10_PICKLES), _TORONTO),
        Form(_CIFAR10_PICKLES, _read_batches),
        Form(_CIFAR10_RECORDS, _read_batches),
        Form(_files("cifar-10-binary.tar.gz c32a1d4ab5d03f1284b67883e8d87530"), _from_tar(_CIFAR10_RECORDS)),
    ),
    "cifar100": (
        Form(
            _files("cifar-100-python.tar.gz eb9058c3a382ffc7106e4002c42a8d85"), _from_tar(_CIFAR100_PICKLES), _TORONTO
        ),
        Form(_CIFAR100_PICKLES, _read_batches),
    ),
}
