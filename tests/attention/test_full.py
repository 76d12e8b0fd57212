from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from vsa.attention.context import AttnContext
from vsa.attention.dense import attn_in_parts, cross_attn, query_parts
from vsa.attention.full import FullAttention, dense_attn
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment


def softmax_attn(q, k, v):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def test_samples_do_not_see_each_other():
    torch.manual_seed(0)
    method = FullAttention(dim=8, num_heads=2, head_dim=4)
    segments = [Segment((1, 1, 3), "text"), Segment((2, 3, 2)), Segment((1, 2, 3), "image", 1)]
    layout = method.layout(segments, "cpu")
    q, k, v = torch.randn(3, 2, 21, 2, 4).unbind(0)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(1))
    out = method.attend_combine(q, k, v, method.project(torch.empty(2, 21, 8)), ctx)
    expected = torch.cat([softmax_attn(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in ((0, 15), (15, 21))], dim=1)
    assert torch.allclose(out.double(), expected, atol=1e-6)
    assert not torch.allclose(out.double(), softmax_attn(q, k, v), atol=1e-3)
    assert method.pairs(layout, topk=1) == 15**2 + 6**2
    assert method.extra_modules() == {}


def test_grouped_kv_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    expected = softmax_attn(q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))
    assert dense_attn(q, k, v).double() == pytest.approx(expected, abs=1e-6)


def test_queries_in_parts_have_the_same_outputs_and_gradients():
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 3, 8, dtype=torch.float64) for n in (12, 5, 5, 12))
    mask = torch.rand(2, 1, 1, 5) < 0.6
    mask[..., 0] = True

    def results(attend, mask):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, mask)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    for key_mask in (mask, None):
        expected = results(dense_attn, key_mask)
        for parts in (2, 3, 4):
            torch.testing.assert_close(results(lambda *x, n=parts: attn_in_parts(*x, n), key_mask), expected)
    # the mask of each sample belongs to all of its parts
    assert not torch.allclose(results(dense_attn, mask.flip(0))[0], results(dense_attn, mask)[0])


def test_parts_are_one_compiled_graph():
    def attend(q, k, v, mask):
        return attn_in_parts(q, k, v, mask, query_parts(q.shape[1], shortest=3))

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 8, requires_grad=True) for n in (12, 5, 5))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        torch.autograd.grad(compiled(q, k, v, mask).square().sum(), (q, k, v)),
        torch.autograd.grad(dense_attn(q, k, v, mask).square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_queries_are_divided_evenly():
    for length in (1, 100, 4096, 16384, 23296, 32760, 75600, 65537):
        parts = query_parts(length)
        assert length % parts == 0
        assert parts in (1, 2, 4, 8)
        assert parts == 1 or length // parts >= 2048
    assert [query_parts(n) for n in (4095, 16384, 23296, 32760, 75600)] == [1, 8, 8, 8, 8]


def test_cross_attention_of_a_training_step(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 64, dtype=dtype).to(device) for n in (4096, 77, 77, 4096))
    mask = (torch.arange(77) < 40)[None, None, None].to(device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    actual = torch.autograd.grad(cross_attn(*leaves, mask), leaves, dout)
    twin = [x.detach().double().requires_grad_() for x in (q, k[:, :40], v[:, :40])]
    expected = torch.autograd.grad(softmax_attn(*twin), twin, dout.double())
    for a, b in zip(actual, expected, strict=True):
        b = b if a.shape == b.shape else torch.nn.functional.pad(b, (0, 0, 0, 0, 0, 37))
        assert (a.double() - b).norm() < 1e-2 * b.norm()
        assert (a.double() - 1.02 * b).norm() > 1e-2 * b.norm()


@pytest.mark.parametrize("keys", [1, 2, 7, 15, 16, 40])
def test_a_query_of_nan_is_not_hidden(keys):
    """As torch's kernel for CPUs does for fewer than 16 keys; nothing else changes by a bit."""
    q, k, v = (torch.randn(1, n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in (10, keys, keys))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert torch.equal(dense_attn(q, k, v), expected)
    q[0, 3, 1, 2] = math.nan
    found = dense_attn(q, k, v)
    assert found[0, 3, 1].isnan().all()
    assert torch.equal(found[:, :3], expected[:, :3])
    assert torch.equal(found[:, :, 0], expected[:, :, 0])


@pytest.mark.parametrize("keys", [1, 2, 7, 15, 16, 40])
def test_keys_of_nan_are_not_hidden(keys):
    """As those of a projection with damaged weights are: all of them."""
    q, k, v = (torch.randn(1, n, 4, 8)[:, :, :h] for n, h in ((10, 4), (keys, 2), (keys, 2)))
    for mask in (None, torch.ones(1, 1, 1, keys, dtype=torch.bool)):
        assert dense_attn(q, torch.full_like(k, math.nan), v, mask).isnan().all()
        assert dense_attn(q, k, v, mask).isfinite().all()
