"""Coarse scores: the logits between block means that the selection ranks.

B batch, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import cdiv, launch

_BLOCK = 64
_BLOCK_D = 32


@triton.jit(do_not_specialize=["first"])
def _scores_kernel(
    q_mean, k_mean, out, scale, first, H, num_q, num_kv,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(num_kv, BLOCK_N)
    tiles = tl.cdiv(num_q, BLOCK_M) * tiles_n
    i_row, i_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i_b, i_h = (first + i_row) // H, (first + i_row) % H
    Hkv = H // GROUP
    o_m = (i_tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    p_q = q_mean + (i_b.to(tl.int64) * num_q * H + i_h) * D + o_m[:, None].to(tl.int64) * (H * D) + o_d[None, :]
    p_k = k_mean + (i_b.to(tl.int64) * num_kv * Hkv + i_h // GROUP) * D
    p_k = p_k + o_n[:, None].to(tl.int64) * (Hkv * D) + o_d[None, :]
    b_s = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        # [BLOCK_M | BLOCK_N, BLOCK_D]
        m_d = d + o_d[None, :] < D
        b_q = tl.load(p_q + d, mask=(o_m[:, None] < num_q) & m_d, other=0.0)
        b_k = tl.load(p_k + d, mask=(o_n[:, None] < num_kv) & m_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    p_out = out + i_row.to(tl.int64) * num_q * num_kv + o_m[:, None].to(tl.int64) * num_kv + o_n[None, :]
    tl.store(p_out, b_s * scale, mask=(o_m[:, None] < num_q) & (o_n[None, :] < num_kv))


def scores(q_mean: Tensor, k_mean: Tensor, scale: float, first: int, count: int, *, precision: str) -> Tensor:
    """scale * q_mean k_mean^T for `count` (batch, head) pairs from `first` on, counted over `[B * H]`.

    Args:
        q_mean: fp32 `[B, Nq, H, D]` contiguous.
        k_mean: fp32 `[B, Nkv, Hkv, D]` contiguous, H a multiple of Hkv.
        scale: factor of the logits.
        first: first pair.
        count: number of pairs.
        precision: precision of the products: ieee, or tf32 where the pooled tokens were half precision.

    Returns:
        fp32 `[count, Nq, Nkv]`.
    """
    _, num_q, H, D = q_mean.shape
    num_kv, Hkv = k_mean.shape[1:3]
    out = q_mean.new_empty((count, num_q, num_kv))
    launch(
        _scores_kernel, (count * cdiv(num_q, _BLOCK) * cdiv(num_kv, _BLOCK),),
        q_mean, k_mean, out, scale, first, H, num_q, num_kv,
        GROUP=H // Hkv, D=D, BLOCK_M=_BLOCK, BLOCK_N=_BLOCK, BLOCK_D=_BLOCK_D, PRECISION=precision,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
