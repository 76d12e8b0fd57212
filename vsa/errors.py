"""How every command reports bad input, a full disk and memory that runs out: one line, exit status 1 (28: the disk)."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vsa.secrets import without_secrets

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk: no space, over quota, over the process's own limit."""

DISK_FULL = 28
"""Exit status of a process that found no room on a disk, the number that Linux has for it."""


@contextmanager
def one_line_errors(*extra: type[Exception], traceback: bool | None = None) -> Iterator[None]:
    """Turn an error of the user's input into `error: ...` on stderr and exit status 1, of a full disk 28.

    Input errors are ValueError and OSError, and whatever stands in `extra`. Anything else is a defect of ours and
    keeps its traceback. Secrets are masked.

    Args:
        extra: further exceptions that are input errors.
        traceback: True lets input errors through with theirs too; None follows Hydra's own switch HYDRA_FULL_ERROR=1.
    """
    if traceback is None:
        traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    if traceback:
        yield
        return
    try:
        yield
    except (ValueError, OSError, *extra) as error:
        message = without_secrets(" ".join(str(error).split())) or type(error).__name__
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        # standard error may lie on the full disk
        with suppress(OSError):
            print(f"error: {message}", file=sys.stderr)
        raise SystemExit(DISK_FULL if full else 1) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def usable_device(name: str | None, *, rank: int = 0) -> str:
    """A device that works here.

    Args:
        name: as a user gave it; None takes a GPU when there is one.
        rank: of the process; plain "cuda" shares the GPUs of a machine out by it.

    Raises:
        ValueError: names the device and why it cannot be used.
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
    """Raise ValueError when nothing can be written under `folder`, which need not exist yet."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"cannot write to {folder}: {nearest} is no folder that can be written to")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation on the CPU or a GPU failed."""
    import torch

    # the CPU's allocator has no exception of its own
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


class MemoryRanOut(ValueError):
    """A training step did not fit into memory, and what to set so that it does."""


def memory_reason(error: BaseException | None) -> str:
    """What an allocator said, in a few words."""
    # the CPU's begins with its place in C++, that of CUDA goes on about everything it holds
    reason = str(error).partition("\n")[0].rpartition("Allocator: ")[2].partition(". GPU ")[0]
    return reason or type(error).__name__


def too_large(make: Callable[[], Any], error: BaseException | None) -> str:
    """What to say when `make` ran out of memory: the size of the network that it builds, and what failed."""
    reason = memory_reason(error)
    import torch
    from torch import nn

    try:
        with torch.device("meta"):
            built = make()
    except RuntimeError:
        built = None
    if not isinstance(built, nn.Module):
        return f"not enough memory: {reason}"
    count = sum(p.numel() for p in built.parameters())
    size = f"{count:,} parameters, {4 * count / 2**30:,.1f} GiB in fp32"
    return f"the model is too large for the memory here: {size} ({reason})"
