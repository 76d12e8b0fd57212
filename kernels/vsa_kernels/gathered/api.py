"""Public interface of gathered attention: checks, defaults, then the registered ops.

B batch, L / S query / kv tokens, H / Hkv query / kv heads, D head dim, Nq / Nkv query / kv tiles, G groups, R tiles of
a group, Kmax list capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.checks import check_blocks, check_device, check_qkv, check_scale
from vsa_kernels.dispatch import resolve_plain
from vsa_kernels.gathered.groups import TileGroups
from vsa_kernels.gathered.op import gathered_fwd, group_tiles_op
from vsa_kernels.modes import lowered, refuse_forward_mode

# tiles of a group that fit the bits of an int32 in `kv_members`, without the sign bit
_MOST_TILEWISE = 31


def gathered_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: TileGroups,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of groups of scattered query tiles over the kv tiles that each group lists; forward only.

    The result equals that of `block_sparse_attn` with `groups.tile_index`. It is computed group by group: one program
    gathers the rows of the R query tiles, and packs the tokens of several small kv tiles into one tile of keys. For
    gradients call `block_sparse_attn`. Under `torch.autocast` q, k and v are cast to its dtype.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        groups: the groups and their lists; values out of range are undefined behaviour.
        q_blocks: the query tiles, a partition of the L tokens.
        kv_blocks: the kv tiles, a partition of the S tokens; a tile may be a single token.
        scale: factor of the logits, default D ** -0.5.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        out `[B, L, H, D]` in q's dtype, and the natural-log lse `[B, H, L]` in fp32 (fp64 for fp64 inputs). A query
        that attends to nothing has out 0 and lse -inf.

    Source: FG-Attn (arXiv 2509.16518), section 5.2.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("gathered_attn has no gradient: use block_sparse_attn with groups.tile_index, or no_grad")
    q, k, v = lowered(q, k, v)
    check_qkv(q, k, v)
    check_blocks("q_blocks", q_blocks, "q", q)
    check_blocks("kv_blocks", kv_blocks, "k", k)
    _check_groups(q, groups)
    refuse_forward_mode(q, k, v)
    resolved_backend = resolve_plain(backend, q.device, q.dtype, q.shape[-1])
    factor = check_scale(scale, q.shape[-1], resolved_backend)
    lists = (groups.members, groups.kv_indices, groups.kv_num_blocks, groups.kv_members, groups.order)
    sides = (x for b in (q_blocks, kv_blocks) for x in (b.offsets, b.max_size, b.min_size))
    return gathered_fwd(q, k, v, *lists, *sides, factor, resolved_backend)


def _check_groups(q: Tensor, groups: TileGroups) -> None:
    """Check shapes, dtypes and devices of groups for q `[B, L, H, D]`."""
    shape, members = groups.kv_indices.shape, groups.members.shape
    if len(members) != 4 or members[:2] != (q.shape[0], q.shape[2]) or 0 in members[1:]:
        raise ValueError(f"members must be [B, H, G, R] for q {list(q.shape)}, got {list(members)}")
    if len(shape) != 4 or shape[:3] != members[:3]:
        raise ValueError(f"kv_indices must be [B, H, G, Kmax] for members {list(members)}, got {list(shape)}")
    if groups.kv_num_blocks.shape != shape[:3]:
        raise ValueError(f"kv_num_blocks must be {list(shape[:3])}, got {list(groups.kv_num_blocks.shape)}")
    if groups.kv_members is not None and (groups.kv_members.shape != shape or members[3] > _MOST_TILEWISE):
        raise ValueError(
            f"kv_members must be {list(shape)} of groups of at most {_MOST_TILEWISE} tiles, "
            f"got {list(groups.kv_members.shape)} and {members[3]}"
        )
    count = groups.kv_num_blocks.numel()
    if groups.order is not None and groups.order.shape != (count,):
        raise ValueError(f"order must be {[count]}, one entry a group, got {list(groups.order.shape)}")
    for name in ("members", "kv_indices", "kv_num_blocks", "kv_members", "order"):
        x = getattr(groups, name)
        if x is not None and x.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {x.dtype}")
        check_device(name, x, "q", q)


def group_tiles(mask: Tensor, size: int, *, backend: str | None = None) -> Tensor:
    """Greedy grouping of query tiles whose mask rows are similar, for every head of every sample.

    The first tile without a group leads the next group. It takes the `size - 1` tiles without a group whose rows have
    the smallest Hamming distance (XOR) to its own; at equal distances the lower tile comes first. The last group may be
    smaller. Never waits for the device.

    Args:
        mask: bool `[B, H, Nq, Nkv]`, kv tiles that each query tile attends to.
        size: R, tiles per group, at least 1.
        backend: `reference`, `triton` or None (`triton` where it can run, else `reference`).

    Returns:
        int32 `[B, H, G, size]`, G = ceil(Nq / size): leader first, then by distance; -1 past the last tile.

    Source: FG-Attn (arXiv 2509.16518), section 5.2.
    """
    if mask.ndim != 4 or mask.dtype != torch.bool or 0 in mask.shape[1:]:
        raise ValueError(f"mask must be a bool [B, H, Nq, Nkv], got {mask.dtype} {list(mask.shape)}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    # a mask has no float dtype and no head dim that a backend could reject
    resolved_backend = resolve_plain(backend, mask.device, torch.float32)
    if resolved_backend == "triton" and (refusal := _ranks_too_many(mask)) is not None:
        if backend == "triton":
            raise ValueError(f"backend triton {refusal}")
        resolved_backend = "reference"
    return group_tiles_op(mask, size, resolved_backend)


def _ranks_too_many(mask: Tensor) -> str | None:
    # a rank packs the distance and the number of a tile into one int32
    num_q, num_kv = mask.shape[2:]
    if (num_kv + 1) << (num_q - 1).bit_length() >= 1 << 31:
        return f"ranks tiles with 31 bits, which are too few for {num_q} x {num_kv} tiles"
    return None
