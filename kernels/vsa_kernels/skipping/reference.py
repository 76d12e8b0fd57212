"""Reference of skipping attention: the online softmax block after block, in plain tensor code and any float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks, by_block, token_places


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    thresholds: Tensor,
    slice_rows: int,
    keeps_sum: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and counts int32 `[B, H, Nq]` of `skipping_attn`."""
    B, L, H, _ = q.shape
    kv_of_head = torch.arange(H, device=q.device) // (H // k.shape[2])
    # [B, H, Nq, rows, D] and [B, Hkv, Nkv, columns, D]
    rows, keys, values = (_by_head(x, blocks) for x, blocks in ((q, q_blocks), (k, kv_blocks), (v, kv_blocks)))
    lists, counts = index.kv_indices.expand(B, H, -1, -1), index.kv_num_blocks.expand(B, H, -1)
    batch = torch.arange(B, device=q.device)[:, None, None]
    exists = torch.arange(rows.shape[3], device=q.device) < q_blocks.sizes[:, None]
    column = torch.arange(keys.shape[3], device=q.device)
    bars = thresholds.to(rows.dtype)[:, None, None]
    top = rows.new_full(rows.shape[:-1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(rows)
    skipped = torch.zeros_like(counts)
    longest = int(counts.max()) if index.max_blocks is None else index.max_blocks
    for slot in range(min(longest, lists.shape[-1])):
        in_list = slot < counts
        block = torch.where(in_list, lists[..., slot], 0).long()
        place = batch, kv_of_head[:, None], block
        logits = (rows @ keys[place].transpose(-1, -2)) * scale
        logits = logits.masked_fill((column >= kv_blocks.sizes[block][..., None])[..., None, :], -torch.inf)
        local = logits.amax(-1)
        new = torch.maximum(top, local)
        gaps = _slices((local - new).masked_fill(~exists, -torch.inf), slice_rows).amax(-1)
        # a slice past the end of its block has no rows and skips nothing
        skip = (gaps < bars) & (gaps > -torch.inf) & in_list[..., None]
        row_mask = ~skip.repeat_interleave(slice_rows, dim=-1)[..., : rows.shape[3], None]
        p = (logits - new[..., None]).exp()
        weighed = p.masked_fill(~row_mask, 0)
        rescale = (top - new).exp()
        grown = total * rescale + (p if keeps_sum else weighed).sum(-1)
        added = out * rescale[..., None] + weighed.to(q.dtype).to(p.dtype) @ values[place]
        top, total = torch.where(in_list[..., None], new, top), torch.where(in_list[..., None], grown, total)
        out = torch.where(in_list[..., None, None], added, out)
        skipped = skipped + skip.sum(-1, dtype=torch.int32)
    out = out / total.masked_fill(total == 0, 1)[..., None]
    block, place = token_places(q_blocks, L)
    return out[:, :, block, place].transpose(1, 2).to(q.dtype).contiguous(), skipped


def _by_head(x: Tensor, blocks: Blocks) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return by_block(x, blocks).permute(0, 3, 1, 2, 4).to(wide)


def _slices(x: Tensor, slice_rows: int) -> Tensor:
    """x `[..., rows]` as `[..., slices, slice_rows]`, the last slice padded with -inf."""
    return F.pad(x, (0, -x.shape[-1] % slice_rows), value=-torch.inf).unflatten(-1, (-1, slice_rows))
