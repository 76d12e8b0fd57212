"""How many steps a budget of FLOPs pays for."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.attention.sparsity import SparsitySchedule
from vsa.config import build, model_factory
from vsa.models.init import without_memory


def steps_of_budget(cfg: Any, datamodule: Any) -> int:
    """Optimizer steps whose executed training FLOPs come nearest to the budget (the paper compares at equal FLOPs).

    A sparsity schedule may end with the run: it is built anew for every number of steps that is tried.
    """
    budget = cfg.flop_budget
    datamodule.prepare_data()
    datamodule.setup("fit")
    with without_memory():
        model = model_factory(cfg)()
    shapes = datamodule.buckets
    tiles = {shape: model.layout_for(shape).num_video_tiles for shape in shapes}
    share = {shape: datamodule.batch_size * count / sum(shapes.values()) for shape, count in shapes.items()}

    @cache
    def flops(shape: tuple[int, ...], topk: int | tuple[int, ...]) -> float:
        return model.flops(shape, topk, datamodule.text_encoder.max_tokens).executed

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
