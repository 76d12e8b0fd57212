"""Attention with a pooled tail, composed of other ops and plain matmuls, on any device and in any float dtype.

The means and the weights of their values are rounded to the dtype of the tokens as in a fused kernel, so that the error
is that of plain attention in this dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, token_places
from vsa_kernels.block_sparse import block_sparse_attn
from vsa_kernels.block_sparse.mask import BlockMask, MaskedProduct, masked_logits
from vsa_kernels.modes import without_autocast
from vsa_kernels.pooling import block_mean_pool


def tail_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    candidates: Tensor | None,
    exclude: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """out `[B, L, H, D]` and lse `[B, H, L]`; see `api.tail_attn`. Keeps logits `[B, H, L, Nkv]`."""
    blocks: dict[str, Any] = {"q_blocks": mask.q_blocks, "kv_blocks": mask.kv_blocks}
    fine, lse = block_sparse_attn(q, k, v, mask.index, **blocks, scale=scale, backend=backend)
    wide = torch.promote_types(q.dtype, torch.float32)
    k_mean, v_mean = (block_mean_pool(x, mask.kv_blocks).to(q.dtype).to(wide).transpose(1, 2) for x in (k, v))
    k_mean, v_mean = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=1) for x in (k_mean, v_mean))
    with without_autocast(q.device):
        block, _ = token_places(mask.q_blocks, q.shape[1])
        rows = in_tail(mask.index, mask.kv_blocks.num, candidates, exclude)[:, :, block]
        logits = masked_logits(q.transpose(1, 2).to(wide) * scale, k_mean, rows)
        logits = logits + mask.kv_blocks.sizes.to(logits.dtype).log()
        logits = torch.cat((lse[..., None], logits), dim=-1)
        # 0 in the place of -inf keeps the weights and gradients of a query with neither at 0
        empty = (logits == -torch.inf).all(-1, keepdim=True)
        total = logits.masked_fill(empty, 0).logsumexp(-1, keepdim=True).masked_fill(empty, 0)
        weights = (logits - total).exp()
        tail = MaskedProduct.apply(weights[..., 1:].to(q.dtype).to(wide), v_mean, rows)
        out = weights[..., :1] * fine.transpose(1, 2).to(wide) + tail
    return out.transpose(1, 2).to(q.dtype), total.masked_fill(empty, -torch.inf)[..., 0].detach()


def in_tail(index: BlockIndex, num_kv: int, candidates: Tensor | None, exclude: bool) -> Tensor:
    """bool `[B|1, H|1, Nq, Nkv]`, the blocks whose means join the softmax of a query block."""
    listed = index.to_dense(num_kv)
    rows = ~listed if exclude else torch.ones_like(listed)
    return rows if candidates is None else rows & candidates
