"""Kernels of which each breaks one gate of `test_aot.py`, and one that breaks none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _product_kernel(a, b, out, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    at = o[:, None] * BLOCK + o[None, :]
    b_sum = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for i in range(n):
        b_sum = tl.dot(tl.load(a + i * BLOCK * BLOCK + at), tl.load(b + i * BLOCK * BLOCK + at), b_sum)
    tl.store(out + at, b_sum)


@triton.jit
def _hungry_kernel(x, out, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x, b_y, b_z = tl.load(x + o), tl.load(x + o + n), tl.load(x + o + 2 * n)
    # three live values of BLOCK / 32 registers each
    for _ in range(n):
        b_x, b_y, b_z = b_x * b_y + b_z, b_y * b_z + b_x, b_z * b_x + b_y
    tl.store(out + o, b_x + b_y + b_z)


@triton.jit
def _broken_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros([BLOCK + 1], dtype=tl.float32))


_HALF = torch.empty(1 << 16, dtype=torch.bfloat16)
_FULL = torch.empty(1 << 16)

CASES = (
    ("good", lambda: _product_kernel[(1,)](_HALF, _HALF, _FULL, 3, BLOCK=64, num_warps=4)),
    ("registers", lambda: _hungry_kernel[(1,)](_FULL, _FULL, 3, BLOCK=4096, num_warps=1)),
    ("shared", lambda: _product_kernel[(1,)](_HALF, _HALF, _FULL, 3, BLOCK=128, num_warps=8, num_stages=6)),
    # the instruction belongs to four warps
    ("wgmma", lambda: _product_kernel[(1,)](_HALF, _HALF, _FULL, 3, BLOCK=64, num_warps=2)),
    ("error", lambda: _broken_kernel[(1,)](_FULL, BLOCK=128)),
)
