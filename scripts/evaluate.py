"""Judge the checkpoints of a run from a process of its own, with --follow as they are written.

Measures validation loss, agreement with dense attention on fixed prompts and noise, and how much of the clips is black,
one-coloured, still or flickering. Ends with status 1 when the newest checkpoint misses a bar.

python scripts/evaluate.py outputs/quickstart/default --follow --min-psnr 20 --max-black 0
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, read_checkpoint, resolve_checkpoint
from vsa.checkpoints.sampling_settings import sampling_of
from vsa.config import build, check_targets
from vsa.data.datamodule import PlanDataModule
from vsa.data.prompts import read_prompts
from vsa.errors import one_line_errors, usable_device
from vsa.evaluation.evaluator import (
    EvaluationSettings,
    Evaluator,
    read_record,
    weights_digest,
    write_evaluation,
)
from vsa.evaluation.video_metrics import load_lpips
from vsa.sampling.pipeline import LoadedRun, load_run
from vsa.training.callbacks.samples import HELD_OUT_PROMPTS


class Bar(NamedTuple):
    """A bound that a metric must keep.

    Args:
        metric: key of the metrics.
        bound: the bound itself still passes.
        least: the metric must not be below it; otherwise not above.
    """

    metric: str
    bound: float
    least: bool

    def missed(self, metrics: Mapping[str, Any]) -> str | None:
        """One line with both values where the bar is missed; NaN misses every bar."""
        value = float(metrics[self.metric])
        if (value >= self.bound) if self.least else (value <= self.bound):
            return None
        side = "below the required" if self.least else "above the allowed"
        return f"{self.metric} {value:.6g} is {side} {self.bound:.6g}"


BARS = {
    "--min-psnr": ("psnr", "of all pixels against the reference, dB"),
    "--min-ssim": ("ssim", "against the reference, mean over clips"),
    "--max-lpips": ("lpips", "against the reference, mean over clips"),
    "--max-val-loss": ("val/loss", "validation loss"),
    "--max-black": ("black", "share of black frames, nearly all of whose pixels are below a tenth of the range"),
    "--max-uniform": ("uniform", "share of frames of one colour"),
    "--max-flicker": ("flicker", "luma change that is taken back at once, share of the range"),
    "--max-flicker-excess": ("flicker_excess", "flicker less that of the reference"),
    "--min-motion": ("motion", "luma change from frame to frame, share of the range"),
}
COMPARED = ("psnr", "ssim", "lpips", "flicker_excess")
NO_BROKEN_CLIP = Bar(metric="non_finite", bound=0, least=False)
SHOWN = ("val/loss", "psnr", "ssim", "lpips", "black", "uniform", "motion", "flicker", "flicker_excess")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--follow", action="store_true", help="wait for new checkpoints until the run's last step")
    parser.add_argument("--timeout", type=float, default=3600, help="end --follow after S seconds without a new one")
    parser.add_argument("--poll", type=float, default=5, help="seconds between two looks")
    parser.add_argument("--prompt", action="append", default=[], help="a caption; may be repeated")
    parser.add_argument("--prompts", type=Path, help="text file, a caption a line (those the run samples, or held out)")
    parser.add_argument("--reference", default="dense", metavar="{dense,none,RUN}", help="what clips are compared with")
    parser.add_argument("--no-val-loss", action="store_true", help="leave the validation loss out")
    parser.add_argument("--lpips", type=Path, metavar="FOLDER", help="folder with torchvision's alexnet-*.pth")
    parser.add_argument("--weights", choices=("ema", "model"), help="averaged or trained weights (averaged if any)")
    parser.add_argument("--seed", type=int, help="of the noise (that of the run's samples)")
    parser.add_argument("--steps", type=int, help="Euler steps (those of the run's samples; a distilled run: its own)")
    parser.add_argument("--guidance", type=float, help="uncond + G * (cond - uncond) (as --steps; distilled: 1)")
    parser.add_argument("--shift", type=float, help="flow shift (that of the run's samples, or of its training)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", help="cpu, cuda:1, ... (cuda when there is one): not the one that trains")
    parser.add_argument("--out", type=Path, help="folder to write to (RUN/evaluation)")
    for option, (metric, what) in BARS.items():
        kind = "below" if option.startswith("--min") else "above"
        parser.add_argument(option, type=float, metavar="X", help=f"fail when {metric} is {kind}: {what}")
    return parser.parse_args(argv)


def bars_of(args: argparse.Namespace) -> list[Bar]:
    """The bars of the command line, and that every clip is finite.

    Raises:
        ValueError: a bar on what is not measured.
    """
    missing: dict[str, str] = {}
    if args.no_val_loss:
        missing["val/loss"] = "is of no use with --no-val-loss"
    if args.lpips is None:
        missing["lpips"] = "needs --lpips FOLDER"
    if args.reference == "none":
        missing |= dict.fromkeys(COMPARED, "needs a reference, got --reference none")
        if args.lpips is not None:
            raise ValueError(f"--lpips {args.lpips} {missing['lpips']}")
    bars = [NO_BROKEN_CLIP]
    for option, (metric, _) in BARS.items():
        bound = getattr(args, option[2:].replace("-", "_"))
        if bound is not None and metric in missing:
            raise ValueError(f"{option} {bound:g} {missing[metric]}")
        if bound is not None:
            bars.append(Bar(metric=metric, bound=bound, least=option.startswith("--min")))
    return bars


def held_out_prompts(config: Mapping[str, Any]) -> tuple[str, ...]:
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


def settings_of(args: argparse.Namespace, checkpoint: Checkpoint, reference: str) -> EvaluationSettings:
    """Settings of the command line, what is left out taken from the clips that the run samples itself.

    A run that samples none is asked for a few captions of its held-out data. A distilled run is sampled at its step
    list: the other settings of its clips are its teacher's.
    """
    config = checkpoint.state["config"]
    samples = (config.get("callbacks") or {}).get("samples") or {}
    prompts = list(args.prompt)
    if args.prompts is not None:
        prompts += read_prompts(args.prompts)
    elif not prompts:
        prompts = samples.get("prompts") or held_out_prompts(config)
    distilled = checkpoint.state.get("step_list") is not None
    own = {"steps": None, "guidance": None} if distilled else sampling_of(config)
    given = {"steps": args.steps, "guidance": args.guidance, "flow_shift": args.shift}
    return EvaluationSettings(
        prompts=tuple(prompts),
        seed=samples.get("seed", 0) if args.seed is None else args.seed,
        **{**own, **{name: value for name, value in given.items() if value is not None}},
        batch_size=args.batch_size,
        weights=checkpoint.choose_weights(args.weights),
        reference=reference,
        val_loss=not args.no_val_loss,
        lpips=None if args.lpips is None else str(args.lpips.resolve()),
    )


def open_checkpoint(path: Path) -> Checkpoint | None:
    """A verified checkpoint; None, with a line that says why, when it is damaged or the run has removed it."""
    try:
        return read_checkpoint(path)
    except (ValueError, OSError) as error:
        print(f"{path.name}: skipped, {error if path.exists() else 'the run has removed it'}", flush=True)
        return None


def load_model(path: Path, args: argparse.Namespace) -> LoadedRun | None:
    """The model of a verified checkpoint, wholly in memory; None, with a line, when the run has removed it meanwhile.

    Raises:
        ValueError: the checkpoint is there and cannot be evaluated.
    """
    try:
        return load_run(path, weights=args.weights, device=args.device)
    except (ValueError, OSError, SafetensorError):
        if path.exists():
            raise
        print(f"{path.name}: skipped, the run has removed it", flush=True)
        return None


def load_reference(args: argparse.Namespace) -> tuple[str, LoadedRun | None]:
    """How the settings name the reference, and the other run where it is one."""
    if args.reference in ("dense", "none"):
        return args.reference, None
    checkpoint = resolve_checkpoint(args.reference)
    run = load_run(checkpoint.path, weights=args.weights, device=args.device)
    return f"{checkpoint.path.resolve()} {weights_digest(checkpoint, run.weights)[:12]}", run


def measure(evaluator: Evaluator, run: LoadedRun, checkpoint: Checkpoint, out: Path) -> Mapping[str, Any]:
    """Evaluate a checkpoint behind a progress bar and write the result."""
    columns = (TextColumn(f"step {run.step}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("sampling", total=evaluator.clip_steps(run))
        evaluation = evaluator(run, checkpoint, lambda clips: bar.advance(task, clips))
    write_evaluation(out, evaluation, checkpoint.path.name)
    return evaluation.record


def judge(record: Mapping[str, Any], bars: list[Bar]) -> list[str]:
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


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.device = usable_device(args.device)
    bars = bars_of(args)
    folder, out = args.run / "checkpoints", args.out or args.run / "evaluation"
    if not folder.is_dir() and not (args.follow and (args.run / "config.yaml").is_file()):
        raise ValueError(f"{args.run} is no run folder: it has no checkpoints")
    if args.poll <= 0 or args.timeout <= 0:
        raise ValueError(f"poll and timeout must be above 0 seconds, got {args.poll:g} and {args.timeout:g}")
    distance = None if args.lpips is None else load_lpips(args.lpips)
    reference_name, reference = load_reference(args)

    evaluator: Evaluator | None = None
    missed: list[str] | None = None
    for path in new_checkpoints(folder, follow=args.follow, poll=args.poll, timeout=args.timeout):
        checkpoint = open_checkpoint(path)
        if checkpoint is None:
            continue
        settings = settings_of(args, checkpoint, reference_name)
        if evaluator is None or evaluator.settings != settings:
            evaluator = Evaluator(settings, reference=reference, lpips=distance)
        record = read_record(out, checkpoint, settings)
        if record is None:
            run = load_model(path, args)
            if run is None:
                continue
            record = measure(evaluator, run, checkpoint, out)
        missed = judge(record, bars)
        for line in missed:
            print(f"step {checkpoint.step} misses a bar: {line}", flush=True)
        max_steps = (checkpoint.state["config"].get("trainer") or {}).get("max_steps", -1)
        if args.follow and 0 <= max_steps <= checkpoint.step:
            break
    if missed is None:
        raise ValueError(f"no checkpoint in {folder} could be evaluated")
    print(f"table, figure and contact sheets in {out}")
    for line in missed:
        print(f"error: {line}", file=sys.stderr)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    with one_line_errors():
        main()
