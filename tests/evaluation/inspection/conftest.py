"""Fixtures of tiny runs, and inspections without their pictures."""

import pytest

from tests.tiny_runs import one_thread, tiny_config, tiny_run_dir, write_tiny_run  # noqa: F401
from vsa.evaluation.inspection import folder

PATHS = {"draw_selected": 3, "draw_heatmaps": 1, "draw_maps": 3, "draw_popularity": 1}


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files in place of pictures, which take longer than everything else."""
    for name, place in PATHS.items():
        monkeypatch.setattr(folder, name, lambda *arguments, place=place, **_: arguments[place].touch())
