"""Statistics of one forward of a sparse layer: recall, density and overlap of the selection, share of the coarse stage.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv tiles. Tensors are tile-major with RoPE
and qk-norm applied, as a method passes them to a recorder. Every tile may select every tile. Masses, lists and overlaps
count whole tiles; `density`, `visible_keys` and `visible_recall` apply fine masks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks
from vsa_kernels.checks import check_scale

CHUNK_LOGITS = 1 << 25
"""Number of logits that `dense_weights` holds at a time: 128 MiB in fp32."""


class Recall(NamedTuple):
    """Recall of a selection and of a random selection.

    Args:
        selected: fp32 `[B, H]`, recall of the selection.
        random: fp32 `[B, H]`, expected recall of as many random tiles: (tiles selected) / Nkv, whatever the mass.
    """

    selected: Tensor
    random: Tensor


def sample_tokens(num_tokens: int, count: int | None, *, seed: int = 0) -> Tensor:
    """Random token indices int64 `[n]`, ascending, without replacement; all with `count` None or too large."""
    if count is None or count >= num_tokens:
        return torch.arange(num_tokens)
    if count < 1:
        raise ValueError(f"count of sampled tokens must be at least 1, got {count}")
    return torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def tile_mass(q: Tensor, k: Tensor, tokens: Tensor, kv_blocks: Blocks, scale: float | None = None) -> Tensor:
    """Mass of each kv tile in the dense attention of some query tokens, exact in fp32.

    mass[n] = sum of softmax(q k^T * scale) over the tokens of tile n

    Args:
        q: `[B, L, H, D]`.
        k: `[B, S, Hkv, D]`, H a multiple of Hkv.
        tokens: int64 `[n]`, indices of the query tokens.
        kv_blocks: the kv tiles.
        scale: factor of the logits, default D ** -0.5.

    Returns:
        fp32 `[B, H, n, Nkv]`, rows sum to 1.
    """
    return torch.cat([_sum_tiles(weights, kv_blocks) for _, weights in dense_weights(q, k, tokens, scale)], dim=2)


def dense_weights(q: Tensor, k: Tensor, tokens: Tensor, scale: float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of the query tokens with their dense attention weights `[B, H, n, S]`, exact in fp32; see `tile_mass`."""
    batch, _, heads, dim = q.shape
    factor = check_scale(scale, dim)
    # [B, Hkv, D, S]
    keys = k.float().permute(0, 2, 3, 1).contiguous()
    groups = (heads // k.shape[2], -1)
    rows = max(1, CHUNK_LOGITS // max(1, batch * heads * k.shape[1]))
    for some in tokens.to(q.device).split(rows):
        # [B, Hkv, heads of a group * n, D]
        queries = (q[:, some].float() * factor).unflatten(2, groups[::-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)
        yield some, (queries @ keys).softmax(-1).unflatten(2, groups).flatten(1, 2)


def _sum_tiles(x: Tensor, blocks: Blocks) -> Tensor:
    # a fixed order of summation on every device
    if blocks.min_size == blocks.max_size:
        return x.unflatten(-1, (blocks.num, blocks.max_size)).sum(-1)
    return torch.segment_reduce(x.movedim(-1, 0).contiguous(), "sum", lengths=blocks.sizes.long()).movedim(0, -1)


def selection_recall(mass: Tensor, selected: Tensor, tokens: Tensor, q_blocks: Blocks) -> Recall:
    """Recall: share of the true attention mass on the selected tiles, averaged over the query tokens.

    With tokens from `sample_tokens` it is an unbiased estimate of the mean over all tokens.

    Args:
        mass: `[B, H, n, Nkv]` from `tile_mass`.
        selected: bool `[B|1, H|1, Nq, Nkv]`, `BlockIndex.to_dense` of the selection.
        tokens: int64 `[n]`, as given to `tile_mass`.
        q_blocks: the query tiles.

    Source: VSA, section 4 (accuracy of the predicted critical tokens: random tiles 8%, trained 60-90%).
    """
    tile = torch.bucketize(tokens.to(q_blocks.offsets.device), q_blocks.offsets[1:].long(), right=True)
    rows = selected[:, :, tile]
    return Recall((mass * rows).sum(-1).mean(-1), rows.float().mean((-2, -1)).expand(mass.shape[:2]))


def density(index: BlockIndex, q_blocks: Blocks, kv_blocks: Blocks) -> Tensor:
    """Density: share of the query-key pairs that attend, with fine masks applied, fp64 `[B|1, H|1]`.

    Args:
        index: kv tiles of each query tile.
        q_blocks: the query tiles.
        kv_blocks: the kv tiles.
    """
    valid, masked = _entries(index)
    # entries past the count may hold anything
    tile = torch.where(valid, index.kv_indices, 0).long()
    q_sizes, kv_sizes = q_blocks.sizes.double(), kv_blocks.sizes.double()
    pairs = q_sizes[:, None] * kv_sizes[tile]
    if index.mask_bits is not None and index.mask_ids is not None:
        # mask bits past the end of a short tile are arbitrary, so sums stop at its last token
        sums = index.mask_bits.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)
        last = (q_blocks.sizes - 1)[:, None].long(), (kv_blocks.sizes - 1)[tile].long()
        ids = torch.where(masked, index.mask_ids, 0).long()
        pairs = torch.where(masked, sums[ids, last[0], last[1]].double(), pairs)
    return (pairs * valid).sum((-2, -1)) / (q_sizes.sum() * kv_sizes.sum())


def listed_pairs(index: BlockIndex, q_blocks: Blocks, kv_blocks: Blocks) -> Tensor:
    """Query-key pairs of lists without fine masks, int64 scalar, exact; arguments as in `density`."""
    if all(blocks.min_size == blocks.max_size for blocks in (q_blocks, kv_blocks)):
        return index.kv_num_blocks.sum(dtype=torch.int64) * (q_blocks.max_size * kv_blocks.max_size)
    kept = torch.where(index.to_dense(kv_blocks.num), kv_blocks.sizes, 0).sum(-1)
    return (kept * q_blocks.sizes).sum()


def visible_recall(
    q: Tensor, k: Tensor, index: BlockIndex, tokens: Tensor, q_blocks: Blocks, kv_blocks: Blocks
) -> Recall:
    """Recall of an index with fine masks: the attention mass on the keys that a query attends to.

    Args:
        q: `[B, L, H, D]`.
        k: `[B, S, Hkv, D]`.
        index: kv tiles of each query tile.
        tokens: int64 `[n]` query tokens to look at.
        q_blocks: the query tiles.
        kv_blocks: the kv tiles.
    """
    selected, visible = [], []
    for some, weights in dense_weights(q, k, tokens):
        # [B|1, H|1, n, S]
        mask = visible_keys(index, some, q_blocks, kv_blocks)
        selected.append((weights * mask).sum(-1))
        visible.append(mask.float().mean(-1))
    random = torch.cat(visible, dim=2).mean(-1).expand(q.shape[0], q.shape[2])
    return Recall(torch.cat(selected, dim=2).mean(-1), random)


def visible_keys(index: BlockIndex, tokens: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> Tensor:
    """Keys that the given query tokens attend to, bool `[B|1, H|1, n, S]`.

    Args:
        index: kv tiles of each query tile.
        tokens: int64 `[n]` query tokens.
        q_blocks: the query tiles.
        kv_blocks: the kv tiles.
    """
    row = torch.bucketize(tokens, q_blocks.offsets[1:].long(), right=True)
    valid, masked = (x[:, :, row] for x in _entries(index))
    tile = torch.where(valid, index.kv_indices[:, :, row], 0).long()
    within = torch.arange(kv_blocks.max_size, device=tokens.device)
    # [B|1, H|1, n, K, block_kv]; slots past the end of a short tile hold no key
    bits = valid[..., None] & (within < kv_blocks.sizes[tile][..., None])
    if index.mask_bits is not None and index.mask_ids is not None:
        ids = torch.where(masked, index.mask_ids[:, :, row], 0).long()
        bits = bits & (index.mask_bits[ids, (tokens - q_blocks.offsets[row])[:, None]] | ~masked[..., None])
    # slots without a key go to a spare column
    num_keys = int(kv_blocks.offsets[-1])
    key = torch.where(bits, kv_blocks.offsets[tile][..., None] + within, num_keys).long().flatten(3)
    visible = torch.zeros(*key.shape[:3], num_keys + 1, dtype=torch.bool, device=tokens.device)
    return visible.scatter_(-1, key, True)[..., :-1]


def _entries(index: BlockIndex) -> tuple[Tensor, Tensor]:
    """Valid entries of the lists, and those of them that have a fine mask; bool `[B|1, H|1, Nq, Kmax]`."""
    slot = torch.arange(index.kv_indices.shape[-1], device=index.kv_indices.device)
    valid = slot < index.kv_num_blocks[..., None]
    if index.kv_num_full_blocks is None:
        return valid, torch.zeros_like(valid)
    return valid, valid & (slot >= index.kv_num_full_blocks[..., None])


def selection_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Dice overlap of two selections, `2 |a and b| / (|a| + |b|)`, fp32 scalar.

    With K tiles in both it is (tiles in common) / K; two random selections have K / Nkv.

    Args:
        a: bool `[B|1, H|1, Nq, Nkv]`, one selection.
        b: bool `[B|1, H|1, Nq, Nkv]`, the other selection.
    """
    a, b = torch.broadcast_tensors(a, b)
    return 2 * (a & b).sum() / (a.sum() + b.sum())


def head_overlap(selected: Tensor) -> Tensor:
    """Mean of `selection_overlap` over all pairs of heads, fp32 scalar; NaN with one head.

    Args:
        selected: bool `[B, H, Nq, Nkv]` with the same number of tiles in every head.
    """
    # a tile selected by c heads is common to c (c - 1) / 2 pairs
    counts = selected.sum(1)
    return (counts * (counts - 1)).sum() / ((selected.shape[1] - 1) * counts.sum())


def coarse_entropy(scores: Tensor) -> Tensor:
    """Normalised entropy: mean entropy of the coarse attention divided by its maximum log(Nkv), fp32 scalar.

    Args:
        scores: `[B, H, Nq, Nkv]` coarse logits.
    """
    if scores.shape[-1] == 1:
        return scores.new_ones((), dtype=torch.float32)
    log_p = scores.float().log_softmax(-1)
    return -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1).mean() / math.log(scores.shape[-1])


def rms(x: Tensor) -> Tensor:
    """Root mean square of all elements, fp32 scalar."""
    return x.float().square().mean().sqrt()


def coarse_share(coarse: Tensor, fine: Tensor) -> Tensor:
    """Share of the coarse stage in the output, `rms(coarse) / (rms(coarse) + rms(fine))`, fp32 scalar; 0 if both are 0.

    Args:
        coarse: `[B, L, H, D]` gated coarse output per token.
        fine: `[B, L, H, D]` gated fine output.
    """
    a, b = rms(coarse), rms(fine)
    return a / (a + b).clamp_min(torch.finfo(torch.float32).tiny)


class Neighbours(NamedTuple):
    """Overlap of the lists of neighbouring query tiles, and that of random lists.

    Args:
        overlap: fp32 `[B, H]`, see `neighbour_overlap`.
        random: fp32 `[B, H]`, expected overlap of random lists of the same lengths.
    """

    overlap: Tensor
    random: Tensor


def neighbour_overlap(selected: Tensor, groups: Tensor) -> Neighbours:
    """Loads that a kernel would save by loading each tile of a group's lists once, relative to equal lists.

    overlap = sum over groups (sum |list| - |union|) / sum over groups (sum |list| - max |list|)

    For pairs of lists of equal length it is the share of common tiles; the number of loads falls by half of it.

    Args:
        selected: bool `[B, H, Nq, Nkv]`, tiles that each query tile selects.
        groups: int `[G + 1]` ascending offsets of runs of query tiles that are computed together
            (`TileLayout.super_offsets`); runs of one tile are ignored. The result is NaN without longer runs.
    """
    lengths, num_kv = selected.sum(-1).float(), selected.shape[-1]
    saved, random, whole = (torch.zeros_like(lengths[..., 0]) for _ in range(3))
    for start, stop in itertools.pairwise(groups.tolist()):
        if stop - start < 2:
            continue
        some = lengths[..., start:stop]
        total = some.sum(-1)
        saved += total - selected[:, :, start:stop].any(2).sum(-1)
        random += total - num_kv * (1 - (1 - some / num_kv).prod(-1))
        whole += total - some.amax(-1)
    return Neighbours(saved / whole, random / whole)


class Popularity(NamedTuple):
    """Distribution of the number of lists that contain a kv tile: fp32 `[B, H]` each.

    Args:
        mean: mean over the tiles.
        median: median over the tiles.
        p90: 90th percentile.
        p99: 99th percentile.
        largest: number for the most popular tile.
        unlisted: share of tiles in no list.
        long: share of tiles in more than 1.5 times the mean number of lists, which a kernel would start first.
    """

    mean: Tensor
    median: Tensor
    p90: Tensor
    p99: Tensor
    largest: Tensor
    unlisted: Tensor
    long: Tensor


def popularity(selected: Tensor) -> Popularity:
    """Popularity of the kv tiles, which determines the imbalance of a backward that works per kv tile.

    Args:
    """
    lists = selected.sum(2).float()
    mean = lists.mean(-1)
    median, p90, p99 = torch.quantile(lists, lists.new_tensor([0.5, 0.9, 0.99]), dim=-1)
    long = (lists > 1.5 * mean[..., None]).float().mean(-1)
    return Popularity(mean, median, p90, p99, lists.amax(-1), (lists == 0).float().mean(-1), long)
