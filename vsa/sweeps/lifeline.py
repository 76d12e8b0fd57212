"""Termination of the runs of a sweep with the sweep, even if the sweep is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

OPTION = "--with-sweep="
"""First word of the arguments of a run that a sweep starts, before the process id of the sweep."""

_PR_SET_PDEATHSIG = 1


def end_with_sweep(arguments: Sequence[str]) -> list[str]:
    """Make the kernel end this process, a run of a sweep or one of its ranks, when its parent has ended.

    This works on Linux only; on other systems the runs of a killed sweep continue.

    Args:
        arguments: command line of this process, which begins with `OPTION` if a sweep started it.

    Returns:
        The arguments without it.
    """
    if not arguments or not arguments[0].startswith(OPTION):
        return [*arguments]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # the parent may have ended before the call; ranks are children of a run, not of the sweep
        if "LOCAL_RANK" not in os.environ and str(os.getppid()) != arguments[0].removeprefix(OPTION):
            raise SystemExit(128 + signal.SIGKILL)
    return [*arguments[1:]]
