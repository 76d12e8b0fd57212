"""From a composed config to objects: the only place that instantiates, after every `_target_` was checked."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from vsa.errors import is_out_of_memory, too_large
from vsa.models.video_dit import VideoDiT
from vsa.moved import moved_target

ALLOWED_TARGETS = (
    "vsa.",
    "lightning.pytorch.trainer.",
    "lightning.pytorch.callbacks.",
    "lightning.pytorch.loggers.",
    "lightning.pytorch.profilers.",
)
"""Where a config may take classes from. A class must also be defined there: an alias such as
`vsa.training.train.os.system` is no way out."""


def config_folder() -> Path:
    """The folder of the Hydra groups: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            inner = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield inner, value
            else:
                yield from _targets(value, inner)
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _targets(value, f"{key}[{i}]")


def check_targets(config: Any) -> None:
    """Refuse a config that would build anything but the classes of `ALLOWED_TARGETS`.

    Raises:
        ValueError: names the key and the target.
    """
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    for key, target in _targets(config):
        refused = ValueError(f"{key}={target} is not allowed: a config may build classes of vsa and lightning only")
        if not isinstance(target, str) or not target.startswith((*ALLOWED_TARGETS, "lightning.pytorch.Trainer")):
            raise refused
        module_name, _, class_name = target.rpartition(".")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            moved = moved_target(target)
            reason = f"it is {moved} now" if moved != target else str(error)
            raise ValueError(f"{key}={target} does not exist: {reason}") from None
        if not isinstance(found, type) or not f"{found.__module__}.".startswith(ALLOWED_TARGETS):
            raise refused


def build(config: DictConfig | Mapping[str, Any], **arguments: Any) -> Any:
    """Instantiate a config node whose targets were checked; `arguments` join its own.

    Raises:
        ValueError: what the constructor refused, with the config key; a package or memory that it lacks.
    """
    try:
        return instantiate(config, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        # hydra appends the key on a line of its own
        key = str(error).rpartition("full_key: ")[2].strip() if "full_key: " in str(error) else ""
        if isinstance(cause, ImportError):
            raise ValueError(f"{key or config['_target_']} needs {_missing_package(cause)}") from error
        if is_out_of_memory(cause):
            reason = too_large(partial(instantiate, config, _convert_="all", **arguments), cause)
        elif isinstance(cause, RuntimeError):
            # what follows the first line is a stack of C++
            reason = str(cause).partition("\n")[0]
        elif isinstance(cause, (ValueError, TypeError, OSError)):
            reason = str(cause)
        else:
            raise
        raise ValueError(reason + (f" (config key {key})" if key else "")) from error


EXTRAS = {"tensorboard": "tensorboard", "diffusers": "wan", "transformers": "wan", "peft": "lora"}
"""Extras of this project that bring a package along."""


def _missing_package(error: ImportError) -> str:
    # lightning quotes the package in its message, in one way or another
    quoted = re.search(r"[`']([\w.-]+)", str(error))
    package = error.name or (quoted[1] if quoted else None)
    if package is None:
        return f"a package that is not installed: {error}"
    package = package.partition(".")[0]
    wanted = f"'vsa-train[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"the package {package}: pip install {wanted}"


def model_factory(config: DictConfig | Mapping[str, Any]) -> Callable[..., VideoDiT]:
    """The function that builds the network of a whole run config (its `model` and `attention` nodes)."""
    attention = build(config["attention"])
    return partial(build, config["model"], attention=attention)
