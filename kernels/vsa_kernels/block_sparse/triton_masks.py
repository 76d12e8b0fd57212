"""Fine masks packed for the Triton kernels of block-sparse attention: one bit per pair, a word per row and 64 columns.

A tile of 64 x 64 pairs reads 512 bytes of mask, against 4 KiB as bools and 32 KiB of keys and values. A thread needs
one word for each of its rows, whereas bools would have to pass through shared memory into the layout of the logits.
Each call packs the words again: this reads the masks once, which is little compared with what the masked blocks read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int64, uint8

from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.launch import cdiv, launch

# rows of a program, one warp
_BLOCK_R = 32


@triton.jit
def load_words(words, i_mask, row, size, column, word_m, word_c, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Words `[ROWS]` of mask i_mask for the tile that starts at a row and a column; rows past size see nothing."""
    o_r = tl.arange(0, ROWS)
    p_words = words + i_mask.to(tl.int64) * word_m + (column // 64) * word_c + row + o_r
    if EVEN:
        b_words = tl.load(p_words)
    else:
        b_words = tl.load(p_words, mask=o_r < size, other=0)
    return b_words


@triton.jit
def hide(b_s, b_words, column, COLUMNS: tl.constexpr):
    """Logits `[rows, COLUMNS]` with -inf where the words `[rows]` of the tile have no bit."""
    tl.static_assert(COLUMNS <= 64, "a tile of a fine mask has at most the 64 columns of a word")
    o_c = column % 64 + tl.arange(0, COLUMNS)
    # in two steps: a thread of a matrix product holds every eighth column, for which the second is a constant
    b_bits = (b_words[:, None] >> (o_c % 8)[None, :]) >> (o_c // 8 * 8)[None, :]
    return tl.where(b_bits & 1 != 0, b_s, -float("inf"))


@triton.jit
def _pack_kernel(bits, words, num_rows, num_columns, bit_m, bit_r, bit_c, BLOCK_R: tl.constexpr):
    num_tiles, num_words = tl.cdiv(num_rows, BLOCK_R), tl.cdiv(num_columns, 64)
    i_tile, i_word = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles % num_words
    i_m = (tl.program_id(0) // (num_tiles * num_words)).to(tl.int64)
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    o_bit = tl.arange(0, 64)
    o_c = i_word * 64 + o_bit
    # [BLOCK_R, 64]
    m_bits = (o_r < num_rows)[:, None] & (o_c < num_columns)[None, :]
    b_bits = tl.load(bits + i_m * bit_m + o_r[:, None] * bit_r + o_c[None, :] * bit_c, mask=m_bits, other=0)
    b_words = tl.sum(b_bits.to(tl.int64) << o_bit[None, :], 1)
    tl.store(words + (i_m * num_words + i_word) * num_rows + o_r, b_words, mask=o_r < num_rows)


def pack_words(bits: Tensor) -> Tensor:
    """The masks as words of 64 columns, int64 `[M, ceil(columns / 64), rows]`.

    Args:
        bits: bool `[M, rows, columns]`, True = attend; any strides.
    """
    masks, rows, columns = bits.shape
    words = bits.new_empty((masks, cdiv(columns, 64), rows), dtype=int64)
    launch(
        _pack_kernel, (masks * words.shape[1] * cdiv(rows, _BLOCK_R),),
        bits.view(uint8), words, rows, columns, *bits.stride(), BLOCK_R=_BLOCK_R, num_warps=1,
    )  # fmt: skip
    return words


def fine_of(mask: BlockMask | None) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Counts of full entries, mask ids and words of a mask, with their strides; None and 0 without fine masks.

    Strides are those of the counts over batch and heads, of the ids over batch, heads and rows, of the words over masks
    and columns.
    """
    if mask is None or mask.index.mask_bits is None:
        return (None, None, None), (0,) * 7
    full, ids, words = mask.index.kv_num_full_blocks, mask.index.mask_ids, pack_words(mask.index.mask_bits)
    assert full is not None
    assert ids is not None
    full_at = (full.stride(d) if full.shape[d] > 1 else 0 for d in range(2))
    ids_at = (ids.stride(d) if d == 2 or ids.shape[d] > 1 else 0 for d in range(3))
    return (full, ids, words), (*full_at, *ids_at, *words.stride()[:2])
