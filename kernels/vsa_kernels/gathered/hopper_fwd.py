"""Forward kernel of gathered attention on Hopper, in Gluon.

It computes what `triton_fwd` computes, with the structure of `block_sparse.hopper_fwd`: one warpgroup per 64 rows
multiplies 64 keys at a time, and the other programs of the multiprocessor hide its waits. The difference is the source
of the rows. The keys of a step are the tokens of `64 / KV_SIZE` list entries, and one bulk copy per entry fills its
part of the slot; an entry of more than 64 tokens takes several steps. Queries are read once, by addresses.

A slot `[64, D]` in the widest swizzle is `D / 64` panels `[64, 64]`, one after the other, and an entry's part of a
panel is contiguous: that is what a copy writes.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, G groups, R tiles of a group, Kmax list capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vsa_kernels.block_index import Blocks
from vsa_kernels.block_sparse.hopper_fwd import LN2, LOG2E, ROWS, SHARED_LAYOUT, _scale_rows, cta_barrier
from vsa_kernels.gathered.groups import TileGroups, full_entries
from vsa_kernels.launch import config, launch

# columns of a panel: a row of them fills the swizzle
COLUMNS = gl.constexpr(64)
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def _copy_keys(
    x, bar, smem, slot, p_list, kv_offsets, j, listed, full, i_b, col, pred,
    KV_SIZE: gl.constexpr, EVEN: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the keys of step j into a slot of smem `[SLOTS, 64, D]`; past the list its last entry."""
    PARTS: gl.constexpr = max(ROWS // KV_SIZE, 1)
    STEPS: gl.constexpr = max(KV_SIZE // ROWS, 1)
    PANELS: gl.constexpr = D // COLUMNS
    parts = smem._reinterpret(x.dtype, [SLOTS * PANELS * PARTS, 1, ROWS // PARTS, COLUMNS], PANEL_LAYOUT)
    for i in gl.static_range(PARTS):
        entry = gl.minimum(j // STEPS * PARTS + i, listed - 1)
        tile = gl.load(p_list + entry, mask=pred, other=0)
        row = tile * KV_SIZE
        # tiles before the first short one stand where their number says
        if not EVEN:
            row = gl.where(entry < full, row, gl.load(kv_offsets + tile, mask=pred & (entry >= full), other=0))
        row += j % STEPS * ROWS
        for p in gl.static_range(PANELS):
            part = parts.index((slot * PANELS + p) * PARTS + i)
            tma.async_copy_global_to_shared(x, [i_b, row, col + p * COLUMNS], bar, part, pred=pred)


@gluon.jit
def _query_rows(members, q_offsets, o_m, Q_SIZE: gl.constexpr, MEMBERS: gl.constexpr):
    """Token of each row of a group, and whether there is one."""
    i_member = o_m // Q_SIZE
    b_tile = gl.load(members + i_member, mask=i_member < MEMBERS, other=-1)
    m_m = b_tile >= 0
    row = gl.load(q_offsets + b_tile, mask=m_m, other=0) + o_m % Q_SIZE
    return row, m_m & (row < gl.load(q_offsets + b_tile + 1, mask=m_m, other=0))


@gluon.jit(do_not_specialize=["L", "H", "num_groups", "capacity"])
def _gathered_hopper_kernel(
    q, k, v, out, lse, members, kv_indices, kv_num_blocks, kv_num_full_blocks, kv_members, order, q_offsets, kv_offsets,
    scale, q_b, q_l, q_h, L, H, num_groups, capacity,
    GROUP: gl.constexpr, D: gl.constexpr, Q_PARTS: gl.constexpr, Q_SIZE: gl.constexpr, MEMBERS: gl.constexpr,
    KV_SIZE: gl.constexpr, EVEN: gl.constexpr, TILEWISE: gl.constexpr, ORDERED: gl.constexpr, WARPGROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = k.dtype
    Q_ROWS: gl.constexpr = WARPGROUPS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WARPGROUPS, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WARPGROUPS, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # [Q_ROWS, 4]: a row's sum in four parts, each with the thread that holds a quarter of the row in S_LAYOUT
    WARP_ROWS: gl.constexpr = [[16, 0], [32, 0]] if WARPGROUPS == 1 else [[16, 0], [32, 0], [64, 0]]
    SUM_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], WARP_ROWS, [], [Q_ROWS, 4]
    )
    # 16 bytes per thread
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4 * WARPGROUPS, 1], [1, 0])

    i_work, i_part = gl.program_id(0) // Q_PARTS, gl.program_id(0) % Q_PARTS
    if ORDERED:
        i_work = gl.load(order + i_work)
    i_bh = i_work // num_groups
    i_b, i_h = i_bh // H, i_bh % H
    p_members = members + i_work.to(gl.int64) * MEMBERS
    p_list = kv_indices + i_work.to(gl.int64) * capacity
    listed, full = gl.load(kv_num_blocks + i_work), gl.load(kv_num_full_blocks + i_work)
    steps, whole = gl.cdiv(listed * KV_SIZE, ROWS), full * KV_SIZE // ROWS
    col = i_h // GROUP * D

    q_smem = gl.allocate_shared_memory(DTYPE, [Q_ROWS, D], SHARED_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, [K_SLOTS, ROWS, D], SHARED_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [V_SLOTS, ROWS, D], SHARED_LAYOUT)
    k_bars = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_bars.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_bars.index(i), count=1)
    # a copy may complete before the next instruction: its barrier expects it first
    BYTES: gl.constexpr = ROWS * D * 2
    for i in gl.static_range(K_SLOTS):
        mbarrier.expect(k_bars.index(i), BYTES, pred=i < steps)
        _copy_keys(
            k,
            k_bars.index(i),
            k_smem,
            i,
            p_list,
            kv_offsets,
            i,
            listed,
            full,
            i_b,
            col,
            i < steps,
            KV_SIZE,
            EVEN,
            D,
            K_SLOTS,
        )
    for i in gl.static_range(V_SLOTS):
        mbarrier.expect(v_bars.index(i), BYTES, pred=i < steps)
        _copy_keys(
            v,
            v_bars.index(i),
            v_smem,
            i,
            p_list,
            kv_offsets,
            i,
            listed,
            full,
            i_b,
            col,
            i < steps,
            KV_SIZE,
            EVEN,
            D,
            V_SLOTS,
        )

    # rows of the group's tiles, one tile after the other
    o_r = i_part * Q_ROWS + gl.arange(0, Q_ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT))
    row, m_row = _query_rows(p_members, q_offsets, o_r, Q_SIZE, MEMBERS)
    p_q = q + i_b.to(gl.int64) * q_b + i_h.to(gl.int64) * q_h + (row.to(gl.int64) * q_l)[:, None] + o_d[None, :]
    q_smem.store(gl.load(p_q, mask=m_row[:, None], other=0.0))
    fence_async_shared()

    # [Q_ROWS, D]
    b_acc = gl.zeros([Q_ROWS, D], gl.float32, O_LAYOUT)
    b_max = gl.full([Q_ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    b_sums = gl.zeros([Q_ROWS, 4], gl.float32, SUM_LAYOUT)
    b_zero = gl.zeros([Q_ROWS, ROWS], gl.float32, S_LAYOUT)
    o_m = i_part * Q_ROWS + gl.arange(0, Q_ROWS, layout=ROW_LAYOUT)
    o_n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
    factor = scale * LOG2E
    cta_barrier()
    # a loop of its own for what may be short
    for TAIL in gl.static_range(2):
        for j in range(whole if TAIL else 0, steps if TAIL else whole):
            k_slot, v_slot = j % K_SLOTS, j % V_SLOTS
            mbarrier.wait(k_bars.index(k_slot), (j // K_SLOTS) & 1)
            # [Q_ROWS, ROWS]
            b_s = warpgroup_mma(q_smem, k_smem.index(k_slot).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if TAIL or TILEWISE:
                entry = (j * ROWS + o_n) // KV_SIZE
                m_n = entry < listed
                if not EVEN:
                    b_tile = gl.load(p_list + entry, mask=m_n, other=0)
                    size = gl.load(kv_offsets + b_tile + 1) - gl.load(kv_offsets + b_tile)
                    m_n = m_n & ((j * ROWS + o_n) % KV_SIZE < size)
                m_s = m_n[None, :]
                if TILEWISE:
                    b_bits = gl.load(kv_members + i_work.to(gl.int64) * capacity + entry, mask=m_n, other=0)
                    m_s = m_s & (((b_bits[None, :] >> (o_m // Q_SIZE)[:, None]) & 1) != 0)
                b_s = gl.where(m_s, b_s, float("-inf"))
            b_new = gl.maximum(b_max, gl.max(b_s, 1) * factor)
            # a row that has seen no token yet stays at -inf; 0 in its place keeps exp2(-inf - max) at 0
            b_from = gl.where(b_new == float("-inf"), 0.0, b_new) if TAIL or TILEWISE else b_new
            b_p = gl.exp2(b_s * factor - b_from[:, None])
            b_rescale = gl.exp2(b_max - b_from)
            b_max = b_new
            # each thread adds up its own columns; the parts of a row meet once, after the loop
            b_part = gl.sum(gl.sum(gl.reshape(b_p, [Q_ROWS, ROWS // 8, 4, 2]), 3), 1)
            b_part = gl.convert_layout(b_part, SUM_LAYOUT, assert_trivial=True)
            b_sums = _scale_rows(b_sums, b_rescale, SUM_LAYOUT) + b_part
            b_acc = _scale_rows(b_acc, b_rescale, O_LAYOUT)
            b_p = gl.convert_layout(b_p.to(DTYPE), P_LAYOUT, assert_trivial=True)
            mbarrier.wait(v_bars.index(v_slot), (j // V_SLOTS) & 1)
            b_acc = warpgroup_mma(b_p, v_smem.index(v_slot), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
            # every warp is done with both slots. The compiler adds a barrier between `expect` and a copy: one for both
            cta_barrier()
            more_k, more_v = j + K_SLOTS < steps, j + V_SLOTS < steps
            mbarrier.expect(k_bars.index(k_slot), BYTES, pred=more_k)
            mbarrier.expect(v_bars.index(v_slot), BYTES, pred=more_v)
            cta_barrier()
            _copy_keys(
                k, k_bars.index(k_slot), k_smem, k_slot, p_list, kv_offsets, j + K_SLOTS, listed, full, i_b, col,
                more_k, KV_SIZE, EVEN, D, K_SLOTS,
            )  # fmt: skip
            _copy_keys(
                v, v_bars.index(v_slot), v_smem, v_slot, p_list, kv_offsets, j + V_SLOTS, listed, full, i_b, col,
                more_v, KV_SIZE, EVEN, D, V_SLOTS,
            )  # fmt: skip

    # a query that attends to nothing: out 0 and, from the logarithm of 0, lse -inf
    b_sum = gl.convert_layout(gl.sum(b_sums, 1), ROW_LAYOUT, assert_trivial=True)
    b_out = _scale_rows(b_acc, 1.0 / gl.where(b_sum == 0, 1.0, b_sum), O_LAYOUT)
    token, m_m = _query_rows(p_members, q_offsets, o_m, Q_SIZE, MEMBERS)
    gl.store(lse + i_bh.to(gl.int64) * L + token, b_max * LN2 + gl.log(b_sum), mask=m_m)
    # through the shared memory of q, for whole lines of stores; every warp is past its last product
    cta_barrier()
    q_smem.store(b_out.to(DTYPE))
    cta_barrier()
    b_out = q_smem.load(IO_LAYOUT)
    # rows once more, so that they hold no registers meanwhile
    row, m_row = _query_rows(p_members, q_offsets, o_r, Q_SIZE, MEMBERS)
    p_out = out + ((i_b.to(gl.int64) * L + row) * H + i_h)[:, None] * D + o_d[None, :]
    gl.store(p_out, b_out, mask=m_row[:, None])


def forward(
    q: Tensor, k: Tensor, v: Tensor, groups: TileGroups, q_blocks: Blocks, kv_blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `gathered_attn`, if `triton_fwd._suits_hopper` holds."""
    B, L, H, D = q.shape
    out = q.new_empty((B, L, H, D))
    lse = q.new_empty((B, H, L), dtype=torch.float32)
    num_groups, size = groups.members.shape[2:]
    options = config("gathered_hopper_fwd", D, q.dtype, q.device)
    rows = options["num_warps"] // 4 * ROWS.value
    parts = -(-size * q_blocks.max_size // rows)
    lists = [
        None if x is None else x.contiguous()
        for x in (
            *(groups.members, groups.kv_indices, groups.kv_num_blocks),
            *(full_entries(groups, kv_blocks), groups.kv_members, groups.order),
        )
    ]
    launch(
        _gathered_hopper_kernel, (B * H * num_groups * parts,),
        q, _described(k, kv_blocks), _described(v, kv_blocks), out, lse, *lists, q_blocks.offsets, kv_blocks.offsets,
        scale, *q.stride()[:3], L, H, num_groups, groups.kv_indices.shape[-1],
        GROUP=H // k.shape[2], D=D, Q_PARTS=parts, Q_SIZE=q_blocks.max_size, MEMBERS=size, KV_SIZE=kv_blocks.max_size,
        EVEN=kv_blocks.min_size == kv_blocks.max_size, TILEWISE=groups.kv_members is not None,
        ORDERED=groups.order is not None, WARPGROUPS=options["num_warps"] // 4, **options,
    )  # fmt: skip
    return out, lse


def _described(x: Tensor, kv_blocks: Blocks) -> TensorDescriptor:
    B, S, H, D = x.shape
    part = [1, min(kv_blocks.max_size, ROWS.value), COLUMNS.value]
    return TensorDescriptor(x, [B, S, H * D], [x.stride(0), x.stride(1), 1], part, PANEL_LAYOUT)
