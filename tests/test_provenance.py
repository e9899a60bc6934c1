import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastff import provenance


def test_the_machine_has_a_name():
    name = provenance.machine("cpu")
    assert name
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "model name" in cpuinfo.read_text():
        assert name in cpuinfo.read_text()


def test_without_cpuinfo_the_platform_names_it(monkeypatch):
    monkeypatch.setattr(provenance.Path, "exists", lambda _: False)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert provenance.machine("cpu") == "riscv64"


@pytest.mark.gpu
def test_a_gpu_has_a_name():
    assert provenance.machine("cuda") == torch.cuda.get_device_name()


def test_paths_of_the_machine_stay_out_of_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/fastff", "bench", "size", "--output", "/home/ada/rows.csv", "a b.csv"])
    assert provenance.command_line() == "fastff bench size --output rows.csv 'a b.csv'"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with provenance.py in src/fastff, committed."""
    folder = tmp_path / "src" / "fastff"
    folder.mkdir(parents=True)
    file = folder / "provenance.py"
    file.write_text("first\n")
    monkeypatch.setattr(provenance, "__file__", str(file))

    def git(*command):
        own = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *own, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "src")
    git("commit", "-qm", "first")
    return tmp_path, git


def test_a_checkout_names_its_commit_and_whether_files_have_changed(repository):
    folder, git = repository
    commit = git("rev-parse", "--short", "HEAD")
    assert provenance.checkout() == commit
    (folder / "notes.txt").write_text("untracked\n")
    (folder / "src" / "new.py").write_text("untracked\n")
    assert provenance.checkout() == commit
    (folder / "src" / "fastff" / "provenance.py").write_text("second\n")
    assert provenance.checkout() == f"{commit}+"


def test_an_installed_package_has_no_commit(repository, monkeypatch):
    """A virtual environment inside a checkout of another project must not borrow its commit."""
    folder, _ = repository
    installed = folder / "venv" / "fastff"
    installed.mkdir(parents=True)
    (installed / "provenance.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(installed / "provenance.py"))
    assert provenance.checkout() == ""
    monkeypatch.setenv("PATH", "")
    assert provenance.checkout() == ""  # git is missing
