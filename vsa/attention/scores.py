"""Scores that rank the kv tiles of a query tile. Selection is a constant to the gradient: no score has a gradient.

With mean queries qm and keys km of tiles, n_j tokens of kv tile j, s = 1/sqrt(D), a query tile i of tokens a:

    mean               s qm_i km_j; with smaller tiles in the coarse stage, the mean over their cells of this or of its
                       softmax
    subblock_softmax   mean over sub-blocks u of i of  sum over sub-blocks w of j of  softmax_w(s qm_u km_w + ln n_w)
    subblock_lse       logsumexp over u of i and w of j of  s qm_u km_w + ln n_w
    mass               mean over tokens a of i of  p_aj = softmax_j(s q_a km_j + ln n_j)
    error              mean over tokens a of i of  p_aj^2 (s^2 q_a^2 var_j) w_j, with the variances var_j of the keys
                       of j by channel, and the sum w_j of those of its values

    oracle             mean over tokens a of i of  sum over tokens b of j of  softmax_b(s q_a k_b)
    random             numbers in [0, 1) that do not depend on q and k

subblock_softmax and mass estimate the share of a query tile's attention mass that falls on a kv tile, one from smaller
tiles, the other from every query. subblock_lse needs one pass where a softmax needs two, and follows the sub-blocks of
large logits. oracle is the share, at the cost of dense attention: no selection of as many tiles per row holds more
mass. That bounds the recall of other scores, not their error: beside a pooled tail a tile of large mass and equal keys
need not be exact. error estimates what is lost where the means of j stand for its tokens, as the product of the
spreads of its logits and of its values; tiles cost the same, so it is not divided by a cost. random shows what any
selection reaches.

Source: mean is VSA's (arXiv 2505.13389). For full tiles subblock_softmax ranks like the routers of VSA2 (arXiv
2609.32882) and DFSAttn, which average or sum the softmax over the cells of a tile; in ragged tiles a sub-block counts
by its number of tokens, and DFSAttn's own treatment is an option of `subblock_scores`. subblock_lse is the sub-block
router of SGLang (sgl-project/sglang#34148), with ln n for ragged tiles. The score mass is ours. error is
after SVG-EAR (arXiv 2603.08982), which ranks clusters by the estimated error of their centroids per computed area;
without the covariance of keys and values, which a kernel has no room for.

B batch, L tokens, Nq / Nkv query / kv tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import vsa_kernels as kernels
from torch import Tensor
from vsa_kernels import block_mean_pool
from vsa_kernels.block_index import Blocks, by_block
from vsa_kernels.selection import Form

from vsa.attention import stats
from vsa.attention.layout import TileLayout, video_places
from vsa.attention.tiling import Grid

Score = Literal["mean", "subblock_softmax", "subblock_lse", "mass", "error", "oracle", "random"]
Ragged = Literal["weighted", "masked", "zeros"]
"""Treatment of short and missing sub-blocks, see `subblock_scores`."""


def mean_scores(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> Tensor:
    """Scores `mean` `[B, H, Nq, Nkv]` without the factor s, at least fp32, of tile-major q, k `[B, L, H, D]`."""
    q_mean = block_mean_pool(q.detach(), q_blocks).transpose(1, 2)
    k_mean = block_mean_pool(k.detach(), kv_blocks).transpose(1, 2)
    return q_mean @ per_head(k_mean, q.shape[2]).transpose(-1, -2)


def with_damage_first(scores: Tensor | None, k: Tensor, v: Tensor, layout: TileLayout) -> Tensor:
    """Scores `[B, H, Nq, Nkv]` with inf, the best, for kv tiles whose k or v `[B, L, Hkv, D]` are not finite.

    A selection that passes over these tiles would hide a NaN from every check of losses and gradients.
    """
    assert scores is not None
    k_mean, v_mean = (block_mean_pool(x.detach(), layout.kv_blocks).sum(-1, keepdim=True) for x in (k, v))
    damage = per_head((k_mean + v_mean).transpose(1, 2), scores.shape[1])
    return scores.masked_fill(~damage.isfinite().mT, math.inf)


def subblock_scores(
    q: Tensor, k: Tensor, layout: TileLayout, sub_thw: Grid, ragged: Ragged = "weighted", *, form: Form = "softmax"
) -> Tensor:
    """Scores `subblock_softmax` or `subblock_lse` of the video tiles; text columns are 0 or -inf.

    Args:
        q, k: tile-major `[B, L, H, D]`, `[B, L, Hkv, D]`.
        layout: layout whose tiles include this size.
        sub_thw: tokens per sub-block along time, height, width.
        ragged: weighted (as above, a sub-block counts by its number of tokens), masked (every existing sub-block counts
            once) or zeros (tiles are padded with zero tokens, which shrink the means and take part; DFSAttn's code).
            The three agree where tiles are full.
        form: softmax or lse.

    Returns:
        `[B, H, Nv, Nkv]`, at least fp32; rows are the video query tiles.
    """
    parts, subs = layout.derive(sub_blocks, sub_thw), layout.tiles[sub_thw]
    sides = ((q, layout.query_tiles[sub_thw], parts.queries), (k, subs, parts.keys))
    q_mean, k_mean = (block_mean_pool(x.detach(), own) for x, own, _ in sides)
    q_groups, kv_groups = parts.queries, parts.keys
    if ragged == "zeros":
        # a short tile has as many sub-blocks as any other
        q_mean, k_mean = (
            by_block(x * (own.sizes / math.prod(sub_thw)).to(x.dtype)[:, None, None], groups).flatten(1, 2)
            for x, (_, own, groups) in zip((q_mean, k_mean), sides, strict=True)
        )
        q_groups, kv_groups = layout.derive(padded_sub_blocks, sub_thw)
    scores = kernels.subblock_scores(
        *(q_mean, k_mean),
        q_groups=q_groups,
        kv_groups=kv_groups,
        form=form,
        weights=subs.sizes.to(q_mean.dtype) if ragged == "weighted" else None,
        candidates=parts.candidates,
        half=q.dtype.itemsize == 2,
    )
    return scores if parts.video is None else scores[:, :, parts.video]


class SubBlocks(NamedTuple):
    """The sub-blocks of the tiles of a row.

    Args:
        queries: sub-blocks of each query tile.
        keys: sub-blocks of each kv tile.
        video: int64 `[Nv]`, the video query tiles; None: all.
        candidates: bool `[N, Nkv]`, the video kv tiles of the query tile's sample; None: all.
    """

    queries: Blocks
    keys: Blocks
    video: Tensor | None
    candidates: Tensor | None


def sub_blocks(layout: TileLayout, sub_thw: Grid) -> SubBlocks:
    """The sub-blocks of the tiles of a layout, for `TileLayout.derive`."""
    assert layout.tile_thw is not None
    assert layout.kv_tile_thw is not None
    queries = _inside(layout.query_tiles, sub_thw, layout.tile_thw, layout.device)
    keys = tiles_inside(layout, sub_thw, layout.kv_tile_thw)
    if layout.candidates is None:
        return SubBlocks(queries, keys, None, None)
    rows = video_places(layout)
    # rows of text tiles are computed and left out
    candidates = torch.ones(queries.num, keys.num, dtype=torch.bool, device=layout.device)
    candidates[rows] = layout.candidates
    return SubBlocks(queries, keys, rows, candidates)


def padded_sub_blocks(layout: TileLayout, sub_thw: Grid) -> tuple[Blocks, Blocks]:
    """Groups of as many sub-blocks for every query tile and kv tile of a layout, for `TileLayout.derive`."""
    parts = sub_blocks(layout, sub_thw)
    both = (Blocks.from_sizes([groups.max_size] * groups.num, layout.device) for groups in (parts.queries, parts.keys))
    return next(both), next(both)


def mass_scores(tail: Tensor, layout: TileLayout) -> Tensor:
    """Scores `mass` `[B, H, Nq, Nkv]` from the logits `[B, H, L, Nkv]` of `tile_logits`."""
    return block_mean_pool(tail.detach().softmax(-1).transpose(1, 2), layout.video_blocks).transpose(1, 2)


def error_scores(tail: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> Tensor:
    """Scores `error` `[B, H, Nq, Nkv]` from the logits `[B, H, L, Nkv]` of `tile_logits`, at least fp32."""
    blocks = layout.kv_blocks
    spread_k, spread_v = (
        per_head(variances(x, block_mean_pool(x, blocks), blocks).transpose(1, 2), q.shape[2])
        for x in (k.detach(), v.detach())
    )
    queries = q.detach().to(spread_k.dtype).transpose(1, 2).square() / q.shape[-1]
    lost = tail.detach().softmax(-1).square() * (queries @ spread_k.transpose(-1, -2))
    return block_mean_pool(lost.transpose(1, 2), layout.video_blocks).transpose(1, 2) * spread_v.sum(-1)[:, :, None]


def oracle_scores(q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
    """Scores `oracle`, fp32 `[B, H, Nq, Nkv]`, exact; computes dense attention for the rows of some tiles at a time."""
    sizes, start, rows = layout.video_blocks.sizes.tolist(), 0, []
    for some in (sizes[i : i + 16] for i in range(0, len(sizes), 16)):
        tokens = torch.arange(start, start + sum(some), device=q.device)
        mass = stats.tile_mass(q.detach(), k.detach(), tokens, layout.kv_blocks)
        rows += [tile.mean(2) for tile in mass.split(some, dim=2)]
        start += sum(some)
    return torch.stack(rows, dim=2)


def random_scores(q: Tensor, layout: TileLayout, seed: int) -> Tensor:
    """Scores `random`, fp32 `[B, H, Nq, Nkv]`, the same on every device, different for every sample and head."""
    shape = (q.shape[0], q.shape[2], layout.num_blocks, layout.kv_blocks.num)
    # splitmix64 of the entry's number (Steele et al., 2014); int64 wraps around, and its shifts keep the sign
    # xor instead of a sum: a compiler folds sums and products of a range without the wrap
    x = (torch.arange(math.prod(shape), device=q.device) ^ (seed << 40)) * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return ((x ^ (x >> 31 & (1 << 33) - 1)) >> 40 & (1 << 24) - 1).float().view(shape) / (1 << 24)


def map_scores(logits: Tensor, layout: TileLayout, q_pool: Grid, kv_pool: Grid, pooled_map: str) -> Tensor:
    """Scores of the fine stage's tiles from logits `[B, H, N, N']` between tiles of other sizes: means over cells.

    Args:
        q_pool: size of the query tiles of the logits; divides the query tile of the fine stage.
        kv_pool: size of the kv tiles of the logits; divides the kv tile of the fine stage.
        pooled_map: whether probabilities or logits are averaged.

    Source: VSA, Table 1(d), experiment 16: average pooling of the predicted attention map on both axes.
    """
    if (q_pool, kv_pool) == (layout.tile_thw, layout.kv_tile_thw):
        return logits
    rows = layout.derive(tiles_inside, q_pool, layout.tile_thw)
    columns = layout.derive(tiles_inside, kv_pool, layout.kv_tile_thw)
    values = logits.detach()
    return cell_means(values.softmax(-1) if pooled_map == "probabilities" else values, rows, columns)


def tile_logits(q: Tensor, k: Tensor, kv_blocks: Blocks, order: int = 1) -> Tensor:
    """Logits `[B, H, L, Nkv]` of every query for every kv tile as one key, at least fp32.

    s q km_j + ln n_j                order 1
    + s^2/2 (q^2) var_j              order 2, var the variance of the tile's keys by channel
    """
    scale, heads = q.shape[-1] ** -0.5, q.shape[2]
    k_mean = block_mean_pool(k, kv_blocks)
    queries = q.to(k_mean.dtype).transpose(1, 2) * scale
    logits = queries @ per_head(k_mean.transpose(1, 2), heads).transpose(-1, -2)
    if order == 2:
        spread = per_head(variances(k, k_mean, kv_blocks).transpose(1, 2), heads)
        logits = logits + (queries.square() / 2) @ spread.transpose(-1, -2)
    return logits + kv_blocks.sizes.to(logits.dtype).log()


def variances(x: Tensor, means: Tensor, blocks: Blocks) -> Tensor:
    """Variances `[B, N, H, D]` of x `[B, L, H, D]` by block, head and channel, at least fp32, from its means."""
    return (block_mean_pool(x.to(means.dtype).square(), blocks) - means.square()).clamp(min=0)


def cell_means(values: Tensor, rows: Blocks, columns: Blocks) -> Tensor:
    """Means `[B, H, N, M]` over the cells of values `[B, H, R, C]` that blocks of rows and of columns define."""
    for groups in (rows, columns):
        # [B, N, H, C]; a fixed order of summation on every device
        means = by_block(values.transpose(1, 2), groups).sum(2) / groups.sizes[:, None, None]
        # the second pass has the columns as rows
        values = means.permute(0, 2, 3, 1)
    return values


def tiles_inside(layout: TileLayout, small: Grid, large: Grid) -> Blocks:
    """The tiles of one size as blocks of the smaller tiles that they contain; for `TileLayout.derive`."""
    return _inside(layout.tiles, small, large, layout.device)


def _inside(tiles: Mapping[Grid, Blocks], small: Grid, large: Grid, device: torch.device) -> Blocks:
    offsets = torch.searchsorted(tiles[small].offsets.cpu(), tiles[large].offsets.cpu())
    return Blocks.from_sizes(offsets.diff().tolist(), device)


def per_head(x: Tensor, heads: int) -> Tensor:
    """Kv heads `[B, Hkv, N, D]` repeated for each query head of their group, `[B, H, N, D]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
