"""Signals that end a run, and their handlers while there is nothing to save.

This module imports only the standard library, so that a command can set its handlers before slow imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals from a terminal, a user or a scheduler that end a run."""

Handler = Callable[[int, FrameType | None], Any] | int | None

NOTHING_SAVED = "stopped, there was nothing to save"


class Stopped(SystemExit):
    """Exit with status 128 + number after a signal that arrived while no step was running."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class StopNow:
    """Handler that raises `Stopped` where the process is, before there is something to save.

    An exception raised in a finalizer, in the callback of a weak reference or in a block that catches everything is
    dropped; `check` raises it again.

    Attributes:
        received: first signal, None before it.
    """

    received: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        raise Stopped(number)

    def check(self) -> None:
        """Raise `Stopped` for a signal whose exception was dropped."""
        if self.received is not None:
            raise Stopped(self.received)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handler that ends the process immediately with one line and status 128 + number."""
    exit_now(128 + number, f"{signal.Signals(number).name}: {NOTHING_SAVED}")


def exit_now(status: int, line: str) -> NoReturn:
    """End the process from any thread without cleanup, and print `line` on stderr unless it is empty."""
    # standard error may be closed, or its reader gone
    with suppress(OSError):
        print(line, end="\n" if line else "", file=sys.stderr, flush=True)
    os._exit(status)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Set `handler` for the signals of `ENDING` in the block and restore the previous handlers afterwards."""
    before = current_handlers()
    set_handlers(dict.fromkeys(before, handler))
    try:
        yield
    finally:
        set_handlers(before)


def current_handlers() -> dict[int, Handler]:
    """Handlers of `ENDING` by number, restricted to those that may be set.

    Only the main thread can set handlers. An ignored signal stays ignored: `nohup` ignores SIGHUP, so that a run
    continues after its terminal is closed, and a shell without job control ignores SIGINT for what it starts with `&`.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in ENDING}
    return {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}


def is_foreign(handler: Handler) -> bool:
    """Whether a handler belongs to another package, for example a cluster launcher that requeues the job."""
    module = getattr(handler, "__module__", None)
    return callable(handler) and module not in (None, "_signal", "signal") and not str(module).startswith("vsa.")


def set_handlers(handlers: Mapping[int, Handler]) -> None:
    """Set handlers by number; None, the value for a handler that Python did not set, becomes the default handler."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_signals_to_parent(worker: int = 0) -> None:
    """Let a worker process of a data loader ignore the signals that are sent to all processes of a job.

    Terminals and schedulers signal every process, and the run needs its workers to finish its step. Only the parent
    process can end a worker.

    Args:
        worker: index of the worker, unused.
    """
    if not hasattr(signal, "sigwaitinfo"):
        # without sigwaitinfo, the sender of a signal is unknown
        return
    # the parent's handler listens at the inherited wakeup descriptor, which must not receive signals of the worker
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in {*ENDING} - {signal.SIGTERM}:
        # threads that a package started in this process may not have the mask
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while True:
        signal_info = signal.sigwaitinfo(ENDING)
        if signal_info.si_signo == signal.SIGTERM and signal_info.si_pid == parent:
            os._exit(0)
