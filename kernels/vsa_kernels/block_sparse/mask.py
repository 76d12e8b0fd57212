"""A block mask with both block partitions: what every backend receives beside q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """Which token pairs attend.

    Args:
        index: selected kv blocks of each query block.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        kv_valid: int32 `[B, Nkv]` leading tokens of each kv block that exist in this sample, None: all.
    """

    index: BlockIndex
    q_blocks: Blocks
    kv_blocks: Blocks
    kv_valid: Tensor | None

    def __post_init__(self):
        # its rows have no stride of their own in the kernels
        if self.kv_valid is not None:
            object.__setattr__(self, "kv_valid", self.kv_valid.contiguous())

    def flatten(self) -> tuple[Any, ...]:
        """The mask as the flat arguments of a registered op."""
        i, q, kv = self.index, self.q_blocks, self.kv_blocks
        return (
            *(i.kv_indices, i.kv_num_blocks, i.kv_num_full_blocks, i.mask_ids, i.mask_bits),
            *(i.max_blocks, i.min_blocks),
            *(q.offsets, q.max_size, q.min_size, kv.offsets, kv.max_size, kv.min_size),
            self.kv_valid,
        )

    @classmethod
    def unflatten(cls, flat: Sequence[Any]) -> BlockMask:
        """Inverse of `flatten`."""
        indices, counts, full, ids, bits, most, least, q, q_max, q_min, kv, kv_max, kv_min, valid = flat
        return cls(
            index=BlockIndex(
                kv_indices=indices,
                kv_num_blocks=counts,
                kv_num_full_blocks=full,
                mask_ids=ids,
                mask_bits=bits,
                max_blocks=most,
                min_blocks=least,
            ),
            q_blocks=Blocks(offsets=q, max_size=q_max, min_size=q_min),
            kv_blocks=Blocks(offsets=kv, max_size=kv_max, min_size=kv_min),
            kv_valid=valid,
        )


def token_places(blocks: Blocks, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Block of each token and the token's place inside it, both int64 `[num_tokens]`."""
    token = torch.arange(num_tokens, device=blocks.offsets.device, dtype=torch.int32)
    block = torch.searchsorted(blocks.offsets[1:].contiguous(), token, right=True)
    return block, (token - blocks.offsets[block]).long()
