"""Tiny pipelines of all families, of random weights: their own VAEs, and prompts that stand for their text encoders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch

from tests.data.test_ltx import make_ltx_vae
from tests.data.tiny_wan import make_tokenizer
from tests.integrations import tiny

WIDTH = 8


def make_t5(width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=256, d_model=width, d_kv=8, d_ff=64, num_layers=1, num_heads=4)).eval()


def text_of(prompt: Any, tokens: int, width: int = WIDTH) -> torch.Tensor:
    """`[1, tokens, width]` that depend on the prompt."""
    seed = sum(map(ord, "".join(prompt or [""])))
    return tiny.randn(1, tokens, width, seed=seed)


def hunyuan_prompt(pipe: Any, prompt: Any = None, **_: Any) -> tuple[torch.Tensor, ...]:
    # 4 real tokens of 6
    mask = (torch.arange(6)[None] < 4).long()
    return text_of(prompt, 6), text_of(prompt, 1)[:, 0], mask


def hunyuan15_prompt(pipe: Any, prompt: Any = None, **_: Any) -> tuple[torch.Tensor, ...]:
    # 4 real tokens of 6 with a prompt, 3 without, and no glyphs
    mask = torch.arange(6)[None] < (4 if prompt else 3)
    return text_of(prompt, 6), mask.float(), torch.zeros(1, 3, WIDTH), torch.zeros(1, 3)


def kandinsky_prompt(pipe: Any, prompt: Any = None, **_: Any) -> tuple[torch.Tensor, ...]:
    return text_of(prompt, 6), text_of(prompt, 1)[:, 0], torch.tensor([0, 6])


def hunyuan_vae(**sizes: Any) -> Any:
    torch.manual_seed(0)
    kinds = dict(down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4)
    own = dict(latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2)
    return diffusers.AutoencoderKLHunyuanVideo(**own, **kinds, mid_block_add_attention=False, **sizes).eval()


def hunyuan15_vae() -> Any:
    torch.manual_seed(0)
    sizes = dict(latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1)
    return diffusers.AutoencoderKLHunyuanVideo15(**sizes).eval()


def cogvideox_vae() -> Any:
    torch.manual_seed(0)
    kinds = dict(down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4)
    own = dict(latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2)
    return diffusers.AutoencoderKLCogVideoX(**own, **kinds).eval()


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def cogvideox_schedule() -> Any:
    return diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=1.0)


class Made(NamedTuple):
    """A family: its pipeline, transformer, VAE, scheduler, and what stands for its text encoders if not a T5."""

    pipeline: str
    transformer: Callable[[], tiny.Case]
    vae: Callable[[], Any]
    prompt: Callable[..., Any] | None = None
    scheduler: Callable[[], Any] = flow
    parts: Callable[[], dict[str, Any]] = dict


PIPELINES = {
    "ltx": Made("LTXPipeline", partial(tiny.ltx, in_channels=8, out_channels=8, caption_channels=32), make_ltx_vae),
    "cogvideox": Made(
        "CogVideoXPipeline",
        partial(tiny.cogvideox, text_embed_dim=32, max_text_seq_length=226),
        cogvideox_vae,
        scheduler=cogvideox_schedule,
    ),
    "hunyuan": Made("HunyuanVideoPipeline", tiny.hunyuan, hunyuan_vae, hunyuan_prompt),
    "hunyuan15": Made(
        "HunyuanVideo15Pipeline",
        partial(tiny.hunyuan15, in_channels=9),
        hunyuan15_vae,
        hunyuan15_prompt,
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(guidance_scale=2.0)},
    ),
    "kandinsky5": Made(
        "Kandinsky5T2VPipeline", partial(tiny.kandinsky5, visual_cond=True), hunyuan_vae, kandinsky_prompt
    ),
}


def save(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a pipeline, whose class gets the prompts that stand for its encoders; returns its transformer."""
    made = PIPELINES[name]
    kind = getattr(diffusers, made.pipeline)
    # whatever encoders it takes
    stands = {"text_encoder": make_t5, "tokenizer": make_tokenizer}
    parts = {n: stands[n.removesuffix("_2")]() for n in inspect.signature(kind).parameters if n[:4] in ("text", "toke")}
    parts |= {"transformer": made.transformer().model, "vae": made.vae(), "scheduler": made.scheduler(), **made.parts()}
    if made.prompt is not None:
        monkeypatch.setattr(kind, "encode_prompt", made.prompt)
    kind(**parts).save_pretrained(folder)
    return parts["transformer"]
