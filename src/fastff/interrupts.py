"""Ctrl-C between any two instructions leaves no hook, mode or half-written parameter behind.

Python raises KeyboardInterrupt wherever the main thread is, even while a `with` statement enters or leaves, before its
clean-up has begun. `guarded` makes context managers that delay Ctrl-C while they enter and leave, and raise it
afterwards. The block itself can be interrupted as usual. Other threads get no Ctrl-C, and other signals are not
delayed.
"""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .validate import check_allocated

T = TypeVar("T")


class _Guarded(AbstractContextManager[T]):
    """Enters and leaves `inner` without interruption. With `whole`, the block runs without interruption too."""

    def __init__(self, inner: AbstractContextManager[T], whole: bool = False) -> None:
        self.inner, self.whole = inner, whole
        self.held = False  # a Ctrl-C that waits
        self.before: Any = None  # the handler that gets it

    def __enter__(self) -> T:
        current = signal.getsignal(signal.SIGINT)
        if callable(current) and threading.current_thread() is threading.main_thread():
            self.before = current
            signal.signal(signal.SIGINT, self._receive)
        try:
            value = self.inner.__enter__()
        except BaseException:
            self._release()
            raise
        try:
            while self.held and not self.whole:
                self.held = False
                self.before(signal.SIGINT, sys._getframe())
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return value

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.inner.__exit__(*error)
        finally:
            self._release()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT until the block is left."""
        at = frame
        while at is not None and not self.whole:
            # By the frame and not by a flag: an interrupt may come before the first statement of __exit__.
            if at.f_code in _PROTECTED and at.f_locals.get("self") is self:
                break
            at = at.f_back
        if self.whole or at is not None:
            self.held = True
        else:
            self.before(number, frame)

    def _release(self) -> None:
        if self.before is None:
            return
        if signal.getsignal(signal.SIGINT) == self._receive:
            signal.signal(signal.SIGINT, self.before)
        if self.held:
            self.held = False
            self.before(signal.SIGINT, sys._getframe())


_PROTECTED = {_Guarded.__enter__.__code__, _Guarded.__exit__.__code__}


def guarded(function: Callable[..., Iterator[T]]) -> Callable[..., AbstractContextManager[T]]:
    """contextlib.contextmanager, but Ctrl-C waits while the block is entered and left."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> AbstractContextManager[T]:
        return _Guarded(make(*args, **kwargs))

    return made


def uninterrupted() -> AbstractContextManager[None]:
    """Ctrl-C waits until the block is done. Use it for a few quick statements that belong together."""
    return _Guarded(contextlib.nullcontext(), whole=True)


@guarded
def all_or_nothing(tensors: Iterable[Tensor], commit: Callable[[], None] = lambda: None) -> Iterator[None]:
    """If the block or commit() raises, restore the tensors. commit() runs after the block, without interruption."""
    before = []
    for tensor in tensors:
        check_allocated("a parameter", tensor)  # a copy of freed memory ends the process
        before.append((tensor, tensor.detach().clone()))
    recording = torch.is_grad_enabled()
    try:
        yield
        commit()
    except BaseException:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        raise
    finally:
        torch.set_grad_enabled(recording)  # torch.no_grad() may be interrupted as it leaves
