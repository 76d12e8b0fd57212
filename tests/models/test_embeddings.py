from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vsa.models.embeddings import LayerNormFp32, PatchEmbedding, TimeEmbedder, patchify, sinusoid, unpatchify

sizes = st.integers(1, 3)


@settings(max_examples=25, deadline=None)
@given(patch=st.tuples(sizes, sizes, sizes), grid=st.tuples(sizes, sizes, sizes), channels=st.integers(1, 4))
def test_patch_embedding_is_the_convolution(patch, grid, channels):
    x = torch.randn(2, channels, *(g * p for g, p in zip(grid, patch, strict=True)), dtype=torch.float64)
    embed = PatchEmbedding(channels, 5, patch).double()
    tokens = embed(patchify(x, patch))
    expected = F.conv3d(x, embed.weight, embed.bias, stride=patch).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, expected)


@settings(max_examples=25, deadline=None)
@given(patch=st.tuples(sizes, sizes, sizes), grid=st.tuples(sizes, sizes, sizes), channels=st.integers(1, 4))
def test_unpatchify_puts_every_value_where_the_head_means_it(patch, grid, channels):
    tokens = torch.randn(1, math.prod(grid), math.prod(patch) * channels)
    video = unpatchify(tokens, grid, patch)
    assert video.shape == (1, channels, *(g * p for g, p in zip(grid, patch, strict=True)))
    for t, h, w in [(0, 0, 0), tuple(n - 1 for n in video.shape[2:])]:
        token = (t // patch[0] * grid[1] + h // patch[1]) * grid[2] + w // patch[2]
        inside = (t % patch[0] * patch[1] + h % patch[1]) * patch[2] + w % patch[2]
        head = tokens[0, token, inside * channels : (inside + 1) * channels]
        assert torch.equal(video[0, :, t, h, w], head)


@pytest.mark.parametrize("timestep", [0.0, 1.0, 313.5, 1000.0])
def test_sinusoid_equals_the_formula(timestep):
    frequencies = [10000.0 ** (-i / 8) for i in range(8)]
    exact = [math.cos(timestep * f) for f in frequencies] + [math.sin(timestep * f) for f in frequencies]
    # float32 frequencies turn into an angle error of at most 1000 * 2^-24 or so
    torch.testing.assert_close(
        sinusoid(torch.tensor(timestep), 16).double(), torch.tensor(exact, dtype=torch.float64), atol=2e-4, rtol=0
    )


def test_time_embedding_of_a_half_precision_model_computes_in_fp32():
    torch.manual_seed(0)
    embedder = TimeEmbedder(64, 48).bfloat16()
    features = sinusoid(torch.tensor([[500.0], [501.0]]), 64)
    out = embedder(features)
    exact = TimeEmbedder(64, 48).double()
    exact.load_state_dict(embedder.state_dict())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact(features.double()), atol=1e-6, rtol=0)
    # the control: computed in bf16 the same weights are off by far more
    plain = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 48)).bfloat16()
    plain.load_state_dict(
        {k.replace("linear_1", "0").replace("linear_2", "2"): v for k, v in embedder.state_dict().items()}
    )
    assert (plain(features.bfloat16()).double() - exact(features.double())).abs().max() > 1e-4


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_of_half_precision_input_is_fp32(affine):
    x = (torch.randn(4, 33) * 5 + 100).bfloat16()
    out = LayerNormFp32(33, 1e-6, elementwise_affine=affine).bfloat16()(x)
    exact = (x.double() - x.double().mean(-1, keepdim=True)) / x.double().var(-1, correction=0, keepdim=True).sqrt()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)
