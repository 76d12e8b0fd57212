"""Registered ops of block pooling. They hold no matmul, so the FLOP counter has nothing to count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.pooling import reference


@torch.library.custom_op("vsa_kernels::block_mean_pool_fwd", mutates_args=())
def block_mean_pool_fwd(x: Tensor, offsets: Tensor, max_size: int, min_size: int, backend: str = "reference") -> Tensor:
    if backend == "triton":
        from vsa_kernels.pooling import triton_pool

        return triton_pool.forward((x,), offsets, max_size, min_size)[0]
    return reference.forward(x, Blocks(offsets=offsets, max_size=max_size, min_size=min_size))


@block_mean_pool_fwd.register_fake
def _(x: Tensor, offsets: Tensor, max_size: int, min_size: int, backend: str = "reference") -> Tensor:
    B, _, H, D = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((B, offsets.shape[0] - 1, H, D), dtype=dtype)


@torch.library.custom_op("vsa_kernels::block_mean_pool_bwd", mutates_args=())
def block_mean_pool_bwd(
    grad: Tensor,
    offsets: Tensor,
    max_size: int,
    min_size: int,
    num_tokens: int,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    if backend == "triton":
        from vsa_kernels.pooling import triton_pool

        return triton_pool.backward(grad, offsets, max_size, min_size, num_tokens, dtype)
    blocks = Blocks(offsets=offsets, max_size=max_size, min_size=min_size)
    return reference.backward(grad, blocks, num_tokens, dtype)


@block_mean_pool_bwd.register_fake
def _(
    grad: Tensor,
    offsets: Tensor,
    max_size: int,
    min_size: int,
    num_tokens: int,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    B, _, H, D = grad.shape
    return grad.new_empty((B, num_tokens, H, D), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, offsets, max_size, min_size, backend = inputs
    ctx.save_for_backward(offsets)
    ctx.constants = (max_size, min_size, x.shape[1], x.dtype, backend)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return block_mean_pool_bwd(grad, offsets, *ctx.constants), None, None, None, None


block_mean_pool_fwd.register_autograd(_backward, setup_context=_setup_context)
