"""Registered ops of attention with a pooled tail on the Triton kernels: fakes, autograd and FLOP formulas.

The mask is passed as flat arguments, in the order of `BlockMask.flatten`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import packed
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.block_sparse.op import MASK, listed_flops
from vsa_kernels.operators import Operator, declare
from vsa_kernels.registration import define_op, register_autograd

_CALL = f"Tensor q, Tensor k, Tensor v, {MASK}, Tensor? candidates, bool exclude, float scale"


@define_op("tail_fwd", f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor)")
def tail_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and lse, then what the backward reads: fp32 means of k and v `[B, Nkv, Hkv, D]`."""
    from vsa_kernels.tail import triton_tail

    *flat, candidates, exclude, scale = rest
    if not q.shape[0]:
        return _outputs_like(q, k, v, *rest)
    return triton_tail.forward(q, k, v, BlockMask.unflatten(flat), candidates, exclude, scale)


@torch.library.register_fake(tail_fwd)
def _outputs_like(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, L, H, D = q.shape
    means = (B, BlockMask.unflatten(rest[:-3]).kv_blocks.num, k.shape[2], D)
    k_mean, v_mean = (x.new_empty(means, dtype=torch.float32) for x in (k, v))
    return q.new_empty((B, L, H, D)), q.new_empty((B, H, L), dtype=torch.float32), k_mean, v_mean


@torch.library.custom_op(
    "vsa_kernels::tail_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, Tensor k_mean, Tensor v_mean, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def tail_bwd(
    dout: Tensor, out: Tensor, lse: Tensor, k_mean: Tensor, v_mean: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    from vsa_kernels.tail import triton_tail

    *flat, candidates, exclude, scale = rest
    if not q.shape[0]:
        return _gradients_like(dout, out, lse, k_mean, v_mean, q, k, v)
    saved = (dout, out, lse, k_mean, v_mean)
    return triton_tail.backward(*saved, q, k, v, BlockMask.unflatten(flat), candidates, exclude, scale)


@tail_bwd.register_fake
def _gradients_like(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = args[5:8]
    return q.new_empty(tuple(q.shape)), k.new_empty(tuple(k.shape)), v.new_empty(tuple(v.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]
    # otherwise autograd would allocate a zero gradient for each of the other outputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(x for x in inputs if isinstance(x, Tensor)))


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if dout is not None:
        # read once: under activation checkpointing a second access raises an error
        out, lse, k_mean, v_mean, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        inputs = [next(saved) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)]
        grads = tail_bwd(packed(dout), out, lse, k_mean, v_mean, *inputs)
    return *grads, *(None for _ in ctx.constants[3:])


register_autograd(tail_fwd, _backward, _setup_context)


def _matmul_flops(q_shape: Any, k_shape: Any, mask: tuple[Any, ...]) -> int:
    # one matmul with the listed blocks and one with the means
    B, L, H, D = q_shape
    return listed_flops(q_shape, k_shape, mask) + 2 * B * H * L * D * (mask[10][0] - 1)


def _fwd_flops(q: Any, k: Any, v: Any, *mask: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * _matmul_flops(q, k, mask)


def _bwd_flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    return 5 * _matmul_flops(shapes[5], shapes[6], shapes[8:])


def _result_bytes(tokens: int, heads: int, head_dim: int, num_blocks: int, capacity: int) -> int:
    # out in half precision, lse, both means, and the lists that the selection keeps
    floats = heads * (tokens + 2 * num_blocks * head_dim)
    return 2 * tokens * heads * head_dim + 4 * (floats + heads * num_blocks * (capacity + 1))


_OPS = {"tail_fwd": _fwd_flops, "tail_bwd": _bwd_flops}
declare(Operator(name="tail_attn", module=__name__, ops=_OPS, result_bytes=_result_bytes))
