"""The compared model of a pipeline of another family than Wan, opened and run by its own class of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.layout import Segment
from vsa.attention.tiling import Grid
from vsa.checkpoints.sampling_settings import sampling_of_export
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.evaluation.comparison.captures import Keep
from vsa.evaluation.comparison.exported import as_trained
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.pipelines import PipelineModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip
from vsa.integrations.diffusers.families import family_of
from vsa.integrations.diffusers.pipeline import FIRST, ClipSettings, set_shift
from vsa.integrations.diffusers.pretrained import load_plain
from vsa.sampling.pipeline import clip_seeds


class ClassPipelineModel(PipelineModel):
    """A pipeline of diffusers as its class runs it, with a dense transformer or an export in it.

    Queries, keys and values are those of its own denoising, as it was trained, in the passes nearest to the timesteps.

    Args:
        source: folder of the pipeline.
        folder: folder of the transformer.
        export: settings of an export; None for a dense transformer.
        latents: latent frames, rows and columns of a clip.
        grid: token grid of a clip.
        flow_shift: flow shift of the scheduler; None: that of the export, else the scheduler's own.
        dtype: dtype of transformer and text encoder; the VAE computes in float32.
        device: its device.
    """

    def __init__(
        self,
        source: str,
        folder: Path,
        *,
        export: SparseAttentionConfig | None,
        latents: Grid,
        grid: Grid,
        flow_shift: float | None,
        dtype: torch.dtype,
        device: str,
    ):
        import diffusers

        model = load_plain(folder, dtype)
        family = family_of(model)
        assert family.pipeline is not None
        assert family.parts is not None
        types = {"default": dtype, "vae": torch.float32}
        pipe: Any = getattr(diffusers, family.pipeline).from_pretrained(source, dtype=types, transformer=model)
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.source, self.grid_thw = pipe.to(device), source, grid
        self.shape = (family.parts.sizes(model.config).out_channels, *latents)
        self.num_layers, self._arguments = len(family.blocks(model)), {}
        self.text_in_rows = family.text != "none"
        if export is not None:
            self.sparse = {FIRST: str(folder)}
            self.attention, self.own = {"method": export.method}, [as_trained(export)]
            trained = sampling_of_export(export)
            if "guidance" in trained:
                self._arguments["guidance_scale"] = trained["guidance"]
            self._arguments |= family.trained_arguments
            if flow_shift is None and "shift" in pipe.scheduler.config:
                flow_shift = trained.get("flow_shift")
        if flow_shift is not None:
            set_shift(pipe, flow_shift)

    def open_clip(self, name: str) -> Clip:
        nothing = torch.empty(0)
        return Clip(name=name, caption=name, video=nothing, latents=nothing)

    def watch(self, clip: Clip, seed: int) -> Callable[[float, Keep], None]:
        seeds = clip_seeds(seed, [clip.caption]).tolist()

        def forward(timestep: float, keep: Keep) -> None:
            steps, seen = [], set()

            def nearest(_: Any, layer: int, ctx: AttnContext, q: Tensor, k: Tensor, v: Tensor, extra: Any) -> None:
                times = self.pipe.scheduler.timesteps
                if len(steps) == int((times - timestep).abs().argmin()) and layer not in seen:
                    # the pass with the prompt is the first one of guidance, or the last half of its only pass
                    seen.add(layer)
                    keep(layer, ctx, q[-1:], k[-1:], v[-1:], {name: x[-1:] for name, x in extra.items()})

            with self._capturing(nearest):
                self._videos([clip.caption], seeds, steps.append, lambda _: None)

        return forward

    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        t, h, w = self.shape[1:]
        time, space = _compression(self.pipe, "temporal"), _compression(self.pipe, "spatial")
        usual = {name: known.default for name, known in signature(self.pipe.__call__).parameters.items()}
        guided = "guidance_scale" in usual
        default = usual["guidance_scale"] if guided else self.pipe.guider.guidance_scale
        guidance = self._arguments.pop("guidance_scale", default) if asked.guidance is None else asked.guidance
        if guided:
            self._arguments["guidance_scale"] = guidance
        else:
            self.pipe.guider = self.pipe.guider.new(guidance_scale=guidance)
        self.settings = ClipSettings(
            size=(h * space, w * space),
            frames=(t - 1) * time + 1,
            guidance=guidance,
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
        for prompt, seed in zip(prompts, seeds, strict=True):
            latents: list[Tensor] = []
            with _stepping(self.pipe.scheduler, lambda x, own=latents: (own.append(x), progress(1))):
                result = self.pipe(
                    prompt=[prompt],
                    height=clip.size[0],
                    width=clip.size[1],
                    num_frames=clip.frames,
                    num_inference_steps=clip.steps,
                    generator=torch.Generator("cpu").manual_seed(seed),
                    output_type="pt",
                    **self._arguments,
                )
            keep(latents[-1])
            videos.append((result.frames.float() * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).cpu())
        return torch.cat(videos)


@contextmanager
def _stepping(scheduler: Any, after: Callable[[Tensor], Any]) -> Iterator[None]:
    """Pass the latents after every step to `after`, also of a pipeline without callbacks."""
    step = scheduler.step

    # pipelines look at its signature
    @wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        out = step(*args, **kwargs)
        after(out[0])
        return out

    scheduler.step = stepped
    try:
        yield
    finally:
        del scheduler.step


def _compression(pipe: Any, axis: str) -> int:
    """Pixels of a latent along an axis, by either of the two names in pipelines."""
    names = (f"vae_scale_factor_{axis}", f"vae_{axis}_compression_ratio")
    return next(getattr(pipe, name) for name in names if hasattr(pipe, name))
