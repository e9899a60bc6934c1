"""Progress of a run of many trainings, on stderr: two bars in a terminal, a line for each part elsewhere."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastff.progress import make_bar

from .parts import EXPECTED, Part, message, title


class Display:
    """A bar for all parts and one for the epochs of the current part."""

    def __init__(self, bar: Any, total: int, done: int, show: bool) -> None:
        self._bar = bar
        self._console: Console = bar.console
        self._lines = show and not self._console.is_terminal
        self._done, self._total = done, total
        self._all = bar.add_task("all", total=total, completed=done, text="")
        self._one = bar.add_task("", total=None, visible=False, text="")

    def start(self, part: Part) -> None:
        self._bar.reset(self._one, description=escape(title(part)), total=None, visible=True, text="")

    def epoch(self, epoch: int, most: int, text: str) -> None:
        self._bar.update(self._one, completed=epoch, total=most, text=escape(text))

    def wait(self, part: Part) -> None:
        self._bar.update(self._one, description=escape(f"another process trains {title(part)}"), visible=True)

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def count(self) -> None:
        """Count a part as done."""
        self._done += 1
        self._bar.advance(self._all)

    def done(self, part: Part, text: str) -> None:
        self.count()
        if self._lines:
            self._console.print(escape(f"{self._done} of {self._total}: {title(part)}: {text}"), soft_wrap=True)

    def failed(self, part: Part, error: Exception) -> None:
        if not isinstance(error, EXPECTED):
            trace = "".join(traceback.format_exception(error))
            self._console.print(escape(trace), style="dim", soft_wrap=True)
        self._console.print(escape(f"failed: {title(part)}: {message(error)}"), style="red", soft_wrap=True)


@contextmanager
def display(total: int, done: int, show: bool) -> Iterator[Display]:
    with make_bar(show=show) as bar:
        yield Display(bar, total, done, show)
