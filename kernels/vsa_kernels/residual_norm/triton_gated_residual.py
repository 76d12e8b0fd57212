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
from vsa_kernels.residual_norm.triton_places import Programs, add_by_row, places_of_program, programs_of

# half a warp has a row of a tile in 16-byte accesses of half precision
_COLUMNS, _TILE_ROWS, _WARPS = 128, 16, 4
# stages of the pipeline over tiles: the next two are on their way to shared memory while one is computed
_STAGES = 3
# rows of a program: few enough that all multiprocessors are busy with small problems, so many that writing and adding
# partial sums is a small part of the traffic
_FEWEST_ROWS, _MOST_ROWS, _PROGRAMS = 16, 128, 1024


@triton.jit(do_not_specialize=["L", "split", "firsts"])
def _gated_residual_kernel(
    x, update, update_bias, gate, out, order, split, firsts, L, gate_b, gate_m,
    C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
    ORDERED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(C, COLUMNS), tl.program_id(0) // tl.cdiv(C, COLUMNS)
    i_b, i_m, first, end = places_of_program(i_p, L, split, firsts, ROWS, ORDERED)
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    b_gate = tl.load(gate + i_b * gate_b + i_m * gate_m + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        b_bias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for i in tl.range(first, tl.minimum(first + ROWS, end), TILE, num_stages=STAGES):
        o_l = i + tl.arange(0, TILE)
        m = (o_l < end)[:, None] & m_c[None, :]
        if ORDERED:
            o_l = tl.load(order + o_l, mask=o_l < end, other=0)
        o_x = (i_b * L + o_l)[:, None] * C + o_c[None, :]
        b_update = tl.load(update + o_x, mask=m, other=0.0).to(tl.float32)
        if BIASED:
            b_update += b_bias
        b_x = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32) + b_update * b_gate
        tl.store(out + o_x, b_x.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["L", "split", "firsts"])
def _gated_residual_grad_kernel(
    dout, update, update_bias, gate, dupdate, gate_sums, bias_sums, order, split, firsts, L, gate_b, gate_m,
    C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
    GATE_SUMMED: tl.constexpr, ORDERED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(C, COLUMNS), tl.program_id(0) // tl.cdiv(C, COLUMNS)
    i_b, i_m, first, end = places_of_program(i_p, L, split, firsts, ROWS, ORDERED)
    o_c = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    b_gate = tl.load(gate + i_b * gate_b + i_m * gate_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    if BIASED and GATE_SUMMED:
        b_bias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    # the sum of the gradients of the update is the gate times that of dout
    b_sum = tl.zeros((TILE, COLUMNS), tl.float32)
    b_dgate = tl.zeros((TILE, COLUMNS), tl.float32)
    for i in tl.range(first, tl.minimum(first + ROWS, end), TILE, num_stages=STAGES):
        o_l = i + tl.arange(0, TILE)
        m = (o_l < end)[:, None] & m_c[None, :]
        if ORDERED:
            o_l = tl.load(order + o_l, mask=o_l < end, other=0)
        o_x = (i_b * L + o_l)[:, None] * C + o_c[None, :]
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


def forward(
    x: Tensor, update: Tensor, update_bias: Tensor | None, gate: Tensor, order: Tensor | None, split: int
) -> Tensor:
    """`x + gate * update`, contiguous.

    Args:
        x: `[B, L, C]` in fp32, fp16 or bf16.
        update: `[B, L, C]` like x.
        update_bias: `[C]` added to the update, or None.
        gate: `[B, M, C]`; M is 2 with an order, else 1.
        order: int32 `[L]` tokens, those with the first row of the gate before those with the second one, or None.
        split: number of tokens with the first row.
    """
    x, update = x.contiguous(), update.contiguous()
    update_bias = None if update_bias is None else update_bias.contiguous()
    out = x.new_empty(x.shape)
    gate = _row_ready(gate)
    programs, constants = _programs(x, order, split)
    launch(
        _gated_residual_kernel, _grid(x, programs),
        x, update, update_bias, gate, out, *programs.arguments, x.shape[1], *gate.stride()[:2],
        BIASED=update_bias is not None, **constants,
    )  # fmt: skip
    return out


def backward(
    dout: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor, order: Tensor | None, split: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the update, its bias and gate; those that are not needed are empty.

    They are the same bits in every call.

    Args:
        dout: `[B, L, C]` gradient of the sum.
        update: `[B, L, C]`; None where gate needs no gradient.
        update_bias: as in `forward`; None where neither it nor gate needs a gradient.
        gate: as in `forward`.
        order: as in `forward`.
        split: as in `forward`.
    """
    dout, gate = dout.contiguous(), _row_ready(gate)
    update, update_bias = (None if x is None else x.contiguous() for x in (update, update_bias))
    dupdate = dout.new_empty(dout.shape)
    programs, constants = _programs(dout, order, split)
    biased, gate_summed = update_bias is not None, update is not None
    gate_sums, bias_sums = (
        dout.new_empty((n * programs.number, dout.shape[2]), dtype=torch.float32)
        for n in (int(gate_summed), int(biased))
    )
    launch(
        _gated_residual_grad_kernel, _grid(dout, programs),
        dout, update, update_bias, gate, dupdate, gate_sums, bias_sums, *programs.arguments, dout.shape[1],
        *gate.stride()[:2], BIASED=biased, GATE_SUMMED=gate_summed, **constants,
    )  # fmt: skip
    dubias, dgate = (dout.new_empty((0,)) for _ in range(2))
    if update_bias is not None:
        dubias = add_partials(bias_sums, update_bias.new_empty(update_bias.shape))
    if update is not None:
        dgate = add_by_row(gate_sums, gate, programs)
    return dupdate, dubias, dgate


def _row_ready(gate: Tensor) -> Tensor:
    return gate if gate.stride(-1) == 1 else gate.contiguous()


def _programs(x: Tensor, order: Tensor | None, split: int) -> tuple[Programs, dict[str, Any]]:
    """Programs of a block of columns, and the constants of a launch."""
    B, L, C = x.shape
    share = max(B * L * cdiv(C, _COLUMNS) // _PROGRAMS, 1)
    rows = min(max(1 << share.bit_length() - 1, _FEWEST_ROWS), _MOST_ROWS)
    constants = {"C": C, "ROWS": rows, "TILE": _TILE_ROWS, "COLUMNS": _COLUMNS, "ORDERED": order is not None}
    return programs_of(B, L, order, split, rows), constants | {"STAGES": _STAGES, "num_warps": _WARPS}


def _grid(x: Tensor, programs: Programs) -> tuple[int]:
    return (programs.number * cdiv(x.shape[2], _COLUMNS),)
