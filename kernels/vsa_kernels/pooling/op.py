"""Registered ops of block pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.operators import Operator, declare
from vsa_kernels.pooling import reference


@torch.library.custom_op("vsa_kernels::block_mean_pool_fwd", mutates_args=())
def block_mean_pool_fwd(x: Tensor, offsets: Tensor, max_size: int, min_size: int, backend: str = "reference") -> Tensor:
    blocks = Blocks(offsets=offsets, max_size=max_size, min_size=min_size)
    if not x.shape[0]:
        return _means_like(x, offsets)
    if backend == "triton":
        from vsa_kernels.pooling import triton_pool

        return triton_pool.forward((x,), blocks.offsets, max_size, min_size)[0]
    return reference.forward(x, blocks)


def _means_like(x: Tensor, offsets: Tensor, *_args: Any) -> Tensor:
    B, _, H, D = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((B, offsets.shape[0] - 1, H, D), dtype=dtype)


block_mean_pool_fwd.register_fake(_means_like)


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
    blocks = Blocks(offsets=offsets, max_size=max_size, min_size=min_size)
    if not grad.shape[0]:
        return _gradient_like(grad, offsets, max_size, min_size, num_tokens, dtype)
    if backend == "triton":
        from vsa_kernels.pooling import triton_pool

        return triton_pool.backward(grad, blocks.offsets, max_size, min_size, num_tokens, dtype)
    return reference.backward(grad, blocks, num_tokens, dtype)


def _gradient_like(grad: Tensor, *args: Any) -> Tensor:
    B, _, H, D = grad.shape
    _, _, _, num_tokens, dtype, *_ = args
    return grad.new_empty((B, num_tokens, H, D), dtype=dtype)


block_mean_pool_bwd.register_fake(_gradient_like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, offsets, max_size, min_size, backend = inputs
    ctx.save_for_backward(offsets)
    ctx.constants = (max_size, min_size, x.shape[1], x.dtype, backend)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return block_mean_pool_bwd(grad, offsets, *ctx.constants), None, None, None, None


block_mean_pool_fwd.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("vsa_kernels::block_mean_and_similarity", mutates_args=())
def block_mean_and_similarity_op(
    x: Tensor, center: Tensor | None, offsets: Tensor, max_size: int, min_size: int, backend: str = "reference"
) -> tuple[Tensor, Tensor]:
    if not x.shape[0]:
        return _means_and_similarity_like(x, center, offsets)
    if backend == "triton":
        from vsa_kernels.pooling import triton_pool

        return triton_pool.mean_and_similarity(x, center, offsets, max_size, min_size)
    return reference.mean_and_similarity(x, center, Blocks(offsets=offsets, max_size=max_size, min_size=min_size))


def _means_and_similarity_like(x: Tensor, center: Tensor | None, offsets: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    means = _means_like(x, offsets)
    return means, means.new_empty(means.shape[:3])


block_mean_and_similarity_op.register_fake(_means_and_similarity_like)

_OPS = {"block_mean_pool_fwd": None, "block_mean_pool_bwd": None}
declare(Operator(name="block_mean_pool", module=__name__, ops=_OPS))
declare(Operator(name="block_mean_and_similarity", module=__name__, ops={"block_mean_and_similarity": None}))
