"""The folder of the evaluations of a run: a record and a sheet of clips by checkpoint, a table and a figure of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.evaluation.evaluator import Evaluation, EvaluationSettings, weights_digest
from vsa.evaluation.figures import draw_evaluation
from vsa.evaluation.record import write_record
from vsa.files import read_json
from vsa.pages.charts import write_csv
from vsa.sampling.contact_sheet import contact_sheet
from vsa.settings import Count

SHEET_CLIPS = 8
_METRICS = dict[str, float | Literal["inf", "-inf", "nan"]]
_RECORD = {"step": Count, "settings_digest": str, "metrics": _METRICS, "missing?": dict[str, str]}


def record_path(folder: Path, checkpoint_name: str) -> Path:
    return folder / f"{checkpoint_name}.json"


def read_record(folder: Path, checkpoint: Checkpoint, settings: EvaluationSettings) -> dict[str, Any] | None:
    """The record of these weights with these settings, None if there is none yet."""
    try:
        record = read_json(record_path(folder, checkpoint.path.name), kind=_RECORD)
    except (FileNotFoundError, ValueError):
        return None
    same_weights = record.get("digest") == weights_digest(checkpoint, settings.weights)
    return record if same_weights and record.get("settings_digest") == settings.digest else None


def write_evaluation(folder: Path, evaluation: Evaluation, checkpoint_name: str) -> None:
    """Write `step-N.json` and `step-N.png` (reference beside run), then update `evaluation.csv` and `evaluation.png`.

    The table and the figure contain every `step-*.json` of the folder: one row per checkpoint; a repeated evaluation
    replaces its row, and rows of removed checkpoints stay. The figure shows the rows with the settings of this
    evaluation. Infinity and NaN, which JSON cannot express, are the strings "inf" and "nan".
    """
    record = evaluation.record
    videos, prompts = evaluation.videos[:SHEET_CLIPS], record["settings"]["prompts"][:SHEET_CLIPS]
    titles = [f"{_label(record['sampling'])}: {prompt}" for prompt in prompts]
    if evaluation.reference is not None:
        against = [f"reference, {_label(record['reference_sampling'])}: {prompt}" for prompt in prompts]
        titles = [title for pair in zip(against, titles, strict=True) for title in pair]
        videos = torch.stack([evaluation.reference[:SHEET_CLIPS], videos], 1).flatten(0, 1)
    contact_sheet(videos, titles, folder / f"{checkpoint_name}.png")
    write_record(record_path(folder, checkpoint_name), record)
    rows = [row for path in folder.glob("step-*.json") if (row := _row(path)) is not None]
    rows.sort(key=lambda row: row["step"])
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(folder / "evaluation.csv", columns, [[row.get(name, "") for name in columns] for row in rows])
    alike = [row for row in rows if row["settings"] == record["settings_digest"]]
    alike = [{k: v for k, v in row.items() if not str(v).startswith("missing")} for row in alike]
    draw_evaluation(alike, folder / "evaluation.png", title=str(folder))


def _label(sampling: Mapping[str, Any]) -> str:
    topk, tiles = sampling["topk"], sampling["num_tiles"]
    if isinstance(topk, int):
        return f"top {topk} of {tiles}"
    return f"top {min(topk)} to {max(topk)} of {tiles}"


def _row(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path, kind=_RECORD)
    except ValueError as error:
        print(f"left out of evaluation.csv: {error}", flush=True)
        return None
    metrics = {name: f"{float(value):.9g}" for name, value in record["metrics"].items()}
    metrics |= {name: f"missing ({reason})" for name, reason in record.get("missing", {}).items()}
    return {"step": record["step"], "settings": record["settings_digest"], **metrics}
