"""How many steps a budget of FLOPs, of tokens or of seconds pays for."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.attention.denoising import DenoisingTopk, Row, Topk
from vsa.attention.sparsity import SparsitySchedule
from vsa.config import build, model_factory
from vsa.models.init import without_memory

BUDGETS = ("flop_budget", "sample_token_budget", "second_budget")
"""Settings each of which can take the place of `trainer.max_steps`."""

WARM_UP_STEPS, MEASURED_STEPS = 5, 20


def budget_of(cfg: Any) -> str | None:
    """The budget that a run has.

    Raises:
        ValueError: it has two.
    """
    given = [name for name in BUDGETS if cfg.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(f'{name}={cfg[name]}' for name in given)}: expected one budget")
    return given[0] if given else None


def steps_of_budget(cfg: Any, datamodule: Any, step_seconds: Callable[[], float] | None) -> int:
    """Optimizer steps that the budget of a run pays for; one that has none has `trainer.max_steps`.

    Args:
        cfg: of the run.
        datamodule: its data, which are prepared.
        step_seconds: measures the time of a training step; None: a budget of seconds is not turned into steps.

    Raises:
        ValueError: two budgets, or a schedule whose sparsity is not known in advance.
    """
    name = budget_of(cfg)
    if name is None:
        return cfg.trainer.max_steps
    datamodule.prepare_data()
    datamodule.setup("fit")
    if name == "flop_budget":
        return _steps_of_flops(cfg, datamodule)
    budget = cfg[name]
    shapes = datamodule.buckets
    with without_memory():
        model = model_factory(cfg)()
    if name == "sample_token_budget":
        tokens = sum(model.layout_for(shape).num_tokens * count for shape, count in shapes.items())
        each, what = datamodule.batch_size * tokens / sum(shapes.values()), "tokens"
    else:
        sparsity: SparsitySchedule = build(cfg.sparsity)
        ends = (sparsity.final_step(model.layout_for(shape).num_video_tiles) for shape in shapes)
        if model.selects and any(end != 0 for end in ends):
            raise ValueError(
                f"{name}={budget} needs the same sparsity at every step, {type(sparsity).__name__} changes it"
            )
        if step_seconds is None:
            return cfg.trainer.max_steps
        each, what = step_seconds(), "seconds"
    steps = max(1, round(budget / each))
    rank_zero_info(f"{name}={budget:.3g}: {steps} steps of {each:.3g} {what} on average")
    return steps


class StepTimer(L.Callback):
    """The mean time of the training steps after the warm-up, in `seconds` when training has ended."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % pl_module.accumulate or trainer.global_step not in (WARM_UP_STEPS, trainer.max_steps):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        if trainer.global_step == WARM_UP_STEPS:
            self._began = time.perf_counter()
        else:
            self.seconds = (time.perf_counter() - self._began) / MEASURED_STEPS


def _steps_of_flops(cfg: Any, datamodule: Any) -> int:
    """Optimizer steps whose executed training FLOPs come nearest to the budget (the paper compares at equal FLOPs).

    A sparsity schedule may end with the run: it is built anew for every number of steps that is tried.
    """
    budget = cfg.flop_budget
    with without_memory():
        model = model_factory(cfg)()
    shapes = datamodule.buckets
    tiles = {shape: model.layout_for(shape).num_video_tiles for shape in shapes}
    share = {shape: datamodule.batch_size * count / sum(shapes.values()) for shape, count in shapes.items()}

    @cache
    def row_flops(shape: tuple[int, ...], row: Row) -> float:
        return model.flops(shape, row, datamodule.text_encoder.max_tokens).executed

    def flops(shape: tuple[int, ...], topk: Topk) -> float:
        if not isinstance(topk, DenoisingTopk):
            return row_flops(shape, topk)
        tokens = model.layout_for(shape).num_tokens
        rows = topk.weighted(partial(build(cfg.task.objective).progress_share, num_tokens=tokens))
        return sum(weight * row_flops(shape, row) for weight, row in rows)

    def total(steps: int) -> float:
        trial = cfg.copy()
        trial.trainer.max_steps = max(steps, 1)
        sparsity: SparsitySchedule = build(trial.sparsity)
        ends = [sparsity.final_step(n) for n in tiles.values()]
        if None in ends:
            raise ValueError(f"flop_budget needs a schedule known in advance, {type(sparsity).__name__} is measured")

        def step_flops(step: int) -> float:
            topks = {shape: sparsity.topk_per_layer(step, n, len(model.blocks)) for shape, n in tiles.items()}
            return sum(share[shape] * flops(shape, topk) for shape, topk in topks.items())

        end = min(max(n for n in ends if n is not None), steps)
        return math.fsum(map(step_flops, range(end))) + (steps - end) * step_flops(end)

    most = math.ceil(budget / sum(share[shape] * flops(shape, 1) for shape in shapes)) + 1
    # the first number of steps that reaches the budget, or the one before
    reached = bisect_left(range(most), budget, key=total)
    steps = max(1, min(reached - 1, reached, key=lambda n: abs(total(n) - budget)))
    rank_zero_info(f"flop_budget={budget:.3g}: {steps} steps of {total(steps) / steps:.3g} FLOPs on average")
    return steps
