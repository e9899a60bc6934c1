"""Progress bars, one kind everywhere: description, bar, "3/10", elapsed time and a short text, on stderr.

They need rich. Without it, or where stderr is no terminal, nothing is drawn and the work goes on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def make_bar(*columns: Any, show: bool = True) -> Any:
    """A rich.progress.Progress on stderr, with these columns after the bar; None without rich or if not wanted."""
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
def progress(description: str, total: int | None, *, show: bool = True) -> Iterator[Callable[..., None]]:
    """A bar for one loop: yields `advance(steps=1, text="")`, to be called as the work goes on."""
    bar = make_bar(show=show)
    if bar is None:
        yield lambda steps=1, text="": None
        return
    with bar:
        task = bar.add_task(description, total=total, text="")
        yield lambda steps=1, text="": bar.update(task, advance=steps, text=text)
