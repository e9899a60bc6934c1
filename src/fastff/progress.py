"""Progress bars, one kind everywhere: description, bar, "3/10", elapsed time and a short text, on stderr.

Bars need rich and a terminal. Without them nothing is drawn and the work goes on; a loop that names its unit prints a
line such as "3 of 10 cases" now and then instead.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUIET_SECONDS = 5.0  # at least, between two lines


def make_bar(*columns: Any, show: bool = True) -> Any:
    """A rich.progress.Progress on stderr with these columns after the bar; None without rich.

    Nothing is drawn with show=False, or if stderr is no terminal.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    console = Console(stderr=True)
    last = columns or (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}", style="dim"))
    columns = (TextColumn("{task.description}"), BarColumn(), *last)
    return Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))


@contextmanager
def progress(
    description: str, total: int | None, *, show: bool = True, unit: str = ""
) -> Iterator[Callable[..., None]]:
    """A bar for one loop: yields `advance(steps=1, text="", total=None)`, to call as the work goes on.

    A `total` in a call replaces the first one. `unit`, such as "cases", asks for lines where no bar can be drawn.
    """
    bar = make_bar(show=show)
    if bar is None or bar.disable:
        yield _lines(total, unit if show else "")
        return
    with bar:
        task = bar.add_task(description, total=total, text="")

        def advance(steps: int = 1, text: str = "", total: int | None = None) -> None:
            bar.update(task, advance=steps, text=text, total=total)  # rich keeps its total if this one is None

        yield advance


def _lines(total: int | None, unit: str) -> Callable[..., None]:
    """An `advance` that prints a line on stderr now and then, or nothing without a unit."""
    done, known, last = 0, total, time.monotonic()

    def advance(steps: int = 1, text: str = "", total: int | None = None) -> None:
        nonlocal done, known, last
        done, known = done + steps, known if total is None else total
        if unit and steps and time.monotonic() - last > QUIET_SECONDS:
            of = "" if known is None else f"of {known} "
            print(f"{done} {of}{unit}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return advance
