"""Gated residual connection: each tensor of tokens is read or written once in each direction.

A program computes some rows (tokens) of a block of columns of one sample, a tile of rows after the other. The backward
keeps the sums of its columns that are the gradients of gate and bias.

B batch, L tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch
from vsa_kernels.partial_sums import add_partials

# half a warp has a row of a tile in 16-byte accesses of half precision
_COLUMNS, _TILE_ROWS, _WARPS = 128, 16, 4
# stages of the pipeline over tiles: the next two are on their way to shared memory while one is computed
_STAGES = 3
# rows of a program: few enough that all multiprocessors are busy with small problems, so many that writing and adding
# partial sums is a small part of the traffic
_FEWEST_ROWS, _MOST_ROWS, _PROGRAMS = 16, 128, 1024


@triton.jit(do_not_specialize=["L"])
def _gated_residual_kernel(
    x, update, update_bias, gate, out, L, gate_b,
    C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(C, COLUMNS), tl.program_id(0) // tl.cdiv(C, COLUMNS)
    i_b, first = (i_p // tl.cdiv(L, ROWS)).to(tl.int64), i_p % tl.cdiv(L, ROWS) * ROWS
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    b_gate = tl.load(gate + i_b * gate_b + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        b_bias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for i in tl.range(first, tl.minimum(first + ROWS, L), TILE, num_stages=STAGES):
        o_l = i + tl.arange(0, TILE)
        o_x = (i_b * L + o_l)[:, None] * C + o_c[None, :]
        m = (o_l < L)[:, None] & m_c[None, :]
        b_update = tl.load(update + o_x, mask=m, other=0.0).to(tl.float32)
        if BIASED:
            b_update += b_bias
        b_x = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32) + b_update * b_gate
        tl.store(out + o_x, b_x.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["L"])
def _gated_residual_grad_kernel(
    dout, update, update_bias, gate, dupdate, gate_sums, bias_sums, L, gate_b,
    C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
    GATE_SUMMED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(C, COLUMNS), tl.program_id(0) // tl.cdiv(C, COLUMNS)
    i_b, first = (i_p // tl.cdiv(L, ROWS)).to(tl.int64), i_p % tl.cdiv(L, ROWS) * ROWS
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    b_gate = tl.load(gate + i_b * gate_b + o_c, mask=m_c, other=0.0).to(tl.float32)
    if BIASED and GATE_SUMMED:
        b_bias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    # the sum of the gradients of the update is the gate times that of dout
    b_sum = tl.zeros((TILE, COLUMNS), tl.float32)
    b_dgate = tl.zeros((TILE, COLUMNS), tl.float32)
    for i in tl.range(first, tl.minimum(first + ROWS, L), TILE, num_stages=STAGES):
        o_l = i + tl.arange(0, TILE)
        o_x = (i_b * L + o_l)[:, None] * C + o_c[None, :]
        m = (o_l < L)[:, None] & m_c[None, :]
        b_do = tl.load(dout + o_x, mask=m, other=0.0).to(tl.float32)
        tl.store(dupdate + o_x, (b_do * b_gate[None, :]).to(dupdate.dtype.element_ty), mask=m)
        if BIASED:
            b_sum += b_do
        if GATE_SUMMED:
            b_update = tl.load(update + o_x, mask=m, other=0.0).to(tl.float32)
            if BIASED:
                b_update += b_bias
            b_dgate += b_do * b_update
    o_sum = i_p.to(tl.int64) * C + o_c
    if BIASED:
        tl.store(bias_sums + o_sum, tl.sum(b_sum, 0) * b_gate, mask=m_c)
    if GATE_SUMMED:
        tl.store(gate_sums + o_sum, tl.sum(b_dgate, 0), mask=m_c)


def forward(x: Tensor, update: Tensor, update_bias: Tensor | None, gate: Tensor) -> Tensor:
    """`x + gate * update`, contiguous.

    Args:
        x: `[B, L, C]` in fp32, fp16 or bf16.
        update: `[B, L, C]` like x.
        update_bias: `[C]` added to the update, or None.
        gate: `[B, 1, C]`.
    """
    x, update = x.contiguous(), update.contiguous()
    update_bias = None if update_bias is None else update_bias.contiguous()
    out = x.new_empty(x.shape)
    gate = _row_ready(gate)
    programs, constants = _programs(x)
    launch(
        _gated_residual_kernel, _grid(x, programs),
        x, update, update_bias, gate, out, x.shape[1], gate.stride(0), BIASED=update_bias is not None, **constants,
    )  # fmt: skip
    return out


def backward(
    dout: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the update, its bias and gate; those that are not needed are empty.

    They are the same bits in every call.

    Args:
        dout: `[B, L, C]` gradient of the sum.
        update: `[B, L, C]`; None where gate needs no gradient.
        update_bias: as in `forward`; None where neither it nor gate needs a gradient.
        gate: as in `forward`.
    """
    dout, gate = dout.contiguous(), _row_ready(gate)
    update, update_bias = (None if x is None else x.contiguous() for x in (update, update_bias))
    B, _, C = dout.shape
    dupdate = dout.new_empty(dout.shape)
    programs, constants = _programs(dout)
    biased, gate_summed = update_bias is not None, update is not None
    gate_sums, bias_sums = (
        dout.new_empty((n * B * programs, C), dtype=torch.float32) for n in (int(gate_summed), int(biased))
    )
    launch(
        _gated_residual_grad_kernel, _grid(dout, programs),
        dout, update, update_bias, gate, dupdate, gate_sums, bias_sums, dout.shape[1], gate.stride(0),
        BIASED=biased, GATE_SUMMED=gate_summed, **constants,
    )  # fmt: skip
    dubias, dgate = (dout.new_empty((0,)) for _ in range(2))
    if update_bias is not None:
        dubias = add_partials(bias_sums, update_bias.new_empty(update_bias.shape))
    if update is not None:
        dgate = add_partials(gate_sums.view(B, programs, C), gate.new_empty(gate.shape))
    return dupdate, dubias, dgate


def _row_ready(gate: Tensor) -> Tensor:
    return gate if gate.stride(-1) == 1 else gate.contiguous()


def _programs(x: Tensor) -> tuple[int, dict[str, Any]]:
    """Number of programs for each sample and block of columns, and the constants of a launch."""
    B, L, C = x.shape
    share = max(B * L * cdiv(C, _COLUMNS) // _PROGRAMS, 1)
    rows = min(max(1 << share.bit_length() - 1, _FEWEST_ROWS), _MOST_ROWS)
    constants = {"C": C, "ROWS": rows, "TILE": _TILE_ROWS, "COLUMNS": _COLUMNS}
    return cdiv(L, rows), constants | {"STAGES": _STAGES, "num_warps": _WARPS}


def _grid(x: Tensor, programs: int) -> tuple[int]:
    return (x.shape[0] * programs * cdiv(x.shape[2], _COLUMNS),)
