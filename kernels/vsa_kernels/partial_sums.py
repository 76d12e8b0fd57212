"""The second step of gradients that are sums over tokens: programs write partial sums, which one kernel adds.

Without atomics, the sums are the same bits in every call. G groups of N partial sums of C channels.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.launch import launch

# partial sums and channels of a step
_PARTIALS, _CHANNELS = 512, 8


@triton.jit
def _add_partials_kernel(partials, out, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    o_n = tl.arange(0, BLOCK_N)
    programs = tl.cdiv(C, BLOCK_C)
    i_g = (tl.program_id(0) // programs).to(tl.int64)
    o_c = tl.program_id(0) % programs * BLOCK_C + tl.arange(0, BLOCK_C)
    partials += i_g * N * C
    out += i_g * C
    b_sum = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for n in range(0, N, BLOCK_N):
        m = (n + o_n < N)[:, None] & (o_c < C)[None, :]
        b_sum += tl.load(partials + (n + o_n).to(tl.int64)[:, None] * C + o_c[None, :], mask=m, other=0.0)
    tl.store(out + o_c, tl.sum(b_sum, 0).to(out.dtype.element_ty), mask=o_c < C)


def add_partials(partials: Tensor, out: Tensor) -> Tensor:
    """Sum fp32 `[N, C]` or `[G, N, C]` partial sums into contiguous `out` of C or G * C elements, and return it."""
    *groups, number, channels = partials.shape
    launch(
        _add_partials_kernel,
        # one axis: the others of a grid end at 65,535 programs
        (-(-channels // _CHANNELS) * math.prod(groups),),
        partials,
        out,
        number,
        channels,
        BLOCK_N=_PARTIALS,
        BLOCK_C=_CHANNELS,
        num_warps=4,
    )
    return out
