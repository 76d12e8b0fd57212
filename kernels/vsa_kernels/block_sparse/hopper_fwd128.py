"""Forward kernel of block-sparse attention on Hopper, in Gluon, for lists of blocks of up to 128 tokens.

It computes what `triton_fwd` computes. A program has 128 queries. One warp follows the list and copies keys and values
to shared memory; two warpgroups of 64 queries each multiply, the logits of one block beside the output of the block
before it (the scheme of FlashAttention-3, https://arxiv.org/abs/2407.08608, section 3). Each row is added up by one
warpgroup in the order of its list, so that results are the same in every run.

A block of fewer tokens is copied with the rows that follow it: their logits are hidden, and their values are set to 0,
because 0 * NaN would let a neighbour's NaN in.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
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

from vsa_kernels.block_sparse.hopper_fwd import LN2, LOG2E, SHARED_LAYOUT, _scale_rows, cta_barrier
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_tiles import lists_of
from vsa_kernels.launch import launch

# tokens of a block, and queries of a warpgroup
BLOCK = gl.constexpr(128)
ROWS = gl.constexpr(64)
# slots of k and of v in shared memory
SLOTS = gl.constexpr(2)


@gluon.jit
def _entry(p_list, kv_offsets, i, listed, EVEN: gl.constexpr):
    """First token and token count of list entry i; block 0 for entries past the count, which are not read."""
    block = gl.load(p_list + i, mask=i < listed, other=0)
    if EVEN:
        start = block * BLOCK
        size = start * 0 + BLOCK
    else:
        start = gl.load(kv_offsets + block)
        size = gl.load(kv_offsets + block + 1) - start
    return start, size


@gluon.jit
def _softmax(b_s, b_max, b_sums, factor, SUM_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """One step of the online softmax: probabilities, new maximum, factor of earlier sums, sums."""
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * factor)
    b_p = gl.exp2(b_s * factor - b_new[:, None])
    b_rescale = gl.exp2(b_max - b_new)
    # each thread adds up its own columns; the parts of a row meet once, after the loop
    b_part = gl.sum(gl.sum(gl.reshape(b_p, [ROWS, BLOCK // 8, 4, 2]), 3), 1)
    b_sums = _scale_rows(b_sums, b_rescale, SUM_LAYOUT) + gl.convert_layout(b_part, SUM_LAYOUT, assert_trivial=True)
    return gl.convert_layout(b_p.to(DTYPE), P_LAYOUT, assert_trivial=True), b_new, b_rescale, b_sums


@gluon.jit
def _hide_columns(b_s, size, S_LAYOUT: gl.constexpr):
    """Logits of a block of `size` tokens, -inf past its end."""
    if size < BLOCK:
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S_LAYOUT))
        b_s = gl.where(column[None, :] < size, b_s, float("-inf"))
    return b_s


@gluon.jit
def _clear_rows(tile, size, D: gl.constexpr, TILE: gl.constexpr):
    """Set rows from `size` on of a tile `[TILE, D]` in shared memory to 0; both warpgroups may do so at once."""
    if size < TILE:
        PART: gl.constexpr = 32
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        for i in gl.static_range(TILE // PART):
            if size < (i + 1) * PART:
                part = tile.slice(i * PART, PART)
                row = i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
                value = part.load(LAYOUT)
                part.store(gl.where(row[:, None] < size, value, gl.zeros_like(value)))
        fence_async_shared()
        cta_barrier()


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, q_bar, k_full, v_full, k_empty, v_empty, p_list, kv_offsets, listed, factor,
    p_out, p_lse, rows, stride_l, D: gl.constexpr, EVEN: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries, of which the first `rows` are stored."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # [ROWS, 4]: a row's sum in four parts, each with the thread that holds a quarter of the row in S_LAYOUT
    SUM_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    # 16 bytes per thread
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    b_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    b_sums = gl.zeros([ROWS, 4], gl.float32, SUM_LAYOUT)
    b_zero = gl.zeros([ROWS, BLOCK], gl.float32, S_LAYOUT)
    # an empty list computes with block 0, and its result is dropped
    steps = gl.maximum(listed, 1)
    _, size = _entry(p_list, kv_offsets, 0, listed, EVEN)
    _, next_size = _entry(p_list, kv_offsets, 1, listed, EVEN)
    mbarrier.wait(q_bar, 0)
    mbarrier.wait(k_full.index(0), 0)
    # [ROWS, BLOCK]
    b_s = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    cta_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    if not EVEN:
        b_s = _hide_columns(b_s, size, S_LAYOUT)
    b_p, b_max, b_rescale, b_sums = _softmax(b_s, b_max, b_sums, factor, SUM_LAYOUT, P_LAYOUT, DTYPE)
    for j in range(1, steps):
        k_slot, v_slot = j % SLOTS, (j - 1) % SLOTS
        mbarrier.wait(k_full.index(k_slot), (j // SLOTS) & 1)
        b_s = warpgroup_mma(q_smem, k_smem.index(k_slot).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), ((j - 1) // SLOTS) & 1)
        if not EVEN:
            _clear_rows(v_smem.index(v_slot), size, D, BLOCK)
        b_next_acc = warpgroup_mma(b_p, v_smem.index(v_slot), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        if not EVEN:
            size = next_size
            _, next_size = _entry(p_list, kv_offsets, j + 1, listed, EVEN)
            b_s = _hide_columns(b_s, size, S_LAYOUT)
        b_next_p, b_max, b_rescale, b_sums = _softmax(b_s, b_max, b_sums, factor, SUM_LAYOUT, P_LAYOUT, DTYPE)
        # without b_p here the compiler could reuse its registers too early
        b_acc, b_p = warpgroup_mma_wait(0, deps=(b_next_acc, b_p))
        cta_barrier()
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        b_acc = _scale_rows(b_acc, b_rescale, O_LAYOUT)
        b_p = b_next_p
    v_slot = (steps - 1) % SLOTS
    mbarrier.wait(v_full.index(v_slot), ((steps - 1) // SLOTS) & 1)
    if not EVEN:
        _clear_rows(v_smem.index(v_slot), size, D, BLOCK)
    b_next_acc = warpgroup_mma(b_p, v_smem.index(v_slot), b_acc, is_async=True)
    b_acc, b_p = warpgroup_mma_wait(0, deps=(b_next_acc, b_p))

    # a query without kv tokens: out 0 and lse -inf
    b_sum = gl.convert_layout(gl.sum(b_sums, 1), ROW_LAYOUT, assert_trivial=True)
    b_out = _scale_rows(b_acc, 1.0 / b_sum, O_LAYOUT)
    b_lse = b_max * LN2 + gl.log(b_sum)
    if listed == 0:
        b_out = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        b_lse = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    o_m = gl.arange(0, ROWS, layout=ROW_LAYOUT)
    gl.store(p_lse + o_m, b_lse, mask=o_m < rows)
    # through the shared memory of q, for whole lines of stores
    cta_barrier()
    q_smem.store(b_out.to(DTYPE))
    cta_barrier()
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT))
    gl.store(p_out + o_r[:, None] * stride_l + o_d[None, :], q_smem.load(IO_LAYOUT), mask=o_r[:, None] < rows)


@gluon.jit
def _copy(k, v, k_smem, v_smem, k_full, v_full, k_empty, v_empty, p_list, kv_offsets, listed, first, col,
          EVEN: gl.constexpr):  # fmt: skip
    """A warp: copies the listed blocks, k one step ahead of v, as they are read."""
    start, _ = _entry(p_list, kv_offsets, 0, listed, EVEN)
    for j in range(gl.maximum(listed, 1)):
        next_start, _ = _entry(p_list, kv_offsets, j + 1, listed, EVEN)
        slot, free = j % SLOTS, ((j // SLOTS) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [first + start, col], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [first + start, col], v_full.index(slot), v_smem.index(slot))
        start = next_start


@gluon.jit(do_not_specialize=["idx_b", "idx_h", "idx_n", "num_b", "num_h", "L", "S", "H", "num_q"])
def _hopper_fwd128_kernel(
    q, k, v, out, lse, kv_indices, kv_num_blocks, q_offsets, kv_offsets, scale,
    idx_b, idx_h, idx_n, num_b, num_h, L, S, H, num_q,
    GROUP: gl.constexpr, D: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
    # query tiles of one head run side by side and share its keys and values in L2
    i_n, i_bh = gl.program_id(0) % num_q, gl.program_id(0) // num_q
    i_b, i_h = i_bh // H, i_bh % H
    p_list = kv_indices + i_b.to(gl.int64) * idx_b + i_h.to(gl.int64) * idx_h + i_n.to(gl.int64) * idx_n
    listed = gl.load(kv_num_blocks + i_b.to(gl.int64) * num_b + i_h.to(gl.int64) * num_h + i_n)
    if EVEN:
        q_start = i_n * BLOCK
        q_size = q_start * 0 + BLOCK
    else:
        q_start = gl.load(q_offsets + i_n)
        q_size = gl.load(q_offsets + i_n + 1) - q_start

    q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], q.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK, D], k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK, D], v.layout)
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_bars.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        # both warpgroups leave a slot
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    cta_barrier()
    first_q = i_b * L + q_start
    for i in gl.static_range(2):
        mbarrier.expect(q_bars.index(i), q.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [first_q + i * ROWS, i_h * D], q_bars.index(i), q_smem.index(i))
    factor = scale * LOG2E
    p_out = out + (first_q.to(gl.int64) * H + i_h) * D
    p_lse = lse + i_bh.to(gl.int64) * L + q_start
    gl.warp_specialize([
        (_attend, (q_smem.index(0), k_smem, v_smem, q_bars.index(0), k_full, v_full, k_empty, v_empty,
                   p_list, kv_offsets, listed, factor, p_out, p_lse, q_size, H * D, D, EVEN, DTYPE)),
        (_attend, (q_smem.index(1), k_smem, v_smem, q_bars.index(1), k_full, v_full, k_empty, v_empty,
                   p_list, kv_offsets, listed, factor, p_out + ROWS * H * D, p_lse + ROWS, q_size - ROWS, H * D,
                   D, EVEN, DTYPE)),
        (_copy, (k, v, k_smem, v_smem, k_full, v_full, k_empty, v_empty, p_list, kv_offsets, listed, i_b * S,
                 i_h // GROUP * D, EVEN)),
    ], [4, 1], [240, 24])  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`, where `dispatch` chooses this kernel."""
    B, L, H, D = q.shape
    out = q.new_empty((B, L, H, D))
    lse = q.new_empty((B, H, L), dtype=torch.float32)
    lists, list_at = lists_of(mask)
    q_blocks, kv_blocks = mask.q_blocks, mask.kv_blocks
    even = q_blocks.min_size == kv_blocks.min_size == BLOCK.value
    launch(
        _hopper_fwd128_kernel, (q_blocks.num * B * H,),
        _described(q, ROWS.value), _described(k, BLOCK.value), _described(v, BLOCK.value), out, lse, *lists,
        q_blocks.offsets, kv_blocks.offsets, scale, *list_at, L, k.shape[1], H, q_blocks.num,
        GROUP=H // k.shape[2], D=D, EVEN=even, num_warps=4,
    )  # fmt: skip
    return out, lse


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    # B * L fits 32 bits: no Hopper chip has memory for more rows
    B, L, H, D = x.shape
    return TensorDescriptor(x, [B * L, H * D], [x.stride(1), 1], [rows, D], SHARED_LAYOUT)
