"""Shared parts of the Triton kernels of block-sparse attention: tiles of rows, their loads and stores, launch plans.

A tile is a fixed number of rows (BLOCK) inside one block of tokens; a block of more than BLOCK tokens has several
parts. Rows past the end of the block are read as 0 and never written, so that no value of a neighbouring block (a NaN,
for example) can enter a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vsa_kernels.block_index import is_flat
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.launch import capability, cdiv, config, launch, next_power_of_2

# with fine masks, D > 64: what sm_90 takes in its tuned registers is spilled by hundreds of bytes on newer chips
_FINE_ON_100: dict[str, dict[str, Any]] = {"fwd": {"maxnreg": None}, "dkv": {"num_warps": 8}}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def span(offsets, i_n, i_part, num_tokens, SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIFORM: tl.constexpr):
    """First token, token count of one part of block i_n, and the token count of the whole block."""
    if UNIFORM:
        begin = i_n * SIZE
        stop = tl.minimum(begin + SIZE, num_tokens)
    else:
        begin = tl.load(offsets + i_n)
        stop = tl.load(offsets + i_n + 1)
    start = begin + i_part * BLOCK
    return start, tl.minimum(stop - start, BLOCK), stop - begin


@triton.jit
def load_tile(
    src, i_b, i_h, start, size, stride_b, stride_l, stride_h,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`[BLOCK, BLOCK_D]` rows start .. start + size of batch i_b and head i_h; the rest is 0."""
    o_r = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_src = src + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h + start.to(tl.int64) * stride_l
    p_src = p_src + (o_r[:, None] * stride_l + o_d[None, :])
    if not EVEN:
        b_x = tl.load(p_src, mask=(o_r[:, None] < size) & (o_d[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        b_x = tl.load(p_src, mask=o_d[None, :] < D, other=0.0)
    else:
        b_x = tl.load(p_src)
    return b_x


@triton.jit
def load_listed(
    src, i_b, i_h, i_n, i_part, num, start, size, stride_b, stride_l, stride_h,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Like `load_tile`; with DESC, src is a descriptor over equal blocks of PARTS * BLOCK rows (see `described`)."""
    if DESC:
        row = ((i_b * num + i_n) * PARTS + i_part) * BLOCK
        b_x = src.load([row.to(tl.int32), (i_h * D).to(tl.int32)])
    else:
        b_x = load_tile(src, i_b, i_h, start, size, stride_b, stride_l, stride_h, D, BLOCK, BLOCK_D, EVEN)
    return b_x


@triton.jit
def store_tile(
    dst, x, i_b, i_h, start, size, stride_b, stride_l, stride_h,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the first size rows of x `[BLOCK, BLOCK_D]`."""
    o_r = tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_dst = dst + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h + start.to(tl.int64) * stride_l
    p_dst = p_dst + (o_r[:, None] * stride_l + o_d[None, :])
    tl.store(p_dst, x.to(dst.dtype.element_ty), mask=(o_r[:, None] < size) & (o_d[None, :] < D))


class Tiles(NamedTuple):
    """Division of the query or the kv blocks into tiles: constants of a plan.

    Args:
        block: rows of a tile.
        parts: tiles of the largest block.
        size: tokens per block where they are uniform (the last may be shorter), else 0.
        even: whether every tile is full of tokens.
        num: blocks.
    """

    block: int
    parts: int
    size: int
    even: bool
    num: int

    @classmethod
    def of(cls, blocks: tuple[int, int, int] | None, num_tokens: int, largest: int) -> Tiles:
        """Tiles of at most `largest` rows, at least 16 (the smallest matrix product).

        Args:
            blocks: number of blocks, largest and smallest size; None: runs of `largest` tokens.
            num_tokens: L or S.
            largest: maximum number of rows of a tile.
        """
        if blocks is None:
            return cls(largest, 1, largest, num_tokens % largest == 0, cdiv(num_tokens, largest))
        num, most, least = blocks
        block = max(16, min(largest, next_power_of_2(most)))
        even = most == least and most % block == 0
        return cls(block, cdiv(most, block), most if most == least else 0, even, num)


class Plan(NamedTuple):
    """Tiles, compile-time constants and options of one kernel.

    Args:
        q: tiles of the queries.
        kv: tiles of the keys and values.
        constants: constexprs and options of the plan.
        describe: whether the configuration uses descriptors where they fit.
    """

    q: Tiles
    kv: Tiles
    constants: dict[str, Any]
    describe: bool

    @classmethod
    def of(cls, kernel: str, q: Tensor, k: Tensor, mask: BlockMask | None, half: bool) -> Plan:
        """The pinned configuration of a kernel for these tensors; mask None: every token sees every token.

        Args:
            kernel: name in the table of configurations.
            q: `[B, L, H, D]`.
            k: `[B, S, Hkv, D]`.
            mask: selected blocks.
            half: whether fp32 inputs are means of half-precision tokens, so that tf32 products are accurate enough.
        """
        blocks: tuple[Any, ...] = (None, None, False, False)
        if mask is not None:
            q_blocks, kv_blocks = ((x.num, x.max_size, x.min_size) for x in (mask.q_blocks, mask.kv_blocks))
            blocks = (q_blocks, kv_blocks, mask.kv_valid is not None, mask.index.mask_bits is not None)
        _, L, H, D = q.shape
        return _plan(kernel, q.device, q.dtype, L, k.shape[1], H // k.shape[2], D, *blocks, half)


@functools.cache
def _plan(
    kernel: str, device: torch.device, dtype: torch.dtype, L: int, S: int, group: int, D: int,
    q_blocks: tuple[int, int, int] | None, kv_blocks: tuple[int, int, int] | None, has_valid: bool, fine: bool,
    half: bool,
) -> Plan:  # fmt: skip
    options = config(kernel, D, dtype, device)
    if fine and D > 64 and capability(device) >= (10, 0):
        options |= _FINE_ON_100.get(kernel, {})
    q_tiles = Tiles.of(q_blocks, L, options.pop("BLOCK_M"))
    kv_tiles = Tiles.of(kv_blocks, S, options.pop("BLOCK_N"))
    describe = bool(options.pop("DESC", 0))
    constants: dict[str, Any] = {
        "GROUP": group, "D": D, "BLOCK_D": max(16, next_power_of_2(D)),
        "BLOCK_M": q_tiles.block, "Q_PARTS": q_tiles.parts, "Q_SIZE": q_tiles.size, "EVEN_Q": q_tiles.even,
        "BLOCK_N": kv_tiles.block, "KV_PARTS": kv_tiles.parts, "KV_SIZE": kv_tiles.size,
        "EVEN_KV": kv_tiles.even and not has_valid,
        "LISTED": q_blocks is not None, "FINE": fine, "HAS_VALID": has_valid,
        "PRECISION": "tf32" if half and dtype == torch.float32 else "ieee",
        **options,
    }  # fmt: skip
    return Plan(q_tiles, kv_tiles, constants, describe)


def lists_of(mask: BlockMask | None) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, int, int, int, int]]:
    """Lists and counts of a mask, with their strides; None and 0 without a mask (dense attention).

    Strides are those of the lists over batch, heads and rows and of the counts over batch and heads; 0 where a dim
    broadcasts.
    """
    if mask is None:
        return (None, None), (0, 0, 0, 0, 0)
    lists, counts = mask.index.kv_indices, mask.index.kv_num_blocks
    b, h, n = (lists.stride(d) if d == 2 or lists.shape[d] > 1 else 0 for d in range(3))
    return (lists, counts), (b, h, n, *(counts.stride(d) if counts.shape[d] > 1 else 0 for d in range(2)))


def offsets_of(mask: BlockMask | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Offsets of the query blocks, offsets of the kv blocks and `kv_valid`, each None where it is absent."""
    return (None, None, None) if mask is None else (mask.q_blocks.offsets, mask.kv_blocks.offsets, mask.kv_valid)


def rows_ready(x: Tensor) -> Tensor:
    """x if the kernels can address its rows, else a contiguous copy."""
    # offsets inside a tile of up to 256 rows have 32 bits
    return x if x.stride(-1) == 1 and 0 <= x.stride(1) < 1 << 22 else x.contiguous()


def described(
    xs: Sequence[Tensor], tiles: Tiles, offsets: Tensor | None, valid: Tensor | None = None
) -> tuple[Any, ...] | None:
    """Descriptors over tensors `[B, L, H, D]`, one box per tile and head; None where the chip or D does not allow them.

    Boxes need blocks of one size. Ragged blocks are padded with zeros in a copy of the tensors, which costs a few
    percent of the kernel's time, while masked loads in its loop would halve its speed.
    """
    B, _, H, D = xs[0].shape
    if capability(xs[0].device) < (9, 0) or D not in (16, 32, 64, 128, 256) or xs[0].element_size() != 2:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = B * tiles.num * tiles.parts * tiles.block
    if rows >= 1 << 31:
        return None
    direct = tiles.even and valid is None
    padded = [x if direct and is_flat(x) else pad_blocks(x, tiles, offsets, valid) for x in xs]
    return tuple(TensorDescriptor(x, [rows, H * D], [x.stride(1), 1], [tiles.block, D]) for x in padded)


def pad_blocks(x: Tensor, tiles: Tiles, offsets: Tensor | None, valid: Tensor | None) -> Tensor:
    """x `[B, L, H, D]` as `[B, N * parts * block, H, D]`: every block padded with zeros to whole tiles."""
    B, L, H, D = x.shape
    padded = x.new_empty((B, tiles.num * tiles.parts * tiles.block, H, D))
    launch(
            _pad_kernel, (tiles.num * tiles.parts * H, B),
        x, padded, offsets, valid, *x.stride()[:3], padded.stride(0), padded.stride(1), L, H, tiles.num,
        D=D, BLOCK_D=max(16, next_power_of_2(D)), BLOCK=tiles.block, PARTS=tiles.parts, SIZE=tiles.size,
        HAS_VALID=valid is not None, num_warps=4,
    )  # fmt: skip
    return padded


@triton.jit
def _pad_kernel(
    x, padded, offsets, valid, x_b, x_l, x_h, out_b, out_l, L, H, num,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    HAS_VALID: tl.constexpr,
):  # fmt: skip
    # heads of one tile run side by side: their rows are neighbours in memory
    i_h, i_tile, i_b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1)
    i_n, i_part = i_tile // PARTS, i_tile % PARTS
    start, size, _ = span(offsets, i_n, i_part, L, SIZE, BLOCK, SIZE > 0)
    if HAS_VALID:
        size = tl.minimum(size, tl.load(valid + i_b.to(tl.int64) * num + i_n) - i_part * BLOCK)
    b_x = load_tile(x, i_b, i_h, start, size, x_b, x_l, x_h, D, BLOCK, BLOCK_D, False)
    store_tile(padded, b_x, i_b, i_h, i_tile * BLOCK, BLOCK, out_b, out_l, D, D, BLOCK, BLOCK_D)
