"""The signals that end a run, and what they do while there is nothing to save.

It imports next to nothing, so that a command can set its handlers before anything else is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""What a terminal, a person or a scheduler sends."""

Handler = Callable[[int, FrameType | None], Any] | int | None

NOTHING_SAVED = "stopped, there was nothing to save"


class Stopped(SystemExit):
    """A signal, 128 + whose number is the status, while no step was in hand."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handler that ends the process with one line and status 128 + number, wherever it is."""
    exit_now(128 + number, f"{signal.Signals(number).name}: {NOTHING_SAVED}")


def exit_now(status: int, line: str) -> NoReturn:
    """End the process from any thread, with a line where there is one; nothing else is put away."""
    if line:
        print(line, file=sys.stderr, flush=True)
    os._exit(status)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Let `handler` take the signals of `ENDING` inside; what stood before stands after."""
    before = current_handlers()
    set_handlers(dict.fromkeys(before, handler))
    try:
        yield
    finally:
        set_handlers(before)


def current_handlers() -> dict[int, Handler]:
    """Handlers of `ENDING` by number, of those that can be set here.

    Other threads than the main one cannot set any; a run under `nohup` goes on when its terminal is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in ENDING}
    return {n: h for n, h in handlers.items() if not (n == signal.SIGHUP and h == signal.SIG_IGN)}


def is_foreign(handler: Handler) -> bool:
    """Whether another program's code takes a signal, as that of a cluster's launcher which queues the job again."""
    module = getattr(handler, "__module__", None)
    return callable(handler) and module not in (None, "_signal", "signal") and not str(module).startswith("vsa.")


def set_handlers(handlers: Mapping[int, Handler]) -> None:
    """Set handlers by number; one that was not set by Python, hence is not known, becomes the default."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_signals_to_parent(worker: int = 0) -> None:
    """Let the worker process of a loader live through what is sent to all processes of a job.

    Terminals and schedulers signal every process: the run then finishes its step, for which it needs its workers.
    Only its own parent can end it.

    Args:
        worker: number of the worker.
    """
    if not hasattr(signal, "sigwaitinfo"):
        # only Linux tells who sent a signal
        return
    # no byte of it may reach the parent's watch, which listens at the same descriptor
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in {*ENDING} - {signal.SIGTERM}:
        # a thread that a package started in this process may not have the mask
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while True:
        sent = signal.sigwaitinfo(ENDING)
        if sent.si_signo == signal.SIGTERM and sent.si_pid == parent:
            os._exit(0)
