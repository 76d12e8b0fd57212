"""Radial attention: a fixed index of blocks that thins out with the distance in time. L tokens, N blocks, H heads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, block_sparse_attn

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.layout import TileLayout
from vsa.settings import AtLeastOne, Bound, validated


@validated
class RadialAttention(AttentionMethod):
    """Attention inside bands around the query's place in other frames, for rows of one video; no `topk`.

    A frame has S tokens in raster order. A query sees all of its own frame, of its neighbours and of the first frame.
    Of a frame at distance d > 1 it sees the places at most max(decay w, tokens) tokens from its own, where w is the
    power of two above S, halved bit_length(d) times; where w < tokens, only frames whose d is a multiple of tokens / w
    are kept. A block is computed if more than 60% of its columns with any such pair have more than a third of their
    rows; a query block's own block is always computed.

    Args:
        tokens: consecutive raster tokens of a block.
        decay: factor of the width of the bands.
        backend: backend of `block_sparse_attn`; None chooses by device.
        **layer: see `AttentionMethod`.

    Source: Radial Attention (arXiv 2506.19852) and its code for HunyuanVideo; that for Wan sees half of a neighbour
    frame. The code judges the part of a block that lies in one pair of frames, here a block is judged as a whole.
    """

    takes_text = False

    def __init__(
        self,
        *,
        tokens: AtLeastOne = 128,
        decay: Annotated[float, Bound(">", 0)] = 1.0,
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        self.tokens, self.decay, self.backend = tokens, decay, backend

    def tiling(self) -> dict[str, Any]:
        return {"tile_thw": (1, 1, self.tokens), "partition": "raster_run"}

    def prepare(self, layout: TileLayout) -> None:
        self._blocks(layout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        blocks, index = ctx.layout.blocks, BlockIndex.from_dense(self._blocks(ctx.layout)[None, None])
        out, _ = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        ctx.record(self.layer_idx, index, q=q, k=k, fine=out)
        return {"out": out}

    def pairs(self, layout: TileLayout, topk: float) -> float:
        sizes = layout.blocks.sizes.double()
        return float(sizes @ self._blocks(layout).double() @ sizes)

    def _blocks(self, layout: TileLayout) -> Tensor:
        return layout.derive(radial_blocks, self.tokens, self.decay)


def radial_blocks(layout: TileLayout, tokens: int, decay: float) -> Tensor:
    """The blocks that are computed, bool `[N, N]`; for `TileLayout.derive`."""
    frames, height, width = layout.only_video("radial attention").grid_thw
    size = height * width
    # the width of a band by distance, -1 for none
    band = torch.tensor([_band(d, size, tokens, decay) for d in range(frames)])
    column = torch.arange(frames * size)
    frame, place = column // size, column % size
    kept = []
    for start in range(0, len(column), tokens):
        stop, rows = min(start + tokens, len(column)), torch.zeros_like(column)
        for own in range(start // size, (stop - 1) // size + 1):
            reach = band[(frame - own).abs()].masked_fill(frame == 0, size)
            first, last = max(start - own * size, 0), min(stop - own * size, size)
            rows += ((place + reach + 1).clamp(max=last) - (place - reach).clamp(min=first)).clamp(min=0)
        some, many = (
            torch.zeros(layout.num_blocks, dtype=torch.int64).index_add(0, column // tokens, chosen.long())
            for chosen in (rows > 0, 3 * rows > stop - start)
        )
        kept.append(5 * many > 3 * some)
    return (torch.stack(kept) | torch.eye(len(kept), dtype=torch.bool)).to(layout.device)


def _band(distance: int, size: int, tokens: int, decay: float) -> int:
    if distance <= 1:
        return size
    width = 2.0 ** (size.bit_length() - distance.bit_length())
    if width < tokens and distance % int(tokens / width):
        return -1
    return int(max(width * decay, tokens))
