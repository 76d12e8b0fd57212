"""Residual connection and layer norm: each tensor of tokens is read or written once in each direction.

A program computes some rows (tokens) of one sample, one after the other, all with the same parameters. The backward
keeps the sums over its rows that are the gradients of gate, parameters and the update's bias.

B batch, L tokens, C channels, N programs of a sample.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import capability, launch, next_power_of_2
from vsa_kernels.partial_sums import add_partials
from vsa_kernels.residual_norm.triton_places import add_by_row, places_of_program, programs_of

# rows of a forward program, enough to reuse the parameters
_ROWS = 4
# elements of a row per thread, in the backward of rows up to 4,096 channels and of longer ones: it has three sums and
# four more fp32 numbers for each in registers
_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS, _LONG_ELEMENTS = 32, 16, 32
# stages of the backward's pipeline over rows: the next two are on their way to shared memory while one is computed
_STAGES = 3
# rows of a backward program: between them, few enough that all multiprocessors are busy with small problems, so many
# that writing and adding partial sums is a small part of the traffic
_FEWEST_ROWS, _MOST_ROWS, _PROGRAMS = 16, 64, 512


@triton.jit(do_not_specialize=["L", "split", "firsts"])
def _residual_norm_kernel(
    x, update, update_bias, gate, weight, bias, total, norm, mean, rstd, order, split, firsts,
    L, x_b, x_l, u_b, u_l, gate_b, gate_m, weight_b, weight_m, bias_b, bias_m, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UPDATED: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    i_b, i_m, first, end = places_of_program(tl.program_id(0), L, split, firsts, ROWS, ORDERED)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < C
    b_weight = tl.load(weight + i_b * weight_b + i_m * weight_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.load(bias + i_b * bias_b + i_m * bias_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    if GATED:
        b_gate = tl.load(gate + i_b * gate_b + i_m * gate_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    if BIASED:
        b_ubias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    for i in range(tl.minimum(ROWS, end - first)):
        i_l = (tl.load(order + first + i) if ORDERED else first + i).to(tl.int64)
        row = i_b * L + i_l
        b_x = tl.load(x + i_b * x_b + i_l * x_l + o_c, mask=m_c, other=0.0).to(tl.float32)
        if UPDATED:
            b_update = tl.load(update + i_b * u_b + i_l * u_l + o_c, mask=m_c, other=0.0).to(tl.float32)
            if BIASED:
                b_update += b_ubias
            b_x += b_update * b_gate if GATED else b_update
            # the backward reads the rounded sum
            b_total = b_x.to(total.dtype.element_ty)
            tl.store(total + row * C + o_c, b_total, mask=m_c)
            b_x = b_total.to(tl.float32)
        b_mean = tl.sum(b_x, 0) / C
        b_x = tl.where(m_c, b_x - b_mean, 0.0)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps)
        tl.store(mean + row, b_mean)
        tl.store(rstd + row, b_rstd)
        b_norm = b_x * b_rstd * b_weight + b_bias
        tl.store(norm + row * C + o_c, b_norm.to(norm.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["L", "split", "firsts"])
def _residual_norm_grad_kernel(
    dtotal, dnorm, total, update, update_bias, gate, weight, mean, rstd, dx, dupdate, gate_sums, update_sums, sums,
    order, split, firsts, L, dt_b, dt_l, dn_b, dn_l, t_b, t_l, u_b, u_l, gate_b, gate_m, weight_b, weight_m,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UPDATED: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr, GATE_SUMMED: tl.constexpr, SUMMED: tl.constexpr, ORDERED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_m, first, end = places_of_program(tl.program_id(0), L, split, firsts, ROWS, ORDERED)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < C
    b_weight = tl.load(weight + i_b * weight_b + i_m * weight_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    if GATED:
        b_gate = tl.load(gate + i_b * gate_b + i_m * gate_m + o_c, mask=m_c, other=0.0).to(tl.float32)
    if BIASED and GATE_SUMMED:
        b_ubias = tl.load(update_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dgate = tl.zeros((BLOCK,), tl.float32)
    b_dubias = tl.zeros((BLOCK,), tl.float32)
    b_dweight = tl.zeros((BLOCK,), tl.float32)
    b_dbias = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, tl.minimum(ROWS, end - first), num_stages=STAGES):
        i_l = (tl.load(order + first + i) if ORDERED else first + i).to(tl.int64)
        row = i_b * L + i_l
        b_dn = tl.load(dnorm + i_b * dn_b + i_l * dn_l + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_x = tl.load(total + i_b * t_b + i_l * t_l + o_c, mask=m_c, other=0.0).to(tl.float32)
        if UPDATED:
            b_dt = tl.load(dtotal + i_b * dt_b + i_l * dt_l + o_c, mask=m_c, other=0.0).to(tl.float32)
        if GATE_SUMMED:
            b_update = tl.load(update + i_b * u_b + i_l * u_l + o_c, mask=m_c, other=0.0).to(tl.float32)
            if BIASED:
                b_update += b_ubias
        b_rstd = tl.load(rstd + row)
        b_x = tl.where(m_c, (b_x - tl.load(mean + row)) * b_rstd, 0.0)
        if SUMMED:
            b_dweight += b_dn * b_x
            b_dbias += b_dn
        b_dn *= b_weight
        b_dx = (b_dn - tl.sum(b_dn, 0) / C - b_x * (tl.sum(b_dn * b_x, 0) / C)) * b_rstd
        if UPDATED:
            b_dx += b_dt
        tl.store(dx + row * C + o_c, b_dx.to(dx.dtype.element_ty), mask=m_c)
        if GATE_SUMMED:
            b_dgate += b_dx * b_update
        if GATED:
            b_dx *= b_gate
            tl.store(dupdate + row * C + o_c, b_dx.to(dupdate.dtype.element_ty), mask=m_c)
        if BIASED:
            b_dubias += b_dx
    # [2, number of programs, C]: of weight and of bias
    o_sum = tl.program_id(0).to(tl.int64) * C + o_c
    if SUMMED:
        tl.store(sums + o_sum, b_dweight, mask=m_c)
        tl.store(sums + tl.num_programs(0).to(tl.int64) * C + o_sum, b_dbias, mask=m_c)
    if GATE_SUMMED:
        tl.store(gate_sums + o_sum, b_dgate, mask=m_c)
    if BIASED:
        tl.store(update_sums + o_sum, b_dubias, mask=m_c)


def forward(
    x: Tensor, update: Tensor | None, update_bias: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor,
    eps: float, order: Tensor | None, split: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum (empty without an update) and its norm, contiguous, and fp32 mean and inverse standard deviation.

    Args:
        x: `[B, L, C]` in fp32, fp16 or bf16.
        update: `[B, L, C]` or None.
        update_bias: `[C]` added to the update, or None.
        gate: `[B, M, C]` or None; M is 2 with an order, else 1.
        weight: `[C]` or `[B, M, C]`.
        bias: shift of the shape of weight.
        eps: constant added to the variance.
        order: int32 `[L]` tokens, those with the first row of parameters before those with the second one; None: all
            have one row.
        split: number of tokens with the first row.
    """
    x, update = _rows_ready(x), _rows_ready(update)
    update_bias, gate, weight, bias = (_rows_ready(p) for p in (update_bias, gate, weight, bias))
    B, L, C = x.shape
    total = x.new_empty(x.shape if update is not None else (0,))
    norm = x.new_empty(x.shape)
    mean, rstd = (x.new_empty((B, L), dtype=torch.float32) for _ in range(2))
    programs = programs_of(B, L, order, split, _ROWS)
    launch(
        _residual_norm_kernel, (programs.number,),
        x, update, update_bias, gate, weight, bias, total, norm, mean, rstd, *programs.arguments, L,
        *x.stride()[:2], *_strides(update), *_of_rows(gate), *_of_rows(weight), *_of_rows(bias), eps,
        ROWS=_ROWS, UPDATED=update is not None, BIASED=update_bias is not None, GATED=gate is not None,
        ORDERED=order is not None, **_tile(C, _FORWARD_ELEMENTS),
    )  # fmt: skip
    return total, norm, mean, rstd


def backward(
    dtotal: Tensor | None, dnorm: Tensor, total: Tensor, update: Tensor | None, update_bias: Tensor | None,
    gate: Tensor | None, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, order: Tensor | None,
    split: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the update, its bias, gate, weight and bias; those that are not needed are empty.

    They are the same bits in every call.

    Args:
        dtotal: `[B, L, C]` gradient of the sum; None where the sum is x itself.
        dnorm: `[B, L, C]` gradient of the norm.
        total: `[B, L, C]` the sum.
        update: `[B, L, C]`; None where gate needs no gradient.
        update_bias: as in `forward`; None where neither it nor gate needs a gradient.
        gate: as in `forward`.
        weight: as in `forward`.
        bias: as in `forward`; None where weight and bias need no gradients.
        mean: fp32 `[B, L]` of `forward`.
        rstd: fp32 `[B, L]` of `forward`.
        order: as in `forward`.
        split: as in `forward`.
    """
    dtotal, dnorm, total, update = (_rows_ready(x) for x in (dtotal, dnorm, total, update))
    update_bias, gate, weight = (_rows_ready(p) for p in (update_bias, gate, weight))
    B, L, C = total.shape
    share = max(B * L // _PROGRAMS, 1)
    rows = min(max(1 << share.bit_length() - 1, _FEWEST_ROWS), _MOST_ROWS)
    programs = programs_of(B, L, order, split, rows)
    gated, gate_summed, biased, summed = (p is not None for p in (gate, update, update_bias, bias))
    dx, dupdate = total.new_empty(total.shape), total.new_empty(total.shape if gated else (0,))
    sums, gate_sums, update_sums = (
        total.new_empty((n, programs.number, C), dtype=torch.float32)
        for n in (2 * summed, int(gate_summed), int(biased))
    )
    launch(
        _residual_norm_grad_kernel, (programs.number,),
        dtotal, dnorm, total, update, update_bias, gate, weight, mean, rstd, dx, dupdate, gate_sums, update_sums, sums,
        *programs.arguments, L, *_strides(dtotal), *_strides(dnorm), *_strides(total), *_strides(update),
        *_of_rows(gate), *_of_rows(weight),
        ROWS=rows, UPDATED=dtotal is not None, BIASED=biased, GATED=gated, GATE_SUMMED=gate_summed, SUMMED=summed,
        ORDERED=order is not None, STAGES=_stages(total, 2 + (dtotal is not None) + gate_summed),
        **_tile(C, _BACKWARD_ELEMENTS if C <= 4096 else _LONG_ELEMENTS),
    )  # fmt: skip
    dubias, dgate, dweight, dbias = (total.new_empty((0,)) for _ in range(4))
    if bias is not None:
        dweight, dbias = (add_by_row(part, like, programs) for part, like in zip(sums, (weight, bias), strict=True))
    if gate is not None and update is not None:
        dgate = add_by_row(gate_sums[0], gate, programs)
    if update_bias is not None:
        dubias = add_partials(update_sums[0], update_bias.new_empty(update_bias.shape))
    return dx, dupdate, dubias, dgate, dweight, dbias


def _rows_ready(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _of_rows(parameter: Tensor | None) -> tuple[int, int]:
    return (0, 0) if parameter is None or parameter.ndim == 1 else (parameter.stride(0), parameter.stride(1))


def _stages(x: Tensor, tensors: int) -> int:
    # stages of a pipeline over rows of several tensors like x, as far as a program's shared memory holds them
    limit = (160 if capability(x.device) in ((8, 0), (9, 0), (10, 0)) else 96) << 10
    row = next_power_of_2(x.shape[-1]) * x.dtype.itemsize
    return _STAGES if (_STAGES - 1) * tensors * row <= limit else 1


def _tile(channels: int, elements: int) -> dict[str, Any]:
    # constants of a launch: a row, and the warps that hold it
    block = next_power_of_2(channels)
    return {"C": channels, "BLOCK": block, "num_warps": min(max(block // (32 * elements), 1), 16)}
