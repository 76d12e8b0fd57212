from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsa_kernels import BlockIndex, Blocks

from tests.sizes import SIZES


@given(st.lists(SIZES.block, min_size=1, max_size=8))
def test_blocks_of_sizes(sizes):
    blocks = Blocks.from_sizes(sizes)
    assert (blocks.num, blocks.max_size, blocks.min_size) == (len(sizes), max(sizes), min(sizes))
    assert blocks.sizes.tolist() == sizes
    assert blocks.offsets.dtype == torch.int32
    assert int(blocks.offsets[-1]) == sum(sizes)


@pytest.mark.parametrize("sizes", [[], [3, 0]], ids=str)
def test_blocks_hold_tokens(sizes):
    with pytest.raises(ValueError, match="positive block sizes"):
        Blocks.from_sizes(sizes)


@given(st.integers(0, 1 << 16), SIZES.columns)
def test_index_and_dense_mask_are_inverse(seed, columns):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, 4, columns, generator=g) < 0.4
    index = BlockIndex.from_dense(mask)
    assert torch.equal(index.to_dense(columns), mask)
    for row, count in zip(index.kv_indices.view(-1, columns), index.kv_num_blocks.view(-1), strict=True):
        indices = row[: int(count)]
        assert torch.equal(indices, indices.sort().values)


@given(st.integers(0, 1 << 16), SIZES.columns, st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_a_mask_lists_its_kept_blocks_first_and_then_the_others(seed, columns, share):
    mask = torch.rand(2, 3, 5, columns + 1, generator=torch.Generator().manual_seed(seed)) < share
    for view in (mask, mask[:, :1], mask.transpose(0, 1), mask[:, :, ::2, 1:], mask[:1].expand(4, -1, -1, -1)):
        index = BlockIndex.from_dense(view)
        expected = torch.sort((~view).to(torch.int8), dim=-1, stable=True).indices
        assert torch.equal(index.kv_indices.long(), expected)
        assert (index.kv_indices.dtype, index.kv_num_blocks.dtype) == (torch.int32, torch.int32)
        assert torch.equal(index.kv_num_blocks, view.sum(-1, dtype=torch.int32))


def test_a_tensor_with_neighbouring_entries_is_not_copied():
    lists = torch.arange(24, dtype=torch.int32).view(2, 1, 3, 4)
    for x in (lists, lists.expand(2, 5, 3, 4), lists[..., 1:], lists[:, :, ::2], lists[..., :1], lists[..., :0]):
        index = BlockIndex(kv_indices=x, kv_num_blocks=x.sum(-1, dtype=torch.int32))
        assert index.kv_indices is x
    offsets = torch.arange(5, dtype=torch.int32)
    assert Blocks(offsets=offsets, max_size=1, min_size=1).offsets is offsets


def test_a_view_is_copied_once_however_often_it_is_expanded():
    x = torch.arange(24, dtype=torch.int32).view(1, 1, 4, 6)
    for view in (x[..., ::2], x.transpose(2, 3)):
        wide = view.expand(2, 5, -1, -1)
        index = BlockIndex(kv_indices=wide, kv_num_blocks=wide[..., 0])
        assert torch.equal(index.kv_indices, wide)
        assert index.kv_indices.stride()[:2] == (0, 0)
        assert index.kv_indices.stride(3) == index.kv_num_blocks.stride(2) == 1
        assert torch.equal(index.kv_num_blocks, wide[..., 0])
