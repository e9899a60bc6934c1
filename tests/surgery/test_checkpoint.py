"""A save is old or new at any moment: killed, interrupted, out of space, and beside another save."""

import errno
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastff
from fastff.surgery import staging

safetensors_torch = pytest.importorskip("safetensors.torch")
from safetensors import SafetensorError, safe_open  # noqa: E402

ROOT = Path(__file__).parents[2]


def encoder(depth=None, seed=0):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    if depth is not None:
        fastff.replace_(model, depth=depth)
    return model


def is_in(folder, model):
    """Whether a directory has a save, whole, of a model."""
    fresh = encoder()
    fastff.load_(fresh, folder)
    state, other = fresh.state_dict(), model.state_dict()
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--kills", "40", "--pairs", "10"], ["--pretrained", "--kills", "8", "--pairs", "4"]],
    ids=["save", "hf"],
)
def test_killed_and_concurrent_saves(options):
    """The weights were renamed first, and the note second: of 400 saves killed at random, 30 left a pair that did not
    load, of 100 pairs of saves at once 21, and temporary files stayed for ever."""
    if "--pretrained" in options:
        pytest.importorskip("transformers")
    command = [sys.executable, "benchmarks/kill_save.py", *options]
    path = os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"trial kill, trials \d+, .*, broken 0, left_behind 0", done.stdout)
    assert re.search(r"trial pair, trials \d+, old 0, .*, broken 0, left_behind 0", done.stdout)


def failing(number, when="write"):
    """save_file, which writes in Rust, on a disk that has no space, before or after it wrote something."""

    def save_file(tensors, path, metadata=None):
        if when == "late":
            Path(path).write_bytes(b"half")
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    return save_file


def replace_fails(*paths):
    raise OSError(errno.EIO, "power cut")


def interrupted(*args, **options):
    raise KeyboardInterrupt


FAILURES = {
    "full disk": (safetensors_torch, "save_file", failing(errno.ENOSPC), OSError, "No space left.* Free some space"),
    "full disk, late": (safetensors_torch, "save_file", failing(errno.ENOSPC, "late"), OSError, "Free some space"),
    "quota": (safetensors_torch, "save_file", failing(errno.EDQUOT), OSError, "Free some space"),
    "rename": (os, "replace", replace_fails, OSError, "cannot save into .*: Input/output error"),
    "sync": (os, "fsync", replace_fails, OSError, "cannot save into .*: Input/output error"),
    "Ctrl-C while writing": (safetensors_torch, "save_file", interrupted, KeyboardInterrupt, "^$"),
    "Ctrl-C at the end": (os, "replace", interrupted, KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("there", [True, False])
def test_a_save_that_fails_leaves_the_old_one(case, there, tmp_path, monkeypatch):
    """And nothing else: no temporary file, and no directory where there was none."""
    owner, name, function, kind, told = FAILURES[case]
    old, folder = encoder(depth=1), tmp_path / "a" / "b"
    if there:
        fastff.save(old, folder)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, function)
        with pytest.raises(kind, match=told) as caught:
            fastff.save(encoder(depth=2), folder)
    if kind is OSError:
        assert "An existing save is unchanged" in str(caught.value)
    if there:
        assert files_in(folder) == ["fastff.safetensors"]
        assert is_in(folder, old)
    else:
        assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_file_that_may_not_grow(tmp_path):
    """A true failure of write(2), by a limit of the process: one error, the old save, no leftovers."""
    old = encoder(depth=1)
    fastff.save(old, tmp_path)
    code = (
        "import resource, sys; sys.path.insert(0, 'tests/surgery'); import fastff, test_checkpoint\n"
        "model = test_checkpoint.encoder(depth=2); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "fastff.save(model, sys.argv[1])"
    )
    path = os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert re.search(r"OSError: .*cannot save into .*: File too large. An existing save is unch", done.stderr)
    assert files_in(tmp_path) == ["fastff.safetensors"]
    assert is_in(tmp_path, old)


def test_paths_that_are_no_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot save into .*file: File exists. It is a file: pass the path of a dir"):
        fastff.save(encoder(depth=1), tmp_path / "file")
    with pytest.raises(OSError, match=r"cannot save into .*: Not a directory. A part of the path is a file"):
        fastff.save(encoder(depth=1), tmp_path / "file" / "save")
    assert (tmp_path / "file").read_text() == "mine"
    assert files_in(tmp_path) == ["file"]


def test_a_directory_that_is_read_only(tmp_path, monkeypatch):
    old = encoder(depth=1)
    fastff.save(old, tmp_path)

    def mkdir(path, *args, real=os.mkdir, **options):
        if Path(path).name.endswith(".tmp"):  # root may write everywhere
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        with pytest.raises(PermissionError, match=r"Permission denied. Choose a directory that you may write to"):
            fastff.save(encoder(depth=2), tmp_path)
    assert is_in(tmp_path, old)


def test_leftovers_are_deleted_but_not_while_their_save_runs(tmp_path):
    dead, alive = tmp_path / ".fastff-0123456789abcdef.tmp", tmp_path / ".fastff-fedcba9876543210.tmp"
    mine = tmp_path / "mine.tmp"
    for folder in (dead, alive, mine):
        folder.mkdir()
        (folder / "fastff.safetensors").write_bytes(b"half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fastff.save(encoder(depth=1), tmp_path)
    assert files_in(tmp_path) == [alive.name, "fastff.safetensors", "mine.tmp"]
    os.close(lock)
    fastff.save(encoder(depth=1), tmp_path)
    assert files_in(tmp_path) == ["fastff.safetensors", "mine.tmp"]


def test_a_directory_deleted_before_it_was_locked(tmp_path, monkeypatch):
    """Another save may see it in the moment between the two, and take it for a leftover: then there is a new one."""
    real, seen = fcntl.flock, []

    def flock(lock, how):
        if how == fcntl.LOCK_EX and not seen:
            seen.append(lock)
            staging.clean(tmp_path)
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    model = encoder(depth=1)
    fastff.save(model, tmp_path)
    assert seen
    assert files_in(tmp_path) == ["fastff.safetensors"]
    assert is_in(tmp_path, model)


def test_a_file_that_the_umask_allows(tmp_path):
    """safetensors makes files that nobody else may read."""
    before = os.umask(0o027)
    try:
        fastff.save(encoder(depth=1), tmp_path / "save")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "save" / "fastff.safetensors").stat().st_mode) == 0o640


def test_a_save_of_two_files_is_told_of(tmp_path):
    """As they were before version 2."""
    tensors = {"weight": torch.ones(2)}
    safetensors_torch.save_file(tensors, tmp_path / "fastff.safetensors", metadata={"fastff": "0123456789abcdef" * 2})
    (tmp_path / "fastff.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(ValueError, match=r"format version 1, in two files. Save the model again with this version"):
        fastff.load_(encoder(), tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "directory", "zero", "null", "socket"])
def test_what_is_no_regular_file(kind, tmp_path):
    """A reader of a pipe waits for ever, and /dev/zero never ends."""
    path = tmp_path / "fastff.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    else:
        path.symlink_to(f"/dev/{kind}")
    with pytest.raises((ValueError, OSError), match=r"fastff reads only regular files|No such device or address"):
        fastff.load_(encoder(), tmp_path)


def test_a_link_to_a_file_is_fine(tmp_path):
    """The cache of Hugging Face's Hub is made of them. A save replaces the link, and leaves what it led to."""
    old, new, save = encoder(depth=1), encoder(depth=2), tmp_path / "save"
    fastff.save(old, tmp_path / "blob")
    save.mkdir()
    (save / "fastff.safetensors").symlink_to("../blob/fastff.safetensors")
    assert is_in(save, old)
    fastff.save(new, save)
    assert is_in(save, new)
    assert is_in(tmp_path / "blob", old)


def test_a_huge_header(tmp_path):
    path = tmp_path / "fastff.safetensors"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # a hole: it takes no space
    with pytest.raises(ValueError, match=r"header of 1099511627776 bytes; fastff reads 33554432 at most"):
        fastff.load_(encoder(), tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_temperatures_that_cannot_be_set_are_not_loaded(value, tmp_path):
    """They were loaded, and the soft pass gave NaN, or one leaf for all."""
    model = encoder(depth=1)
    fastff.save(model, tmp_path)
    path, name = tmp_path / "fastff.safetensors", "layers.0.linear1.temperature_tensor"
    tensors = safetensors_torch.load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    safetensors_torch.save_file(tensors | {name: torch.tensor(value)}, path, metadata=metadata)
    fresh = encoder(seed=3)
    before, modules = {n: t.clone() for n, t in fresh.state_dict().items()}, dict(fresh.named_modules())
    with pytest.raises(ValueError, match=rf"{name}, the temperature of an FFF, must be positive and finite"):
        fastff.load_(fresh, tmp_path)
    assert dict(fresh.named_modules()) == modules
    assert all(torch.equal(tensor, before[n]) for n, tensor in fresh.state_dict().items())
    model.layers[0].linear1.temperature_tensor.fill_(value)
    with pytest.raises(ValueError, match="must be positive and finite"):
        fastff.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_second_save_keeps_the_permissions(tmp_path):
    """A file that its owner had made private was open to everybody after the next save."""
    path = tmp_path / "fastff.safetensors"
    for mode in (0o600, 0o640, 0o444):
        fastff.save(encoder(depth=1), tmp_path)
        path.chmod(mode)
        fastff.save(encoder(depth=2), tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


BUFFERS = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "float8_e4m3fn": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "uint64": lambda: torch.ones(2).to(torch.uint64),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", BUFFERS)
def test_tensors_that_are_not_saved_are_named(kind, tmp_path):
    """Some were errors of torch: "unsupported memory format option Contiguous"."""
    model = encoder(depth=1)
    model.register_buffer("extra", BUFFERS[kind]())
    told = rf"extra is a (?=.*{kind}).* saves strided tensors of float64, .*register_buffer\(..., persistent=False\)"
    with pytest.raises(ValueError, match=told):
        fastff.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    model.register_buffer("extra", BUFFERS[kind](), persistent=False)  # the remedy
    fastff.save(model, tmp_path / "new")
    assert is_in(tmp_path / "new", model)


@pytest.mark.parametrize("path", [None, 3, b"abc", ["a"]])
def test_what_is_no_path(path, tmp_path):
    for call in (lambda: fastff.save(encoder(depth=1), path), lambda: fastff.load_(encoder(), path)):
        with pytest.raises(TypeError, match=r"path of the directory must be a string or a path; got "):
            call()


def test_paths_and_models_that_cannot_be_used(tmp_path):
    model, good = encoder(depth=1), tmp_path / "good"
    fastff.save(model, good)
    for call in (lambda: fastff.save(model, "a\0b"), lambda: fastff.load_(encoder(), "a\0b")):
        with pytest.raises(
            ValueError, match=r"the path of the directory must not contain a null character; got 'a.x00b'"
        ):
            call()
    with pytest.raises(NotADirectoryError, match=rf"fastff.safetensors is a file. Pass the directory .* {good}$"):
        fastff.load_(encoder(), good / "fastff.safetensors")
    with pytest.raises(TypeError, match=r"expected a model, an nn.Module; got NoneType"):
        fastff.load_(None, good)
    with pytest.raises(ValueError, match=r"has been converted already \(the model itself\). Pass a fresh model"):
        fastff.load_(model, good)
    taken = tmp_path / "taken" / "fastff.safetensors"
    taken.mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"a directory where fastff.safetensors goes: delete it, or choose"):
        fastff.save(model, taken.parent)
    assert files_in(taken.parent) == [taken.name]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match=r"cannot read .*It is a link to itself: delete it"):
        fastff.load_(encoder(), loop)
    with pytest.raises(OSError, match=r"cannot save into .*It is a link to nothing: delete it"):
        fastff.save(model, loop)


def test_a_header_with_one_name_twice(tmp_path):
    """safetensors takes either of the two tensors."""
    fastff.save(encoder(depth=1), tmp_path)
    path = tmp_path / "fastff.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    name = "layers.0.norm1.weight"
    entry = json.dumps({name: json.loads(header)[name]})[1:-1]
    header = header[:-1] + f",{entry}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(ValueError, match=rf"in its header the name '{name}' occurs twice"):
        fastff.load_(encoder(), tmp_path)


def test_a_compiled_model_is_saved_or_told_how(tmp_path):
    """Compiled in place it was refused, without a way out; its state dict has the same names."""
    model = encoder(depth=1)
    model.compile()
    model.layers[0].norm1.compile()
    fastff.save(model, tmp_path)
    assert is_in(tmp_path, model)
    with pytest.raises(
        ValueError, match=r"the result of torch.compile.* Pass the model that you compiled: compiled._or"
    ):
        fastff.save(torch.compile(model), tmp_path)
    model.layers[0].norm1 = torch.compile(nn.LayerNorm(16))
    with pytest.raises(ValueError, match=r"model.set_submodule\('layers.0.norm1', compiled._orig_mod\)"):
        fastff.save(model, tmp_path)
    compiled = encoder()
    compiled.compile()
    with pytest.raises(ValueError, match=r"is compiled. Call it before torch.compile"):
        fastff.replace_(compiled, depth=1)
