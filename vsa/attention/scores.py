"""What ranks the kv tiles of a query tile. Selection is a constant to the gradient: nothing here has one.

With mean queries qm and keys km of tiles, n_j tokens of kv tile j, s = 1/sqrt(D), a query tile i of tokens a:

    mean           s qm_i km_j; where the coarse stage has smaller tiles, the mean over their cells of it or its softmax
    subblock_lse   mean over sub-blocks u of i of  exp(lse over sub-blocks w of j - lse over all w), both lse of
                   s qm_u km_w + ln n_w
    mass           mean over tokens a of i of  softmax_j(s q_a km_j + ln n_j)

    oracle         mean over tokens a of i of  sum over tokens b of j of  softmax_b(s q_a k_b)
    random         numbers in [0, 1) that know nothing of q and k

subblock_lse and mass estimate the share of its attention that a query tile has in a kv tile, one from smaller tiles,
one from every query; oracle is that share, for the price of dense attention, and no other selection of as many tiles a
row holds more of it. random is the floor to that ceiling. For full tiles subblock_lse ranks as the router of VSA2
(arXiv 2609.32882) and of DFSAttn, which average or sum the softmax over the cells of a tile; the logarithms of sizes,
which ragged tiles need, are ours.

B batch, L tokens, Nq / Nkv query / kv tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from vsa_kernels import block_mean_pool
from vsa_kernels.block_index import Blocks, by_block

from vsa.attention import stats
from vsa.attention.layout import TileLayout
from vsa.attention.tiling import Grid

Score = Literal["mean", "subblock_lse", "mass"]
BoundScore = Literal["oracle", "random"]
"""What any other score lies between."""


def mean_scores(q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
    """`mean` without the factor s, `[B, H, Nq, Nkv]`, at least fp32, of tile-major q, k `[B, L, H, D]`."""
    q_mean = block_mean_pool(q.detach(), layout.blocks).transpose(1, 2)
    k_mean = block_mean_pool(k.detach(), layout.kv_blocks).transpose(1, 2)
    return q_mean @ per_head(k_mean, q.shape[2]).transpose(-1, -2)


def subblock_scores(q: Tensor, k: Tensor, layout: TileLayout, sub_thw: Grid) -> Tensor:
    """`subblock_lse` with sub-blocks of `sub_thw` tokens, `[B, H, Nq, Nkv]`, at least fp32."""
    subs = layout.tiles[sub_thw]
    q_mean, k_mean = (block_mean_pool(x.detach(), subs).transpose(1, 2) for x in (q, k))
    logits = (q_mean * q.shape[-1] ** -0.5) @ per_head(k_mean, q.shape[2]).transpose(-1, -2)
    shares = (logits + subs.sizes.to(logits.dtype).log()).softmax(-1)
    rows, columns = (layout.derive(tiles_inside, sub_thw, tile) for tile in (layout.tile_thw, layout.kv_tile_thw))
    return cell_means(shares, rows, columns) * columns.sizes


def mass_scores(tail: Tensor, layout: TileLayout) -> Tensor:
    """`mass` of the logits `[B, H, L, Nkv]` of `tile_logits`, `[B, H, Nq, Nkv]`."""
    return block_mean_pool(tail.detach().softmax(-1).transpose(1, 2), layout.blocks).transpose(1, 2)


def oracle_scores(q: Tensor, k: Tensor, layout: TileLayout) -> Tensor:
    """`oracle`, fp32 `[B, H, Nq, Nkv]`, exact; computes dense attention, the rows of some tiles at a time."""
    sizes, start, rows = layout.blocks.sizes.tolist(), 0, []
    for some in (sizes[i : i + 16] for i in range(0, len(sizes), 16)):
        tokens = torch.arange(start, start + sum(some), device=q.device)
        mass = stats.tile_mass(q.detach(), k.detach(), tokens, layout.kv_blocks)
        rows += [tile.mean(2) for tile in mass.split(some, dim=2)]
        start += sum(some)
    return torch.stack(rows, dim=2)


def random_scores(q: Tensor, layout: TileLayout, seed: int) -> Tensor:
    """`random`, fp32 `[B, H, Nq, Nkv]`, the same on every device; samples and heads differ."""
    shape = (q.shape[0], q.shape[2], layout.num_blocks, layout.kv_blocks.num)
    # splitmix64 of the entry's number (Steele et al., 2014); int64 wraps around, and its shifts keep the sign
    x = (torch.arange(math.prod(shape), device=q.device) + (seed << 40)) * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return ((x ^ (x >> 31 & (1 << 33) - 1)) >> 40 & (1 << 24) - 1).float().view(shape) / (1 << 24)


def map_scores(logits: Tensor, layout: TileLayout, q_pool: Grid, kv_pool: Grid, pooled_map: str) -> Tensor:
    """Scores of the fine stage's tiles from logits `[B, H, N, N']` between tiles of other sizes: means over cells.

    Args:
        q_pool: size of the tiles of a row of logits; divides the query tile.
        kv_pool: of a column; divides the kv tile.
        pooled_map: probabilities or logits.

    Source: VSA, Table 1(d), experiment 16: average pooling of the predicted attention map on both axes.
    """
    if (q_pool, kv_pool) == (layout.tile_thw, layout.kv_tile_thw):
        return logits
    rows = layout.derive(tiles_inside, q_pool, layout.tile_thw)
    columns = layout.derive(tiles_inside, kv_pool, layout.kv_tile_thw)
    values = logits.detach()
    return cell_means(values.softmax(-1) if pooled_map == "probabilities" else values, rows, columns)


def tile_logits(q: Tensor, k: Tensor, kv_blocks: Blocks, order: int = 1) -> Tensor:
    """Logits `[B, H, L, Nkv]` of every kv tile as one key, at least fp32.

    s q km_j + ln n_j                order 1
    + s^2/2 (q^2) var_j              order 2, var the variance of the tile's keys by channel
    """
    scale, heads = q.shape[-1] ** -0.5, q.shape[2]
    k_mean = block_mean_pool(k, kv_blocks)
    queries = q.to(k_mean.dtype).transpose(1, 2) * scale
    logits = queries @ per_head(k_mean.transpose(1, 2), heads).transpose(-1, -2)
    if order == 2:
        spread = block_mean_pool(k.to(k_mean.dtype).square(), kv_blocks) - k_mean.square()
        spread = per_head(spread.clamp(min=0).transpose(1, 2), heads)
        logits = logits + (queries.square() / 2) @ spread.transpose(-1, -2)
    return logits + kv_blocks.sizes.to(logits.dtype).log()


def cell_means(values: Tensor, rows: Blocks, columns: Blocks) -> Tensor:
    """Means `[B, H, N, M]` of the cells that blocks of rows and of columns cut out of values `[B, H, R, C]`."""
    for groups in (rows, columns):
        # [B, N, H, C]; a fixed order of summation on every device
        means = by_block(values.transpose(1, 2), groups).sum(2) / groups.sizes[:, None, None]
        # the columns are the rows of the second time
        values = means.permute(0, 2, 3, 1)
    return values


def tiles_inside(layout: TileLayout, small: Grid, large: Grid) -> Blocks:
    """The tiles of one size as blocks of the smaller tiles they hold; for `TileLayout.derive`."""
    offsets = torch.searchsorted(layout.tiles[small].offsets.cpu(), layout.tiles[large].offsets.cpu())
    return Blocks.from_sizes(offsets.diff().tolist(), layout.device)


def per_head(x: Tensor, heads: int) -> Tensor:
    """Kv heads `[B, Hkv, N, D]` once for each query head of their group, `[B, H, N, D]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
