"""What the machine offers right now: free memory, idle cores, memory bandwidth."""

import math
import os
import time
from pathlib import Path

import torch


def free_memory(device: str) -> int:
    """The bytes that can still be used without swapping or failing."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**62


def lack_of_memory(need: float, device: str) -> str:
    """Why `need` bytes do not fit into memory; empty if they do. A tenth of the free memory is left to others."""
    free = 0.9 * free_memory(device)
    return "" if need <= free else f"needs {need / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"


class OtherLoad:
    """How many cores other processes keep busy from here on. Threads that wait for each other suffer most from them."""

    def __init__(self) -> None:
        self.start = self._read()

    def cores(self) -> float | None:
        """The busy cores since the start; None where the system does not say."""
        now = self._read()
        if now is None or self.start is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all busy cores, of this process."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


def free_threads(seconds: float = 0.2) -> int:
    """How many of torch's threads find an idle core now: a thread that waits for a core holds up all others."""
    load = OtherLoad()
    time.sleep(seconds)
    busy = load.cores() or 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores - math.ceil(busy - 0.2)))


def bandwidth(device: str, size: int = 2**29) -> float:
    """The bytes per second that this machine moves, best of several: a large read on a CPU, a copy on a GPU.

    On a CPU by all threads, as a matrix times a vector: the access pattern of a layer at batch 1.
    """
    best = 0.0
    if device == "cuda":
        source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best = max(best, 2 * size / (start.elapsed_time(end) / 1e3))
        return best
    matrix, vector = torch.ones(size // 2**14, 2**12), torch.ones(2**12)  # size // 4 values
    for _ in range(30):
        begin = time.perf_counter()
        torch.mv(matrix, vector)
        best = max(best, 4 * matrix.numel() / (time.perf_counter() - begin))
    return best
