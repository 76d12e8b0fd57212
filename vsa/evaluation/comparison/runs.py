"""The compared model of a run or an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vsa.attention.context import AttnContext
from vsa.attention.denoising import DenoisingPlan, progress_of
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import ConstantSparsity
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.weight_source import is_run
from vsa.evaluation.attention_map import denoise_once
from vsa.evaluation.comparison.agreement import Sampled
from vsa.evaluation.comparison.captures import Keep, Watched
from vsa.evaluation.comparison.computed import density_of_call
from vsa.evaluation.comparison.methods import AS_TRAINED, Method
from vsa.evaluation.comparison.model import ComparedModel
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip, open_clip
from vsa.machine import seconds_now
from vsa.models.network import Network
from vsa.sampling.pipeline import (
    SampleSettings,
    SamplingPipeline,
    clip_seeds,
    decode_latents,
    encode_prompts,
    sample_latents,
)
from vsa.sampling.record import settings_dict


class RunModel(ComparedModel):
    """The model of a run or an export.

    Args:
        run: model, codec and text encoder.
    """

    settings: SampleSettings

    def __init__(self, run: SamplingPipeline):
        self.run, self.source, self.num_layers = run, run.source, len(run.model.blocks)
        self.text_in_rows = run.model.text_in_rows
        layout = run.model.layout_for(run.settings().latent_shape)
        self.grid_thw, self.tile_thw = layout.segments[0].grid_thw, layout.tile_thw
        if not run.model.is_dense:
            # its config is not needed: the model is at hand
            self.own = [Method(label=AS_TRAINED, family=AS_TRAINED, config={}, trained=True)]
            self.attention = resolve_checkpoint(run.source).config["attention"] if is_run(run.source) else None

    def open_clip(self, name: str) -> Clip:
        return open_clip(self.run, name)

    def watch(self, clip: Clip, seed: int) -> Callable[[float, Keep], None]:
        text, mask = encode_prompts(self.run.text_encoder, [clip.caption], self.run.device, self.run.text_padding)
        latents = self.run.statistics.normalise(clip.latents[None])
        topk = self.run.settings(latent_shape=tuple(clip.latents.shape)).topk
        methods = self.run.model.attention_layers

        def forward(timestep: float, keep: Keep) -> None:
            model = self.run.model.with_attention(lambda layer_idx, **_: Watched(methods[layer_idx], keep))
            denoise_once(model, latents, text, mask, sigma=timestep / 1000, topk=topk, seed=seed)

        return forward

    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        if not asked.prompts:
            return DenoisingPlan()
        model, own = self.run.model, asked.denoising
        # the run's plan without its budgets, with the options
        plan = replace(self.run.settings().denoising.without_budgets(), **own)
        ConstantSparsity(topk=1, denoising=plan).topk_per_layer(0, 1, self.num_layers)
        if not model.selects:
            if not any(method.selects for method in methods):
                # options of the run itself that do not apply are ignored
                predicts = model.predicts or any(method.predicts for method in methods)
                names = ", ".join(method.label for method in methods)
                DenoisingPlan(**own).refuse_without_topk(names, predicts=predicts)
            followed = plan.for_method(selects=False, predicts=model.predicts)
            own = {name: getattr(followed, name) for name in ("dense_steps", "dense_layers", "refresh", "shared_cache")}
        self.settings = self.run.settings(
            steps=asked.steps, guidance=asked.guidance, flow_shift=asked.flow_shift, denoising=own, seed=asked.seed
        )
        return plan

    def sample(
        self, method: Method, prompts: Sequence[str], plan: DenoisingPlan | None, progress: Callable[[int], None]
    ) -> Sampled:
        run, settings = self.run, self.settings
        model = run.model if method.trained else run.model.with_attention(method.make)
        layout = model.layout_for(settings.latent_shape, run.device)
        if not method.trained:
            followed = (plan or DenoisingPlan()).for_method(selects=model.selects, predicts=model.predicts)
            topk = followed.constant((method.kept(layout),), layout.num_video_tiles)
            settings = replace(settings, topk=topk, denoising=followed)
        seeds = clip_seeds(settings.seed, prompts)
        batches, seconds = [], 0.0
        for start in range(0, len(prompts), settings.batch_size):
            part = slice(start, start + settings.batch_size)
            begin = seconds_now(run.device)
            batches.append(sample_latents(model, run.text_encoder, prompts[part], seeds[part], settings, progress))
            seconds += seconds_now(run.device) - begin
        latents = torch.cat(batches)
        if plan is None:
            self._clean = latents[:1]
        videos = decode_latents(run.codec, latents, run.statistics)
        return Sampled(videos, latents, self._density(model, prompts[0], settings), seconds)

    def sampling(self) -> Mapping[str, Any]:
        return settings_dict(self.settings, self.run)

    def _density(self, model: Network, prompt: str, settings: SampleSettings) -> float:
        """Mean density over steps and layers, measured once for every top-k."""
        plan = settings.denoising
        densities_of: dict[KeptTiles, list[float]] = {}
        steps = []
        for step, timestep in enumerate(settings.timesteps):
            dense = [step < plan.dense_steps or layer in plan.dense_layers for layer in range(self.num_layers)]
            if all(dense):
                steps.append(1.0)
                continue
            topk = settings.topk.at(progress_of(timestep), step)
            if topk not in densities_of:
                densities_of[topk] = self._densities(model, prompt, replace(settings, topk=topk))
            shares = zip(dense, densities_of[topk], strict=True)
            steps.append(fmean(1.0 if whole else share for whole, share in shares))
        return fmean(steps)

    def _densities(self, model: Network, prompt: str, settings: SampleSettings) -> list[float]:
        """Density of each layer in a forward on the clip of the dense run at half noise, without a plan."""
        methods, densities = model.attention_layers, dict[int, float]()

        def keep(layer: int, ctx: AttnContext, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor]) -> None:
            densities[layer] = density_of_call(methods[layer], ctx, q, k, v, extra)

        watched = model.with_attention(lambda layer_idx, **_: Watched(methods[layer_idx], keep))
        text, mask = encode_prompts(self.run.text_encoder, [prompt], self.run.device, self.run.text_padding)
        denoise_once(watched, self._clean, text, mask, sigma=0.5, topk=settings.topk, seed=settings.seed)
        return [densities[layer] for layer in range(self.num_layers)]
