"""Comparisons without their pictures, which take longer than everything else."""

from pathlib import Path

import pytest

from vsa.pages import page


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(panel, path: Path, *, title: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    monkeypatch.setattr(page, "draw_panel", touch)
