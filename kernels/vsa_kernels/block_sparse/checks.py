"""What is refused before any launch, in one line that names the argument, its value and what is allowed."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.mask import BlockMask


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes and dtypes of q `[B, L, H, D]`, k and v `[B, S, Hkv, D]`."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, tokens, heads, D], got {list(q.shape)} and {list(k.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim, got {list(q.shape)} and {list(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[2]} and {k.shape[2]}")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must share one float dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


def check_index(q: Tensor, index: BlockIndex, q_blocks: Blocks, kv_blocks: Blocks) -> None:
    """Shapes and dtypes of an index for q `[B, L, H, D]`."""
    shape = index.kv_indices.shape
    if len(shape) != 4 or shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[2]):
        raise ValueError(f"kv_indices must be [B|1, H|1, Nq, Kmax] for q {list(q.shape)}, got {list(shape)}")
    if shape[2] != q_blocks.num:
        raise ValueError(f"kv_indices must have {q_blocks.num} rows, one per query block, got {shape[2]}")
    for name, x in (("kv_indices", index.kv_indices), ("kv_num_blocks", index.kv_num_blocks)):
        if x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {x.dtype}")
    if index.kv_num_blocks.shape != shape[:3]:
        raise ValueError(f"kv_num_blocks must be {list(shape[:3])}, got {list(index.kv_num_blocks.shape)}")
    fine = (index.kv_num_full_blocks, index.mask_ids, index.mask_bits)
    if all(part is None for part in fine):
        return
    full, ids, bits = fine
    if full is None or ids is None or bits is None:
        raise ValueError("a fine mask needs kv_num_full_blocks, mask_ids and mask_bits together")
    if full.shape != shape[:3] or ids.shape != shape:
        raise ValueError(
            f"kv_num_full_blocks and mask_ids must be {list(shape[:3])} and {list(shape)}, "
            f"got {list(full.shape)} and {list(ids.shape)}"
        )
    if tuple(bits.shape[1:]) != (q_blocks.max_size, kv_blocks.max_size):
        raise ValueError(f"mask_bits must be [M, {q_blocks.max_size}, {kv_blocks.max_size}], got {list(bits.shape)}")


def named_tensors(mask: BlockMask) -> dict[str, Tensor | None]:
    """The tensors of a mask by the names a caller knows."""
    index = mask.index
    return {
        "kv_indices": index.kv_indices,
        "kv_num_blocks": index.kv_num_blocks,
        "kv_num_full_blocks": index.kv_num_full_blocks,
        "mask_ids": index.mask_ids,
        "mask_bits": index.mask_bits,
        "q_blocks.offsets": mask.q_blocks.offsets,
        "kv_blocks.offsets": mask.kv_blocks.offsets,
        "kv_valid": mask.kv_valid,
    }


def check_devices(q: Tensor, **others: Tensor | None) -> None:
    """Every tensor lives where q does."""
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")


def check_mask_values(mask: BlockMask, num_q: int, num_kv: int) -> None:
    """The values of a mask against the contracts of `Blocks` and `BlockIndex`; waits for the device.

    Args:
        mask: the mask.
        num_q: L.
        num_kv: S.

    Raises:
        ValueError: offsets that do not ascend from 0 to the number of tokens or do not have the stated sizes, counts
            outside 0 .. Kmax, listed blocks out of range or not ascending, kv_valid outside the blocks.
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
    for name, x, most in (("kv_num_blocks", counts, capacity), ("kv_num_full_blocks", full, capacity)):
        if int(x.min()) < 0 or int(x.max()) > most:
            raise ValueError(f"{name} must be in 0 .. {most}, got {int(x.min())} .. {int(x.max())}")
    slot = torch.arange(capacity, device=counts.device)
    listed = slot < counts[..., None]
    chosen = index.kv_indices[listed]
    if chosen.numel() and (int(chosen.min()) < 0 or int(chosen.max()) >= num):
        raise ValueError(f"kv_indices must be in 0 .. {num - 1}, got {int(chosen.min())} .. {int(chosen.max())}")
    # the first masked entry starts a new ascending run
    follows = listed[..., 1:] & (slot[1:] != full[..., None])
    falls = follows & (index.kv_indices[..., 1:] <= index.kv_indices[..., :-1])
    if bool(falls.any()):
        b, h, n, j = (int(x) for x in falls.nonzero()[0])
        pair = index.kv_indices[b, h, n, j : j + 2].tolist()
        raise ValueError(f"kv_indices must ascend in a row, got {pair[0]} then {pair[1]} in row {[b, h, n]}")
    if mask.kv_valid is not None and bool(((mask.kv_valid < 0) | (mask.kv_valid > mask.kv_blocks.sizes)).any()):
        raise ValueError("kv_valid must be between 0 and the size of its block")
