"""Which settings a resumed run may change: what a run is made of stays, the rest is free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vsa.config import resolved, target_class
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
    "logger",
    "callbacks.progress",
    "callbacks.throughput",
    "callbacks.samples",
    "callbacks.diagnostics",
    "callbacks.nan_dump",
)
"""Where a run stands, how it is started and how it is shown: a change is no news."""

FREE = (
    # devices, intervals and the end of the run; what a batch is divided into changes no sum but in its rounding
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
    # where it lies: the samples, their order and their statistics are compared
    "data.root",
    "data.sources.*.root",
    "data.videos",
    "data.urls",
    "data.val_urls",
    # compared by what it holds
    "init_from",
    "task.teacher",
)
"""What else a resumed run may change, with all that stands under it."""

PART = ("trainer.limit_train_batches", "trainer.overfit_batches", "trainer.fast_dev_run", "trainer.precision")
"""What is of the run all the same."""

# copies of optim and sparsity in the configs of older checkpoints
_COPIES = ("task.optim", "task.sparsity")
_SHOWN = 8


_UNSET = "unset"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that is not that of a checkpoint.

    Args:
        key: as it is typed.
        before: its value in the checkpoint.
        now: its value today.
        free: a resumed run may change it.
    """

    key: str
    before: Any
    now: Any
    free: bool

    def __str__(self) -> str:
        return f"{self.key} {_short(self.before)} -> {_short(self.now)}"


def changed_settings(before: Mapping[str, Any], cfg: DictConfig) -> list[Change]:
    """The settings that differ from a checkpoint's; of those that follow another one, that one alone.

    Args:
        before: the resolved config that a checkpoint holds.
        cfg: the config now, not resolved.
    """
    now, old = resolved(cfg), resolved(before)
    # measurements lead the schedule
    measured = getattr(target_class(now["sparsity"]["_target_"]), "measured", False)
    part = (*PART, "callbacks.diagnostics") if measured else PART
    changes = {
        key: Change(key=key, before=was, now=value, free=_within(key, FREE) and not _within(key, part))
        for key, was, value in _differences(old, now, "")
        if not _within(key, _COPIES) and (not _within(key, SHOWN) or _within(key, part))
    }
    refused = [key for key, change in changes.items() if not change.free]
    follows = dict(_interpolated(cfg))

    def is_told_by_another(change: Change) -> bool:
        # a schedule that follows the number of steps, which is free, changes by itself
        sources = list(_sources(change.key, follows))
        return bool(sources) and (change.free or any(_within(source, refused) for source in sources))

    return [change for change in changes.values() if not is_told_by_another(change)]


def refuse_changes(changes: Sequence[Change], allow: Sequence[str], checkpoint: Path) -> list[Change]:
    """The changes that are allowed although they are of the run.

    Args:
        changes: see `changed_settings`.
        allow: keys that may change, with all that stands under them.
        checkpoint: for the message.

    Raises:
        ValueError: names every other one that is of the run, with both values.
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
    more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return ", ".join([*map(str, changes[:_SHOWN]), *more])


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
    """Whether both versions of the code know a setting: what only one of them knows is no difference."""
    if not key:
        return name in before and name in now
    if key in ("callbacks", "logger"):
        return name in before
    target = str(now.get("_target_"))
    return name in now or not target.startswith("vsa.") or name in arguments_of(target_class(target))


def _within(key: str, tops: Sequence[str]) -> bool:
    return any(re.fullmatch(re.escape(top).replace(r"\*", r"[^.]+") + r"(\..*)?", key) for top in tops)


def _sources(key: str, follows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The settings that a setting takes its value from."""
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
