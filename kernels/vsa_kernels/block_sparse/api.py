"""The public calls of block-sparse attention: checks, defaults, then the registered ops.

B batch, L / S query / kv tokens, H / Hkv query / kv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks, packed
from vsa_kernels.block_sparse import cudnn
from vsa_kernels.block_sparse.checks import check_mask, check_mask_values, check_outputs
from vsa_kernels.block_sparse.dispatch import Kernels, kernels_of
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_bwd, block_sparse_fwd
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
    disjoint kv sets can be merged by `merge_attn`. Under `torch.autocast` q, k and v are cast to its dtype.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        index: kv blocks of each query block; values out of range are undefined behaviour (see `check_values`).
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        kv_valid: int32 `[B, Nkv]`, number of leading tokens of block n that exist in sample b; None: all of them.
        scale: factor of the logits, default D ** -0.5; a scale of 0 gives the mean over the selected tokens.
        backend: `reference`, `gather`, `triton`, `cudnn` or None (automatic, see `resolve_backend`).
        check_values: whether the values of offsets, lists, counts and their bounds are checked on the device too, with
            a ValueError where they break their contract; for debugging, since it waits for the device.

    Returns:
        out `[B, L, H, D]` in q's dtype, and the natural-log lse `[B, H, L]` in fp32 (fp64 for fp64 inputs). A
        query without any kv token has out 0 and lse -inf.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (fine stage).
    """
    q, k, v = lowered(q, k, v)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=kv_valid)
    how = _checked(q, k, v, mask, scale, backend)
    refuse_forward_mode(q, k, v)
    if check_values:
        check_mask_values(mask, q.shape[1], k.shape[1])
    return block_sparse_fwd(q, k, v, *mask.flatten(), *how)


def block_sparse_attn_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
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
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `block_sparse_attn` where its keys are one part of a larger softmax.

    The other keys may be anything: further lists, ranges of a long sequence, pooled tokens, keys on other devices.
    `out` and `lse` are those of the whole softmax, as `merge_attn` returns them. With them each part needs nothing of
    the others:

        p  = exp(scale * q k^T - lse)                      over the pairs of this part
        ds = p * (dout v^T - rowsum(dout * out) + dlse)
        dq = scale * ds k,   dk = scale * ds^T q,   dv = p^T dout

    dq is this part's summand of the whole gradient. Autograd through `block_sparse_attn` and `merge_attn` gives the
    same and is simpler; it keeps an out and an lse of every part. With out and lse of `block_sparse_attn` itself this
    is its plain backward. It has no derivative of its own.

    Args:
        dout: `[B, L, H, D]` gradient of the whole output, in q's dtype.
        out: `[B, L, H, D]` output over all parts, in q's dtype or that of lse.
        lse: `[B, H, L]` natural-log lse over all parts, fp32 (fp64 for fp64 inputs), so never below that of this part;
            -inf at a query without keys in any part.
        q: as in `block_sparse_attn`, and so are k, v, index, the partitions, kv_valid and scale.
        backend: as in `block_sparse_attn`; parts may differ.
        dlse: `[B, H, L]` gradient of the whole lse, in its dtype; None: 0.

    Returns:
        dq `[B, L, H, D]`, dk and dv `[B, S, Hkv, D]` in the dtype of q, k and v. Exactly 0 for queries without keys
        in this part, and for keys that no query lists.

    Raises:
        ValueError: one line that names the argument, what it must be and what it is.

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3; the
    formulas are those of Dao, "FlashAttention-2", section 3.1.2.
    """
    dout, q, k, v = lowered(dout, q, k, v)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=kv_valid)
    how = _checked(q, k, v, mask, scale, backend)
    check_outputs(q, dout, out, lse, dlse)
    refuse_forward_mode(dout, out, lse, q, k, v, dlse)
    # the kernels assume contiguous rows
    saved = (packed(dout), dlse, out.contiguous(), lse.contiguous())
    return block_sparse_bwd(*saved, q, k, v, *mask.flatten(), *how)


def block_sparse_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    kv_valid: Tensor | None = None,
    backend: str | None = None,
) -> Kernels:
    """Which kernels a call of `block_sparse_attn` takes here and now, and the workspace of its backward; runs none.

    The choice is a table, `vsa_kernels.block_sparse.dispatch`: it depends on the GPU, dtype, head dim, memory layout,
    blocks and masks, and on `set_workspace_limit`. Arguments as in `block_sparse_attn`.
    """
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=kv_valid)
    _, resolved_backend = _checked(q, k, v, mask, None, backend)
    if resolved_backend == "triton":
        return kernels_of(q, k, v, mask)
    return Kernels(forward=resolved_backend, dkv=resolved_backend, dq=resolved_backend)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, backend: str | None
) -> tuple[float, str]:
    """Scale and backend of a call whose arguments fit."""
    check_qkv(q, k, v)
    check_blocks("q_blocks", mask.q_blocks, "q", q)
    check_blocks("kv_blocks", mask.kv_blocks, "k", k)
    check_mask(q, mask)
    resolved_backend = resolve_backend(backend, q.device, q.dtype, q.shape[-1])
    if resolved_backend == "cudnn":
        cudnn.check_call(q, k, mask)
    return check_scale(scale, q.shape[-1], resolved_backend), resolved_backend
