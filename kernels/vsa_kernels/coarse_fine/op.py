"""Registered ops of the VSA operator on the Triton kernels: fakes, autograd and FLOP formulas.

The forward returns everything the backward reads, so that keeping this one node keeps the selection that out and lse
belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vsa_kernels.block_index import Blocks


@torch.library.custom_op("vsa_kernels::coarse_fine_fwd", mutates_args=())
def coarse_fine_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    topk: int,
    capacity: int,
    scale: float,
    record: Tensor | None = None,
    probe: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, fine, lse, coarse, coarse_lse, kv_indices, kv_num_blocks, q_mean, k_mean, v_mean.

    The last three arguments are a `RecallBuffer`'s: the forward leaves them alone, the backward fills the first two.
    """
    from vsa_kernels.coarse_fine import triton_op

    q_blocks = Blocks(offsets=q_offsets, max_size=q_max, min_size=q_min)
    kv_blocks = Blocks(offsets=kv_offsets, max_size=kv_max, min_size=kv_min)
    if not q.shape[0]:
        return _outputs_like(q, k, q_blocks.num, kv_blocks.num, capacity)
    return triton_op.forward(q, k, v, gate_coarse, gate_fine, q_blocks, kv_blocks, topk, capacity, scale)


def _outputs_like(
    q: Tensor, k: Tensor, Nq: int, Nkv: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, L, H, D), Hkv = q.shape, k.shape[2]

    def fp32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    def int32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.int32)

    out, fine, lse = q.new_empty((B, L, H, D)), q.new_empty((B, L, H, D)), fp32(B, H, L)
    coarse, coarse_lse = fp32(B, Nq, H, D), fp32(B, H, Nq)
    indices, counts = int32(B, H, Nq, capacity), int32(B, H, Nq)
    q_mean, k_mean, v_mean = fp32(B, Nq, H, D), fp32(B, Nkv, Hkv, D), fp32(B, Nkv, Hkv, D)
    return out, fine, lse, coarse, coarse_lse, indices, counts, q_mean, k_mean, v_mean


@coarse_fine_fwd.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    topk: int,
    capacity: int,
    scale: float,
    *_: Any,
) -> tuple[Tensor, ...]:
    return _outputs_like(q, k, q_offsets.shape[0] - 1, kv_offsets.shape[0] - 1, capacity)


@torch.library.custom_op("vsa_kernels::coarse_fine_bwd", mutates_args=())
def coarse_fine_bwd(
    dout: Tensor,
    fine: Tensor,
    lse: Tensor,
    coarse: Tensor,
    coarse_lse: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    q_mean: Tensor,
    k_mean: Tensor,
    v_mean: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    topk: int,
    scale: float,
    seed: Tensor | None = None,
    slots: int = 0,
) -> list[Tensor]:
    """dq, dk, dv, dgate_coarse and, with a fine gate, dgate_fine; with a seed, the recall's record and probe too.

    Args:
        seed: of the probes; None: no recall.
        slots: last dim of the record.
    """
    from vsa_kernels.coarse_fine import triton_op

    saved = triton_op.Saved(fine, lse, coarse, coarse_lse, kv_indices, kv_num_blocks, q_mean, k_mean, v_mean)
    q_blocks = Blocks(offsets=q_offsets, max_size=q_max, min_size=q_min)
    kv_blocks = Blocks(offsets=kv_offsets, max_size=kv_max, min_size=kv_min)
    given = (dout, saved, q, k, v, gate_coarse, gate_fine, q_blocks, kv_blocks, topk, scale)
    if not q.shape[0]:
        grads = _gradients_like(q, k, v, gate_coarse, gate_fine)
        return grads if seed is None else [*grads, *_recall_like(kv_num_blocks, slots)]
    if seed is None:
        return triton_op.backward(*given)
    # outputs, not mutated arguments: without a recall the op has to stay free of side effects
    record, probe = _recall_like(kv_num_blocks, slots)
    grads = triton_op.backward(*given, triton_op.Recall(record, probe, seed))
    return [*grads, record, probe]


def _recall_like(counts: Tensor, slots: int) -> list[Tensor]:
    shape = tuple(counts.shape)
    return [counts.new_empty((*shape, slots), dtype=torch.float32), counts.new_empty(shape)]


def _gradients_like(*inputs: Tensor | None) -> list[Tensor]:
    return [x.new_empty(tuple(x.shape)) for x in inputs if x is not None]


@coarse_fine_bwd.register_fake
def _(
    dout: Tensor,
    fine: Tensor,
    lse: Tensor,
    coarse: Tensor,
    coarse_lse: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    q_mean: Tensor,
    k_mean: Tensor,
    v_mean: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_coarse: Tensor,
    gate_fine: Tensor | None,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    topk: int,
    scale: float,
    seed: Tensor | None = None,
    slots: int = 0,
) -> list[Tensor]:
    grads = _gradients_like(q, k, v, gate_coarse, gate_fine)
    return grads if seed is None else [*grads, *_recall_like(kv_num_blocks, slots)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, gate_coarse, gate_fine, q_offsets, q_max, q_min, kv_offsets, kv_max, kv_min, topk, _, scale = inputs[:14]
    ctx.mark_non_differentiable(*output[1:])
    # without it a zero tensor would be made for the gradient of each of the other outputs
    ctx.set_materialize_grads(False)
    gates = (gate_coarse,) if gate_fine is None else (gate_coarse, gate_fine)
    ctx.save_for_backward(*output[1:], q, k, v, q_offsets, kv_offsets, *gates)
    ctx.sizes = (q_max, q_min, kv_max, kv_min, topk, scale)
    # not among the saved tensors: the backward writes to the caller's buffer, never to a copy that a hook unpacked
    ctx.recall = inputs[14:]


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 17
    # read once: under activation checkpointing a second look is an error
    tensors = ctx.saved_tensors
    *saved, q, k, v, q_offsets, kv_offsets, gate_coarse = tensors[:15]
    gate_fine = tensors[15] if len(tensors) > 15 else None
    q_max, q_min, kv_max, kv_min, topk, scale = ctx.sizes
    blocks = (q_offsets, q_max, q_min, kv_offsets, kv_max, kv_min)
    given = (dout, *saved, q, k, v, gate_coarse, gate_fine, *blocks, topk, scale)
    record, probe, seed = ctx.recall
    if seed is None:
        grads = coarse_fine_bwd(*given)
    else:
        *grads, new_record, new_probe = coarse_fine_bwd(*given, seed, record.shape[-1])
        record.copy_(new_record.detach())
        probe.copy_(new_probe.detach())
    return (*grads, *(None for _ in range(17 - len(grads))))


coarse_fine_fwd.register_autograd(_backward, setup_context=_setup_context)


def _matmul_flops(q: Any, k: Any, num_q: int, num_kv: int, topk: int) -> int:
    # one matmul of the coarse stage and one of the fine stage over the listed blocks at their mean size
    B, L, H, D = q
    return 2 * B * H * D * (num_q * num_kv + L * topk * k[1] // num_kv)


@register_flop_formula(torch.ops.vsa_kernels.coarse_fine_fwd)
def _fwd_flops(*args: Any, **_: Any) -> int:
    q, k, q_offsets, kv_offsets, topk = args[0], args[1], args[5], args[8], args[11]
    return 2 * _matmul_flops(q, k, q_offsets[0] - 1, kv_offsets[0] - 1, topk)


@register_flop_formula(torch.ops.vsa_kernels.coarse_fine_bwd)
def _bwd_flops(*args: Any, **_: Any) -> int:
    q, k, q_offsets, kv_offsets, topk = args[10], args[11], args[15], args[18], args[21]
    flops = 5 * _matmul_flops(q, k, q_offsets[0] - 1, kv_offsets[0] - 1, topk)
    if len(args) > 23 and args[23] is not None:
        # the logits of one probe per query block
        flops += _matmul_flops(q, k, 0, kv_offsets[0] - 1, 1)
    return flops
