"""The network for a transformer's `config.json`: `VideoDiT` for Wan, for other classes the class itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from vsa.attention.base import AttentionMethod
from vsa.checkpoints.wan_config import CLASS_NAME, SPARSE_FLAG, video_dit_arguments
from vsa.models.network import Network

DIFFUSERS = "vsa.integrations.diffusers.network.DiffusersNetwork"


def network_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `model` of a run with this transformer.

    Raises:
        ValueError: a Wan config with an unsupported key or value, or without a class.
    """
    if config.get("_class_name") in (CLASS_NAME, "WanModel", None):
        return {"_target_": "vsa.models.video_dit.VideoDiT", **video_dit_arguments(config)}
    return diffusers_settings(config)


def diffusers_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `model` of a run that trains the class itself."""
    own = {key: value for key, value in config.items() if key[0] != "_" and key != SPARSE_FLAG}
    return {"_target_": DIFFUSERS, "class_name": config["_class_name"], "config": own}


def network_of(config: Mapping[str, Any], attention: Callable[..., AttentionMethod]) -> Network:
    """The network, with the attention of a factory.

    Raises:
        ValueError: a class that cannot be trained, or an unsupported setting.
    """
    settings = network_settings(config)
    # by name, as in a run's config, because networks of diffusers are above this layer
    module, _, name = settings.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name)(attention=attention, **settings)
