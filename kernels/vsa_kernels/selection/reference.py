"""Reference of block selection, by top-k or by share: a stable sort of integer keys in a total order."""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks, by_block
from vsa_kernels.selection.weights import Crossing, weight_units, within_share


def select(
    scores: Tensor,
    topk: int | None,
    topk_per_row: Tensor | None,
    candidates: Tensor | None,
    always: Tensor | None,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Indices `[B, H, Nq, capacity]` and counts `[B, H, Nq]`; arguments as in `triton_topk.select`."""
    if candidates is None and always is None and topk is not None:
        # all blocks compete and every row keeps topk <= Nkv
        best = _ranking(order_keys(scores))[..., :topk].sort(-1).values.to(torch.int32)
        indices = torch.nn.functional.pad(best, (0, capacity - topk))
        return indices, indices.new_full(indices.shape[:-1], topk)
    compete = torch.ones_like(scores[0, 0], dtype=torch.bool) if candidates is None else candidates
    if always is not None:
        compete = compete & ~always
    keys = order_keys(scores)
    keys = keys.masked_fill(~compete, torch.iinfo(keys.dtype).min)
    ranking = _ranking(keys)
    # exactly one of topk and topk_per_row is not None
    limit = compete.sum(-1).clamp(max=topk_per_row if topk is None else topk)
    # a block is kept when its rank is below the limit of its row
    slot = torch.arange(scores.shape[-1], device=scores.device)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranking, (slot < limit[:, None]).expand_as(ranking))
    if always is not None:
        mask = mask | always
    return _lists(mask, capacity)


def select_share(
    scores: Tensor, shares: Tensor, crossing: Crossing, candidates: Tensor | None, always: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Indices `[B, H, Nq, Nkv]` and counts `[B, H, Nq]`; arguments as in `triton_share.select`."""
    compete = torch.ones_like(scores, dtype=torch.bool) if candidates is None else candidates
    if always is not None:
        compete = compete & ~always
    keys = order_keys(scores)
    ranking = _ranking(keys.masked_fill(~compete, torch.iinfo(keys.dtype).min))
    inside = within_share(weight_units(scores, compete).gather(-1, ranking), shares[..., None], crossing)
    # a row keeps at least its best block
    inside[..., 0] = True
    mask = torch.zeros_like(inside).scatter_(-1, ranking, inside) & compete
    return _lists(mask if always is None else mask | always, scores.shape[-1])


def mean_scores(q_mean: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """Logits `[B, H, Nq, Nkv]` of means `[B, Nq, H, D]` and `[B, Nkv, Hkv, D]`."""
    keys = k_mean.transpose(1, 2).repeat_interleave(q_mean.shape[2] // k_mean.shape[2], 1)
    return (q_mean.transpose(1, 2) * scale) @ keys.transpose(2, 3)


def subblock_scores(
    q_mean: Tensor,
    k_mean: Tensor,
    q_groups: Blocks,
    kv_groups: Blocks,
    bias: Tensor,
    candidates: Tensor | None,
    scale: float,
    softmax: bool,
) -> Tensor:
    """Scores `[B, H, Nq, Nkv]`; arguments as in `triton_subblock.scores`, for some heads at a time."""
    queries, keys = by_block(q_mean, q_groups), by_block(k_mean, kv_groups)
    # [N, R]
    rows, columns = (b.sizes[:, None] > torch.arange(b.max_size, device=bias.device) for b in (q_groups, kv_groups))
    hidden = ~columns[None] if candidates is None else ~(candidates[:, :, None] & columns)
    padded = by_block(bias[None, :, None, None], kv_groups)[0, ..., 0, 0]
    scores, group = [], q_mean.shape[2] // k_mean.shape[2]
    for head in range(q_mean.shape[2]):
        # [B, Nq, R, Nkv, R']
        logits = torch.einsum("bird,bjsd->birjs", queries[..., head, :] * scale, keys[..., head // group, :]) + padded
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
        if softmax:
            lse = logits.flatten(-2).logsumexp(-1)[..., None]
            shares = (logits.logsumexp(-1) - lse.masked_fill(lse == -torch.inf, 0)).exp()
            shares = shares.masked_fill(~rows[:, :, None], 0)
            scores.append(shares.sum(2) / q_groups.sizes[:, None])
        else:
            logits = logits.masked_fill(~rows[:, :, None, None], -torch.inf)
            scores.append(logits.logsumexp((2, 4)))
    return torch.stack(scores, dim=1)


def _lists(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    # a stable sort of the negated mask lists the kept blocks first, ascending
    indices = torch.sort((~mask).to(torch.int8), dim=-1, stable=True).indices[..., :capacity]
    return indices.to(torch.int32).contiguous(), mask.sum(-1, dtype=torch.int32)


def order_keys(scores: Tensor) -> Tensor:
    """Integer keys in the order of the scores: NaN below -inf, -0.0 equal to 0.0; the smallest integer is not used."""
    # adding 0 turns -0.0 into 0.0
    x = (scores if scores.dtype == torch.float64 else scores.float()) + 0.0
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    # the bit pattern of a negative float ascends with its magnitude: flip all but the sign
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill(x.isnan(), limits.min + 1)


def _ranking(keys: Tensor) -> Tensor:
    # stable, so that equal keys stay in ascending order of their index
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices
