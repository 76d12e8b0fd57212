"""Page of one run in one file: charts, clips, cost, faults, checkpoints and settings."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from vsa.files import is_regular, read_json
from vsa.pages.page import Page
from vsa.reports.clips import run_clip_table
from vsa.reports.header import shown_path
from vsa.reports.run_charts import run_charts
from vsa.reports.run_tables import (
    checkpoints_table,
    cost_table,
    duration,
    environment_table,
    faults,
    faults_table,
    settings_tables,
    starts_table,
)
from vsa.reports.runs import METRICS, Run
from vsa.reports.tables import count, number
from vsa.reports.variants import shown

PAGE = "report.html"
SCORE = "score.json"
MEGABYTE = 1_000_000
CLIPS_MB = 20.0
"""Most megabytes of clips in a page."""


def write_run_page(run: Run, *, out: Path | None = None, clips_mb: float = CLIPS_MB) -> Path:
    """Write the page of a run.

    Args:
        run: the run, from `read_run`.
        out: folder to write to; None: the run folder.
        clips_mb: maximum size of the sampled clips in the page, in megabytes.

    Returns:
        Path of the page.
    """
    folder = run.folder if out is None else out
    page = Page(folder / PAGE, title=f"Run {_title(run)}", facts=_facts(run), warnings=[*_careful(run)])
    charts = run_charts(run)
    beside = METRICS if folder.resolve() == run.folder else ""
    for chart in charts[:1]:
        page.chart(chart, data=beside, picture=_picture(run, chart.key))
    clips = run_clip_table(run, most_bytes=clips_mb * MEGABYTE)
    page.clips(
        "Clips",
        "The newest sampled clips, real clips of the same captions, and their reconstructions by the codec, which "
        "limit the sharpness of every model that is trained on its latents.",
        clips,
    )
    for chart in charts[1:]:
        page.chart(chart, data=beside)
    attention = run.folder / "attention.png"
    if is_regular(attention, inside=run.folder):
        page.picture("Attention", "The tiles that a few query tiles of a sampled clip attend to.", attention)
    tables = (cost_table(run), faults_table(run), starts_table(run), checkpoints_table(run), environment_table(run))
    for table in (*tables, *settings_tables(run)):
        if table is not None:
            page.table(table)
    page.missing(_not_shown(run, [chart.key for chart in charts], clips.rows, attention))
    return page.write(f"Written {datetime.now().astimezone().isoformat(sep=' ', timespec='minutes')}")


def _title(run: Run) -> str:
    names = [str(run.settings[key]) for key in ("name", "run") if run.settings.get(key) is not None]
    return "/".join(names) or run.folder.name


def _picture(run: Run, key: str) -> Path | None:
    picture = run.folder / "loss.png"
    return picture if key == "loss" and is_regular(picture, inside=run.folder) else None


def _facts(run: Run) -> dict[str, str]:
    most = run.settings.get("trainer.max_steps")
    of = f" of {most}" if isinstance(most, int) and most >= 0 else ""
    method, data = run.settings.get("attention._target_"), run.settings.get("data._target_")
    density = run.last("sparsity/density")
    density_text = f", {density:.1%} of the tiles at the end" if density is not None else ""
    seconds, device = run.total("seconds"), run.environments[-1] if run.starts else {}
    where = str(device.get("gpu") or device.get("cpu") or "")
    facts = {
        "Status": run.status + (f" at step {run.steps}{of}" if run.metrics else f", {_without_steps(run)}"),
        "Loss": _first_and_last(run),
        "Model": f"{count(run.parameters)} parameters" if run.parameters is not None else "",
        "Attention": f"{shown(method)}{density_text}" if method else "",
        "Data": " ".join(str(part) for part in (shown(data) if data else "", run.settings.get("data.root")) if part),
        "Training": ", ".join(part for part in ("" if seconds is None else duration(seconds), where) if part),
        "Begun": str(run.manifest.get("created", ""))[:19],
        "Toy clips": _score(run),
        "Folder": shown_path(run.folder),
    }
    return {name: text for name, text in facts.items() if text}


def _without_steps(run: Run) -> str:
    """Why a run without metrics has none."""
    if run.status == "running":
        return "no step logged yet"
    return "no step was logged" if (run.folder / METRICS).is_file() else f"{METRICS} is missing"


def _score(run: Run) -> str:
    """What `benchmarks.toy.score` has found, if it has scored the run."""
    try:
        record = read_json(run.folder / SCORE, kind={"clips": int, "model": {str: float}}, inside=run.folder)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"left out: {error}"
    return f"right in {record['clips']} samples: {', '.join(f'{k} {v:.1%}' for k, v in record['model'].items())}"


def _first_and_last(run: Run) -> str:
    what = "gap to the teacher" if run.distilled else "validation"
    parts = []
    for name, (_, values) in (("training", run.train), (what, run.val)):
        if len(values):
            ends = dict.fromkeys(number(float(value), 4) for value in (values[0], values[-1]))
            parts.append(f"{name} {' to '.join(ends)}")
    return ", ".join(parts)


def _careful(run: Run) -> Iterator[str]:
    if run.status == "running":
        yield "The run is still running: this page shows what it had logged when the page was written."
    elif run.status == "failed":
        reason = f": {run.starts[-1].get('reason') or 'no reason recorded'}" if run.starts else ""
        yield f"The run failed{reason}."
    elif run.status == "stopped":
        yield "The run stopped before its last step."
    for what, many, _ in faults(run):
        if what not in ("stopped", "failed", "killed"):
            yield f"{what[0].upper()}{what[1:]}: {many}. See Faults."
    changed = [str(commit) for commit in run.manifest.get("commits", []) if str(commit).endswith("+")]
    if changed:
        yield f"Files were changed after the commit in {', '.join(changed)}: the commit does not say what ran."


def _not_shown(run: Run, chart_keys: list[str], clips: object, attention: Path) -> list[str]:
    sentences = (
        ("loss" in chart_keys, f"Loss: {'no loss was logged' if run.metrics else _without_steps(run)}."),
        ("loss_by_timestep" in chart_keys, "Loss by timestep: nothing has been logged."),
        (any(name.startswith("diag/") for name in run.metrics), "Recall and gates: needs callbacks=diagnostics."),
        (clips, "Clips: none have been sampled (callbacks.samples)."),
        (
            is_regular(attention, inside=run.folder),
            "Attention: no picture was drawn; runs with sparse attention draw one with their last clips.",
        ),
        (run.settings, "Settings: config.yaml is missing."),
        (run.starts, f"Starts and environment: {run.damaged or 'the run is of a version that did not record them'}."),
    )
    return [sentence for there, sentence in sentences if not there]
