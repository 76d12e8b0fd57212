"""What every test shares: an environment without settings of the terminal, and signals that arrive."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

pytest_plugins = ["tests.soak.plugin"]

# how wide and how coloured help and tables are is decided when their libraries are imported, also by these
for name in ("COLUMNS", "LINES", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

# what nohup, or a shell without job control, lets this process ignore, its tests send
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# a forked process has no threads of its parent: collecting the parent's process groups and stores there would abort
os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files in place of the PNGs of pages, each of which costs as much as everything else of a page."""

    def touch(panels: object, path: Path, *, title: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    for name in ("vsa.pages.page.draw_panel", "vsa.evaluation.figures.draw_panels"):
        monkeypatch.setattr(name, touch)
