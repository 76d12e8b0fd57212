"""Training runs from a command line: checked composition by Hydra, and errors in one line."""

from __future__ import annotations

import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from vsa.config_files import config_folder
from vsa.errors import one_line_errors
from vsa.places import run_folder_of
from vsa.training.hydra_guard import open_hydra, refuse_secrets
from vsa.training.sparsity_overrides import SparsityOverrides

INPUT_ERRORS = (HydraException, OmegaConfBaseException, FloatingPointError)
"""Exceptions that a config can cause, in addition to ValueError and OSError."""


def launch(arguments: Sequence[str], job: Callable[[DictConfig], Any] | None = None) -> None:
    """Train with settings and flags of Hydra; bad input and signals end in one line.

    HYDRA_FULL_ERROR=1 adds the traceback. `sys.argv` is not modified, since it starts the processes of other devices.

    Args:
        arguments: settings and flags.
        job: function that receives the settings, instead of training.
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
        with reports, signals:
            if args.experimental_rerun is not None:
                raise ValueError("--experimental-rerun is not supported: it reads a pickled config")
            refuse_unreadable(args.overrides)
            path = args.config_path or str(config_folder())
            hydra = open_hydra(path if "://" in path else os.path.abspath(path), args.config_dir)
            _do(hydra, args, parser, run if job is None else partial(_run_job, job))
    except SystemExit as stop:
        if traceback and stop.__cause__ is not None:
            raise stop.__cause__ from None
        raise


def _do(hydra: Hydra, args: Namespace, parser: ArgumentParser, task: TaskFunction) -> None:
    """What the flags ask for."""
    asked = [name for name in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(args, name)]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]}: expected one of them".replace("_", "-"))
    if args.resolve and not (args.cfg or args.help):
        raise ValueError("--resolve needs --cfg or --help")
    what: Any = {"config_name": args.config_name or "train", "overrides": args.overrides}
    if args.help:
        hydra.app_help(what["config_name"], parser, args)
    elif args.hydra_help:
        hydra.hydra_help(what["config_name"], parser, args)
    elif args.cfg:
        hydra.show_cfg(**what, cfg_type=args.cfg, package=args.package, resolve=args.resolve)
    elif args.info:
        hydra.show_info(args.info, **what)
    elif args.shell_completion:
        hydra.shell_completion(**what)
    elif args.multirun:
        words = [*args.overrides, "hydra.mode=MULTIRUN"]
        _run_several(hydra, hydra.compose_config(what["config_name"], words, RunMode.MULTIRUN), task)
    else:
        what["overrides"].append("hydra.mode=RUN")
        hydra.run(**what, task_function=task)


def _run_several(hydra: Hydra, cfg: DictConfig, task: TaskFunction) -> None:
    """Run the jobs of `-m`. Hydra's own sweeper would make files before the first job is checked."""
    # what is to be printed needs no torch
    from vsa.checkpoints.run_folder import refuse_inside_run
    from vsa.training.train import is_requeued, resumed_checkpoint

    refuse_secrets(cfg)
    refuse_inside_run(Path(cfg.hydra.sweep.dir), f"the folder of a sweep, {cfg.hydra.sweep.dir},")
    loader: Any = hydra.config_loader
    parts: Any = {"config": cfg, "hydra_context": HydraContext(loader, Callbacks()), "task_function": task}
    # a value such as ${seed} is that of each job
    node: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    words = node["overrides"]["task"]
    if not cfg.hydra.sweeper._target_.endswith(".BasicSweeper"):
        Plugins.instance().instantiate_sweeper(**parts).sweep(arguments=words)
        return
    words = [*(f"{key}={value}" for key, value in (node["sweeper"].get("params") or {}).items()), *words]
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create(config_loader=loader).parse_overrides(words), None)
    configs = [loader.load_sweep_config(cfg, job) for job in jobs]
    # no job trains to its end before another one is refused; the queue names its jobs itself
    queue = cfg.hydra.launcher._target_.endswith(".QueueLauncher")
    writing = [] if queue or task is not run else [config for config in configs if not config.dry_run]
    folders = sorted(run_folder_of(config).resolve() for config in writing)
    if shared := [one for one, other in pairwise(folders) if other.is_relative_to(one)]:
        raise ValueError(f"two of {len(configs)} jobs would write to {shared[0]}: name each, such as 'run=s${{seed}}'")
    for config in (config for config in writing if config.ckpt_path is None and not is_requeued()):
        resumed_checkpoint(config, run_folder_of(config), verify=False)
    if not cfg.hydra.launcher._target_.endswith(".BasicLauncher"):
        for outcome in Plugins.instance().instantiate_launcher(**parts).launch(jobs, initial_job_idx=0):
            _ = outcome.return_value
        return
    for number, config in enumerate(configs):
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        _ = run_job(task, config, "hydra.run.dir", None, parts["hydra_context"]).return_value


def refuse_unreadable(settings: Sequence[str]) -> None:
    """Raise ValueError for a setting that Hydra's grammar does not know, and say what to type."""
    for word in settings:
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            key, equals, value = word.partition("=")
            dotted = re.sub(r"\[(\d+)\]", r".\1", key)
            if dotted != key:
                wanted = shlex.quote(dotted + equals + value)
                raise ValueError(f"{word}: numbers of list items follow a dot: {wanted}") from None
            if not equals:
                like = f"{word}=VALUE" if "." in word else f"experiment={word}"
                raise ValueError(f"{word}: expected KEY=VALUE, such as {like}") from None
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
        train(cfg, SparsityOverrides.of(HydraConfig.get()))
        return final_loss(Path(str(cfg.run_dir)))


def _run_job(job: Callable[[DictConfig], Any], cfg: DictConfig) -> None:
    with one_line_errors(*INPUT_ERRORS, traceback=False):
        job(cfg)
