"""Termination of the runs of a sweep with the sweep, even if the sweep is killed."""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "VSA_SWEEP_PROCESS"
"""Environment variable with the process id of the sweep, for its runs."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel end this process, a run of a sweep or one of its ranks, when its parent has ended.

    This works on Linux only; on other systems the runs of a killed sweep continue.
    """
    sweep = os.environ.get(VARIABLE)
    if sweep is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # the parent may have ended before the call; ranks are children of a run, not of the sweep
    if "LOCAL_RANK" not in os.environ and os.getppid() != int(sweep):
        raise SystemExit(128 + signal.SIGKILL)
