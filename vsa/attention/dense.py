"""Dense attention: softmax attention over all keys.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from vsa_kernels import BlockIndex

from vsa.attention.layout import TileLayout


def dense_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over all keys, `softmax(q k^T / sqrt(D)) v`.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        mask: bool `[B, 1, 1, S]`, True for visible keys; None: all are visible.

    Returns:
        `[B, L, H, D]`.
    """
    grouped = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    if q.device.type == "cpu" and k.shape[2] < 16:
        # torch's kernel for CPUs gives 0 where all logits of a query are NaN
        out = out + (q * 0).sum(-1, keepdim=True) + (k[:, :, :1] * 0).sum((1, 3), keepdim=True)
    return out.transpose(1, 2)


def cross_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`dense_attn` of many queries over few keys.

    Backward kernels of GPUs are parallel over keys, so that few keys leave most of the GPU idle. For training on a GPU
    the queries are therefore divided into parts that the kernel takes for further samples; the gradients of k and v are
    the sums over the parts.
    """
    parts = query_parts(q.shape[1]) if q.is_cuda and torch.is_grad_enabled() else 1
    return dense_attn(q, k, v, mask) if parts == 1 else attn_in_parts(q, k, v, mask, parts)


def query_parts(num_queries: int, shortest: int = 2048) -> int:
    """Number of equal parts that queries are divided into: 8, 4, 2 or 1, of at least `shortest` queries each."""
    # few cases, because a compiled block is compiled once for each
    for parts in (8, 4, 2):
        if num_queries >= parts * shortest and num_queries % parts == 0:
            return parts
    return 1


def attn_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, parts: int) -> Tensor:
    """`dense_attn` with the queries in `parts` equal parts of one kernel call; `parts` divides L."""

    def repeated(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, parts, *x.shape[1:]).flatten(0, 1)

    mask = None if mask is None else repeated(mask)
    out = dense_attn(q.unflatten(1, (parts, -1)).flatten(0, 1), repeated(k), repeated(v), mask)
    return out.unflatten(0, (-1, parts)).flatten(1, 2)


def dense_attn_per_sample(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> Tensor:
    """Dense attention inside each sample of a row; q, k, v and the result `[B, L, H, D]`."""
    if len(layout.sample_spans) == 1:
        return dense_attn(q, k, v)
    parts = [dense_attn(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in layout.sample_spans]
    return torch.cat(parts, dim=1)


def dense_index(layout: TileLayout) -> BlockIndex:
    """The index `[1, 1, Nv, Nkv]` of dense attention: every tile of the query tile's own sample."""
    shape = (layout.video_blocks.num, layout.kv_blocks.num)
    visible = layout.candidates
    if visible is None:
        visible = torch.ones(shape, dtype=torch.bool, device=layout.device)
    elif layout.always is not None:
        visible = visible | layout.always
    return BlockIndex.from_dense(visible[None, None])


def text_attn(q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> list[Tensor]:
    """Outputs of the text and cond segments of a tile-major row, which attend densely to their sample."""
    spans = [(start, stop, *layout.sample_spans[sample]) for start, stop, sample in layout.text_spans]
    return [dense_attn(q[:, a:b], k[:, first:last], v[:, first:last]) for a, b, first, last in spans]
