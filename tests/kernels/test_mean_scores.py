"""Logits between block means against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import mean_scores
from vsa_kernels.selection.op import mean_scores_op


def means(heads, kv_heads, head_dim, device="cpu"):
    g = torch.Generator().manual_seed(0)
    sizes = ((2, 70, heads, head_dim), (2, 37, kv_heads, head_dim))
    return [torch.randn(size, generator=g).to(device) for size in sizes]


def defined(q, k, scale):
    groups = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), groups) * scale


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (4, 2, 20)])
def test_reference(heads, kv_heads, head_dim):
    q, k = means(heads, kv_heads, head_dim)
    expected = defined(q, k, head_dim**-0.5)
    assert (mean_scores(q, k, backend="reference") - expected).abs().max() < 5e-6
    # the control: another head's keys
    assert (mean_scores(q, k.flip(2), backend="reference") - expected).abs().max() > 1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_scores(q, k), mean_scores(q.clone(), k, backend="reference"))
        assert (mean_scores(q, k) - expected).abs().max() < 5e-6
    utils = ("test_schema", "test_faketensor")
    outcomes = torch.library.opcheck(mean_scores_op, (q, k, 0.3, False, "reference"), test_utils=utils)
    assert set(outcomes.values()) == {"SUCCESS"}
    with FlopCounterMode(display=False) as counter:
        mean_scores(q, k)
    assert counter.get_total_flops() == 2 * expected.numel() * head_dim


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 1, 20), (2, 2, 32)])
def test_triton(heads, kv_heads, head_dim, triton_device):
    q, k = means(heads, kv_heads, head_dim, triton_device)
    expected = defined(q, k, 0.3)
    assert (mean_scores(q, k, scale=0.3, backend="triton") - expected).abs().max() < 5e-6
    # tf32 keeps 10 bits of a factor
    rough = (mean_scores(q, k, scale=0.3, half=True, backend="triton") - expected).abs().max()
    assert rough < 2**-9 * 0.3 * head_dim**0.5 * 12


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 2, 8), "query heads must be a multiple of kv heads, got 3 and 2"),
        (torch.zeros(1, 2, 2, 8).half(), torch.zeros(1, 2, 2, 8).half(), "means must be float32 or float64"),
    ],
)
def test_refused(q, k, message):
    with pytest.raises(ValueError, match=message):
        mean_scores(q, k)
