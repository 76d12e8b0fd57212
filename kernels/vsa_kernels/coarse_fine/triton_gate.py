"""Gates of the VSA operator: out = gate_coarse * coarse[block of the token] + gate_fine * fine, and the backward.

The kernels are bound by memory: every token tensor is read or written once, in rows of D elements. Adjacent programs
work on the heads of one block, whose rows are adjacent in memory.

B batch, L tokens, H heads, D head dim, N query blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.block_sparse.triton_tiles import load_tile, rows_ready, span, store_tile
from vsa_kernels.launch import cdiv, launch, next_power_of_2

# most tokens and bytes of a tensor per step; a thread makes four 16-byte accesses to each tensor
_TOKENS = 64
_STEP_BYTES = 1 << 15
_THREAD_BYTES = 64


@triton.jit
def _combine_kernel(
    fine, coarse, gate_coarse, gate_fine, out, q_offsets,
    f_b, f_l, f_h, gc_b, gc_l, gc_h, gf_b, gf_l, gf_h, o_b, o_l,
    L, H, num_q,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    i_h, i_tile = tl.program_id(0) % H, tl.program_id(0) // H
    i_part, i_bn = i_tile % PARTS, i_tile // PARTS
    i_n, i_b = i_bn % num_q, i_bn // num_q
    start, size, _ = span(q_offsets, i_n, i_part, L, SIZE, BLOCK_T, SIZE > 0)
    # [BLOCK_T, BLOCK_D]
    b_fine = load_tile(fine, i_b, i_h, start, size, f_b, f_l, f_h, D, BLOCK_T, BLOCK_D, EVEN)
    b_gc = load_tile(gate_coarse, i_b, i_h, start, size, gc_b, gc_l, gc_h, D, BLOCK_T, BLOCK_D, EVEN)
    # [BLOCK_D]
    o_d = tl.arange(0, BLOCK_D)
    b_coarse = tl.load(coarse + (i_bn.to(tl.int64) * H + i_h) * D + o_d, mask=o_d < D, other=0.0)
    b_out = b_fine.to(tl.float32)
    if GATED:
        b_gf = load_tile(gate_fine, i_b, i_h, start, size, gf_b, gf_l, gf_h, D, BLOCK_T, BLOCK_D, EVEN)
        b_out *= b_gf.to(tl.float32)
    b_out += b_gc.to(tl.float32) * b_coarse[None, :]
    store_tile(out, b_out, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_T, BLOCK_D)


@triton.jit
def _combine_backward_kernel(
    dout, fine, coarse, gate_coarse, gate_fine,
    dfine, delta, dcoarse, dgate_coarse, dgate_fine, delta_coarse, q_offsets,
    do_b, do_l, do_h, f_b, f_l, f_h, gc_b, gc_l, gc_h, gf_b, gf_l, gf_h, o_b, o_l,
    L, H, num_q,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    i_h, i_bn = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, i_b = i_bn % num_q, i_bn // num_q
    # [BLOCK_D]
    o_d = tl.arange(0, BLOCK_D)
    p_row = (i_bn.to(tl.int64) * H + i_h) * D + o_d
    b_coarse = tl.load(coarse + p_row, mask=o_d < D, other=0.0)
    b_dcoarse = tl.zeros([BLOCK_D], dtype=tl.float32)
    o_t = tl.arange(0, BLOCK_T)
    for i_part in range(PARTS):
        start, size, _ = span(q_offsets, i_n, i_part, L, SIZE, BLOCK_T, SIZE > 0)
        # [BLOCK_T, BLOCK_D]
        b_do = load_tile(dout, i_b, i_h, start, size, do_b, do_l, do_h, D, BLOCK_T, BLOCK_D, EVEN)
        b_fine = load_tile(fine, i_b, i_h, start, size, f_b, f_l, f_h, D, BLOCK_T, BLOCK_D, EVEN)
        b_gc = load_tile(gate_coarse, i_b, i_h, start, size, gc_b, gc_l, gc_h, D, BLOCK_T, BLOCK_D, EVEN)
        b_df = b_do.to(tl.float32)
        b_fine = b_fine.to(tl.float32)
        b_dcoarse += tl.sum(b_df * b_gc.to(tl.float32), 0)
        b_dgc = b_df * b_coarse[None, :]
        store_tile(dgate_coarse, b_dgc, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_T, BLOCK_D)
        if GATED:
            b_gf = load_tile(gate_fine, i_b, i_h, start, size, gf_b, gf_l, gf_h, D, BLOCK_T, BLOCK_D, EVEN)
            store_tile(dgate_fine, b_df * b_fine, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_T, BLOCK_D)
            # rounded first: delta belongs to the dfine that the attention kernels will read
            b_rounded = (b_df * b_gf.to(tl.float32)).to(dfine.dtype.element_ty)
            store_tile(dfine, b_rounded, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_T, BLOCK_D)
            b_df = b_rounded.to(tl.float32)
        # [BLOCK_T]
        b_delta = tl.sum(b_df * b_fine, 1)
        p_token = (i_b.to(tl.int64) * H + i_h) * L + start + o_t
        tl.store(delta + p_token, b_delta, mask=o_t < size)
    tl.store(dcoarse + p_row, b_dcoarse, mask=o_d < D)
    tl.store(delta_coarse + (i_b.to(tl.int64) * H + i_h) * num_q + i_n, tl.sum(b_dcoarse * b_coarse, 0))


class GateGradients(NamedTuple):
    """Result of `combine_backward`.

    Args:
        dfine: `[B, L, H, D]`; dout itself without a fine gate.
        delta: fp32 `[B, H, L]`, rowsum(dfine * fine).
        dcoarse: fp32 `[B, N, H, D]`.
        dgate_coarse: `[B, L, H, D]`.
        dgate_fine: `[B, L, H, D]`, None without a fine gate.
        delta_coarse: fp32 `[B, H, N]`, rowsum(dcoarse * coarse).
    """

    dfine: Tensor
    delta: Tensor
    dcoarse: Tensor
    dgate_coarse: Tensor
    dgate_fine: Tensor | None
    delta_coarse: Tensor


def combine(fine: Tensor, coarse: Tensor, gate_coarse: Tensor, gate_fine: Tensor | None, q_blocks: Blocks) -> Tensor:
    """gate_coarse * coarse[block of the token] + gate_fine * fine, `[B, L, H, D]` in fine's dtype.

    Args:
        fine: `[B, L, H, D]`.
        coarse: fp32 `[B, N, H, D]` contiguous.
        gate_coarse: `[B, L, H, D]`.
        gate_fine: `[B, L, H, D]`; None: 1.
        q_blocks: partition of the L tokens.
    """
    B, L, H, D = fine.shape
    fine, gate_coarse = rows_ready(fine), rows_ready(gate_coarse)
    gate_fine = None if gate_fine is None else rows_ready(gate_fine)
    out = fine.new_empty((B, L, H, D))
    constants = _constants(fine, q_blocks)
    launch(
        _combine_kernel, (B * q_blocks.num * constants["PARTS"] * H,),
        fine, coarse, gate_coarse, gate_fine, out, q_blocks.offsets,
        *fine.stride()[:3], *gate_coarse.stride()[:3], *_strides(gate_fine), *out.stride()[:2],
        L, H, q_blocks.num, GATED=gate_fine is not None, **constants,
    )  # fmt: skip
    return out


def combine_backward(
    dout: Tensor,
    fine: Tensor,
    coarse: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    q_blocks: Blocks,
) -> GateGradients:
    """Gradients of `combine`, and the deltas that the backwards of both stages need, in one pass over the tokens.

    Args:
        dout: `[B, L, H, D]`.
        fine: `[B, L, H, D]` output of the fine stage.
        coarse: fp32 `[B, N, H, D]` contiguous, output of the coarse stage.
        gate_coarse: `[B, L, H, D]`.
        gate_fine: `[B, L, H, D]` or None.
        q_blocks: partition of the L tokens.
    """
    B, L, H, D = fine.shape
    dout, fine, gate_coarse = rows_ready(dout), rows_ready(fine), rows_ready(gate_coarse)
    gated = gate_fine is not None
    gate_fine = rows_ready(gate_fine) if gated else None
    dfine = fine.new_empty((B, L, H, D)) if gated else dout
    dgate_coarse = gate_coarse.new_empty((B, L, H, D))
    dgate_fine = gate_fine.new_empty((B, L, H, D)) if gate_fine is not None else None
    delta = fine.new_empty((B, H, L), dtype=torch.float32)
    dcoarse, delta_coarse = torch.empty_like(coarse), coarse.new_empty((B, H, q_blocks.num))
    launch(
        _combine_backward_kernel, (B * q_blocks.num * H,),
        dout, fine, coarse, gate_coarse, gate_fine,
        dfine if gated else None, delta, dcoarse, dgate_coarse, dgate_fine, delta_coarse, q_blocks.offsets,
        *dout.stride()[:3], *fine.stride()[:3], *gate_coarse.stride()[:3], *_strides(gate_fine),
        *dgate_coarse.stride()[:2],
        L, H, q_blocks.num, GATED=gated, **_constants(fine, q_blocks),
    )  # fmt: skip
    return GateGradients(dfine, delta, dcoarse, dgate_coarse, dgate_fine, delta_coarse)


def _constants(x: Tensor, q_blocks: Blocks) -> dict[str, Any]:
    head_dim, size = x.shape[3], x.element_size()
    block_d = next_power_of_2(head_dim)
    block_t = min(_TOKENS, _STEP_BYTES // (block_d * size), next_power_of_2(q_blocks.max_size))
    uniform = q_blocks.max_size == q_blocks.min_size
    return {
        "D": head_dim, "BLOCK_D": block_d, "BLOCK_T": block_t,
        "PARTS": cdiv(q_blocks.max_size, block_t), "SIZE": q_blocks.max_size if uniform else 0,
        "EVEN": uniform and q_blocks.max_size % block_t == 0,
        "num_warps": max(1, block_t * block_d * size // (32 * _THREAD_BYTES)),
        # limits registers, so that 16 warps run on a multiprocessor at a time
        "maxnreg": 128,
    }  # fmt: skip


def _strides(gate: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if gate is None else gate.stride()[:3]
