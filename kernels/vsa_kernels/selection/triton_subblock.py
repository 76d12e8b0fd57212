"""Scores of kv blocks from smaller blocks: the softmax of sub-block logits, or their log-sum-exp, by cells.

A program keeps the sub-blocks of some query blocks and passes over those of all kv blocks: once for the log-sum-exp of
each row where the form is a softmax, then once for the cells. No tensor of all sub-block logits exists.

B batch, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks, Sq / Skv their sub-blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from vsa_kernels.block_index import Blocks
from vsa_kernels.block_sparse.triton_tiles import Tiles, described
from vsa_kernels.launch import cdiv, launch, next_power_of_2

_LOG2E = 1.4426950408889634
_STAGES = 2


@triton.jit
def _places(offsets, first, num, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Sub-block of each of BLOCK slots, GROUP slots to a block from block `first` on, and whether the slot has one."""
    slot = tl.arange(0, BLOCK)
    block = first + slot // GROUP
    start = tl.load(offsets + block, mask=block < num, other=0)
    stop = tl.load(offsets + block + 1, mask=block < num, other=0)
    place = start + slot % GROUP
    return place, place < stop


@triton.jit
def _logits(
    q, k_mean, bias, kv_offsets, candidates, i_b, i_h, first_q, first_kv, num_q, num_kv, subs_kv, Hkv, factor,
    GROUP_Q: tl.constexpr, GROUP_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Logits `[ROWS, ROWS]` in base 2 of the resident queries with the keys of the kv blocks from `first_kv` on."""
    o_d = tl.arange(0, BLOCK_D)
    if EVEN:
        first = first_kv * GROUP_KV
        o_kv = first + tl.arange(0, ROWS)
        b_bias = tl.load(bias + o_kv)
    else:
        o_kv, m_kv = _places(kv_offsets, first_kv, num_kv, ROWS, GROUP_KV)
        b_bias = tl.load(bias + o_kv, mask=m_kv, other=float("-inf"))
    if DESC:
        b_k = k_mean.load([(i_b * subs_kv + first).to(tl.int32), (i_h * D).to(tl.int32)])
    else:
        p_k = k_mean + (i_b.to(tl.int64) * subs_kv * Hkv + i_h) * D + o_kv[:, None].to(tl.int64) * (Hkv * D)
        m_k = (o_d < D)[None, :] if EVEN else m_kv[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_d[None, :], mask=m_k, other=0.0)
    b_s = tl.dot(q, tl.trans(b_k), input_precision="ieee") * factor + b_bias[None, :]
    if candidates is not None:
        block_q = first_q + tl.arange(0, ROWS) // GROUP_Q
        block_kv = first_kv + tl.arange(0, ROWS) // GROUP_KV
        inside = (block_q[:, None] < num_q) & (block_kv[None, :] < num_kv)
        listed = tl.load(candidates + block_q[:, None] * num_kv + block_kv[None, :], mask=inside, other=0)
        b_s = tl.where(listed != 0, b_s, float("-inf"))
    return b_s


@triton.jit
def _subblock_kernel(
    q_mean, k_mean, bias, out, q_offsets, kv_offsets, candidates, factor, H, num_q, num_kv, subs_q, subs_kv,
    HEADS: tl.constexpr, GROUP_Q: tl.constexpr, GROUP_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, SOFTMAX: tl.constexpr, EVEN: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    # query and kv blocks of a tile of logits
    BLOCKS_Q: tl.constexpr = ROWS // GROUP_Q
    BLOCKS_KV: tl.constexpr = ROWS // GROUP_KV
    groups = tl.cdiv(num_q, BLOCKS_Q)
    i_row, first_q = tl.program_id(0) // groups, (tl.program_id(0) % groups) * BLOCKS_Q
    i_b, i_h = i_row // H, i_row % H
    Hkv, i_hk = H // HEADS, i_h // HEADS
    o_q, m_q = _places(q_offsets, first_q, num_q, ROWS, GROUP_Q)
    o_d = tl.arange(0, BLOCK_D)
    p_q = q_mean + (i_b.to(tl.int64) * subs_q * H + i_h) * D
    b_q = tl.load(p_q + o_q[:, None].to(tl.int64) * (H * D) + o_d[None, :],
                  mask=m_q[:, None] & (o_d[None, :] < D), other=0.0)  # fmt: skip
    lse = tl.zeros([ROWS], dtype=tl.float32)
    if SOFTMAX:
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        for first_kv in range(0, num_kv, BLOCKS_KV):
            b_s = _logits(b_q, k_mean, bias, kv_offsets, candidates, i_b, i_hk, first_q, first_kv, num_q, num_kv,
                          subs_kv, Hkv, factor, GROUP_Q, GROUP_KV, D, BLOCK_D, ROWS, EVEN, DESC)  # fmt: skip
            new = tl.maximum(top, tl.max(b_s, 1))
            # a row without a key so far
            base = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(b_s - base[:, None]), 1)
            top = new
        # a row without candidates has only cells of 0; NaN in the logits reaches the scores
        lse = tl.where(total == 0, 0.0, top + tl.log2(total))
    o_i = first_q + tl.arange(0, BLOCKS_Q)
    m_i = o_i < num_q
    sizes = tl.load(q_offsets + o_i + 1, mask=m_i, other=1) - tl.load(q_offsets + o_i, mask=m_i, other=0)
    for first_kv in range(0, num_kv, BLOCKS_KV):
        b_s = _logits(b_q, k_mean, bias, kv_offsets, candidates, i_b, i_hk, first_q, first_kv, num_q, num_kv,
                      subs_kv, Hkv, factor, GROUP_Q, GROUP_KV, D, BLOCK_D, ROWS, EVEN, DESC)  # fmt: skip
        if SOFTMAX:
            cells = tl.where(m_q[:, None], tl.exp2(b_s - lse[:, None]), 0.0)
            cells = tl.sum(tl.reshape(cells, [ROWS, BLOCKS_KV, GROUP_KV]), 2)
            b_out = tl.sum(tl.reshape(cells, [BLOCKS_Q, GROUP_Q, BLOCKS_KV]), 1) / sizes[:, None].to(tl.float32)
        else:
            b_s = tl.where(m_q[:, None], b_s, float("-inf"))
            cells = tl.max(tl.reshape(b_s, [ROWS, BLOCKS_KV, GROUP_KV]), 2)
            cell_max = tl.max(tl.reshape(cells, [BLOCKS_Q, GROUP_Q, BLOCKS_KV]), 1)
            cell_max = tl.where(cell_max == float("-inf"), 0.0, cell_max)
            shift = tl.broadcast_to(cell_max[:, None, :, None], [BLOCKS_Q, GROUP_Q, BLOCKS_KV, GROUP_KV])
            cells = tl.exp2(b_s - tl.reshape(shift, [ROWS, ROWS]))
            cells = tl.sum(tl.reshape(cells, [ROWS, BLOCKS_KV, GROUP_KV]), 2)
            b_out = tl.log2(tl.sum(tl.reshape(cells, [BLOCKS_Q, GROUP_Q, BLOCKS_KV]), 1)) + cell_max
            # natural logarithm
            b_out = b_out * 0.6931471805599453
        o_j = first_kv + tl.arange(0, BLOCKS_KV)
        p_out = out + (i_row.to(tl.int64) * num_q + o_i[:, None]) * num_kv + o_j[None, :]
        tl.store(p_out, b_out, mask=m_i[:, None] & (o_j[None, :] < num_kv))


def scores(
    q_mean: Tensor, k_mean: Tensor, q_groups: Blocks, kv_groups: Blocks, bias: Tensor, candidates: Tensor | None,
    scale: float, softmax: bool, *, half: bool,
) -> Tensor:  # fmt: skip
    """Scores fp32 `[B, H, Nq, Nkv]`; see `api.subblock_scores`.

    Args:
        q_mean: fp32 `[B, Sq, H, D]`.
        k_mean: fp32 `[B, Skv, Hkv, D]`.
        q_groups, kv_groups: sub-blocks of each block.
        bias: fp32 `[Skv]`, added to the logits.
        candidates: bool `[Nq, Nkv]` contiguous, or None.
        scale: factor of the logits.
        softmax: whether the form is a softmax.
        half: whether the means are rounded to bf16.
    """
    group_q, group_kv = next_power_of_2(q_groups.max_size), next_power_of_2(kv_groups.max_size)
    # larger tiles of fp32 means would not fit into registers and shared memory
    rows, dtype = (128, torch.bfloat16) if half else (max(32, group_q, group_kv), torch.float32)
    even = kv_groups.min_size == group_kv
    if half and not even:
        # masked loads in tiles of 128 leave too few registers, and from D=256 on too little shared memory
        rows = max(64, group_q, group_kv)
    q_mean, k_mean = (x.to(dtype).contiguous() for x in (q_mean, k_mean))
    B, subs_q, H, D = q_mean.shape
    out = q_mean.new_empty((B, H, q_groups.num, kv_groups.num), dtype=bias.dtype)
    if even:
        # whole tiles of keys, so that no load of them needs a mask
        more = -k_mean.shape[1] % rows
        k_mean, bias = pad(k_mean, (0, 0, 0, 0, 0, more)), pad(bias, (0, more), value=-torch.inf)
    subs_kv, Hkv = k_mean.shape[1:3]
    keys = described((k_mean,), Tiles(rows, 1, rows, True, subs_kv // rows), None) if even else None
    launch(
        _subblock_kernel, (B * H * cdiv(q_groups.num, rows // group_q),),
        q_mean, keys[0] if keys else k_mean, bias * _LOG2E, out, q_groups.offsets, kv_groups.offsets, candidates,
        scale * _LOG2E, H, q_groups.num, kv_groups.num, subs_q, subs_kv,
        HEADS=H // Hkv, GROUP_Q=group_q, GROUP_KV=group_kv, D=D, BLOCK_D=max(16, next_power_of_2(D)), ROWS=rows,
        SOFTMAX=softmax, EVEN=even, DESC=keys is not None, num_warps=8 if half else 4, num_stages=_STAGES,
    )  # fmt: skip
    return out
