"""Changes over a denoising in the forms of other engines: a share of the tiles by step, or a part of the schedule.

Sources: sglang, `topk_ratio_list` of its cube_sparse_attn (pull request 34893); ComfyUI, `start_percent` and
`end_percent` of its node Model Sparse Attention, as noise levels by `ModelSamplingDiscreteFlow.percent_to_sigma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.diffusion.flow_matching import shift_sigma


def plan_of_ratios(ratios: Sequence[float]) -> DenoisingPlan:
    """The plan with a share of the tiles for each step from 0, that of the last one further on; for `sparsity=0`."""
    changes = [i for i, ratio in enumerate(ratios) if i == 0 or ratio != ratios[i - 1]]
    # as written: 1 - 0.55 is not 0.45 in binary
    return DenoisingPlan(step_sparsity=[(i, round(1 - ratios[i], 9)) for i in changes])


def ratios_of(config: SparseAttentionConfig, sigmas: Sequence[float]) -> list[float]:
    """The share of the tiles that the layers keep on average at each step, whose noise levels are given."""
    tiles = config.num_tiles[0]
    kept = (config.layer_topk(tiles, progress=1 - sigma, step=i) for i, sigma in enumerate(sigmas))
    return [mean(layers) / tiles for layers in kept]


def plan_of_percents(start: float, end: float, sparsity: float, *, flow_shift: float = 1.0) -> DenoisingPlan:
    """The plan that is sparse from one part of the schedule to another, and dense before and after; for `sparsity=0`.

    Args:
        start: share of the schedule in [0, 1] before it, `start_percent`.
        end: share of the schedule at its end, `end_percent`.
        sparsity: share of the tiles skipped between them.
        flow_shift: shift of the scheduler; 1 for parts of the noise levels themselves.
    """
    first, last = (1 - shift_sigma(torch.tensor(1 - part).double(), flow_shift).item() for part in (start, end))
    return DenoisingPlan(sparsity_ranges=[(round(first, 9), round(last, 9), sparsity)])


def percents_of(config: SparseAttentionConfig, *, flow_shift: float = 1.0) -> tuple[float, float, float]:
    """`start_percent`, `end_percent` and the share of the tiles skipped between them, see `plan_of_percents`.

    Raises:
        ValueError: the config changes in other ways.
    """
    tiles = config.num_tiles[0]
    outside, ranges = config.layer_topk(tiles), config.topk_ranges
    if len(ranges) != 1 or config.step_topk or config.dense_steps or min(outside) < tiles:
        raise ValueError(f"expected one range of noise levels with all {tiles} tiles outside of it, got {len(ranges)}")
    start, stop, rows = ranges[0]
    levels = (shift_sigma(torch.tensor(1 - at).double(), 1 / flow_shift).item() for at in (start, stop))
    first, last = (round(1 - level, 6) for level in levels)
    return first, last, 1 - mean(rows[0]) / tiles
