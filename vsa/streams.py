"""Standard streams that are closed, full or without a reader.

This module imports only the standard library: a command calls it before anything else opens a file.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

LOADING = "loading ..."
"""First line of every command, on standard error, before packages are imported that take seconds."""


def make_steady() -> None:
    """Let standard output and error of this process lose what cannot be written, instead of raising an error.

    Descriptors 0 to 2 that are closed are opened on the null device, so that no other file gets them. Streams that
    something else has replaced, as a test does, are left alone.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # opens the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream: Any = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        # Python has no stream for a descriptor that was closed at its start
        encoding, errors = (stream.encoding, stream.errors) if stream else ("utf-8", "backslashreplace")
        at_once = number == 2 or os.isatty(number) or (stream is not None and stream.write_through)
        buffer = io.BufferedWriter(_Steady(number, "w", closefd=False))
        steady = io.TextIOWrapper(buffer, encoding, errors, line_buffering=at_once)
        setattr(sys, name, steady)
        setattr(sys, f"__{name}__", steady)


def lost_output() -> OSError | None:
    """The first error of writing to standard output, None if all of it was written."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, _Steady) else None


class _Steady(io.FileIO):
    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)
        except OSError as error:
            error.filename = "standard output"
            self.lost = self.lost or error
            return len(data)
