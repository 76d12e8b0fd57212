"""Block-sparse attention by gathering each query block's kv blocks: cost follows the density, on any device.

Rows are (batch, head, query block) triples. A row gathers its K listed kv blocks into one `[K * block, D]` matrix
and attends densely to it; rows are processed in chunks so that extra memory stays bounded. Ragged blocks are padded
to the largest block and unused list slots point to a spare empty block; both carry a bias of -inf. With uniform
blocks and equally long lists none of this exists. Backward accumulates dk and dv without atomics, so it repeats bit
for bit.

R rows, K listed blocks, bq / bk tokens of the largest query / kv block, Nkv kv blocks, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vsa_kernels.block_index import Blocks, by_block, token_places
from vsa_kernels.block_sparse.mask import BlockMask

# Bytes of one chunk's buffers. On a CPU they should stay in the cache between the passes over them; a GPU wants enough
# rows to fill it.
_CHUNK_BYTES_CPU = 1 << 21
_CHUNK_BYTES_GPU = 1 << 29


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """The lists of a `BlockIndex` with one row for every batch entry, head and query block.

    Args:
        blocks: int64 `[R, K]` rows of the block tables.
        stride: blocks per (batch entry, kv head) in the block tables, the spare one included.
        bias: `[Nb, bk]` 0 or -inf for every token slot of the block tables; None when every slot holds a token.
        mask_ids: int64 `[R, K]` rows of `mask_bits`; None without fine masks.
        mask_bits: bool `[M + 1, bq, bk]`, True = do not attend; the last row masks nothing.
    """

    blocks: Tensor
    stride: int
    bias: Tensor | None
    mask_ids: Tensor | None
    mask_bits: Tensor | None

    @property
    def hides(self) -> bool:
        """Whether a query may attend to no kv token at all."""
        return self.bias is not None or self.mask_ids is not None

    def bias_logits(self, logits: Tensor, lo: int, hi: int) -> None:
        """Add the masks of rows lo:hi to their logits `[R, bq, K * bk]`, in place."""
        rows, K = hi - lo, self.blocks.shape[1]
        if self.bias is not None:
            logits += self.bias.index_select(0, self.blocks[lo:hi].reshape(-1)).view(rows, 1, -1)
        if self.mask_ids is not None and self.mask_bits is not None:
            _, bq, bk = self.mask_bits.shape
            hidden = self.mask_bits.index_select(0, self.mask_ids[lo:hi].reshape(-1)).view(rows, K, bq, bk)
            logits.view(rows, bq, K, bk).masked_fill_(hidden.transpose(1, 2), -torch.inf)


class _Scratch:
    """Buffers that all chunks reuse: a fresh allocation of this size costs a page fault every 4 KiB on a CPU."""

    def __init__(self):
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor in like's dtype, in the buffer of this name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = like.new_empty(size)
        return self._buffers[name][:size].view(shape)

    def gather(self, name: str, table: Tensor, rows: Tensor) -> Tensor:
        """`table[rows]` as `[R, K * bk, D]` for a table `[Nb, bk, D]` and rows `[R, K]`."""
        _, bk, D = table.shape
        out = self.take(name, table, rows.numel(), bk * D)
        torch.index_select(table.view(-1, bk * D), 0, rows.reshape(-1), out=out)
        return out.view(rows.shape[0], -1, D)

    def matmul(self, name: str, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        """alpha * a @ b per row with at least fp32 results; half inputs stay on the tensor cores of a GPU."""
        if a.dtype in (torch.float16, torch.bfloat16):
            return torch.bmm(a, b, out_dtype=torch.float32).mul_(alpha)
        out = self.take(name, a, a.shape[0], a.shape[1], b.shape[2])
        # beta=0 never reads the first argument
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=alpha, out=out)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    B, L, H, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    lists, scratch = _lists(q, k, mask, wide), _Scratch()
    q_rows = _block_table(q, mask.q_blocks)
    out = torch.zeros_like(q_rows, dtype=wide)
    lse = out.new_full((*out.shape[:2], 1), -torch.inf)
    k_table, v_table = _kv_table(k, mask, lists), _kv_table(v, mask, lists)
    for lo, hi in _chunks(lists, q_rows, k_table):
        k_rows = scratch.gather("k", k_table, lists.blocks[lo:hi])
        logits = scratch.matmul("logits", q_rows[lo:hi], k_rows.transpose(1, 2), scale)
        lists.bias_logits(logits, lo, hi)
        top = logits.amax(-1, keepdim=True)
        if lists.hides:
            top.masked_fill_(top == -torch.inf, 0)
        p = logits.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        v_rows = scratch.gather("v", v_table, lists.blocks[lo:hi])
        summed = scratch.matmul("out", p.to(v_rows.dtype), v_rows)
        # a query without kv tokens has p = 0 everywhere: out 0 / 1, lse log(0) = -inf
        torch.div(summed, total.masked_fill(total == 0, 1) if lists.hides else total, out=out[lo:hi])
        torch.add(top, total.log(), out=lse[lo:hi])
    lse = _tokens(lse, mask.q_blocks, B, H, L).view(B, L, H)
    return _tokens(out, mask.q_blocks, B, H, L).to(q.dtype), lse.transpose(1, 2).contiguous()


def backward(
    dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from dout `[B, L, H, D]` and delta = rowsum(dout * out) - dlse `[B, H, L]`."""
    B, L, H, _ = q.shape
    S, kv_heads = k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    lists, scratch = _lists(q, k, mask, wide), _Scratch()
    # rows that pad a short query block have q = dout = delta = lse = 0, so they add exact zeros
    q_rows, d_rows = _block_table(q, mask.q_blocks), _block_table(dout, mask.q_blocks)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    lse_rows, delta_rows = (_block_table(x.transpose(1, 2)[..., None], mask.q_blocks) for x in (lse, delta))
    k_table, v_table = _kv_table(k, mask, lists), _kv_table(v, mask, lists)
    dq = torch.zeros_like(q_rows, dtype=wide)
    dk, dv = torch.zeros_like(k_table, dtype=wide), torch.zeros_like(v_table, dtype=wide)
    for lo, hi in _chunks(lists, q_rows, k_table):
        blocks = lists.blocks[lo:hi]
        k_rows = scratch.gather("k", k_table, blocks)
        logits = scratch.matmul("logits", q_rows[lo:hi], k_rows.transpose(1, 2), scale)
        lists.bias_logits(logits, lo, hi)
        p = logits.sub_(lse_rows[lo:hi]).exp_()
        v_rows = scratch.gather("v", v_table, blocks)
        dlogits = scratch.matmul("dlogits", d_rows[lo:hi], v_rows.transpose(1, 2))
        dlogits = dlogits.sub_(delta_rows[lo:hi]).mul_(p).to(q_rows.dtype)
        dq[lo:hi] = scratch.matmul("dq", dlogits, k_rows, scale)
        _add_rows(dv, blocks, scratch.matmul("dkv", p.to(q_rows.dtype).transpose(1, 2), d_rows[lo:hi]))
        _add_rows(dk, blocks, scratch.matmul("dkv", dlogits.transpose(1, 2), q_rows[lo:hi], scale))
    dk, dv = (
        _tokens(x.view(B * kv_heads, -1, *x.shape[1:])[:, : mask.kv_blocks.num], mask.kv_blocks, B, kv_heads, S)
        for x in (dk, dv)
    )
    return _tokens(dq, mask.q_blocks, B, H, L).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _lists(q: Tensor, k: Tensor, mask: BlockMask, wide: torch.dtype) -> _Lists:
    index, num_kv = mask.index, mask.kv_blocks.num
    B, H, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    most, least = index.max_blocks, index.min_blocks
    if most is None or least is None:
        # waits for the device once, which is cheaper than attending to every unused entry of the lists
        least, most = (int(x) for x in index.kv_num_blocks.aminmax())
    blocks = index.kv_indices[..., :most].long()
    slot = torch.arange(most, device=q.device)
    # unused list entries point to a spare block at the end of each table
    stride = num_kv + (least < most)
    if least < most:
        blocks = torch.where(slot < index.kv_num_blocks[..., None], blocks, num_kv)
    kv_head = torch.arange(H, device=q.device) // (H // kv_heads)
    first = (torch.arange(B, device=q.device)[:, None] * kv_heads + kv_head) * stride
    blocks = (blocks + first[..., None, None]).flatten(0, 2)

    bias = None
    ragged = mask.kv_blocks.min_size < mask.kv_blocks.max_size
    if least < most or ragged or mask.kv_valid is not None:
        inside = F.pad(_inside(mask), (0, 0, 0, stride - num_kv))
        bias = torch.zeros_like(inside, dtype=wide).masked_fill_(~inside, -torch.inf)
        bias = bias[:, None].expand(B, kv_heads, -1, -1).reshape(-1, mask.kv_blocks.max_size)

    ids = bits = None
    if index.mask_bits is not None:
        assert index.mask_ids is not None
        assert index.kv_num_full_blocks is not None
        bits = torch.cat([~index.mask_bits, torch.zeros_like(index.mask_bits[:1])])
        masked = (slot >= index.kv_num_full_blocks[..., None]) & (slot < index.kv_num_blocks[..., None])
        ids = torch.where(masked, index.mask_ids[..., :most].long(), index.mask_bits.shape[0])
        ids = ids.expand(B, H, -1, -1).flatten(0, 2)
    return _Lists(blocks=blocks, stride=stride, bias=bias, mask_ids=ids, mask_bits=bits)


def _inside(mask: BlockMask) -> Tensor:
    # bool [B|1, Nkv, bk]: this slot of the block holds a token
    place = torch.arange(mask.kv_blocks.max_size, device=mask.kv_blocks.offsets.device)
    inside = (place < mask.kv_blocks.sizes[:, None])[None]
    return inside if mask.kv_valid is None else inside & (place < mask.kv_valid[..., None])


def _kv_table(x: Tensor, mask: BlockMask, lists: _Lists) -> Tensor:
    # [B * Hkv * stride, bk, D]: the blocks of each kv head, and a spare block of zeros when list entries may be unused
    if mask.kv_valid is not None:
        # tokens past `kv_valid` may hold NaN, and 0 * NaN would be NaN
        block, place = token_places(mask.kv_blocks, x.shape[1])
        x = x.masked_fill((place >= mask.kv_valid[:, block])[..., None, None], 0)
    return _block_table(x, mask.kv_blocks, lists.stride)


def _block_table(x: Tensor, blocks: Blocks, stride: int | None = None) -> Tensor:
    # [B, L, H, D] -> [B * H * stride, max_size, D] contiguous, zeros after short blocks and after the last block
    B, _, H, D = x.shape
    # a CPU multiplies half-precision inputs in fp32, a GPU uses its tensor cores
    dtype = x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)
    table = x.new_empty((B, H, stride or blocks.num, blocks.max_size, D), dtype=dtype)
    table[:, :, blocks.num :] = 0
    table[:, :, : blocks.num] = by_block(x, blocks).permute(0, 3, 1, 2, 4)
    return table.view(-1, blocks.max_size, D)


def _tokens(rows: Tensor, blocks: Blocks, B: int, H: int, num_tokens: int) -> Tensor:
    # inverse of _block_table: [B * H * N, max_size, D] -> [B, L, H, D] contiguous
    rows = rows.reshape(B, H, blocks.num * blocks.max_size, -1).transpose(1, 2)
    if blocks.max_size == blocks.min_size:
        return rows.contiguous()
    block, place = token_places(blocks, num_tokens)
    return rows.index_select(1, block * blocks.max_size + place).contiguous()


def _chunks(lists: _Lists, q_rows: Tensor, k_table: Tensor) -> Iterator[tuple[int, int]]:
    rows, K = lists.blocks.shape
    (bq, D), bk = q_rows.shape[1:], k_table.shape[1]
    # the backward holds two matrices of logits, the gathered k and v, and the gradient of one of them
    per_row = K * bk * (2 * bq + 3 * D) * torch.promote_types(q_rows.dtype, torch.float32).itemsize
    if q_rows.is_cuda:
        step = _CHUNK_BYTES_GPU // max(per_row, 1)
    else:
        step = max(_CHUNK_BYTES_CPU // max(per_row, 1), torch.get_num_threads())
    for lo in range(0, rows if K else 0, max(step, 1)):
        yield lo, min(lo + max(step, 1), rows)


def _add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    # total[rows] += values, where rows repeat; on a GPU index_add_ would use atomics, index_put_ sorts instead
    rows = rows.reshape(-1)
    total, values = total.flatten(1), values.reshape(rows.shape[0], -1)
    if total.is_cuda:
        total.index_put_((rows,), values, accumulate=True)
    else:
        total.index_add_(0, rows, values)
