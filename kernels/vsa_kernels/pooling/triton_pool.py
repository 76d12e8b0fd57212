"""Block means and similarities in one streaming pass over the tokens; their gradients in one streaming pass of stores.

A program of the means handles one block of tokens and a few heads of one tensor. Its columns are (head, dim) pairs, and
one load instruction of its warps reads one row of 16-byte accesses, so that sums over tokens stay inside a thread.

B batch, L tokens, H heads, D head dim, N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch, next_power_of_2

# Bytes of one token that a program reads: two warps of 16-byte accesses.
_ROW_BYTES = 1024
# Rows in flight per thread.
_BLOCK_T = 8
# Elements in the registers of the one warp that computes similarities.
_TILE = 16 * 128


@triton.jit
def _span(offsets, i_n, SIZE: tl.constexpr):
    """First token and size of block i_n; SIZE is the size of all blocks, 0 when they differ."""
    if SIZE > 0:
        start = i_n.to(tl.int64) * SIZE
        size = tl.full((), SIZE, tl.int32)
    else:
        first = tl.load(offsets + i_n)
        size = tl.load(offsets + i_n + 1) - first
        start = first.to(tl.int64)
    return start, size


@triton.jit
def _mean(
    x, means, offsets, i_b, i_n, i_g, num_heads, num_blocks, stride_b, stride_l, stride_h,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The mean of block i_n for heads i_g * HEADS and following."""
    start, size = _span(offsets, i_n, SIZE)
    o_c = tl.arange(0, HEADS * BLOCK_D)
    o_t = tl.arange(0, BLOCK_T)
    o_h = i_g * HEADS + o_c // BLOCK_D
    o_d = o_c % BLOCK_D
    m_c = (o_h < num_heads) & (o_d < D)
    p_x = x + i_b.to(tl.int64) * stride_b + start * stride_l + (o_h.to(tl.int64) * stride_h + o_d)[None, :]
    # [HEADS * BLOCK_D]
    b_sum = tl.zeros((HEADS * BLOCK_D,), tl.float32)
    if SIZE > 0 and SIZE % BLOCK_T == 0:
        for t in range(0, SIZE, BLOCK_T):
            b_x = tl.load(p_x + (t + o_t).to(tl.int64)[:, None] * stride_l, mask=m_c[None, :], other=0.0)
            b_sum += tl.sum(b_x.to(tl.float32), 0)
    else:
        for t in range(0, size, BLOCK_T):
            m_x = (t + o_t < size)[:, None] & m_c[None, :]
            b_x = tl.load(p_x + (t + o_t).to(tl.int64)[:, None] * stride_l, mask=m_x, other=0.0)
            b_sum += tl.sum(b_x.to(tl.float32), 0)
    row = (i_b.to(tl.int64) * num_blocks + i_n) * num_heads
    tl.store(means + (row + o_h) * D + o_d, tl.div_rn(b_sum, size.to(tl.float32)), mask=m_c)


@triton.jit
def _mean_pool_kernel(
    x0, x1, x2, means0, means1, means2, offsets, heads0, heads1, heads2, num_blocks,
    stride_b0, stride_l0, stride_h0, stride_b1, stride_l1, stride_h1, stride_b2, stride_l2, stride_h2,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    groups0 = tl.cdiv(heads0, HEADS)
    groups1 = tl.cdiv(heads1, HEADS)
    num_groups = groups0 + groups1 + tl.cdiv(heads2, HEADS)
    # neighbouring programs share tokens, so that whole rows of a tensor are read together
    i_g = tl.program_id(0) % num_groups
    i_n = tl.program_id(0) // num_groups
    i_b = tl.program_id(1)
    if i_g < groups0:
        _mean(
            x0, means0, offsets, i_b, i_n, i_g, heads0, num_blocks, stride_b0, stride_l0, stride_h0,
            SIZE, D, BLOCK_D, HEADS, BLOCK_T,
        )  # fmt: skip
    elif i_g < groups0 + groups1:
        _mean(
            x1, means1, offsets, i_b, i_n, i_g - groups0, heads1, num_blocks, stride_b1, stride_l1, stride_h1,
            SIZE, D, BLOCK_D, HEADS, BLOCK_T,
        )  # fmt: skip
    else:
        _mean(
            x2, means2, offsets, i_b, i_n, i_g - groups0 - groups1, heads2, num_blocks,
            stride_b2, stride_l2, stride_h2, SIZE, D, BLOCK_D, HEADS, BLOCK_T,
        )  # fmt: skip


@triton.jit
def _similarity_pool_kernel(
    x, center, offsets, means, similarity, num_heads, num_blocks, stride_b, stride_l, stride_h, center_b, center_h,
    HAS_CENTER: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # one warp does one head of one block, so that sums need no barrier; heads of the same tokens run side by side
    i_h, i_n, i_b = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads, tl.program_id(1)
    start, size = _span(offsets, i_n, SIZE)
    o_t = tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_x = x + i_b.to(tl.int64) * stride_b + start * stride_l + i_h.to(tl.int64) * stride_h + o_d[None, :]
    b_center = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_CENTER:
        b_center = tl.load(center + i_b.to(tl.int64) * center_b + i_h * center_h + o_d, mask=m_d, other=0.0)
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    b_units = tl.zeros((BLOCK_D,), tl.float32)
    for t in range(0, size, BLOCK_T):
        # [BLOCK_T, BLOCK_D]
        p_tile = p_x + (t + o_t).to(tl.int64)[:, None] * stride_l
        if SIZE > 0 and SIZE % BLOCK_T == 0 and D == BLOCK_D:
            b_x = tl.load(p_tile).to(tl.float32)
            if HAS_CENTER:
                b_x -= b_center[None, :]
        else:
            m_x = (t + o_t < size)[:, None] & m_d[None, :]
            b_x = tl.load(p_tile, mask=m_x, other=0.0).to(tl.float32)
            if HAS_CENTER:
                b_x = tl.where(m_x, b_x - b_center[None, :], 0.0)
        b_sum += tl.sum(b_x, 0)
        # [BLOCK_T]
        b_length = tl.sum(b_x * b_x, 1)
        # a token of zeros stays one
        b_inverse = tl.rsqrt(tl.where(b_length == 0, 1.0, b_length))
        b_units += tl.sum(b_x * b_inverse[:, None], 0)
    row = (i_b.to(tl.int64) * num_blocks + i_n) * num_heads + i_h
    if SIZE > 0 and (SIZE & (SIZE - 1)) == 0:
        # exact, as the division is
        b_sum *= 1.0 / SIZE
    else:
        b_sum = tl.div_rn(b_sum, size.to(tl.float32))
    tl.store(means + row * D + o_d, b_sum, mask=m_d)
    b_units /= size.to(tl.float32)
    tl.store(similarity + row, tl.sum(b_units * b_units, 0))


@triton.jit
def _mean_pool_grad_kernel(
    grad, dx, offsets, num_heads, num_blocks, num_tokens,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    num_groups = tl.cdiv(num_heads, HEADS)
    i_g = tl.program_id(0) % num_groups
    i_n = tl.program_id(0) // num_groups
    i_b = tl.program_id(1)
    start, size = _span(offsets, i_n, SIZE)
    o_c = tl.arange(0, HEADS * BLOCK_D)
    o_t = tl.arange(0, BLOCK_T)
    o_h = i_g * HEADS + o_c // BLOCK_D
    o_d = o_c % BLOCK_D
    m_c = (o_h < num_heads) & (o_d < D)
    row = (i_b.to(tl.int64) * num_blocks + i_n) * num_heads
    # [HEADS * BLOCK_D]
    b_grad = tl.load(grad + (row + o_h) * D + o_d, mask=m_c, other=0.0)
    b_share = tl.div_rn(b_grad, size.to(tl.float32)).to(dx.dtype.element_ty)
    # [BLOCK_T, HEADS * BLOCK_D]
    b_dx = tl.broadcast_to(b_share[None, :], (BLOCK_T, HEADS * BLOCK_D))
    p_dx = dx + ((i_b.to(tl.int64) * num_tokens + start) * num_heads + o_h)[None, :] * D + o_d[None, :]
    for t in range(0, size, BLOCK_T):
        m_dx = (t + o_t < size)[:, None] & m_c[None, :]
        tl.store(p_dx + (t + o_t).to(tl.int64)[:, None] * (num_heads * D), b_dx, mask=m_dx)


def forward(xs: Sequence[Tensor], offsets: Tensor, max_size: int, min_size: int) -> tuple[Tensor, ...]:
    """Block means of one to three tensors in one launch.

    Args:
        xs: `[B, L, H_i, D]` tokens in fp32, fp16 or bf16; only their heads and strides may differ.
        offsets: int32 `[N + 1]` first token of every block.
        max_size: tokens in the largest block.
        min_size: tokens in the smallest block.

    Returns:
        fp32 `[B, N, H_i, D]` per tensor.
    """
    assert 1 <= len(xs) <= 3
    xs = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in xs]
    B, _, _, D = xs[0].shape
    N = offsets.shape[0] - 1
    heads = [x.shape[2] for x in xs]
    means = [x.new_empty((B, N, H, D), dtype=torch.float32) for x, H in zip(xs, heads, strict=True)]
    constants = _tile(max(heads), D, xs[0].dtype)
    num_groups = sum(cdiv(H, constants["HEADS"]) for H in heads)
    # an unused argument has no heads and hence no program
    spare = 3 - len(xs)
    strides = [x.stride()[:3] for x in xs]
    strides += [strides[0]] * spare
    launch(
        _mean_pool_kernel,
        (num_groups * N, B),
        *(xs + [xs[0]] * spare),
        *(means + [means[0]] * spare),
        offsets,
        *(heads + [0] * spare),
        N,
        *(stride for x in strides for stride in x),
        SIZE=max_size if max_size == min_size else 0,
        **constants,
    )
    return tuple(means)


def mean_and_similarity(
    x: Tensor, center: Tensor | None, offsets: Tensor, max_size: int, min_size: int
) -> tuple[Tensor, Tensor]:
    """Block means, and the squared norm of the mean of a block's normalised tokens, in one read of the tokens.

    Args:
        x: `[B, L, H, D]` tokens in fp32, fp16 or bf16.
        center: fp32 `[B, H, D]`, subtracted from every token first; None: zeros.
        offsets: int32 `[N + 1]` first token of every block.
        max_size: tokens in the largest block.
        min_size: tokens in the smallest block.

    Returns:
        fp32 `[B, N, H, D]` and `[B, N, H]`.
    """
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    B, _, H, D = x.shape
    N = offsets.shape[0] - 1
    means = x.new_empty((B, N, H, D), dtype=torch.float32)
    similarity = x.new_empty((B, N, H), dtype=torch.float32)
    # a kernel never reads the pointer that replaces an absent center
    middle = means[:, 0] if center is None else center.contiguous()
    block_d = next_power_of_2(D)
    block_t = max(min(next_power_of_2(max_size), _TILE // block_d), 1)
    launch(
        _similarity_pool_kernel,
        (H * N, B),
        x,
        middle,
        offsets,
        means,
        similarity,
        H,
        N,
        *x.stride()[:3],
        *middle.stride()[:2],
        HAS_CENTER=center is not None,
        SIZE=max_size if max_size == min_size else 0,
        D=D,
        BLOCK_D=block_d,
        BLOCK_T=block_t,
        num_warps=1,
    )
    return means, similarity


def backward(
    grad: Tensor, offsets: Tensor, max_size: int, min_size: int, num_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Gradient `[B, L, H, D]` of the tokens: the gradient of a block mean, divided evenly over the block's tokens.

    Args:
        grad: fp32 `[B, N, H, D]` gradient of the means.
        offsets: int32 `[N + 1]` first token of every block.
        max_size: tokens in the largest block.
        min_size: tokens in the smallest block.
        num_tokens: L.
        dtype: dtype of the result, fp32, fp16 or bf16.
    """
    grad = grad.contiguous()
    B, N, H, D = grad.shape
    dx = grad.new_empty((B, num_tokens, H, D), dtype=dtype)
    constants = _tile(H, D, dtype)
    launch(
        _mean_pool_grad_kernel,
        (cdiv(H, constants["HEADS"]) * N, B),
        grad,
        dx,
        offsets,
        H,
        N,
        num_tokens,
        SIZE=max_size if max_size == min_size else 0,
        **constants,
    )
    return dx


def _tile(heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    # constants of a launch: the heads that fill a row of a program, and the warps that read it in one instruction
    block_d = next_power_of_2(head_dim)
    fitting = max(_ROW_BYTES // (block_d * dtype.itemsize), 1)
    num = min(next_power_of_2(heads), fitting)
    warps = min(max(num * block_d * dtype.itemsize // 512, 1), 4)
    return {"D": head_dim, "BLOCK_D": block_d, "HEADS": num, "BLOCK_T": _BLOCK_T, "num_warps": warps}
