"""Attention with a pooled tail on the Triton kernels: the listed blocks by block-sparse attention, the tail by means.

The forward of the tail goes on with the online softmax where the forward of the listed blocks ended: its out and lse
are the state of a softmax over all keys so far. The backward gives every part the lse and output of the whole softmax,
so that gradients of the means follow from one pass over the queries for each group of means, those of q from one pass
over the means for each query tile; the former reach k and v by pooling's rule, inside the kernels of the listed
blocks. No two programs write the same sum: repeated runs give the same bits.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from vsa_kernels.block_sparse import dispatch, triton_bwd
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_tiles import (
    LN2,
    LOG2E,
    Tiles,
    described,
    load_listed,
    load_tile,
    rows_ready,
    span,
    store_tile,
)
from vsa_kernels.launch import cdiv, config, launch, next_power_of_2
from vsa_kernels.pooling import triton_pool

# columns that a program of the map writes at a time
_COLUMNS = 256
_KERNELS = ("tail_fwd", "tail_dq", "tail_dkv")
# programs of the gradients of the means from which on the queries are not divided further
_PROGRAMS = 1024


@triton.jit
def _map_kernel(
    kv_indices, kv_num_blocks, candidates, tail, capacity, num_q, num_kv, padded,
    EXCLUDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    p_tail = tail + i_row * padded
    for n in range(0, padded, BLOCK):
        b_tail = (n + o < num_kv).to(tl.int8)
        if candidates is not None:
            b_tail = tl.load(candidates + i_row % num_q * num_kv + n + o, mask=n + o < num_kv, other=0).to(tl.int8)
        tl.store(p_tail + n + o, b_tail, mask=n + o < padded)
    if EXCLUDE:
        # listed blocks are taken out after all have been written
        tl.debug_barrier()
        count = tl.load(kv_num_blocks + i_row)
        for n in range(0, count, BLOCK):
            column = tl.load(kv_indices + i_row * capacity + n + o, mask=n + o < count, other=0)
            tl.store(p_tail + column, tl.zeros([BLOCK], tl.int8), mask=n + o < count)


@triton.jit
def _load_means(
    means, i_b, i_h, first, num, H, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, DESC: tl.constexpr
):
    """Means `[BLOCK, BLOCK_D]` of the blocks from `first` on, of padded `[B, num, H, D]` or its descriptor."""
    if DESC:
        b_means = means.load([(i_b * num + first).to(tl.int32), (i_h * D).to(tl.int32)])
    else:
        o_n, o_d = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        p_means = means + i_b.to(tl.int64) * (num * H * D) + i_h * D + o_n[:, None] * (H * D) + o_d[None, :]
        b_means = tl.load(p_means, mask=(o_d < D)[None, :], other=0.0)
    return b_means


@triton.jit
def _tail_bias(tail, log_sizes, first, BLOCK: tl.constexpr):
    """log2 n `[BLOCK]` of the blocks from `first` on, -inf for those outside of the tail of a row of the map."""
    o_n = first + tl.arange(0, BLOCK)
    return tl.where(tl.load(tail + o_n) != 0, tl.load(log_sizes + o_n), -float("inf"))


@triton.jit
def _in_tail(x, b_bias, ISOLATED: tl.constexpr):
    """x `[BLOCK, columns]`, isolated with 0 for blocks outside of the tail, whose NaN would pass through 0 * NaN."""
    return tl.where(b_bias[:, None] > -float("inf"), x, 0.0) if ISOLATED else x


@triton.jit(do_not_specialize=["L", "H", "num_q", "num_kv"])
def _tail_fwd_kernel(
    q, k_mean, v_mean, out, lse, tail, log_sizes, q_offsets, factor, q_b, q_l, q_h, o_b, o_l, tail_b, tail_h,
    L, H, num_q, num_kv, flag,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr,
    Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr, BLOCK_N: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr, ISOLATED: tl.constexpr,
):  # fmt: skip
    # of the two variants that are launched, one has this call's work
    if flag is not None and tl.load(flag) != ISOLATED:
        return
    i_tile, i_bh = tl.program_id(0) % (num_q * Q_PARTS), tl.program_id(0) // (num_q * Q_PARTS)
    i_b, i_h = i_bh // H, i_bh % H
    i_n, i_part = i_tile // Q_PARTS, i_tile % Q_PARTS
    start, size, _ = span(q_offsets, i_n, i_part, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
    p_tail = tail + i_b.to(tl.int64) * tail_b + i_h.to(tl.int64) * tail_h + i_n.to(tl.int64) * num_kv
    o_m = tl.arange(0, BLOCK_M)
    p_lse = lse + i_bh.to(tl.int64) * L + start + o_m
    # [BLOCK_M, BLOCK_D]
    b_q = load_tile(q, i_b, i_h, start, size, q_b, q_l, q_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    # the state after the listed blocks: their output has a weight of 1 at their lse
    b_acc = load_tile(out, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_M, BLOCK_D, EVEN_Q).to(tl.float32)
    b_max = tl.load(p_lse, mask=o_m < size, other=-float("inf")) * LOG2E
    b_sum = tl.where(b_max == -float("inf"), 0.0, 1.0)
    for first in range(0, num_kv, BLOCK_N):
        b_k = _load_means(k_mean, i_b, i_h // GROUP, first, num_kv, H // GROUP, D, BLOCK_N, BLOCK_D, DESC)
        b_v = _load_means(v_mean, i_b, i_h // GROUP, first, num_kv, H // GROUP, D, BLOCK_N, BLOCK_D, DESC)
        b_bias = _tail_bias(p_tail, log_sizes, first, BLOCK_N)
        b_k, b_v = _in_tail(b_k, b_bias, ISOLATED), _in_tail(b_v, b_bias, ISOLATED)
        # [BLOCK_M, BLOCK_N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * factor + b_bias[None, :]
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # a row that has seen no key yet
        b_from = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_p = tl.math.exp2(b_s - b_from[:, None])
        b_rescale = tl.math.exp2(b_max - b_from)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_rescale[:, None], input_precision=PRECISION)
        b_max = b_new
    # a query without any key: out 0 and lse -inf
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)
    b_out = b_acc / b_sum[:, None]
    store_tile(out, b_out, i_b, i_h, start, size, o_b, o_l, D, D, BLOCK_M, BLOCK_D)
    tl.store(p_lse, b_max * LN2 + tl.log(b_sum), mask=o_m < size)


@triton.jit
def _load_stats(lse, delta, at, size, BLOCK: tl.constexpr):
    """lse in base 2 and delta `[BLOCK]`; an empty query (lse -inf) and a row past the tile give p = 0."""
    o_m = tl.arange(0, BLOCK)
    b_lse = tl.load(lse + at + o_m, mask=o_m < size, other=float("inf"))
    b_delta = tl.load(delta + at + o_m, mask=o_m < size, other=0.0)
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse) * LOG2E, b_delta


@triton.jit(do_not_specialize=["L", "H", "num_q", "num_kv"])
def _tail_dq_kernel(
    q, k_mean, v_mean, dout, lse, delta, dq, tail, log_sizes, q_offsets, factor, scale,
    q_b, q_l, q_h, do_b, do_l, do_h, dq_b, dq_l, tail_b, tail_h, L, H, num_q, num_kv, flag,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr,
    Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr, BLOCK_N: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr, ISOLATED: tl.constexpr,
):  # fmt: skip
    # of the two variants that are launched, one has this call's work
    if flag is not None and tl.load(flag) != ISOLATED:
        return
    i_tile, i_bh = tl.program_id(0) % (num_q * Q_PARTS), tl.program_id(0) // (num_q * Q_PARTS)
    i_b, i_h = i_bh // H, i_bh % H
    i_n, i_part = i_tile // Q_PARTS, i_tile % Q_PARTS
    start, size, _ = span(q_offsets, i_n, i_part, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
    p_tail = tail + i_b.to(tl.int64) * tail_b + i_h.to(tl.int64) * tail_h + i_n.to(tl.int64) * num_kv
    # [BLOCK_M, BLOCK_D]
    b_q = load_tile(q, i_b, i_h, start, size, q_b, q_l, q_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_do = load_tile(dout, i_b, i_h, start, size, do_b, do_l, do_h, D, BLOCK_M, BLOCK_D, EVEN_Q)
    b_lse, b_delta = _load_stats(lse, delta, i_bh.to(tl.int64) * L + start, size, BLOCK_M)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for first in range(0, num_kv, BLOCK_N):
        b_k = _load_means(k_mean, i_b, i_h // GROUP, first, num_kv, H // GROUP, D, BLOCK_N, BLOCK_D, DESC)
        b_v = _load_means(v_mean, i_b, i_h // GROUP, first, num_kv, H // GROUP, D, BLOCK_N, BLOCK_D, DESC)
        b_bias = _tail_bias(p_tail, log_sizes, first, BLOCK_N)
        b_k, b_v = _in_tail(b_k, b_bias, ISOLATED), _in_tail(b_v, b_bias, ISOLATED)
        # [BLOCK_M, BLOCK_N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * factor + b_bias[None, :]
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = tl.math.exp2(b_s - b_lse[:, None]) * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    # on top of what the listed blocks give
    b_dq = b_dq * scale + load_tile(dq, i_b, i_h, start, size, dq_b, dq_l, D, D, BLOCK_M, BLOCK_D, EVEN_Q)
    store_tile(dq, b_dq, i_b, i_h, start, size, dq_b, dq_l, D, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["L", "H", "num_q", "num_kv", "rows"])
def _tail_dkv_kernel(
    q, k_mean, v_mean, dout, lse, delta, dk_mean, dv_mean, tail, log_sizes, q_offsets, factor, scale,
    q_b, q_l, q_h, do_b, do_l, do_h, tail_b, tail_h, L, H, num_q, num_kv, rows, flag,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, Q_PARTS: tl.constexpr,
    Q_SIZE: tl.constexpr, EVEN_Q: tl.constexpr, BLOCK_N: tl.constexpr, DESC: tl.constexpr,
    PRECISION: tl.constexpr, ISOLATED: tl.constexpr,
):  # fmt: skip
    # of the two variants that are launched, one has this call's work
    if flag is not None and tl.load(flag) != ISOLATED:
        return
    # means of one head run side by side and share its queries in L2
    columns, Hkv = tl.cdiv(num_kv, BLOCK_N), H // GROUP
    first, i_bh, i_range = tl.program_id(0) % columns * BLOCK_N, tl.program_id(0) // columns, tl.program_id(1)
    i_b, i_hk = i_bh // Hkv, i_bh % Hkv
    b_k = _load_means(k_mean, i_b, i_hk, first, num_kv, Hkv, D, BLOCK_N, BLOCK_D, False)
    b_v = _load_means(v_mean, i_b, i_hk, first, num_kv, Hkv, D, BLOCK_N, BLOCK_D, False)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    begin = i_range * rows
    for i_group in range(GROUP):
        i_h = i_hk * GROUP + i_group
        p_tail = tail + i_b.to(tl.int64) * tail_b + i_h.to(tl.int64) * tail_h
        for j in range(tl.minimum(rows, num_q - begin) * Q_PARTS):
            i_n, i_part = begin + j // Q_PARTS, j % Q_PARTS
            start, size, _ = span(q_offsets, i_n, i_part, L, Q_SIZE, BLOCK_M, Q_SIZE > 0)
            b_q = load_listed(
                q, i_b, i_h, i_n, i_part, num_q, start, size, q_b, q_l, q_h,
                D, BLOCK_M, BLOCK_D, Q_PARTS, EVEN_Q, DESC,
            )  # fmt: skip
            b_do = load_listed(
                dout, i_b, i_h, i_n, i_part, num_q, start, size, do_b, do_l, do_h,
                D, BLOCK_M, BLOCK_D, Q_PARTS, EVEN_Q, DESC,
            )  # fmt: skip
            b_lse, b_delta = _load_stats(lse, delta, (i_b.to(tl.int64) * H + i_h) * L + start, size, BLOCK_M)
            b_bias = _tail_bias(p_tail + i_n.to(tl.int64) * num_kv, log_sizes, first, BLOCK_N)
            if ISOLATED:
                # a query that is not finite has lse or delta NaN, by which it reaches the means of its own tail
                b_fine = tl.sum((b_q - b_q + b_do - b_do).to(tl.float32), 1)[:, None] == 0
                b_q, b_do = tl.where(b_fine, b_q, 0.0), tl.where(b_fine, b_do, 0.0)
            # [BLOCK_N, BLOCK_M]
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * factor + b_bias[:, None]
            b_p = _in_tail(tl.math.exp2(b_s - b_lse[None, :]), b_bias, ISOLATED)
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_ds = _in_tail(b_p * (b_dp - b_delta[None, :]), b_bias, ISOLATED)
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    # partial sums [ranges, B, Nkv, Hkv, D]
    to_b, to_l = num_kv * Hkv * D, Hkv * D
    at = i_range.to(tl.int64) * (tl.num_programs(0) // columns // Hkv) * to_b
    store_tile(dk_mean + at, b_dk * scale, i_b, i_hk, first, BLOCK_N, to_b, to_l, D, D, BLOCK_N, BLOCK_D)
    store_tile(dv_mean + at, b_dv, i_b, i_hk, first, BLOCK_N, to_b, to_l, D, D, BLOCK_N, BLOCK_D)


class _Call:
    """What the kernels of a call share: their arguments and grids.

    Means, their sizes and the map are padded to whole groups of blocks, so that no load of them needs a mask.
    """

    def __init__(
        self, q: Tensor, k_mean: Tensor, v_mean: Tensor, mask: BlockMask, candidates: Tensor | None, exclude: bool,
        scale: float, gradients: Sequence[Tensor] = (),
    ):  # fmt: skip
        self.q, self._mask = rows_ready(q), mask
        self._fixed = {"GROUP": q.shape[2] // k_mean.shape[2]}
        more = -mask.kv_blocks.num % max(config(x, q.shape[3], q.dtype, q.device)["BLOCK_N"] for x in _KERNELS)
        self.means = [pad(x.to(q.dtype), (0, 0, 0, 0, 0, more)) for x in (k_mean, v_mean)]
        tail = _tail_map(mask, candidates, exclude, more)
        log_sizes = pad(mask.kv_blocks.sizes.float().log2(), (0, more))
        self.numbers = (tail, log_sizes, mask.q_blocks.offsets, scale * LOG2E.value)
        at = (tail.stride(d) if tail.shape[d] > 1 else 0 for d in range(2))
        self.sizes = (*at, q.shape[1], q.shape[2], mask.q_blocks.num, tail.shape[3])
        # without candidates a row sees every block, in its list or in its tail
        self._flag = None if candidates is None else _overflows((self.q, *self.means, *gradients), self.numbers[3])

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel; with candidates both of its variants, of which the flag on the device takes one.

        Isolation takes a tenth of the time, which inputs that are finite need not pay.
        """
        for isolated in (False,) if self._flag is None else (False, True):
            launch(kernel, grid, *args, self._flag, ISOLATED=isolated, **constants)

    def by_query(self, kernel: str) -> tuple[tuple[int, ...], Sequence[Any], dict[str, Any]]:
        """Grid of a kernel with a program for each tile of queries, the means or their descriptors, constants."""
        queries, constants = self._constants(kernel)
        tiles = Tiles(constants["BLOCK_N"], 1, constants["BLOCK_N"], True, self.sizes[-1] // constants["BLOCK_N"])
        means = described(self.means, tiles, None) if constants["DESC"] else None
        constants["DESC"] = means is not None
        return (queries.num * queries.parts * self.q.shape[0] * self.q.shape[2],), means or self.means, constants

    def by_mean(self, kernel: str, dout: Tensor) -> tuple[tuple[int, int], int, Sequence[Any], dict[str, Any]]:
        """Grid of a kernel with a program for some means and a range of query blocks, the blocks of a range, q and dout
        or their descriptors, constants.

        Few means, as of short rows, would not occupy a GPU.
        """
        tiles, constants = self._constants(kernel)
        programs = self.sizes[-1] // constants["BLOCK_N"] * self.q.shape[0] * self.means[0].shape[2]
        rows = cdiv(tiles.num, min(tiles.num, cdiv(_PROGRAMS, programs)))
        queries = described((self.q, dout), tiles, self._mask.q_blocks.offsets) if constants["DESC"] else None
        constants["DESC"] = queries is not None
        return (programs, cdiv(tiles.num, rows)), rows, queries or (self.q, dout), constants

    def _constants(self, kernel: str) -> tuple[Tiles, dict[str, Any]]:
        _, L, _, D = self.q.shape
        blocks, options = self._mask.q_blocks, config(kernel, D, self.q.dtype, self.q.device)
        tiles = Tiles.of((blocks.num, blocks.max_size, blocks.min_size), L, options.pop("BLOCK_M"))
        return tiles, {
            **self._fixed, "D": D, "BLOCK_D": max(16, next_power_of_2(D)), "BLOCK_M": tiles.block,
            "Q_PARTS": tiles.parts, "Q_SIZE": tiles.size, "EVEN_Q": tiles.even, "PRECISION": "ieee", **options,
        }  # fmt: skip


def _overflows(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """bool `[]` on the device: whether a product of a token and any block, in its tail or not, may be not finite.

    Args:
        tensors: q, means of k and v; in the backward also dout and delta, which is NaN where lse is: both have one sum.
        factor: factor of the logits in base 2.
    """
    size_q, size_k, size_v, *more = (torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32) for x in tensors)
    size_do, size_delta = more or (1.0, 0.0)
    # twice what a sum of D products can reach, so that rounding and the difference to delta stay finite as well
    terms = 2 * tensors[0].shape[3] * max(1.0, abs(factor))
    return ~((size_q * size_k + size_do * size_v + size_delta) * terms).isfinite()


def _tail_map(mask: BlockMask, candidates: Tensor | None, exclude: bool, more: int) -> Tensor:
    """int8 `[B|1, H|1, Nq, Nkv + more]`, 1 for the blocks whose means join the softmax of a query block."""
    lists, counts = mask.index.kv_indices.contiguous(), mask.index.kv_num_blocks.contiguous()
    num_kv = mask.kv_blocks.num
    tail = lists.new_empty((*lists.shape[:3], num_kv + more), dtype=torch.int8)
    launch(
        _map_kernel, (counts.numel(),),
        lists, counts, None if candidates is None else candidates.contiguous(), tail, lists.shape[3],
        lists.shape[2], num_kv, num_kv + more, EXCLUDE=exclude, BLOCK=_COLUMNS, num_warps=1,
    )  # fmt: skip
    return tail


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, candidates: Tensor | None, exclude: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out `[B, L, H, D]`, lse `[B, H, L]`, and fp32 means of k and v `[B, Nkv, Hkv, D]`."""
    blocks = mask.kv_blocks
    k_mean, v_mean = triton_pool.forward((k, v), blocks.offsets, blocks.max_size, blocks.min_size)
    out, lse = dispatch.forward(q, k, v, mask, scale)
    call = _Call(q, k_mean, v_mean, mask, candidates, exclude, scale)
    grid, means, constants = call.by_query("tail_fwd")
    call.launch(
        _tail_fwd_kernel, grid,
        call.q, *means, out, lse, *call.numbers, *call.q.stride()[:3], *out.stride()[:2], *call.sizes, **constants,
    )  # fmt: skip
    return out, lse, k_mean, v_mean


def backward(
    dout: Tensor, out: Tensor, lse: Tensor, k_mean: Tensor, v_mean: Tensor, q: Tensor, k: Tensor, v: Tensor,
    mask: BlockMask, candidates: Tensor | None, exclude: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv."""
    dout, delta = rows_ready(dout), triton_bwd.delta(dout, out, lse, None)
    call = _Call(q, k_mean, v_mean, mask, candidates, exclude, scale, (dout, delta))
    at = (*call.q.stride()[:3], *dout.stride()[:3])
    grid, rows, (in_q, in_do), constants = call.by_mean("tail_dkv", dout)
    dk_mean, dv_mean = (k_mean.new_empty((grid[1], *call.means[0].shape)) for _ in range(2))
    call.launch(
        _tail_dkv_kernel, grid,
        in_q, *call.means, in_do, lse, delta, dk_mean, dv_mean, *call.numbers, scale, *at, *call.sizes, rows,
        **constants,
    )  # fmt: skip
    shares = (None, *(x.sum(0)[:, : mask.kv_blocks.num].contiguous() for x in (dk_mean, dv_mean)))
    dq, dk, dv = dispatch.backward(dout, delta, lse, q, k, v, mask, scale, shares)
    grid, means, constants = call.by_query("tail_dq")
    call.launch(
        _tail_dq_kernel, grid,
        call.q, *means, dout, lse, delta, dq, *call.numbers, scale, *at, *dq.stride()[:2], *call.sizes, **constants,
    )  # fmt: skip
    return dq, dk, dv
