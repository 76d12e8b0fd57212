"""Denoising plans: dense first steps and layers, budgets by progress and by step, and reuse of selections.

A denoising has steps, counted from 0, and a progress, `(1000 - timestep) / 1000`: 0 is pure noise, 1 is clean. A step
may need several passes of the network (classifier-free guidance: the conditional pass, then the unconditional one).

B samples.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

from vsa.attention.kept_tiles import Budget, KeptTiles, Rounding, last_from
from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, validated


def progress_of(timestep: float) -> float:
    """Denoising progress at a timestep in 0..1000: 0 is pure noise, 1 is clean."""
    # in floating point 1 - 900 / 1000 would be below 0.1
    return (1000 - timestep) / 1000


_DENSE, _KEPT = ("dense_steps", "dense_layers"), ("refresh", "shared_cache")


@validated
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

    def selects_anew(self, step: int) -> bool:
        """Whether a step makes a new selection."""
        first, interval = 0, self.refresh
        if not isinstance(interval, int):
            i = last_from([start for start, _ in interval], step)
            first, interval = (0, 1) if i is None else interval[i]
        return (step - max(first, self.dense_steps)) % interval == 0

    def on_grid(self, layers: tuple[float, ...], layers_of: Callable[[Budget], tuple[float, ...]]) -> KeptTiles:
        """Tiles kept on one grid: `layers_of(budget)` where the plan sets a budget, and `layers` elsewhere."""
        return KeptTiles(
            layers,
            ranges=tuple((start, stop, layers_of(budget)) for start, stop, budget in self.ranges),
            steps=tuple((step, layers_of(budget)) for step, budget in self.steps),
        )

    def constant(self, layers: tuple[int, ...], num_tiles: int) -> KeptTiles:
        """Tiles kept on a grid of `num_tiles`: `layers`, or those of the plan's budgets, which all layers share."""
        return self.on_grid(layers, lambda budget: (budget.tiles(num_tiles, self.rounding),))

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

    def kept(self, topk: KeptTiles, num_tiles: int, num_layers: int) -> KeptTiles:
        """Tiles that each layer keeps in this pass on a grid of `num_tiles`, which dense layers all keep."""
        layers = topk.at(self.progress, self.step).by_layer(num_layers)
        return KeptTiles(tuple(num_tiles if self.dense or i in self.dense_layers else k for i, k in enumerate(layers)))


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
