from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from hypothesis import given, settings
from hypothesis import strategies as st

from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.models.blocks import QKNorm, TransformerBlock
from vsa.models.compute_dtype import compute_in
from vsa.models.rope import apply_rope, axis_dims, rope_tables

CPU = torch.device("cpu")
grids = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7))
head_dims = st.sampled_from([6, 8, 12, 16, 20, 32])


def rotate_by_definition(x, grid, head_dim):
    """Each channel pair is a complex number turned by position * theta^(-2i / axis width), token by token, fp64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    out = torch.empty_like(pairs)
    _, rows, columns = grid
    for token in range(x.shape[1]):
        position = (token // (rows * columns), token // columns % rows, token % columns)
        angles = [
            position[axis] * 10000.0 ** (-2 * i / width)
            for axis, width in enumerate(axis_dims(head_dim))
            for i in range(width // 2)
        ]
        out[:, token] = pairs[:, token] * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
    return torch.view_as_real(out).flatten(-2)


@settings(max_examples=25, deadline=None)
@given(grid=grids, head_dim=head_dims)
def test_equals_the_definition(grid, head_dim):
    x = torch.randn(2, grid[0] * grid[1] * grid[2], 3, head_dim, generator=torch.Generator().manual_seed(0))
    actual = apply_rope(x, rope_tables(grid, head_dim, CPU))
    torch.testing.assert_close(actual.double(), rotate_by_definition(x, grid, head_dim), atol=2e-6, rtol=0)


def test_pairing_halves_is_not_the_definition():
    grid, head_dim = (2, 3, 4), 16
    x = torch.randn(1, 24, 1, head_dim)
    cos, sin = (table[:, None] for table in rope_tables(grid, head_dim, CPU))
    first, second = x.chunk(2, dim=-1)
    halves = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    assert (halves.double() - rotate_by_definition(x, grid, head_dim)).abs().max() > 0.1


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_tables_equal_diffusers(head_dim):
    theirs = WanRotaryPosEmbed(head_dim, (1, 2, 2), 64)(torch.empty(1, 16, 5, 14, 22))
    for ours, full in zip(rope_tables((5, 7, 11), head_dim, CPU), theirs, strict=True):
        torch.testing.assert_close(ours, full[0, :, 0, ::2], atol=1e-7, rtol=0)


def test_scores_depend_on_the_offset_only():
    q, k = torch.randn(2, 12, dtype=torch.float64)
    grid = (4, 5, 6)
    tokens = grid[0] * grid[1] * grid[2]
    rope = rope_tables(grid, 12, CPU)
    scores = (
        apply_rope(q.expand(1, tokens, 1, 12), rope)[0, :, 0] @ apply_rope(k.expand(1, tokens, 1, 12), rope)[0, :, 0].T
    ).view(*grid, *grid)
    torch.testing.assert_close(scores[0, 1, 2, 2, 2, 5], scores[1, 3, 0, 3, 4, 3], atol=1e-6, rtol=0)
    assert (scores[0, 1, 2, 2, 2, 5] - scores[1, 3, 0, 3, 4, 4]).abs() > 1e-4


def test_half_precision_rotates_in_fp32():
    x = torch.randn(1, 60, 2, 16).bfloat16()
    rope = rope_tables((3, 4, 5), 16, CPU)
    assert torch.equal(apply_rope(x, rope), apply_rope(x.float(), rope).bfloat16())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_self_attention_norms_and_rotates_as_ever_on_a_cpu(dtype, monkeypatch):
    """Bit for bit, weights rounded by the compute dtype included: a seed keeps every digit of its losses."""

    def separately(norm, x, projection, rope):
        x = projection(x)
        weight = norm.weight if dtype is None else norm.weight.to(dtype)
        normed_x = torch.nn.functional.rms_norm(x, norm.normalized_shape, weight, norm.eps)
        return apply_rope(normed_x.unflatten(-1, (2, -1)), rope)

    torch.manual_seed(0)
    method = FullAttention(dim=24, num_heads=2, head_dim=12)
    block = TransformerBlock(
        method, num_heads=2, head_dim=12, ffn_dim=48, cross_attn_norm=True, eps=1e-6, added_kv_proj_dim=None
    )
    torch.nn.init.normal_(block.scale_shift_table)
    for norm in (block.attn1.norm_q, block.attn1.norm_k):
        torch.nn.init.normal_(norm.weight)
    compute_in(block, dtype)
    grid = (2, 3, 5)
    layout = method.layout([Segment(grid)])
    h = torch.randn(2, 30, 24, requires_grad=True)

    def run():
        out = block.self_attention(
            h.to(dtype or h.dtype), rope_tables(grid, 12, CPU), AttnContext(layout=layout, topk=KeptTiles.of(1))
        )
        return out, *torch.autograd.grad(out.float().sin().sum(), (h, *block.attn1.parameters()))

    actual = run()
    monkeypatch.setattr(QKNorm, "forward", separately)
    expected = run()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # the control: other tables are noticed
    monkeypatch.setattr(QKNorm, "forward", lambda *a: separately(*a[:3], (a[3][0], -a[3][1])))
    assert not torch.equal(run()[0], expected[0])


def test_tables_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        rope = rope_tables((1, 3, 13), 16, CPU)
    x = torch.randn(1, 39, 1, 16, requires_grad=True)
    apply_rope(x, rope).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("head_dim", [4, 7])
def test_head_dim_without_three_axes_is_refused(head_dim):
    with pytest.raises(ValueError, match=f"even and at least 6 .* got {head_dim}"):
        axis_dims(head_dim)
