"""Bias and GELU in one read and one write of the hidden layer; both gradients in two reads and one write.

A program computes some rows (tokens) of a block of columns, a tile of rows after the other, and keeps the sums of its
columns for the gradient of the bias.

R rows, F hidden width. With s the logistic function and z = sqrt(8 / pi) (u + 0.044715 u^3), GELU's tanh form is
u s(z), because (1 + tanh(z / 2)) / 2 = s(z).
"""

from __future__ import annotations

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


@triton.jit
def _logistic(u):
    """s(z) and its derivative in z, finite for every finite u."""
    z = 1.5957691216057308 * (u + 0.044715 * u * u * u)
    e = tl.exp(-tl.abs(z))
    r = 1 / (1 + e)
    return tl.where(z >= 0, r, e * r), e * r * r


@triton.jit(do_not_specialize=["R"])
def _bias_gelu_kernel(
    x, bias, out, R, F: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(F, COLUMNS), tl.program_id(0) // tl.cdiv(F, COLUMNS)
    o_f = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_f = o_f < F
    b_bias = tl.load(bias + o_f, mask=m_f, other=0.0).to(tl.float32)[None, :]
    first = i_p * ROWS
    for i in tl.range(first, tl.minimum(first + ROWS, R), TILE, num_stages=STAGES):
        o_r = i + tl.arange(0, TILE)
        o_x = o_r.to(tl.int64)[:, None] * F + o_f[None, :]
        m = (o_r < R)[:, None] & m_f[None, :]
        b_u = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32) + b_bias
        b_s, _ = _logistic(b_u)
        tl.store(out + o_x, (b_u * b_s).to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R"])
def _bias_gelu_grad_kernel(
    dout, x, bias, dx, partials, R,
    F: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # neighbouring programs read whole rows together
    i_c, i_p = tl.program_id(0) % tl.cdiv(F, COLUMNS), tl.program_id(0) // tl.cdiv(F, COLUMNS)
    o_f = i_c * COLUMNS + tl.arange(0, COLUMNS)
    m_f = o_f < F
    b_bias = tl.load(bias + o_f, mask=m_f, other=0.0).to(tl.float32)[None, :]
    b_sum = tl.zeros((TILE, COLUMNS), tl.float32)
    first = i_p * ROWS
    for i in tl.range(first, tl.minimum(first + ROWS, R), TILE, num_stages=STAGES):
        o_r = i + tl.arange(0, TILE)
        o_x = o_r.to(tl.int64)[:, None] * F + o_f[None, :]
        m = (o_r < R)[:, None] & m_f[None, :]
        b_u = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32) + b_bias
        b_do = tl.load(dout + o_x, mask=m, other=0.0).to(tl.float32)
        b_s, b_ds = _logistic(b_u)
        # beyond 16 the derivative of the logistic function is 0, and u^3 may overflow
        b_v = tl.minimum(tl.maximum(b_u, -16.0), 16.0)
        b_slope = b_s + b_v * b_ds * 1.5957691216057308 * (1 + 0.134145 * b_v * b_v)
        b_dx = b_do * b_slope
        tl.store(dx + o_x, b_dx.to(dx.dtype.element_ty), mask=m)
        b_sum += b_dx
    tl.store(partials + i_p.to(tl.int64) * F + o_f, tl.sum(b_sum, 0), mask=m_f)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """`gelu(x + bias)`, contiguous.

    Args:
        x: `[..., F]` in fp32, fp16 or bf16.
        bias: `[F]`.
    """
    x = x.contiguous()
    out = x.new_empty(x.shape)
    programs, constants = _programs(x)
    launch(_bias_gelu_kernel, _grid(x, programs), x, bias.contiguous(), out, x.numel() // x.shape[-1], **constants)
    return out


def backward(dout: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, contiguous, and of the bias, the same bits in every call.

    Args:
        dout: `[..., F]` gradient of the result.
        x: as in `forward`.
        bias: as in `forward`.
    """
    x, dout = x.contiguous(), dout.contiguous()
    dx = x.new_empty(x.shape)
    programs, constants = _programs(x)
    partials = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    rows = x.numel() // x.shape[-1]
    launch(_bias_gelu_grad_kernel, _grid(x, programs), dout, x, bias.contiguous(), dx, partials, rows, **constants)
    return dx, add_partials(partials, bias.new_empty(bias.shape))


def _programs(x: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs for each block of columns, and the constants of a launch."""
    width = x.shape[-1]
    rows = x.numel() // width
    share = max(rows * cdiv(width, _COLUMNS) // _PROGRAMS, 1)
    each = min(max(1 << share.bit_length() - 1, _FEWEST_ROWS), _MOST_ROWS)
    constants = {"F": width, "ROWS": each, "TILE": _TILE_ROWS, "COLUMNS": _COLUMNS}
    constants |= {"STAGES": _STAGES, "num_warps": _WARPS}
    return cdiv(rows, each), constants


def _grid(x: Tensor, programs: int) -> tuple[int]:
    return (programs * cdiv(x.shape[-1], _COLUMNS),)
