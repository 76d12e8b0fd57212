"""Forward kernel of gathered attention.

One program per tile of rows of a group: its rows come from up to R query tiles anywhere in the sequence, and every step
takes a packed tile of BLOCK_N keys from the next entries of the group's list, `BLOCK_N / KV_SIZE` of them. Softmax is
online, in base 2.

A list has two parts. Entries before the first short kv tile have KV_SIZE tokens each, at a position that follows from
the number of the tile, so whole steps of them need neither offsets nor masks. The other entries need both; where only
the last tile of the sequence is short, this is at most the last step.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, G groups, R tiles of a group, Kmax list capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_index import Blocks, is_flat
from vsa_kernels.block_sparse.triton_tiles import LN2, LOG2E
from vsa_kernels.gathered.groups import TileGroups, full_entries
from vsa_kernels.launch import capability, cdiv, config, launch, next_power_of_2


@triton.jit
def _load_rows(src, row, m_row, stride_l, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """`[BLOCK, BLOCK_D]` rows of src anywhere in memory; 0 where m_row is false."""
    o_d = tl.arange(0, BLOCK_D)
    p_src = src + (row.to(tl.int64) * stride_l)[:, None] + o_d[None, :]
    if MASKED:
        return tl.load(p_src, mask=m_row[:, None] & (o_d[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        return tl.load(p_src, mask=o_d[None, :] < D, other=0.0)
    else:
        return tl.load(p_src)


@triton.jit(do_not_specialize=["L", "H", "num_groups", "capacity"])
def _gathered_fwd_kernel(
    q, k, v, out, lse,
    members, kv_indices, kv_num_blocks, kv_num_full_blocks, kv_members, order, q_offsets, kv_offsets, scale,
    q_b, q_l, q_h, k_b, k_l, k_h, v_b, v_l, v_h, o_b, o_l, L, H, num_groups, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr, Q_SIZE: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr, KV_SIZE: tl.constexpr, TILEWISE: tl.constexpr, ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_work, i_part = tl.program_id(0) // Q_PARTS, tl.program_id(0) % Q_PARTS
    if ORDERED:
        i_work = tl.load(order + i_work)
    i_bh = i_work // num_groups
    i_b, i_h = i_bh // H, i_bh % H
    # rows of the group's tiles, one tile after the other
    o_m = i_part * BLOCK_M + tl.arange(0, BLOCK_M)
    i_member = o_m // Q_SIZE
    b_tile = tl.load(members + i_work.to(tl.int64) * MEMBERS + i_member, mask=i_member < MEMBERS, other=-1)
    m_m = b_tile >= 0
    q_row = tl.load(q_offsets + b_tile, mask=m_m, other=0) + o_m % Q_SIZE
    m_m = m_m & (q_row < tl.load(q_offsets + b_tile + 1, mask=m_m, other=0))
    # [BLOCK_M, BLOCK_D]
    b_q = _load_rows(q + i_b.to(tl.int64) * q_b + i_h.to(tl.int64) * q_h, q_row, m_m, q_l, D, BLOCK_D, True)
    p_k = k + i_b.to(tl.int64) * k_b + (i_h // GROUP).to(tl.int64) * k_h
    p_v = v + i_b.to(tl.int64) * v_b + (i_h // GROUP).to(tl.int64) * v_h
    p_list = kv_indices + i_work.to(tl.int64) * capacity
    p_bits = kv_members + i_work.to(tl.int64) * capacity if TILEWISE else kv_indices
    slots = tl.load(kv_num_blocks + i_work) * KV_SIZE
    whole = tl.load(kv_num_full_blocks + i_work) * KV_SIZE // BLOCK_N
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    factor = scale * LOG2E
    o_n = tl.arange(0, BLOCK_N)
    # a loop of its own for what needs offsets and masks: the first has neither
    for RAGGED in tl.static_range(0, 2):
        for j in range(whole if RAGGED else 0, tl.cdiv(slots, BLOCK_N) if RAGGED else whole):
            slot = j * BLOCK_N + o_n
            if RAGGED:
                m_n = slot < slots
                b_kv = tl.load(p_list + slot // KV_SIZE, mask=m_n, other=0)
                kv_row = tl.load(kv_offsets + b_kv) + slot % KV_SIZE
                m_n = m_n & (kv_row < tl.load(kv_offsets + b_kv + 1))
            else:
                m_n = slot >= 0
                kv_row = tl.load(p_list + slot // KV_SIZE) * KV_SIZE + slot % KV_SIZE
            # [BLOCK_N, BLOCK_D]
            b_k = _load_rows(p_k, kv_row, m_n, k_l, D, BLOCK_D, RAGGED)
            # [BLOCK_M, BLOCK_N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if RAGGED:
                b_s = tl.where(m_n[None, :], b_s, -float("inf"))
            if TILEWISE:
                b_bits = tl.load(p_bits + slot // KV_SIZE, mask=m_n, other=0)
                b_s = tl.where(((b_bits[None, :] >> i_member[:, None]) & 1) != 0, b_s, -float("inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1) * factor)
            # a row that has seen no token yet stays at -inf; 0 in its place keeps exp2(-inf - max) at 0
            b_from = tl.where(b_new == -float("inf"), 0.0, b_new) if RAGGED or TILEWISE else b_new
            b_p = tl.math.exp2(b_s * factor - b_from[:, None])
            b_rescale = tl.math.exp2(b_max - b_from)
            b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
            b_acc = b_acc * b_rescale[:, None]
            b_max = b_new
            b_v = _load_rows(p_v, kv_row, m_n, v_l, D, BLOCK_D, RAGGED)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    # a query that attends to nothing: out 0 and, from the logarithm of 0, lse -inf
    b_out = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    o_d = tl.arange(0, BLOCK_D)
    p_out = out + i_b.to(tl.int64) * o_b + i_h.to(tl.int64) * D + (q_row.to(tl.int64) * o_l)[:, None] + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & (o_d[None, :] < D))
    tl.store(lse + i_bh.to(tl.int64) * L + q_row, b_max * LN2 + tl.log(b_sum), mask=m_m)


def forward(
    q: Tensor, k: Tensor, v: Tensor, groups: TileGroups, q_blocks: Blocks, kv_blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `gathered_attn`."""
    if _suits_hopper(q, k, v, kv_blocks):
        from vsa_kernels.gathered import hopper_fwd

        return hopper_fwd.forward(q, k, v, groups, q_blocks, kv_blocks, scale)
    return _run(q, k, v, groups, q_blocks, kv_blocks, scale)


def _suits_hopper(q: Tensor, k: Tensor, v: Tensor, kv_blocks: Blocks) -> bool:
    # the kernel of `hopper_fwd` needs Hopper's instructions, tiles of 16, 32 or a multiple of 64 tokens, and k and v
    # that descriptors can address without a copy
    size = kv_blocks.max_size
    return (
        capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] in (64, 128)
        and (size in (16, 32) or size % 64 == 0)
        and q.stride(-1) == 1
        and is_flat(k)
        and is_flat(v)
    )


def _run(
    q: Tensor, k: Tensor, v: Tensor, groups: TileGroups, q_blocks: Blocks, kv_blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    B, L, H, D = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    lists = [
        None if x is None else x.contiguous()
        for x in (
            *(groups.members, groups.kv_indices, groups.kv_num_blocks),
            *(full_entries(groups, kv_blocks), groups.kv_members, groups.order),
        )
    ]
    out = q.new_empty((B, L, H, D))
    lse = q.new_empty((B, H, L), dtype=torch.float32)
    num_groups, size = groups.members.shape[2:]
    options = config("gathered_fwd", D, q.dtype, q.device)
    rows = size * q_blocks.max_size
    block = max(16, min(options.pop("BLOCK_M"), next_power_of_2(rows)))
    parts = cdiv(rows, block)
    launch(
        _gathered_fwd_kernel, (B * H * num_groups * parts,),
        q, k, v, out, lse, *lists, q_blocks.offsets, kv_blocks.offsets, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
        L, H, num_groups, groups.kv_indices.shape[-1],
        GROUP=H // k.shape[2], D=D, BLOCK_D=max(16, next_power_of_2(D)),
        BLOCK_M=block, Q_PARTS=parts, Q_SIZE=q_blocks.max_size, MEMBERS=size, KV_SIZE=kv_blocks.max_size,
        TILEWISE=groups.kv_members is not None, ORDERED=groups.order is not None, PRECISION="ieee", **options,
    )  # fmt: skip
    return out, lse
