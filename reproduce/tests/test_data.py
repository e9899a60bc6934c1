"""Data sets: small files in each published format, bad files, downloads from a server here, and the real files."""

import bz2
import gzip
import hashlib
import io
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from fastff_reproduce import data
from fastff_reproduce.data import File, load


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path):
    """`--data /etc/passwd` said "Not a directory" of a path that nobody had typed."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is no directory\. --data or FASTFF_DATA is one with a folder"):
        load("usps", tmp_path / "file", download=False)


RANDOM = np.random.default_rng(0)
REAL = Path(os.environ.get("FASTFF_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


def md5(content):
    return hashlib.md5(content).hexdigest()


def publish(monkeypatch, name, files, urls=None):
    """Let these be the published files of a data set."""

    def contents(file, content):
        unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(Path(file.name).suffix)
        return md5(unpack(content)) if file.contents else ""

    forms = []
    for form in data._FORMS[name]:
        if {file.name for file in form.files} == set(files):
            made = [File(f.name, md5(files[f.name]), contents(f, files[f.name])) for f in form.files]
            form = form._replace(files=tuple(made))
        forms.append(form._replace(urls=form.urls if urls is None else tuple(urls)))
    monkeypatch.setitem(data._FORMS, name, tuple(forms))


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


# Files as they were published


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


# Formats


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
    part = data._pickled("a", pickle.dumps({"data": x, "labels": [1, 2, 3]}, protocol))
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


# Files that are not what they should be


def bad(files, name, how):
    """The files, one of them spoiled."""
    content = files[name]
    spoiled = {
        "cut short": content[: len(content) // 2],
        "one bit wrong": content[:40] + bytes([content[40] ^ 1]) + content[41:],
        "empty": b"",
        "a page instead": b"<html>please sign in</html>",
        "another file": next(other for file, other in files.items() if file != name),
    }[how]
    return {**files, name: spoiled}


SPOILED = ["cut short", "one bit wrong", "empty", "a page instead", "another file"]


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(
    ("name", "file"), [("mnist", "t10k-images-idx3-ubyte.gz"), ("cifar10", "cifar-10-batches-bin/data_batch_3.bin")]
)
def test_a_bad_file_is_named(tmp_path, monkeypatch, name, file, how):
    files = mnist()[0] if name == "mnist" else records(batches())
    publish(monkeypatch, name, files)
    put(tmp_path, name, bad(files, file, how))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name / file))) as error:
        load(name, tmp_path)
    found = md5((tmp_path / name / file).read_bytes())
    assert f"md5 {found}, expected {md5(files[file])}" in str(error.value)
    assert "Delete it and run again" in str(error.value)
    assert data._FORMS[name][0].urls[0] in str(error.value)


def test_a_file_compressed_anew_is_as_good(tmp_path, monkeypatch):
    """Debian's FashionMNIST has no names in the gzip headers: other md5, same contents."""
    files, ((x, y), _) = mnist()
    publish(monkeypatch, "fashionmnist", files)
    anew = {name: gzip.compress(gzip.decompress(content), compresslevel=1, mtime=2) for name, content in files.items()}
    assert all(anew[name] != files[name] for name in files)
    put(tmp_path, "fashionmnist", anew)
    equal(load("fashionmnist", tmp_path, download=False).train, x[:, None], y)


def test_other_contents_compressed_well_are_refused(tmp_path, monkeypatch):
    files, _ = mnist()
    publish(monkeypatch, "mnist", files)
    name = "train-labels-idx1-ubyte.gz"
    put(tmp_path, "mnist", {**files, name: gzip.compress(idx(np.zeros(7, np.uint8)))})
    with pytest.raises(ValueError, match=name):
        load("mnist", tmp_path)


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
        data._pickled("a", b"\x80\x04\x8c\x05numpy\x8c" + bytes([len(name)]) + name + b"\x93.")


# Files that are not there


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
    assert "cifar-10-batches-py, cifar-10-batches-bin, cifar-10-binary.tar.gz\n" in str(error.value)
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


# Downloads


class Server:
    """Serves files; under /cut/ only half of each, under /wrong/ other bytes, under /slow/ half and then nothing."""

    def __init__(self, files):
        server = self
        self.asked = []
        self.stop = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append(self.path)
                _, way, name = self.path.split("/", 2)
                content = files.get(name)
                if content is None or way == "none":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if way == "wrong":
                    content = bytes(len(content))
                self.wfile.write(content[: len(content) // 2] if way in ("cut", "slow") else content)
                if way == "slow":
                    self.wfile.flush()
                    server.stop.wait(60)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def url(self, way):
        return f"http://127.0.0.1:{self.http.server_port}/{way}/"

    def close(self):
        self.stop.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def served(monkeypatch):
    """The files of a small MNIST, what is in them, and a server that has them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    files, parts = mnist()
    server = Server(files)
    yield files, parts, server
    server.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_download_is_kept(tmp_path, monkeypatch, served):
    files, ((x, y), _), server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])
    equal(load("mnist", tmp_path, progress=False).train, x[:, None], y)
    assert names(tmp_path / "mnist") == sorted(files)
    assert all((tmp_path / "mnist" / name).read_bytes() == content for name, content in files.items())
    assert len(server.asked) == 4
    load("mnist", tmp_path)
    assert len(server.asked) == 4


def test_only_what_is_missing_is_downloaded(tmp_path, monkeypatch, served):
    files, _, server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])
    name = "train-images-idx3-ubyte.gz"
    put(tmp_path, "mnist", {file: content for file, content in files.items() if file != name})
    load("mnist", tmp_path, progress=False)
    assert server.asked == [f"/good/{name}"]


@pytest.mark.parametrize(
    ("way", "reason"),
    [("none", "404"), ("wrong", r"have md5 \w+, expected"), ("cut", r"the connection ended after \d+ of \d+ bytes")],
)
def test_a_bad_download_leaves_nothing_and_the_next_place_is_asked(tmp_path, monkeypatch, served, way, reason):
    files, ((x, y), _), server = served
    publish(monkeypatch, "mnist", files, [server.url(way)])
    with pytest.raises(FileNotFoundError, match=reason):
        load("mnist", tmp_path, progress=False)
    assert names(tmp_path / "mnist") == []
    publish(monkeypatch, "mnist", files, [server.url(way), server.url("good")])
    equal(load("mnist", tmp_path, progress=False).train, x[:, None], y)
    assert names(tmp_path / "mnist") == sorted(files)


def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch, served):
    files, _, server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_wrong", interrupted)  # all bytes are here, and not yet checked
    with pytest.raises(KeyboardInterrupt):
        load("mnist", tmp_path, progress=False)
    assert names(tmp_path / "mnist") == []


def test_a_killed_download_is_not_taken_for_a_file(tmp_path, monkeypatch, served):
    """kill -9 while half of it is there; the next run downloads it whole."""
    files, ((x, y), _), server = served
    name = "train-images-idx3-ubyte.gz"
    code = (
        "from pathlib import Path; from fastff_reproduce.data import File, _download; "
        f"_download(Path({str(tmp_path / 'mnist')!r}), File({name!r}, '0'), ({server.url('slow')!r},), False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not server.asked and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9
    (left,) = names(tmp_path / "mnist")
    assert left.endswith(".part")
    publish(monkeypatch, "mnist", files, [server.url("good")])
    equal(load("mnist", tmp_path, progress=False).train, x[:, None], y)


def test_two_at_once(tmp_path, monkeypatch, served):
    files, ((x, y), _), server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(lambda _: load("mnist", tmp_path, progress=False), range(4)):
            equal(loaded.train, x[:, None], y)
    assert names(tmp_path / "mnist") == sorted(files)


@pytest.mark.parametrize("rich", [False, True])
def test_progress_is_shown_on_stderr(tmp_path, monkeypatch, served, capsys, rich):
    files, _, server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    load("mnist", tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(name in shown.err for name in files)


def test_no_progress_where_none_is_wanted(tmp_path, monkeypatch, served, capsys):
    files, _, server = served
    publish(monkeypatch, "mnist", files, [server.url("good")])
    load("mnist", tmp_path, progress=False)
    assert capsys.readouterr() == ("", "")


# The real files, where they are

FACTS = {
    "mnist": ((60000, 1, 28, 28), (10000, 1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    "usps": ((7291, 1, 16, 16), (2007, 1, 16, 16), [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]),
    "fashionmnist": ((60000, 1, 28, 28), (10000, 1, 28, 28), [6000] * 10),
    "cifar10": ((50000, 3, 32, 32), (10000, 3, 32, 32), [5000] * 10),
}
FIRST = {
    "mnist": ([5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
    "usps": ([6, 5, 4, 7, 3, 6, 3, 1, 0, 1], [9, 6, 3, 6, 6, 0, 0, 0, 6, 9]),
    "fashionmnist": ([9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]),
    "cifar10": ([6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]),
}


def real(name):
    if not (REAL / name).is_dir():
        pytest.skip(f"no real {name} here")
    return load(name, REAL, download=False)


@pytest.mark.parametrize("name", FACTS)
def test_real_files_hold_what_is_known_of_them(name):
    loaded = real(name)
    train, test, counts = FACTS[name]
    assert (loaded.train.x.shape, loaded.test.x.shape) == (train, test)
    assert loaded.train.y.bincount().tolist() == counts
    assert (loaded.train.y[:10].tolist(), loaded.test.y[:10].tolist()) == FIRST[name]


def test_mean_and_deviation_of_real_mnist():
    """The 0.1307 and 0.3081 that everybody knows."""
    x = real("mnist").train.x.float() / 255
    assert x.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert x.std().item() == pytest.approx(0.3081, abs=5e-5)


def test_real_usps_is_rounded_as_torchvision_does():
    loaded = real("usps")
    lines = bz2.decompress((REAL / "usps" / "usps.t.bz2").read_bytes()).decode().splitlines()
    values = np.asarray([[entry.split(":")[-1] for entry in line.split()[1:]] for line in lines], dtype=np.float32)
    equal(loaded.test, ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, 16, 16), loaded.test.y.tolist())
