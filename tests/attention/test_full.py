from __future__ import annotations

import pytest
import torch

from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention, dense_attn
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
    ctx = AttnContext(layout=layout, topk=1)
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
