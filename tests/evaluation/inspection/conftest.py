"""Fixtures of tiny runs, and inspections without their pictures."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_runs import one_thread, tiny_config, tiny_run_dir, write_tiny_run  # noqa: F401
from vsa.evaluation.inspection import folder
from vsa.evaluation.inspection.folder import InspectSettings, inspect_checkpoint
from vsa.evaluation.inspection.measure import Inspection

PATHS = {"draw_selected": 3, "draw_heatmaps": 1, "draw_maps": 3, "draw_popularity": 1}


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files in place of pictures, which take longer than everything else."""
    for name, place in PATHS.items():
        monkeypatch.setattr(folder, name, lambda *arguments, place=place, **_: arguments[place].touch())


def inspect_on_cpu(checkpoint: Path, clip: Path | str, **options: Any) -> tuple[Path, Inspection, str]:
    """`inspect_checkpoint` with some of its settings."""
    return inspect_checkpoint(InspectSettings(checkpoint=str(checkpoint), clip=str(clip), device="cpu", **options))
