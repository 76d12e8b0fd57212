"""Sizes of a network from the weights that it starts from: the config `model=from_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.wan_config import video_dit_arguments
from vsa.checkpoints.weight_source import RunWeights, open_weights


def fill_model(cfg: DictConfig) -> None:
    """Replace `model.sizes_from` by the sizes of those weights, or of the checkpoint to resume; own values stay.

    Raises:
        ValueError: there are no weights to take sizes from.
    """
    node = cfg.get("model")
    if not OmegaConf.is_dict(node) or "sizes_from" not in node:
        return
    own = {key: value for key, value in node.items() if key != "sizes_from"}
    cfg.model = OmegaConf.create({**_sizes(cfg), **own})


def _sizes(cfg: DictConfig) -> Mapping[str, Any]:
    if cfg.ckpt_path is not None:
        return resolve_checkpoint(cfg.ckpt_path, Path(str(cfg.run_dir)), verify=False).state["config"]["model"]
    if cfg.model.sizes_from is None:
        raise ValueError("model=from_checkpoint takes the sizes of a model from init_from, got init_from=null")
    weights = open_weights(cfg.model.sizes_from)
    if isinstance(weights, RunWeights):
        weights.require_config("model")
        return weights.run_config["model"]
    try:
        return {"init": "wan", **video_dit_arguments(weights.config)}
    except ValueError as error:
        raise ValueError(f"{weights.folder / 'config.json'}: {error}") from None
