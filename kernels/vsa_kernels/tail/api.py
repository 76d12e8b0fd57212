"""Public interface of attention with a pooled tail: checks, defaults, then the registered op or the reference.

B batch, L / S query / kv tokens, H / Hkv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.checks import check_mask
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.checks import check_allowed, check_blocks, check_qkv, check_scale
from vsa_kernels.dispatch import resolve_backend
from vsa_kernels.modes import lowered, refuse_forward_mode
from vsa_kernels.tail import reference
from vsa_kernels.tail.op import tail_fwd


def tail_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    *,
    q_blocks: Blocks,
    kv_blocks: Blocks,
    candidates: Tensor | None = None,
    exclude: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention to the tokens of listed kv blocks and to the means of others, in one softmax.

    With the mean key km_j and value vm_j of kv block j and its n_j tokens, a query token a of query block i attends to

        every token b of the listed blocks    logit scale * q_a k_b,              value v_b
        every block j of the tail             logit scale * q_a km_j + ln n_j,    value vm_j

    Differentiable in q, k and v, through the means too; the lists are a constant to the gradient. `triton` runs as one
    registered op (`torch.ops.vsa_kernels.tail_fwd`); no backend of it but `reference` and `gather` keeps a tensor of
    L x Nkv. Where a row lists all blocks of its tail and excludes them, this is `block_sparse_attn`.

    Args:
        q: `[B, L, H, D]` queries, tokens in block order.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        index: listed kv blocks of each query block, without fine masks.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        candidates: bool `[Nq, Nkv]`, blocks that may be in the tail; None: all.
        exclude: whether listed blocks are left out of the tail; otherwise they count twice, as in LLSA.
        scale: factor of the logits, default D ** -0.5.
        backend: `reference`, `gather`, `triton`, `cudnn` (the listed blocks alone) or None (automatic, see
            `resolve_backend`).

    Returns:
        out `[B, L, H, D]` in q's dtype, and the natural-log lse of the whole softmax `[B, H, L]`, fp32 (fp64 for fp64
        inputs), which is for inspection and has no gradient. 0 and -inf for a query with neither.

    Raises:
        ValueError: one line that names the argument, what it must be and what it is.

    Source: the forward of Sol-Attn (arXiv 2607.24027) and of LLSA (arXiv 2512.16615, with `exclude=False`), which
    trains it. The backward is that of `block_sparse_attn_backward` for each part of the softmax.
    """
    q, k, v = lowered(q, k, v)
    check_qkv(q, k, v)
    check_blocks("q_blocks", q_blocks, "q", q)
    check_blocks("kv_blocks", kv_blocks, "k", k)
    refuse_forward_mode(q, k, v)
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=None)
    check_mask(q, mask)
    if index.mask_bits is not None:
        raise ValueError("index must have no fine masks: a block is listed or in the tail as a whole")
    check_allowed("candidates", candidates, q_blocks.num, kv_blocks.num, "q", q)
    resolved_backend = resolve_backend(backend, q.device, q.dtype, q.shape[-1])
    factor = check_scale(scale, q.shape[-1], resolved_backend)
    if resolved_backend != "triton":
        return reference.tail_attn(q, k, v, mask, candidates, exclude, factor, resolved_backend)
    out, lse, *_ = tail_fwd(q, k, v, *mask.flatten(), candidates, exclude, factor)
    return out, lse
