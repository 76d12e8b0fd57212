"""Sizes of a network from the weights that it starts from: the config `model=from_checkpoint`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.wan_config import video_dit_arguments
from vsa.checkpoints.weight_source import open_weights


def fill_model(cfg: DictConfig) -> None:
    """Replace `model.sizes_from` by the sizes of those weights, or of the checkpoint to resume; own values stay.

    Raises:
        ValueError: there are no weights to take sizes from.
    """
    node = cfg.get("model")
    if not OmegaConf.is_dict(node) or "sizes_from" not in node:
        return
    if cfg.ckpt_path is not None:
        sizes = resolve_checkpoint(cfg.ckpt_path, Path(str(cfg.run_dir)), verify=False).config["model"]
    elif node.sizes_from is None:
        raise ValueError("model=from_checkpoint takes the sizes of a model from init_from, got init_from=null")
    else:
        weights = open_weights(node.sizes_from)
        sizes = weights.run_config.get("model") or {"init": "wan", **video_dit_arguments(weights.config)}
    cfg.model = {**sizes, **{key: value for key, value in node.items() if key != "sizes_from"}}
