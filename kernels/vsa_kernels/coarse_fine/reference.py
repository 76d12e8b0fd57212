"""Reference of the VSA operator, composed of the other ops and plain matmuls, on any device and in any float dtype.

`coarse_fine_attn` runs it wherever the fused op does not apply; callers that split the operator call its stages and
`combine` separately.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks, token_places
from vsa_kernels.block_sparse import block_sparse_attn
from vsa_kernels.block_sparse.mask import MaskedProduct, masked_logits
from vsa_kernels.checks import check_scale
from vsa_kernels.modes import lowered, without_autocast
from vsa_kernels.pooling import block_mean_pool
from vsa_kernels.selection import select_topk


class CoarseOutput(NamedTuple):
    """Result of the coarse stage.

    Args:
        coarse: `[B, Nq, H, D]` output per query block, in q's dtype.
        scores: `[B, H, Nq, Nkv]` logits, fp32 (fp64 for fp64 inputs), -inf where a block is no candidate.
    """

    coarse: Tensor
    scores: Tensor


class Stages(NamedTuple):
    """Result of `coarse_fine_stages`: both stages before the gates. All but `index` is differentiable.

    Args:
        fine: `[B, L, H, D]` output of the fine stage.
        lse: `[B, H, L]` of the fine stage.
        coarse: `[B, Nq, H, D]` output of the coarse stage, in q's dtype.
        scores: `[B, H, Nq, Nkv]` coarse logits, see `CoarseOutput`.
        index: the selected kv blocks.
    """

    fine: Tensor
    lse: Tensor
    coarse: Tensor
    scores: Tensor
    index: BlockIndex


class CoarseFineOutput(NamedTuple):
    """Result of `coarse_fine_attn`. Only `out` is differentiable; the other fields are for inspection.

    Args:
        out: `[B, L, H, D]` gated sum of both stages.
        index: the selected kv blocks.
        fine: `[B, L, H, D]` output of the fine stage.
        lse: `[B, H, L]` of the fine stage.
        coarse: `[B, Nq, H, D]` output of the coarse stage, at least fp32 or in q's dtype.
    """

    out: Tensor
    index: BlockIndex
    fine: Tensor
    lse: Tensor
    coarse: Tensor


def coarse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    candidates: Tensor | None = None,
    scale: float | None = None,
) -> CoarseOutput:
    """Softmax attention between block means: the coarse stage of VSA.

    Under `torch.autocast` q, k and v are cast to its dtype.

    Args:
        q: `[B, L, H, D]` queries, tokens in block order.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        candidates: bool `[Nq, Nkv]`, kv blocks that a query block may attend to, at least one per row; None: all.
        scale: factor of the logits, default D ** -0.5.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2.2.
    """
    q, k, v = lowered(q, k, v)
    q_mean, k_mean, v_mean = (
        block_mean_pool(x, blocks).transpose(1, 2) for x, blocks in ((q, q_blocks), (k, kv_blocks), (v, kv_blocks))
    )
    scale = check_scale(1 / math.sqrt(q.shape[-1]) if scale is None else scale, q.shape[-1])
    if (group := q.shape[2] // k.shape[2]) > 1:
        k_mean, v_mean = k_mean.repeat_interleave(group, dim=1), v_mean.repeat_interleave(group, dim=1)
    # the means, and the scores that rank the blocks, are fp32 whatever the dtype of the tokens
    with without_autocast(q.device):
        q_mean = q_mean * scale
        scores = q_mean @ k_mean.mT if candidates is None else masked_logits(q_mean, k_mean, candidates)
        weights = scores.softmax(dim=-1)
        coarse = weights @ v_mean if candidates is None else MaskedProduct.apply(weights, v_mean, candidates)
    return CoarseOutput(coarse.transpose(1, 2).to(q.dtype), scores)


def coarse_fine_stages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    topk: int,
    candidates: Tensor | None = None,
    always: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Stages:
    """Both stages of the operator before the gates, which `combine` applies. Arguments as in `coarse_fine_attn`."""
    blocks: dict[str, Any] = {"q_blocks": q_blocks, "kv_blocks": kv_blocks}
    coarse, scores = coarse_attn(q, k, v, **blocks, candidates=candidates, scale=scale)
    # ranked by scores, not by probabilities: the order is the same, and there are no ties where the softmax underflows
    index = select_topk(scores, topk, candidates=candidates, always=always)
    fine, lse = block_sparse_attn(q, k, v, index, **blocks, scale=scale, backend=backend)
    return Stages(fine, lse, coarse, scores, index)


def combine(fine: Tensor, coarse: Tensor, gate_coarse: Tensor, gate_fine: Tensor | None, q_blocks: Blocks) -> Tensor:
    """Gated sum of both stages `[B, L, H, D]`: gate_coarse * coarse[block of the token] + gate_fine * fine.

    Args:
        fine: `[B, L, H, D]`.
        coarse: `[B, Nq, H, D]`.
        gate_coarse: `[B, L, H, D]`.
        gate_fine: `[B, L, H, D]`; None: 1.
        q_blocks: partition of the L tokens.
    """
    if gate_fine is not None:
        fine = fine * gate_fine
    size = q_blocks.max_size
    if q_blocks.min_size == size:
        # broadcast, so that the backward saves one coarse row per block instead of one per token
        fine, gate_coarse = (x.unflatten(1, (q_blocks.num, size)) for x in (fine, gate_coarse))
        return torch.addcmul(fine, gate_coarse, coarse[:, :, None]).flatten(1, 2)
    block, place = token_places(q_blocks, fine.shape[1])
    # one copy per token, so that the sum in the backward has a fixed order on every device
    spread = coarse[:, :, None].expand(-1, -1, size, -1, -1).flatten(1, 2)
    return torch.addcmul(fine, gate_coarse, spread.index_select(1, block * size + place))
