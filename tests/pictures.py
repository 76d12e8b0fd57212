"""Pictures left out of tests that do not look at them: a figure costs more than the steps of a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vsa.evaluation.evaluation_folder as evaluation_folder
import vsa.sampling.sample_writer as sample_writer
import vsa.training.callbacks.diagnostics as diagnostics
import vsa.training.callbacks.samples as samples

# argument that holds the path, by function
DRAWING = {
    (diagnostics, "layer_heatmaps"): 1,
    (evaluation_folder, "draw_evaluation"): 1,
    (evaluation_folder, "contact_sheet"): 2,
    (sample_writer, "contact_sheet"): 2,
    (samples, "draw_attention"): 3,
}


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that look at pictures."""


@pytest.fixture(autouse=True)
def pictures_left_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files in place of the pictures of runs and evaluations, unless a test asks for `drawn`."""
    if "drawn" not in request.fixturenames:
        leave_out(monkeypatch)


def leave_out(patch: pytest.MonkeyPatch) -> None:
    """The same for runs that several tests share."""

    def in_place_of(position: int) -> Any:
        def draw(*arguments: Any, **_: Any) -> Path | None:
            path = arguments[position]
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).touch()
            return path

        return draw

    for (module, name), position in DRAWING.items():
        patch.setattr(module, name, in_place_of(position))
