"""Shared by all tests, in tests/ and reproduce/tests/.

Some virtual machines announce the AMX instructions and then kill the process that uses them; bfloat16 products
through oneDNN do. AVX-512 is the most they are allowed here.
"""

import os
import signal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts programs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C need it

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on CPU tensors; read when they are first imported


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two test processes share two cores


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
