"""Registered ops of gathered attention (forward only) and of grouping, with their fakes and the FLOP formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks
from vsa_kernels.block_sparse.mask import lse_dtype
from vsa_kernels.gathered import reference
from vsa_kernels.gathered.groups import TileGroups
from vsa_kernels.modes import without_autocast
from vsa_kernels.operators import Operator, declare


@torch.library.custom_op(
    "vsa_kernels::gathered_fwd",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor members, Tensor kv_indices, Tensor kv_num_blocks, "
    "Tensor? kv_members, Tensor? order, Tensor q_offsets, SymInt q_max, SymInt q_min, "
    "Tensor kv_offsets, SymInt kv_max, SymInt kv_min, float scale, str backend) -> (Tensor, Tensor)",
)
def gathered_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    members, kv_indices, counts, kv_members, order, *sides, scale, backend = rest
    groups = TileGroups(
        members=members, kv_indices=kv_indices, kv_num_blocks=counts, kv_members=kv_members, order=order
    )
    q_blocks, kv_blocks = (Blocks(offsets=o, max_size=m, min_size=n) for o, m, n in (sides[:3], sides[3:]))
    if not q.shape[0]:
        return _outputs_like(q)
    if backend == "triton":
        from vsa_kernels.gathered import triton_fwd

        return triton_fwd.forward(q, k, v, groups, q_blocks, kv_blocks, scale)
    with without_autocast(q.device):
        return reference.forward(q, k, v, groups, q_blocks, kv_blocks, scale)


def _outputs_like(q: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    B, L, H, D = q.shape
    return q.new_empty((B, L, H, D)), q.new_empty((B, H, L), dtype=lse_dtype(q.dtype))


gathered_fwd.register_fake(_outputs_like)


def _fwd_flops(q_shape: Any, k_shape: Any, v_shape: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    # two matmuls over the capacity of the lists: the host does not know their lengths
    B, L, H, D = q_shape
    capacity, num_kv = rest[1][-1], rest[8][0] - 1
    return 4 * B * H * L * D * capacity * k_shape[1] // num_kv


@torch.library.custom_op("vsa_kernels::group_tiles", mutates_args=())
def group_tiles_op(mask: Tensor, size: int, backend: str = "reference") -> Tensor:
    if not mask.shape[0]:
        return _members_like(mask, size)
    if backend == "triton":
        from vsa_kernels.gathered import triton_group

        return triton_group.group(mask, size)
    return reference.group(mask, size)


def _members_like(mask: Tensor, size: int, *_args: Any) -> Tensor:
    B, H, num_q, _ = mask.shape
    return mask.new_empty((B, H, -(-num_q // size), size), dtype=torch.int32)


group_tiles_op.register_fake(_members_like)

declare(Operator(name="gathered_attn", module=__name__, ops={"gathered_fwd": _fwd_flops}))
declare(Operator(name="group_tiles", module=__name__, ops={"group_tiles": None}))
