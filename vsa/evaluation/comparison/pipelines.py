"""The compared model of a diffusers Wan pipeline: its own transformers, sampler and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.full import FullAttention
from vsa.attention.layout import Segment
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.tiling import Grid
from vsa.data.clip_rules import clip_size
from vsa.data.codecs import WanVAE
from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, noise_like
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.evaluation.comparison.agreement import Sampled
from vsa.evaluation.comparison.captures import Keep, Watched
from vsa.evaluation.comparison.computed import density_of_call
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.model import ComparedModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip, read_clip
from vsa.integrations.diffusers import applied_attention, apply, load_sparse, remove
from vsa.integrations.diffusers.pipeline import (
    ClipSettings,
    clip_settings,
    generate_videos,
    token_grid,
    trained_settings,
)
from vsa.machine import seconds_now
from vsa.sampling.pipeline import clip_seeds

Watcher = Callable[..., None]
"""Function of a layer's method and what `Keep` gets."""


class PipelineModel(ComparedModel):
    """The transformers of a dense pipeline.

    Args:
        pipe: pipeline from `open_pipeline`.
        codec: its VAE.
        source: folder or hub id.
        latents: latent frames, rows and columns of a clip.

    Raises:
        ValueError: a sparse transformer, or one that takes other latents than the VAE makes.
    """

    settings: ClipSettings
    seed: int
    sparse: Mapping[str, str] = {}
    """Folder or hub id of each sparse transformer, by its name in the pipeline; empty for a dense model."""

    def __init__(self, pipe: Any, codec: WanVAE, *, source: str, latents: Grid):
        self.pipe, self.codec, self.source = pipe, codec, source
        if trained_settings(pipe) is not None:
            raise ValueError(f"--pipeline {source} has a sparse transformer: give it as --run {source}")
        assert codec.statistics is not None
        self.statistics = LatentStatistics(mean=codec.statistics[0], std=codec.statistics[1])
        self.shape = (codec.channels, *latents)
        first = transformers(pipe)[0]
        if first.config.in_channels != codec.channels:
            raise ValueError(
                f"--pipeline {source} takes {first.config.in_channels} latent channels, its VAE makes {codec.channels}"
            )
        self.num_layers = len(first.blocks)
        t, h, w = (n // side for n, side in zip(latents, first.config.patch_size, strict=True))
        self.grid_thw = (t, h, w)

    def open_clip(self, name: str) -> Clip:
        return read_clip(Path(name), self.codec, [self.shape], device=self.pipe.device)

    def watch(self, clip: Clip, seed: int) -> Callable[[float, Keep], None]:
        text, _ = self.pipe.encode_prompt(clip.caption, do_classifier_free_guidance=False, max_sequence_length=512)
        latents = self.statistics.normalise(clip.latents[None])
        noise = noise_like(latents, clip_seeds(seed, [""]))

        def forward(timestep: float, keep: Keep) -> None:
            model, level = transformer_at(self.pipe, timestep), torch.full((1,), timestep, device=latents.device)
            x_t = add_noise(latents, noise, level / TIMESTEP_SCALE).to(model.dtype)
            with self._capturing(lambda _, *rest: keep(*rest)):
                model(hidden_states=x_t, timestep=level, encoder_hidden_states=text.to(model.dtype))

        return forward

    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        clip = clip_size(self.codec, self.shape)
        size = (clip.height, clip.width)
        self.settings = clip_settings(
            self.pipe, size=size, frames=clip.frames, guidance=asked.guidance, steps=asked.steps
        )
        self.seed = asked.seed
        plan, grid = DenoisingPlan(**asked.denoising), token_grid(self.pipe, size, clip.frames)
        ConstantSparsity(topk=1, denoising=plan).topk_per_layer(0, 1, self.num_layers)
        for method in methods:
            method.kept(method.make(dim=24, num_heads=1, head_dim=24, layer_idx=0).layout([Segment(grid)], "cpu"))
        if not any(method.selects for method in methods):
            predicts = any(method.predicts for method in methods)
            plan.refuse_without_topk(", ".join(method.label for method in methods), predicts=predicts)
        return plan

    def sample(
        self, method: Method, prompts: Sequence[str], plan: DenoisingPlan | None, progress: Callable[[int], None]
    ) -> Sampled:
        models, seeds = transformers(self.pipe), clip_seeds(self.seed, prompts).tolist()
        densities, clock, latents = _Densities(), _Clock(), []
        with clock.of(models), self._attending(method, plan, densities.add):
            videos = self._videos(prompts, seeds, progress, latents.append)
        # seconds of the passes of the transformers, without what measuring the densities takes
        return Sampled(videos, torch.cat(latents), fmean(densities.calls), clock.seconds - densities.seconds)

    def _videos(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        progress: Callable[[int], None],
        keep: Callable[[Tensor], None],
    ) -> Tensor:
        """See `generate_videos`."""
        clip = self.settings._asdict()
        return generate_videos(self.pipe, prompts, seeds=seeds, progress=progress, keep=keep, **clip)

    def _capturing(self, add: Watcher) -> AbstractContextManager[None]:
        """The attention whose q, k and v are captured, each of whose calls is passed to `add`."""
        if self.sparse:
            return self._trained(add)
        return attending(transformers(self.pipe), lambda **layer: watched(FullAttention(**layer), add))

    def _attending(self, method: Method, plan: DenoisingPlan | None, add: Watcher) -> AbstractContextManager[None]:
        """A method in the transformers, each of whose calls is passed to `add`."""
        if method.trained:
            return self._trained(add)
        followed = (plan or DenoisingPlan()).for_method(selects=method.selects, predicts=method.predicts)
        budget = {"topk": method.topk, "sparsity": method.sparsity, "denoising": followed}
        return attending(transformers(self.pipe), lambda **layer: watched(method.make(**layer), add), **budget)

    @contextmanager
    def _trained(self, add: Watcher) -> Iterator[None]:
        with ExitStack() as stack:
            for name, source in self.sparse.items():
                model = load_sparse(source, subfolder=name, transformer=getattr(self.pipe, name))
                stack.callback(remove, model)
                applied = applied_attention(model)
                assert applied is not None
                for layer in applied.layers:
                    attend = layer.attn.processor.attend
                    attend.method = watched(attend.method, add)
            yield

    def sampling(self) -> Mapping[str, Any]:
        weights = f"diffusers, {transformers(self.pipe)[0].dtype}".replace("torch.", "")
        own = {"checkpoint": self.source, "weights": weights, "seed": self.seed, "latent_shape": list(self.shape)}
        return {**own, **self.settings._asdict(), "scheduler": dict(self.pipe.scheduler.config)}


def transformers(pipe: Any) -> list[Any]:
    """The networks of a pipeline: one, or those of high and of low noise (Wan2.2)."""
    return [model for model in (pipe.transformer, getattr(pipe, "transformer_2", None)) if model is not None]


def transformer_at(pipe: Any, timestep: float) -> Any:
    """The network that denoises at a timestep in [0, 1000]."""
    boundary = pipe.config.boundary_ratio
    if pipe.transformer is None or pipe.transformer_2 is None or boundary is None:
        return transformers(pipe)[0]
    return pipe.transformer if timestep >= boundary * pipe.scheduler.config.num_train_timesteps else pipe.transformer_2


@contextmanager
def attending(models: Sequence[Any], factory: Callable[..., AttentionMethod], **budget: Any) -> Iterator[None]:
    """Attention of a factory in transformers; `budget` is that of `apply`."""
    with ExitStack() as stack:
        for model in models:
            apply(model, factory, **budget)
            stack.callback(remove, model)
        yield


def watched(attention: AttentionMethod, add: Watcher) -> Watched:
    """A method whose calls are passed to `add`, the method itself first."""
    return Watched(attention, partial(add, attention))


class _Densities:
    """Computed token pairs over all pairs of every call: measured once for a layer at a top-k, in each call where the
    data decide; what that takes are `seconds`."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.seconds = 0.0
        self._known: dict[tuple[Any, ...], float] = {}

    def add(self, method: AttentionMethod, layer: int, ctx: AttnContext, q, k, v, extra: dict[str, Tensor]) -> None:
        key = (layer, ctx.topk, ctx.dense)
        if key not in self._known or (method.predicts and not ctx.dense):
            self._known[key] = 1.0 if ctx.dense else self._measure(method, ctx, q, k, v, extra)
        self.calls.append(self._known[key])

    def _measure(self, method: AttentionMethod, ctx: AttnContext, q, k, v, extra: dict[str, Tensor]) -> float:
        begin = seconds_now(q.device)
        density = density_of_call(method, ctx, q, k, v, extra)
        self.seconds += seconds_now(q.device) - begin
        return density


class _Clock:
    """Seconds of the forward passes of networks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    @contextmanager
    def of(self, models: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for model in models:
                stack.callback(model.register_forward_pre_hook(self._begin).remove)
                stack.callback(model.register_forward_hook(self._end).remove)
            yield

    def _begin(self, model: Any, args: Any) -> None:
        self._began = seconds_now(model.device)

    def _end(self, model: Any, args: Any, out: Any) -> None:
        self.seconds += seconds_now(model.device) - self._began
