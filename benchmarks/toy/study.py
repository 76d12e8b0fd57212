"""Common parts of the toy studies: options, training of all seeds, and the record of the results.

Every seed has its own dense base model in `OUT/seed-N`, from which all arms of a study start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vsa.checkpoints.run_checkpoint import latest_checkpoint
from vsa.files import atomic_file
from vsa.sweeps.job_queue import Job, Slot, run_jobs
from vsa.training.sparsity_overrides import without_tiles_kept

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 60
"""Seconds that runs have to save a checkpoint after a signal."""

Run = tuple[int, Sequence[str]]
"""Steps and settings of a training."""


def study_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all studies share; parse them with `parse_counts`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="parallel trainings (default %(default)s)")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, e.g. data.root=FOLDER data.videos=FOLDER")
    return parser


def parse_counts(parser: argparse.ArgumentParser, argv: list[str] | None, *counts: str) -> argparse.Namespace:
    """Parse the arguments; raises ValueError unless `jobs` and `counts` are at least 1."""
    args = parser.parse_intermixed_args(argv)
    for name in ("jobs", *counts):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    args.out = args.out.resolve()
    return args


def run_folder(out: Path, seed: int, name: str) -> Path:
    """Folder of a base model or an arm."""
    return out / f"seed-{seed}" / name.replace(" ", "-")


def train(runs: Mapping[Path, Run], jobs: int) -> None:
    """Train runs in separate processes; finished runs with the same number of steps are kept.

    Args:
        runs: runs by folder, in the order of their starts.
        jobs: number of parallel trainings.

    Raises:
        ValueError: a training failed; raised after the others have ended, with the path of its log.
        SystemExit: a signal ended the trainings.
    """
    queue = [_job(folder, *run) for folder, run in runs.items() if not _is_finished(folder, run[0])]

    def tell(job: Job) -> None:
        if job.status == "finished":
            print(f"finished {job.name}", flush=True)

    slots = [Slot(f"job {i}") for i in range(jobs)]
    number = run_jobs(queue, slots, changed=tell, tick=lambda: None, grace=GRACE_SECONDS)
    if number is not None:
        raise SystemExit(128 + number)
    for job in queue:
        if job.status == "failed":
            raise ValueError(f"training {job.name} failed ({job.reason}), see {job.log}")


def _is_finished(folder: Path, steps: int) -> bool:
    return (folder / "checkpoints").is_dir() and latest_checkpoint(folder / "checkpoints").step == steps


def _job(folder: Path, steps: int, overrides: Sequence[str]) -> Job:
    own = (f"trainer.max_steps={steps}", "overwrite=true", f"run_dir={folder}", "callbacks.samples=null")
    quiet = ("callbacks.progress=null", "trainer.enable_progress_bar=false")
    # dense arms do not use the sparsity that is set for all arms
    settings = without_tiles_kept(overrides) if "attention=full" in overrides else overrides
    command = [sys.executable, str(ROOT / "train.py"), *settings, *own, *quiet]
    return Job(str(folder), command, folder.parent / f"{folder.name}.log")


def train_all(
    args: argparse.Namespace,
    base: str,
    base_steps: int,
    arms: Mapping[str, Run],
    then: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Train the base models of all seeds, then the arms of all seeds, `args.jobs` runs at a time.

    Args:
        args: parsed options of `study_parser`.
        base: name of the base models.
        base_steps: steps of their training.
        arms: runs of the arms by name.
        then: called with the folder of a seed when its runs are finished.

    Raises:
        ValueError: a training failed; the message names its log.
        SystemExit: a signal ended the trainings.
    """
    bases: dict[Path, Run] = {}
    runs: dict[Path, Run] = {}
    for seed in args.seeds:
        start, common = run_folder(args.out, seed, base), (f"seed={seed}", *args.overrides)
        bases[start] = (base_steps, ("experiment=quickstart", "attention=full", *common))
        for arm, (steps, own) in arms.items():
            runs[run_folder(args.out, seed, arm)] = (steps, (*own, f"init_from={start}", *common))
    train(bases, args.jobs)
    train(runs, args.jobs)
    for seed in args.seeds:
        then(run_folder(args.out, seed, base).parent)


def write_json(path: Path, record: Any) -> None:
    """Write the record of a study atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
