"""Judging the checkpoints of a run from a process of its own, also while the run writes and removes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, read_checkpoint, resolve_checkpoint
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.config import build, check_targets
from vsa.data.datamodule import PlanDataModule
from vsa.data.prompts import HELD_OUT_PROMPTS
from vsa.evaluation.bars import Bar
from vsa.evaluation.evaluator import (
    EvaluationSettings,
    Evaluator,
    read_record,
    weights_digest,
    write_evaluation,
)
from vsa.evaluation.video_metrics import load_lpips
from vsa.sampling.pipeline import LoadedRun, load_run

SHOWN = ("val/loss", "psnr", "ssim", "lpips", "black", "uniform", "motion", "flicker", "flicker_excess")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to measure of a run; None takes what the run samples itself.

    Args:
        device: where the model runs.
        prompts: captions; empty: those that the run samples, or some it holds out.
        reference: dense, none, or another run.
        val_loss: compute the validation loss.
        lpips: folder with LPIPS weights; None leaves it out.
        weights: averaged or trained; None: averaged where there are any.
        seed: of the noise.
        steps: Euler steps.
        guidance: classifier-free guidance scale.
        flow_shift: of the sampler's noise levels.
        batch_size: clips and validation samples computed together.
    """

    device: str
    prompts: Sequence[str] = ()
    reference: str = "dense"
    val_loss: bool = True
    lpips: Path | None = None
    weights: Literal["ema", "model"] | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    flow_shift: float | None = None
    batch_size: int = 16


def evaluate_run(
    run_dir: Path,
    request: EvaluationRequest,
    bars: Sequence[Bar],
    *,
    out: Path | None = None,
    follow: bool = False,
    poll: float = 5.0,
    timeout: float = 3600.0,
) -> list[str]:
    """Measure every checkpoint of a run and print what it is worth.

    Args:
        run_dir: run folder.
        request: what to measure.
        bars: bounds of the metrics.
        out: folder to write to; None: `evaluation` in the run folder.
        follow: wait for new checkpoints until the run's last step.
        poll: seconds between two looks.
        timeout: seconds without a new checkpoint after which following ends.

    Returns:
        one line for each bar that the newest checkpoint misses.

    Raises:
        ValueError: no checkpoint can be evaluated, or a setting has no meaning for the run.
    """
    folder, out = run_dir / "checkpoints", out or run_dir / "evaluation"
    if not folder.is_dir() and not (follow and (run_dir / "config.yaml").is_file()):
        raise ValueError(f"{run_dir} is not a run folder: checkpoints are missing")
    if request.lpips is not None and request.reference == "none":
        raise ValueError(f"--lpips {request.lpips} needs a reference, got --reference none")
    distance = None if request.lpips is None else load_lpips(request.lpips)
    reference_name, reference = _load_reference(request)

    evaluator: Evaluator | None = None
    missed: list[str] | None = None
    for path in new_checkpoints(folder, follow=follow, poll=poll, timeout=timeout):
        checkpoint = open_checkpoint(path)
        if checkpoint is None:
            continue
        settings = _settings(request, checkpoint, reference_name)
        if evaluator is None or evaluator.settings != settings:
            evaluator = Evaluator(settings, reference=reference, lpips=distance)
        record = read_record(out, checkpoint, settings)
        if record is None:
            run = _load_model(path, request)
            if run is None:
                continue
            record = _measure(evaluator, run, checkpoint, out)
        missed = _judge(record, bars)
        for line in missed:
            print(f"step {checkpoint.step} misses a bar: {line}", flush=True)
        max_steps = (checkpoint.state["config"].get("trainer") or {}).get("max_steps", -1)
        if follow and 0 <= max_steps <= checkpoint.step:
            break
    if missed is None:
        raise ValueError(f"no checkpoint in {folder} could be evaluated")
    print(f"table, figure and contact sheets in {out}")
    return missed


def _held_out_prompts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The first few captions of a run's held-out samples; none where it holds none out.

    Args:
        config: of the run.

    Raises:
        ValueError: the data are not there, or the config builds something else than our classes.
    """
    check_targets(config)
    data = build(config["data"])
    if not isinstance(data, PlanDataModule):
        return ()
    data.setup()
    return data.held_out_captions(HELD_OUT_PROMPTS)


def _settings(request: EvaluationRequest, checkpoint: Checkpoint, reference: str) -> EvaluationSettings:
    """What was asked for, and what is left out taken from the clips that the run samples itself.

    A run that samples none is asked for a few captions of its held-out data. A distilled run is sampled at its step
    list: the other settings of its clips are its teacher's.
    """
    config = checkpoint.state["config"]
    samples = (config.get("callbacks") or {}).get("samples") or {}
    prompts = request.prompts or samples.get("prompts") or _held_out_prompts(config)
    distilled = checkpoint.state.get("step_list") is not None
    own = {"steps": None, "guidance": None} if distilled else sampling_of(config)
    given = {"steps": request.steps, "guidance": request.guidance, "flow_shift": request.flow_shift}
    return EvaluationSettings(
        prompts=tuple(prompts),
        seed=samples.get("seed", 0) if request.seed is None else request.seed,
        **{**own, **{name: value for name, value in given.items() if value is not None}},
        batch_size=request.batch_size,
        weights=checkpoint.choose_weights(request.weights),
        reference=reference,
        val_loss=request.val_loss,
        lpips=None if request.lpips is None else str(request.lpips.resolve()),
    )


def open_checkpoint(path: Path) -> Checkpoint | None:
    """A verified checkpoint; None, with a line that says why, when it is damaged or the run has removed it."""
    try:
        return read_checkpoint(path)
    except (ValueError, OSError) as error:
        print(f"{path.name}: skipped, {error if path.exists() else 'the run has removed it'}", flush=True)
        return None


def _load_model(path: Path, request: EvaluationRequest) -> LoadedRun | None:
    """The model of a verified checkpoint, wholly in memory; None, with a line, when the run has removed it meanwhile.

    Raises:
        ValueError: the checkpoint is there and cannot be evaluated.
    """
    try:
        return load_run(path, weights=request.weights, device=request.device)
    except (ValueError, OSError, SafetensorError):
        if path.exists():
            raise
        print(f"{path.name}: skipped, the run has removed it", flush=True)
        return None


def _load_reference(request: EvaluationRequest) -> tuple[str, LoadedRun | None]:
    """How the settings name the reference, and the other run where it is one."""
    if request.reference in ("dense", "none"):
        return request.reference, None
    checkpoint = resolve_checkpoint(request.reference)
    run = load_run(checkpoint.path, weights=request.weights, device=request.device)
    return f"{checkpoint.path.resolve()} {weights_digest(checkpoint, run.weights)[:12]}", run


def _measure(evaluator: Evaluator, run: LoadedRun, checkpoint: Checkpoint, out: Path) -> Mapping[str, Any]:
    """Evaluate a checkpoint behind a progress bar and write the result."""
    columns = (TextColumn(f"step {run.step}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("sampling", total=evaluator.clip_steps(run))
        evaluation = evaluator(run, checkpoint, lambda clips: bar.advance(task, clips))
    write_evaluation(out, evaluation, checkpoint.path.name)
    return evaluation.record


def _judge(record: Mapping[str, Any], bars: Sequence[Bar]) -> list[str]:
    """Print the metrics of a checkpoint; returns one line for each bar it misses."""
    metrics = record["metrics"]
    shown = ", ".join(f"{name} {float(metrics[name]):.5g}" for name in SHOWN if name in metrics)
    print(f"step {record['step']}: {shown}", flush=True)
    return [line for line in (bar.missed(metrics) for bar in bars) if line is not None]


def new_checkpoints(folder: Path, *, follow: bool, poll: float = 5.0, timeout: float = 3600.0) -> Iterator[Path]:
    """Checkpoint folders as they appear, oldest first, each version of a step once; half-written ones have other names.

    A path may be gone again when it is used: the run keeps only its newest checkpoints.

    Args:
        folder: of the checkpoints; may not exist yet.
        follow: wait for new ones; otherwise end after those that are there.
        poll: seconds between two looks.
        timeout: seconds without a new one after which following ends.
    """
    seen: set[tuple[str, int, int]] = set()
    since = time.monotonic()
    while True:
        path = _oldest_unseen(folder, seen)
        if path is not None:
            yield path
            since = time.monotonic()
        elif not follow or time.monotonic() - since >= timeout:
            return
        else:
            time.sleep(min(poll, timeout))


def _oldest_unseen(folder: Path, seen: set[tuple[str, int, int]]) -> Path | None:
    for path in list_checkpoints(folder):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        # a run that starts anew writes the same names again
        version = (path.name, found.st_ino, found.st_mtime_ns)
        if version not in seen:
            seen.add(version)
            return path
    return None
