"""Sampling of a teacher for a list of prompts to shards of latents and captions, in the format of `vsa encode`.

A student that learns from them sees only data of its teacher's distribution. Clip i of a prompt starts from the noise
of (seed, prompt, i), where equal prompts count on, and is integrated with Euler steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_files import finite, read_json
from vsa.checkpoints.weight_source import is_run, open_weights
from vsa.data.batch import pad_text
from vsa.data.codecs import Codec, WanVAE, check_frames
from vsa.data.plan import hash64
from vsa.data.pretrained import component_folder, read_config, refuse_missing, weights_digest
from vsa.data.resumable_writer import OutputOptions, PartContent, join_parts, write_parts
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import TextEncoder, UMT5Encoder
from vsa.diffusion.flow_matching import noise_like
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.diffusion.sampler import euler_sigmas, guide, sample_euler
from vsa.sampling.pipeline import load_run, repetitions, sample_latents
from vsa.sampling.record import settings_dict


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Sampling settings of a teacher; None values are taken from the run, or from the defaults of Wan's pipelines.

    Args:
        device: device of the teacher.
        weights: weights of a run, "ema" or "model"; None: averaged ones if there are any.
        size: height and width in pixels; None: the largest of a run.
        frames: frames of a clip; required with `size`.
        steps: Euler steps (50 for a pipeline).
        guidance: scale in the standard form (5 for a pipeline).
        flow_shift: flow shift of the noise levels (that of a pipeline's scheduler).
        negative_prompt: caption of the unconditional pass of a pipeline.
        topk: kv tiles per query tile of a run.
        sparsity: share of tiles skipped, instead of `topk`.
        compute_dtype: dtype of a pipeline's networks.
    """

    device: str
    weights: Group | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    flow_shift: float | None = None
    negative_prompt: str = ""
    topk: int | None = None
    sparsity: float | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.flow_shift is not None and not self.flow_shift > 0:
            raise ValueError(f"shift must be above 0, got {self.flow_shift:g}")


class Teacher(Protocol):
    """A model from which samples are drawn.

    Attributes:
        codec: codec of the latents.
        text_encoder: text encoder of the captions.
        record: all settings that determine a sample besides its noise, as JSON values.
    """

    codec: Codec
    text_encoder: TextEncoder
    record: dict[str, Any]

    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]` of B prompts, not normalised, from the noise of int64 seeds `[B]`."""
        ...


class RunTeacher:
    """A run of this project, by default with its averaged weights, if any, and its own sampling settings."""

    def __init__(self, spec: str, options: TeacherOptions) -> None:
        if options.negative_prompt:
            raise ValueError(
                f"--negative-prompt {options.negative_prompt!r}: a run uses its null embedding, not a negative prompt"
            )
        self._run = load_run(spec, weights=options.weights, device=options.device)
        if self._run.takes_images:
            raise ValueError(f"{spec}: image-to-video models cannot be sampled from prompts alone")
        self.codec, self.text_encoder = self._run.codec, self._run.text_encoder
        self._settings = self._run.settings(
            steps=options.steps,
            guidance=options.guidance,
            flow_shift=options.flow_shift,
            topk=options.topk,
            sparsity=options.sparsity,
            latent_shape=latent_shape(self.codec, options),
        )
        record = dict(settings_dict(self._settings, self._run))
        # settings of the call, which do not determine a sample
        for name in ("seed", "batch_size", "checkpoint"):
            del record[name]
        self.record = {"weights_digest": weights_digest(Path(self._run.source)), **record}

    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]`, not normalised."""
        run = self._run
        latents = sample_latents(run.model, run.text_encoder, prompts, seeds, self._settings)
        return run.statistics.denormalise(latents)


class PipelineTeacher:
    """A dense Wan 2.1 text-to-video pipeline in diffusers' layout; its VAE is never run."""

    def __init__(self, spec: str, options: TeacherOptions) -> None:
        if options.topk is not None or options.sparsity is not None:
            raise ValueError(f"a pipeline is dense, got --topk {options.topk} --sparsity {options.sparsity}")
        vae = WanVAE(spec)
        self.codec: Codec = vae
        self._encoder = UMT5Encoder(spec, dtype=options.compute_dtype, device=options.device)
        self.text_encoder: TextEncoder = self._encoder
        self._weights = open_weights(spec)
        folder, config = self._weights.folder, read_config(self._weights.folder, "WanTransformer3DModel")
        if config["in_channels"] != self.codec.channels:
            raise ValueError(
                f"{folder}: expected {self.codec.channels} input channels, as of its VAE, got {config['in_channels']}: "
                "image-to-video models cannot be sampled from prompts alone"
            )
        if self._weights.sparse is not None:
            raise ValueError(f"{folder} is sparse, but a teacher must be dense: sample the run it was exported from")
        shape = latent_shape(self.codec, options)
        if shape is None:
            raise ValueError("a pipeline needs --size HEIGHT WIDTH and --frames N")
        if any(n % p for n, p in zip(shape[1:], config["patch_size"], strict=True)):
            raise ValueError(
                f"latents {shape} of {options.frames} frames do not divide into patches {config['patch_size']}"
            )
        self._shape = shape
        steps = 50 if options.steps is None else options.steps
        shift = scheduler_shift(spec) if options.flow_shift is None else options.flow_shift
        self._sigmas = euler_sigmas(steps, shift)
        self._guidance, self._negative = 5.0 if options.guidance is None else options.guidance, options.negative_prompt
        self._dtype, self._device = getattr(torch, options.compute_dtype), options.device
        self._loaded: Any = None
        self.record = {
            "weights_digest": self._weights.digest,
            "steps": steps,
            "guidance": self._guidance,
            "flow_shift": shift,
            "negative_prompt": options.negative_prompt,
            "latent_shape": list(shape),
            "compute_dtype": options.compute_dtype,
        }

    @torch.no_grad()
    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]`, not normalised."""
        transformer, guided = self._transformer(), self._guidance != 1
        rows = self._encoder.encode_batch([*prompts, *([self._negative] * len(prompts) if guided else [])])
        # Wan's convention: zeros up to 512 tokens, which are attended to
        text, _ = pad_text(rows, length=self._encoder.max_tokens, padding="zeros")
        text = text.to(self._device, self._dtype)

        def velocity(x: Tensor, timestep: Tensor) -> Tensor:
            if guided:
                x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
            prediction = transformer(x.to(self._dtype), timestep, text, return_dict=False)[0].float()
            if not guided:
                return prediction
            cond, uncond = prediction.chunk(2)
            return guide(cond, uncond, self._guidance)

        noise = noise_like(torch.empty(len(prompts), *self._shape, device=self._device), seeds)
        latents = sample_euler(velocity, noise, self._sigmas)
        assert self.codec.statistics is not None
        mean, std = self.codec.statistics
        return LatentStatistics(mean=mean, std=std).denormalise(latents)

    def _transformer(self) -> Any:
        if self._loaded is None:
            from diffusers import WanTransformer3DModel

            folder = self._weights.folder
            loaded: Any = WanTransformer3DModel.from_pretrained(
                folder, torch_dtype=self._dtype, output_loading_info=True
            )
            refuse_missing(loaded[1], folder)
            for name, parameter in loaded[0].named_parameters():
                finite(parameter.detach(), name, str(folder))
            self._loaded = loaded[0].to(self._device).eval().requires_grad_(False)
        return self._loaded


def open_teacher(spec: str, options: TeacherOptions) -> Teacher:
    """The teacher of a run or checkpoint folder of this project, or else of a pipeline folder or hub id."""
    return (RunTeacher if is_run(spec) else PipelineTeacher)(spec, options)


def scheduler_shift(pipeline: str) -> float:
    """Flow shift of a pipeline's scheduler."""
    path = component_folder(pipeline, "scheduler") / "scheduler_config.json"
    config = read_json(path)
    shift = config.get("flow_shift", config.get("shift"))
    if shift is None:
        raise ValueError(f"{path} has no flow shift: set --shift")
    return float(shift)


def latent_shape(codec: Codec, options: TeacherOptions) -> tuple[int, int, int, int] | None:
    """The latent shape of --size and --frames; None without both."""
    if options.size is None and options.frames is None:
        return None
    if options.size is None or options.frames is None:
        raise ValueError(f"expected both --size and --frames, got --size {options.size} and --frames {options.frames}")
    (height, width), (_, sh, sw) = options.size, codec.stride
    if height < 1 or width < 1 or height % sh or width % sw:
        raise ValueError(f"size {height}x{width} must be multiples of the codec stride {sh}x{sw}")
    check_frames(codec, options.frames)
    return codec.latent_shape(options.frames, height, width)


def write_latents(
    teacher: Teacher,
    prompts: Sequence[str],
    out: str | Path,
    output: OutputOptions,
    *,
    clips_per_prompt: int = 1,
    seed: int = 0,
    batch_size: int = 4,
) -> list[str]:
    """Sample the teacher into shards; a repeated call continues an interrupted one.

    Args:
        teacher: teacher to sample.
        prompts: N captions.
        out: folder of shards.
        output: settings of the shards.
        clips_per_prompt: samples per prompt.
        seed: seed of the noise.
        batch_size: clips sampled together.

    Returns:
        Messages about the result.
    """
    for name, value in (("clips_per_prompt", clips_per_prompt), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    again = repetitions(prompts)

    def write(part: Path, span: range, advance: Callable[[int], None]) -> PartContent:
        # one more than the samples: the null embedding is in the text shard too
        encoders = {"codec": teacher.codec, "text_encoder": teacher.text_encoder}
        with ShardWriter(part, **encoders, samples_per_shard=len(span) + 1, dtype=output.dtype) as writer:
            for start in range(0, len(span), batch_size):
                clips = [divmod(i, clips_per_prompt) for i in span[start : start + batch_size]]
                places = ((n, again[n] * clips_per_prompt + i) for n, i in clips)
                seeds = [hash64(seed, "generate", prompts[n], i) >> 1 for n, i in places]
                latents = teacher.sample([prompts[n] for n, _ in clips], torch.tensor(seeds, dtype=torch.int64))
                for (n, i), noise_seed, row in zip(clips, seeds, latents, strict=True):
                    info = {"prompt_index": n, "clip_index": i, "noise_seed": noise_seed, "teacher": teacher.record}
                    writer.add(f"gen-{n:07d}-{i:03d}", row, [prompts[n]], info)
                    advance(1)
        return PartContent()

    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:12]
    report = write_parts(
        out,
        write,
        count=len(prompts) * clips_per_prompt,
        settings={
            "prompts": f"{len(prompts)} prompts ({digest})",
            "clips_per_prompt": clips_per_prompt,
            "seed": seed,
            "dtype": output.dtype,
            "codec": f"{teacher.codec.id} ({teacher.codec.hash})",
            "text_encoder": f"{teacher.text_encoder.id} ({teacher.text_encoder.hash})",
            **teacher.record,
        },
        output=output,
        title="sampling the teacher",
    )
    lines = [f"{report.samples} samples in {out}"]
    if output.world_size == 1:
        return [join_parts(out).summary(), *lines]
    if report.complete:
        return ["every part is done: run the command once more without --rank and --world-size", *lines]
    return lines
