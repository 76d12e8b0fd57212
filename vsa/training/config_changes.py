"""Which settings of a resumed run are not those of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vsa.config import resolved

# where a run stands, how it is started and shown
_WITHOUT_EFFECT = ("name", "run", "output_dir", "run_dir", "ckpt_path", "overwrite", "logger")
# copies of optim, sparsity and attention in the configs of older checkpoints, or of newer ones
_COPIES = ("task.optim", "task.sparsity", "tile_thw", "start")
_PICTURES = ("callbacks.progress", "callbacks.samples", "callbacks.diagnostics")
_SHOWN = 8
_UNSET = "unset"


def changed_settings(before: Mapping[str, Any], cfg: DictConfig) -> str:
    """The settings that differ as `key old -> new, ...`, empty if none does.

    Values that follow another setting are left out, as are those without an effect on training.

    Args:
        before: the resolved config that a checkpoint holds.
        cfg: the config now, not resolved.
    """
    now = dict(_leaves(resolved(cfg)))
    follows = tuple(_interpolated(cfg))
    old = dict(_leaves(resolved(before)))
    left_out = (*_WITHOUT_EFFECT, *_COPIES, *_PICTURES, *follows)
    changes = [
        f"{key} {_short(old.get(key, _UNSET))} -> {_short(now.get(key, _UNSET))}"
        for key in dict.fromkeys((*now, *old))
        if old.get(key, _UNSET) != now.get(key, _UNSET)
        and not any(key == top or key.startswith(f"{top}.") for top in left_out)
    ]
    more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return ", ".join(changes[:_SHOWN] + more)


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _interpolated(cfg: DictConfig, key: str = "") -> Iterator[str]:
    for name in map(str, cfg):
        inner = f"{key}.{name}" if key else name
        if OmegaConf.is_interpolation(cfg, name):
            yield inner
        elif isinstance(value := cfg[name], DictConfig):
            yield from _interpolated(value, inner)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
