"""Variants, groups of runs that differ only in their seed, and their comparison."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from vsa.reports.runs import Run, short_name
from vsa.reports.statistics import Difference, holm, paired_difference, pareto_front

LR = "optim.lr"
# settings that identify a run, its folders, and its logging; they do not make a variant
_IDENTITY = ("name", "run", "run_dir", "output_dir", "ckpt_path", "overwrite", "dry_run", "seed")
_FOLDERS = (".run_dir", ".root_dir", ".save_dir")
_SHOWN_WITH = ("logger.", "callbacks.progress.", "callbacks.checkpoint.", "resume.")
# budgets, which determine the number of steps
_BUDGETS = ("flop_budget", "second_budget", "sample_token_budget")
_STEPS = "trainer.max_steps"
_UNSET = "unset"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Runs with the same settings except for the seed.

    Args:
        name: name that distinguishes the variant from the others.
        values: values of the settings in which variants differ.
        runs: one run per seed, at the chosen learning rate.
        tried: runs by learning rate, for the seeds at which several rates were tried; empty for a single rate.
        difference: difference to the reference on the shared validation set; None for the reference itself, or if the
            validation sets differ.
        not_paired: reason why there is no difference.
        p_holm: p-value of the difference, corrected for the number of variants.
        best_trade: whether the variant is on the Pareto front of loss and step time.
        colour: index of its colour, the same in all figures and tables.
    """

    name: str
    values: Mapping[str, Any]
    runs: tuple[Run, ...]
    tried: Mapping[float, tuple[Run, ...]]
    difference: Difference | None = None
    not_paired: str = ""
    p_holm: float | None = None
    best_trade: bool = False
    colour: int = 0

    @property
    def ended(self) -> tuple[Run, ...]:
        """The finished runs, or all runs if none has finished."""
        return tuple(run for run in self.runs if run.status == "finished") or self.runs

    @property
    def losses(self) -> list[float]:
        """Last validation losses by seed; runs of one seed are copies and count as one, by their mean."""
        by_seed: dict[Any, list[float]] = {}
        for run in self.ended:
            if run.val_loss is not None:
                by_seed.setdefault(run.name if run.seed is None else run.seed, []).append(run.val_loss)
        return [fmean(losses) for losses in by_seed.values()]

    @property
    def loss(self) -> float | None:
        """Mean of the last losses over the seeds."""
        return fmean(self.losses) if self.losses else None

    @property
    def finite_loss(self) -> float | None:
        """The loss, None if a run diverged."""
        return self.loss if self.loss is not None and np.isfinite(self.loss) else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the last losses over the seeds, None for a single seed."""
        return float(np.std(self.losses, ddof=1)) if self.finite_loss is not None and len(self.losses) > 1 else None

    @property
    def control(self) -> bool:
        """Whether it is the dense control of a sweep, or, without a sweep, uses full attention."""
        if any(run.point is not None for run in self.runs):
            return any(run.point is not None and run.point.control for run in self.runs)
        return all(str(run.settings.get("attention._target_", "")).endswith(".FullAttention") for run in self.runs)

    @property
    def tried_losses(self) -> dict[float, list[float]]:
        """Last validation losses of `tried`."""
        return {lr: [run.val_loss for run in runs if run.val_loss is not None] for lr, runs in self.tried.items()}

    @property
    def chosen_lr(self) -> Any:
        """The learning rate that the variant is judged at."""
        return self.runs[0].settings.get(LR)

    def mean(self, name: str) -> float | None:
        """Mean over the runs of an attribute of `Run` or of the last value of a metric."""
        values = [run.last(name) if "/" in name else getattr(run, name) for run in self.ended]
        known_values = [value for value in values if value is not None]
        return fmean(known_values) if known_values else None

    @property
    def status(self) -> str:
        """Numbers of the runs that have not finished, like `1 running`, and of those that repeat a seed."""
        counts = Counter(run.status for run in self.runs if run.status != "finished")
        copies = len(self.ended) - len({run.name if run.seed is None else run.seed for run in self.ended})
        words = [f"{count} {status}" for status, count in counts.items()]
        return ", ".join(words + ([f"{copies} more of the same seed"] if copies else []))


def group(runs: Sequence[Run]) -> list[Variant]:
    """Variants of runs, the best first, each at its best learning rate if several were tried.

    The best learning rate has the lowest validation loss on the seeds at which several rates were tried. If there are
    other seeds, only these count for the loss of the variant.
    """
    runs = _without_own_seed(runs)
    keys = _own_settings(runs)
    families = _by(runs, lambda run: _key(run, [key for key in keys if key != LR]))
    # if only the learning rate differs, its values are the variants
    if len(families) < 2:
        families = _by(runs, lambda run: _key(run, keys))
    best_families = [_at_best_lr(family) for family in families]
    columns = _columns([members for members, _ in best_families], keys)
    names = _names([members for members, _ in best_families], columns)
    variants = [
        Variant(name=name, values={key: members[0].settings.get(key, _UNSET) for key in columns}, runs=members, tried=t)
        for name, (members, t) in zip(names, best_families, strict=True)
    ]
    variants.sort(key=lambda variant: (variant.loss is None, variant.loss or 0.0, variant.name))
    return [replace(variant, colour=place) for place, variant in enumerate(variants)]


def _without_own_seed(runs: Sequence[Run]) -> list[Run]:
    """The runs, with `seed*` in settings that name each run's own seed, such as the folder of a start of each seed."""

    def general(run: Run, value: str) -> str:
        return re.sub(rf"seed([-_=]?){run.seed}(?!\d)", r"seed\1*", value)

    texts = [{key: value for key, value in run.settings.items() if isinstance(value, str)} for run in runs]
    own = [{key: general(run, value) for key, value in text.items()} for run, text in zip(runs, texts, strict=True)]
    # a setting that one run has with another seed, or without any, stays as it is
    fixed = {key for text, new in zip(texts, own, strict=True) for key in text if new[key] == text[key]}
    return [
        replace(run, settings={**run.settings, **{key: value for key, value in new.items() if key not in fixed}})
        for run, new in zip(runs, own, strict=True)
    ]


def _own_settings(runs: Sequence[Run]) -> list[str]:
    """Settings in which runs differ, except for those that identify a run, its seed, and copies of these."""
    everything = list(dict.fromkeys(key for run in runs for key in run.settings))
    dropped = {key for key in everything if key in _IDENTITY or key.endswith(_FOLDERS) or key.startswith(_SHOWN_WITH)}
    dropped |= {key for key in everything if key.endswith("seed") and _copies(runs, key, "seed")}
    if any(run.settings.get(budget) is not None for run in runs for budget in _BUDGETS):
        dropped |= {key for key in everything if _copies(runs, key, _STEPS)}
    return [k for k in everything if k not in dropped and len({run.settings.get(k, _UNSET) for run in runs}) > 1]


def _copies(runs: Sequence[Run], key: str, of: str) -> bool:
    """Whether a setting equals another one in all runs that have it."""
    return all(run.settings[key] == run.settings.get(of) for run in runs if key in run.settings)


def _key(run: Run, keys: Sequence[str]) -> tuple[Any, ...]:
    # a run without a config is identified by its name
    return tuple(run.settings.get(key, _UNSET) for key in keys) if run.settings else (short_name(run), run.distilled)


def _by(runs: Sequence[Run], key: Any) -> list[list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _at_best_lr(family: Sequence[Run]) -> tuple[tuple[Run, ...], dict[float, tuple[Run, ...]]]:
    """The runs of a family at its best learning rate, and by learning rate the runs that it was chosen on."""
    by_lr: dict[float, list[Run]] = {}
    for run in family:
        by_lr.setdefault(run.settings.get(LR), []).append(run)  # type: ignore[arg-type]
    if len(by_lr) < 2:
        return tuple(sorted(family, key=_by_seed)), {}
    seeds = {run.seed for run in family}
    tried_at = {seed for seed in seeds if sum(any(run.seed == seed for run in runs) for runs in by_lr.values()) > 1}
    tried = {lr: tuple(run for run in runs if run.seed in tried_at) for lr, runs in sorted(by_lr.items(), key=_lr)}
    tried = {lr: runs for lr, runs in tried.items() if runs}
    losses = {lr: [run.val_loss for run in runs if run.val_loss is not None] for lr, runs in tried.items()}
    means = {lr: fmean(values) for lr, values in losses.items() if values and np.isfinite(values).all()}
    if not means:
        return tuple(sorted(family, key=_by_seed)), {}
    best = min(means, key=lambda lr: means[lr])
    fresh = [run for run in by_lr[best] if run.seed not in tried_at]
    return tuple(sorted(fresh or by_lr[best], key=_by_seed)), tried


def _lr(item: tuple[Any, Any]) -> float:
    # YAML parses 1e-3 as text
    with suppress(ValueError, TypeError):
        return float(item[0] or 0)
    return 0.0


def _by_seed(run: Run) -> tuple[int, str]:
    return (-1 if run.seed is None else run.seed), run.name


def _columns(members: Sequence[Sequence[Run]], keys: Sequence[str]) -> list[str]:
    """Settings that differ between variants; of several that separate them in the same way, the shortest key."""
    key_by_pattern: dict[tuple[int, ...], str] = {}
    for key in keys:
        values = [runs[0].settings.get(key, _UNSET) for runs in members]
        # equal for settings that separate the variants in the same way
        pattern = tuple(values.index(value) for value in values)
        if len(set(pattern)) > 1 and (pattern not in key_by_pattern or _rank(key) < _rank(key_by_pattern[pattern])):
            key_by_pattern[pattern] = key
    return [key for key in keys if key in key_by_pattern.values()]


def _rank(key: str) -> tuple[bool, int]:
    # a class is preferred to its options
    return not key.endswith("_target_"), len(key)


def _names(members: Sequence[Sequence[Run]], columns: Sequence[str]) -> list[str]:
    """Folder names without seed and learning rate if they distinguish the variants, else settings, else numbers."""
    inside = os.path.commonpath([os.path.dirname(run.name) for runs in members for run in runs]) if members else ""
    from_folders = [short_name(runs[0])[len(inside) :].strip("/") for runs in members]
    alike = all(len({short_name(run) for run in runs}) == 1 for runs in members)
    from_settings = [
        ", ".join(f"{key.rpartition('.')[2]}={shown(runs[0].settings.get(key, _UNSET))}" for key in columns)
        for runs in members
    ]
    for names, usable in ((from_folders, alike), (from_settings, all(from_settings))):
        if usable and len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(from_folders, 1)]


def shown(value: Any) -> str:
    """A setting as the page shows it: the class of a target without its module."""
    text = "null" if value is None else str(value)
    return text.rpartition(".")[2] if text.startswith("vsa.") else text


def reference(variants: Sequence[Variant]) -> Variant | None:
    """The variant that the others are compared with: the dense control if there is one, else the best."""
    controls = [variant for variant in variants if variant.control]
    return controls[0] if controls else next(iter(variants), None)


def compared(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with their differences to the reference and their Pareto front of loss and step time.

    Each run is compared with the run of the reference with the same seed, which was validated on the same noise.
    """
    partner = reference(variants)
    theirs = {run.seed: run.validation.get("current", {}) for run in partner.ended} if partner else {}
    timed = [(v, loss, seconds) for v in variants if (loss := v.finite_loss) and (seconds := v.mean("step_seconds"))]
    on_front = {timed[i][0].name for i in pareto_front([(loss, seconds) for _, loss, seconds in timed])}
    result = []
    for variant in variants:
        ours = [run for run in variant.ended if run.seed in theirs]
        pairs = [run.validation.get("current", {}) for run in ours], [theirs[run.seed] for run in ours]
        difference = paired_difference(*pairs) if variant is not partner else None
        why = "" if difference is not None or variant is partner else _not_paired(*pairs)
        trade = variant.name in on_front
        result.append(replace(variant, difference=difference, not_paired=why, best_trade=trade))
    tested = {i: v.difference.p for i, v in enumerate(result) if v.difference and v.difference.p is not None}
    for i, p in zip(tested, holm(list(tested.values())), strict=True):
        result[i] = replace(result[i], p_holm=p)
    return result


def _not_paired(ours: Sequence[Mapping[Any, float]], theirs: Sequence[Mapping[Any, float]]) -> str:
    if not ours:
        return "no seed in common"
    if not all((*ours, *theirs)):
        return "no validation.csv"
    return "other samples" if any(set(a) != set(b) for a, b in zip(ours, theirs, strict=True)) else "too few samples"
