"""`block_mean_pool` against a loop over slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import Blocks, block_mean_and_similarity, block_mean_pool
from vsa_kernels.pooling.op import block_mean_and_similarity_op

from tests.sizes import SIZES


def loop(x, sizes):
    return torch.stack([part.mean(1) for part in x.split(sizes, dim=1)], 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES.block, min_size=1, max_size=6), st.integers(1, 2), st.integers(1, 3), st.booleans())
def test_matches_a_loop(sizes, batch, heads, permuted):
    x = torch.randn(batch, sum(sizes), heads, 5, dtype=torch.float64)
    if permuted:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x.requires_grad_()
    actual, expected = block_mean_pool(x, Blocks.from_sizes(sizes)), loop(x, sizes)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (actual, expected)))


@pytest.mark.parametrize("sizes", [[4, 4, 4], [3, 5, 1]], ids=str)
def test_half_inputs_are_averaged_in_fp32(sizes, device):
    x = torch.randn(2, sum(sizes), 3, 8, device=device).bfloat16().requires_grad_()
    actual = block_mean_pool(x, Blocks.from_sizes(sizes, device))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, loop(x.float(), sizes))
    # the control: averaging in bf16 is visibly worse
    assert (loop(x, sizes).float() - actual).abs().max() > 1e-4
    (grad,) = torch.autograd.grad(actual.sum(), x)
    assert grad.dtype == torch.bfloat16


def test_gradcheck():
    x = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    for sizes in ([2, 2, 2], [1, 3, 2]):
        assert torch.autograd.gradcheck(lambda x, s=sizes: block_mean_pool(x, Blocks.from_sizes(s)), (x,))


def test_nan_stays_in_its_block(device):
    x = torch.randn(1, 9, 1, 2, device=device)
    x[:, 4] = torch.nan
    actual = block_mean_pool(x, Blocks.from_sizes([3, 4, 2], device))
    assert actual.isnan().any(-1).squeeze().tolist() == [False, True, False]
    for center in (None, torch.ones(1, 1, 2, device=device)):
        results = block_mean_and_similarity(x, Blocks.from_sizes([3, 4, 2], device), center=center)
        for result in results:
            assert result.reshape(3, -1).isnan().any(-1).tolist() == [False, True, False]


def pairs_of(x, sizes, center=None):
    """Means, and the mean cosine of all pairs of a block's tokens, in fp64 and block by block."""
    x = x.double() if center is None else x.double() - center.double()[:, None]
    similarity = []
    for part in x.split(sizes, dim=1):
        lengths = part.norm(dim=-1, keepdim=True)
        units = torch.where(lengths > 0, part / lengths, 0)
        similarity.append(torch.einsum("blhd,bmhd->bhlm", units, units).mean((2, 3)))
    return loop(x, sizes), torch.stack(similarity, 1)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [3, 5, 1]], ids=str)
def test_similarity_is_the_mean_cosine_of_all_pairs(sizes, device):
    x = torch.randn(2, sum(sizes), 3, 5, dtype=torch.float64, device=device) + 0.3
    x[:, 2] = 0
    for center in (None, x.mean(1)):
        actual = block_mean_and_similarity(x, Blocks.from_sizes(sizes, device), center=center)
        for y, expected in zip(actual, pairs_of(x, sizes, center), strict=True):
            torch.testing.assert_close(y, expected)
    half = block_mean_and_similarity(x.bfloat16().requires_grad_(), Blocks.from_sizes(sizes, device))
    assert [y.dtype for y in half] == [torch.float32] * 2
    assert not any(y.requires_grad for y in half)


def test_similarity_of_known_directions(device):
    # one direction at several lengths; both axes; opposite tokens; three tokens of zeros and one that is not
    blocks = [[(1, 0), (5, 0), (2, 0), (0.1, 0)], [(1, 0), (0, 3)] * 2, [(1, 0), (-7, 0)] * 2, [(0, 0)] * 3 + [(3, 4)]]
    x = torch.tensor(blocks, device=device).reshape(1, 16, 1, 2)
    _, similarity = block_mean_and_similarity(x, Blocks.from_sizes([4] * 4, device))
    torch.testing.assert_close(similarity.flatten().tolist(), [1.0, 0.5, 0.0, 1 / 16])


def test_opcheck_similarity(device):
    blocks = Blocks.from_sizes([2, 4, 3], device)
    x, center = torch.randn(2, 9, 3, 4, device=device), torch.randn(2, 3, 4, device=device)
    args = (x, center, blocks.offsets, blocks.max_size, blocks.min_size)
    torch.library.opcheck(block_mean_and_similarity_op, args, test_utils=("test_schema", "test_faketensor"))
    empty = block_mean_and_similarity(x[:0], blocks)
    assert [y.shape for y in empty] == [(0, 3, 3, 4), (0, 3, 3)]


def test_a_center_that_does_not_fit():
    x, blocks = torch.zeros(1, 4, 2, 3), Blocks.from_sizes([4])
    with pytest.raises(ValueError, match=r"center must be floating \[1, 2, 3\], got torch.float32 \[2, 3\]"):
        block_mean_and_similarity(x, blocks, center=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="center must be on cpu like x, got meta"):
        block_mean_and_similarity(x, blocks, center=torch.zeros(1, 2, 3, device="meta"))


def test_bad_input():
    with pytest.raises(ValueError, match="x must be a float"):
        block_mean_pool(torch.zeros(1, 4, 2), Blocks.from_sizes([4]))
