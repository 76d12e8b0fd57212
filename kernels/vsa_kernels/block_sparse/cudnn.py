"""Backend `cudnn`: the block-sparse attention of the package nvidia-cudnn-frontend, on Hopper GPUs.

Its dq is summed in no fixed order: results differ in their last bits from run to run. It reads lists as `BlockIndex`
holds them and natural-log lse, and its backward takes the out and lse that it is given, so also those of a larger
softmax; it has no gradient of lse.

B batch, L / S query / kv tokens, H heads, D head dim, Nq query blocks, Kmax list capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vsa_kernels.block_sparse.mask import BlockMask

SIZES = (64, 128)
"""Tokens of a block."""


def check_call(q: Tensor, k: Tensor, mask: BlockMask) -> None:
    """Raise a ValueError with the first argument of a call that this backend does not support."""
    q_blocks, kv_blocks = mask.q_blocks, mask.kv_blocks
    for name, blocks in (("q_blocks", q_blocks), ("kv_blocks", kv_blocks)):
        if blocks.min_size != blocks.max_size:
            _refuse(f"equal blocks, got {name} of {blocks.min_size} to {blocks.max_size} tokens")
    if q_blocks.max_size != kv_blocks.max_size or q_blocks.max_size not in SIZES:
        sizes = f"{q_blocks.max_size} and kv_blocks of {kv_blocks.max_size}"
        _refuse(f"blocks of 64 or of 128 tokens on both sides, got q_blocks of {sizes} tokens")
    if q.shape[2] != k.shape[2]:
        _refuse(f"as many kv heads as query heads, got {q.shape[2]} and {k.shape[2]}")
    if mask.kv_valid is not None:
        _refuse("no kv_valid")
    if mask.index.mask_bits is not None:
        _refuse("no mask_bits in index")


def check_no_dlse(dlse: Tensor | None) -> None:
    """Raise a ValueError if lse has a gradient."""
    if dlse is not None:
        raise ValueError("backend cudnn has no gradient of lse: set backend=triton, or use lse without its gradient")


def _refuse(takes: str) -> None:
    raise ValueError(f"backend cudnn takes {takes}: set backend=triton")


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs `[B, L, H, D]` and lse `[B, H, L]` of `block_sparse_attn`."""
    from cudnn.block_sparse_attention import block_sparse_attention_forward  # type: ignore[import-not-found]

    may_be_empty = not mask.index.min_blocks
    result = block_sparse_attention_forward(
        *map(_aligned, (q, k, v)), **_lists(q, mask, scale), allow_empty_block_nums=may_be_empty
    )
    return result["o_tensor"], result["lse_tensor"]


def backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from dout and out `[B, L, H, D]` and lse `[B, H, L]`, those of the larger softmax if there is one."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward  # type: ignore[import-not-found]

    # in the memory layout of the op's results
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    tensors = (*map(_aligned, (dout, q, k, v, out.to(q.dtype))), lse)
    block_sparse_attention_backward(*tensors, **_lists(q, mask, scale), dq_tensor=dq, dk_tensor=dk, dv_tensor=dv)
    return dq, dk, dv


def _lists(q: Tensor, mask: BlockMask, scale: float) -> dict[str, Any]:
    """The mask and the scale as arguments of the package."""
    index, (B, _, H, _) = mask.index, q.shape
    most = index.kv_indices.shape[-1] if index.max_blocks is None else index.max_blocks
    # int32 [B, H, Nq, Kmax], of at least one place
    listed = F.pad(index.kv_indices[..., :most], (0, int(most == 0))).expand(B, H, -1, -1)
    counts = None
    if not index.max_blocks or index.min_blocks != index.max_blocks:
        counts = index.kv_num_blocks.expand(B, H, -1).contiguous()
        # places past the count may hold anything
        listed = listed.masked_fill(torch.arange(listed.shape[-1], device=q.device) >= counts[..., None], 0)
    return {
        "q2k_block_index": listed.contiguous(), "q2k_block_nums": counts,
        "sparse_block_size": mask.q_blocks.max_size, "softmax_scale": scale, "layout": "bshd",
    }  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """x `[B, L, H, D]`, copied unless its rows begin at multiples of 128 bytes, as the package assumes."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 128 == 0 and all(n % 64 == 0 for n in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)
