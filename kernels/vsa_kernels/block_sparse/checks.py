"""Checks of the mask arguments of `block_sparse_attn`; those of tokens and blocks are in `vsa_kernels.checks`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from vsa_kernels.block_sparse.mask import BlockMask, lse_dtype
from vsa_kernels.checks import check_device, has_sizes


def check_mask(q: Tensor, mask: BlockMask) -> None:
    """Check shapes, dtypes and devices of a mask for q `[B, L, H, D]`; `check_blocks` checks its partitions."""
    index, valid = mask.index, mask.kv_valid
    shape, counts = index.kv_indices.shape, index.kv_num_blocks
    full, ids, bits = index.kv_num_full_blocks, index.mask_ids, index.mask_bits
    if len(shape) != 4 or shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[2]):
        raise ValueError(f"kv_indices must be [B|1, H|1, Nq, Kmax] for q {list(q.shape)}, got {list(shape)}")
    if shape[2] != mask.q_blocks.num:
        raise ValueError(f"kv_indices must have {mask.q_blocks.num} rows, one per query block, got {shape[2]}")
    if counts.shape != shape[:3]:
        raise ValueError(f"kv_num_blocks must be {list(shape[:3])}, got {list(counts.shape)}")
    if valid is not None and valid.shape != (q.shape[0], mask.kv_blocks.num):
        raise ValueError(f"kv_valid must be {[q.shape[0], mask.kv_blocks.num]}, got {list(valid.shape)}")
    for name, x in (
        ("kv_indices", index.kv_indices),
        ("kv_num_blocks", counts),
        ("kv_valid", valid),
        ("kv_num_full_blocks", full),
        ("mask_ids", ids),
    ):
        if x is not None and x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {x.dtype}")
        check_device(name, x, "q", q)
    if full is None and ids is None and bits is None:
        return
    if full is None or ids is None or bits is None:
        raise ValueError("a fine mask needs kv_num_full_blocks, mask_ids and mask_bits together")
    if full.shape != shape[:3] or ids.shape != shape:
        raise ValueError(
            f"kv_num_full_blocks and mask_ids must be {list(shape[:3])} and {list(shape)}, "
            f"got {list(full.shape)} and {list(ids.shape)}"
        )
    tile = (mask.q_blocks.max_size, mask.kv_blocks.max_size)
    if bits.dtype != torch.bool or tuple(bits.shape[1:]) != tile or not bits.shape[0]:
        raise ValueError(f"mask_bits must be bool [M, {tile[0]}, {tile[1]}], got {bits.dtype} {list(bits.shape)}")
    check_device("mask_bits", bits, "q", q)


def check_outputs(q: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    """Check shapes, dtypes and devices of outputs of attention with queries q `[B, L, H, D]`, and of their gradients.

    Args:
        q: queries.
        dout: `[B, L, H, D]` in q's dtype.
        out: `[B, L, H, D]` in q's dtype or that of lse.
        lse: `[B, H, L]` in `lse_dtype`.
        dlse: gradient of the shape of lse, or None.
    """
    B, L, H, D = q.shape
    wide = lse_dtype(q.dtype)
    for name, x, sizes, dtypes in (
        ("dout", dout, [B, L, H, D], [q.dtype]),
        ("out", out, [B, L, H, D], [q.dtype, wide]),
        ("lse", lse, [B, H, L], [wide]),
        ("dlse", dlse, [B, H, L], [wide]),
    ):
        if x is not None and (not has_sizes(x, sizes) or x.dtype not in dtypes):
            expected = " or ".join(map(str, dict.fromkeys(dtypes)))
            raise ValueError(f"{name} must be {expected} {sizes} for q, got {x.dtype} {list(x.shape)}")
        check_device(name, x, "q", q)


def check_mask_values(mask: BlockMask, num_q: int, num_kv: int) -> None:
    """Check the values of a mask against the contracts of `Blocks` and `BlockIndex`; waits for the device.

    Args:
        mask: the mask to check.
        num_q: L, query tokens.
        num_kv: S, kv tokens.
    """
    for name, blocks, tokens in (("q_blocks", mask.q_blocks, num_q), ("kv_blocks", mask.kv_blocks, num_kv)):
        offsets = blocks.offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != tokens:
            raise ValueError(f"{name}.offsets must run from 0 to {tokens}, got {offsets[0]} to {offsets[-1]}")
        sizes = [b - a for a, b in itertools.pairwise(offsets)]
        if min(sizes) < 1:
            n = sizes.index(min(sizes))
            raise ValueError(f"{name}.offsets must ascend, got {offsets[n]} then {offsets[n + 1]} at block {n}")
        if (max(sizes), min(sizes)) != (blocks.max_size, blocks.min_size):
            raise ValueError(
                f"{name} must have max_size {max(sizes)} and min_size {min(sizes)} as its offsets do, "
                f"got {blocks.max_size} and {blocks.min_size}"
            )
    index, num = mask.index, mask.kv_blocks.num
    counts, capacity = index.kv_num_blocks, index.kv_indices.shape[-1]
    full = counts if index.kv_num_full_blocks is None else index.kv_num_full_blocks
    _check_range("kv_num_blocks", counts, capacity)
    _check_range("kv_num_full_blocks", full, capacity)
    _check_range("kv_num_blocks - kv_num_full_blocks", counts - full, capacity)
    if counts.numel():
        least, most = (int(x) for x in counts.aminmax())
        for name, value, low, high in (("max", index.max_blocks, most, capacity), ("min", index.min_blocks, 0, least)):
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}_blocks must be in {low}..{high} as kv_num_blocks is, got {value}")
    slot = torch.arange(capacity, device=counts.device)
    in_list = slot < counts[..., None]
    _check_range("kv_indices", index.kv_indices[in_list], num - 1)
    if index.mask_ids is not None and index.mask_bits is not None:
        _check_range("mask_ids", index.mask_ids[in_list & (slot >= full[..., None])], len(index.mask_bits) - 1)
    # the first masked entry starts a new ascending run
    follows = in_list[..., 1:] & (slot[1:] != full[..., None])
    falls = follows & (index.kv_indices[..., 1:] <= index.kv_indices[..., :-1])
    if bool(falls.any()):
        b, h, n, j = (int(x) for x in falls.nonzero()[0])
        pair = index.kv_indices[b, h, n, j : j + 2].tolist()
        raise ValueError(f"kv_indices must ascend in a row, got {pair[0]} then {pair[1]} in row {[b, h, n]}")
    if mask.kv_valid is not None and bool(((mask.kv_valid < 0) | (mask.kv_valid > mask.kv_blocks.sizes)).any()):
        raise ValueError("kv_valid must be between 0 and the size of its block")


def _check_range(name: str, values: Tensor, most: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) > most):
        raise ValueError(f"{name} must be in 0..{most}, got {int(values.min())}..{int(values.max())}")
