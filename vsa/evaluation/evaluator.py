"""Evaluation of the checkpoints of a run: validation loss, agreement with a reference, signs of broken clips.

N clips, T H W frames, height and width of a clip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.config import build, stored_data
from vsa.data.batch import VideoBatch
from vsa.diffusion.decile_means import DecileMeans
from vsa.evaluation import feature_distance
from vsa.evaluation.feature_distance import ImageFeatures
from vsa.evaluation.latent_distance import LEAST_CLIPS, against_real, noise_like, refuse_few
from vsa.evaluation.video_metrics import DATA_RANGE, black_frames, flicker, motion, psnr, ssim, uniform_frames
from vsa.objectives.flow_matching import VALIDATION_SEED, FlowMatchingLoss
from vsa.sampling.first_frames import frames_of
from vsa.sampling.pipeline import (
    ProgressFn,
    SampleSettings,
    SamplingPipeline,
    clip_seeds,
    decode_latents,
    sample_latents,
)
from vsa.sampling.record import settings_dict

CLIP_METRICS: Mapping[str, Callable[[Tensor], float]] = {
    "black": black_frames,
    "uniform": uniform_frames,
    "motion": motion,
    "flicker": flicker,
}
"""Metrics of single clips."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """All settings that determine the metrics of a checkpoint.

    Args:
        prompts: N captions.
        seed: clips start from the noise of `clip_seeds`, in the run and in its reference.
        steps: Euler steps; None: as the run samples, which a run with a step list requires.
        guidance: classifier-free guidance scale; None: as the run samples.
        flow_shift: flow shift of the sampler; None: that of the training.
        batch_size: clips and validation samples computed together; affects results only by rounding.
        weights: averaged or trained weights.
        reference: reference of the clips: "dense" is the same model with all tiles, "none" no reference, any other
            value a checkpoint of another run with its digest.
        val_loss: whether to compute the validation loss.
        lpips: folder of LPIPS weights; None skips LPIPS.
        real: maximum number of held-out clips that the clips are compared with.
        transformer_2: checkpoint of the expert of low noise with its digest; None: one model for all noise levels.
    """

    prompts: tuple[str, ...]
    seed: int = 0
    steps: int | None = 32
    guidance: float | None = 1.0
    flow_shift: float | None = None
    batch_size: int = 16
    weights: Literal["ema", "model"] = "ema"
    reference: str = "dense"
    val_loss: bool = True
    lpips: str | None = None
    real: int = 256
    transformer_2: str | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("no prompts: the run has neither prompts nor held-out captions, set --prompt or --prompts")

    @property
    def digest(self) -> str:
        """Eight hex digits that distinguish rows of different settings."""
        # rows of one model keep their digits
        values = {name: value for name, value in asdict(self).items() if (name, value) != ("transformer_2", None)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results for one checkpoint.

    Args:
        record: plain values: step, settings, metrics, clips.
        videos: uint8 `[N, T, H, W, 3]`.
        reference: clips of the reference, None without one.
    """

    record: Mapping[str, Any]
    videos: Tensor
    reference: Tensor | None


class Evaluator:
    """Measures checkpoints of one run under the same settings.

    Args:
        settings: evaluation settings.
        reference: reference run; None if `settings.reference` is "dense" or "none".
        lpips: distance of two clips; None skips LPIPS.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        reference: SamplingPipeline | None = None,
        lpips: Callable[[Tensor, Tensor], float] | None = None,
    ):
        self.settings = settings
        self._reference, self._lpips = reference, lpips
        self._kept: tuple[SampleSettings, Tensor] | None = None
        self._real: tuple[Tensor, feature_distance.Features] | None = None

    def __call__(self, run: SamplingPipeline, checkpoint: Checkpoint, progress: ProgressFn | None = None) -> Evaluation:
        """Compute the validation loss, the clips and their metrics.

        Args:
            run: pipeline loaded from `checkpoint`.
            checkpoint: the checkpoint of the weights.
            progress: function called with the number of clip-steps that were just done.
        """
        s = self.settings
        ours = self._ours(run)
        other = self._other(run, ours)
        metrics: dict[str, float] = {}
        if s.val_loss:
            metrics |= validation_loss(run, {**checkpoint.state, "config": checkpoint.config}, batch_size=s.batch_size)
        videos, finite, latents = sample_clips(run, s.prompts, ours, progress)
        reference = None if other is None else self._reference_clips(*other, progress)
        clips = [
            {"prompt": prompt, "finite": bool(ok), **self._clip(videos, reference, i)}
            for i, (prompt, ok) in enumerate(zip(s.prompts, finite, strict=True))
        ]
        metrics["non_finite"] = 1 - float(finite.double().mean())
        for name in clips[0]:
            if name not in ("prompt", "finite"):
                metrics[name] = sum(clip[name] for clip in clips) / len(clips)
        if reference is not None:
            # over all pixels, because a clip that equals its reference would make the mean over clips infinite
            metrics["psnr"] = psnr(videos, reference)
        distances, missing = self._distances(run, checkpoint.config, latents, videos)
        metrics |= distances
        record = {
            "step": run.step,
            "digest": weights_digest(checkpoint, s.weights),
            "settings": asdict(s),
            "settings_digest": s.digest,
            "data_range": DATA_RANGE,
            "metrics": metrics,
            "missing": missing,
            "clips": clips,
            "sampling": settings_dict(ours, run),
            "reference_sampling": None if other is None else settings_dict(other[1], other[0]),
            "torch": torch.__version__,
        }
        return Evaluation(record=record, videos=videos, reference=reference)

    def clip_steps(self, run: SamplingPipeline) -> int:
        """Clip-steps of one evaluation, for its progress: sampler steps of all clips and of their references."""
        ours = self._ours(run)
        other = self._other(run, ours)
        return len(self.settings.prompts) * (ours.steps + (0 if other is None else other[1].steps))

    def _ours(self, run: SamplingPipeline) -> SampleSettings:
        s = self.settings
        return run.settings(
            seed=s.seed, steps=s.steps, guidance=s.guidance, flow_shift=s.flow_shift, batch_size=s.batch_size
        )

    def _other(self, run: SamplingPipeline, ours: SampleSettings) -> tuple[SamplingPipeline, SampleSettings] | None:
        """The reference of a run and its sampling settings.

        It uses the same noise, steps and noise levels; if one of the two has a step list, each has its own settings.
        """
        if self.settings.reference == "none":
            return None
        if self._reference is None:
            if run.model.is_dense:
                raise ValueError(
                    f"{run.source} has dense attention, so the dense reference is the run itself: set --reference "
                    "RUN_FOLDER or --reference none"
                )
            tiles = run.model.layout_for(ours.latent_shape).num_video_tiles
            return run, replace(ours, topk=KeptTiles((tiles,)), denoising=DenoisingPlan())
        if self._reference.codec.hash != run.codec.hash:
            raise ValueError(
                f"the reference {self._reference.source} has codec {self._reference.codec.id}, "
                f"{run.source} has {run.codec.id}"
            )
        own = self._reference.settings(seed=ours.seed, latent_shape=ours.latent_shape, batch_size=ours.batch_size)
        if ours.step_list is not None or own.step_list is not None:
            return self._reference, own
        return self._reference, replace(ours, topk=own.topk, denoising=own.denoising)

    def _reference_clips(self, run: SamplingPipeline, settings: SampleSettings, progress: ProgressFn | None) -> Tensor:
        # clips of another run are the same for every checkpoint
        if self._kept is not None and self._kept[0] == settings and run is self._reference:
            return self._kept[1]
        clips = sample_clips(run, self.settings.prompts, settings, progress)[0]
        self._kept = settings, clips
        return clips

    def _distances(
        self, run: SamplingPipeline, config: Mapping[str, Any], latents: Tensor, videos: Tensor
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Distances of clips to held-out ones by latents and by image features, and the reasons why some are missing.

        Args:
            run: the model with its latent statistics.
            config: config of its checkpoint.
            latents: its clips, normalised `[N, C, t, h, w]`.
            videos: the same, uint8 `[N, T, H, W, 3]`.
        """
        metrics: dict[str, float] = {}
        name = "kernel_distance"
        try:
            real = held_out_latents(run, config, latents, self.settings.real)
            metrics |= against_real(latents, real)
            name = "frame_kernel_distance"
            network = ImageFeatures(run.device)
            # they are the same for every checkpoint
            if self._real is None or not torch.equal(self._real[0], real):
                self._real = real, _decoded_features(network, run, real)
            noise = noise_like(real, len(latents), torch.Generator().manual_seed(0)).float()
            ours = feature_distance.clip_features(network, videos)
            metrics |= feature_distance.distances_to_real(ours, self._real[1], _decoded_features(network, run, noise))
        except (ValueError, OSError, AttributeError) as error:
            # the data may be gone, which is no error for the other metrics
            return metrics, {name: " ".join(str(error).split())}
        return metrics, {}

    def _clip(self, videos: Tensor, reference: Tensor | None, i: int) -> dict[str, Any]:
        metrics = {name: measure(videos[i]) for name, measure in CLIP_METRICS.items()}
        if reference is not None:
            metrics |= {f"reference_{name}": measure(reference[i]) for name, measure in CLIP_METRICS.items()}
            metrics["flicker_excess"] = metrics["flicker"] - metrics["reference_flicker"]
            metrics |= {"psnr": psnr(videos[i], reference[i]), "ssim": ssim(videos[i], reference[i])}
            if self._lpips is not None:
                metrics["lpips"] = self._lpips(videos[i], reference[i])
        return metrics


def weights_digest(checkpoint: Checkpoint, weights: str) -> str:
    """Tells the weights of a checkpoint from others: the SHA-256 of their file or files."""
    if not checkpoint.has(weights):
        raise ValueError(f"checkpoint {checkpoint.path} has no {weights} weights")
    return checkpoint.digest(weights)


@torch.no_grad()
def validation_loss(run: SamplingPipeline, state: Mapping[str, Any], *, batch_size: int) -> dict[str, float]:
    """`val/loss` and `val/loss_decile_D` as in the run, with its held-out samples, noise, timesteps and top-k.

    Args:
        run: the model with its latent statistics.
        state: state of its checkpoint, with the config of data and objective, and the seed.
        batch_size: maximum number of samples computed together.
    """
    objective = build(state["config"]["task"]["objective"])
    if not isinstance(objective, FlowMatchingLoss):
        raise ValueError(
            f"{run.source} was trained on {type(objective).__name__}, which has no validation loss: use --no-val-loss"
        )
    data = stored_data(state["config"])
    data.setup()
    batches = data.val_dataloader()
    if not len(batches):
        raise ValueError(f"the data of {run.source} have no validation samples: use --no-val-loss")
    means = DecileMeans()
    for whole in batches:
        for batch in split_batch(whole, batch_size):
            batch = batch.to(run.device)
            latents = run.statistics.normalise(batch.latents)
            topk = run.settings(latent_shape=latents.shape[1:]).topk
            noised = objective.noised(run.model, batch, latents, seed=state["seed"] + VALIDATION_SEED)
            terms = objective(run.model, batch, noised, topk=topk)
            means.add(terms.mse, terms.sigmas)
    return means.metrics("val/loss")


def held_out_latents(run: SamplingPipeline, config: Mapping[str, Any], latents: Tensor, most: int) -> Tensor:
    """Held-out clips of a run to compare its clips with, normalised `[M, C, T, H, W]`.

    Args:
        run: the model with its latent statistics.
        config: config of its checkpoint.
        latents: its clips `[N, C, T, H, W]`; only held-out clips of this shape count.
        most: maximum number of held-out clips.

    Raises:
        ValueError: less than `LEAST_CLIPS` clips on either side.
    """
    shape, real = latents.shape[1:], dict[str, Tensor]()
    refuse_few(len(latents), f"clips are drawn: --held-out {LEAST_CLIPS} draws them")
    data = stored_data(config)
    data.setup()
    for batch in data.val_dataloader():
        if batch.latents.shape[1:] == shape and len(real) < most:
            real |= zip(batch.sample_ids, run.statistics.normalise(batch.latents), strict=True)
    refuse_few(len(real), f"held-out clips have the shape {'x'.join(map(str, shape))}")
    return torch.stack([*real.values()][:most])


def _decoded_features(network: ImageFeatures, run: SamplingPipeline, latents: Tensor) -> feature_distance.Features:
    """Features of clips decoded from normalised latents, a few at a time."""
    parts = [
        feature_distance.clip_features(network, decode_latents(run.codec, part, run.statistics))
        for part in latents.split(16)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def split_batch(batch: VideoBatch, size: int) -> Iterator[VideoBatch]:
    """Parts of at most `size` samples with their slots and seeds, so that every sample keeps its noise and timestep."""
    for start in range(0, len(batch.sample_ids), size):
        yield batch.rows(slice(start, start + size))


def sample_clips(
    run: SamplingPipeline, prompts: Sequence[str], settings: SampleSettings, progress: ProgressFn | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The clips of `vsa.sampling.pipeline.generate`, a mask of the finite ones, and their latents.

    Returns:
        uint8 `[N, T, H, W, 3]`, decoded with zeros instead of NaN and infinity, bool `[N]`, and `[N, C, t, h, w]`.
    """
    seeds, frames = clip_seeds(settings.seed, prompts), frames_of(run, prompts, settings.latent_shape)
    videos, sampled = [], []
    for start in range(0, len(prompts), settings.batch_size):
        part = slice(start, start + settings.batch_size)
        given = {name: tensor[part] for name, tensor in frames.items()}
        latents = sample_latents(run, run.text_encoder, prompts[part], seeds[part], settings, progress, given)
        sampled.append(latents.cpu())
        latents = latents.nan_to_num(0, 0, 0)
        videos.append(decode_latents(run.codec, latents, run.statistics))
    all_latents = torch.cat(sampled)
    return torch.cat(videos), all_latents.isfinite().flatten(1).all(1), all_latents
