"""What only shows a run must not end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from matplotlib.image import imread

from vsa.secrets import without_secrets


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """A picture, clip or upload that fails costs one line: weights and metrics do not depend on it.

    For what one rank does by itself, or what fails on all ranks alike: none may be left waiting for another.

    Args:
        what: for the line, a path as a rule.
    """
    try:
        yield
    except AssertionError:
        # a defect of ours
        raise
    except Exception as error:
        reason = without_secrets(" ".join(str(error).split())) or "no reason given"
        rank_zero_info(f"warning: {what} is missing: {type(error).__name__}: {reason}")


def log_picture(loggers: Sequence[Any], name: str, path: Path, step: int) -> None:
    """Send a PNG to the loggers that show pictures."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, imread(path)[..., :3], step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)], step=step)
