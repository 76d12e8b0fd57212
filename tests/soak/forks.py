"""Attempts in a process of their own, which a product that hangs, or is killed, costs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tests.training.ranks import Ranks

SECONDS = 120


def in_fork(attempt: Callable[[], object], folder: Path, seconds: float = SECONDS) -> str:
    """Run an attempt in a fork; AssertionError with what it printed if it fails or hangs; returns what it printed.

    Args:
        attempt: the attempt with its assertions.
        folder: for what it prints.
        seconds: after which it is killed; on an idle machine it takes a few.
    """
    with Ranks(1, lambda _: attempt(), folder) as fork:
        statuses = fork.statuses(seconds)
        assert statuses == [0], f"status {statuses[0]}: {fork.output()[-4000:]}"
        return fork.output()


def left_alone_ends(seconds: float = 20) -> None:
    """Wait for threads that the product does not wait for any longer."""
    for thread in threading.enumerate():
        if thread.name.endswith("(run)"):
            thread.join(seconds)
