"""Runs of a leg, each in its own process, which trains and then scores clips before the weights are lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.race.archive import archived, is_finished
from benchmarks.race.legs import CLIPS, COMMON, DENSE, FROM_SCRATCH, LEGS, START, STEPS, folder
from benchmarks.race.points import best_rates, points
from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.config import Sweep
from vsa.evaluation.figures import final_loss
from vsa.sweeps.devices import slots_of
from vsa.sweeps.job_queue import Job, run_jobs
from vsa.sweeps.lifeline import OPTION, end_with_sweep

GRACE = 90.0
"""Seconds in which a stopped run may save; a process that is killed would take the others under MPS along."""


def train(name: str, seeds: Sequence[int], jobs: int) -> None:
    """Train and score the runs of a leg that its archive has not; those that are there go on.

    Args:
        jobs: runs on a GPU at a time.

    Raises:
        SystemExit: a run failed or a signal came; the same command goes on.
    """
    leg, there = LEGS[name], archived(name)
    own = {point: settings for point, settings in points(name, seeds).items() if point not in there}
    if not own:
        print(f"{name}: nothing to train with seeds {', '.join(map(str, seeds))}")
    if name == "finetune" and own:
        dense = [FROM_SCRATCH, "attention=full", f"optim.lr={best_rates()[DENSE]}"]
        left = sorted({int(point.rpartition("-seed")[2]) for point in own})
        _queue(START, {f"{DENSE}-seed{seed}": [*dense, f"seed={seed}"] for seed in left}, jobs, scored=False)
    _queue(name, own, 1 if leg.alone else jobs, scored=leg.scored)


def _queue(name: str, own: Mapping[str, Sequence[str]], jobs: int, *, scored: bool) -> None:
    here = folder(name)
    all_jobs = [
        Job(point, _command(here / point, settings, scored=scored), here / f"{point}.log")
        for point, settings in own.items()
        if not (is_finished(here / point) and (not scored or (here / point / "score.json").is_file()))
    ]

    def changed(job: Job) -> None:
        if job.status != "running":
            done = sum(job.status == "finished" for job in all_jobs)
            loss = final_loss(here / job.name)
            outcome = job.reason or ("no validation loss" if loss is None else f"validation loss {loss:.4f}")
            print(f"[{done}/{len(all_jobs)}] {job.status} {job.name}: {outcome}", flush=True)

    slots = slots_of(Sweep(jobs_per_device=jobs), {"accelerator": "auto", "devices": 1})
    number = run_jobs(all_jobs, slots, changed=changed, tick=lambda: None, grace=GRACE)
    if number is not None:
        raise SystemExit(128 + number)
    if any(job.status != "finished" for job in all_jobs):
        raise SystemExit(1)


def _command(run: Path, settings: Sequence[str], *, scored: bool) -> list[str]:
    words = [*COMMON, *settings, f"run={run.name}", f"run_dir={run}"]
    start = [sys.executable, "-m", __name__, f"{OPTION}{os.getpid()}", str(run)]
    return [*start, str(CLIPS if scored else 0), *words]


def train_one(run: Path, clips: int, settings: Sequence[str]) -> None:
    """Train a run, or go on with it, and then score its clips in place of this process, whose memory is then free."""
    if not is_finished(run):
        from vsa.training.launch import launch

        launch([*settings, *(["ckpt_path=last"] if list_checkpoints(run / "checkpoints") else [])])
    if clips:
        words = ["--clips", clips, "--steps", STEPS, "--rendered", 0, "--batch-size", 16, "--compile", run]
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.world.score", *map(str, words)])


if __name__ == "__main__":
    folder_, clips_, *settings_ = end_with_sweep(sys.argv[1:])
    train_one(Path(folder_), int(clips_), settings_)
