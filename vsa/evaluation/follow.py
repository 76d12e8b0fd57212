"""Evaluation of the checkpoints of a run in a separate process, also while the run writes and removes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, read_checkpoint, resolve_checkpoint
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.config import stored_data
from vsa.data.plan_datamodule import PlanDataModule
from vsa.data.prompts import HELD_OUT_PROMPTS
from vsa.errors import refuse_unwritable
from vsa.evaluation.bars import Bar
from vsa.evaluation.evaluation_folder import read_record, write_evaluation
from vsa.evaluation.evaluator import EvaluationSettings, Evaluator, weights_digest
from vsa.evaluation.latent_distance import LEAST_CLIPS
from vsa.evaluation.video_metrics import load_lpips
from vsa.files import own_folder
from vsa.progress import progress_bar
from vsa.sampling.experts import with_low
from vsa.sampling.pipeline import SamplingPipeline, load_run

SHOWN = ("val/loss", "psnr", "ssim", "lpips", "black", "uniform", "motion", "flicker", "flicker_excess")

DISTANCES = ("kernel_distance", "frame_kernel_distance", "change_kernel_distance")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Request for an evaluation; None values are taken from the samples of the run.

    Args:
        device: device of the model.
        prompts: captions; empty: the sample prompts of the run, or some of its held-out captions.
        reference: dense, none, or another run.
        val_loss: whether to compute the validation loss.
        lpips: folder with LPIPS weights; None skips LPIPS.
        held_out: number of held-out captions to draw besides `prompts`.
        weights: averaged or trained weights; None: averaged ones if there are any.
        transformer_2: run of the expert of low noise, which draws the clips' last steps; the validation loss stays that
            of the evaluated run at its own noise levels.
        seed: seed of the noise.
        steps: Euler steps.
        guidance: classifier-free guidance scale.
        flow_shift: flow shift of the sampler.
        batch_size: clips and validation samples computed together.
    """

    device: str
    prompts: Sequence[str] = ()
    reference: str = "dense"
    val_loss: bool = True
    lpips: Path | None = None
    held_out: int = 0
    weights: Literal["ema", "model"] | None = None
    transformer_2: str | None = None
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
    """Evaluate every checkpoint of a run and print its metrics.

    Args:
        run_dir: run folder.
        request: the requested evaluation.
        bars: bounds of the metrics.
        out: output folder; None: `evaluation` in the run folder.
        follow: whether to wait for new checkpoints until the run's last step.
        poll: seconds between two checks for new checkpoints.
        timeout: seconds without a new checkpoint after which following ends.

    Returns:
        One line for each bar that the newest checkpoint misses.
    """
    folder, out = run_dir / "checkpoints", out or own_folder(run_dir / "evaluation")
    refuse_unwritable(out)
    if not folder.is_dir() and not (follow and (run_dir / "config.yaml").is_file()):
        raise ValueError(f"{run_dir} is not a run folder: it has no checkpoints (`vsa certify` measures exports)")
    if request.lpips is not None and request.reference == "none":
        raise ValueError(f"--lpips {request.lpips} needs a reference, got --reference none")
    if request.held_out and (drawn := len(request.prompts) + request.held_out) < LEAST_CLIPS:
        print(f"--held-out {request.held_out}: a distance to held-out clips needs {LEAST_CLIPS}, {drawn} are drawn")
    distance = None if request.lpips is None else load_lpips(request.lpips)
    reference_name, reference = _load_other(request.reference, request)
    low_name, low = _load_other(request.transformer_2 or "none", request)

    evaluator: Evaluator | None = None
    missed: list[str] | None = None
    for path in new_checkpoints(folder, follow=follow, poll=poll, timeout=timeout):
        checkpoint = open_checkpoint(path)
        if checkpoint is None:
            continue
        settings = replace(
            _settings(request, checkpoint, reference_name), transformer_2=None if low is None else low_name
        )
        if evaluator is None or evaluator.settings != settings:
            evaluator = Evaluator(settings, reference=reference, lpips=distance)
        record = read_record(out, checkpoint, settings)
        if record is None:
            run = _load_model(path, request)
            if run is None:
                continue
            record = _measure(evaluator, run if low is None else with_low(run, low), checkpoint, out)
        missed = _judge(record, bars)
        for line in missed:
            print(f"step {checkpoint.step} misses a bar: {line}", flush=True)
        max_steps = (checkpoint.state["config"].get("trainer") or {}).get("max_steps", -1)
        if follow and 0 <= max_steps <= checkpoint.step:
            break
    if missed is None:
        raise ValueError(f"no checkpoint in {folder} could be evaluated")
    if request.reference == "dense":
        print("psnr and ssim measure the agreement with the model's own dense attention, not how good its clips are")
    print(f"table, figure and contact sheets in {out}")
    return missed


def held_out_prompts(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The first captions of a run's held-out samples, empty without any."""
    data = stored_data(config) if count else None
    if not isinstance(data, PlanDataModule):
        return ()
    data.setup()
    return data.held_out_captions(count)


def _settings(request: EvaluationRequest, checkpoint: Checkpoint, reference: str) -> EvaluationSettings:
    """The requested settings, completed by those of the run's own samples.

    A run without sample prompts uses a few captions of its held-out data. A distilled run is sampled at its step list,
    because the other settings of its clips are those of its teacher.
    """
    config = checkpoint.config
    samples = (config.get("callbacks") or {}).get("samples") or {}
    prompts = (*request.prompts, *held_out_prompts(config, request.held_out))
    prompts = prompts or samples.get("prompts") or held_out_prompts(config, HELD_OUT_PROMPTS)
    distilled = checkpoint.state.get("step_list") is not None
    own = {"steps": None, "guidance": None} if distilled else sampling_of(config)
    overrides = {"steps": request.steps, "guidance": request.guidance, "flow_shift": request.flow_shift}
    return EvaluationSettings(
        prompts=tuple(prompts),
        seed=samples.get("seed", 0) if request.seed is None else request.seed,
        **{**own, **{name: value for name, value in overrides.items() if value is not None}},
        batch_size=request.batch_size,
        weights=checkpoint.choose_weights(request.weights),
        reference=reference,
        val_loss=request.val_loss,
        lpips=None if request.lpips is None else str(request.lpips.resolve()),
    )


def open_checkpoint(path: Path) -> Checkpoint | None:
    """A verified checkpoint; None, with a printed reason, if it is damaged or the run has removed it."""
    try:
        return read_checkpoint(path)
    except (ValueError, OSError) as error:
        print(f"{path.name}: skipped, {error if path.exists() else 'the run has removed it'}", flush=True)
        return None


def _load_model(path: Path, request: EvaluationRequest) -> SamplingPipeline | None:
    """Model of a verified checkpoint, fully in memory; None, with a printed line, if the run has removed it."""
    try:
        return load_run(path, weights=request.weights, device=request.device)
    except (ValueError, OSError, SafetensorError):
        if path.exists():
            raise
        print(f"{path.name}: skipped, the run has removed it", flush=True)
        return None


def _load_other(spec: str, request: EvaluationRequest) -> tuple[str, SamplingPipeline | None]:
    """Name of the reference or the second expert in the settings, and its run, if it is one."""
    if spec in ("dense", "none"):
        return spec, None
    checkpoint = resolve_checkpoint(spec)
    run = load_run(checkpoint.path, weights=request.weights, device=request.device)
    return f"{checkpoint.path.resolve()} {weights_digest(checkpoint, run.weights)[:12]}", run


def _measure(evaluator: Evaluator, run: SamplingPipeline, checkpoint: Checkpoint, out: Path) -> Mapping[str, Any]:
    """Evaluate a checkpoint with a progress bar and write the results."""
    with progress_bar(f"evaluating step {run.step}", evaluator.clip_steps(run), transient=True) as advance:
        evaluation = evaluator(run, checkpoint, advance)
    write_evaluation(out, evaluation, checkpoint.path.name)
    return evaluation.record


def _judge(record: Mapping[str, Any], bars: Sequence[Bar]) -> list[str]:
    """Print the metrics of a checkpoint and return one line for each bar that it misses."""
    metrics = record["metrics"]
    missing = record.get("missing", {})
    summary = ", ".join(f"{name} {float(metrics[name]):.5g}" for name in SHOWN if name in metrics)
    for name in (name for name in DISTANCES if name in metrics):
        low, high, real, noise = (float(metrics[f"{name}_{x}"]) for x in ("low", "high", "real", "noise"))
        summary += f", {name} {float(metrics[name]):.5g} "
        summary += f"(95% {low:.3g} to {high:.3g}; real {real:.3g}, noise {noise:.3g})"
    if "kernel_distance" in metrics:
        # clips like noise are no clips, whatever bars were asked for
        bars = [*bars, Bar(metric="kernel_distance", bound=float(metrics["kernel_distance_noise"]) / 2, least=False)]
    summary += "".join(f", {name} missing ({reason})" for name, reason in missing.items())
    print(f"step {record['step']}: {summary}", flush=True)
    return [line for line in (bar.missed(metrics, missing) for bar in bars) if line is not None]


def new_checkpoints(folder: Path, *, follow: bool, poll: float = 5.0, timeout: float = 3600.0) -> Iterator[Path]:
    """Checkpoint folders as they appear, oldest first, each version of a step once.

    Incomplete checkpoints have other names. A path may have been removed when it is used, because the run keeps only
    its newest checkpoints.

    Args:
        folder: folder of the checkpoints, which may not exist yet.
        follow: whether to wait for new checkpoints, instead of ending after the existing ones.
        poll: seconds between two checks.
        timeout: seconds without a new checkpoint after which following ends.
    """
    seen_versions: set[tuple[str, int, int]] = set()
    since = time.monotonic()
    while True:
        path = _oldest_unseen(folder, seen_versions)
        if path is not None:
            yield path
            since = time.monotonic()
        elif not follow or time.monotonic() - since >= timeout:
            return
        else:
            time.sleep(min(poll, timeout))


def _oldest_unseen(folder: Path, seen_versions: set[tuple[str, int, int]]) -> Path | None:
    for path in list_checkpoints(folder):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        # a run that is started again writes the same names
        version = (path.name, stat.st_ino, stat.st_mtime_ns)
        if version not in seen_versions:
            seen_versions.add(version)
            return path
    return None
