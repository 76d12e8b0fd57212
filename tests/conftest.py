"""What every test shares: configs compose as `vsa train` composes them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest_plugins = ["tests.soak.plugin"]

# how wide and how coloured help and tables are is decided when their libraries are imported, also by these
for name in ("COLUMNS", "LINES", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

# what nohup, or a shell without job control, lets this process ignore, its tests send
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def options_need_no_plus() -> Iterator[None]:
    """An override may name an option that no config file holds, because its default stands in Python."""
    if find_spec("hydra") is None:
        # tests of kernels run where there is only torch
        yield
        return
    from vsa.training.hydra_guard import checked_hydra

    with checked_hydra():
        yield
