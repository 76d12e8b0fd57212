"""The end of a run: after its last step, by a signal, by its deadline, by an error, or before the first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.run_folder import MANIFEST
from vsa.checkpoints.run_history import has_finished, note_end
from vsa.reports.run_page import PAGE, write_run_page
from vsa.reports.runs import read_run
from vsa.secrets import without_secrets
from vsa.signals import NOTHING_SAVED, StopNow, Stopped, current_handlers, handled_by, set_handlers
from vsa.training.callbacks.steps import Steps
from vsa.training.deadline import DEADLINE
from vsa.training.display import never_fatal
from vsa.training.lightning_compat import fit_without_steps, keep_signals, tear_down_unread_data
from vsa.training.modules.base import DiffusionModule
from vsa.training.out_of_memory import told_out_of_memory
from vsa.training.parallel import ShardedDataParallel
from vsa.training.run_state import RunStatus
from vsa.training.summary import closing_lines
from vsa.training.watch import RankMonitor

PAGE_SECONDS = 30.0
"""Time limit in seconds for writing the page of a run at its end."""

DEADLINE_STATUS = 124
"""Exit status of a run stopped by its scheduler's deadline, that of the command `timeout`."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let signals end the process, and with it every job of a sweep, with one line and status 128 + number.

    While a run trains, `Checkpointing` handles the signals instead, since only then is there something to save.
    """
    try:
        with handled_by(StopNow()):
            yield
    except Stopped as stop:
        rank_zero_info(f"{signal.Signals(stop.number).name}: {NOTHING_SAVED}")
        raise


def nothing_to_do(max_steps: int, resume: Checkpoint | None, run_dir: Path | None = None) -> bool:
    """Whether a resumed run has finished, with a message; ValueError for a new run without steps.

    A run that was stopped after its last step lacks its last validation and clips, which it then makes up for.
    """
    if resume is None:
        if max_steps == 0:
            raise ValueError("trainer.max_steps=0 trains nothing: expected at least 1, or -1 for no end")
        return False
    if not 0 <= max_steps <= resume.step:
        return False
    if run_dir is not None and max_steps == resume.step and not has_finished(run_dir):
        rank_zero_info(f"all {max_steps} steps are done: making up for the validation and clips of the end")
        return False
    rank_zero_info(
        f"nothing to do: {resume.path} is already at step {resume.step} and trainer.max_steps={max_steps}: "
        "give a larger one"
    )
    return True


def fit(trainer: L.Trainer, module: DiffusionModule, datamodule: Any, run_dir: Path, *, requeue: bool) -> None:
    """Train, then report how the run ended and where its files are.

    Args:
        trainer: trainer with the callbacks of the run.
        module: training module.
        datamodule: data module.
        run_dir: the run folder.
        requeue: whether a SLURM job that SIGUSR1 has stopped is requeued.

    Raises:
        FloatingPointError: the gradients of no step were finite.
        MemoryRanOut: a step did not fit into memory.
        SystemExit: a signal or the scheduler's deadline ended the run; rank 0 has status 128 + the signal's number, or
            `DEADLINE_STATUS`.
    """
    began = time.monotonic()

    def close(how: str, reason: str = "") -> None:
        # where this start began; the data may have gone back since
        start = 0 if module.resume is None else module.resume.step
        step = trainer.global_step
        # a run that made no step of its own has nothing to report
        if (step <= start < trainer.max_steps) or not trainer.is_global_zero:
            return
        with never_fatal(f"the end of the run in {run_dir / MANIFEST}"):
            note_end(run_dir, how=how, reason=reason, step=step)
        page = written_page(run_dir)
        with never_fatal("the summary of the run"):
            lines = closing_lines(
                run_dir,
                module.status,
                how=how,
                start=start,
                step=step,
                max_steps=trainer.max_steps,
                seconds=time.monotonic() - began,
                metrics=module.headline,
                page=page,
            )
            rank_zero_info("\n".join(lines))

    number: int | None
    keep_signals(trainer)
    tear_down_unread_data(trainer)
    handlers = current_handlers()
    try:
        with RankMonitor(run_dir, module.status) as watch:
            owner: Any = trainer
            if isinstance(strategy := owner.strategy, ShardedDataParallel):
                strategy.watch = watch
            owner.callbacks.append(Steps(watch))
            if module.resume is not None and module.resume.step == trainer.max_steps:
                fit_without_steps(trainer)
            with told_out_of_memory(module):
                trainer.fit(module, datamodule=datamodule)
        number = module.status.received
        if number in (None, DEADLINE):
            for clipper in module.clippers.values():
                clipper.refuse_all_dropped()
    except Stopped as stop:
        if module.status.stage != "steps":
            raise
        number = stop.number
    except Exception as error:
        close("failed", without_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}"))
        raise
    finally:
        set_handlers(handlers)
    if number is None:
        close("finished")
        return
    complete = 0 <= trainer.max_steps <= trainer.global_step
    if module.status.received is not None:
        what = "continue with ckpt_path=last" + (", which makes up for the validation and clips of the end" * complete)
        rank_zero_info(f"{_name(number, module.status)}: saved {module.status.saved}, {what}")
    close("stopped", _name(number, module.status))
    if requeue and number == signal.SIGUSR1:
        _requeue()
    status = 128 + number
    if number == DEADLINE:
        # a run that reached its own time limit ended as planned
        status = 0 if module.status.deadline is None or module.status.deadline.own else DEADLINE_STATUS
    if status:
        # only rank 0 fails: launchers kill all ranks when one fails, even those that are about to end regularly
        sys.exit(status if rank_zero_only.rank == 0 else 0)


def written_page(run_dir: Path) -> Path | None:
    """Write the page of a run; an error, or more than `PAGE_SECONDS`, gives a warning and None."""
    pages: list[Path] = []

    def write() -> None:
        with never_fatal(str(run_dir / PAGE)):
            write_run_page(read_run(run_dir))
            # relative to the run folder as the user named it
            pages.append(run_dir / PAGE)

    # a thread, so that a hanging file system cannot keep a finished job alive
    writer = Thread(target=write, name="page", daemon=True)
    writer.start()
    writer.join(PAGE_SECONDS)
    if writer.is_alive():
        rank_zero_info(f"warning: {run_dir / PAGE} took more than {PAGE_SECONDS:g} s: `vsa report` writes it later")
    return pages[0] if pages else None


def _name(number: int, status: RunStatus) -> str:
    if number == DEADLINE and status.deadline is not None:
        return status.deadline.name
    return signal.Signals(number).name


@rank_zero_only
def _requeue() -> None:
    """Requeue a SLURM job, which starts it again with the same command."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=30)
        reason = result.stderr.strip() or f"exit status {result.returncode}" if result.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    line = f"job {job} is queued again" if reason is None else f"warning: scontrol requeue {job} failed: {reason}"
    rank_zero_info(line)
