"""Which kernels of backend `triton` compute a call of block-sparse attention: a table per pass.

Modules are named by their file here and imported when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa_kernels.block_index import is_flat
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.launch import capability, cdiv
from vsa_kernels.workspace import Parts, parts_of

Chip = tuple[int, int]
Condition = Callable[[Tensor, Tensor, Tensor, BlockMask, Chip], bool]
Shares = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_SHARES: Shares = (None, None, None)


def _hopper(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    # Hopper's instructions, tensors that descriptors can address without a copy, and no hidden pairs
    return (
        chip == (9, 0)
        and mask.index.mask_bits is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] in (64, 128)
        and mask.kv_valid is None
        and is_flat(q)
        and is_flat(k)
        and is_flat(v)
    )


def _tiles_of_64(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    q_blocks, kv_blocks = mask.q_blocks, mask.kv_blocks
    return (
        q_blocks.min_size == q_blocks.max_size
        and q_blocks.max_size % 64 == 0
        # at head dim 64 blocks of 128 run faster in halves
        and kv_blocks.min_size == kv_blocks.max_size in ((64, 128) if q.shape[3] == 64 else (64,))
        and _hopper(q, k, v, mask, chip)
    )


def _long_rows(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    return mask.kv_blocks.max_size == 64 and ranges_of(k) > 1 and _tiles_of_64(q, k, v, mask, chip)


def _tiles_of_128(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    return all(64 < x.max_size <= 128 for x in (mask.q_blocks, mask.kv_blocks)) and _hopper(q, k, v, mask, chip)


def _wide_heads(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    return q.shape[3] == 128 and _tiles_of_128(q, k, v, mask, chip)


def _wide_heads_with_room(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    return _wide_heads(q, k, v, mask, chip) and workspace_of(q, k, mask) is not None


def _any(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip) -> bool:
    return True


# the first row whose condition holds computes a call
FORWARD: tuple[tuple[Condition, str], ...] = (
    (_long_rows, "triton_ranges"),
    (_tiles_of_64, "hopper_fwd"),
    (_tiles_of_128, "hopper_fwd128"),
    (_any, "triton_fwd"),
)
# dk and dv; then dq, from ds that the same module has kept or from logits that another computes again
BACKWARD: tuple[tuple[Condition, str, str], ...] = (
    (_wide_heads_with_room, "hopper_bwd128", "hopper_bwd128"),
    (_wide_heads, "hopper_bwd128", "triton_bwd"),
    (_long_rows, "triton_bwd", "triton_ranges"),
    (_any, "triton_bwd", "triton_bwd"),
)


FITS = 48 << 20
"""Bytes of keys and values of a head up to which one range of them is fastest."""
RANGE = 36 << 20
"""Most bytes of keys and values of a head in one of several ranges."""


def ranges_of(k: Tensor) -> int:
    """Ranges of keys k `[B, S, Hkv, D]` for tiles of 64."""
    size = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return 1 if size <= FITS else cdiv(size, RANGE)


class Kernels(NamedTuple):
    """What computes a call: names of modules of `vsa_kernels.block_sparse`.

    Args:
        forward: out and lse.
        dkv: gradients of k and v.
        dq: gradient of q.
        workspace: bytes that the backward takes beside its arguments and results, and gives back.
    """

    forward: str
    dkv: str
    dq: str
    workspace: int = 0


def kernels_of(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip | None = None) -> Kernels:
    """The kernels of a call on backend `triton`; with the compute capability of another GPU, those there."""
    (forward,), (dkv, dq) = (_first(table, q, k, v, mask, chip) for table in (FORWARD, BACKWARD))
    parts = workspace_of(q, k, mask) if dq == "hopper_bwd128" else None
    return Kernels(forward, dkv, dq, parts.size if parts else 0)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    (name,) = _first(FORWARD, q, k, v, mask)
    return _module(name).forward(q, k, v, mask, scale)


def backward(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float,
    shares: Shares = NO_SHARES,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `block_sparse_attn`, or of one part of a larger softmax.

    Args:
        dout: `[B, L, H, D]` gradient of the output.
        delta: fp32 `[B, H, L]`, rowsum(dout * out) - dlse; out and dlse are those of the larger softmax.
        lse: fp32 `[B, H, L]`, of the larger softmax.
        q: `[B, L, H, D]`.
        k: `[B, S, Hkv, D]`.
        v: `[B, S, Hkv, D]`.
        mask: mask of the forward.
        scale: factor of the logits in the forward.
        shares: fp32 gradients of the block means of q `[B, Nq, H, D]`, and of k and v `[B, Nkv, Hkv, D]`, which are
            added by pooling's rule; or None for each.
    """
    dkv, dq = _first(BACKWARD, q, k, v, mask)
    if dkv == dq:
        return _module(dkv).backward(dout, delta, lse, q, k, v, mask, scale, shares)
    of_q = _module(dq).dq(dout, delta, lse, q, k, v, mask, scale, shares[0])
    return of_q, *_module(dkv).dkv(dout, delta, lse, q, k, v, mask, scale, shares[1:])


def workspace_of(q: Tensor, k: Tensor, mask: BlockMask) -> Parts | None:
    """The parts of a call for tiles of 128 in which ds of every listed pair of tiles is kept."""
    (B, _, H, _), head = q.shape, ds_bytes(mask.q_blocks.num, most_listed(mask), q.element_size())
    return parts_of(B, H, k.shape[2], head)


def most_listed(mask: BlockMask) -> int:
    """A bound of the lengths of a mask's lists that the host knows, at least 1."""
    index = mask.index
    return max(1, index.kv_indices.shape[-1] if index.max_blocks is None else index.max_blocks)


def ds_bytes(num_q: int, listed: int, itemsize: int) -> int:
    """Bytes of ds of a head with lists of blocks of up to 128 tokens."""
    return num_q * listed * 128 * 128 * itemsize


def _first(table: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, chip: Chip | None = None) -> tuple[str, ...]:
    chip = capability(q.device) if chip is None else chip
    return next(tuple(names) for suits, *names in table if suits(q, k, v, mask, chip))


def _module(name: str) -> Any:
    return import_module(f"vsa_kernels.block_sparse.{name}")
