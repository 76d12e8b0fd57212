"""Output that must not end a run when it fails: pictures, clips, loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from matplotlib.image import imread

from vsa.secrets import without_secrets


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """Turn an error of a picture, clip or upload into one warning: weights and metrics do not depend on it.

    Use it for what one rank does alone, or what fails on all ranks alike, so that no rank waits for another.

    Args:
        what: subject of the warning, usually a path.
    """
    try:
        yield
    except AssertionError:
        # an AssertionError is a defect of the program
        raise
    except Exception as error:
        reason = without_secrets(" ".join(str(error).split())) or "no reason given"
        rank_zero_info(f"warning: {what} is missing: {type(error).__name__}: {reason}")


def tolerate(logger: Any) -> None:
    """Ignore OSErrors of a logger, with one warning at the first and their number when the logger is closed."""
    name, lost = type(logger).__name__, 0

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def attempt(*args: Any, **kwargs: Any) -> Any:
            nonlocal lost
            try:
                return call(*args, **kwargs)
            except OSError as error:
                if not lost:
                    rank_zero_info(f"warning: {name} cannot write ({error}): training continues without its rows")
                lost += 1

        return attempt

    close = guarded(logger.finalize)

    def finalize(status: str) -> None:
        close(status)
        if lost:
            rank_zero_info(f"warning: {name} could not write {lost} times")

    logger.log_metrics, logger.save, logger.finalize = guarded(logger.log_metrics), guarded(logger.save), finalize


def log_picture(loggers: Sequence[Any], name: str, path: Path, step: int) -> None:
    """Log a PNG to the loggers that show pictures."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, imread(path)[..., :3], step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)], step=step)
