"""Backward kernels of block-sparse attention, split so that no two programs write the same gradient: there are no
atomics, and repeated runs give the same bits.

`_dq_kernel` reads the lists of the forward, `_dkv_kernel` the transposed lists, each first the full entries and then
the masked ones; both recompute the logits exactly as the forward did. With p = exp(s - lse) and
delta = rowsum(dout * out) - dlse: dv = p^T dout, ds = p * (dout v^T - delta), dq = scale * ds k, dk = scale * ds^T q.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, N blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_sparse.dispatch import NO_SHARES, Shares
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_index import long_first, transpose
from vsa_kernels.block_sparse.triton_masks import fine_of, hide, load_words, pack_words
from vsa_kernels.block_sparse.triton_tiles import (
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
from vsa_kernels.launch import cdiv, launch, next_power_of_2


@triton.jit
def _load_stats(lse, delta, i_bh, L, start, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """lse in base 2 and delta `[BLOCK]`; an empty query (lse -inf) and a row past the block give p = 0."""
    o_m = tl.arange(0, BLOCK)
    at = i_bh.to(tl.int64) * L + start
    if EVEN:
        b_lse = tl.load(lse + at + o_m)
        b_delta = tl.load(delta + at + o_m)
    else:
        b_lse = tl.load(lse + at + o_m, mask=o_m < size, other=float("inf"))
        b_delta = tl.load(delta + at + o_m, mask=o_m < size, other=0.0)
    # the logits of an empty query are all -inf: exp2(-inf - 0) = 0
    return tl.where(b_lse == -float("inf"), 0.0, b_lse) * LOG2E, b_delta


@triton.jit
def _share(share, i_b, i_n, i_h, N, H, whole, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What each token of a block gets from the gradient of the block's mean, `[BLOCK_D]`."""
    o_d = tl.arange(0, BLOCK_D)
    at = ((i_b.to(tl.int64) * N + i_n) * H + i_h) * D
    return tl.load(share + at + o_d, mask=o_d < D, other=0.0) / whole


@triton.jit(do_not_specialize=[
    "idx_b", "idx_h", "idx_n", "num_b", "num_h", "full_b", "full_h", "ids_b", "ids_h", "ids_n",
    "L", "S", "H", "num_q", "num_kv",
])  # fmt: skip
def _dq_kernel(
    q, k, v, dout, lse, delta, dq, q_share,
    kv_indices, kv_num_blocks, kv_num_full_blocks, mask_ids, mask_words, q_offsets, kv_offsets, kv_valid, scale,
    q_b, q_l, q_h, k_b, k_l, k_h, v_b, v_l, v_h, do_b, do_l, do_h, dq_b, dq_l, idx_b, idx_h, idx_n, num_b, num_h,
    full_b, full_h, ids_b, ids_h, ids_n, word_m, word_c, L, S, H, num_q, num_kv,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr, Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_PARTS: tl.constexpr, KV_SIZE: tl.constexpr, EVEN_KV: tl.constexpr,
    LISTED: tl.constexpr, FINE: tl.constexpr, HAS_VALID: tl.constexpr, SHARED: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_tile, i_bh = tl.program_id(0) % (num_q * Q_PARTS), tl.program_id(0) // (num_q * Q_PARTS)
    i_b, i_h = i_bh // H, i_bh % H
    i_n, i_part = i_tile // Q_PARTS, i_tile % Q_PARTS
    i_hk = i_h // GROUP
    q_start, q_size, whole = span(q_offsets, i_n, i_part, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
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
    # [BLOCK_M, BLOCK_D]
    b_q = load_tile(q, i_b, i_h, q_start, q_size, q_b, q_l, q_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_do = load_tile(dout, i_b, i_h, q_start, q_size, do_b, do_l, do_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_lse, b_delta = _load_stats(lse, delta, i_bh, L, q_start, q_size, BLOCK_M, EVEN_Q)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    factor = scale * LOG2E
    o_n = tl.arange(0, BLOCK_N)
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
                b_words = load_words(
                    mask_words, tl.load(p_ids + j // KV_PARTS), i_part * BLOCK_M, q_size, i_kp * BLOCK_N,
                    word_m, word_c, BLOCK_M, EVEN_Q,
                )  # fmt: skip
            # [BLOCK_N, BLOCK_D]
            b_k = load_listed(
                k, i_b, i_hk, i_kv, i_kp, num_kv, kv_start, kv_size, k_b, k_l, k_h,
                D, BLOCK_N, BLOCK_D, KV_PARTS, EVEN_KV, DESC,
            )  # fmt: skip
            b_v = load_listed(
                v, i_b, i_hk, i_kv, i_kp, num_kv, kv_start, kv_size, v_b, v_l, v_h,
                D, BLOCK_N, BLOCK_D, KV_PARTS, EVEN_KV, DESC,
            )  # fmt: skip
            # [BLOCK_M, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            if not EVEN_KV and kv_size < BLOCK_N:
                b_s = tl.where(o_n[None, :] < kv_size, b_s, -float("inf"))
            if MASKED:
                b_s = hide(b_s, b_words, i_kp * BLOCK_N, BLOCK_N)
            b_p = tl.math.exp2(b_s * factor - b_lse[:, None])
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    b_dq *= scale
    if SHARED:
        b_dq += _share(q_share, i_b, i_n, i_h, num_q, H, whole, D, BLOCK_D)[None, :]
    store_tile(dq, b_dq, i_b, i_h, q_start, q_size, dq_b, dq_l, D, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["row_b", "row_h", "at_b", "at_h", "L", "S", "H", "num_q", "num_kv"])
def _dkv_kernel(
    q, k, v, dout, lse, delta, dk, dv, k_share, v_share,
    order, rows, row_offsets, fine_rows, fine_offsets, fine_ids, mask_words, q_offsets, kv_offsets, kv_valid, scale,
    q_b, q_l, q_h, k_b, k_l, k_h, v_b, v_l, v_h, do_b, do_l, do_h, dk_b, dk_l, row_b, row_h, at_b, at_h,
    word_m, word_c, L, S, H, num_q, num_kv,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr, Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_PARTS: tl.constexpr, KV_SIZE: tl.constexpr, EVEN_KV: tl.constexpr,
    LISTED: tl.constexpr, FINE: tl.constexpr, HAS_VALID: tl.constexpr, SHARED: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr, DP_FIRST: tl.constexpr,
):  # fmt: skip
    i_column, i_part = tl.program_id(0) // KV_PARTS, tl.program_id(0) % KV_PARTS
    if LISTED:
        i_column = tl.load(order + i_column)
    i_bh, i_n = i_column // num_kv, i_column % num_kv
    Hkv = H // GROUP
    i_b, i_hk = i_bh // Hkv, i_bh % Hkv
    kv_start, kv_size, whole = span(kv_offsets, i_n, i_part, S, KV_SIZE, BLOCK_N, KV_SIZE > 0)
    # rows past the block are not written; of those inside, the ones past kv_valid get zero
    kv_seen = kv_size
    if HAS_VALID:
        kv_seen = tl.minimum(kv_size, tl.load(kv_valid + i_b.to(tl.int64) * num_kv + i_n) - i_part * BLOCK_N)
    # [BLOCK_N, BLOCK_D]
    b_k = load_tile(k, i_b, i_hk, kv_start, kv_seen, k_b, k_l, k_h, D, BLOCK_N, BLOCK_D, EVEN_KV)
    b_v = load_tile(v, i_b, i_hk, kv_start, kv_seen, v_b, v_l, v_h, D, BLOCK_N, BLOCK_D, EVEN_KV)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    factor = scale * LOG2E
    for g in range(GROUP):
        i_h = i_hk * GROUP + g
        for MASKED in tl.static_range(0, 2 if FINE else 1):
            if LISTED:
                p_at = fine_offsets if MASKED else row_offsets
                p_at += i_b.to(tl.int64) * at_b + i_h.to(tl.int64) * at_h + i_n
                first = tl.load(p_at)
                listed = tl.load(p_at + 1) - first
                at = i_b.to(tl.int64) * row_b + i_h.to(tl.int64) * row_h + first
                p_rows = (fine_rows if MASKED else rows) + at
            else:
                p_rows = rows
                listed = num_q
            for j in range(listed * Q_PARTS):
                i_qp = j % Q_PARTS
                i_q = tl.load(p_rows + j // Q_PARTS) if LISTED else j // Q_PARTS
                q_start, q_size, _ = span(q_offsets, i_q, i_qp, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
                if MASKED:
                    b_words = load_words(
                        mask_words, tl.load(fine_ids + at + j // Q_PARTS), i_part * BLOCK_N, kv_seen, i_qp * BLOCK_M,
                        word_m, word_c, BLOCK_N, EVEN_KV,
                    )  # fmt: skip
                # [BLOCK_M, BLOCK_D]
                b_q = load_listed(
                    q, i_b, i_h, i_q, i_qp, num_q, q_start, q_size, q_b, q_l, q_h,
                    D, BLOCK_M, BLOCK_D, Q_PARTS, EVEN_Q, DESC,
                )  # fmt: skip
                b_do = load_listed(
                    dout, i_b, i_h, i_q, i_qp, num_q, q_start, q_size, do_b, do_l, do_h,
                    D, BLOCK_M, BLOCK_D, Q_PARTS, EVEN_Q, DESC,
                )  # fmt: skip
                b_lse, b_delta = _load_stats(lse, delta, i_b * H + i_h, L, q_start, q_size, BLOCK_M, EVEN_Q)
                # [BLOCK_N, BLOCK_M]
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
                if MASKED:
                    b_s = hide(b_s, b_words, i_qp * BLOCK_M, BLOCK_M)
                # both logit products first: faster where registers allow
                if DP_FIRST:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                b_p = tl.math.exp2(b_s * factor - b_lse[None, :])
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                if not DP_FIRST:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                b_ds = b_p * (b_dp - b_delta[None, :])
                b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    b_dk *= scale
    if HAS_VALID:
        m_seen = tl.arange(0, BLOCK_N)[:, None] < kv_seen
        b_dk = tl.where(m_seen, b_dk, 0.0)
        b_dv = tl.where(m_seen, b_dv, 0.0)
    if SHARED:
        b_dk += _share(k_share, i_b, i_n, i_hk, num_kv, Hkv, whole, D, BLOCK_D)[None, :]
        b_dv += _share(v_share, i_b, i_n, i_hk, num_kv, Hkv, whole, D, BLOCK_D)[None, :]
    store_tile(dk, b_dk, i_b, i_hk, kv_start, kv_size, dk_b, dk_l, D, D, BLOCK_N, BLOCK_D)
    store_tile(dv, b_dv, i_b, i_hk, kv_start, kv_size, dk_b, dk_l, D, D, BLOCK_N, BLOCK_D)


@triton.jit
def _delta_kernel(
    dout, out, lse, dlse, delta, do_b, do_l, do_h, o_b, o_l, L, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_h, i_tile, i_b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1)
    start = i_tile * BLOCK
    size = tl.minimum(L - start, BLOCK)
    b_do = load_tile(dout, i_b, i_h, start, size, do_b, do_l, do_h, D, BLOCK, BLOCK_D, False).to(tl.float32)
    b_o = load_tile(out, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK, BLOCK_D, False).to(tl.float32)
    o_m = tl.arange(0, BLOCK)
    at = (i_b.to(tl.int64) * H + i_h) * L + start + o_m
    b_delta = tl.sum(b_do * b_o, 1)
    if dlse is not None:
        b_delta -= tl.load(dlse + at, mask=o_m < size, other=0.0)
    # the dlse of a query without kv tokens may be anything and must not reach others
    empty = tl.load(lse + at, mask=o_m < size, other=0.0) == -float("inf")
    tl.store(delta + at, tl.where(empty, 0.0, b_delta), mask=o_m < size)


def delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, fp32 `[B, H, L]`, of outputs `[B, L, H, D]`; 0 where lse is -inf."""
    B, L, H, D = out.shape
    dout, dlse = rows_ready(dout), None if dlse is None else dlse.contiguous()
    result = torch.empty_like(lse)
    # half as many rows when they are longer: with 64, ptxas spills registers for sm_100
    rows = 64 if D <= 128 and out.element_size() == 2 else 32
    launch(
        _delta_kernel, (cdiv(L, rows) * H, B),
        dout, out, lse, dlse, result, *dout.stride()[:3], *out.stride()[:2], L, H,
        D=D, BLOCK_D=max(16, next_power_of_2(D)), BLOCK=rows, num_warps=4,
    )  # fmt: skip
    return result


def backward(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    shares: Shares,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; arguments as in `dispatch.backward`."""
    return _run(dout, delta, lse, q, k, v, mask, scale, False, shares)


def dq(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    share: Tensor | None,
) -> Tensor:  # fmt: skip
    """dq alone; arguments as in `dispatch.backward`."""
    q, k, v, dout = rows_ready(q), rows_ready(k), rows_ready(v), rows_ready(dout)
    return _run_dq(dout, delta, lse, q, k, v, mask, scale, Plan.of("dq", q, k, mask, False), share)


def dkv(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    shares: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv alone; arguments as in `dispatch.backward`."""
    q, k, v, dout = rows_ready(q), rows_ready(k), rows_ready(v), rows_ready(dout)
    return _run_dkv(dout, delta, lse, q, k, v, mask, scale, Plan.of("dkv", q, k, mask, False), shares)


def dense(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, *, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `triton_fwd.dense`; arguments as there and in `dispatch.backward`."""
    return _run(dout, delta, lse, q, k, v, None, scale, half, NO_SHARES)


def _run(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float,
    half: bool, shares: Shares,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, dout = rows_ready(q), rows_ready(k), rows_ready(v), rows_ready(dout)
    stage = "coarse_" if mask is None else ""
    of_q = _run_dq(dout, delta, lse, q, k, v, mask, scale, Plan.of(f"{stage}dq", q, k, mask, half), shares[0])
    return of_q, *_run_dkv(dout, delta, lse, q, k, v, mask, scale, Plan.of(f"{stage}dkv", q, k, mask, half), shares[1:])


def _run_dq(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float,
    plan: Plan, share: Tensor | None,
) -> Tensor:  # fmt: skip
    B, L, H, D = q.shape
    dq = q.new_empty((B, L, H, D))
    (lists, list_at), (fine, fine_at), blocks = lists_of(mask), fine_of(mask), offsets_of(mask)
    kv = described((k, v), plan.kv, *blocks[1:]) if plan.describe else None
    launch(
        _dq_kernel, (plan.q.num * plan.q.parts * B * H,),
        q, *(kv or (k, v)), dout, lse, delta, dq, share, *lists, *fine, *blocks, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dq.stride()[:2], *list_at, *fine_at,
        L, k.shape[1], H, plan.q.num, plan.kv.num,
        SHARED=share is not None, DESC=kv is not None, **plan.constants,
    )  # fmt: skip
    return dq


def _run_dkv(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float,
    plan: Plan, shares: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, S, Hkv, D = k.shape
    dk, dv = k.new_empty((B, S, Hkv, D)), v.new_empty((B, S, Hkv, D))
    order, lists, list_at, blocks = None, (None, None), (0, 0, 0, 0), offsets_of(mask)
    fine, word_at = (None, None, None, None), (0, 0)
    if mask is not None:
        index = mask.index
        full = index.kv_num_blocks if index.kv_num_full_blocks is None else index.kv_num_full_blocks
        columns, masked = transpose(index.kv_indices, full, plan.kv.num), None
        lists = (columns.rows, columns.row_offsets)
        list_at = tuple(x.stride(d) if x.shape[d] > 1 else 0 for x in lists for d in (0, 1))
        if index.mask_bits is not None:
            # the same shapes as for the full entries
            masked = transpose(index.kv_indices, index.kv_num_blocks, plan.kv.num, first=full, mask_ids=index.mask_ids)
            words = pack_words(index.mask_bits.transpose(1, 2))
            fine, word_at = (masked.rows, masked.row_offsets, masked.ids, words), words.stride()[:2]
        order = long_first(columns, masked, B, q.shape[2], plan.constants["GROUP"])
    qo = described((q, dout), plan.q, blocks[0]) if plan.describe else None
    in_q, in_do = qo or (q, dout)
    launch(
        _dkv_kernel, (plan.kv.num * plan.kv.parts * B * Hkv,),
        in_q, k, v, in_do, lse, delta, dk, dv, *shares, order, *lists, *fine, *blocks, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:2], *list_at, *word_at,
        q.shape[1], S, q.shape[2], plan.q.num, plan.kv.num,
        SHARED=shares[0] is not None, DESC=qo is not None, **plan.constants,
    )  # fmt: skip
    return dk, dv
