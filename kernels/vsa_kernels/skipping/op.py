"""Registered op of skipping attention (forward only): fake and FLOP formula around the backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import BlockIndex, Blocks
from vsa_kernels.modes import without_autocast
from vsa_kernels.operators import Operator, declare
from vsa_kernels.skipping import reference


@torch.library.custom_op("vsa_kernels::skipping_fwd", mutates_args=())
def skipping_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    max_blocks: int | None,
    q_offsets: Tensor,
    q_max: int,
    q_min: int,
    kv_offsets: Tensor,
    kv_max: int,
    kv_min: int,
    thresholds: Tensor,
    slice_rows: int,
    keeps_sum: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if not q.shape[0]:
        return _outputs_like(q, k, v, kv_indices)
    index = BlockIndex(kv_indices=kv_indices, kv_num_blocks=kv_num_blocks, max_blocks=max_blocks)
    q_blocks = Blocks(offsets=q_offsets, max_size=q_max, min_size=q_min)
    kv_blocks = Blocks(offsets=kv_offsets, max_size=kv_max, min_size=kv_min)
    arguments = (q, k, v, index, q_blocks, kv_blocks, thresholds, slice_rows, keeps_sum, scale)
    if backend == "triton":
        from vsa_kernels.skipping import triton_skipping

        return triton_skipping.forward(*arguments)
    with without_autocast(q.device):
        return reference.forward(*arguments)


def _outputs_like(q: Tensor, _k: Tensor, _v: Tensor, kv_indices: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    B, L, H, D = q.shape
    return q.new_empty((B, L, H, D)), q.new_empty((B, H, kv_indices.shape[2]), dtype=torch.int32)


skipping_fwd.register_fake(_outputs_like)


def _fwd_flops(
    q_shape: Any, k_shape: Any, v_shape: Any, lists: Any, counts: Any, max_blocks: Any, q_offsets: Any, q_max: Any,
    q_min: Any, kv_offsets: Any, *args: Any, out_shape: Any = None, **_: Any,
) -> int:  # fmt: skip
    # counted without skips, which the host does not know
    B, L, H, D = q_shape
    list_length = lists[-1] if max_blocks is None else max_blocks
    return 4 * B * H * L * D * list_length * k_shape[1] // (kv_offsets[0] - 1)


declare(Operator(name="skipping_attn", module=__name__, ops={"skipping_fwd": _fwd_flops}))
