import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastff.atomic import check_no_database, replacing


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "deep" / "file.txt"
    with replacing(path) as file:
        file.write("one\r\ntwo µ\n")
    assert path.read_bytes() == "one\r\ntwo µ\n".encode()  # newlines and encoding of every system alike
    with replacing(path, binary=True) as file:
        file.write(b"\x00\xff")
        assert path.read_bytes() == "one\r\ntwo µ\n".encode()  # the old file until the end
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file(error, tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as file:
            file.write("new")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.slow
def test_a_kill_in_the_midst_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = f"""
import time
from pathlib import Path
from fastff.atomic import replacing
with replacing(Path({str(path)!r})) as file:
    file.write("half of it")
    file.flush()
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 2 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        assert len(os.listdir(tmp_path)) == 2  # the draft beside it
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.read_text() == "old"
    with replacing(path) as file:  # what the kill left behind is in nobody's way
        file.write("new")
    assert path.read_text() == "new"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_a_pipe_is_written_to_and_not_replaced():
    code = "from pathlib import Path; from fastff.atomic import replacing\n"
    code += "with replacing(Path('/dev/stdout')) as file: file.write('through the pipe')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "through the pipe"), done.stderr


def test_a_database_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE results (accuracy REAL)")
    connection.close()
    before = path.read_bytes()
    error = r"store\.sqlite is an SQLite database and must not be overwritten\. Choose another file\."
    with pytest.raises(ValueError, match=error):
        check_no_database(path)
    with pytest.raises(ValueError, match=error), replacing(path):
        raise AssertionError("the block ran")
    assert path.read_bytes() == before
    check_no_database(tmp_path / "missing.sqlite")


def test_a_full_disk_names_the_path_that_was_asked_for(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left") as caught, replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does: without a file name
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_full_is_named():
    with pytest.raises(OSError, match="No space left") as caught, replacing(Path("/dev/full")) as file:
        file.write("x")
    assert caught.value.filename == "/dev/full"


def test_a_folder_that_cannot_be_made_is_told_with_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below.txt"
    with pytest.raises(OSError, match=r"below\.txt"), replacing(path):
        raise AssertionError("the block ran")
