"""Registered ops of block-sparse attention: fake, autograd and FLOP formula around the backends.

The mask is passed as flat arguments, in the order of `BlockMask.flatten`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import packed
from vsa_kernels.block_sparse import cudnn, dispatch, gather, reference
from vsa_kernels.block_sparse.mask import BlockMask, lse_dtype
from vsa_kernels.modes import without_autocast
from vsa_kernels.operators import Operator, declare
from vsa_kernels.registration import define_op, register_autograd

# backends in plain tensor code; torch.autocast has to be off inside them
_PLAIN = {"reference": reference, "gather": gather}

MASK = (
    "Tensor kv_indices, Tensor kv_num_blocks, Tensor? kv_num_full_blocks, Tensor? mask_ids, Tensor? mask_bits, "
    "SymInt? max_blocks, SymInt? min_blocks, Tensor q_offsets, SymInt q_max, SymInt q_min, "
    "Tensor kv_offsets, SymInt kv_max, SymInt kv_min, Tensor? kv_valid"
)
"""Arguments of a schema, the fields of a `BlockMask`."""
_CALL = f"Tensor q, Tensor k, Tensor v, {MASK}, float scale, str backend"


@define_op("block_sparse_fwd", f"({_CALL}) -> (Tensor, Tensor)")
def block_sparse_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *flat, scale, backend = rest
    mask = BlockMask.unflatten(flat)
    if not q.shape[0]:
        return _outputs_like(q)
    if backend == "triton":
        return dispatch.forward(q, k, v, mask, scale)
    if backend == "cudnn":
        return cudnn.forward(q, k, v, mask, scale)
    with without_autocast(q.device):
        return _PLAIN[backend].forward(q, k, v, mask, scale)


def _outputs_like(q: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    B, L, H, D = q.shape
    return q.new_empty((B, L, H, D)), q.new_empty((B, H, L), dtype=lse_dtype(q.dtype))


torch.library.register_fake(block_sparse_fwd, _outputs_like)


@torch.library.custom_op(
    "vsa_kernels::block_sparse_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def block_sparse_bwd(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *flat, scale, backend = rest
    mask = BlockMask.unflatten(flat)
    if not q.shape[0]:
        return _gradients_like(dout, dlse, out, lse, q, k, v)
    if backend == "triton":
        from vsa_kernels.block_sparse import triton_bwd

        delta = triton_bwd.delta(dout, out, lse, dlse)
        return dispatch.backward(dout, delta, lse, q, k, v, mask, scale)
    if backend == "cudnn":
        cudnn.check_no_dlse(dlse)
        return cudnn.backward(dout, out, lse, q, k, v, mask, scale)
    # delta of a query without kv tokens is set to 0: its dlse is arbitrary and must not reach other gradients
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    delta = delta.masked_fill(lse == -torch.inf, 0)
    with without_autocast(q.device):
        return _PLAIN[backend].backward(dout, delta, lse, q, k, v, mask, scale)


def _gradients_like(
    _dout: Tensor, _dlse: Tensor | None, _out: Tensor, _lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(tuple(q.shape)), k.new_empty(tuple(k.shape)), v.new_empty(tuple(v.shape))


block_sparse_bwd.register_fake(_gradients_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
    # no zeros for the gradient of a lse that is not used
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, *(x for x in inputs if isinstance(x, Tensor)))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    saved = iter(tensors)
    inputs = [next(saved) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)]
    dout = torch.zeros_like(out) if dout is None else dout
    # packed like q, k and v, so that sums over D have one order whatever the memory layout of dout
    grads = block_sparse_bwd(packed(dout), dlse, out, lse, *inputs)
    return (*grads, *(None for _ in inputs[3:]))


register_autograd(block_sparse_fwd, _backward, _setup_context)


def listed_flops(q_shape: Any, k_shape: Any, mask: tuple[Any, ...]) -> int:
    """FLOPs of one matmul over the listed blocks at their mean size; with no bound the capacity of the lists counts."""
    B, L, H, D = q_shape
    list_length = mask[0][-1] if mask[5] is None else mask[5]
    return 2 * B * H * L * D * list_length * k_shape[1] // (mask[10][0] - 1)


def _fwd_flops(q_shape: Any, k_shape: Any, v_shape: Any, *mask: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * listed_flops(q_shape, k_shape, mask)


def _bwd_flops(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *mask: Any, out_shape: Any = None, **_: Any
) -> int:
    return 5 * listed_flops(q, k, mask)


_OPS = {"block_sparse_fwd": _fwd_flops, "block_sparse_bwd": _bwd_flops}
declare(Operator(name="block_sparse_attn", module=__name__, ops=_OPS))
