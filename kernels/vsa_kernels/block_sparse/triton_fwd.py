"""Forward kernel of block-sparse attention.

One program per tile of queries reads the list of its query block, first the full entries and then the masked ones. The
softmax is online, in base 2.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_masks import fine_of, hide, load_words
from vsa_kernels.block_sparse.triton_tiles import (
    LN2,
    LOG2E,
    Plan,
    described,
    lists_of,
    load_listed,
    load_tile,
    offsets_of,
    rows_ready,
    span,
    store_tile,
)
from vsa_kernels.launch import launch


@triton.jit(do_not_specialize=[
    "idx_b", "idx_h", "idx_n", "num_b", "num_h", "full_b", "full_h", "ids_b", "ids_h", "ids_n",
    "L", "S", "H", "num_q", "num_kv",
])  # fmt: skip
def _fwd_kernel(
    q, k, v, out, lse,
    kv_indices, kv_num_blocks, kv_num_full_blocks, mask_ids, mask_words, q_offsets, kv_offsets, kv_valid, scale,
    q_b, q_l, q_h, k_b, k_l, k_h, v_b, v_l, v_h, o_b, o_l, idx_b, idx_h, idx_n, num_b, num_h,
    full_b, full_h, ids_b, ids_h, ids_n, word_m, word_c, L, S, H, num_q, num_kv,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr, Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_PARTS: tl.constexpr, KV_SIZE: tl.constexpr, EVEN_KV: tl.constexpr,
    LISTED: tl.constexpr, FINE: tl.constexpr, HAS_VALID: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # query tiles of one head run side by side and share its keys and values in L2
    i_tile, i_bh = tl.program_id(0) % (num_q * Q_PARTS), tl.program_id(0) // (num_q * Q_PARTS)
    i_b, i_h = i_bh // H, i_bh % H
    i_n, i_part = i_tile // Q_PARTS, i_tile % Q_PARTS
    q_start, q_size, _ = span(q_offsets, i_n, i_part, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
    if LISTED:
        p_list = kv_indices + i_b.to(tl.int64) * idx_b + i_h.to(tl.int64) * idx_h + i_n.to(tl.int64) * idx_n
        listed = tl.load(kv_num_blocks + i_b.to(tl.int64) * num_b + i_h.to(tl.int64) * num_h + i_n)
    else:
        p_list = kv_indices
        listed = num_kv
    if FINE:
        p_ids = mask_ids + i_b.to(tl.int64) * ids_b + i_h.to(tl.int64) * ids_h + i_n.to(tl.int64) * ids_n
        full = tl.load(kv_num_full_blocks + i_b.to(tl.int64) * full_b + i_h.to(tl.int64) * full_h + i_n)
    else:
        full = listed
    i_hk = i_h // GROUP
    # [BLOCK_M, BLOCK_D]
    b_q = load_tile(q, i_b, i_h, q_start, q_size, q_b, q_l, q_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    factor = scale * LOG2E
    o_n = tl.arange(0, BLOCK_N)
    # a loop of its own for the masked entries: the first is the same with and without them
    for MASKED in tl.static_range(0, 2 if FINE else 1):
        for j in range((full if MASKED else 0) * KV_PARTS, (listed if MASKED else full) * KV_PARTS):
            i_kp = j % KV_PARTS
            i_kv = tl.load(p_list + j // KV_PARTS) if LISTED else j // KV_PARTS
            if DESC and EVEN_KV:
                kv_start, kv_size = 0, BLOCK_N
            else:
                kv_start, kv_size, _ = span(kv_offsets, i_kv, i_kp, S, KV_SIZE, BLOCK_N, KV_SIZE > 0)
            if HAS_VALID:
                kv_size = tl.minimum(kv_size, tl.load(kv_valid + i_b.to(tl.int64) * num_kv + i_kv) - i_kp * BLOCK_N)
            if MASKED:
                # early: it is on its way during the first product
                b_words = load_words(
                    mask_words, tl.load(p_ids + j // KV_PARTS), i_part * BLOCK_M, q_size, i_kp * BLOCK_N,
                    word_m, word_c, BLOCK_M, EVEN_Q,
                )  # fmt: skip
            # [BLOCK_N, BLOCK_D]
            b_k = load_listed(
                k, i_b, i_hk, i_kv, i_kp, num_kv, kv_start, kv_size, k_b, k_l, k_h,
                D, BLOCK_N, BLOCK_D, KV_PARTS, EVEN_KV, DESC,
            )  # fmt: skip
            # [BLOCK_M, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if not EVEN_KV and kv_size < BLOCK_N:
                b_s = tl.where(o_n[None, :] < kv_size, b_s, -float("inf"))
            if MASKED:
                b_s = hide(b_s, b_words, i_kp * BLOCK_N, BLOCK_N)
            b_new = tl.maximum(b_max, tl.max(b_s, 1) * factor)
            # a row that has seen no token yet stays at -inf; 0 in its place keeps exp2(-inf - max) at 0
            b_from = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED or not EVEN_KV else b_new
            b_p = tl.math.exp2(b_s * factor - b_from[:, None])
            b_rescale = tl.math.exp2(b_max - b_from)
            b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
            b_acc = b_acc * b_rescale[:, None]
            b_max = b_new
            # loaded late: v takes the shared memory of k, and twice as many programs fit
            b_v = load_listed(
                v, i_b, i_hk, i_kv, i_kp, num_kv, kv_start, kv_size, v_b, v_l, v_h,
                D, BLOCK_N, BLOCK_D, KV_PARTS, EVEN_KV, DESC,
            )  # fmt: skip
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    # a query without kv tokens: out 0 and, from the logarithm of 0, lse -inf
    b_out = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    store_tile(out, b_out, i_b, i_h, q_start, q_size, o_b, o_l, D, D, BLOCK_M, BLOCK_D)
    o_m = tl.arange(0, BLOCK_M)
    tl.store(lse + i_bh.to(tl.int64) * L + q_start + o_m, b_max * LN2 + tl.log(b_sum), mask=o_m < q_size)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    return _run(q, k, v, mask, scale, Plan.of("fwd", q, k, mask, False))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, *, half: bool) -> tuple[Tensor, Tensor]:
    """Attention over all tokens by the same kernel: the coarse stage on block means.

    Args:
        q: fp32 `[B, L, H, D]`.
        k: fp32 `[B, S, Hkv, D]`.
        v: fp32 `[B, S, Hkv, D]`.
        scale: factor of the logits.
        half: whether the pooled tokens were half precision, so that tf32 products are accurate enough.
    """
    return _run(q, k, v, None, scale, Plan.of("coarse_fwd", q, k, None, half))


def _run(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float, plan: Plan) -> tuple[Tensor, Tensor]:
    B, L, H, D = q.shape
    q, k, v = rows_ready(q), rows_ready(k), rows_ready(v)
    out = q.new_empty((B, L, H, D))
    lse = q.new_empty((B, H, L), dtype=torch.float32)
    (lists, list_at), (fine, fine_at), blocks = lists_of(mask), fine_of(mask), offsets_of(mask)
    kv = described((k, v), plan.kv, *blocks[1:]) if plan.describe else None
    grid = (plan.q.num * plan.q.parts * B * H,)
    launch(
        _fwd_kernel, grid,
        q, *(kv or (k, v)), out, lse, *lists, *fine, *blocks, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2], *list_at, *fine_at,
        L, k.shape[1], H, plan.q.num, plan.kv.num, DESC=kv is not None, **plan.constants,
    )  # fmt: skip
    return out, lse
