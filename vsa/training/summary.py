"""The last lines of a run: how far it came, how it went, where everything lies, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vsa.evaluation.figures import logged_metrics


def closing_lines(
    run_dir: Path,
    *,
    how: str,
    start: int,
    step: int,
    max_steps: int,
    seconds: float,
    checkpoint: Path | None,
    metrics: Sequence[str],
    prompt: str | None,
    page: Path | None,
) -> list[str]:
    """What a run says when it ends, from what was logged and what is on the disk.

    Args:
        run_dir: the run folder.
        how: the first word: finished, stopped, failed.
        start: optimizer step that this start of the run began at.
        step: steps done since the run began.
        max_steps: steps of a whole run; negative: no end.
        seconds: that this start took.
        checkpoint: to go on from or to sample; None: there is none.
        metrics: columns of `metrics.csv` whose first and last values are told, where they are.
        prompt: caption that the run samples.
        page: with everything about the run; None: it could not be written.
    """
    of = f" of {max_steps}" if max_steps >= 0 else ""
    lines = [("", f"{how} at step {step}{of}: {_count(step - start)} in {_duration(seconds)}")]
    for name, (steps, values) in logged_metrics(run_dir / "metrics.csv", metrics).items():
        first, last = (f"{values[i]:.4g} at step {steps[i]}" for i in (0, -1))
        lines.append((name, first if len(steps) == 1 else f"{first}, {last}"))
    lines.append(("checkpoint", "none was written" if checkpoint is None else str(checkpoint)))
    samples = sorted((run_dir / "samples").glob("step-*"))
    for name, paths in (
        ("metrics", [path for path in [run_dir / "metrics.csv"] if path.exists()]),
        ("samples", samples[-1:]),
        ("pictures", sorted(run_dir.glob("*.png"))),
        ("page", [page] if page is not None else []),
    ):
        if paths:
            lines.append((name, ", ".join(map(str, paths))))
    complete = how == "finished" or 0 <= max_steps <= step
    if checkpoint is not None and complete:
        text = "TEXT" if prompt is None else shlex.quote(prompt)
        lines.append(("next", f"vsa sample {shlex.quote(str(run_dir))} --prompt {text}"))
    elif checkpoint is not None:
        lines.append(("next", "the same command with ckpt_path=last goes on from there"))
    width = max(len(label) for label, _ in lines)
    return [f"  {label:{width}}  {text}" if label else text for label, text in lines]


def _count(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
