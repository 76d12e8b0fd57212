"""The block mask that every backend receives beside q, k and v: the index with both partitions into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks, token_places

_INDEX, _BLOCKS = (tuple(field.name for field in fields(kind)) for kind in (BlockIndex, Blocks))


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """A block-sparse attention mask: the selected kv blocks, both partitions and the valid kv tokens.

    Args:
        index: selected kv blocks of each query block.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        kv_valid: int32 `[B, Nkv]`, number of leading tokens of each kv block that exist in a sample; None: all.
    """

    index: BlockIndex
    q_blocks: Blocks
    kv_blocks: Blocks
    kv_valid: Tensor | None

    def __post_init__(self):
        # the kernels assume contiguous rows
        if self.kv_valid is not None:
            object.__setattr__(self, "kv_valid", self.kv_valid.contiguous())

    def flatten(self) -> tuple[Any, ...]:
        """The mask as the flat arguments of a registered op."""
        parts = ((self.index, _INDEX), (self.q_blocks, _BLOCKS), (self.kv_blocks, _BLOCKS))
        return (*(getattr(part, name) for part, names in parts for name in names), self.kv_valid)

    @classmethod
    def unflatten(cls, flat: Sequence[Any]) -> BlockMask:
        """Inverse of `flatten`."""
        first, second = len(_INDEX), len(_INDEX) + len(_BLOCKS)
        index = BlockIndex(**dict(zip(_INDEX, flat[:first], strict=True)))
        q_blocks, kv_blocks = (
            Blocks(**dict(zip(_BLOCKS, part, strict=True))) for part in (flat[first:second], flat[second:-1])
        )
        return cls(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=flat[-1])


def existing(x: Tensor, mask: BlockMask) -> Tensor:
    """Keys or values `[B, S, Hkv, D]` with 0 past `kv_valid`, where they may hold NaN and 0 * NaN would be NaN."""
    if mask.kv_valid is None:
        return x
    block, place = token_places(mask.kv_blocks, x.shape[1])
    return x.masked_fill((place >= mask.kv_valid[:, block])[..., None, None], 0)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the lse of tokens of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
