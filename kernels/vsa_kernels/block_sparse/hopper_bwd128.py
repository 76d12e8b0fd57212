"""Backward kernels of block-sparse attention on Hopper for lists of blocks of up to 128 tokens: `hopper_fwd128`'s.

A program has one kv block. One warp follows the transposed list and copies queries and gradients to shared memory in
tiles of 64; two warpgroups of 64 kv tokens each compute s^T = k q^T and dp^T = v dout^T, and add p^T dout to dv and
ds^T q to dk, with p and ds in registers. They also keep ds in a workspace, in the order of the forward's lists, from
which `hopper_dq128` computes dq = scale * ds k as one product, instead of computing the logits again: 5 products in
all, not 7. There are no atomics, and repeated runs give the same bits. Formulas are those of `triton_bwd`.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import triton
import triton.language as tl
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

from vsa_kernels.block_index import Blocks, is_flat
from vsa_kernels.block_sparse.dispatch import Shares, most_listed, workspace_of
from vsa_kernels.block_sparse.hopper_dq128 import dq_from
from vsa_kernels.block_sparse.hopper_fwd import LOG2E, SHARED_LAYOUT, cta_barrier
from vsa_kernels.block_sparse.hopper_fwd128 import BLOCK, ROWS, _clear_rows, _described
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_index import TransposedIndex, long_first, transpose
from vsa_kernels.block_sparse.triton_tiles import Tiles, pad_blocks
from vsa_kernels.launch import launch

SLOTS = gl.constexpr(3)
LINE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))


@gluon.jit
def _column(row_offsets, i_b, i_h, i_n, at_b, at_h):
    """First entry and entry count of a kv block in the transposed lists of a head."""
    p_at = row_offsets + i_b.to(gl.int64) * at_b + i_h.to(gl.int64) * at_h + i_n
    begin = gl.load(p_at)
    return begin, gl.load(p_at + 1) - begin


@gluon.jit
def _start(share, factor, D: gl.constexpr, SHARED: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums `[ROWS, D]` that begin with the share of each token in the gradient of the block's mean."""
    b_x = gl.zeros([ROWS, D], gl.float32, LAYOUT)
    if SHARED:
        b_x += (gl.load(share + gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))) * factor)[None, :]
    return b_x


@gluon.jit
def _store_rows(x, smem, p_out, rows, stride_l, D: gl.constexpr, DTYPE: gl.constexpr):
    """Write the first `rows` rows of x `[ROWS, D]`."""
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    cta_barrier()
    smem.store(x.to(DTYPE))
    cta_barrier()
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT))
    gl.store(p_out + o_r[:, None] * stride_l + o_d[None, :], smem.load(IO_LAYOUT), mask=o_r[:, None] < rows)


@gluon.jit
def _hide_rows(b_ds, rows, LAYOUT: gl.constexpr):
    """Gradients of logits, 0 past the end of the kv block."""
    if rows < ROWS:
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        b_ds = gl.where(row[:, None] < rows, b_ds, 0.0)
    return b_ds


@gluon.jit
def _add_up(
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar, q_full, do_full, q_empty, do_empty,
    workspace, rows, places, row_offsets, q_offsets, i_b, i_hk, i_n, row_b, row_h, at_b, at_h, num_q, H, capacity,
    p_dk, p_dv, k_share, v_share, kv_rows, stride_l, scale, WG: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, EVEN: gl.constexpr, KEEP: gl.constexpr, SHARED: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 kv tokens, of which the first `kv_rows` are stored."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, G_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    of_one = 1.0 / (kv_rows + WG * ROWS)
    b_dk = _start(k_share, of_one / scale, D, SHARED, G_LAYOUT)
    b_dv = _start(v_share, of_one, D, SHARED, G_LAYOUT)
    b_zero = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
    factor = scale * LOG2E
    phase, slot = 0, 0
    mbarrier.wait(kv_bar, 0)
    for g in range(GROUP):
        i_h = i_hk * GROUP + g
        begin, listed = _column(row_offsets, i_b, i_h, i_n, at_b, at_h)
        p_entry = i_b.to(gl.int64) * row_b + i_h.to(gl.int64) * row_h + begin
        for j in range(listed * 2):
            # the first and the second 64 rows of a block
            half = j % 2
            if not EVEN:
                i_q = gl.load(rows + p_entry + j // 2)
                size = gl.load(q_offsets + i_q + 1) - gl.load(q_offsets + i_q) - half * ROWS
            mbarrier.wait(q_full.index(slot), phase)
            if not EVEN:
                _clear_rows(q_smem.index(slot), size, D, ROWS)
            # [ROWS kv, ROWS q]
            b_s = warpgroup_mma(k_smem, q_smem.index(slot).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(slot), phase)
            if not EVEN:
                _clear_rows(do_smem.index(slot), size, D, ROWS)
            b_dp = warpgroup_mma(v_smem, do_smem.index(slot).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            # lse is +inf past the end of a block: p and ds are 0 there
            b_lse = lse_smem.index(slot).load(COLUMNS)
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            b_p = gl.exp2(b_s * factor - (b_lse * LOG2E)[None, :])
            b_delta = delta_smem.index(slot).load(COLUMNS)
            b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
            b_ds = b_p * (b_dp - b_delta[None, :])
            if KEEP and not EVEN:
                b_ds = _hide_rows(b_ds, kv_rows, S_LAYOUT)
            b_pa = gl.convert_layout(b_p.to(DTYPE), A_LAYOUT, assert_trivial=True)
            b_dsa = gl.convert_layout(b_ds.to(DTYPE), A_LAYOUT, assert_trivial=True)
            b_next_dv = warpgroup_mma(b_pa, do_smem.index(slot), b_dv, is_async=True)
            b_next_dk = warpgroup_mma(b_dsa, q_smem.index(slot), b_dk, is_async=True)
            if KEEP:
                ds_smem.index(WG * 2 + half).store(b_ds.to(DTYPE))
                fence_async_shared()
            b_dv, b_dk, b_pa, b_dsa = warpgroup_mma_wait(0, deps=(b_next_dv, b_next_dk, b_pa, b_dsa))
            if KEEP:
                # the copy before has left the slot of the next ds
                tma.store_wait(0)
            cta_barrier()
            mbarrier.arrive(q_empty.index(slot), count=1)
            mbarrier.arrive(do_empty.index(slot), count=1)
            if KEEP:
                pair = ((i_b * H + i_h) * num_q + gl.load(rows + p_entry + j // 2)).to(gl.int64) * capacity
                pair += gl.load(places + p_entry + j // 2)
                row = (pair * BLOCK + WG * ROWS).to(gl.int32)
                tma.async_copy_shared_to_global(workspace, [row, half * ROWS], ds_smem.index(WG * 2 + half))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
    if KEEP:
        tma.store_wait(0)
    # each warpgroup's own half of k and v takes the results: nobody else reads it
    _store_rows(b_dk * scale, k_smem, p_dk, kv_rows, stride_l, D, DTYPE)
    _store_rows(b_dv, v_smem, p_dv, kv_rows, stride_l, D, DTYPE)


@gluon.jit
def _copy(
    q, do, lse, delta, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, q_empty, do_empty,
    rows, row_offsets, q_offsets, i_b, i_hk, i_n, row_b, row_h, at_b, at_h, L, H, num_q,
    GROUP: gl.constexpr, D: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """A warp: copies the listed queries with their gradients and statistics, two tiles of 64 for each block."""
    phase, slot = 1, 0
    for g in range(GROUP):
        i_h = i_hk * GROUP + g
        begin, listed = _column(row_offsets, i_b, i_h, i_n, at_b, at_h)
        p_entry = rows + i_b.to(gl.int64) * row_b + i_h.to(gl.int64) * row_h + begin
        for j in range(listed * 2):
            half = j % 2
            i_q = gl.load(p_entry + j // 2)
            if EVEN:
                start = i_q * BLOCK
            else:
                start = gl.load(q_offsets + i_q)
            row, line = i_b * L + start + half * ROWS, ((i_b * H + i_h) * num_q + i_q) * BLOCK + half * ROWS
            mbarrier.wait(q_empty.index(slot), phase)
            mbarrier.expect(q_full.index(slot), q.block_type.nbytes + 4 * ROWS)
            tma.async_copy_global_to_shared(q, [row, i_h * D], q_full.index(slot), q_smem.index(slot))
            tma.async_copy_global_to_shared(lse, [line], q_full.index(slot), lse_smem.index(slot))
            mbarrier.wait(do_empty.index(slot), phase)
            mbarrier.expect(do_full.index(slot), do.block_type.nbytes + 4 * ROWS)
            tma.async_copy_global_to_shared(do, [row, i_h * D], do_full.index(slot), do_smem.index(slot))
            tma.async_copy_global_to_shared(delta, [line], do_full.index(slot), delta_smem.index(slot))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1


@gluon.jit(
    do_not_specialize=["row_b", "row_h", "at_b", "at_h", "stride_l", "L", "S", "H", "num_q", "num_kv", "capacity"]
)
def _hopper_dkv128_kernel(
    q, k, v, do, lse, delta, workspace, dk, dv, k_share, v_share, order, rows, places, row_offsets, q_offsets,
    kv_offsets, scale, row_b, row_h, at_b, at_h, stride_l, L, S, H, num_q, num_kv, capacity,
    GROUP: gl.constexpr, D: gl.constexpr, EVEN: gl.constexpr, KEEP: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    i_column = gl.load(order + gl.program_id(0))
    i_bh, i_n = i_column // num_kv, i_column % num_kv
    Hkv = H // GROUP
    i_b, i_hk = i_bh // Hkv, i_bh % Hkv
    if EVEN:
        kv_start = i_n * BLOCK
        kv_size = kv_start * 0 + BLOCK
    else:
        kv_start = gl.load(kv_offsets + i_n)
        kv_size = gl.load(kv_offsets + i_n + 1) - kv_start

    k_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], v.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, D], q.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, D], do.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [4, ROWS, ROWS], q.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], LINE_LAYOUT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], LINE_LAYOUT)
    kv_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_bars.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        # both warpgroups leave a slot
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
    fence_async_shared()
    cta_barrier()
    first_kv, col = i_b * S + kv_start, i_hk * D
    for i in gl.static_range(2):
        mbarrier.expect(kv_bars.index(i), k.block_type.nbytes + v.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [first_kv + i * ROWS, col], kv_bars.index(i), k_smem.index(i))
        tma.async_copy_global_to_shared(v, [first_kv + i * ROWS, col], kv_bars.index(i), v_smem.index(i))
    at_out = first_kv.to(gl.int64) * stride_l + col
    p_dk, p_dv = dk + at_out, dv + at_out
    at_mean = (i_bh.to(gl.int64) * num_kv + i_n) * D
    if SHARED:
        k_share += at_mean
        v_share += at_mean
    gl.warp_specialize([
        (_add_up, (k_smem.index(0), v_smem.index(0), q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                   kv_bars.index(0), q_full, do_full, q_empty, do_empty, workspace, rows, places, row_offsets,
                   q_offsets, i_b, i_hk, i_n, row_b, row_h, at_b, at_h, num_q, H, capacity, p_dk, p_dv, k_share,
                   v_share, kv_size, stride_l, scale, 0, GROUP, D, EVEN, KEEP, SHARED, DTYPE)),
        (_add_up, (k_smem.index(1), v_smem.index(1), q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                   kv_bars.index(1), q_full, do_full, q_empty, do_empty, workspace, rows, places, row_offsets,
                   q_offsets, i_b, i_hk, i_n, row_b, row_h, at_b, at_h, num_q, H, capacity,
                   p_dk + ROWS * stride_l, p_dv + ROWS * stride_l, k_share, v_share, kv_size - ROWS, stride_l,
                   scale, 1, GROUP, D, EVEN, KEEP, SHARED, DTYPE)),
        (_copy, (q, do, lse, delta, q_smem, do_smem, lse_smem, delta_smem, q_full, do_full, q_empty, do_empty,
                 rows, row_offsets, q_offsets, i_b, i_hk, i_n, row_b, row_h, at_b, at_h, L, H, num_q, GROUP, D, EVEN)),
    ], [4, 1], [240, 24])  # fmt: skip


def backward(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    shares: Shares,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of calls with `dispatch.workspace_of`; arguments as in `dispatch.backward`."""
    (B, _, H, _), Hkv, index = q.shape, k.shape[2], mask.index
    parts = workspace_of(q, k, mask)
    assert parts is not None
    samples, group, size = parts
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    columns = transpose(index.kv_indices, index.kv_num_blocks, mask.kv_blocks.num, places=True)
    dout, means = _flat(dout), [_by_head(x) for x in shares]
    # [pairs of blocks * BLOCK, BLOCK]
    workspace = q.new_empty((size // (BLOCK.value * q.element_size()), BLOCK.value))
    keys = _keys_of(k, mask.kv_blocks)
    if (samples, group) == (B, H):
        _run_dkv(dout, delta, lse, q, k, v, mask, columns, scale, means[1:], workspace, dk, dv)
        dq_from(keys, mask, scale, means[0], workspace, dq)
        return dq, dk, dv
    for b in range(0, B, samples):
        for h in range(0, H, group):
            q_at = slice(b, b + samples), slice(None), slice(h, h + group)
            kv_at = *q_at[:2], slice(h * Hkv // H, (h + group) * Hkv // H)
            q_of, kv_of = q_at[::2], kv_at[::2]
            part, part_columns = _part_of(mask, q_of), TransposedIndex(*(_slice_of(x, q_of) for x in columns))
            mean_of = [None if x is None else x[at] for x, at in zip(means, (q_of, kv_of, kv_of), strict=True)]
            _run_dkv(
                dout[q_at], delta[q_of], lse[q_of], q[q_at], k[kv_at], v[kv_at], part, part_columns, scale,
                mean_of[1:], workspace, dk[kv_at], dv[kv_at],
            )  # fmt: skip
            dq_from(keys[kv_at], part, scale, mean_of[0], workspace, dq[q_at])
    return dq, dk, dv


def dkv(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    shares: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv alone, without a workspace; arguments as in `dispatch.backward`."""
    columns = transpose(mask.index.kv_indices, mask.index.kv_num_blocks, mask.kv_blocks.num)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    means = [_by_head(x) for x in shares]
    _run_dkv(_flat(dout), delta, lse, q, k, v, mask, columns, scale, means, None, dk, dv)
    return dk, dv


def _flat(x: Tensor) -> Tensor:
    """x `[B, L, H, D]` as descriptors can address it."""
    return x if is_flat(x) else x.contiguous()


def _by_head(share: Tensor | None) -> Tensor | None:
    """A share `[B, N, H, D]` as `[B, H, N, D]`, of which parts by head are contiguous."""
    return None if share is None else share.transpose(1, 2).contiguous()


def _slice_of(x: Tensor | None, at: tuple[slice, slice]) -> Tensor | None:
    """Some samples and heads of x `[B|1, H|1, ...]`; dims of size 1 stay."""
    return None if x is None else x[tuple(s if n > 1 else slice(None) for s, n in zip(at, x.shape, strict=False))]


def _part_of(mask: BlockMask, at: tuple[slice, slice]) -> BlockMask:
    """The mask of some samples and heads."""
    index = mask.index
    lists, counts = (_slice_of(x, at) for x in (index.kv_indices, index.kv_num_blocks))
    return replace(mask, index=replace(index, kv_indices=lists, kv_num_blocks=counts))


def _keys_of(k: Tensor, blocks: Blocks) -> Tensor:
    """k `[B, Nkv * BLOCK, Hkv, D]`: short blocks are padded with zeros, whose ds is 0 too."""
    if blocks.min_size == BLOCK.value:
        return k
    tiles = Tiles.of((blocks.num, blocks.max_size, blocks.min_size), k.shape[1], BLOCK.value)
    return pad_blocks(k, tiles, blocks.offsets, None)


def _run_dkv(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask,
    columns: TransposedIndex, scale: float, shares: Sequence[Tensor | None], workspace: Tensor | None,
    dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes dk and dv, and to a workspace `[>= B * H * Nq * K * BLOCK, BLOCK]` ds^T of every listed pair."""
    B, L, H, D = q.shape
    _, S, Hkv, _ = k.shape
    q_blocks, kv_blocks = mask.q_blocks, mask.kv_blocks
    order = long_first(columns, None, B, H, H // Hkv)
    list_at = [x.stride(d) if x.shape[d] > 1 else 0 for x in (columns.rows, columns.row_offsets) for d in (0, 1)]
    even = q_blocks.min_size == kv_blocks.min_size == BLOCK.value
    kept = None if workspace is None else _descriptor(workspace, (ROWS.value, ROWS.value))
    tiles = [_described(x, ROWS.value) for x in (q, k, v, dout)]
    numbers = (lse, delta) if even else _by_block(lse, delta, q_blocks)
    lines = [TensorDescriptor(x, [x.numel()], [1], [ROWS.value], LINE_LAYOUT.value) for x in numbers]
    launch(
        _hopper_dkv128_kernel, (kv_blocks.num * B * Hkv,),
        *tiles, *lines, kept, dk, dv, *shares, order, columns.rows, columns.ids, columns.row_offsets,
        q_blocks.offsets, kv_blocks.offsets, scale, *list_at, dk.stride(1), L, S, H,
        q_blocks.num, kv_blocks.num, most_listed(mask),
        GROUP=H // Hkv, D=D, EVEN=even, KEEP=kept is not None, SHARED=shares[0] is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], list(box), SHARED_LAYOUT)


@triton.jit
def _by_block_kernel(lse, delta, out_lse, out_delta, offsets, L, num_q, BLOCK: tl.constexpr):
    i_tile = tl.program_id(0).to(tl.int64)
    i_bh, i_n = i_tile // num_q, i_tile % num_q
    start = tl.load(offsets + i_n)
    o_m = tl.arange(0, BLOCK)
    m_m = start + o_m < tl.load(offsets + i_n + 1)
    at = i_bh * L + start + o_m
    tl.store(out_lse + i_tile * BLOCK + o_m, tl.load(lse + at, mask=m_m, other=float("inf")))
    tl.store(out_delta + i_tile * BLOCK + o_m, tl.load(delta + at, mask=m_m, other=0.0))


def _by_block(lse: Tensor, delta: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Both, contiguous fp32 `[B, H, L]`, as `[B, H, Nq, BLOCK]`: copies of a block start at whole 16 bytes.

    Past the end of short blocks lse is inf, so that p is 0, and delta 0.
    """
    B, H, L = lse.shape
    padded = [x.new_empty((B, H, blocks.num, BLOCK.value)) for x in (lse, delta)]
    launch(
        _by_block_kernel, (B * H * blocks.num,),
        lse, delta, *padded, blocks.offsets, L, blocks.num, BLOCK=BLOCK.value, num_warps=1,
    )  # fmt: skip
    return padded[0], padded[1]
