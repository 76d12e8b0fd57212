"""A diffusers Wan pipeline of random weights, small enough to build in a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = "a the red blue circle square cat moving left right up down slowly quickly quick brown fox jumps"


def make_tokenizer() -> Any:
    """A unigram tokenizer with an end token, as UMT5's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    # written down, not trained: training is not the same twice
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz&;", *(f"\u2581{word}" for word in WORDS.split())]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -1.0 - 4 / len(piece)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0)


def make_vae(*, channels: int = 16, seed: int = 0) -> Any:
    """An AutoencoderKLWan: 16 channels as in Wan 2.1, 48 as in Wan 2.2."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    own: dict[str, Any] = {}
    if channels == 48:
        own = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=torch.linspace(-1, 1, channels).tolist(),
        latents_std=torch.linspace(0.5, 3, channels).tolist(),
        **own,
    ).eval()


def make_text_encoder(seed: int = 0) -> Any:
    """A UMT5EncoderModel of width 32."""
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(seed)
    config = UMT5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def make_image_encoder(seed: int = 0) -> Any:
    """A CLIPVisionModel of width 16, which makes 5 tokens of a picture."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=28, patch_size=14)).eval()


def make_transformer(*, in_channels: int = 16, seed: int = 0, **changed: Any) -> Any:
    """A WanTransformer3DModel of two layers."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
        **changed,
    ).eval()


def make_pipeline() -> Any:
    """A WanPipeline of the tiny parts."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    return WanPipeline(
        tokenizer=make_tokenizer(),
        text_encoder=make_text_encoder(),
        vae=make_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=make_transformer(),
    )


def make_image_pipeline(*, clip: bool = True) -> Any:
    """A WanImageToVideoPipeline of the tiny parts, of Wan2.1 with CLIP, else of Wan2.2."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor

    parts = make_pipeline().components
    image: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 24} if clip else {}
    return WanImageToVideoPipeline(
        **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")},
        transformer=make_transformer(in_channels=36, **image),
        image_encoder=make_image_encoder() if clip else None,
        image_processor=CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28) if clip else None,
    )


def save_pipeline(folder: Path, make: Callable[[], Any] = make_pipeline) -> Path:
    """Writes a pipeline to a folder."""
    make().save_pretrained(folder)
    return folder
