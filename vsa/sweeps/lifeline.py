"""A run of a sweep must not outlive the sweep, however that ends."""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "VSA_SWEEP_PROCESS"
"""Names the process of the sweep to its runs."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process, a run of a sweep or one of its ranks, when the one that started it has ended.

    Only Linux can; elsewhere runs of a sweep that was killed go on.
    """
    sweep = os.environ.get(VARIABLE)
    if sweep is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # it may have ended before the call; ranks are children of a run
    if "LOCAL_RANK" not in os.environ and os.getppid() != int(sweep):
        raise SystemExit(128 + signal.SIGKILL)
