"""Sparse attention to selected tiles beside linear attention to many: SLA.

With phi = softmax over the D channels, s = 1/sqrt(D), and the tiles K_i that query tile i selects:

    sparse_i = softmax over the tokens of K_i (s q_i k) of v
    linear_i = phi(q_i) H_i / (phi(q_i) Z_i + 1e-5),  H_i = sum of phi(k)^T v,  Z_i = sum of phi(k)^T
    out_i    = sparse_i + linear_i W^T + b

    linear=all        the sums have all tokens: SLA's main branch, TurboDiffusion and its checkpoints
    linear=marginal   they have the tokens of the tiles that are not selected: the paper, without its negligible tiles

W `[D, D]` and b `[D]` are one `proj_l` per layer for all heads and start at 0, as plain top-k attention. With all tiles
selected nothing is marginal: linear_i is 0, and the layer is dense attention plus b.

B batch, L tokens, N tiles, H / Hkv heads, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vsa_kernels import block_sparse_attn
from vsa_kernels.block_index import Blocks, by_block, token_places

from vsa.attention.context import AttnContext
from vsa.attention.dense import dense_attn, dense_index
from vsa.attention.layout import TileLayout
from vsa.attention.scores import per_head, with_damage_first
from vsa.attention.selecting import SelectingAttention
from vsa.settings import validated

_EPS = 1e-5


@validated
class SparseLinearAttention(SelectingAttention):
    """Attention to the top-k tiles plus a projection of linear attention, for rows of one video.

    Query and kv tiles are the same in training and inference, and an export records them.

    Args:
        linear: all or marginal, see the top of this file. marginal holds two fp32 states of N x D x D numbers a head.
        backend: backend of the sparse part; None chooses by device.
        **layer: see `SelectingAttention`.

    Source: SLA (arXiv 2509.24006), section 4 and Algorithm 1, for marginal; its code and TurboDiffusion's (arXiv
    2512.16093) for all, the projection and 1e-5. The published tiles are runs of 64 raster tokens.
    """

    takes_text = False

    def __init__(
        self,
        *,
        linear: Literal["all", "marginal"] = "all",
        backend: Literal["reference", "gather", "triton"] | None = None,
        **layer: Any,
    ):
        super().__init__(**layer)
        # the sums are over the keys that no query of a tile selects
        self.takes_query_parts = False
        self.linear, self.backend = linear, backend
        self.proj_l = nn.Linear(self.head_dim, self.head_dim)
        self.reset_extra_parameters()

    def extra_modules(self) -> dict[str, nn.Module]:
        return {"proj_l": self.proj_l}

    def reset_extra_parameters(self) -> None:
        nn.init.zeros_(self.proj_l.weight)
        nn.init.zeros_(self.proj_l.bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """`out`, the sparse part, and `linear`, not yet projected, `[B, L, H, D]` each."""
        layout, topk = ctx.layout, ctx.kept(q)
        layout.only_video("sparse attention with a linear branch")
        blocks = layout.blocks
        scores = self.scores(q, k, v, layout) if ctx.ranks else None
        if ctx.dense or (self.rule == "topk" and ctx.topk.samples is None and topk >= layout.num_video_tiles):
            index, out = dense_index(layout), dense_attn(q, k, v)
            ctx.count_all(q)
        else:
            ranked = partial(with_damage_first, scores, k, v, layout)
            index = ctx.select(lambda topk: self.choose(ranked(), topk, ctx, logits_of=self.map_logits))
            out, _ = block_sparse_attn(q, k, v, index, q_blocks=blocks, kv_blocks=blocks, backend=self.backend)
        marginal = ~index.to_dense(blocks.num) if self.linear == "marginal" else None
        linear = linear_attn(q, k, v, marginal, blocks)
        if ctx.recorder is not None:
            logits = None if scores is None else self.map_logits(scores)
            ctx.record(self.layer_idx, index, q=q, k=k, fine=out, scores=logits)
        return {"out": out, "linear": linear.to(out.dtype)}

    def combine(self, parts: dict[str, Tensor], extra: dict[str, Tensor], ctx: AttnContext) -> Tensor:
        linear = self.proj_l(parts["linear"].to(self.proj_l.weight.dtype))
        return parts["out"] + linear.to(parts["out"].dtype)

    def dense_parts(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttnContext) -> dict[str, Tensor]:
        """Parts of a dense layer: all tiles are selected, and the projection stays."""
        return self.attend(q, k, v, ctx)

    def pairs(self, layout: TileLayout, topk: float) -> float:
        """Pairs of the selected tiles, exact for full tiles, of scores, also `mean`, at half a pair each, and of the
        linear branch at 4 D FLOPs a pair: states, their product with queries, their sums by query tile in marginal, and
        the projection, of which the linear layers of the model count one head."""
        tokens, tiles, dim = layout.num_tokens, layout.blocks.num, self.head_dim
        router = tiles**2 / 2 if self.score == "mean" else 0.0
        sums = tiles**2 * dim / 2 if self.linear == "marginal" else 0.0
        linear = tokens * dim + sums + tokens * dim / 2 * (1 - 1 / self.num_heads)
        return self.kept_pairs(layout, topk) + self.score_pairs(layout) + router + linear


def linear_attn(q: Tensor, k: Tensor, v: Tensor, marginal: Tensor | None, blocks: Blocks) -> Tensor:
    """Linear attention of every query to the tokens of some blocks, at least fp32.

    Sums over blocks are sums of what takes part, not differences: nothing cancels.

    Args:
        q: `[B, L, H, D]`.
        k, v: `[B, L, Hkv, D]`.
        marginal: bool `[B|1, H|1, N, N]`, the kv blocks of each query block; None: all tokens.
        blocks: blocks of the tokens, of queries and keys.

    Returns:
        `[B, L, H, D]`, 0 for queries of a block without any.
    """
    dtype, heads = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    phi_q, phi_k, v = q.to(dtype).softmax(-1), k.to(dtype).softmax(-1), v.to(dtype)
    if marginal is None:
        state = per_head(torch.einsum("blhd,blhe->bhde", phi_k, v), heads)
        norm = per_head(phi_k.sum(1)[:, :, None], heads)
        out = phi_q.transpose(1, 2) @ state
        weight = phi_q.transpose(1, 2) @ norm.mT
        return (out / (weight + _EPS)).transpose(1, 2)
    keys, values, queries = (by_block(x, blocks) for x in (phi_k, v, phi_q))
    state = per_head(torch.einsum("bnshd,bnshe->bhnde", keys, values).flatten(3), heads)
    norm = per_head(keys.sum(2).transpose(1, 2), heads)
    marginal = marginal.to(dtype)
    # [B, H, N, S, D]
    queries = queries.permute(0, 3, 1, 2, 4)
    out = queries @ (marginal @ state).unflatten(-1, (q.shape[-1], -1))
    weight = queries @ (marginal @ norm)[..., None]
    block, place = token_places(blocks, q.shape[1])
    return (out / (weight + _EPS))[:, :, block, place].transpose(1, 2)
