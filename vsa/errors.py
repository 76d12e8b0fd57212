"""One-line errors of all commands: exit status 1 for bad input or memory that runs out, 28 for a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vsa.secrets import without_secrets
from vsa.streams import visible

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk: no space, quota exceeded, file size limit of the process exceeded."""

DISK_FULL = 28
"""Exit status of a process that ended because a disk was full; the value of ENOSPC on Linux."""


@contextmanager
def one_line_errors(*extra: type[Exception], traceback: bool | None = None) -> Iterator[None]:
    """Turn input errors into `error: ...` on stderr and exit status 1, or 28 for a full disk.

    Input errors are ValueError, OSError, links in a circle, an allocation that failed, and the exceptions in `extra`.
    Any other exception is a bug of the project and keeps its traceback. Secrets are masked.

    Args:
        extra: further exceptions that are input errors.
        traceback: True keeps the tracebacks of input errors too; None follows Hydra's switch HYDRA_FULL_ERROR=1.
    """
    if traceback is None:
        traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    if traceback:
        yield
        return
    try:
        yield
    except (ValueError, OSError, *extra) as error:
        message = visible(without_secrets(" ".join(str(error).split()))) or type(error).__name__
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        # stderr may be redirected to the full disk
        with suppress(OSError):
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(DISK_FULL if full else 1) from error
    except (RuntimeError, MemoryError) as error:
        # `Path.resolve` of Python 3.11 and 3.12 has no OSError for it
        loop = str(error).startswith("Symlink loop from ")
        if not loop and not is_out_of_memory(error):
            raise
        with suppress(OSError):
            message = visible(without_secrets(str(error))) if loop else f"not enough memory: {memory_reason(error)}"
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def told_together(*checks: Callable[[], None]) -> None:
    """Run all checks; what they refuse is one ValueError, so that nobody meets one problem a start."""
    problems: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems[str(error)] = None
    if problems:
        raise ValueError("; ".join(problems))


def first_of(lines: Sequence[str], most: int = 20) -> list[str]:
    """The first lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def usable_device(name: str | None, *, rank: int = 0) -> str:
    """Name of an available device; ValueError for a device that cannot be used.

    Args:
        name: name from the user; None selects a GPU if there is one, else the CPU.
        rank: rank of the process, which selects the GPU of plain "cuda".
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{rank % torch.cuda.device_count()}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from None
    return name


def refuse_unwritable(folder: Path) -> None:
    """Raise ValueError if `folder`, which need not exist yet, cannot be written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    refusal = f"cannot write to {folder}: {nearest} is not a writable folder"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(refusal)
    try:
        # permissions do not bind a superuser, and some file systems take no files
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        # a full disk is reported by the write
        if error.errno not in NO_ROOM:
            raise ValueError(refusal) from None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation on the CPU or a GPU failed."""
    # without torch, which is slow to import, the error is not its own
    torch: Any = sys.modules.get("torch")
    # torch raises a plain RuntimeError if an allocation on the CPU fails
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and torch is not None
        and (isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error))
    )


class LoaderError(ValueError):
    """An error in a process or thread of a data loader, which passes it on as a whole traceback; keeps its message."""

    def __init__(self, message: str) -> None:
        # the message is the last line of the traceback
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class MemoryRanOut(ValueError):
    """A part of a run did not fit into memory, and what to set so that it does."""


def memory_reason(error: BaseException | None) -> str:
    """What an allocator said, in a few words."""
    # CPU messages start with a C++ location, CUDA messages end with allocator statistics
    reason = str(error).partition("\n")[0].rpartition("Allocator: ")[2].partition(". GPU ")[0]
    return reason or type(error).__name__


def too_large(make: Callable[[], Any], error: BaseException | None) -> str:
    """Message for `make` that ran out of memory: the size of the network that it builds, and the failed allocation."""
    reason = memory_reason(error)
    import torch
    from torch import nn

    try:
        with torch.device("meta"):
            model = make()
    except RuntimeError:
        model = None
    if not isinstance(model, nn.Module):
        return f"not enough memory: {reason}"
    count = sum(p.numel() for p in model.parameters())
    size = f"{count:,} parameters, {4 * count / 2**30:,.1f} GiB in fp32"
    return f"the model is too large for the memory here: {size} ({reason})"
