"""Data structures of a block-sparse mask: the partition into blocks and the kv blocks of each query block.

B batch, H heads, Nq / Nkv number of query / kv blocks, Kmax list capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def packed(x: Tensor) -> Tensor:
    """x if its last dim is contiguous in memory, as the kernels require, else a copy whose last dim is.

    The other dims may have any stride. A dim of stride 0 (from `expand`) keeps stride 0 in the copy.
    """
    if x.stride(-1) == 1 or x.shape[-1] <= 1:
        return x
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])]
    return once.contiguous().expand(x.shape)


def is_flat(x: Tensor) -> bool:
    """Whether a descriptor can address x `[B, L, H, D]` as `[B * L, H * D]`: heads side by side, rows of 16 bytes."""
    B, L, _, D = x.shape
    return (
        x.stride(3) == 1
        and x.stride(2) == D
        and x.stride(1) > 0
        and (B == 1 or x.stride(0) == L * x.stride(1))
        and x.stride(1) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def pack(values: Any, *names: str) -> None:
    """Apply `packed` to the named tensors of a frozen dataclass, in its `__post_init__`; most are packed already."""
    for name in names:
        x = getattr(values, name)
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.stride(-1) != 1:
            object.__setattr__(values, name, packed(x))


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Partition of a sequence into contiguous blocks (`cu_seqlens` style).

    The largest and smallest sizes are plain ints beside the offsets, so that no launch waits for the device. Offsets
    that are a strided view are copied.

    Args:
        offsets: int32 `[N + 1]`, ascending from 0 to the sequence length; block n holds tokens
            `offsets[n] : offsets[n + 1]`.
        max_size: tokens in the largest block.
        min_size: tokens in the smallest block; equal to `max_size` when the blocks are uniform.
    """

    offsets: Tensor
    max_size: int
    min_size: int

    def __post_init__(self):
        pack(self, "offsets")

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], device: torch.device | str | None = None) -> Blocks:
        """Blocks of the given sizes, in order; ValueError for sizes that are no positive numbers of tokens."""
        try:
            whole = len(sizes) > 0 and all(int(size) == size > 0 for size in sizes)
        # what is no sequence or no number, NaN and infinity
        except (TypeError, ValueError, OverflowError):
            whole = False
        if not whole:
            got = " ".join(str(sizes).split())
            raise ValueError(f"expected at least one block and positive block sizes in whole tokens, got {got}")
        total = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
        return cls(offsets=total.to(torch.int32).to(device), max_size=max(sizes), min_size=min(sizes))

    @property
    def num(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def sizes(self) -> Tensor:
        """int32 `[N]` tokens per block."""
        return self.offsets[1:] - self.offsets[:-1]


def token_places(blocks: Blocks, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Block of each token and the token's position in that block, both int64 `[num_tokens]`."""
    token = torch.arange(num_tokens, device=blocks.offsets.device, dtype=torch.int32)
    block = torch.searchsorted(blocks.offsets[1:].contiguous(), token, right=True)
    return block, (token - blocks.offsets[block]).long()


def by_block(x: Tensor, blocks: Blocks) -> Tensor:
    """x `[B, L, H, D]` as `[B, N, max_size, H, D]`: its tokens by block, short blocks padded with zeros."""
    shape = (x.shape[0], blocks.num, blocks.max_size, *x.shape[2:])
    if blocks.max_size == blocks.min_size:
        return x.reshape(shape)
    place = torch.arange(blocks.max_size, device=x.device)
    # [N, max_size] tokens; places past the end of a block read some token and are then zeroed
    token = (blocks.offsets[:-1, None] + place).clamp(max=x.shape[1] - 1)
    padded = x.index_select(1, token.view(-1)).view(shape)
    return padded.masked_fill_((place >= blocks.sizes[:, None])[..., None, None], 0)


@dataclass(frozen=True, kw_only=True)
class BlockIndex:
    """Which kv blocks each query block attends to.

    Dims of size 1 broadcast over batch or heads. Counts and capacity are run-time values. Tensors that are strided
    views in their last dim are copied.

    Args:
        kv_indices: int32 `[B|1, H|1, Nq, Kmax]`; the first `kv_num_blocks` entries of a row are distinct and
            ascending (with a fine mask: full entries first, then masked ones, each part ascending); the rest is
            never read.
        kv_num_blocks: int32 `[B|1, H|1, Nq]`.
        kv_num_full_blocks: int32 like `kv_num_blocks`, entries before it need no fine mask; None: all are full.
        mask_ids: int32 like `kv_indices`, row of `mask_bits` for each masked entry.
        mask_bits: bool `[M, block_q, block_kv]`, True = attend.
        max_blocks: upper bound of `kv_num_blocks` when the host knows it; None: unknown, and a backend that needs it
            waits for the device.
        min_blocks: lower bound of `kv_num_blocks` when the host knows it; equal to `max_blocks` when every row
            lists the same number of blocks, so that the backends need no mask over unused list entries.
    """

    kv_indices: Tensor
    kv_num_blocks: Tensor
    kv_num_full_blocks: Tensor | None = None
    mask_ids: Tensor | None = None
    mask_bits: Tensor | None = None
    max_blocks: int | None = None
    min_blocks: int | None = None

    def __post_init__(self):
        pack(self, "kv_indices", "kv_num_blocks")
        if self.kv_num_full_blocks is not None and self.mask_ids is not None and self.mask_bits is not None:
            pack(self, "kv_num_full_blocks", "mask_ids", "mask_bits")

    @classmethod
    def from_dense(cls, mask: Tensor) -> BlockIndex:
        """Index of a bool block mask `[B|1, H|1, Nq, Nkv]`."""
        before = mask.cumsum(-1, dtype=torch.int32)
        counts = before[..., -1:]
        column = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32)
        # kept blocks go first, ascending, the others behind them
        place = torch.where(mask, before - 1, counts + column - before)
        indices = torch.empty_like(place, memory_format=torch.contiguous_format)
        indices.scatter_(-1, place.long(), column.expand_as(place))
        return cls(kv_indices=indices, kv_num_blocks=counts[..., 0].contiguous())

    def to_dense(self, num_kv_blocks: int) -> Tensor:
        """Bool block mask `[B|1, H|1, Nq, num_kv_blocks]`, True where any token pair may attend."""
        in_list = torch.arange(self.kv_indices.shape[-1], device=self.kv_indices.device) < self.kv_num_blocks[..., None]
        # entries past the count are never read: send them to a spare column
        columns = torch.where(in_list, self.kv_indices, num_kv_blocks).long()
        mask = torch.zeros(*self.kv_indices.shape[:-1], num_kv_blocks + 1, dtype=torch.bool, device=columns.device)
        return mask.scatter_(-1, columns, True)[..., :num_kv_blocks]
