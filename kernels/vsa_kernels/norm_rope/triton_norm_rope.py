"""RMS norm and rotation in one read and one write of the tokens; the gradients in two reads and one write.

A program computes some rows (tokens) one after the other. Its tile is one row, [heads, dims], both padded to powers of
two and masked: a thread has whole pairs in its 16-byte accesses, and meets the same few cosines in every head.

B batch, L tokens, H heads, D head dim, C = H * D channels, R = B * L rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch, next_power_of_2
from vsa_kernels.partial_sums import add_partials

# rows of a forward program, enough to reuse the weights
_ROWS = 8
# elements of a row per thread, of rows up to 4,096 channels and of longer ones: the backward has up to six fp32 numbers
# for each in registers
_ELEMENTS, _LONG_ELEMENTS = 16, 32
# stages of the pipeline over rows: the next two are on their way to shared memory while one is computed; rows of more
# bytes would fill it
_STAGES, _LONGEST_PIPELINED = 3, 16384
# rows of a backward program: between them, few enough that all multiprocessors are busy with small problems, so many
# that writing and adding partial gradients of the weight is a small part of the traffic
_FEWEST_ROWS, _MOST_ROWS, _PROGRAMS = 16, 64, 1024


@triton.jit
def _pairs(b_x, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Even and odd channels, fp32 [BLOCK_H, BLOCK_D / 2], of a tile [BLOCK_H, BLOCK_D]."""
    return tl.split(tl.reshape(b_x.to(tl.float32), (BLOCK_H, BLOCK_D // 2, 2)))


@triton.jit(do_not_specialize=["R", "L"])
def _norm_rope_kernel(
    x, weight, bias, cos, sin, out, rstd, R, L, stride_b, stride_l, eps,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BIASED: tl.constexpr, ROTATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_h, o_d, o_p = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    o_c = o_h[:, None] * D + o_d[None, :]
    m_c = (o_h < H)[:, None] & (o_d < D)[None, :]
    m_p = o_p < D // 2
    b_weight = tl.load(weight + o_c, mask=m_c, other=0.0)
    if BIASED:
        b_bias = tl.load(bias + o_c, mask=m_c, other=0.0)
    first = tl.program_id(0) * ROWS
    for i in tl.range(0, tl.minimum(ROWS, R - first), num_stages=STAGES):
        i_r = first + i
        i_b, i_l = (i_r // L).to(tl.int64), (i_r % L).to(tl.int64)
        b_x = tl.load(x + i_b * stride_b + i_l * stride_l + o_c, mask=m_c, other=0.0).to(tl.float32)
        if BIASED:
            b_x += b_bias.to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x) / (H * D) + eps)
        tl.store(rstd + i_r, b_rstd)
        b_out = b_x * b_rstd * b_weight.to(tl.float32)
        if ROTATED:
            b_cos = tl.load(cos + i_l * (D // 2) + o_p, mask=m_p, other=0.0)[None, :]
            b_sin = tl.load(sin + i_l * (D // 2) + o_p, mask=m_p, other=0.0)[None, :]
            # [BLOCK_H, BLOCK_D / 2]
            b_even, b_odd = _pairs(b_out, BLOCK_H, BLOCK_D)
            b_out = tl.join(b_even * b_cos - b_odd * b_sin, b_even * b_sin + b_odd * b_cos)
            b_out = tl.reshape(b_out, (BLOCK_H, BLOCK_D))
        tl.store(out + i_r.to(tl.int64) * (H * D) + o_c, b_out.to(out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["R", "L"])
def _norm_rope_grad_kernel(
    dout, x, weight, bias, cos, sin, rstd, dx, partials, R, L, do_b, do_l, do_h, stride_b, stride_l,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BIASED: tl.constexpr, ROTATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_h, o_d, o_p = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    o_c = o_h[:, None] * D + o_d[None, :]
    o_do = o_h.to(tl.int64)[:, None] * do_h + o_d[None, :]
    m_c = (o_h < H)[:, None] & (o_d < D)[None, :]
    m_p = o_p < D // 2
    dw_even = tl.zeros((BLOCK_H, BLOCK_D // 2), tl.float32)
    dw_odd = tl.zeros((BLOCK_H, BLOCK_D // 2), tl.float32)
    db_even = tl.zeros((BLOCK_H, BLOCK_D // 2), tl.float32)
    db_odd = tl.zeros((BLOCK_H, BLOCK_D // 2), tl.float32)
    b_weight = tl.load(weight + o_c, mask=m_c, other=0.0)
    if BIASED:
        b_bias = tl.load(bias + o_c, mask=m_c, other=0.0)
    first = tl.program_id(0) * ROWS
    for i in tl.range(0, tl.minimum(ROWS, R - first), num_stages=STAGES):
        i_r = first + i
        i_b, i_l = (i_r // L).to(tl.int64), (i_r % L).to(tl.int64)
        b_x = tl.load(x + i_b * stride_b + i_l * stride_l + o_c, mask=m_c, other=0.0)
        b_do = tl.load(dout + i_b * do_b + i_l * do_l + o_do, mask=m_c, other=0.0)
        b_rstd = tl.load(rstd + i_r)
        n_even, n_odd = _pairs(b_x, BLOCK_H, BLOCK_D)
        if BIASED:
            even, odd = _pairs(b_bias, BLOCK_H, BLOCK_D)
            n_even, n_odd = n_even + even, n_odd + odd
        n_even, n_odd = n_even * b_rstd, n_odd * b_rstd
        g_even, g_odd = _pairs(b_do, BLOCK_H, BLOCK_D)
        if ROTATED:
            b_cos = tl.load(cos + i_l * (D // 2) + o_p, mask=m_p, other=0.0)[None, :]
            b_sin = tl.load(sin + i_l * (D // 2) + o_p, mask=m_p, other=0.0)[None, :]
            # rotated back
            g_even, g_odd = g_even * b_cos + g_odd * b_sin, g_odd * b_cos - g_even * b_sin
        dw_even += g_even * n_even
        dw_odd += g_odd * n_odd
        w_even, w_odd = _pairs(b_weight, BLOCK_H, BLOCK_D)
        g_even, g_odd = g_even * w_even, g_odd * w_odd
        b_mean = tl.sum(g_even * n_even + g_odd * n_odd) / (H * D)
        g_even, g_odd = (g_even - n_even * b_mean) * b_rstd, (g_odd - n_odd * b_mean) * b_rstd
        if BIASED:
            db_even += g_even
            db_odd += g_odd
        b_dx = tl.reshape(tl.join(g_even, g_odd), (BLOCK_H, BLOCK_D)).to(dx.dtype.element_ty)
        tl.store(dx + i_r.to(tl.int64) * (H * D) + o_c, b_dx, mask=m_c)
    # [1 or 2, programs, C]: of weight and of bias
    o_sum = tl.program_id(0).to(tl.int64) * (H * D) + o_c
    tl.store(partials + o_sum, tl.reshape(tl.join(dw_even, dw_odd), (BLOCK_H, BLOCK_D)), mask=m_c)
    if BIASED:
        o_sum += tl.num_programs(0).to(tl.int64) * (H * D)
        tl.store(partials + o_sum, tl.reshape(tl.join(db_even, db_odd), (BLOCK_H, BLOCK_D)), mask=m_c)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, num_heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalised and rotated heads `[B, L, H, D]`, contiguous in x's dtype, and fp32 `[B, L]` inverse roots.

    Args:
        x: `[B, L, C]` tokens in fp32, fp16 or bf16.
        weight: `[C]` of the norm.
        bias: `[C]` added to the tokens, or None.
        cos: fp32 `[L, D / 2]`, or None without rotation.
        sin: table of the shape of cos.
        num_heads: H.
        eps: constant added to the mean square.
    """
    x = _rows_ready(x)
    B, L, C = x.shape
    head_dim = C // num_heads
    out = x.new_empty((B, L, num_heads, head_dim))
    rstd = x.new_empty((B, L), dtype=torch.float32)
    launch(
        _norm_rope_kernel, (cdiv(B * L, _ROWS),),
        x, *_contiguous(weight, bias, cos, sin), out, rstd, B * L, L, *x.stride()[:2], eps,
        ROWS=_ROWS, BIASED=bias is not None, ROTATED=cos is not None,
        **_tile(num_heads, head_dim, x.dtype),
    )  # fmt: skip
    return out, rstd


def backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x `[B, L, C]`, contiguous, of weight and bias `[C]` (empty without a bias), the same bits in every
    call.

    Args:
        dout: `[B, L, H, D]` gradient of the heads.
        x: as in `forward`.
        weight: as in `forward`.
        bias: as in `forward`.
        cos: as in `forward`.
        sin: as in `forward`.
        rstd: the inverse roots of `forward`.
    """
    x, dout = _rows_ready(x), _rows_ready(dout)
    B, L, num_heads, head_dim = dout.shape
    C = num_heads * head_dim
    rows = min(max(1 << max(B * L // _PROGRAMS, 1).bit_length() - 1, _FEWEST_ROWS), _MOST_ROWS)
    num = cdiv(B * L, rows)
    dx = x.new_empty(x.shape)
    partials = x.new_empty((1 if bias is None else 2, num, C), dtype=torch.float32)
    launch(
        _norm_rope_grad_kernel, (num,),
        dout, x, *_contiguous(weight, bias, cos, sin), rstd, dx, partials,
        B * L, L, *dout.stride()[:3], *x.stride()[:2],
        ROWS=rows, BIASED=bias is not None, ROTATED=cos is not None,
        **_tile(num_heads, head_dim, x.dtype),
    )  # fmt: skip
    dweight, dbias = weight.new_empty(weight.shape), x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    for part, total in zip(partials, (dweight, dbias), strict=False):
        add_partials(part, total)
    return dx, dweight, dbias


def _rows_ready(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _tile(num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    # constants of a launch: a row, and the warps that hold it
    block_h, block_d = next_power_of_2(num_heads), next_power_of_2(head_dim)
    row = block_h * block_d
    elements = _ELEMENTS if row <= 4096 else _LONG_ELEMENTS
    warps = min(max(row // (32 * elements), 1), 16)
    stages = _STAGES if row * dtype.itemsize <= _LONGEST_PIPELINED else 1
    sizes = {"H": num_heads, "D": head_dim, "BLOCK_H": block_h, "BLOCK_D": block_d}
    return {**sizes, "STAGES": stages, "num_warps": warps}
