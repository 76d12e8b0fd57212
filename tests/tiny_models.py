"""Models of a few thousand parameters for tests."""

from __future__ import annotations

from functools import partial

import torch

from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.video_dit import VideoDiT

LATENT = (6, 4, 8, 12)
GRID = (4, 4, 6)
SIZES = dict(
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=6,
    out_channels=5,
    text_dim=10,
    freq_dim=16,
    ffn_dim=40,
    num_layers=3,
)
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2), gate_init="model")
LEVELS = ("none", "attention", "attention_mlp", "full")


def make_model(attention=FullAttention, device="cpu", **changes) -> VideoDiT:
    torch.manual_seed(0)
    model = VideoDiT(attention=attention, **(SIZES | changes))
    # a zero head would hide everything behind it
    torch.nn.init.normal_(model.proj_out.weight, std=0.1)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.to(device)


def make_inputs(device="cpu", batch: int = 2, latent=LATENT, text_len: int = 7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, *latent, generator=generator)
    timestep = torch.rand(batch, generator=generator) * 1000
    text = torch.randn(batch, text_len, 10, generator=generator)
    return x.to(device), timestep.to(device), text.to(device)


def gradients(model: VideoDiT) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_runs(a, b, inputs, *, tolerance: float, kwargs_a=None, kwargs_b=None):
    """Outputs and parameter gradients of two models agree, for the parameters both have."""
    out_a, out_b = a(*inputs, **(kwargs_a or {})), b(*inputs, **(kwargs_b or {}))
    torch.testing.assert_close(out_a, out_b, atol=tolerance, rtol=0)
    for model, out in ((a, out_a), (b, out_b)):
        model.zero_grad()
        out.square().mean().backward()
    grads_a, grads_b = gradients(a), gradients(b)
    for name in grads_a.keys() & grads_b.keys():
        scale = grads_b[name].abs().max().clamp(min=1).item()
        torch.testing.assert_close(grads_a[name], grads_b[name], atol=tolerance * scale, rtol=0, msg=name)
