"""Closing summary of a run: progress, metrics, files, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vsa.evaluation.figures import logged_metrics
from vsa.files import typed
from vsa.training.run_state import RunStatus


def closing_lines(
    run_dir: Path,
    status: RunStatus,
    *,
    how: str,
    start: int,
    step: int,
    max_steps: int,
    seconds: float,
    metrics: Sequence[str],
    page: Path | None,
) -> list[str]:
    """The closing summary of a run, from its logs and files.

    Args:
        run_dir: the run folder.
        status: state of the run, with its training time, last checkpoint and prompt.
        how: first word: finished, stopped or failed.
        start: optimizer step at which this process started.
        step: optimizer step reached.
        max_steps: number of steps of the whole run; negative: unlimited.
        seconds: duration of this process, with preparation, validation, saving and clips.
        metrics: columns of `metrics.csv` whose first and last values are reported, if present.
        page: report page of the run; None: it could not be written.
    """
    of = f" of {max_steps}" if max_steps >= 0 else ""
    count = f"{step - start} step{'' if step - start == 1 else 's'}"
    spent = f"{count} in {_duration(status.trained_seconds)} of training, {_duration(seconds)} in all"
    lines = [("", f"{how} at step {step}{of}: {spent}")]
    for name, (steps, values) in logged_metrics(run_dir / "metrics.csv", metrics).items():
        first, last = (f"{values[i]:.4g} at step {steps[i]}" for i in (0, -1))
        lines.append((name, first if len(steps) == 1 else f"{first}, {last}"))
    lines.append(("checkpoint", str(status.saved or "none was written")))
    samples = sorted((run_dir / "samples").glob("step-*"))
    for name, paths in (
        ("metrics", [path for path in [run_dir / "metrics.csv"] if path.exists()]),
        ("samples", samples[-1:]),
        ("pictures", sorted(run_dir.glob("*.png"))),
        ("page", [page] if page is not None else []),
    ):
        if paths:
            lines.append((name, ", ".join(map(str, paths))))
    if status.saved is not None and how == "finished":
        text = "TEXT" if status.prompt is None else shlex.quote(status.prompt)
        lines.append(("next", f"vsa sample {typed(run_dir)} --prompt {text}"))
    elif status.saved is not None:
        lines.append(("next", "the same command with ckpt_path=last continues from there"))
    width = max(len(label) for label, _ in lines)
    return [f"  {label:{width}}  {text}" if label else text for label, text in lines]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
