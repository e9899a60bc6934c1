"""Where a measured row comes from: the machine, the commit of the checkout and the command line."""

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch


def machine(device: str) -> str:
    """The name of the GPU, or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def checkout() -> str:
    """The commit of the checkout that this code runs from, with a + if files have changed; empty without a checkout."""
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return ""
    commit, changes = _git(here, "rev-parse", "--short", "HEAD"), _git(here, "status", "--porcelain", "-uno", "..")
    return f"{commit}+" if changes else commit or ""


def command_line() -> str:
    """The command line of this process. Absolute paths keep only their last part, since rows are published."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["fastff", *words])


def _git(where: Path, *command: str) -> str | None:
    try:
        run = subprocess.run(["git", *command], cwd=where, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
