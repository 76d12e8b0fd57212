"""One training run: compose, build, fit. Reads top-down."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.errors import HydraException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vsa.cli import one_line_errors
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.checkpointing import Checkpoint, list_checkpoints, resolve_checkpoint
from vsa.training.config import build, check_targets, model_factory
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.parallel import default_strategy

INPUT_ERRORS = (HydraException, OmegaConfBaseException, FloatingPointError)
"""What a config can cause beside ValueError and OSError."""


KNOWN_WARNINGS = (
    # our streams split their items over workers themselves
    r".*`IterableDataset` has `__len__` defined.*",
    r".*does not have many workers.*",
    # lightning against a newer torch
    r".*isinstance\(treespec, LeafSpec\).*",
)


def command(main: Callable[[], None]) -> None:
    """Run a Hydra entry point so that bad input ends in one line (HYDRA_FULL_ERROR=1 adds the traceback)."""
    traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra prints errors in a way of its own unless told to let them through
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with one_line_errors(*INPUT_ERRORS, traceback=traceback):
            main()
    except SystemExit as stop:
        if traceback and stop.__cause__ is not None:
            raise stop.__cause__ from None
        raise


def run(cfg: DictConfig) -> None:
    """The Hydra job: `train`, with input errors reported here because Hydra would announce them first."""
    with one_line_errors(*INPUT_ERRORS, traceback=False):
        train(cfg)


def train(cfg: DictConfig) -> None:
    """Train as `cfg` says; the run folder is `cfg.run_dir`.

    Raises:
        ValueError: an impossible setting, named with its value.
    """
    check_targets(cfg)
    for message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    run_dir = Path(cfg.run_dir)
    resume = _resume(cfg, run_dir)
    init_from = resolve_checkpoint(cfg.init_from) if cfg.init_from is not None else None

    datamodule = build(cfg.data)
    datamodule.start_step = resume.step if resume is not None else 0
    module = build(cfg.task, model=model_factory(cfg))
    module.resume, module.init_from = resume, init_from
    module.config = OmegaConf.to_container(cfg, resolve=True)
    callbacks = [build(node) for node in cfg.callbacks.values() if node is not None]
    loggers = [build(node) for node in cfg.logger.values() if node is not None]
    for logger in loggers:
        if isinstance(logger, MetricsCSV):
            logger.start(datamodule.start_step)
    trainer = _trainer(cfg, callbacks, loggers)
    _save_config(cfg, run_dir)
    if cfg.flop_budget is not None:
        _limit_to_budget(cfg.flop_budget, trainer, datamodule, cfg)

    rank_zero_info(f"run folder: {run_dir}")
    trainer.fit(module, datamodule=datamodule)
    _exit_as_signalled(callbacks)


def _resume(cfg: DictConfig, run_dir: Path) -> Checkpoint | None:
    if cfg.ckpt_path is not None:
        if cfg.init_from is not None:
            raise ValueError(f"ckpt_path={cfg.ckpt_path} and init_from={cfg.init_from} exclude each other")
        found = resolve_checkpoint(cfg.ckpt_path, run_dir)
        rank_zero_info(f"resuming from {found.path}")
        return found
    if list_checkpoints(run_dir / "checkpoints"):
        if not cfg.overwrite:
            raise ValueError(
                f"run folder {run_dir} already holds checkpoints: resume with ckpt_path=last, "
                "name another run with run=NAME, or start anew with overwrite=true"
            )
        shutil.rmtree(run_dir)
    return None


def _trainer(cfg: DictConfig, callbacks: list[L.Callback], loggers: list[Any]) -> L.Trainer:
    settings = OmegaConf.to_container(cfg.trainer, resolve=True)
    assert isinstance(settings, dict)
    strategy = settings.pop("strategy", "auto")
    if strategy == "auto" and settings["accelerator"] != "cpu":
        strategy = default_strategy()
    return build(settings, callbacks=callbacks, logger=loggers, strategy=strategy, default_root_dir=cfg.run_dir)


def _limit_to_budget(budget: float, trainer: L.Trainer, datamodule: Any, cfg: DictConfig) -> None:
    """Set `max_steps` so that the executed training FLOPs reach the budget (the paper compares at equal FLOPs)."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    with torch.device("meta"):
        model = model_factory(cfg)()
    sparsity = build(cfg.sparsity)
    counts = datamodule.buckets
    per_step = 0.0
    for shape, count in counts.items():
        topk = sparsity.topk(0, model.layout_for(shape).num_video_tiles)
        flops = model.flops(shape, topk, datamodule.text_encoder.max_tokens).executed
        per_step += flops * datamodule.batch_size * count / sum(counts.values())
    steps = max(1, round(budget / per_step))
    trainer.fit_loop.epoch_loop.max_steps = steps
    rank_zero_info(f"flop_budget={budget:.3g}: {steps} steps of {per_step:.3g} FLOPs")


def _save_config(cfg: DictConfig, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / ".config.yaml.writing"
    temporary.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    os.replace(temporary, run_dir / "config.yaml")


def _exit_as_signalled(callbacks: list[L.Callback]) -> None:
    for callback in callbacks:
        if isinstance(callback, Checkpointing) and callback.received is not None:
            sys.exit(128 + callback.received)
