"""What a long command tells of its progress, and the bar that shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]  # what is done, of how much, and what is at work


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Yield what a command calls with its progress; None where stderr is no terminal, and nothing is shown."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.markup import escape

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=escape(text))
