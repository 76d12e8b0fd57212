"""How a run starts: from a checkpoint of its own, from other weights, or from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from omegaconf import DictConfig

from vsa.checkpoints.run_checkpoint import Checkpoint, list_checkpoints, resolve_checkpoint
from vsa.checkpoints.run_folder import check_folder
from vsa.checkpoints.state_file import one_line
from vsa.checkpoints.weight_source import open_weights
from vsa.config import resolved
from vsa.training.config_changes import changed_settings, listed, refuse_changes
from vsa.training.run_state import REPLAY, RunStart


def overwrites(cfg: DictConfig) -> bool:
    """Whether the run replaces the one that its folder holds."""
    return cfg.overwrite and cfg.ckpt_path is None


def resumed_checkpoint(cfg: DictConfig, run_dir: Path, *, verify: bool) -> Checkpoint | None:
    """The checkpoint that `ckpt_path` names, None for a new run; its `init_from` and its split of the data go on.

    Args:
        cfg: config of the run, which gets these settings.
        run_dir: the run folder.
        verify: whether every byte is read now; several processes share this once they are connected
            (`DiffusionModule.setup`).

    Raises:
        ValueError: a folder that the run must not write to, or a checkpoint that it cannot resume.
    """
    check_folder(run_dir, overwrite=overwrites(cfg))
    if cfg.ckpt_path is not None:
        checkpoint = resolve_checkpoint(cfg.ckpt_path, run_dir, verify=verify)
        if not checkpoint.verified and 0 <= cfg.trainer.max_steps <= checkpoint.step:
            # if no steps are left the ranks never connect, and each of them decides this by itself
            checkpoint = resolve_checkpoint(cfg.ckpt_path, run_dir)
        if REPLAY in checkpoint.state:
            raise ValueError(f"{checkpoint.path} holds one dropped step and cannot be resumed: use vsa replay")
        before = checkpoint.state.get("config", {}).get("task", {}).get("_target_")
        if before != cfg.task._target_:
            raise ValueError(
                f"{checkpoint.path} is a checkpoint of {before}, the settings have task._target_={cfg.task._target_}: "
                "to start from its weights use init_from="
            )
        began = checkpoint.state.get("config", {}).get("init_from")
        if cfg.init_from not in (None, began):
            raise ValueError(f"init_from={cfg.init_from}, but the run of ckpt_path={cfg.ckpt_path} began from {began}")
        cfg.init_from = began
        if cfg.data.get("val_least") and "val_least" not in checkpoint.state["config"]["data"]:
            cfg.data.val_least = 0
            rank_zero_info("the run keeps the split of an earlier version: data.val_least=0")
        rank_zero_info(f"resuming from {checkpoint.path}")
        return checkpoint
    if ((run_dir / "checkpoints").is_file() or list_checkpoints(run_dir / "checkpoints")) and not overwrites(cfg):
        raise ValueError(
            f"run folder {run_dir} already holds checkpoints: resume with ckpt_path=last, "
            "name another run with run=NAME, or start over with overwrite=true"
        )
    return None


def start_of(cfg: DictConfig, resume: Checkpoint | None) -> RunStart:
    """What the task of a run starts from, with the changes of settings since the checkpoint."""
    return RunStart(
        resume=resume,
        changes=() if resume is None else _allowed_changes(cfg, resume),
        newest=resume is not None and resume.path != Path(cfg.ckpt_path),
        changes_since=partial(_allowed_changes, cfg),
        weights=open_weights(cfg.init_from) if cfg.init_from is not None and resume is None else None,
        config=resolved(cfg),
    )


def _allowed_changes(cfg: DictConfig, resume: Checkpoint) -> list[Mapping[str, Any]]:
    """The allowed changes of settings in this and earlier resumes of the run, for the record."""
    try:
        changes = changed_settings(resume.state["config"], cfg)
    except (ImportError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{resume.path}: the settings in it cannot be read ({one_line(error)})") from None
    allowed_changes = refuse_changes(changes, cfg.resume.allow, resume.path)
    if changes:
        rank_zero_info(f"settings that differ from the checkpoint's: {listed(changes)}")
    news = [{"step": resume.step, "key": c.key, "before": c.before, "now": c.now} for c in allowed_changes]
    return [*resume.state.get("allowed_changes", []), *news]
