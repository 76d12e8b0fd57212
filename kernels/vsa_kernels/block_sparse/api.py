"""The public call of block-sparse attention: checks, defaults, then the registered op.

B batch, L / S query / kv tokens, H / Hkv query / kv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.checks import check_mask, check_mask_values
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_fwd
from vsa_kernels.checks import check_blocks, check_qkv, check_scale
from vsa_kernels.dispatch import resolve_backend
from vsa_kernels.modes import lowered, refuse_forward_mode


def block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    kv_valid: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
    check_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query block over its selected kv blocks: the fine stage of VSA.

    out = softmax(scale * q k^T + M) v with M = 0 on the selected pairs and -inf elsewhere, and
    lse = log sum exp of the same logits. Both outputs are differentiable in q, k and v, so partial results over
    disjoint kv sets can be merged by their lse. Under `torch.autocast` q, k and v are cast to its dtype.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        index: kv blocks of each query block; values out of range are undefined behaviour (see `check_values`).
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        kv_valid: int32 `[B, Nkv]`, number of leading tokens of block n that exist in sample b; None: all of them.
        scale: factor of the logits, default D ** -0.5; a scale of 0 gives the mean over the selected tokens.
        backend: `reference`, `gather`, `triton` or None (automatic, see `resolve_backend`).
        check_values: also check the values of offsets, lists, counts and their bounds on the device and raise a
            ValueError where they break their contract; for debugging, since it waits for the device.

    Returns:
        out `[B, L, H, D]` in q's dtype, and the natural-log lse `[B, H, L]` in fp32 (fp64 for fp64 inputs). A
        query without any kv token has out 0 and lse -inf.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (fine stage).
    """
    q, k, v = lowered(q, k, v)
    check_qkv(q, k, v)
    check_blocks("q_blocks", q_blocks, "q", q)
    check_blocks("kv_blocks", kv_blocks, "k", k)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=kv_valid)
    check_mask(q, mask)
    refuse_forward_mode(q, k, v)
    resolved_backend = resolve_backend(backend, q.device, q.dtype, q.shape[-1])
    factor = check_scale(scale, q.shape[-1], resolved_backend)
    if check_values:
        check_mask_values(mask, q.shape[1], k.shape[1])
    return block_sparse_fwd(q, k, v, *mask.flatten(), factor, resolved_backend)
