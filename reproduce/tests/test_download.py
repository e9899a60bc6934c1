"""Files that are not the published ones, and downloads from a server on this machine."""

import gzip
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from published import batches, equal, idx, md5, mnist, publish, put, records

from fastff_reproduce import catalogue, download
from fastff_reproduce.data import load


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
    assert catalogue.FORMS[name][0].urls[0] in str(error.value)


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

    monkeypatch.setattr(download, "wrong", interrupted)  # all bytes are here, and not yet checked
    with pytest.raises(KeyboardInterrupt):
        load("mnist", tmp_path, progress=False)
    assert names(tmp_path / "mnist") == []


@pytest.mark.slow
def test_a_killed_download_is_not_taken_for_a_file(tmp_path, monkeypatch, served):
    """kill -9 while half of it is there; the next run downloads it whole."""
    files, ((x, y), _), server = served
    name = "train-images-idx3-ubyte.gz"
    code = (
        "from pathlib import Path; from fastff_reproduce.download import File, download; "
        f"download(Path({str(tmp_path / 'mnist')!r}), File({name!r}, '0'), ({server.url('slow')!r},), False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not server.asked and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9
    assert names(tmp_path / "mnist") == []
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
