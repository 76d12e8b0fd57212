"""`block_mean_pool` against a loop over slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import Blocks, block_mean_pool


def loop(x, sizes):
    return torch.stack([part.mean(1) for part in x.split(sizes, dim=1)], 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 2), st.integers(1, 3), st.booleans())
def test_matches_a_loop(sizes, batch, heads, permuted):
    x = torch.randn(batch, sum(sizes), heads, 5, dtype=torch.float64)
    if permuted:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x.requires_grad_()
    got, want = block_mean_pool(x, Blocks.from_sizes(sizes)), loop(x, sizes)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (got, want)))


@pytest.mark.parametrize("sizes", [[4, 4, 4], [3, 5, 1]], ids=str)
def test_half_inputs_are_averaged_in_fp32(sizes, device):
    x = torch.randn(2, sum(sizes), 3, 8, device=device).bfloat16().requires_grad_()
    got = block_mean_pool(x, Blocks.from_sizes(sizes, device))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, loop(x.float(), sizes))
    # the control: averaging in bf16 is visibly worse
    assert (loop(x, sizes).float() - got).abs().max() > 1e-4
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert grad.dtype == torch.bfloat16


def test_gradcheck():
    x = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    for sizes in ([2, 2, 2], [1, 3, 2]):
        assert torch.autograd.gradcheck(lambda x, s=sizes: block_mean_pool(x, Blocks.from_sizes(s)), (x,))


def test_nan_stays_in_its_block(device):
    x = torch.randn(1, 9, 1, 2, device=device)
    x[:, 4] = torch.nan
    got = block_mean_pool(x, Blocks.from_sizes([3, 4, 2], device))
    assert got.isnan().any(-1).squeeze().tolist() == [False, True, False]


def test_bad_input():
    with pytest.raises(ValueError, match="x must be a float"):
        block_mean_pool(torch.zeros(1, 4, 2), Blocks.from_sizes([4]))
