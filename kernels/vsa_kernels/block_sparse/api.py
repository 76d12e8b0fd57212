"""The public call of block-sparse attention: checks, defaults, then the registered op.

B batch, L / S query / kv tokens, H / Hkv query / kv heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import block_sparse_fwd
from vsa_kernels.dispatch import resolve_backend


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
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query block over its selected kv blocks: the fine stage of VSA.

    out = softmax(scale * q k^T + M) v with M = 0 on the selected pairs and -inf elsewhere, and
    lse = log sum exp of the same logits. Both outputs are differentiable in q, k and v, so partial results over
    disjoint kv sets can be merged by their lse.

    Args:
        q: `[B, L, H, D]` queries.
        k: `[B, S, Hkv, D]` keys, H a multiple of Hkv.
        v: `[B, S, Hkv, D]` values.
        index: kv blocks of each query block; values out of range are undefined behaviour.
        q_blocks: partition of the L query tokens.
        kv_blocks: partition of the S kv tokens.
        kv_valid: int32 `[B, Nkv]`, only the first `kv_valid[b, n]` tokens of block n exist in sample b.
        scale: factor of the logits, default D ** -0.5.
        backend: `reference`, `gather`, `triton` or None (automatic, see `resolve_backend`).

    Returns:
        out `[B, L, H, D]` in q's dtype, and the natural-log lse `[B, H, L]` in fp32 (fp64 for fp64 inputs). A
        query without any kv token has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or the backend name do not fit.

    Source: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention", section 2 (fine stage).
    """
    _check_qkv(q, k, v)
    _check_index(q, index, q_blocks, kv_blocks)
    chosen = resolve_backend(backend, q.device, q.dtype, q.shape[-1], fine_mask=index.mask_bits is not None)
    if kv_valid is not None and kv_valid.shape != (q.shape[0], kv_blocks.num):
        raise ValueError(f"kv_valid must be {[q.shape[0], kv_blocks.num]}, got {list(kv_valid.shape)}")
    mask = BlockMask(index=index, q_blocks=q_blocks, kv_blocks=kv_blocks, kv_valid=kv_valid)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if chosen == "triton" and not factor >= 0:
        raise ValueError(f"scale must not be negative for backend triton, got {factor}")
    return block_sparse_fwd(q, k, v, *mask.flatten(), factor, chosen)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, tokens, heads, D], got {list(q.shape)} and {list(k.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim, got {list(q.shape)} and {list(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[2]} and {k.shape[2]}")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must share one float dtype, got {q.dtype}, {k.dtype} and {v.dtype}")


def _check_index(q: Tensor, index: BlockIndex, q_blocks: Blocks, kv_blocks: Blocks) -> None:
    shape = index.kv_indices.shape
    if len(shape) != 4 or shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[2]):
        raise ValueError(f"kv_indices must be [B|1, H|1, Nq, Kmax] for q {list(q.shape)}, got {list(shape)}")
    if shape[2] != q_blocks.num:
        raise ValueError(f"kv_indices must have {q_blocks.num} rows, one per query block, got {shape[2]}")
    if index.kv_num_blocks.shape != shape[:3]:
        raise ValueError(f"kv_num_blocks must be {list(shape[:3])}, got {list(index.kv_num_blocks.shape)}")
    fine = (index.kv_num_full_blocks, index.mask_ids, index.mask_bits)
    if all(part is None for part in fine):
        return
    full, ids, bits = fine
    if full is None or ids is None or bits is None:
        raise ValueError("a fine mask needs kv_num_full_blocks, mask_ids and mask_bits together")
    if full.shape != shape[:3] or ids.shape != shape:
        raise ValueError(
            f"kv_num_full_blocks and mask_ids must be {list(shape[:3])} and {list(shape)}, "
            f"got {list(full.shape)} and {list(ids.shape)}"
        )
    if tuple(bits.shape[1:]) != (q_blocks.max_size, kv_blocks.max_size):
        raise ValueError(f"mask_bits must be [M, {q_blocks.max_size}, {kv_blocks.max_size}], got {list(bits.shape)}")
