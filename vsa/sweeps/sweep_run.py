"""One start of a sweep: its runs in training order, and what became of them."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.checkpoints.run_folder import check_folder, locked
from vsa.checkpoints.run_history import has_finished
from vsa.config import Sweep, build
from vsa.evaluation.figures import final_loss
from vsa.files import typed
from vsa.secrets import without_secrets
from vsa.settings import key_value
from vsa.sweeps.job_queue import Job, Slot, run_jobs
from vsa.sweeps.lifeline import OPTION
from vsa.sweeps.points import Point, at_learning_rates, at_seeds, learning_rates
from vsa.sweeps.record import SweepRecord
from vsa.sweeps.watch import SweepDisplay
from vsa.training.budgets import budget_of
from vsa.training.launch import INPUT_ERRORS
from vsa.training.train import check_run

if TYPE_CHECKING:
    from vsa.sweeps.sweeper import PointSweeper

Where = Sequence[Slot] | Launcher
"""Slots of this machine, or the launcher of a cluster."""


class Interrupted(Exception):
    """A signal ended the queue early."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


class SweepRun:
    """One start of a sweep.

    Args:
        sweeper: sweeper that composes configs.
        sweep: settings of the sweep.
        folder: folder of the sweep.
        settings: overrides that all runs share.
        seed: seed of the run's own settings.
        overwrite: restart points whose overrides have changed.
    """

    def __init__(
        self, sweeper: PointSweeper, sweep: Sweep, folder: Path, settings: list[str], *, seed: int, overwrite: bool
    ):
        self._sweeper, self._sweep, self._folder = sweeper, sweep, folder
        self._settings, self._overwrite = settings, overwrite
        self._seeds = list(sweep.seeds) if sweep.seeds is not None else None
        if self._seeds == [] and sweep.lr is None:
            raise ValueError("sweep.seeds=[]: no run; give a seed, or null for that of the config")
        every = self._seeds or [seed]
        if twice := [one for one in every if every.count(one) > 1]:
            raise ValueError(f"sweep.seeds={every}: two runs would write to one folder, {folder}/POINT-seed{twice[0]}")
        self._lr_seed = sweep.lr_seed if sweep.lr_seed is not None else max(every) + 1
        if sweep.lr is not None and self._lr_seed in every:
            raise ValueError(
                f"sweep.lr_seed={self._lr_seed}: expected a seed that is in no comparison, got one of {every}"
            )
        self._command = shlex.join(_program() + sys.argv[1:])
        self._record = SweepRecord(folder, sweep=str(sweep.name), command=self._command, settings=settings)
        self._jobs: dict[str, Job] = {}
        # data modules by their settings
        self._opened: dict[str, Any] = {}

    @contextmanager
    def watched(self) -> Iterator[SweepDisplay]:
        """The display of the sweep, whose folder is locked meanwhile; a signal to the queue ends the program."""
        try:
            with locked(self._folder), SweepDisplay(self._folder) as watch:
                yield watch
        except Interrupted as stop:
            print(f"{stop}, the same command continues: {self._command}")
            raise SystemExit(128 + stop.number) from None

    def train(self, variants: Sequence[Point], where: Where, watch: SweepDisplay) -> None:
        """Train every variant: first at its learning rates, then at its seeds.

        Raises:
            ValueError: no variant is valid, or points were started with other overrides.
            Interrupted: a signal ended the sweep.
        """
        centres, refused = self._check(variants)
        for point, reason in refused:
            self._note(watch, at_seeds(point, self._seeds, None), "refused", reason)
        good = [point for point in variants if point.name in centres]
        if self._sweep.lr is None:
            self._queue(_by_seed([at_seeds(point, self._seeds, None) for point in good]), where, watch)
            return
        tried = {
            point.name: {
                rate: one
                for rate in learning_rates(self._sweep, centres[point.name])
                for one in at_learning_rates(point, [rate], self._lr_seed, self._sweep.lr_settings)
            }
            for point in good
        }
        self._queue([one for own in tried.values() for one in own.values()], where, watch)
        if self._seeds == []:
            return
        points_at_seeds: list[list[Point]] = []
        for point in good:
            losses = {
                rate: loss
                for rate, one in tried[point.name].items()
                if self._record.finished(one) and (loss := final_loss(self._folder / one.name)) is not None
            }
            best = min(losses, key=lambda rate: losses[rate], default=None)
            if best is None or not math.isfinite(losses[best]):
                reason = "none of its learning rates has a validation loss"
                self._note(watch, at_seeds(point, self._seeds, None), "failed", reason)
                continue
            watch.say(f"{point.name}: optim.lr={best:g} is the best of {len(losses)} (loss {losses[best]:.4g})")
            points_at_seeds.append(at_seeds(point, self._seeds, best))
        self._queue(_by_seed(points_at_seeds), where, watch)

    def _check(self, variants: Sequence[Point]) -> tuple[dict[str, float], list[tuple[Point, str]]]:
        """Learning rates of the valid variants by name, and the other variants with their errors."""
        centres, refused = {}, []
        for point in variants:
            rank_zero_info(f"checking {point.name}")
            try:
                config = self._composed(point)
                check_run(config, self._opened)
                centres[point.name] = config.optim.lr
            except (ValueError, OSError, *INPUT_ERRORS) as error:
                # Hydra appends its search path to the message
                reason = without_secrets(" ".join(str(error).split())).partition(" Config search path:")[0]
                refused.append((point, reason))
        if not centres:
            raise ValueError(refused[0][1])
        if len(centres) > 1 and budget_of(config) is None:
            steps = f"each run trains trainer.max_steps={config.trainer.max_steps}, whatever FLOPs a step takes"
            rank_zero_info(f"no budget was given: {steps}; flop_budget=F gives all runs the same")
        # once for all runs, which would wait for the first one
        for settings in self._opened:
            build(yaml.safe_load(settings)).prepare_data()
        return centres, refused

    def _composed(self, point: Point, *more: str) -> Any:
        return self._sweeper.compose([*self._settings, *point.overrides, *self._place(point), *more])

    def _place(self, point: Point) -> list[str]:
        return [key_value("run", point.name), key_value("run_dir", self._folder / point.name)]

    def _note(self, watch: SweepDisplay, points: Sequence[Point], status: Any, reason: str) -> None:
        for point in points:
            job = Job(point.name, (), self._log(point), status=status, reason=reason)
            self._jobs[point.name] = job
            self._record.note({point: job})
            watch.add([job])
            watch.changed(job)

    def _log(self, point: Point) -> Path:
        return self._folder / f"{point.name}.log"

    def _queue(self, points: Sequence[Point], where: Where, watch: SweepDisplay) -> None:
        self._refuse_changed(points)
        jobs = [self._job(point) for point in points]
        self._jobs |= {job.name: job for job in jobs}
        by_name = {point.name: point for point in points}

        def changed(job: Job) -> None:
            if job.status == "finished" and not has_finished(self._folder / job.name):
                # by its own time limit, or before its last validation
                job.status = "stopped"
            self._record.note({by_name[job.name]: job})
            watch.changed(job)

        self._record.note(dict(zip(points, jobs, strict=True)))
        watch.add(jobs)
        waiting = [job for job in jobs if job.status == "waiting"]
        if isinstance(where, Launcher):
            _run_elsewhere(waiting, where, changed)
            return
        grace = self._sweep.grace_seconds
        number = run_jobs(waiting, where, changed=changed, tick=watch.tick, grace=grace)
        if number is not None:
            missing = sum(job.status != "finished" for job in jobs)
            name = signal.Signals(number).name
            raise Interrupted(number, f"{name}: stopped with {missing} of {len(jobs)} runs to go")

    def _refuse_changed(self, points: Sequence[Point]) -> None:
        changed = [point for point in points if self._record.changed(point)]
        if changed and not self._overwrite:
            raise ValueError(
                f"{self._folder} holds runs of other settings at {', '.join(point.name for point in changed)}: "
                "give another sweep.name, or start these over with overwrite=true"
            )
        for point in changed:
            check_folder(self._folder / point.name, overwrite=True)
            check_run(self._composed(point, "overwrite=true"), self._opened)
        for point in changed:
            if (aside := self._record.forget(point)) is not None:
                rank_zero_info(f"the run that was in {self._folder / point.name} is in {aside} now")

    def _job(self, point: Point) -> Job:
        if self._record.finished(point):
            return Job(point.name, (), self._log(point), status="finished")
        # its command line would make typed words of those that stand in the file of the sweep
        self._composed(point)
        goes_on = bool(list_checkpoints(self._folder / point.name / "checkpoints"))
        words = [*self._settings, *point.overrides, *self._place(point)]
        words += ["ckpt_path=last"] if goes_on else []
        command = [sys.executable, "-m", "vsa.cli", f"{OPTION}{os.getpid()}", "train", *self._sweeper.flags]
        return Job(point.name, [*command, *words], self._log(point), settings=words)

    def returned(self, point: Point) -> JobReturn:
        """The outcome of a point, for a sweeper of Hydra."""
        job = self._jobs[point.name]
        loss = final_loss(self._folder / point.name) if job.status == "finished" else None
        returned = JobReturn(
            overrides=point.overrides, status=JobStatus.FAILED if loss is None else JobStatus.COMPLETED
        )
        returned.return_value = ValueError(job.reason or "it has no validation loss") if loss is None else loss
        return returned

    def end(self) -> None:
        """Print the outcome of every run, the lowest loss first.

        Raises:
            SystemExit: a run failed.
        """
        jobs = self._jobs.values()
        losses = {job.name: final_loss(self._folder / job.name) for job in jobs if job.status == "finished"}
        width = max(map(len, self._jobs))
        for name, loss in sorted(losses.items(), key=lambda item: math.inf if item[1] is None else item[1]):
            print(f"  {name:{width}}  validation loss {'missing' if loss is None else f'{loss:.4g}'}")
        names_by_reason: dict[str, list[str]] = {}
        for job in jobs:
            if job.status in ("refused", "failed"):
                names_by_reason.setdefault(f"{job.status}: {job.reason}", []).append(job.name)
        for how, names in names_by_reason.items():
            print(f"  {', '.join(names)}  {how}")
        failed = sum(job.status == "failed" for job in jobs)
        report = f"vsa report {typed(self._folder)}"
        print(f"{len(losses)} of {len(jobs)} runs finished in {self._folder}, next: {report}")
        if failed:
            print(f"error: {failed} of {len(jobs)} runs failed, the same command tries them again", file=sys.stderr)
            raise SystemExit(1)


def _by_seed(runs: Sequence[Sequence[Point]]) -> list[Point]:
    """Runs of every variant in training order: an interrupted sweep can then compare its first seeds."""
    return [point for of_a_seed in zip(*runs, strict=True) for point in of_a_seed]


def _run_elsewhere(jobs: Sequence[Job], launcher: Launcher, changed: Callable[[Job], None]) -> None:
    """Run all jobs with a launcher of Hydra, which returns after the last one."""
    if not jobs:
        return
    for job in jobs:
        job.status, job.device = "running", type(launcher).__name__
        changed(job)
    for job, outcome in zip(jobs, launcher.launch([job.settings for job in jobs], initial_job_idx=0), strict=True):
        job.reason = outcome.return_value or None
        job.status = "failed" if job.reason else "finished"
        changed(job)


def _program() -> list[str]:
    name = Path(sys.argv[0]).name
    return ["vsa"] if name in ("vsa", "__main__.py") else ["python", sys.argv[0]]
