"""Launches of Triton kernels without asking Triton each time which compiled kernel they mean.

Triton finds it by the types, alignments and values of all arguments: 10 to 50 us of Python for each launch, where a
kernel may run for 3. Here, a launch like an earlier one finds its kernel by less (`launch_kernel`). And the launches of
a whole pass can be recorded and then repeated, for a layer and a batch size (`Replay`).
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import current_gpu, current_stream

_ALIGNMENT = 256  # bytes: as torch allocates
_local = threading.local()


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options), recorded if this thread records."""
    recording = getattr(_local, "recording", None)
    key: tuple[Any, ...] = ()
    if recording is None and isinstance(kernel, _jit_function()):  # the interpreter's are not
        gpu = current_gpu()
        key = _key(kernel, gpu, arguments, options)
        compiled = _compiled.get(key)
        if compiled is not None and not has_hooks():
            names = kernel.arg_names[len(arguments) :]
            run, stream, metadata = compiled.run, current_stream(gpu), compiled.packed_metadata
            values = [*arguments, *(options[name] for name in names)]
            run(*(*grid, 1, 1)[:3], stream, compiled.function, metadata, None, None, None, *values)
            return
    compiled = kernel[grid](*arguments, **options)
    if recording is not None:
        recording.append(_Launch(kernel, compiled, grid, arguments, options))
    elif key:
        _compiled[key] = compiled


_compiled: dict[tuple[Any, ...], Any] = {}  # what Triton made for launches like these


def _key(kernel: Any, gpu: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """All by which Triton 3.6 tells compiled kernels apart: types, whether 16 divides an address or a number, and ones.

    Kernels have no default arguments.
    """
    parts: list[Any] = [id(kernel), gpu, *options.values()]
    for value in arguments:
        if isinstance(value, Tensor):
            parts += value.dtype, value.data_ptr() % 16 == 0
        elif type(value) is int:
            parts.append((value == 1, value % 16 == 0, -(2**31) <= value < 2**31))
        else:
            parts.append(type(value))
    return tuple(parts)


class _Launch(NamedTuple):
    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # the tensors are alive until the recording is over: no two share memory
    options: dict[str, Any]


@contextmanager
def record() -> Iterator[list[_Launch]]:
    """The launches of this thread within the block, for `Replay`."""
    before, _local.recording = getattr(_local, "recording", None), []
    try:
        yield _local.recording
    finally:
        _local.recording = before


class Replay:
    """The launches of a pass, for other inputs of the same size and alignment.

    Args:
        launches: recorded with the input x, the output y and the weights. What else they use is scratch memory, whose
            numbers they write before they read them.
    """

    def __init__(self, launches: Sequence[_Launch], x: Tensor, y: Tensor, weights: Sequence[Tensor]) -> None:
        fixed = {t.data_ptr() for t in weights} | {0}  # 0: a tensor without elements
        moving = {x.data_ptr(): 0, y.data_ptr(): 1}
        self.scratch_bytes = 0
        self._places: dict[int, int] = {}  # of each allocation in the scratch memory
        self._steps = []
        for one in launches:
            names = one.kernel.arg_names[len(one.arguments) :]
            values = [*one.arguments, *(one.options[name] for name in names)]
            moves = []
            for at, value in enumerate(values):
                if not isinstance(value, Tensor):
                    continue
                address = value.data_ptr()
                if address in moving:
                    moves.append((at, moving[address], 0))
                elif address not in fixed:
                    moves.append((at, 2, self._place(value)))
                values[at] = address
            run, grid = one.compiled.run, (*one.grid, 1, 1)[:3]
            self._steps.append((run, grid, one.compiled.function, one.compiled.packed_metadata, values, moves))

    def _place(self, tensor: Tensor) -> int:
        """Where a tensor begins in the scratch memory."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if base not in self._places:
            self._places[base] = self.scratch_bytes
            self.scratch_bytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return self._places[base] + tensor.data_ptr() - base

    def __call__(self, x: int, y: int, scratch: int, stream: int) -> None:
        """Launch, given addresses and a CUDA stream. The input must be aligned as the recorded one."""
        bases = x, y, scratch
        for run, grid, function, metadata, recorded, moves in self._steps:
            values = recorded.copy()
            for at, base, offset in moves:
                values[at] = bases[base] + offset
            run(*grid, stream, function, metadata, None, None, None, *values)


def has_hooks() -> bool:
    """Whether somebody, such as a profiler, wants to hear of each launch."""
    runtime = _runtime()
    # None, or since Triton 3.5 a list of calls
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


@functools.cache
def _jit_function() -> Any:
    from triton.runtime.jit import JITFunction

    return JITFunction


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime
