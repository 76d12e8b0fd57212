"""Problems of the benchmark: token grids, block lists and inputs.

B batch, L tokens, H heads, D head dim, Nq / Nkv query / kv blocks, K = topk.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, select_topk
from vsa_kernels.testing import Case

from vsa.attention.layout import Segment, TileLayout

from .captured import Rankings, captured_lists, synthesised_lists

LISTS = ("random", "local")
"""Kinds of block lists: random; or local, near tiles first, so that neighbouring query blocks share most of them."""
INDEX_LISTS = ("sinks", "captured", "synthesised")
"""Further kinds, in the index alone and not by q and k: random beside attention sinks, `_SINKS` kv blocks of each head
that are in every list; those of a trained model; or drawn for any grid with the statistics of those."""
_SINKS = 4

AnyShape = TypeVar("AnyShape", bound="Shape")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a problem: the token grid of a video, tiles, and `topk` kv tiles listed by every query block.

    Args:
        name: name on the command line.
        grid_thw: tokens along time, height, width.
        heads: H.
        head_dim: D.
        topk: K.
        batch: B.
        tile_thw: tokens of a kv tile.
        group: kv tiles per query block.
    """

    name: str
    grid_thw: tuple[int, int, int]
    heads: int
    head_dim: int
    topk: int
    batch: int = 1
    tile_thw: tuple[int, int, int] = (4, 4, 4)
    group: int = 1

    @property
    def tokens(self) -> int:
        return math.prod(self.grid_thw)

    @property
    def block(self) -> int:
        return math.prod(self.tile_thw)

    @property
    def tiles(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.grid_thw, self.tile_thw, strict=True))

    @property
    def sparsity(self) -> float:
        return 1 - self.topk / self.tiles

    def layout(self, device: torch.device) -> TileLayout:
        with warnings.catch_warnings():
            # the ragged grids are meant to have short tiles
            warnings.simplefilter("ignore")
            return TileLayout.build([Segment(self.grid_thw)], tile_thw=self.tile_thw, device=device)

    def row(self) -> dict[str, Any]:
        """Columns of the shape in a row of a report."""
        plain = ("name", "batch", "heads", "tokens", "head_dim", "block", "topk", "sparsity")
        more = {"grid": "x".join(map(str, self.grid_thw)), "q_block": self.block * self.group}
        return {name: getattr(self, name) for name in plain} | more


CPU_SHAPES = (
    Shape(name="16k", grid_thw=(16, 32, 32), heads=2, head_dim=64, topk=32),
    Shape(name="quickstart", grid_thw=(4, 8, 8), tile_thw=(2, 2, 2), heads=4, head_dim=32, topk=8, batch=8),
)
GPU_SHAPES = (
    Shape(name="paper-16k-d64", grid_thw=(16, 32, 32), heads=12, head_dim=64, topk=32),
    Shape(name="paper-16k-d128", grid_thw=(16, 32, 32), heads=12, head_dim=128, topk=32),
    Shape(name="wan1.3b-480p", grid_thw=(16, 28, 52), heads=12, head_dim=128, topk=32),
    Shape(name="32k-d128", grid_thw=(32, 32, 32), heads=12, head_dim=128, topk=64),
    Shape(name="21x30x52", grid_thw=(21, 30, 52), heads=12, head_dim=128, topk=78),
    Shape(name="21x45x80", grid_thw=(21, 45, 80), heads=12, head_dim=128, topk=180),
    Shape(name="wide-16k-d128", grid_thw=(16, 32, 32), heads=12, head_dim=128, topk=32, group=2),
)
# measured if named, or with --all
EXTRA_SHAPES = (
    Shape(name="4k-d128", grid_thw=(16, 16, 16), heads=12, head_dim=128, topk=8),
    Shape(name="wan14b-720p", grid_thw=(16, 60, 80), heads=40, head_dim=128, topk=120),
    # 80% sparse, as in the published distillation
    Shape(name="wan1.3b-distill", grid_thw=(16, 28, 52), heads=12, head_dim=128, topk=73),
    # long rows; twice the tokens and half the tiles of what is listed in tiles of 128
    Shape(name="76k-d128", grid_thw=(16, 60, 80), heads=12, head_dim=128, topk=120),
    Shape(name="128k-d128", grid_thw=(32, 64, 64), heads=12, head_dim=128, topk=204),
    Shape(name="220k-d128", grid_thw=(32, 72, 96), heads=10, head_dim=128, topk=128),
    *(
        Shape(name=f"{name}-t128", grid_thw=grid, heads=heads, head_dim=head_dim, topk=topk, tile_thw=(4, 4, 8))
        for name, grid, heads, head_dim, topk in (
            ("4k-d128", (16, 16, 16), 12, 128, 4),
            ("16k-d64", (16, 32, 32), 12, 64, 16),
            ("16k-d128", (16, 32, 32), 12, 128, 16),
            ("32k-d128", (32, 32, 32), 12, 128, 32),
            ("76k-d128", (16, 60, 80), 12, 128, 60),
            ("128k-d128", (32, 64, 64), 12, 128, 102),
            ("220k-d128", (32, 72, 96), 10, 128, 64),
            ("21x30x52", (21, 30, 52), 12, 128, 39),
            ("21x45x80", (21, 45, 80), 12, 128, 90),
            ("wan14b-720p", (16, 60, 80), 40, 128, 60),
        )
    ),
    # tiles of 128 tokens, like the blocks of DFSAttn
    Shape(name="wan14b-21x45x80", grid_thw=(21, 45, 80), tile_thw=(4, 8, 4), heads=40, head_dim=128, topk=177),
    # a quick test of the script on any device
    Shape(name="smoke", grid_thw=(3, 5, 4), tile_thw=(2, 2, 2), heads=2, head_dim=16, topk=4),
)
# for the case selection: blocks of SpargeAttn, 256 to 2,048 key blocks
SELECTION_SHAPES = tuple(
    Shape(
        name=f"sparge-{16 * n}k", grid_thw=(16 * n, 32, 32), heads=24, head_dim=128, topk=128 * n, group=2,
    )
    for n in (1, 2, 4, 8)
)  # fmt: skip


def choose_shapes(names: list[str] | None, everything: bool, device: torch.device) -> list[Shape]:
    """The shapes to measure.

    Args:
        names: requested names; None: the defaults of the device.
        everything: whether to select all shapes of any size except `smoke`.
        device: compute device.
    """
    defaults = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    shapes_by_name = {shape.name: shape for shape in (*CPU_SHAPES, *GPU_SHAPES, *EXTRA_SHAPES, *SELECTION_SHAPES)}
    if everything:
        return [*defaults, *(s for s in EXTRA_SHAPES if s.name != "smoke" and device.type == "cuda")]
    return named(names, shapes_by_name, defaults)


def named(names: list[str] | None, shapes_by_name: Mapping[str, AnyShape], usual: Sequence[AnyShape]) -> list[AnyShape]:
    """The shapes that are asked for by name, or the usual ones."""
    unknown = [name for name in names or () if name not in shapes_by_name]
    if unknown:
        raise ValueError(f"--shapes must be of {', '.join(shapes_by_name)}, got {', '.join(unknown)}")
    return list(usual) if names is None else [shapes_by_name[name] for name in names]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A shape with its inputs.

    Args:
        shape: shape of the problem.
        lists: one of `LISTS` or `INDEX_LISTS`.
        layout: tiles of the tokens.
        case: inputs and, for the fine stage, the index.
        gate_coarse: `[B, L, H, D]` coarse gate.
        gate_fine: `[B, L, H, D]` fine gate.
    """

    shape: Shape
    lists: str
    layout: TileLayout
    case: Case
    gate_coarse: Tensor
    gate_fine: Tensor

    @property
    def device(self) -> torch.device:
        return self.case.q.device

    @property
    def dtype(self) -> torch.dtype:
        return self.case.q.dtype


def problem(
    shape: Shape, lists: str, dtype: torch.dtype, device: torch.device, rankings: Rankings | None = None
) -> Problem:
    """Random inputs; for local lists, q and k encode the position of their tile, and near tiles score high.

    Args:
        shape: shape of the problem.
        lists: one of `LISTS` or `INDEX_LISTS`.
        dtype: dtype of the tokens.
        device: compute device.
        rankings: source of captured and synthesised lists.
    """
    g = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    layout = shape.layout(device)
    size = (shape.batch, shape.tokens, shape.heads, shape.head_dim)
    q, k, v, dout, gate_coarse, gate_fine = (normal(*size).to(dtype) for _ in range(6))
    q_blocks, kv_blocks = _merged(layout.blocks, shape.group), layout.blocks
    centres = tile_centres(shape, layout)
    if lists == "local":
        place = _place_features(centres, shape.head_dim).repeat_interleave(kv_blocks.sizes, dim=0)[:, None]
        q, k = ((x + place).to(dtype) for x in (q, k))
        near = centres.unflatten(0, (-1, shape.group)).mean(1)
        noise = normal(shape.batch, shape.heads, q_blocks.num, kv_blocks.num)
        scores = noise / 2 - torch.cdist(near, centres)
    else:
        scores = normal(shape.batch, shape.heads, q_blocks.num, kv_blocks.num)
    if lists == "sinks":
        # [B, H, 1, _SINKS]
        sinks = normal(shape.batch, shape.heads, 1, kv_blocks.num).topk(min(_SINKS, shape.topk)).indices
        scores.scatter_(-1, sinks.expand(-1, -1, q_blocks.num, -1), math.inf)
    if rankings is not None:
        # the listed tiles score 1, all others 0
        make = captured_lists if lists == "captured" else synthesised_lists
        chosen = make(rankings, shape.grid_thw, shape.tile_thw, shape.heads, shape.topk).to(device)
        scores = torch.zeros_like(scores).scatter_(-1, chosen.expand(shape.batch, -1, -1, -1), 1)
    index = select_topk(scores, shape.topk)
    dlse = q.new_zeros((shape.batch, shape.heads, shape.tokens), dtype=torch.float32)
    blocks: dict[str, Any] = {"q_blocks": q_blocks, "kv_blocks": kv_blocks}
    case = Case(q=q, k=k, v=v, dout=dout, dlse=dlse, index=index, **blocks)
    return Problem(shape=shape, lists=lists, layout=layout, case=case, gate_coarse=gate_coarse, gate_fine=gate_fine)


def tile_centres(shape: Shape, layout: TileLayout) -> Tensor:
    """Mean position of the tokens of each tile, in units of tiles: fp32 `[N, 3]` along time, height, width."""
    _, h, w = shape.grid_thw
    place = torch.stack((layout.order // (h * w), layout.order // w % h, layout.order % w), -1).float()
    block = torch.arange(layout.num_blocks, device=place.device).repeat_interleave(layout.blocks.sizes)
    sums = place.new_zeros((layout.num_blocks, 3)).index_add_(0, block, place)
    return sums / layout.blocks.sizes[:, None] / place.new_tensor(shape.tile_thw)


def listed_pairs(index: BlockIndex, q_sizes: Tensor, kv_sizes: Tensor, batch: int, heads: int) -> int:
    """Token pairs of the listed blocks over batch and heads, for blocks of sizes `[Nq]`, `[Nkv]`."""
    in_list = torch.arange(index.kv_indices.shape[-1], device=q_sizes.device) < index.kv_num_blocks[..., None]
    # entries past the count are not part of the list
    sizes = kv_sizes.long()[torch.where(in_list, index.kv_indices, 0).long()] * in_list
    rows = index.kv_indices.shape[0] * index.kv_indices.shape[1]
    return int((sizes.sum(-1) * q_sizes).sum()) * (batch * heads // rows)


def pair_counts(case: Case, backend: str) -> tuple[int, int]:
    """Useful pairs (real tokens of the listed blocks), and the pairs that a backend multiplies in whole tiles."""
    batch, _, heads, _ = case.q.shape

    def padded(blocks: Blocks) -> Tensor:
        size = blocks.max_size
        if backend == "triton":
            # tiles have a power of two from 16 to 64 rows
            size = max(16, 1 << (size - 1).bit_length()) if size <= 64 else -(-size // 64) * 64
        return torch.full_like(blocks.sizes, size)

    real = listed_pairs(case.index, case.q_blocks.sizes, case.kv_blocks.sizes, batch, heads)
    return real, listed_pairs(case.index, padded(case.q_blocks), padded(case.kv_blocks), batch, heads)


def _merged(blocks: Blocks, group: int) -> Blocks:
    if group == 1:
        return blocks
    if blocks.num % group or blocks.min_size != blocks.max_size:
        raise ValueError(f"query blocks of {group} tiles need equal tiles in a multiple of {group}, got {blocks.num}")
    size = blocks.max_size * group
    return Blocks(offsets=blocks.offsets[::group].contiguous(), max_size=size, min_size=size)


def _place_features(centres: Tensor, head_dim: int) -> Tensor:
    # sines and cosines of the position, whose products decrease with distance
    pairs = head_dim // 2
    angle = centres[:, torch.arange(pairs) % 3] * torch.linspace(0.1, 1.0, pairs, device=centres.device)
    return torch.cat((angle.sin(), angle.cos(), angle.new_zeros(len(centres), head_dim - 2 * pairs)), -1)
