"""Compiles Triton kernels for many sizes of the hard pass, in several processes, before they are timed.

Kernels are compiled for tensors without memory and not run. Triton keeps them in a folder that all processes share.
"""

import concurrent.futures
import functools
import multiprocessing
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastff
from fastff.backends import triton_hard, triton_tile
from fastff.backends.triton_choice import Launch
from fastff.backends.triton_cost import fastest
from fastff.backends.triton_size import Size
from fastff.bench import Case
from fastff.functional import Leaves, Tree
from fastff.progress import progress


class Job(NamedTuple):
    """A way to run a case. `launch` is triton_hard's or, for tiny layers, triton_tile's."""

    case: Case
    is_int8: bool
    kind: str  # "random", or the name of a set of sizes
    way: str
    launch: Launch | triton_tile.TileLaunch | None  # None: a dense layer
    is_default: bool


def size_of_case(case: Case, is_int8: bool) -> Size:
    gated = fastff.activations.is_gated(case.activation)
    return Size(
        case.batch, case.in_features, case.out_features, case.depth, case.leaf_width, 1, gated, case.itemsize,
        1 if is_int8 else case.itemsize,
    )  # fmt: skip


def chosen(case: Case) -> Job:
    """The way that `auto` takes."""
    size = size_of_case(case, False)
    choice = fastest(size)
    launch = triton_tile.choose(size, True) if choice.way == "tiny" else choice.launch._replace(pdl=True)
    return Job(case, False, "", choice.way, launch, True)


def run_way(job: Job, x: Tensor, tree: Tree, leaves: Leaves) -> tuple[Tensor, Tensor]:
    hard: Any = triton_tile.hard if job.way == "tiny" else triton_hard.hard
    return hard(x, tree, leaves, job.case.activation, job.launch)


def compile_job(job: Job) -> str:
    """Compile the kernels of a job, and run none: tensors have no memory. Returns what went wrong."""
    _only_compile()
    case = job.case
    layer = fastff.FFF(
        case.in_features, case.out_features, depth=case.depth, leaf_width=case.leaf_width, activation=case.activation,
        device="meta", dtype=case.torch_dtype,
    ).eval()  # fmt: skip
    if job.is_int8:
        fastff.quantize_(layer.requires_grad_(False))
    try:
        x = torch.empty(case.batch, case.in_features, device="meta", dtype=case.torch_dtype)
        run_way(job, x, layer.tree, layer.leaves)
    except Exception as error:  # a compiler may raise anything
        return f"{job.case} {job.way}: {type(error).__name__}: {error}"[:300]
    return ""


@functools.cache
def _only_compile() -> None:
    """From here on, this process compiles kernels and launches none."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)


def compile_all(jobs: Sequence[Job], processes: int, seconds: float) -> set[Job]:
    """Compile in several processes, for at most `seconds`; returns the jobs that are ready."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context)
    futures = {pool.submit(compile_job, job): job for job in jobs if job.launch is not None}
    ready = {job for job in jobs if job.launch is None}
    with progress("compiling", len(futures), unit="launches") as advance:
        try:
            for future in concurrent.futures.as_completed(futures, timeout=seconds):
                advance()
                if future.exception() or future.result():
                    print(future.exception() or future.result(), flush=True)
                else:
                    ready.add(futures[future])
        except TimeoutError:
            print(f"{len(ready)} of {len(jobs)} are ready after {seconds:.0f} s", flush=True)
    for process in list(pool._processes.values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return ready
