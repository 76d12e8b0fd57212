"""The notebook: every cell runs, at a tiny size, and shows what it says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.reports.test_report import Page
from tests.tiny_runs import one_thread  # noqa: F401

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "first_run.ipynb"


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a kernel does; returns the value of its last expression, which would be shown."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def test_the_file_is_a_notebook():
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 0)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    for cell in book["cells"]:
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() - {"id"} == {"cell_type", "metadata", "source"} | own
        assert all(isinstance(line, str) for line in cell["source"])


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # a training sets it for the process it expects to be alone in: put back afterwards
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    names: dict[str, Any] = {}
    results = []
    for place, cell in enumerate(cell for cell in cells() if cell["cell_type"] == "code"):
        results.append(run_cell("".join(cell["source"]), names))
        if place == 0:
            assert {"count", "steps", "sampler_steps"} < names.keys()
            names |= {"count": 24, "steps": 2, "sampler_steps": 1}
    pictures = [each for each in results if isinstance(each, Image.Image)]
    # loss, two contact sheets, attention: what a notebook shows inline
    assert [Path(picture.filename).name for picture in pictures] == [  # type: ignore[attr-defined]
        "loss.png",
        "contact_sheet.png",
        "contact_sheet.png",
        "attention.png",
    ]
    assert all(picture._repr_png_() for picture in pictures)
    page = tmp_path / results[-1]
    assert "finished at step 2 of 2" in Page(page.read_text(encoding="utf-8")).text
    # a cell that fails is not passed over
    with pytest.raises((SystemExit, ValueError)):
        run_cell('vsa_command("report nowhere")', names)
