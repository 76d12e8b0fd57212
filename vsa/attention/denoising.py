"""Denoising plans: dense first steps and layers, budgets by progress and by step, and reuse of selections.

A denoising has steps, counted from 0, and a progress, `(1000 - timestep) / 1000`: 0 is pure noise, 1 is clean. A step
may need several passes of the network (classifier-free guidance: the conditional pass, then the unconditional one).

B samples.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, checked

Row = int | tuple[int, ...]
"""Kv tiles per query tile: one number for all layers, or one per layer."""


def progress_of(timestep: float) -> float:
    """Denoising progress at a timestep in 0..1000: 0 is pure noise, 1 is clean."""
    # in floating point 1 - 900 / 1000 would be below 0.1
    return (1000 - timestep) / 1000


def range_at(ranges: Sequence[tuple[float, float]], progress: float) -> int | None:
    """Index of the range (start, stop) that contains a progress, the stop excluded; None if no range does."""
    return next((i for i, (start, stop) in enumerate(ranges) if start <= progress < stop), None)


def last_from(starts: Sequence[int], step: int | None) -> int | None:
    """Index of the last of the ascending starts at or before a step; None without such a start or without a step."""
    return None if step is None else max((i for i, start in enumerate(starts) if start <= step), default=None)


Rounding = Literal["up", "down"]
"""Rounding of a share of the tiles to a number of tiles, which is at least one."""


class Budget(NamedTuple):
    """A top-k or a sparsity; exactly one of the two."""

    topk: int | None = None
    sparsity: float | None = None


_DENSE, _KEPT = ("dense_steps", "dense_layers"), ("refresh", "shared_cache")


@checked
@dataclass(frozen=True, kw_only=True)
class DenoisingPlan:
    """Settings of attention over a denoising, on any grid.

    Where several entries apply to a pass, the first of these wins: dense step or layer, budget of the step, range of
    progress. Samples in training have a noise level but no step, so only the ranges apply to them.

    Args:
        dense_steps: number of first denoising steps in which every layer is dense.
        dense_layers: layers that are dense in every step. A method that selects keeps all tiles there; any other method
            runs dense attention.
        topk_ranges: `[start, stop, topk]` entries: the top-k while `start <= progress < stop`.
        sparsity_ranges: `[start, stop, sparsity]` entries: the share of tiles skipped while `start <= progress < stop`.
        step_topk: `[step, topk]` entries: the top-k from this step on.
        step_sparsity: `[step, sparsity]` entries: the share of tiles skipped from this step on.
        refresh: number of steps that share a selection, 1 selects in every step; or `[step, refresh]` entries, each
            valid from its step on and 1 before the first. Counted from the end of the dense steps. A change of the
            top-k always selects again.
        shared_cache: whether the unconditional pass of classifier-free guidance reuses the selections of the
            conditional pass.
        rounding: rounding of the number of tiles kept at a sparsity, also of the schedule's: up, or down as in DFSAttn.

    Source: dense first steps: GNA (12 of 35, 15 of 50, 9 of 28), FG-Attn (24%, 10%), DFSAttn (12 of 50), whose
    schedules are `denoising=dfs` and `denoising=dfs_distilled`.
    """

    dense_steps: Count = 0
    dense_layers: Sequence[Count] = ()
    topk_ranges: Sequence[tuple[Share, Share, AtLeastOne]] = ()
    sparsity_ranges: Sequence[tuple[Share, Share, ShareBelowOne]] = ()
    step_topk: Sequence[tuple[Count, AtLeastOne]] = ()
    step_sparsity: Sequence[tuple[Count, ShareBelowOne]] = ()
    refresh: AtLeastOne | Sequence[tuple[Count, AtLeastOne]] = 1
    shared_cache: bool = False
    rounding: Rounding = "up"

    def __post_init__(self) -> None:
        for name in ("topk_ranges", "sparsity_ranges", "step_topk", "step_sparsity", "refresh"):
            if not isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, tuple(tuple(row) for row in value))
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))
        for name in ("topk_ranges", "sparsity_ranges"):
            for start, stop, _ in getattr(self, name):
                if not start < stop:
                    raise ValueError(f"{name} needs start < stop, got {start} and {stop}")
        ordered = sorted((start, stop) for start, stop, _ in self.ranges)
        for (_, stop), (start, _) in pairwise(ordered):
            if start < stop:
                raise ValueError(f"topk_ranges and sparsity_ranges must not overlap, two of them hold at {start}")
        if not isinstance(self.refresh, int):
            _refuse_unordered("refresh", [step for step, _ in self.refresh])
        for name in ("step_topk", "step_sparsity"):
            _refuse_unordered(name, [step for step, _ in getattr(self, name)])
        if both := sorted({step for step, _ in self.step_topk} & {step for step, _ in self.step_sparsity}):
            raise ValueError(f"step_topk and step_sparsity both have step {both[0]}")

    @property
    def ranges(self) -> tuple[tuple[float, float, Budget], ...]:
        """Start, stop and budget of each range of progress that has its own budget."""
        topk_ranges = ((start, stop, Budget(topk=k)) for start, stop, k in self.topk_ranges)
        return (*topk_ranges, *((start, stop, Budget(sparsity=share)) for start, stop, share in self.sparsity_ranges))

    @property
    def steps(self) -> tuple[tuple[int, Budget], ...]:
        """Ascending steps at which the budget changes, with the new budget."""
        topk_steps = [(step, Budget(topk=k)) for step, k in self.step_topk]
        return tuple(sorted(topk_steps + [(step, Budget(sparsity=share)) for step, share in self.step_sparsity]))

    @property
    def keeps_selections(self) -> bool:
        """Whether a pass may reuse the selection of another one."""
        return self.refresh not in (1, ()) or self.shared_cache

    @property
    def follows_steps(self) -> bool:
        """Whether passes differ, so that step and progress must be known."""
        return self.dense_steps > 0 or bool(self.ranges or self.steps) or self.keeps_selections

    def budget_at(self, step: int | None, progress: float) -> Budget | None:
        """The budget that the plan sets at a step or progress, None if it sets none; dense steps are not considered."""
        steps, ranges = self.steps, self.ranges
        if (i := last_from([start for start, _ in steps], step)) is not None:
            return steps[i][1]
        range_index = range_at([(start, stop) for start, stop, _ in ranges], progress)
        return None if range_index is None else ranges[range_index][2]

    def selects_anew(self, step: int) -> bool:
        """Whether a step makes a new selection."""
        first, interval = 0, self.refresh
        if not isinstance(interval, int):
            i = last_from([start for start, _ in interval], step)
            first, interval = (0, 1) if i is None else interval[i]
        return (step - max(first, self.dense_steps)) % interval == 0

    def on_grid(self, base: Row, row: Callable[[Budget], Row]) -> Topk:
        """Top-k on one grid: `row(budget)` where the plan sets a budget, and `base` elsewhere."""
        if not self.ranges and not self.steps:
            return base
        return DenoisingTopk(
            base=base,
            ranges=tuple((start, stop, row(budget)) for start, stop, budget in self.ranges),
            steps=tuple((step, row(budget)) for step, budget in self.steps),
        )

    def refuse_without_topk(self, method: str, *, predicts: bool = False) -> None:
        """Raise ValueError for an option of the plan that has no effect on a method without a top-k.

        Args:
            method: name of the method.
            predicts: whether its tiles depend on q and k, so that its selections can be reused.
        """
        usable_options = (*_DENSE, *(_KEPT if predicts else ()))
        for name, value in self.changes().items():
            if name not in usable_options:
                reason = "has no top-k" if predicts else "selects no tiles"
                raise ValueError(f"denoising has {name}={value}, but {method} {reason}")

    def without_budgets(self) -> DenoisingPlan:
        """The plan with one budget from the first step to the last."""
        return replace(self, topk_ranges=(), sparsity_ranges=(), step_topk=(), step_sparsity=())

    def for_method(self, *, selects: bool, predicts: bool) -> DenoisingPlan:
        """The part of the plan that has an effect on a method, see `AttentionMethod.selects` and `predicts`."""
        if selects:
            return self
        names = (*_DENSE, *(_KEPT if predicts else ()))
        return DenoisingPlan(**{name: getattr(self, name) for name in names})

    def changes(self) -> dict[str, Any]:
        """Options that differ from their default, as plain values for a record."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True, kw_only=True)
class DenoisingTopk:
    """Top-k on one grid that changes during a denoising.

    Args:
        base: top-k outside of the ranges and before the steps.
        ranges: start and stop (excluded) of a range of progress, and the top-k in it.
        steps: ascending steps with the top-k from each step on; they have priority over the ranges.
    """

    base: Row
    ranges: tuple[tuple[float, float, Row], ...] = ()
    steps: tuple[tuple[int, Row], ...] = ()

    def at(self, progress: float, step: int | None = None) -> Row:
        """The top-k at a step and progress; without a step only the ranges apply."""
        if (i := last_from([start for start, _ in self.steps], step)) is not None:
            return self.steps[i][1]
        range_index = range_at([(start, stop) for start, stop, _ in self.ranges], progress)
        return self.base if range_index is None else self.ranges[range_index][2]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The top-k of each range, followed by `base`."""
        return (*(row for _, _, row in self.ranges), self.base)

    def weighted(self, share: Callable[[float, float], float]) -> list[tuple[float, Row]]:
        """Each of `rows` with its share of the samples; `share(start, stop)` is the share in a range of progress."""
        shares = [share(start, stop) for start, stop, _ in self.ranges]
        return list(zip((*shares, 1 - sum(shares)), self.rows, strict=True))

    def largest(self, num_layers: int) -> tuple[int, ...]:
        """The largest top-k of each layer over all ranges."""
        return tuple(max(layer) for layer in zip(*(per_layer(row, num_layers) for row in self.rows), strict=True))

    def per_sample(self, timestep: Tensor, num_layers: int) -> Tensor:
        """Top-k of each layer and sample, int32 `[layers, B]`, without waiting for the device.

        Args:
            timestep: `[B]`, or `[B, L]` of which the highest counts (condition tokens have 0).
            num_layers: number of layers of the model.
        """
        highest = timestep if timestep.dim() == 1 else timestep.amax(1)
        progress = (1000 - highest.double()) / 1000
        which = torch.full_like(highest, len(self.ranges), dtype=torch.int64)
        for i, (start, stop, _) in enumerate(self.ranges):
            which = which.masked_fill((progress >= start) & (progress < stop), i)
        return _table(self, num_layers, timestep.device)[:, which]


Topk = int | tuple[int, ...] | DenoisingTopk
"""Kv tiles per query tile on one grid: one number, one per layer, or numbers that change during a denoising."""


def row_at(topk: Topk, progress: float, step: int | None = None) -> Row:
    """The top-k at one step and progress."""
    return topk.at(progress, step) if isinstance(topk, DenoisingTopk) else topk


def per_layer(row: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """A top-k as one number per layer."""
    return (row,) * num_layers if isinstance(row, int) else tuple(row)


@lru_cache(maxsize=64)
def _table(topk: DenoisingTopk, num_layers: int, device: torch.device) -> Tensor:
    """int32 `[layers, ranges + 1]`, cached, because a copy to the device in every step would wait for the device."""
    rows = [per_layer(row, num_layers) for row in topk.rows]
    return torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)


Half = Literal["first", "second"]


@dataclass(frozen=True, kw_only=True)
class DenoisingPass:
    """Settings of attention in one forward pass of a denoising.

    Args:
        step: step of the denoising, from 0.
        progress: see the top of this file.
        dense: whether every layer is dense.
        dense_layers: layers that are dense.
        cache: selections by (owner, layer, segments of the row), owned by the caller; None: no selection is cached.
        owner: number, within its step, of the pass whose selections are read and written; 0 is the conditional pass.
        refresh: whether to select even if a selection is cached.
        leaders: half of the batch whose selections all samples follow, when guidance runs in one batch; None: every
            sample has its own.
    """

    step: int = 0
    progress: float = 1.0
    dense: bool = False
    dense_layers: Sequence[int] = ()
    cache: MutableMapping[Any, Any] | None = None
    owner: int = 0
    refresh: bool = True
    leaders: Half | None = None


class Denoising:
    """One denoising of a batch of clips: its plan, and the cached selections of its passes.

    Args:
        plan: plan of the denoising.
    """

    def __init__(self, plan: DenoisingPlan):
        self.plan = plan
        self._cache: dict[Any, Any] = {}

    def at(self, step: int, progress: float, *, number: int = 0, conditional: Half | None = None) -> DenoisingPass:
        """A pass of the network.

        Args:
            step: step of the denoising, from 0.
            progress: see the top of this file.
            number: number of the pass within its step; 0 is the conditional pass.
            conditional: conditional half of the batch, where one pass holds both halves; None: they are separate
                passes.
        """
        plan, shared = self.plan, self.plan.shared_cache
        # guidance in one batch shares selections without a cache
        uses_cache = plan.keeps_selections and not (plan.refresh == 1 and conditional is not None)
        return DenoisingPass(
            step=step,
            progress=progress,
            dense=step < plan.dense_steps,
            dense_layers=plan.dense_layers,
            cache=self._cache if uses_cache else None,
            owner=0 if shared else number,
            refresh=plan.selects_anew(step) and not (shared and number > 0),
            leaders=conditional if shared else None,
        )


def _refuse_unordered(name: str, steps: Sequence[int]) -> None:
    for before, after in pairwise(steps):
        if before >= after:
            raise ValueError(f"{name} must have ascending steps, got {before} before {after}")
