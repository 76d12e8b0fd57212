"""Comparisons without their pictures, which take longer than everything else."""

from pathlib import Path
from typing import Any

import pytest

from vsa.evaluation.comparison.measure import Row
from vsa.pages import page


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(panel, path: Path, *, title: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    monkeypatch.setattr(page, "draw_panel", touch)


def row_of(method: str, **values: Any) -> Row:
    """A row of synthetic fields; other values are those of dense attention."""
    shares = dict.fromkeys(("density", "visited", "recall", "ms", "attention_ms", "speedup"), 1.0)
    rest = {"family": method, "topk": None, "tiles": None, "error_l1": 0.1, "error_l2": 0.1, "prediction_ms": 0.0}
    known = {"capture": "fields", "layer": 0, "timestep": None, "repeats": 1, **shares, **rest}
    return Row(method=method, **{**known, **values})
