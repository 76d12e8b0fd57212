"""Standard streams that are closed, full or without a reader, and what others wrote on its way to a terminal.

This module imports only the standard library: a command calls it before anything else opens a file.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from typing import Any

LOADING = "loading ..."
"""First line of every command, on standard error, before packages are imported that take seconds."""


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move the cursor of a terminal, set its title or turn the direction of its text."""
# libraries whose bars move the cursor; what their tables show comes from `visible`
_DRAWING = ("rich", "tqdm", "click")
# importing torchao, as transformers and peft do if it is there, warns of kernels that a machine lacks and of calls that
# torch 2.13 deprecates
_WARNING = ("torchao", "torch.utils._pytree")


def visible(text: str, keep: str = "") -> str:
    """A text with its control characters written out as `\\x1b`, but those in `keep`."""
    return CONTROL.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


class _Visible(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        # `print` has no frame, so this is the module that prints
        module = sys._getframe(1).f_globals.get("__name__", "")
        return super().write(text if module.partition(".")[0] in _DRAWING else visible(text, "\n\t"))


def make_steady() -> None:
    """Let standard output and error of this process lose what cannot be written, instead of raising an error, and keep
    warnings of libraries that are of no use out of them.

    Descriptors 0 to 2 that are closed are opened on the null device, so that no other file gets them. Streams that
    something else has replaced, as a test does, are left alone.
    """
    for name in _WARNING:
        logging.getLogger(name).setLevel(logging.ERROR)
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
        encoding = stream.encoding if stream else "utf-8"
        at_once = number == 2 or os.isatty(number) or (stream is not None and stream.write_through)
        buffer = io.BufferedWriter(_Steady(number, "w", closefd=False))
        steady = _Visible(buffer, encoding, "backslashreplace", line_buffering=at_once)
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
