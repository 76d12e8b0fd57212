"""Registered ops of the VSA operator on the Triton kernels: fakes, autograd and FLOP formulas.

The forward returns every tensor that the backward reads, so that an activation checkpoint that saves this one node
saves out, lse and the selection they belong to.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.operators import Operator, declare
from vsa_kernels.registration import define_op, register_autograd

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor gate_coarse, Tensor? gate_fine, "
    "Tensor q_offsets, SymInt q_max, SymInt q_min, Tensor kv_offsets, SymInt kv_max, SymInt kv_min, "
    "SymInt topk, SymInt capacity, float scale"
)
_SAVED = (
    "Tensor fine, Tensor lse, Tensor coarse, Tensor coarse_lse, Tensor kv_indices, Tensor kv_num_blocks, "
    "Tensor q_mean, Tensor k_mean, Tensor v_mean"
)


class Call(NamedTuple):
    """The flat arguments of the forward, in the order of its schema; see `coarse_fine_attn`.

    Args:
        topk: number of tiles, at most Nkv.
        capacity: Kmax, at least topk.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate_coarse: Tensor
    gate_fine: Tensor | None
    q_offsets: Tensor
    q_max: int
    q_min: int
    kv_offsets: Tensor
    kv_max: int
    kv_min: int
    topk: int
    capacity: int
    scale: float

    @property
    def q_blocks(self) -> Blocks:
        return Blocks(offsets=self.q_offsets, max_size=self.q_max, min_size=self.q_min)

    @property
    def kv_blocks(self) -> Blocks:
        return Blocks(offsets=self.kv_offsets, max_size=self.kv_max, min_size=self.kv_min)


class Saved(NamedTuple):
    """Tensors that the forward saves for the backward, besides its arguments.

    Args:
        fine: `[B, L, H, D]`.
        lse: fp32 `[B, H, L]`.
        coarse: fp32 `[B, Nq, H, D]`.
        coarse_lse: fp32 `[B, H, Nq]`.
        kv_indices: int32 `[B, H, Nq, Kmax]`.
        kv_num_blocks: int32 `[B, H, Nq]`.
        q_mean: fp32 `[B, Nq, H, D]`.
        k_mean: fp32 `[B, Nkv, Hkv, D]`.
        v_mean: fp32 `[B, Nkv, Hkv, D]`.
    """

    fine: Tensor
    lse: Tensor
    coarse: Tensor
    coarse_lse: Tensor
    kv_indices: Tensor
    kv_num_blocks: Tensor
    q_mean: Tensor
    k_mean: Tensor
    v_mean: Tensor


_OUTPUTS = f"({', '.join(['Tensor'] * (1 + len(Saved._fields)))})"


@define_op("coarse_fine_fwd", f"({_CALL}) -> {_OUTPUTS}")
def coarse_fine_fwd(*args: Any) -> tuple[Tensor, ...]:
    """out `[B, L, H, D]`, then the fields of `Saved`, from the fields of `Call`."""
    from vsa_kernels.coarse_fine import triton_op

    call = Call(*args)
    return triton_op.forward(call) if call.q.shape[0] else _outputs_like(*args)


@torch.library.register_fake(coarse_fine_fwd)
def _outputs_like(*args: Any) -> tuple[Tensor, ...]:
    call = Call(*args)
    q, k = call.q, call.k
    (B, L, H, D), Hkv, Nq, Nkv = q.shape, k.shape[2], call.q_offsets.shape[0] - 1, call.kv_offsets.shape[0] - 1

    fp32, int32 = (partial(q.new_empty, dtype=dtype) for dtype in (torch.float32, torch.int32))
    return q.new_empty((B, L, H, D)), *Saved(
        fine=q.new_empty((B, L, H, D)),
        lse=fp32((B, H, L)),
        coarse=fp32((B, Nq, H, D)),
        coarse_lse=fp32((B, H, Nq)),
        kv_indices=int32((B, H, Nq, call.capacity)),
        kv_num_blocks=int32((B, H, Nq)),
        q_mean=fp32((B, Nq, H, D)),
        k_mean=fp32((B, Nkv, Hkv, D)),
        v_mean=fp32((B, Nkv, Hkv, D)),
    )


@torch.library.custom_op(
    "vsa_kernels::coarse_fine_bwd", mutates_args=(), schema=f"(Tensor dout, {_SAVED}, {_CALL}) -> Tensor[]"
)
def coarse_fine_bwd(*args: Any) -> list[Tensor]:
    """dq, dk, dv, dgate_coarse and, with a fine gate, dgate_fine, from dout and the fields of `Saved` and `Call`."""
    from vsa_kernels.coarse_fine import triton_op

    dout, saved, call = _backward_arguments(args)
    return triton_op.backward(dout, saved, call) if call.q.shape[0] else _gradients_like(*args)


@coarse_fine_bwd.register_fake
def _gradients_like(*args: Any) -> list[Tensor]:
    _, _, call = _backward_arguments(args)
    inputs = (call.q, call.k, call.v, call.gate_coarse, call.gate_fine)
    return [x.new_empty(tuple(x.shape)) for x in inputs if x is not None]


def _backward_arguments(args: tuple[Any, ...]) -> tuple[Any, Saved, Call]:
    end = 1 + len(Saved._fields)
    return args[0], Saved(*args[1:end]), Call(*args[end:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    # otherwise autograd would allocate a zero gradient for each of the other outputs
    ctx.set_materialize_grads(False)
    q, k, v, gate_coarse, gate_fine, q_offsets, q_max, q_min, kv_offsets, *ctx.numbers = inputs
    ctx.q_sizes = q_max, q_min
    ctx.save_for_backward(*output[1:], q, k, v, gate_coarse, gate_fine, q_offsets, kv_offsets)


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor] = []
    if dout is not None:
        # read once: under activation checkpointing a second access raises an error
        *saved, q, k, v, gate_coarse, gate_fine, q_offsets, kv_offsets = ctx.saved_tensors
        offsets = q_offsets, *ctx.q_sizes, kv_offsets
        grads = coarse_fine_bwd(dout, *saved, q, k, v, gate_coarse, gate_fine, *offsets, *ctx.numbers)
    return *grads, *(None for _ in Call._fields[len(grads) :])


register_autograd(coarse_fine_fwd, _backward, _setup_context)


def _matmul_flops(call: Call) -> int:
    # call holds shapes here; one matmul of the coarse stage, one of the fine stage over listed blocks of mean size
    (B, L, H, D), (_, S, *_) = call.q, call.k
    num_q, num_kv = call.q_offsets[0] - 1, call.kv_offsets[0] - 1
    return 2 * B * H * D * (num_q * num_kv + L * call.topk * S // num_kv)  # type: ignore[operator]


def _fwd_flops(*shapes: Any, **_: Any) -> int:
    return 2 * _matmul_flops(Call(*shapes))


def _bwd_flops(*shapes: Any, **_: Any) -> int:
    return 5 * _matmul_flops(_backward_arguments(shapes)[2])


def _result_bytes(tokens: int, heads: int, head_dim: int, num_blocks: int, capacity: int) -> int:
    q = torch.empty(1, tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    blocks = torch.empty(num_blocks + 1, dtype=torch.int32, device="meta"), 1, 1
    return sum(x.nbytes for x in _outputs_like(q, q, q, q, None, *blocks, *blocks, capacity, capacity, 1.0))


_OPS = {"coarse_fine_fwd": _fwd_flops, "coarse_fine_bwd": _bwd_flops}
declare(Operator(name="coarse_fine_attn", module=__name__, ops=_OPS, result_bytes=_result_bytes))
