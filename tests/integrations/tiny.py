"""Tiny random transformers of the families, with inputs on a grid that no tile divides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    Kandinsky5Transformer3DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from torch import Tensor

GRID = (3, 5, 7)
TILE = (2, 2, 4)
# 2 x 3 x 2 tiles
TILES = 12
TEXT = 6


@dataclass(frozen=True)
class Case:
    """A transformer, the arguments of its forward, and the text tokens in its self-attention."""

    model: Any
    inputs: dict[str, Any]
    text: int = 0

    def run(self, **changes: Any) -> Tensor:
        return self.model(**{**self.inputs, **changes}).sample


def stirred(model: Any) -> Any:
    """Weights and biases away from 0 and 1, so that one left out would show."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wan(**changes: Any) -> Case:
    torch.manual_seed(0)
    options = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16)
    model = stirred(WanTransformer3DModel(**{**options, "ffn_dim": 48, "num_layers": 2, **changes}))
    t, h, w = GRID
    inputs = dict(
        hidden_states=randn(2, model.config.in_channels, t, 2 * h, 2 * w),
        timestep=torch.tensor([700.0, 300.0]),
        encoder_hidden_states=randn(2, 512 if model.config.image_dim else 9, 8, seed=1),
    )
    if model.config.image_dim:
        inputs["encoder_hidden_states_image"] = randn(2, 5, model.config.image_dim, seed=2)
    return Case(model, inputs)


def ltx(**changes: Any) -> Case:
    torch.manual_seed(0)
    options = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2)
    options |= dict(cross_attention_dim=32, caption_channels=8)
    model = stirred(LTXVideoTransformer3DModel(**{**options, **changes}))
    t, h, w = GRID
    inputs = dict(
        hidden_states=randn(2, t * h * w, 4),
        timestep=torch.tensor([700.0, 300.0]),
        encoder_hidden_states=randn(2, 9, 8, seed=1),
        # the cross-attention masks its text
        encoder_attention_mask=torch.tensor([[1] * 9, [1] * 4 + [0] * 5]),
        num_frames=t,
        height=h,
        width=w,
        rope_interpolation_scale=(20 / 25, 32, 32),
    )
    return Case(model, inputs)


def cogvideox(patch_size_t: int | None = None, rope: bool = True, **changes: Any) -> Case:
    torch.manual_seed(0)
    t, h, w = GRID
    options = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=16)
    options |= dict(text_embed_dim=8, num_layers=2, sample_width=2 * w, sample_height=2 * h, sample_frames=4 * t - 3)
    options |= dict(max_text_seq_length=TEXT, patch_size_t=patch_size_t, use_rotary_positional_embeddings=rope)
    model = stirred(CogVideoXTransformer3DModel(**{**options, **changes}))  # type: ignore[arg-type]
    tables = get_3d_rotary_pos_embed(16, ((0, 0), (h, w)), (h, w), t) if rope else None
    inputs = dict(
        hidden_states=randn(2, t * (patch_size_t or 1), 4, 2 * h, 2 * w),
        encoder_hidden_states=randn(2, TEXT, 8, seed=1),
        timestep=torch.tensor([700, 300]),
        image_rotary_emb=tables,
    )
    return Case(model, inputs, text=TEXT)


def hunyuan(lengths: tuple[int, ...] = (TEXT, TEXT), **changes: Any) -> Case:
    torch.manual_seed(0)
    t, h, w = GRID
    options = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1)
    options |= dict(num_single_layers=1, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=8, pooled_projection_dim=8)
    options |= dict(rope_axes_dim=(4, 6, 6), guidance_embeds=False)
    model = stirred(HunyuanVideoTransformer3DModel(**{**options, **changes}))
    batch = len(lengths)
    inputs = dict(
        hidden_states=randn(batch, 4, t, 2 * h, 2 * w),
        timestep=torch.tensor([700.0, 300.0, 500.0][:batch]),
        encoder_hidden_states=randn(batch, TEXT, 8, seed=1),
        encoder_attention_mask=(torch.arange(TEXT) < torch.tensor(lengths)[:, None]).long(),
        pooled_projections=randn(batch, 8, seed=2),
    )
    return Case(model, inputs, text=TEXT)


def hunyuan15(
    lengths: tuple[int, ...] = (TEXT, TEXT), glyphs: tuple[int, ...] = (2, 2), image: bool = False, **changes: Any
) -> Case:
    """Rows with `lengths` and `glyphs` real tokens of two texts of 6 and 3, and 2 image tokens, real if `image`."""
    torch.manual_seed(0)
    t, h, w = GRID
    options = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2)
    options |= dict(num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=8, text_embed_2_dim=8, image_embed_dim=8)
    model = stirred(HunyuanVideo15Transformer3DModel(**{**options, "rope_axes_dim": (4, 6, 6), **changes}))
    batch = len(lengths)
    inputs = dict(
        hidden_states=randn(batch, 4, t, h, w),
        timestep=torch.tensor([700.0, 300.0, 500.0][:batch]),
        encoder_hidden_states=randn(batch, TEXT, 8, seed=1),
        encoder_attention_mask=(torch.arange(TEXT) < torch.tensor(lengths)[:, None]).long(),
        encoder_hidden_states_2=randn(batch, 3, 8, seed=2),
        encoder_attention_mask_2=(torch.arange(3) < torch.tensor(glyphs)[:, None]).long(),
        image_embeds=randn(batch, 2, 8, seed=3) * image,
    )
    return Case(model, inputs, text=TEXT + 3 + 2)


def minimax_h3(
    grid: tuple[int, int, int] = GRID, text: int = TEXT, keyframes: tuple[str, ...] = (), **changes: Any
) -> Case:
    """Rows [text | keyframes | 2 x 3 audio | video], laid out by diffusers' own pipeline step."""
    torch.manual_seed(0)
    t, h, w = grid
    options = dict(num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1)
    options |= dict(ffn_dim=32, in_channels=2, audio_in_channels=3, text_dim=8, freq_dim=16, time_embed_hidden_dim=24)
    options |= dict(time_embed_dim=12, rope_freq_dim=2)
    model = stirred(MiniMaxH3Transformer3DModel(**{**options, **changes}))
    positions, tags, video, audio, texts, conditions, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        *(torch.ones(text), t, 2 * h, 2 * w, 3),
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
        keyframe_anchors=keyframes,
    )
    # clean conditions, then text and video at one timestep, audio at another
    timesteps = torch.ones(len(tags), dtype=torch.long)
    timesteps[video[:conditions]], timesteps[audio] = 0, 2
    inputs = dict(
        hidden_states=randn(2, len(video), 4 * model.config.in_channels),
        audio_hidden_states=randn(2, len(audio), 3, seed=1),
        encoder_hidden_states=randn(2, text, model.config.text_dim, seed=2),
        timestep=torch.tensor([1.0, 0.3, 0.6]),
        timestep_indices=timesteps,
        token_tags=tags,
        position_ids=positions,
        video_indices=video,
        audio_indices=audio,
        text_indices=texts,
    )
    return Case(model, inputs, text=len(tags) - t * h * w)


def ltx2(**changes: Any) -> Case:
    torch.manual_seed(0)
    t, h, w = GRID
    options: dict[str, Any] = dict(num_layers=2, caption_channels=8, rope_double_precision=False)
    for prefix in ("", "audio_"):
        sizes = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16)
        options |= {f"{prefix}{name}": size for name, size in {**sizes, "cross_attention_dim": 32}.items()}
    model = stirred(LTX2VideoTransformer3DModel(**{**options, **changes}))
    inputs = dict(
        hidden_states=randn(2, t * h * w, 4),
        audio_hidden_states=randn(2, 6, 4, seed=1),
        encoder_hidden_states=randn(2, 9, 8, seed=2),
        audio_encoder_hidden_states=randn(2, 9, 8, seed=3),
        timestep=torch.tensor([[700.0], [300.0]]),
        encoder_attention_mask=torch.tensor([[1] * 9, [1] * 4 + [0] * 5]),
        num_frames=t,
        height=h,
        width=w,
        audio_num_frames=6,
    )
    return Case(model, inputs)


def kandinsky5(**changes: Any) -> Case:
    torch.manual_seed(0)
    t, h, w = GRID
    options = dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=8, in_text_dim2=8, time_dim=16, model_dim=32)
    options |= dict(ff_dim=48, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6))
    model = stirred(Kandinsky5Transformer3DModel(**{**options, **changes}))
    inputs = dict(
        hidden_states=randn(2, t, 2 * h, 2 * w, model.config.in_visual_dim),
        encoder_hidden_states=randn(2, TEXT, model.config.in_text_dim, seed=1),
        timestep=torch.tensor([700.0, 300.0]),
        pooled_projections=randn(2, 8, seed=2),
        visual_rope_pos=[torch.arange(n) for n in GRID],
        text_rope_pos=torch.arange(TEXT),
    )
    return Case(model, inputs)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest entry of b (at least 1)."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
