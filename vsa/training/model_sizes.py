"""Sizes of a network from the weights that it starts from: the config `model=from_checkpoint`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from vsa.checkpoints.network_settings import DIFFUSERS, diffusers_settings, network_settings
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.weight_source import open_weights
from vsa.config import check_targets
from vsa.data.index import USUAL_FPS
from vsa.data.sample_store import stored_index
from vsa.integrations.diffusers.families import FAMILIES
from vsa.places import refuse_inputs


def fill_model(cfg: DictConfig) -> None:
    """Replace `model.sizes_from` by the sizes of those weights, or of the checkpoint to resume; own values stay.

    `model=from_checkpoint` takes the network of the weights too, `model=diffusers` their class of diffusers.

    Raises:
        ValueError: there are no weights to take sizes from.
    """
    node = cfg.get("model")
    if not OmegaConf.is_dict(node) or "sizes_from" not in node:
        return
    if cfg.ckpt_path is not None:
        sizes = resolve_checkpoint(cfg.ckpt_path, Path(str(cfg.run_dir)), verify=False).config["model"]
    elif node.sizes_from is None and node._target_ == DIFFUSERS:
        sizes = {}
    elif node.sizes_from is None:
        raise ValueError("model=from_checkpoint takes the sizes of a model from init_from, got init_from=null")
    else:
        weights = open_weights(node.sizes_from)
        if cfg.get("overwrite"):
            refuse_inputs(Path(str(cfg.run_dir)), weights.places)
        if node._target_ == DIFFUSERS:
            sizes = diffusers_settings(weights.config)
        elif (sizes := weights.run_config.get("model")) is None:
            sizes = network_settings(weights.config)
            sizes = sizes if sizes["_target_"] == DIFFUSERS else {"init": "wan", **sizes}
    check_targets({"model": sizes})
    # the network that the weights belong to, which the file of settings cannot know
    target = sizes.get("_target_", node._target_)
    own = {key: value for key, value in node.items() if key != "sizes_from"}
    if target == DIFFUSERS:
        # null stands for what the weights have
        own = {key: value for key, value in own.items() if value is not None}
        if "class_name" not in {**sizes, **own}:
            raise ValueError("model.class_name=null: model=diffusers takes a class from init_from, or by its name")
        own["config"] = {**sizes.get("config", {}), **own.get("config", {})}
    cfg.model = {**sizes, **own, "_target_": target}


def follow_rate(cfg: DictConfig) -> str | None:
    """Give a class whose positions are seconds the frame rate of the data of a new run, unless it is set; a line about
    it."""
    family = FAMILIES.get(cfg.model.get("class_name"))
    own = {} if family is None or family.parts is None else family.parts.constants or {}
    if "fps" not in own or "fps" in (cfg.model.get("constants") or {}) or cfg.ckpt_path is not None:
        return None
    for root, index in stored_index(cfg.data):
        rate = max(rates := index.rates(), key=lambda rate: rates[rate], default=USUAL_FPS)
        if rate not in (own["fps"], USUAL_FPS):
            OmegaConf.update(cfg, "model.constants.fps", rate, force_add=True)
            return f"most clips in {root} have {rate:g} frames a second: model.constants.fps={rate:g}"
    return None
