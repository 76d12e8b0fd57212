"""Forward kernel of block-sparse attention on Hopper, in Gluon, for blocks that are whole tiles of 64 rows.

It computes what `triton_fwd` computes. One warpgroup per 64 queries loads a kv block, multiplies, and loads the next
one into the slot that became free. Other programs of the multiprocessor hide its waits, so registers and shared memory
are kept small enough for four programs to fit. Query blocks of a multiple of 128 rows have their own configuration
(`hopper_fwd_wide`): with 8 warps, two warpgroups share each kv block that is loaded.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_tiles import lists_of
from vsa_kernels.launch import config, launch

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# rows of a kv tile, and of each warpgroup's queries: those of the matrix instruction
ROWS = gl.constexpr(64)
# a row of 64 or 128 half-precision numbers fills the widest swizzle
SHARED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# triton 3.6 and 3.7 have different names for this barrier
cta_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _first_row(p_list, i, listed, first, KV_PARTS: gl.constexpr):
    """Tensor row of tile i of the listed blocks; entries past the count may hold anything and are not read."""
    block = first + gl.load(p_list + i // KV_PARTS, mask=i < listed, other=0)
    return (block * KV_PARTS + i % KV_PARTS) * ROWS


@gluon.jit
def _scale_rows(x, factor, LAYOUT: gl.constexpr):
    """x `[Q_ROWS, D]` with its rows multiplied by factor `[Q_ROWS]`, which every thread already holds for its rows."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit(do_not_specialize=["idx_b", "idx_h", "idx_n", "num_b", "num_h", "H", "num_q", "num_kv"])
def _hopper_fwd_kernel(
    q, k, v, out, lse, kv_indices, kv_num_blocks, scale,
    idx_b, idx_h, idx_n, num_b, num_h, H, num_q, num_kv,
    GROUP: gl.constexpr, D: gl.constexpr, Q_PARTS: gl.constexpr, KV_PARTS: gl.constexpr, WARPGROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q.dtype
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

    # query tiles of one head run side by side and share its keys and values in L2
    tiles = num_q * Q_PARTS
    i_tile, i_bh = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    i_b, i_h, i_n = i_bh // H, i_bh % H, i_tile // Q_PARTS
    p_list = kv_indices + i_b.to(gl.int64) * idx_b + i_h.to(gl.int64) * idx_h + i_n.to(gl.int64) * idx_n
    col, first = i_h // GROUP * D, i_b * num_kv

    q_smem = gl.allocate_shared_memory(DTYPE, [Q_ROWS, D], q.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [K_SLOTS, ROWS, D], k.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [V_SLOTS, ROWS, D], v.layout)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_bars.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_bars.index(i), count=1)

    # a copy may complete before the next instruction: its barrier expects it first
    mbarrier.expect(q_bar, q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [(i_b * tiles + i_tile) * Q_ROWS, i_h * D], q_bar, q_smem)
    listed = gl.load(kv_num_blocks + i_b.to(gl.int64) * num_b + i_h.to(gl.int64) * num_h + i_n) * KV_PARTS
    for i in gl.static_range(K_SLOTS):
        row = _first_row(p_list, i, listed, first, KV_PARTS)
        mbarrier.expect(k_bars.index(i), k.block_type.nbytes, pred=i < listed)
        tma.async_copy_global_to_shared(k, [row, col], k_bars.index(i), k_smem.index(i), pred=i < listed)
    for i in gl.static_range(V_SLOTS):
        row = _first_row(p_list, i, listed, first, KV_PARTS)
        mbarrier.expect(v_bars.index(i), v.block_type.nbytes, pred=i < listed)
        tma.async_copy_global_to_shared(v, [row, col], v_bars.index(i), v_smem.index(i), pred=i < listed)
    # list entries are read one step before their copies start
    k_row = _first_row(p_list, K_SLOTS, listed, first, KV_PARTS)
    v_row = _first_row(p_list, V_SLOTS, listed, first, KV_PARTS)

    # [Q_ROWS, D]
    b_acc = gl.zeros([Q_ROWS, D], gl.float32, O_LAYOUT)
    b_max = gl.full([Q_ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    b_sums = gl.zeros([Q_ROWS, 4], gl.float32, SUM_LAYOUT)
    b_zero = gl.zeros([Q_ROWS, ROWS], gl.float32, S_LAYOUT)
    factor = scale * LOG2E
    mbarrier.wait(q_bar, 0)
    # the barriers that the compiler adds then fall together with those of the loop
    cta_barrier()
    for j in range(listed):
        k_slot, v_slot = j % K_SLOTS, j % V_SLOTS
        mbarrier.wait(k_bars.index(k_slot), (j // K_SLOTS) & 1)
        # [Q_ROWS, ROWS]
        b_s = warpgroup_mma(q_smem, k_smem.index(k_slot).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        b_new = gl.maximum(b_max, gl.max(b_s, 1) * factor)
        b_p = gl.exp2(b_s * factor - b_new[:, None])
        b_rescale = gl.exp2(b_max - b_new)
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
        more_k, more_v = j + K_SLOTS < listed, j + V_SLOTS < listed
        mbarrier.expect(k_bars.index(k_slot), k.block_type.nbytes, pred=more_k)
        mbarrier.expect(v_bars.index(v_slot), v.block_type.nbytes, pred=more_v)
        cta_barrier()
        tma.async_copy_global_to_shared(k, [k_row, col], k_bars.index(k_slot), k_smem.index(k_slot), pred=more_k)
        tma.async_copy_global_to_shared(v, [v_row, col], v_bars.index(v_slot), v_smem.index(v_slot), pred=more_v)
        k_row = _first_row(p_list, j + 1 + K_SLOTS, listed, first, KV_PARTS)
        v_row = _first_row(p_list, j + 1 + V_SLOTS, listed, first, KV_PARTS)

    # a query without kv tokens: out 0 and, from the logarithm of 0, lse -inf
    b_sum = gl.convert_layout(gl.sum(b_sums, 1), ROW_LAYOUT, assert_trivial=True)
    b_out = _scale_rows(b_acc, 1.0 / gl.where(b_sum == 0, 1.0, b_sum), O_LAYOUT)
    at = i_bh.to(gl.int64) * tiles + i_tile
    gl.store(lse + at * Q_ROWS + gl.arange(0, Q_ROWS, layout=ROW_LAYOUT), b_max * LN2 + gl.log(b_sum))
    # through the shared memory of q, for whole lines of stores; every warp is past its last product
    cta_barrier()
    q_smem.store(b_out.to(DTYPE))
    cta_barrier()
    b_out = q_smem.load(IO_LAYOUT)
    o_r = gl.arange(0, Q_ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT))
    p_out = out + ((i_b.to(gl.int64) * tiles + i_tile) * Q_ROWS * H + i_h) * D
    gl.store(p_out + o_r[:, None] * (H * D) + o_d[None, :], b_out)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`, where `dispatch` chooses this kernel.

    Args:
        q: see `block_sparse_attn`, like k, v and scale.
        k: see q.
        v: see q.
        mask: selected blocks.
        scale: see q.
        into: tensors to write out and lse to.
    """
    B, L, H, D = q.shape
    out, lse = into or (q.new_empty((B, L, H, D)), q.new_empty((B, H, L), dtype=torch.float32))
    lists, list_at = lists_of(mask)
    num_q, size = mask.q_blocks.num, mask.q_blocks.max_size
    options = config("hopper_fwd" if size % (2 * ROWS.value) else "hopper_fwd_wide", D, q.dtype, q.device)
    warpgroups = options["num_warps"] // 4
    parts = size // (warpgroups * ROWS.value)
    launch(
        _hopper_fwd_kernel, (num_q * parts * B * H,),
        _described(q, warpgroups), _described(k), _described(v), out, lse, *lists, scale,
        *list_at, H, num_q, mask.kv_blocks.num,
        GROUP=H // k.shape[2], D=D, Q_PARTS=parts, KV_PARTS=mask.kv_blocks.max_size // ROWS.value,
        WARPGROUPS=warpgroups, **options,
    )  # fmt: skip
    return out, lse


def _described(x: Tensor, tiles: int = 1) -> TensorDescriptor:
    # B * L fits 32 bits: no Hopper chip has memory for more rows
    B, L, H, D = x.shape
    return TensorDescriptor(x, [B * L, H * D], [x.stride(1), 1], [tiles * ROWS.value, D], SHARED_LAYOUT)
