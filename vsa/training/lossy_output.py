"""Standard output and error that may lie on a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from vsa.errors import NO_ROOM


class _Lossy:
    """A text stream that drops what it finds no room for."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            return _dropped(error, len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _dropped(error, 0)


def _dropped(error: OSError, count: int) -> int:
    if error.errno not in NO_ROOM:
        raise error
    return count


@contextmanager
def lossy_output() -> Iterator[None]:
    """Lines for which standard output or error has no room are lost inside, and end nothing."""
    streams = sys.stdout, sys.stderr
    try:
        with redirect_stdout(_Lossy(sys.stdout)), redirect_stderr(_Lossy(sys.stderr)):
            yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # what waits in its buffer would fail again when the interpreter ends, with a status of its own
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
