"""The Triton kernels of block pooling against sums written out block by block in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsa_kernels import Blocks, block_mean_and_similarity, block_mean_pool

from tests.kernels.interpreted import further, fuzz, poisoned_outputs  # noqa: F401 (the fixture)
from tests.kernels.test_pooling import pairs_of

SIZES = [[8, 8, 8], [3, 17, 1, 8], [64, 64], [256, 31]]

ANY_SHAPE = (
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(1, 2),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([1, 3, 8, 16, 80, 130, 256]),
    st.sampled_from(["plain", "heads first", "packed", "dims apart"]),
)


def kernels():
    # triton is imported by those tests only that run
    from vsa_kernels.pooling import triton_pool

    return triton_pool


def dtypes(device):
    """The interpreter is wrong in half precision."""
    return [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def loop(x, sizes):
    return torch.stack([part.double().mean(1) for part in x.split(sizes, dim=1)], 1)


def arguments(sizes, device):
    blocks = Blocks.from_sizes(sizes, device)
    return blocks.offsets, blocks.max_size, blocks.min_size


def tokens(shape, layout, dtype, device):
    """Random `[B, L, H, D]` in one of the layouts a model produces."""
    B, L, H, D = shape
    if layout == "heads first":
        return torch.randn(B, H, L, D, device=device).to(dtype).transpose(1, 2)
    if layout == "packed":
        return torch.randn(B, L, 3, H, D, device=device).to(dtype)[:, :, 1]
    if layout == "dims apart":
        return torch.randn(B, L, D, H, device=device).to(dtype).transpose(2, 3)
    return torch.randn(B, L, H, D, device=device).to(dtype)


def assert_means(got, x, sizes):
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), loop(x, sizes), rtol=1e-5, atol=1e-6)


@fuzz(10, 25)
@given(*ANY_SHAPE)
def test_means_of_any_shape(triton_device, sizes, batch, heads, dim, layout):
    for dtype in dtypes(triton_device):
        xs = [tokens((batch, sum(sizes), n, dim), layout, dtype, triton_device) for n in heads]
        actual = kernels().forward(xs, *arguments(sizes, triton_device))
        assert len(actual) == len(xs)
        for mean, x in zip(actual, xs, strict=True):
            assert_means(mean, x, sizes)


test_means_of_further_shapes = pytest.mark.slow(
    fuzz(25, 25)(given(*ANY_SHAPE)(test_means_of_any_shape.hypothesis.inner_test))
)


@pytest.mark.parametrize(
    ("sizes", "dim"), [*((sizes, 64) for sizes in SIZES), (SIZES[1], 128), *(further(SIZES[i], 128) for i in (0, 2, 3))]
)
def test_means_and_gradient_at_real_head_dims(triton_device, sizes, dim):
    offsets = arguments(sizes, triton_device)
    for dtype in dtypes(triton_device):
        xs = [tokens((1, sum(sizes), n, dim), "plain", dtype, triton_device) for n in (9, 2, 3)]
        for mean, x in zip(kernels().forward(xs, *offsets), xs, strict=True):
            assert_means(mean, x, sizes)
            actual = kernels().backward(mean, *offsets, sum(sizes), dtype)
            # by a tensor: PyTorch on a GPU multiplies by the rounded inverse of a number
            size = torch.tensor(sizes, device=triton_device)
            expected = torch.repeat_interleave((mean / size[:, None, None]).to(dtype), size, 1)
            assert actual.is_contiguous()
            assert torch.equal(actual, expected)


def test_gradient_of_a_strided_mean(triton_device):
    sizes = [2, 5]
    grad = torch.randn(2, 2, 7, 3, device=triton_device).transpose(2, 3)
    actual = kernels().backward(grad, *arguments(sizes, triton_device), 7, torch.float32)
    size = torch.tensor(sizes, device=triton_device)
    expected = torch.repeat_interleave(grad / size[:, None, None], size, 1)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [5, 11, 3]], ids=str)
def test_nothing_leaks_from_the_neighbours(triton_device, sizes):
    # heads, dims and tokens that do not exist for the tensor hold NaN, and so does the block in the middle
    store = torch.full((1, sum(sizes) + 8, 5, 24), torch.nan, device=triton_device)
    x = store[:, : sum(sizes), 1:4, :20]
    x.copy_(torch.randn_like(x))
    x[:, sizes[0] : sizes[0] + sizes[1]] = torch.nan
    (actual,) = kernels().forward((x,), *arguments(sizes, triton_device))
    assert actual.isnan().flatten(2).all(-1).tolist() == [[False, True, False]]
    assert not actual[:, ::2].isnan().any()
    dx = kernels().backward(actual, *arguments(sizes, triton_device), sum(sizes), torch.float32)
    inside = torch.arange(sum(sizes), device=triton_device)
    middle = (inside >= sizes[0]) & (inside < sizes[0] + sizes[1])
    assert torch.equal(dx.isnan().flatten(2).any(-1)[0], middle)


def test_sums_are_fp32(triton_device):
    # a half-precision sum of so many ones and thirds loses the thirds
    x = torch.ones((1, 256, 1, 16), device=triton_device)
    for dtype in dtypes(triton_device):
        values = x.to(dtype)
        values[:, ::2] = 1 / 3
        (actual,) = kernels().forward((values,), *arguments([256], triton_device))
        torch.testing.assert_close(actual.double(), loop(values, [256]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 9, 2]], ids=str)
def test_public_call_and_its_gradient(triton_device, sizes):
    blocks = Blocks.from_sizes(sizes, triton_device)
    x = torch.randn(2, sum(sizes), 3, 16, device=triton_device, requires_grad=True)
    actual = block_mean_pool(x, blocks, backend="triton")
    assert_means(actual.detach(), x.detach(), sizes)
    grad = torch.randn_like(actual)
    (dx,) = torch.autograd.grad(actual, x, grad)
    expected = torch.autograd.grad(loop(x, sizes), x, grad.double())[0]
    torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [2, 4, 3]], ids=str)
def test_opcheck(triton_device, sizes):
    from vsa_kernels.pooling.op import block_mean_pool_bwd, block_mean_pool_fwd

    offsets = arguments(sizes, triton_device)
    x = tokens((2, 9, 3, 4), "heads first", torch.float32, triton_device).requires_grad_()
    torch.library.opcheck(block_mean_pool_fwd, (x, *offsets, "triton"))
    grad = tokens((2, 3, 3, 4), "heads first", torch.float32, triton_device)
    torch.library.opcheck(block_mean_pool_bwd, (grad, *offsets, 9, torch.float32, "triton"))


@pytest.mark.parametrize("layout", ["plain", *map(further, ("packed", "heads first", "dims apart"))])
@pytest.mark.parametrize("sizes", [[8, 8], [3, 17, 1]], ids=str)
def test_similarity(triton_device, sizes, layout):
    for dtype in dtypes(triton_device):
        for dim, centered in ((20, True), (64, False)):
            x = tokens((2, sum(sizes), 3, dim), layout, dtype, triton_device) + 0.5
            # a token of zeros, and blocks as different in length as in direction
            x = (x * torch.rand(sum(sizes), 1, 1, device=triton_device).to(dtype)).clone()
            x[:, 1] = 0
            center = x.float().mean(1) if centered else None
            actual = block_mean_and_similarity(
                x, Blocks.from_sizes(sizes, triton_device), center=center, backend="triton"
            )
            means, similarity = (y.to(triton_device) for y in pairs_of(x, sizes, center))
            assert actual[0].dtype == actual[1].dtype == torch.float32
            torch.testing.assert_close(actual[0].double(), means, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(actual[1].double(), similarity, rtol=1e-5, atol=1e-6)
            # the control: similarity of tokens as long as they are is another
            assert (actual[0].double().square().sum(-1) - similarity).abs().max() > 1e-2


def test_strides_past_two_billion(triton_device):
    if triton_device.type == "cpu":
        pytest.skip("needs 6 GB of device memory")
    sizes, stride = [64, 70], 20_000_000
    store = torch.zeros(stride * 134, dtype=torch.bfloat16, device=triton_device)
    x = store.as_strided((1, 134, 2, 64), (stride * 134, stride, 64, 1))
    x.normal_()
    (actual,) = kernels().forward((x,), *arguments(sizes, triton_device))
    assert_means(actual, x.contiguous(), sizes)


def test_named_backend_says_why_it_refuses():
    x = torch.zeros(1, 4, 1, 16)
    blocks = Blocks.from_sizes([4])
    with pytest.raises(ValueError, match="backend must be reference, triton or None"):
        block_mean_pool(x, blocks, backend="gather")
    with pytest.raises(ValueError, match="float64"):
        block_mean_pool(x.double(), blocks, backend="triton")
