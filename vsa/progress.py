"""Progress bar of long operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str, total: int, *, done: int = 0, **options: Any) -> Iterator[Callable[[int], None]]:
    """A progress bar on the terminal; yields a function that advances it by a count.

    Args:
        title: text beside the bar.
        total: count at the end.
        done: count at the start.
        options: options of rich's `Progress`.
    """
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, **options) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda count: bar.advance(task, count)
