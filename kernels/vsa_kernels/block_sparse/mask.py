"""The block mask that every backend receives beside q, k and v: the index with both partitions into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks

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


def masked_logits(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """`q k^T` `[..., M, N]`, -inf outside of the mask; in it NaN for a row or column `[..., D]` that is not finite.

    Here and in `MaskedProduct` entries outside of the mask do not meet, forward and backward: NaN there would reach
    others, because 0 * NaN is NaN. Finite values have the same bits as in plain products.
    """
    (q, damaged_q), (k, damaged_k) = _finite(q), _finite(k)
    return (q @ k.mT).masked_fill(damaged_q | damaged_k.mT, torch.nan).masked_fill(~mask, -torch.inf)


class MaskedProduct(torch.autograd.Function):
    """`weights x` `[..., M, D]`, of weights `[..., M, N]` that are 0 outside of the mask; NaN for a row in whose mask a
    weight is NaN or a row of x is not finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        x, damaged = _finite(x)
        rows = (mask & (weights.isnan() | damaged.mT)).any(-1, keepdim=True)
        return (weights.masked_fill(rows | ~mask, 0) @ x).masked_fill(rows, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        weights, x, mask = ctx.saved_tensors
        return (grads[0] @ x.mT).masked_fill(~mask, 0), MaskedProduct.apply(weights.mT, grads[0], mask.mT), None


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    damaged = ~x.isfinite().all(-1, keepdim=True)
    return x.masked_fill(damaged, 0), damaged


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the lse of tokens of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
