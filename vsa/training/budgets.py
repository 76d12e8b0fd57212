"""Number of optimizer steps for a budget of FLOPs, tokens or seconds."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsitySchedule
from vsa.config import build, model_factory
from vsa.models.init import without_memory

BUDGETS = ("flop_budget", "sample_token_budget", "second_budget")
"""Settings that can replace `trainer.max_steps`."""

WARM_UP_STEPS, MEASURED_STEPS = 5, 20


def budget_of(cfg: Any) -> str | None:
    """Name of the budget of a run, None without one; ValueError if there are two."""
    names = [name for name in BUDGETS if cfg.get(name) is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(f'{name}={cfg[name]}' for name in names)}: expected one budget")
    return names[0] if names else None


def is_counted(cfg: Any) -> bool:
    """Whether the steps of a run are known before it begins: those of a budget of seconds are not."""
    return budget_of(cfg) != "second_budget"


def check_budget(cfg: Any, module: Any) -> None:
    """Refuse a budget of a training module that trains several networks."""
    budget = budget_of(cfg)
    if budget is not None and len(module.clippers) > 1:
        raise ValueError(f"{budget}={cfg[budget]} applies to jobs of one network, this one ends at trainer.max_steps")


def steps_of_budget(
    cfg: Any,
    shapes: Mapping[tuple[int, ...], int],
    text: int,
    image: int,
    step_seconds: Callable[[int], float] | None = None,
) -> int:
    """Optimizer steps for the budget of a run; `trainer.max_steps` without a budget.

    Args:
        cfg: config of the run.
        shapes: number of samples by latent shape `[C, T, H, W]`.
        text: tokens of a caption.
        image: tokens of a first frame.
        step_seconds: function that measures the time of a training step at the sparsity of an optimizer step; None:
            keep `trainer.max_steps` for a budget of seconds.

    Raises:
        ValueError: two budgets, one below a step, or a sparsity schedule that is not known in advance.
    """
    name = budget_of(cfg)
    if name is None:
        return cfg.trainer.max_steps
    budget, work = cfg[name], _Work(cfg, shapes, text, image)
    if name == "sample_token_budget":
        each = work.tokens
        steps = max(1, round(budget / each))
    elif name == "flop_budget":
        steps = work.steps_nearest(budget, lambda flops: flops, work.least_flops)
        each = work.flops(steps) / steps
    else:
        # an adaptive schedule is refused before the time of a step is measured
        last = work.final_step(cfg)
        if step_seconds is None:
            return cfg.trainer.max_steps
        at_first, at_last = (work.step_flops(cfg, step) for step in (0, last))
        times = [step_seconds(0)]
        times += [step_seconds(last)] if at_last != at_first else times

        def cost(flops: float) -> float:
            # between these two steps the time is interpolated linearly in FLOPs
            fraction = 0.0 if at_last == at_first else (flops - at_first) / (at_last - at_first)
            return times[0] + min(max(fraction, 0.0), 1.0) * (times[1] - times[0])

        steps = work.steps_nearest(budget, cost, min(times))
        each = work.flops(steps, cost) / steps
    what = {"sample_token_budget": "tokens", "flop_budget": "FLOPs", "second_budget": "seconds"}[name]
    if budget < each and steps == 1:
        raise ValueError(f"{name}={budget:.3g} is below the {each:.3g} {what} of one step")
    rank_zero_info(f"{name}={budget:.3g}: {steps} steps of {each:.3g} {what} on average")
    return steps


class StepTimer(L.Callback):
    """Mean time of the training steps after the warm-up, available as `seconds` once training has ended."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % pl_module.accumulate or trainer.global_step not in (WARM_UP_STEPS, trainer.max_steps):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        if trainer.global_step == WARM_UP_STEPS:
            self._began = time.perf_counter()
        else:
            self.seconds = (time.perf_counter() - self._began) / MEASURED_STEPS


class _Work:
    """FLOPs and tokens of the optimizer steps of a run, from its data, model and sparsity schedule.

    Args:
        cfg: config of the run.
        shapes: number of samples by latent shape.
        text: tokens of a caption.
        image: tokens of a first frame.
    """

    def __init__(self, cfg: Any, shapes: Mapping[tuple[int, ...], int], text: int, image: int):
        self._cfg, self._text, self._image = cfg, text, image
        with without_memory():
            self._model = model_factory(cfg)()
        self._tiles = {shape: self._model.layout_for(shape).num_video_tiles for shape in shapes}
        self._share = {shape: cfg.data.batch_size * count / sum(shapes.values()) for shape, count in shapes.items()}
        self._flops = cache(self._count)

    @property
    def tokens(self) -> float:
        """Tokens of the samples of a step."""
        return sum(self._model.layout_for(shape).num_tokens * share for shape, share in self._share.items())

    def _count(self, shape: tuple[int, ...], topk: KeptTiles) -> float:
        def share(start: float, stop: float) -> float:
            tokens = self._model.layout_for(shape).num_tokens
            return build(self._cfg.task.objective).progress_share(start, stop, num_tokens=tokens)

        expected = topk.expected(share) if self._model.selects else None
        return self._model.flops(shape, expected, self._text, image_len=self._image).executed

    def final_step(self, cfg: Any) -> int:
        """First step at which all token grids have the schedule's end value; ValueError for an adaptive schedule."""
        if not self._model.selects:
            return 0
        sparsity: SparsitySchedule = build(cfg.sparsity)
        ends = [sparsity.final_step(n) for n in self._tiles.values()]
        known_ends = [end for end in ends if end is not None]
        if len(known_ends) < len(ends):
            name = budget_of(cfg)
            raise ValueError(f"{name} needs a schedule known in advance, {type(sparsity).__name__} is measured")
        return max(known_ends)

    def step_flops(self, cfg: Any, step: int) -> float:
        """Executed training FLOPs of an optimizer step."""
        sparsity: SparsitySchedule = build(cfg.sparsity)
        return self._at(sparsity, step)

    def _at(self, sparsity: SparsitySchedule, step: int) -> float:
        layers = len(self._model.blocks)
        topks = {shape: sparsity.topk_per_layer(step, n, layers) for shape, n in self._tiles.items()}
        return sum(self._share[shape] * self._flops(shape, topk) for shape, topk in topks.items())

    def flops(self, steps: int, cost: Callable[[float], float] = lambda flops: flops) -> float:
        """Executed training FLOPs of a run of `steps` steps, or the sum over the steps of `cost(FLOPs of the step)`.

        A sparsity schedule may depend on the number of steps, so it is built again for every candidate.
        """
        trial = self._cfg.copy()
        trial.trainer.max_steps = max(steps, 1)
        end = min(self.final_step(trial), steps)
        sparsity: SparsitySchedule = build(trial.sparsity)
        own = math.fsum(cost(self._at(sparsity, step)) for step in range(end))
        return own + (steps - end) * cost(self._at(sparsity, end))

    @property
    def least_flops(self) -> float:
        """FLOPs of a step with one tile per query tile."""
        return sum(self._share[shape] * self._flops(shape, KeptTiles((1,))) for shape in self._tiles)

    def steps_nearest(self, budget: float, cost: Callable[[float], float], least: float) -> int:
        """The number of steps whose total cost is nearest to the budget (the paper compares at equal FLOPs).

        Args:
            budget: total cost of all steps.
            cost: cost of a step as a function of its FLOPs.
            least: lower bound of the cost of a step.
        """
        most = math.ceil(budget / least) + 1
        # the first number of steps that reaches the budget, or the one before it
        reached = bisect_left(range(most), budget, key=lambda steps: self.flops(steps, cost))
        return max(1, min(reached - 1, reached, key=lambda n: abs(self.flops(n, cost) - budget)))
