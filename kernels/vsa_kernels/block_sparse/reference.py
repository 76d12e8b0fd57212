"""Reference of block-sparse attention by a dense token mask: the definition of the op, in any float dtype.

Half-precision inputs are multiplied in fp32, and the factors of the second matmuls are rounded to the input dtype as
in a fused kernel, so that its error is that of plain attention in the same dtype. Memory grows with B * H * L * S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import token_places
from vsa_kernels.block_sparse.mask import BlockMask, MaskedProduct


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    heads = q.shape[2]
    pair_mask = token_mask(mask, q.shape[1], k.shape[1])
    qh, kh, vh = _by_head(q, heads), _by_head(k, heads), _by_head(v, heads)
    logits = _logits(qh, kh, pair_mask, scale)
    lse = torch.logsumexp(logits, dim=-1)
    p = logits.sub_(_finite(lse)[..., None]).exp_()
    out = MaskedProduct.apply(_rounded(p, q.dtype), vh, pair_mask)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def backward(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from dout `[B, L, H, D]` and delta = rowsum(dout * out) - dlse `[B, H, L]`."""
    B, S, kv_heads, D = k.shape
    heads = q.shape[2]
    pair_mask = token_mask(mask, q.shape[1], S)
    qh, kh, vh = _by_head(q, heads), _by_head(k, heads), _by_head(v, heads)
    dh = _by_head(dout, heads)
    p = _logits(qh, kh, pair_mask, scale).sub_(_finite(lse)[..., None]).exp_()
    dv = MaskedProduct.apply(_rounded(p, q.dtype).transpose(-1, -2), dh, pair_mask.mT)
    dlogits = (dh @ vh.transpose(-1, -2)).sub_(delta[..., None]).mul_(p)
    dlogits = _rounded(dlogits, q.dtype)
    dq = MaskedProduct.apply(dlogits, kh, pair_mask).mul_(scale)
    dk = MaskedProduct.apply(dlogits.transpose(-1, -2), qh, pair_mask.mT).mul_(scale)
    dk, dv = (x.reshape(B, kv_heads, heads // kv_heads, S, D).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


def token_mask(mask: BlockMask, num_q: int, num_kv: int) -> Tensor:
    """bool `[B|1, H|1, L, S]`, True where a query token attends to a kv token."""
    q_block, q_place = token_places(mask.q_blocks, num_q)
    kv_block, kv_place = token_places(mask.kv_blocks, num_kv)
    pair_mask = mask.index.to_dense(mask.kv_blocks.num)[:, :, q_block][..., kv_block]
    if mask.index.mask_bits is not None:
        assert mask.index.mask_ids is not None
        assert mask.index.kv_num_full_blocks is not None
        which = _mask_of_block(mask)[:, :, q_block][..., kv_block]
        # the last row is the mask of blocks that need no fine mask
        bits = torch.cat([mask.index.mask_bits, torch.ones_like(mask.index.mask_bits[:1])])
        pair_mask = pair_mask & bits[which, q_place[:, None], kv_place]
    if mask.kv_valid is not None:
        pair_mask = pair_mask & (kv_place < mask.kv_valid[:, kv_block])[:, None, None]
    return pair_mask


def _mask_of_block(mask: BlockMask) -> Tensor:
    # int64 [B|1, H|1, Nq, Nkv]: row of mask_bits, or M where the block is full or not listed
    index = mask.index
    assert index.mask_bits is not None
    assert index.mask_ids is not None
    assert index.kv_num_full_blocks is not None
    slot = torch.arange(index.kv_indices.shape[-1], device=index.kv_indices.device)
    masked = (slot >= index.kv_num_full_blocks[..., None]) & (slot < index.kv_num_blocks[..., None])
    column = torch.where(masked, index.kv_indices, mask.kv_blocks.num).long()
    which = column.new_full((*column.shape[:-1], mask.kv_blocks.num + 1), index.mask_bits.shape[0])
    which = which.scatter(-1, column, torch.where(masked, index.mask_ids, index.mask_bits.shape[0]).long())
    return which[..., :-1]


def _by_head(x: Tensor, heads: int) -> Tensor:
    # [B, tokens, Hx, D] -> [B, H, tokens, D], at least fp32, kv heads repeated for their query heads
    x = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _logits(q: Tensor, k: Tensor, pair_mask: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-1, -2)).mul_(scale).masked_fill_(~pair_mask, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    # -inf marks a query without kv tokens; replaced by 0, exp(-inf - 0) is 0 as it should be
    return lse.masked_fill(lse == -torch.inf, 0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)
