"""How a run ends: with its last step, by a signal, by an error, or before it has begun."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.training.display import never_fatal
from vsa.training.modules.base import DiffusionModule
from vsa.training.summary import closing_lines


class _Terminated(SystemExit):
    """SIGTERM while no step was in hand."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM inside ends the process, and with it every job of a sweep, with one line and status 143.

    SIGINT does so by itself as KeyboardInterrupt. `Checkpointing` handles both while it trains: only then is there
    something to save.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated(128 + number)

    before: Any = signal.SIG_DFL
    # signals can only be handled in the main thread
    with suppress(ValueError):
        before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        rank_zero_info("SIGTERM: stopped, there was nothing to save")
        raise
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def nothing_to_do(max_steps: int, resume: Checkpoint | None) -> bool:
    """Whether a resumed run has all of its steps already, which is told.

    Raises:
        ValueError: a new run of no steps.
    """
    if resume is None:
        if max_steps == 0:
            raise ValueError("trainer.max_steps=0 trains nothing: expected at least 1, or -1 for no end")
        return False
    if not 0 <= max_steps <= resume.step:
        return False
    rank_zero_info(
        f"nothing to do: {resume.path} is already at step {resume.step} and trainer.max_steps={max_steps}: "
        "give a larger one"
    )
    return True


def fit(trainer: L.Trainer, module: DiffusionModule, datamodule: Any, run_dir: Path) -> None:
    """Train, then say how it ended and where everything is.

    Args:
        trainer: with the callbacks of the run.
        module: what is trained.
        datamodule: its data; `start_step` is where the run begins.
        run_dir: the run folder.

    Raises:
        SystemExit: a signal ended the run; rank 0 has status 128 + its number.
    """
    began = time.monotonic()

    def close(how: str) -> None:
        step = trainer.global_step
        if step == datamodule.start_step or not trainer.is_global_zero:
            return
        with never_fatal("the summary of the run"):
            lines = closing_lines(
                run_dir,
                how=how,
                start=datamodule.start_step,
                step=step,
                max_steps=trainer.max_steps,
                seconds=time.monotonic() - began,
                checkpoint=module.status.saved,
                metrics=module.headline,
                prompt=module.status.prompt,
            )
            rank_zero_info("\n".join(lines))

    number: int | None
    try:
        trainer.fit(module, datamodule=datamodule)
        number = module.status.received
    except SystemExit as stop:
        # lightning's own statuses for signals are 1 and 0
        number = signal.SIGINT if isinstance(stop.__context__, KeyboardInterrupt) else module.status.received
        if number is None:
            raise
    except Exception:
        close("failed")
        raise
    if number is None:
        close("finished")
        return
    if module.status.received is not None:
        complete = 0 <= trainer.max_steps <= trainer.global_step
        what = "training was complete" if complete else "go on with ckpt_path=last"
        rank_zero_info(f"{signal.Signals(number).name}: saved {module.status.saved}, {what}")
    close("stopped")
    # rank 0 tells for all: launchers kill every rank once one has failed, also what is about to end well
    sys.exit(128 + number if rank_zero_only.rank == 0 else 0)
