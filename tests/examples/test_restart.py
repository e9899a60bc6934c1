import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart.py"


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_a_killed_worker_changes_no_bit(tmp_path):
    """Killed between two checkpoints: the steps since the last one are made again, from the same random numbers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["--monitor-interval=0.1", str(EXAMPLE), str(tmp_path)]
    command += ["--steps=16", "--every=5", "--kill-at=8", "--check"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "exitcode: -9" in run.stderr
    assert re.search(r"^16 steps, attempt [1-3]: sum of weights", run.stdout, re.M)
    # torchrun may start a worker again that ended badly: each attempt that prints must have the same weights.
    assert set(re.findall(r"rank (\d): the same weights", run.stdout)) == {"0", "1"}, run.stdout
    assert "OTHER WEIGHTS" not in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000005", "000010", "000015", "again"]
