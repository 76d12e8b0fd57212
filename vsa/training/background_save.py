"""One checkpoint save, in the foreground or in a thread that works on a copy of the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from vsa.checkpoints.tensor_parts import Parts


def copied(parts: Parts) -> Parts:
    """A copy on the CPU of the tensors that this rank writes."""
    return {group: {name: part.copied() for name, part in own.items()} for group, own in parts.items()}


class Save:
    """One save of this rank.

    Args:
        write: function that writes the checkpoint and returns its folder; called again for a retry.
        background: whether to start at once in a thread; otherwise `result` writes the checkpoint.

    Attributes:
        seconds: duration of the save, once it is done.
    """

    def __init__(self, write: Callable[[], Path], *, background: bool):
        self._write = write
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        # not a daemon thread, so that the interpreter finishes the save before it exits
        self._thread = threading.Thread(target=self._run, name="checkpoint") if background else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            self._path = self._write()
        except BaseException as failure:
            self._failure = failure
        self.seconds = time.perf_counter() - start

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def again(self) -> Save:
        """A retry of the same save."""
        return Save(self._write, background=self._thread is not None)

    def join(self) -> None:
        """Wait for the thread, if any."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> Path:
        """Folder of the checkpoint, after the save is done; raises its error if it failed."""
        if self._thread is None:
            return self._write()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path
