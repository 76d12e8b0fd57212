"""Long rows of keys in ranges, for tiles of 64 on Hopper.

From about 100,000 tokens on, keys and values of a head no longer fit the L2 cache, and lists that are spread over the
row read them from memory again and again. So the row is cut into ranges that fit; every list falls into one piece per
range, because it ascends; the forward runs over one range after the other, and its parts are merged by their lse. dq is
the sum of its parts, each with the lse of the whole softmax.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_index import BlockIndex
from vsa_kernels.block_sparse import hopper_fwd, triton_bwd
from vsa_kernels.block_sparse.dispatch import ranges_of
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.launch import cdiv, launch


@triton.jit(do_not_specialize=["capacity", "num_rows"])
def _split_kernel(
    kv_indices, kv_num_blocks, lists, counts, capacity, num_rows, WIDTH: tl.constexpr, RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    listed = tl.load(kv_num_blocks + row)
    before = 0
    for i in tl.static_range(RANGES):
        # entries of this range are those from `before` on
        count = 0
        for k in range(0, listed, BLOCK):
            o_k = k + tl.arange(0, BLOCK)
            entry = tl.load(kv_indices + row * capacity + o_k, mask=o_k < listed, other=RANGES * WIDTH)
            inside = (entry >= i * WIDTH) & (entry < (i + 1) * WIDTH)
            tl.store(lists + (i * num_rows + row) * capacity + o_k - before, entry, mask=inside)
            count += tl.sum(inside.to(tl.int32), 0)
        tl.store(counts + i * num_rows + row, count)
        before += count


def split(index: BlockIndex, num_kv: int, ranges: int) -> list[BlockIndex]:
    """The entries of each range of kv blocks: indices of the same shape, whose rows may be empty."""
    lists, counts = index.kv_indices.contiguous(), index.kv_num_blocks.contiguous()
    parts, lengths = lists.new_empty((ranges, *lists.shape)), counts.new_empty((ranges, *counts.shape))
    launch(
        _split_kernel, (counts.numel(),),
        lists, counts, parts, lengths, lists.shape[-1], counts.numel(),
        WIDTH=cdiv(num_kv, ranges), RANGES=ranges, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return [BlockIndex(kv_indices=x, kv_num_blocks=n) for x, n in zip(parts, lengths, strict=True)]


@triton.jit(do_not_specialize=["size"])
def _merge_kernel(outs, lses, out, lse, L, H, size, RANGES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    i_h, i_tile, i_b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1)
    o_l, o_d = i_tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    m_l = o_l < L
    at_lse = (i_b.to(tl.int64) * H + i_h) * L + o_l
    at_out = ((i_b.to(tl.int64) * L + o_l) * H + i_h)[:, None] * D + o_d[None, :]
    b_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i in tl.static_range(RANGES):
        b_max = tl.maximum(b_max, tl.load(lses + i * size + at_lse, mask=m_l, other=0.0))
    # a query that has no key in any range: out 0 and lse -inf
    b_from = tl.where(b_max == -float("inf"), 0.0, b_max)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    b_out = tl.zeros((BLOCK, D), tl.float32)
    for i in tl.static_range(RANGES):
        b_weight = tl.exp(tl.load(lses + i * size + at_lse, mask=m_l, other=0.0) - b_from)
        b_sum += b_weight
        part = tl.load(outs + i * size.to(tl.int64) * D + at_out, mask=m_l[:, None], other=0.0)
        b_out += b_weight[:, None] * part.to(tl.float32)
    tl.store(lse + at_lse, b_from + tl.log(b_sum), mask=m_l)
    b_out /= tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    tl.store(out + at_out, b_out.to(out.dtype.element_ty), mask=m_l[:, None])


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    B, L, H, D = q.shape
    ranges = ranges_of(k)
    outs, lses = q.new_empty((ranges, B, L, H, D)), q.new_empty((ranges, B, H, L), dtype=torch.float32)
    for part, out, lse in zip(split(mask.index, mask.kv_blocks.num, ranges), outs, lses, strict=True):
        hopper_fwd.forward(q, k, v, replace(mask, index=part), scale, into=(out, lse))
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    launch(
        _merge_kernel, (cdiv(L, 32) * H, B),
        outs, lses, out, lse, L, H, B * H * L, RANGES=ranges, D=D, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return out, lse


def dq(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    share: Tensor | None,
) -> Tensor:  # fmt: skip
    """dq as the sum over ranges, of which one adds the share; arguments as in `dispatch.backward`."""
    parts = split(mask.index, mask.kv_blocks.num, ranges_of(k))
    shares = [share] + [None] * (len(parts) - 1)
    return torch.stack([
        triton_bwd.dq(dout, delta, lse, q, k, v, replace(mask, index=part), scale, of_part)
        for part, of_part in zip(parts, shares, strict=True)
    ]).sum(0)  # fmt: skip
