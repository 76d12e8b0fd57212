"""Which kernel runs when, and the workspace of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from vsa_kernels import BlockIndex, Blocks, block_sparse_kernels, set_workspace_limit, workspace_limit
from vsa_kernels.block_sparse import dispatch
from vsa_kernels.block_sparse.mask import BlockMask
from vsa_kernels.testing import Case, make_case
from vsa_kernels.workspace import parts_of

from tests.kernels.test_hopper_bwd128 import limited
from tests.kernels.test_hopper_fwd import kernels

PLAIN = ("triton_bwd", "triton_bwd")


def case_of(q_size: int, kv_size: int, head_dim: int, **changed: Any) -> Case:
    given = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "dtype": torch.bfloat16} | changed
    return make_case([q_size] * 2, [kv_size] * 3, **given)


@pytest.mark.parametrize(
    ("sizes", "head_dim", "names"),
    [
        ((64, 64), 64, ("hopper_fwd", *PLAIN)),
        ((64, 64), 128, ("hopper_fwd", *PLAIN)),
        ((128, 64), 128, ("hopper_fwd", *PLAIN)),
        ((128, 128), 64, ("hopper_fwd", *PLAIN)),
        ((96, 128), 64, ("hopper_fwd128", *PLAIN)),
        ((128, 128), 128, ("hopper_fwd128", "hopper_bwd128", "hopper_bwd128")),
        ((96, 65), 128, ("hopper_fwd128", "hopper_bwd128", "hopper_bwd128")),
        ((64, 128), 128, ("triton_fwd", *PLAIN)),
        ((128, 128), 96, ("triton_fwd", *PLAIN)),
    ],
    ids=str,
)
def test_the_kernels_of_hopper_by_sizes(sizes, head_dim, names):
    case = case_of(*sizes, head_dim)
    with mock.patch.object(dispatch, "capability", return_value=(9, 0)):
        assert kernels(case)[:3] == names
        assert kernels(replace(case, q=case.q.float()))[:3] == ("triton_fwd", *PLAIN)
    for chip in ((8, 0), (10, 0), (12, 0)):
        with mock.patch.object(dispatch, "capability", return_value=chip):
            assert kernels(case) == ("triton_fwd", *PLAIN, 0)


def test_long_rows_of_tiles_of_64_are_computed_in_ranges():
    for tokens, long in ((98_304, False), (98_368, True)):
        x = torch.empty(1, tokens, 1, 128, dtype=torch.bfloat16, device="meta")
        lists = torch.empty(1, 1, tokens // 64, 1, dtype=torch.int32, device="meta")
        blocks = Blocks(
            offsets=torch.empty(tokens // 64 + 1, dtype=torch.int32, device="meta"), max_size=64, min_size=64
        )
        index = BlockIndex(kv_indices=lists, kv_num_blocks=lists[..., 0])
        mask = BlockMask(index=index, q_blocks=blocks, kv_blocks=blocks, kv_valid=None)
        names = ("triton_ranges", "triton_bwd", "triton_ranges") if long else ("hopper_fwd", *PLAIN)
        assert dispatch.kernels_of(x, x, x, mask, (9, 0))[:3] == names
        assert dispatch.kernels_of(x, x, x, mask, (8, 0))[:3] == ("triton_fwd", *PLAIN)


def test_the_workspace_decides_about_dq():
    """ds of a head: 2 x 3 pairs of 128 x 128 numbers of 2 bytes; a longer list than any is not counted."""
    case, head = case_of(128, 128, 128, density=1.0), 2 * 3 * 128 * 128 * 2
    with mock.patch.object(dispatch, "capability", return_value=(9, 0)):
        for room, dq, size in (
            (4 * head, "hopper_bwd128", 4 * head),
            (4 * head - 1, "hopper_bwd128", 2 * head),
            (2 * head - 1, "triton_bwd", 0),
            (0, "triton_bwd", 0),
        ):
            with limited(room):
                assert kernels(case) == ("hopper_fwd128", "hopper_bwd128", dq, size)
        bound = replace(case, index=replace(case.index, max_blocks=1))
        assert kernels(bound).workspace == 4 * head // 3


def test_parts_cover_all_heads_in_whole_groups_within_the_limit():
    for batch, group, kv_heads, room in (
        (b, g, k, r) for b in (1, 3) for g in (1, 3) for k in (1, 5) for r in range(50)
    ):
        with limited(10 * room + 9):
            parts = parts_of(batch, group * kv_heads, kv_heads, 10)
        assert (parts is None) == (room < group)
        if parts:
            assert parts.size == 10 * parts.samples * parts.heads <= 10 * room + 9
            assert parts.heads % group == 0
            assert parts == (batch, group * kv_heads, parts.size) or (
                parts.samples == 1 and room < batch * group * kv_heads
            )
            # one head more in each part would make no fewer parts
            fewest = -(-kv_heads // min(kv_heads, room // group))
            assert -(-group * kv_heads // parts.heads) == fewest


def test_a_limit_is_bytes():
    before = workspace_limit()
    with pytest.raises(ValueError, match=r"must be at least 0 bytes, got -1$"):
        set_workspace_limit(-1)
    assert workspace_limit() == before == 4 << 30


def test_the_kernels_of_a_call_can_be_asked_for(device):
    case = case_of(4, 4, 16, dtype=torch.float32, device=device)
    call = {"q": case.q, "k": case.k, "v": case.v, "index": case.index, **case.blocks}
    for backend in ("reference", "gather"):
        assert block_sparse_kernels(**call, backend=backend) == (backend, backend, backend, 0)
    expected = "triton" if device.type == "cuda" else "gather"
    assert block_sparse_kernels(**call).forward.startswith(expected)
    with pytest.raises(ValueError, match="backend must be one of"):
        block_sparse_kernels(**call, backend="cuda")
