"""Sampling of a trained run: load weights, encode prompts, sample, decode.

N clips, B clips per batch, C T H W latent channels, frames and size, S E text tokens and width.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.attention.denoising import Denoising, DenoisingPlan, progress_of
from vsa.attention.kept_tiles import Budget
from vsa.attention.sparsity import SparsityPoint, SparsitySchedule
from vsa.checkpoints.experts import NoiseRange
from vsa.checkpoints.run_weights import RunWeights
from vsa.checkpoints.sampling_settings import sampling_of, sampling_of_export
from vsa.checkpoints.wan import gate_names
from vsa.checkpoints.weight_source import PretrainedWeights, open_weights
from vsa.checkpoints.weights import WeightSource
from vsa.config import build, check_targets
from vsa.data.batch import TextPadding, pad_text
from vsa.data.codecs import Codec
from vsa.data.index import USUAL_FPS
from vsa.data.text import TextEncoder
from vsa.diffusion.flow_matching import TIMESTEP_SCALE, FlowShift, give_first_frame, noise_like
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.diffusion.rollout import rollout_noise
from vsa.diffusion.sampler import euler_sigmas, guide, sample_euler, sample_few_step
from vsa.files import check_kind
from vsa.models.compute_dtype import compute_in, hold_rounded, rounds_to
from vsa.models.network import Network
from vsa.sampling.first_frames import CLEAN, FirstFrames, frames_of, held_out_frames, image_inputs
from vsa.sampling.settings import SampleSettings

ProgressFn = Callable[[int], None]
"""Called after every sampler step with the number of clips in the batch."""


@dataclass(frozen=True, kw_only=True)
class SamplingPipeline:
    """A trained model with its codec, text encoder and sampling settings.

    Args:
        model: the model in eval mode, on its device.
        codec: the codec of the training latents.
        text_encoder: the encoder of the training captions.
        latent_mean: `[C]` mean by which the latents were normalised.
        latent_std: `[C]` standard deviation by which the latents were normalised.
        sparsity: sparsity schedule of the run.
        flow_shift: flow shift of the training timesteps.
        latent_shapes: latent shapes on which the model was trained.
        step: optimizer step of the weights.
        source: checkpoint folder.
        weights: "ema" or "model".
        text_padding: padding of the training captions.
        sampling: settings with which the run samples its own clips; see `sampling_of`. Not used for a run with a step
            list, whose config describes the sampling of its teacher.
        fps: frames per second of its clips.
        step_list: timesteps of a distilled generator; None for a model that needs many steps.
        continues: whether the model was trained to continue a first frame.
        first_frames: what the model is given of the first frames of clips; None: nothing.
        image_encoder: hash of the image encoder of the training data; None without one.
        noise_range: noise levels of an expert (Wan2.2 A14B); None: the model is for all.
        low: the run of the expert for lower noise levels, see `with_low`.
        compute_dtype: dtype of its matrix products.
    """

    model: Network
    codec: Codec
    text_encoder: TextEncoder
    latent_mean: Tensor
    latent_std: Tensor
    sparsity: SparsitySchedule
    flow_shift: FlowShift
    latent_shapes: tuple[tuple[int, ...], ...]
    step: int
    source: str
    weights: str
    text_padding: TextPadding = "mask"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fps: float = USUAL_FPS
    step_list: tuple[float, ...] | None = None
    continues: bool = False
    first_frames: FirstFrames | None = None
    image_encoder: str | None = None
    noise_range: NoiseRange | None = None
    low: SamplingPipeline | None = None
    compute_dtype: torch.dtype = torch.float32

    @property
    def takes_images(self) -> bool:
        """Whether the model cannot sample without image conditions, as image-to-video models of Wan2.1 and A14B."""
        return self.model.in_channels > self.model.out_channels

    def network_at(self, timestep: float) -> Network:
        """The network that denoises at a timestep: that of the expert, as in diffusers' `WanPipeline`."""
        if self.low is None or self.noise_range is None or timestep >= self.noise_range[0] * TIMESTEP_SCALE:
            return self.model
        return self.low.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def statistics(self) -> LatentStatistics:
        return LatentStatistics(mean=self.latent_mean, std=self.latent_std)

    def settings(
        self,
        *,
        seed: int = 0,
        steps: int | None = None,
        guidance: float | None = None,
        flow_shift: float | None = None,
        topk: int | tuple[int, ...] | None = None,
        sparsity: float | None = None,
        at: SparsityPoint = "current",
        denoising: Mapping[str, Any] | None = None,
        latent_shape: Sequence[int] | None = None,
        batch_size: int = 16,
    ) -> SampleSettings:
        """Sampling settings; missing ones are taken from the run, with its largest shape and its last trained top-k.

        Args:
            steps: sampler steps; None, like guidance and flow shift: as the run samples its own clips, or else 32
                steps, guidance 1 and the shift of the training. A run with a step list is always sampled at that list,
                with guidance 1 by default.
            topk: kv tiles per query tile, one number for all layers or one per layer.
            sparsity: share of tiles skipped in every layer, instead of `topk`.
            at: point of the schedule for the top-k if both are None: the last training step of the weights (current),
                all tiles (dense), the end value of the schedule (target), or half or double the current one.
            denoising: options that replace those of the run's `DenoisingPlan`. A top-k or sparsity replaces all
                budgets of the plan except those given here; `dense` ignores the plan.
        """
        if latent_shape is None:
            latent_shape = max(self.latent_shapes, key=lambda shape: shape[1] * shape[2] * shape[3])
        shape = tuple(int(n) for n in latent_shape)
        if len(shape) != 4:
            raise ValueError(f"latent_shape must be four positive sizes (C, T, H, W), got {shape}")
        num_tiles = self.model.layout_for(shape).num_video_tiles
        if not self.model.selects:
            for name, value in {"topk": topk, "sparsity": sparsity}.items():
                if value is not None:
                    reason = "has no top-k" if self.model.predicts else "selects no tiles"
                    raise ValueError(f"{name} {value} does not apply to {self.model.attention_names}: it {reason}")
            asked_plan = DenoisingPlan(**(denoising or {}))
            asked_plan.refuse_without_topk(self.model.attention_names, predicts=self.model.predicts)
            topk = num_tiles
        if topk is not None and sparsity is not None:
            raise ValueError(f"expected at most one of topk and sparsity, got topk={topk} and sparsity={sparsity}")
        if topk is not None and (topk if isinstance(topk, int) else max(topk)) > num_tiles:
            raise ValueError(f"topk {topk} is above the number of tiles {num_tiles} of latents {shape}")
        plan = self.sparsity.denoising if at != "dense" else DenoisingPlan()
        budgets = sparsity is None and topk is None
        plan = replace(plan if budgets else plan.without_budgets(), **(denoising or {}))
        if sparsity is not None:
            topk = Budget(sparsity=sparsity).tiles(num_tiles, plan.rounding)
        if topk is not None:
            kept = plan.constant((topk,) if isinstance(topk, int) else topk, num_tiles)
        else:
            kept = self.sparsity.with_denoising(plan).topk_after(self.step, num_tiles, len(self.model.blocks), at)
        overrides = {"steps": steps, "guidance": guidance, "flow_shift": flow_shift}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        if self.step_list is None:
            own = {"flow_shift": self.flow_shift(math.prod(self.model.grid(shape))), **self.sampling}
        else:
            for name in ("steps", "flow_shift"):
                if name in overrides:
                    raise ValueError(
                        f"{name} {overrides[name]} does not apply to {self.source}: it is distilled to the timesteps "
                        f"{list(self.step_list)}"
                    )
            own = {"steps": len(self.step_list), "step_list": self.step_list}
        return SampleSettings(
            seed=seed,
            **{**own, **overrides},
            topk=kept,
            denoising=plan,
            latent_shape=shape,  # type: ignore[arg-type]
            batch_size=batch_size,
            text_padding=self.text_padding,
        )


def load_run(
    path: str | Path, *, weights: Literal["ema", "model"] | None = None, device: torch.device | str | None = None
) -> SamplingPipeline:
    """Load the model of a run, or of an export that has `sampling.json`, for sampling.

    It computes in the dtype of its training, `task.parallel.compute_dtype`, and its parameters are rounded to it.

    Args:
        path: a run folder (its newest valid checkpoint), a checkpoint folder, an export or the hub id of either.
        weights: "ema" for the averaged weights, "model" for the trained ones; None: averaged ones if there are any.
        device: device of the model; None: a GPU if there is one.
    """
    source = open_weights(path, weights)
    assert isinstance(source, RunWeights | PretrainedWeights)
    state, config = source.state, source.run_config
    check_targets(config)
    if "data" not in config:
        raise ValueError(
            f"checkpoint {source.name} holds weights without a codec and a text encoder: convert it again with "
            "--like RUN, a run that was trained on such latents and captions (`vsa convert`), or sample its "
            "export through a pipeline (`vsa sample --pipeline PIPELINE --transformer EXPORT`)"
        )
    if isinstance(source, RunWeights):
        task = {"objective": {"shift": dict}, "parallel?": dict | None}
        source.require_config(task=task, **({} if "sparse_attention" in state else {"sparsity": dict}))
    codec, text_encoder = _matching("codec", source), _matching("text_encoder", source)
    schedule = source.schedule
    # the initialisation, which is overwritten, must not change the caller's random state
    with torch.random.fork_rng(devices=[]):
        model = source.network()
    source.load(model, "required" if gate_names(model) else "absent")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model.eval().requires_grad_(False)
    parallel = config["task"].get("parallel") or {}
    if (dtype := rounds_to(parallel.get("compute_dtype", "auto"), device.type)) is not None:
        hold_rounded(model, dtype)
        compute_in(model, dtype)
    exported = source.sparse if isinstance(source, PretrainedWeights) else None
    return SamplingPipeline(
        model=model.to(device),
        codec=codec,
        text_encoder=text_encoder,
        latent_mean=torch.tensor(state["latent_mean"]),
        latent_std=torch.tensor(state["latent_std"]),
        sparsity=schedule,
        flow_shift=build(config["task"]["objective"]["shift"]),
        latent_shapes=tuple(tuple(shape) for shape in state["latent_shapes"]),
        step=state.get("step", 0),
        source=source.source,
        weights=source.group,
        text_padding=config["data"].get("text_padding", "mask"),
        sampling={**sampling_of(config), **({} if exported is None else sampling_of_export(exported))},
        fps=((config.get("callbacks") or {}).get("samples") or {}).get("fps") or state.get("fps", USUAL_FPS),
        step_list=source.step_list,
        continues=config["task"]["objective"].get("first_frame", 0) > 0,
        first_frames=held_out_frames(config) if model.in_channels > model.out_channels else None,
        image_encoder=state.get("image_encoder", {}).get("hash"),
        noise_range=source.noise_range,
        compute_dtype=dtype or torch.float32,
    )


def _matching(key: str, source: WeightSource) -> Any:
    """The codec or text encoder of a config, checked against the one that encoded the training data."""
    check_kind(source.run_config, {"data": {key: dict}}, f"the config of checkpoint {source.name}")
    component, expected = build(source.run_config["data"][key]), source.state[key]
    if component.hash != expected["hash"]:
        raise ValueError(
            f"data.{key} of checkpoint {source.name} is {component.id} with hash {component.hash}, but the training "
            f"data were made with {expected['id']}, hash {expected['hash']}"
        )
    return component


def repetitions(prompts: Sequence[str]) -> list[int]:
    """Number of equal prompts before each one."""
    counts = {prompt: itertools.count() for prompt in prompts}
    return [next(counts[prompt]) for prompt in prompts]


def clip_seeds(seed: int, prompts: Sequence[str]) -> Tensor:
    """int64 `[N]` noise seeds of N prompts, functions of (seed, prompt, its repetition number) whatever the others."""
    texts = (f"clip/{seed}/{again}/{prompt}" for again, prompt in zip(repetitions(prompts), prompts, strict=True))
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(d, "little") >> 1 for d in digests], dtype=torch.int64)


def encode_prompts(
    text_encoder: TextEncoder, prompts: Sequence[str], device: torch.device | str, padding: TextPadding = "mask"
) -> tuple[Tensor, Tensor | None]:
    """Text embeddings of prompts, zero-padded to the encoder's length so that batches do not change a clip.

    Args:
        text_encoder: encoder of the training captions.
        prompts: B captions; "" is the null embedding.
        device: device of the result.
        padding: see `vsa.data.batch.TextPadding`.

    Returns:
        Text `[B, S, E]` float32 and mask bool `[B, S]`, True where a token is real (None for zeros).
    """
    text, mask = pad_text(text_encoder.encode_batch(prompts), length=text_encoder.max_tokens, padding=padding)
    return text.to(device), None if mask is None else mask.to(device)


@torch.no_grad()
def sample_latents(
    model: Network | SamplingPipeline,
    text_encoder: TextEncoder,
    prompts: Sequence[str],
    seeds: Tensor,
    settings: SampleSettings,
    progress: ProgressFn | None = None,
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Sample normalised latents of one batch of prompts, by Euler steps or at a step list, with guidance.

    A clip depends on its prompt and its seed, not on its batch; the fresh noise of a step list depends on the seed too.

    Args:
        model: velocity model, or a run, maybe of two experts; its mode (train or eval) is not changed.
        text_encoder: encoder of the training captions.
        prompts: B captions.
        seeds: int64 `[B]` noise seeds.
        settings: sampling settings; `batch_size` and `seed` are not used.
        progress: function called with B after every step.
        given: what it is given of B first frames, on its device, see `vsa.sampling.first_frames`.

    Returns:
        float32 `[B, C, T, H, W]` on the model's device.
    """
    network_at = model.network_at if isinstance(model, SamplingPipeline) else lambda _: model
    device = next(network_at(TIMESTEP_SCALE).parameters()).device
    guided = settings.guidance != 1.0
    # the conditional and the unconditional half share one forward
    captions = [*prompts, *([""] * len(prompts) if guided else [])]
    text, mask = encode_prompts(text_encoder, captions, device, settings.text_padding)

    first, images = given.get(CLEAN), image_inputs(given, 2 if guided else 1)
    denoising, passes = Denoising(settings.denoising), enumerate(settings.timesteps)

    def velocity(x: Tensor, timestep: Tensor) -> Tensor:
        step, t = next(passes)
        network, now = network_at(t), denoising.at(step, progress_of(t), conditional="first" if guided else None)
        if first is not None:
            x, timestep = give_first_frame(x, timestep, first, every)
        if not guided:
            return network(x, timestep, text, mask, **images, topk=settings.topk, denoising=now).float()
        x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
        both = network(x, timestep, text, mask, **images, topk=settings.topk, denoising=now).float()
        cond, uncond = both.chunk(2)
        return guide(cond, uncond, settings.guidance)

    noise = noise_like(torch.empty(len(prompts), *settings.latent_shape, device=device), seeds)
    every = torch.ones(len(prompts), dtype=torch.bool, device=device)
    on_step = None if progress is None else (lambda i, x: progress(len(prompts)))
    if settings.step_list is None:
        latents = sample_euler(velocity, noise, euler_sigmas(settings.steps, settings.flow_shift), on_step)
    else:
        fresh = partial(rollout_noise, noise, seeds)
        latents = sample_few_step(velocity, noise, settings.step_list, fresh=fresh, on_step=on_step)
    return latents if first is None else torch.cat([first.to(latents), latents[:, :, 1:]], dim=2)


def decode_latents(codec: Codec, latents: Tensor, statistics: LatentStatistics) -> Tensor:
    """uint8 videos `[B, T, H, W, 3]` on the CPU from normalised latents `[B, C, t, h, w]`, decoded on their device."""
    return torch.stack([codec.decode(row).cpu() for row in statistics.denormalise(latents.float())])


def generate(
    run: SamplingPipeline, prompts: Sequence[str], settings: SampleSettings, progress: ProgressFn | None = None
) -> Tensor:
    """Videos for prompts; a clip depends on its prompt, its repetition number and the settings, not on other prompts.

    Args:
        run: run from `load_run`.
        prompts: N captions.
        settings: settings from `SamplingPipeline.settings`.
        progress: function called after every sampler step with the number of clips it advanced; N * steps in all.

    Returns:
        uint8 `[N, T, H, W, 3]`.
    """
    if not prompts:
        raise ValueError("expected at least one prompt, got none")
    frames = frames_of(run, prompts, settings.latent_shape)
    seeds = clip_seeds(settings.seed, prompts)
    videos = []
    for start in range(0, len(prompts), settings.batch_size):
        part = slice(start, start + settings.batch_size)
        given = {name: tensor[part] for name, tensor in frames.items()}
        latents = sample_latents(run, run.text_encoder, prompts[part], seeds[part], settings, progress, given)
        videos.append(decode_latents(run.codec, latents, run.statistics))
    return torch.cat(videos)
