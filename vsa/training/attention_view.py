"""Which tiles a trained model selects: recorded in one denoising step, drawn over a clip it made."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import add_noise, noise_like, to_timestep
from vsa.models.video_dit import VideoDiT
from vsa.training.figures import attention_picture
from vsa.training.inference import (
    LoadedRun,
    SampleSettings,
    clip_seeds,
    decode_latents,
    encode_prompts,
    sample_latents,
)


@torch.no_grad()
def record_attention(
    model: VideoDiT,
    latents: Tensor,
    text: Tensor,
    text_mask: Tensor | None,
    *,
    sigma: float,
    topk: int | tuple[int, ...],
    seed: int = 0,
) -> dict[int, dict[str, Tensor]]:
    """What each sparse layer selects while denoising `latents` at one noise level.

    Args:
        model: velocity model.
        latents: normalised `[1, C, T, H, W]`.
        text: `[1, S, E]`.
        text_mask: bool `[1, S]`, or None.
        sigma: noise level in [0, 1].
        topk: tiles per query tile, of all layers or of each.
        seed: of the noise.

    Returns:
        By layer: the tensors the method hands its recorder, among them `kv_indices` `[1, H, Nq, K]` and
        `kv_num_blocks` `[1, H, Nq]`, on the CPU. Empty when no layer records (dense attention).
    """
    found: dict[int, dict[str, Tensor]] = {}

    def recorder(layer_idx: int, tensors: dict[str, Tensor]) -> None:
        # what else is recorded is as long as the sequence
        names = [name for name in ("scores", "kv_indices", "kv_num_blocks") if name in tensors]
        found[layer_idx] = {name: tensors[name].detach().cpu() for name in names}

    level = torch.full((1,), sigma, device=latents.device)
    x_t = add_noise(latents, noise_like(latents, clip_seeds(seed, 1)), level)
    model(x_t, to_timestep(level), text, text_mask, topk=topk, recorder=recorder)
    return found


def draw_attention(
    run: LoadedRun,
    prompt: str,
    settings: SampleSettings,
    path: str | Path | None,
    *,
    layer: int | None = None,
    sigma: float = 0.5,
) -> Path | None:
    """Sample a clip and draw which tiles three of its query tiles attend to, halfway through the denoising.

    Args:
        run: from `load_run`, with sparse attention.
        prompt: caption of the clip.
        settings: how to sample; the clip is clip 0 of its seed.
        path: PNG to write; None runs the model and draws nothing (ranks beside the first, when weights are sharded).
        layer: layer to show, None for the one in the middle.
        sigma: noise level at which the layer is looked at.

    Raises:
        ValueError: the model's attention is dense, or there is no such layer.
    """
    seeds = clip_seeds(settings.seed, 1)
    latents = sample_latents(run.model, run.text_encoder, [prompt], seeds, settings)
    video = decode_latents(run.codec, latents, run.latent_mean, run.latent_std)[0]
    text, mask = encode_prompts(run.text_encoder, [prompt], run.device, settings.text_padding)
    found = record_attention(run.model, latents, text, mask, sigma=sigma, topk=settings.topk, seed=settings.seed)
    found = {index: tensors for index, tensors in found.items() if "kv_indices" in tensors}
    if not found:
        raise ValueError(f"{run.source} selects no tiles (dense attention, or all of them are kept): nothing to draw")
    layer = sorted(found)[len(found) // 2] if layer is None else layer
    if layer not in found:
        raise ValueError(f"layer {layer} selects no tiles, layers that do are {sorted(found)}")
    if path is None:
        return None
    layout = run.model.layout_for(settings.latent_shape)
    topk = settings.topk if isinstance(settings.topk, int) else settings.topk[layer]
    return attention_picture(
        video,
        layout,
        found[layer]["kv_indices"][0],
        found[layer]["kv_num_blocks"][0],
        path,
        title=f"{prompt}\nlayer {layer}, sigma {sigma:g}: {topk} of {layout.num_video_tiles} tiles per query",
    )
