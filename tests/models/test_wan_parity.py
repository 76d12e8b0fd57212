"""Equality with diffusers' WanTransformer3DModel, the code that published Wan checkpoints run in."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from vsa.attention.full import FullAttention
from vsa.models.video_dit import VideoDiT

BASE = dict(
    num_attention_heads=3,
    attention_head_dim=16,
    out_channels=8,
    text_dim=24,
    freq_dim=32,
    ffn_dim=80,
    num_layers=2,
)
KINDS = {
    "t2v": dict(in_channels=8),
    "t2v_no_cross_norm": dict(in_channels=8, cross_attn_norm=False),
    "i2v": dict(in_channels=13, image_dim=20, added_kv_proj_dim=48),
    # Wan2.2's TI2V, whose first frame has its own timestep
    "ti2v": dict(in_channels=48, out_channels=48),
}
# odd token grids, one of them a single frame
LATENTS = [(3, 6, 10), (1, 2, 14)]


def make_pair(kind: str, device: torch.device) -> tuple[VideoDiT, WanTransformer3DModel]:
    torch.manual_seed(0)
    theirs = WanTransformer3DModel(**{**BASE, **KINDS[kind]})
    # norms and biases away from 1 and 0, so that one left out would show
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ours = VideoDiT(attention=FullAttention, **{**BASE, **KINDS[kind]})
    ours.load_state_dict(theirs.state_dict())
    return ours.to(device), theirs.to(device)


def make_inputs(kind: str, latent, device: torch.device, per_token: bool):
    generator = torch.Generator().manual_seed(1)
    channels = KINDS[kind]["in_channels"]
    x = torch.randn(2, channels, *latent, generator=generator)
    tokens = latent[0] * latent[1] * latent[2] // 4
    timestep = torch.rand(2, tokens if per_token else 1, generator=generator) * 1000
    timestep = timestep if per_token else timestep[:, 0]
    text = torch.randn(2, 512, 24, generator=generator)
    image = torch.randn(2, 5, 20, generator=generator) if kind == "i2v" else None
    inputs = [t.to(device) for t in (x, timestep, text)]
    return *inputs, None if image is None else image.to(device)


def run_ours(model: VideoDiT, x, timestep, text, image):
    # the last channels arrive as a separate condition in an image-to-video model
    split = x.shape[1] if image is None else model.out_channels
    cond = None if image is None else x[:, split:]
    return model(x[:, :split], timestep, text, cond_latents=cond, image_embeds=image)


def run_theirs(model: WanTransformer3DModel, x, timestep, text, image):
    return model(x, timestep, text, image).sample


def outputs_and_gradients(model, run, inputs):
    leaves = [None if t is None else t.clone().requires_grad_(i != 1) for i, t in enumerate(inputs)]
    out = run(model, *leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.device)
    model.zero_grad()
    out.backward(cotangent)
    results = {"out": out.detach(), "dx": leaves[0].grad, "dtext": leaves[2].grad}
    if leaves[3] is not None:
        results["dimage"] = leaves[3].grad
    return results | {f"d {name}": p.grad for name, p in model.named_parameters()}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to the largest entry of that tensor (at least 1)."""
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1)).item() for n in a)


@pytest.mark.parametrize("per_token", [False, True], ids=["timestep", "timestep_per_token"])
@pytest.mark.parametrize("latent", LATENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_equal_diffusers(kind, latent, per_token, device):
    ours, theirs = make_pair(kind, device)
    inputs = make_inputs(kind, latent, device, per_token)
    expected = outputs_and_gradients(theirs, run_theirs, inputs)
    actual = outputs_and_gradients(ours, run_ours, inputs)
    assert expected["out"].abs().max() > 0.5
    assert worst(actual, expected) < 1e-5


def test_a_clean_first_frame_equals_diffusers(device):
    """As the pipelines of diffusers 0.42 with `expand_timesteps` call it: a timestep for each token, 0 in the frame."""
    ours, theirs = make_pair("ti2v", device)
    x, timestep, text, _ = make_inputs("ti2v", LATENTS[0], device, False)
    each = torch.cat([torch.zeros(2, 15, device=device), timestep[:, None].expand(-1, 30)], 1)
    two = torch.stack([torch.zeros_like(timestep), timestep], 1)
    expected = outputs_and_gradients(theirs, run_theirs, (x, each, text, None))
    assert worst(outputs_and_gradients(ours, run_ours, (x, two, text, None)), expected) < 1e-5
    # the control: one timestep for all
    assert worst(outputs_and_gradients(ours, run_ours, (x, timestep, text, None)), expected) > 1e-4


@pytest.mark.parametrize(
    "name",
    ["blocks.1.attn1.norm_k.weight", "blocks.0.scale_shift_table", "scale_shift_table", "blocks.1.attn2.to_k.bias"],
)
def test_one_changed_weight_is_noticed(name):
    ours, theirs = make_pair("t2v", torch.device("cpu"))
    inputs = make_inputs("t2v", LATENTS[0], torch.device("cpu"), False)
    expected = outputs_and_gradients(theirs, run_theirs, inputs)
    # the key bias alone cancels in a softmax, the norm after it makes it matter
    parameter = dict(ours.named_parameters())[name]
    parameter.data[..., 3] += 0.05
    assert worst(outputs_and_gradients(ours, run_ours, inputs), expected) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_diffusers_names_and_shapes(kind):
    ours, theirs = make_pair(kind, torch.device("cpu"))
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
