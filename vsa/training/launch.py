"""Training runs from a command line: checked composition by Hydra, and errors in one line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from vsa.config_files import config_folder
from vsa.errors import one_line_errors
from vsa.training.hydra_guard import checked_hydra, require_checked
from vsa.training.typed import Typed

INPUT_ERRORS = (HydraException, OmegaConfBaseException, FloatingPointError)
"""Exceptions that a config can cause, in addition to ValueError and OSError."""


def launch(arguments: Sequence[str], job: Callable[[DictConfig], Any] | None = None) -> None:
    """Train with settings and flags of Hydra; bad input and signals end in one line.

    HYDRA_FULL_ERROR=1 adds the traceback. `sys.argv` is not modified, since it starts the processes of other devices.

    Args:
        arguments: settings and flags.
        job: replaces training as the job that receives the settings.
    """
    traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # otherwise Hydra prints errors in its own format
    os.environ["HYDRA_FULL_ERROR"] = "1"
    version.setbase("1.3")
    parser = get_args_parser()
    # settings may come before and after flags
    args = parser.parse_intermixed_args(list(arguments))
    signals: Any = nullcontext()
    if not (args.cfg or args.info or args.hydra_help):
        # only here, as what shows settings needs no torch; before its handlers, whose exceptions an import may drop
        import_module("vsa.training.train")
        from vsa.training.ending import stopped_by_signals

        signals = stopped_by_signals()
    try:
        reports = one_line_errors(*INPUT_ERRORS, traceback=traceback)
        with reports, signals, checked_hydra():
            if args.experimental_rerun is not None:
                raise ValueError("--experimental-rerun is not supported: it reads a pickled config")
            refuse_unreadable(args.overrides)
            _run_hydra(
                args=args,
                args_parser=parser,
                task_function=run if job is None else partial(_run_job, job),
                config_path=str(config_folder()),
                config_name="train",
            )
    except SystemExit as stop:
        if traceback and stop.__cause__ is not None:
            raise stop.__cause__ from None
        raise


def refuse_unreadable(settings: Sequence[str]) -> None:
    """Raise ValueError for a setting that Hydra's grammar does not know, and say what to type."""
    for word in settings:
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            key, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{word}: expected KEY=VALUE, such as experiment={word}") from None
            text = value.replace('"', "")
            typed = re.sub(r"[^][,]+", lambda part: f'"{part[0].strip()}"', text) if text[:1] == "[" else f'"{text}"'
            wanted = shlex.quote(f"{key}={typed}")
            raise ValueError(f"{word}: text with such characters is typed in quotes: {wanted}") from None


def run(cfg: DictConfig) -> float | None:
    """The Hydra job: `train`, with input errors reported here, since Hydra would print a heading before them.

    Returns:
        the last validation loss, which a search minimises; None without a validation.
    """
    from vsa.evaluation.figures import final_loss
    from vsa.training.parallel import rank_zero_reports
    from vsa.training.train import train

    with one_line_errors(*INPUT_ERRORS, traceback=False), rank_zero_reports(ValueError, OSError, *INPUT_ERRORS):
        require_checked()
        train(cfg, Typed.of(HydraConfig.get()))
        return final_loss(Path(str(cfg.run_dir)))


def _run_job(job: Callable[[DictConfig], Any], cfg: DictConfig) -> None:
    with one_line_errors(*INPUT_ERRORS, traceback=False):
        require_checked()
        job(cfg)
