"""Changes of settings in a resumed run: those that are always allowed, and those that need `resume.allow`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vsa.config import did_you_mean, resolved, target_class
from vsa.errors import first_of
from vsa.places import OWN_FOLDER
from vsa.settings import arguments_of

SHOWN = (
    "name",
    "run",
    "output_dir",
    "run_dir",
    "ckpt_path",
    "overwrite",
    "dry_run",
    "resume",
    "sweep",
    # compared with the record of the run instead
    "data.revision",
    "logger",
    "callbacks.progress",
    "callbacks.throughput",
    "callbacks.samples",
    "callbacks.diagnostics",
    "callbacks.nan_dump",
)
"""Settings of the run folder, the start and the display, whose changes are not even reported."""

FREE = (
    # devices, intervals and the end of the run; another division of the batch changes sums only by rounding
    "trainer",
    "flop_budget",
    "sample_token_budget",
    "second_budget",
    "callbacks.checkpoint",
    "task.parallel",
    "task.max_skipped",
    "task.collapse",
    "attention.backend",
    "task.fake_score_attention.backend",
    "task.real_score_attention.backend",
    "data.num_workers",
    "data.max_bad",
    # places of the data: the samples, their order and their statistics are compared instead
    "data.root",
    "data.sources.*.root",
    "data.videos",
    "data.urls",
    "data.val_urls",
    # sources of weights: their contents are compared instead
    "init_from",
    "task.teacher",
)
"""Other settings that a resumed run may change, each with all settings below it."""

INEXACT = "cudnn"
"""Backend of attention whose results differ from run to run: a change to it or from it is not free."""

PART = ("trainer.overfit_batches", "trainer.fast_dev_run", "trainer.precision")
"""Exceptions within `FREE`, which a resumed run may not change."""

# copies of optim and sparsity in the configs of older checkpoints
_COPIES = ("task.optim", "task.sparsity")
# defaults in the configs of older checkpoints, where null now stands for them
_NULL_NOW = {"task.lora.targets": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]}
_SHOWN, _NEAREST, _UNSET = 8, 3, "unset"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from that of a checkpoint.

    Args:
        key: name of the setting, as in an override.
        before: its value in the checkpoint.
        now: its current value.
        free: whether a resumed run may change it.
    """

    key: str
    before: Any
    now: Any
    free: bool

    def __str__(self) -> str:
        return f"{self.key} {_short(self.before)} -> {_short(self.now)}"


def changed_settings(before: Mapping[str, Any], cfg: DictConfig) -> list[Change]:
    """The settings that differ from those of a checkpoint; derived settings are left out if their source differs.

    Args:
        before: resolved config of the checkpoint.
        cfg: current config, not resolved.
    """
    now, old = resolved(cfg), resolved(before)
    # an adaptive schedule depends on the measurements of callbacks.diagnostics
    is_adaptive = getattr(target_class(now["sparsity"]["_target_"]), "measured", False)
    part = (*PART, "callbacks.diagnostics") if is_adaptive else PART
    changes = {
        key: Change(key=key, before=was, now=value, free=_is_free(key, was, value, part))
        for key, was, value in _differences(old, now, "")
        if not _within(key, _COPIES) and (not _within(key, SHOWN) or _within(key, part))
        if value is not None or was != _NULL_NOW.get(key)
    }
    refused = [key for key, change in changes.items() if not change.free]
    follows = dict(_interpolated(cfg))

    def is_told_by_another(change: Change) -> bool:
        # a schedule derived from the number of steps, which is free, may change with it
        sources = list(_sources(change.key, follows))
        return bool(sources) and (change.free or any(_within(source, refused) for source in sources))

    return [change for change in changes.values() if not is_told_by_another(change)]


def _is_free(key: str, was: Any, value: Any, part: Sequence[str]) -> bool:
    inexact = key.endswith(".backend") and INEXACT in (was, value)
    return _within(key, FREE) and not _within(key, part) and not inexact


def refuse_unknown_keys(allow: Sequence[str], cfg: DictConfig, before: Mapping[str, Any]) -> None:
    """Refuse keys of `resume.allow` that are neither a setting nor a group of settings.

    Args:
        allow: see `refuse_changes`.
        cfg: current config, not resolved.
        before: resolved config of the checkpoint; empty without one.

    Raises:
        ValueError: names every such key with known ones that resemble it.
    """
    known_keys = {*_keys(resolved(cfg), constructors=True), *_keys(before)}
    unknown = [key for key in allow if not any(_within(name, (key,)) for name in known_keys)]
    if unknown:
        each = (f"unknown setting {key}{did_you_mean(key, known_keys, _NEAREST)}" for key in unknown)
        raise ValueError(f"resume.allow=[{','.join(allow)}]: {'; '.join(each)}")


def refuse_changes(changes: Sequence[Change], allow: Sequence[str], checkpoint: Path) -> list[Change]:
    """The explicitly allowed changes of settings that are not free.

    Args:
        changes: see `changed_settings`.
        allow: keys that may change, each with all settings below it.
        checkpoint: path of the checkpoint, for the message.

    Raises:
        ValueError: names every other change of such a setting, with both values.
    """
    of_run = [change for change in changes if not change.free]
    if refused := [change for change in of_run if not _within(change.key, tuple(allow))]:
        each = [f"{c.key}={_short(c.before)}, the settings have {_short(c.now)}" for c in refused[:_SHOWN]]
        more = f" (and {len(refused) - _SHOWN} more)" if len(refused) > _SHOWN else ""
        keys = ",".join(change.key for change in refused)
        raise ValueError(
            f"{checkpoint} was trained with {'; '.join(each)}{more}: resume.allow=[{keys}] lets a resumed run change it"
        )
    return of_run


def listed(changes: Sequence[Change]) -> str:
    """The first changes as `key old -> new, ...`."""
    return ", ".join(first_of([str(change) for change in changes], _SHOWN))


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    nodes = isinstance(before, Mapping) and isinstance(now, Mapping)
    if not nodes or before.get("_target_") != now.get("_target_"):
        if before != now:
            yield key, before, now
        return
    for name in dict.fromkeys((*now, *before)):
        if _is_known(before, now, key, name):
            inner = f"{key}.{name}" if key else str(name)
            yield from _differences(before.get(name, _UNSET), now.get(name, _UNSET), inner)


def _is_known(before: Mapping[str, Any], now: Mapping[str, Any], key: str, name: str) -> bool:
    """Whether the code of both versions has a setting; one that is new or removed is not a difference."""
    # configs of earlier versions name the run folder in every callback
    if not key or name in OWN_FOLDER:
        return name in before and name in now
    if key in ("callbacks", "logger"):
        return name in before
    target = str(now.get("_target_"))
    return name in now or not target.startswith("vsa.") or name in arguments_of(target_class(target))


def _keys(node: Any, key: str = "", *, constructors: bool = False) -> Iterator[str]:
    """Settings and groups of settings below a node, with `constructors` also those that only constructors have."""
    if not isinstance(node, Mapping):
        return
    target = str(node.get("_target_"))
    own = arguments_of(target_class(target)) if constructors and target.startswith("vsa.") else {}
    for name in dict.fromkeys((*node, *own)):
        inner = f"{key}.{name}" if key else str(name)
        yield inner
        yield from _keys(node.get(name), inner, constructors=constructors)


def _within(key: str, tops: Sequence[str]) -> bool:
    return any(re.fullmatch(re.escape(top).replace(r"\*", r"[^.]+") + r"(\..*)?", key) for top in tops)


def _sources(key: str, follows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Settings from which a setting takes its value, directly or indirectly."""
    for follower, sources in follows.items():
        if _within(key, (follower,)):
            yield from (source + key.removeprefix(follower) for source in sources)


def _interpolated(node: Any, key: str = "") -> Iterator[tuple[str, list[str]]]:
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _interpolated(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str) and (sources := re.findall(r"\$\{([\w.]+)\}", node)):
        yield key, sources


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "_target_" in value:
        value = str(value["_target_"]).rpartition(".")[2]
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
