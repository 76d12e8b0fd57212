"""The compared model of a pipeline of another family than Wan, opened and run by its own class of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.layout import Segment
from vsa.attention.tiling import Grid
from vsa.evaluation.comparison.captures import Keep
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.pipelines import PipelineModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip
from vsa.integrations.diffusers.families import family_of
from vsa.integrations.diffusers.pipeline import ClipSettings
from vsa.sampling.pipeline import clip_seeds

KNOWN = ("LTXPipeline",)
"""Pipelines whose rows of self-attention hold one video and nothing else, as captures do."""


class ClassPipelineModel(PipelineModel):
    """A dense pipeline of diffusers as its class runs it.

    Queries, keys and values are those of its own dense denoising, in the passes nearest to the timesteps.

    Args:
        source: folder of the pipeline.
        latents: latent frames, rows and columns of a clip.
        grid: token grid of a clip.
        dtype: dtype of transformer and text encoder; the VAE computes in float32.
        device: its device.
    """

    def __init__(self, source: str, *, latents: Grid, grid: Grid, dtype: torch.dtype, device: str):
        from diffusers import DiffusionPipeline

        pipe: Any = DiffusionPipeline.from_pretrained(source, dtype={"default": dtype, "vae": torch.float32})
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.source, self.grid_thw = pipe.to(device), source, grid
        self.shape = (pipe.transformer.config.in_channels, *latents)
        self._family = family_of(pipe.transformer)
        self.num_layers = len(self._family.blocks(pipe.transformer))

    def open_clip(self, name: str) -> Clip:
        nothing = torch.empty(0)
        return Clip(name=name, caption=name, video=nothing, latents=nothing)

    def watch(self, clip: Clip, seed: int) -> Callable[[float, Keep], None]:
        seeds, model = clip_seeds(seed, [clip.caption]).tolist(), self.pipe.transformer

        def forward(timestep: float, keep: Keep) -> None:
            now: list[float] = []

            def nearest(_: Any, layer: int, ctx: AttnContext, q: Tensor, k: Tensor, v: Tensor, extra: Any) -> None:
                times = self.pipe.scheduler.timesteps
                if now[-1] == float(times[(times - timestep).abs().argmin()]):
                    # the conditional half of guidance is the last one
                    keep(layer, ctx, q[-1:], k[-1:], v[-1:], extra)

            def before(model: Any, args: Any, inputs: Mapping[str, Any]) -> None:
                now.append(self._family.timestep(signature(type(model).forward).bind(model, *args, **inputs).arguments))

            with self._capturing(nearest), model.register_forward_pre_hook(before, with_kwargs=True):
                self._videos([clip.caption], seeds, lambda _: None, lambda _: None)

        return forward

    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        t, h, w = self.shape[1:]
        time, space = self.pipe.vae_temporal_compression_ratio, self.pipe.vae_spatial_compression_ratio
        usual = {name: known.default for name, known in signature(self.pipe.__call__).parameters.items()}
        self.settings = ClipSettings(
            size=(h * space, w * space),
            frames=(t - 1) * time + 1,
            guidance=usual["guidance_scale"] if asked.guidance is None else asked.guidance,
            steps=asked.steps or usual["num_inference_steps"],
        )
        self.seed = asked.seed
        for method in methods:
            layer = method.make(dim=24, num_heads=1, head_dim=24, layer_idx=0)
            method.kept(layer.layout([Segment(self.grid_thw)], "cpu"))
        return DenoisingPlan()

    def _videos(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        progress: Callable[[int], None],
        keep: Callable[[Tensor], None],
    ) -> Tensor:
        videos, clip = [], self.settings

        def on_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress(1)
            if step == clip.steps - 1:
                keep(tensors["latents"])
            return tensors

        for prompt, seed in zip(prompts, seeds, strict=True):
            result = self.pipe(
                prompt=[prompt],
                height=clip.size[0],
                width=clip.size[1],
                num_frames=clip.frames,
                num_inference_steps=clip.steps,
                guidance_scale=clip.guidance,
                generator=torch.Generator("cpu").manual_seed(seed),
                output_type="pt",
                callback_on_step_end=on_step,
            )
            videos.append((result.frames.float() * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).cpu())
        return torch.cat(videos)
