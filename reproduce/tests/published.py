"""Small files in the published formats, for the tests of data sets."""

import bz2
import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fastff_reproduce import catalogue
from fastff_reproduce.catalogue import File

RANDOM = np.random.default_rng(0)


def md5(content):
    return hashlib.md5(content).hexdigest()


def publish(monkeypatch, name, files, urls=None):
    """Make these the published files of a data set."""

    def contents(file, content):
        unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(Path(file.name).suffix)
        return md5(unpack(content)) if file.contents else ""

    forms = []
    for form in catalogue.FORMS[name]:
        if {file.name for file in form.files} == set(files):
            made = [File(f.name, md5(files[f.name]), contents(f, files[f.name])) for f in form.files]
            form = form._replace(files=tuple(made))
        forms.append(form._replace(urls=form.urls if urls is None else tuple(urls)))
    monkeypatch.setitem(catalogue.FORMS, name, tuple(forms))


def put(root, name, files):
    for file, content in files.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def equal(part, x, y):
    assert part.x.dtype == torch.uint8
    assert part.y.dtype == torch.int64
    assert part.x.is_contiguous()
    assert np.array_equal(part.x.numpy(), x)
    assert part.y.tolist() == list(y)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, np.uint8)


def idx(values):
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()


def mnist():
    """Four files, and what is in them."""
    parts = [(pixels(n, 28, 28), RANDOM.integers(0, 10, n).astype(np.uint8)) for n in (7, 3)]
    files = {}
    for prefix, (x, y) in zip(("train", "t10k"), parts, strict=True):
        files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx(x), mtime=1)
        files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y), mtime=1)
    return files, parts


def python2(x, labels, key):
    """The pickle that Python 2 makes of {"batch_label": ..., key: [...], "data": array}, opcode by opcode."""

    def text(s):
        return b"U" + bytes([len(s)]) + s.encode()

    def integer(n):
        return b"M" + struct.pack("<H", n)

    dtype = (
        b"cnumpy\ndtype\n(" + text("u1") + b"K\0K\1tR(K\3" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    shape = integer(x.shape[0]) + integer(x.shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<i", x.size) + x.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85" + text("b") + b"tR"
    array += b"(K\1" + shape + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\2}(" + text("batch_label") + text("of 6") + text(key) + numbers + text("data") + array + b"u."


def tar(files, name):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for file, content in [(f"{Path(next(iter(files))).parent}/readme.html", b"not a batch"), *files.items()]:
            info = tarfile.TarInfo(file)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return {name: out.getvalue()}


def batches(n=2):
    return [(pixels(n, 3072), RANDOM.integers(0, 10, n)) for _ in range(6)]


def pickles(parts):
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {f"cifar-10-batches-py/{n}": python2(x, y, "labels") for n, (x, y) in zip(names, parts, strict=True)}


def records(parts):
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    rows = [np.concatenate([y[:, None].astype(np.uint8), x], axis=1).tobytes() for x, y in parts]
    return {f"cifar-10-batches-bin/{n}": row for n, row in zip(names, rows, strict=True)}


CIFAR10 = {
    "pickles": pickles,
    "records": records,
    "python archive": lambda parts: tar(pickles(parts), "cifar-10-python.tar.gz"),
    "binary archive": lambda parts: tar(records(parts), "cifar-10-binary.tar.gz"),
}


def svhn():
    scipy_io = pytest.importorskip("scipy.io")
    files, parts = {}, []
    for name, n in (("train_32x32.mat", 12), ("test_32x32.mat", 10)):
        x, y = pixels(32, 32, 3, n), np.arange(n, dtype=np.uint8) % 10 + 1
        out = io.BytesIO()
        scipy_io.savemat(out, {"X": x, "y": y[:, None]}, do_compression=True)
        files[name] = out.getvalue()
        parts.append((x.transpose(3, 2, 0, 1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2][:n]))
    return files, parts
