"""dq of block-sparse attention from the gradients of its logits, which `hopper_bwd128` has kept: dq = scale * ds k.

B batch, L query tokens, H / Hkv heads, D head dim, Nq / Nkv blocks, Kmax list capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vsa_kernels.block_sparse.dispatch import most_listed
from vsa_kernels.block_sparse.hopper_fwd128 import BLOCK
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.triton_tiles import lists_of, span, store_tile
from vsa_kernels.launch import launch


@triton.jit(
    do_not_specialize=["idx_b", "idx_h", "idx_n", "num_b", "num_h", "dq_l", "L", "H", "num_q", "num_kv", "capacity"]
)
def _dq128_kernel(
    workspace, k, dq, q_share, kv_indices, kv_num_blocks, q_offsets, scale, idx_b, idx_h, idx_n, num_b, num_h,
    dq_l, L, H, num_q, num_kv, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 128 // BLOCK_M
    i_tile, i_bh = tl.program_id(0) % (num_q * PARTS), tl.program_id(0) // (num_q * PARTS)
    i_n, i_part = i_tile // PARTS, i_tile % PARTS
    i_b, i_h = i_bh // H, i_bh % H
    p_list = kv_indices + i_b.to(tl.int64) * idx_b + i_h.to(tl.int64) * idx_h + i_n.to(tl.int64) * idx_n
    listed = tl.load(kv_num_blocks + i_b.to(tl.int64) * num_b + i_h.to(tl.int64) * num_h + i_n)
    b_dq = tl.zeros([BLOCK_M, D], tl.float32)
    row = (i_bh * num_q + i_n) * capacity * 128
    col = i_h // GROUP * D
    for j in range(listed):
        # [128 kv, BLOCK_M q]
        b_ds = workspace.load([row + j * 128, i_part * BLOCK_M])
        b_k = k.load([(i_b * num_kv + tl.load(p_list + j)) * 128, col])
        b_dq = tl.dot(tl.trans(b_ds), b_k, b_dq)
    b_dq *= scale
    start, size, whole = span(q_offsets, i_n, i_part, L, 128, BLOCK_M, EVEN)
    if SHARED:
        at = (i_bh.to(tl.int64) * num_q + i_n) * D
        b_dq += tl.load(q_share + at + tl.arange(0, D))[None, :] / whole
    store_tile(dq, b_dq, i_b, i_h, start, size, L * dq_l, dq_l, D, D, BLOCK_M, D)


DQ = {"BLOCK_M": 64, "num_warps": 4, "num_stages": 4}


def dq_from(
    keys: Tensor, mask: BlockMask, scale: float, share: Tensor | None, workspace: Tensor, dq: Tensor
) -> None:  # fmt: skip
    """Write dq.

    Args:
        keys: `[B, Nkv * BLOCK, Hkv, D]`, keys with short blocks padded.
        mask: mask of the forward.
        scale: factor of the logits in the forward.
        share: fp32 `[B, H, Nq, D]`, gradient of the means of the query blocks, added by pooling's rule; None: none.
        workspace: `[>= B * H * Nq * Kmax * BLOCK, BLOCK]`, ds^T of every listed pair in the order of the lists.
        dq: `[B, L, H, D]`, written.
    """
    B, L, H, D = dq.shape
    (lists, counts), at = lists_of(mask)
    described = TensorDescriptor(keys, [B * keys.shape[1], keys.shape[2] * D], [keys.stride(1), 1], [BLOCK.value, D])
    kept = TensorDescriptor(workspace, list(workspace.shape), [BLOCK.value, 1], [BLOCK.value, DQ["BLOCK_M"]])
    launch(
        _dq128_kernel, (mask.q_blocks.num * (128 // DQ["BLOCK_M"]) * B * H,),
        kept, described, dq, share, lists, counts, mask.q_blocks.offsets, scale, *at, dq.stride(1),
        L, H, mask.q_blocks.num, mask.kv_blocks.num, most_listed(mask),
        GROUP=H // keys.shape[2], D=D, EVEN=mask.q_blocks.min_size == BLOCK.value, SHARED=share is not None, **DQ,
    )  # fmt: skip
