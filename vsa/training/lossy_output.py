"""Standard output and error redirected to a disk that may be full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from vsa.errors import NO_ROOM


class _Lossy:
    """A text stream that drops output for which there is no disk space."""

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
    """Drop lines of standard output and error for which there is no disk space, instead of raising an error."""
    streams = sys.stdout, sys.stderr
    try:
        with redirect_stdout(_Lossy(sys.stdout)), redirect_stderr(_Lossy(sys.stderr)):
            yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # the rest of the buffer would fail again at interpreter exit and change the exit status
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
