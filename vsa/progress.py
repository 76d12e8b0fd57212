"""Progress of long operations: a bar on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 15.0
"""Time without a line where standard error is no terminal."""


@contextmanager
def progress_bar(
    title: str, total: int, *, done: int = 0, transient: bool = False, unit: str = ""
) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error; yields a function that advances it by a count.

    Args:
        title: text beside the bar.
        total: count at the end.
        done: count at the start.
        transient: whether the bar is removed at the end.
        unit: what is counted, if it is not plain from the title; lines then say the time that is left too.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=transient) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda count: bar.advance(task, count)
        return
    before, started = done, time.monotonic()
    said = started

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            line = f"{title}: {done} of {total}"
            if unit:
                left = (total - done) * (said - started) / max(done - before, 1)
                line += f" {unit}, {left / 60:.0f} min left" if left >= 90 else f" {unit}, {left:.0f} s left"
            console.print(line, markup=False, soft_wrap=True)

    yield advance
