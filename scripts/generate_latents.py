"""Samples a teacher for a list of prompts into shards of latents and captions, in the format of encode_videos.py.

A student that learns from its teacher's own samples meets no other data than the teacher's. The teacher is a diffusers
Wan pipeline (text to video; a folder or a hub id) or a run of this project:
python scripts/generate_latents.py Wan2.1-T2V-1.3B-Diffusers prompts.txt shards --size 448 832 --frames 61 --device cuda

Clip i of prompt n starts from the noise of (seed, n, i) and is integrated with Euler steps. An interrupted command is
repeated to go on. To share the work, run it with --rank R --world-size N on every GPU, then once without them.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vsa.checkpoints.sparse_config import has_sparse_config
from vsa.checkpoints.weight_files import pretrained_folder, read_json
from vsa.data.batch import pad_text
from vsa.data.codecs import Codec, WanVAE, check_frames
from vsa.data.plan import hash64
from vsa.data.pretrained import component_folder, read_config, refuse_missing, weights_digest
from vsa.data.prompts import read_prompts
from vsa.data.resumable_writer import PartContent, check_target, join_parts, write_parts
from vsa.data.shards import ShardWriter
from vsa.data.text import TextEncoder, UMT5Encoder
from vsa.diffusion.flow_matching import noise_like
from vsa.diffusion.sampler import euler_sigmas, guide, sample_euler
from vsa.errors import one_line_errors, usable_device
from vsa.sampling.pipeline import load_run, sample_latents, settings_dict


class Teacher(Protocol):
    """What samples are drawn from.

    Attributes:
        codec: of the latents.
        text_encoder: of the captions.
        record: everything that decides what a prompt becomes besides its noise, as JSON values.
    """

    codec: Codec
    text_encoder: TextEncoder
    record: dict[str, Any]

    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]` of B prompts, not normalised, from noise of int64 seeds `[B]`."""
        ...


class RunTeacher:
    """A run of this project: averaged weights where it has any, sampled as it samples, unless asked for otherwise."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.negative_prompt:
            raise ValueError(f"a run is guided from its null embedding, got --negative-prompt {args.negative_prompt!r}")
        self._run = load_run(args.teacher, weights=args.weights, device=args.device)
        self.codec, self.text_encoder = self._run.codec, self._run.text_encoder
        self._settings = self._run.settings(
            steps=args.steps,
            guidance=args.guidance,
            flow_shift=args.shift,
            topk=args.topk,
            sparsity=args.sparsity,
            latent_shape=latent_shape(self.codec, args),
        )
        record = dict(settings_dict(self._settings, self._run))
        # of the call, not of a sample
        for name in ("seed", "batch_size", "checkpoint"):
            del record[name]
        self.record = {"weights_digest": weights_digest(Path(self._run.source)), **record}

    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]`, not normalised."""
        run = self._run
        latents = sample_latents(run.model, run.text_encoder, prompts, seeds, self._settings)
        mean, std = (s.to(latents.device).view(1, -1, 1, 1, 1) for s in (run.latent_mean, run.latent_std))
        return latents * std + mean


class PipelineTeacher:
    """A dense text-to-video pipeline of Wan 2.1, in diffusers' layout; its VAE is never run."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.topk is not None or args.sparsity is not None:
            raise ValueError(f"a pipeline is dense, got --topk {args.topk} --sparsity {args.sparsity}")
        vae = WanVAE(args.teacher)
        self.codec: Codec = vae
        self._encoder = UMT5Encoder(args.teacher, dtype=args.compute_dtype, device=args.device)
        self.text_encoder: TextEncoder = self._encoder
        self._folder = pretrained_folder(args.teacher)
        config = read_config(self._folder, "WanTransformer3DModel")
        if config["in_channels"] != self.codec.channels:
            raise ValueError(
                f"{self._folder} takes {config['in_channels']} channels, its VAE makes {self.codec.channels}: "
                "image-to-video models cannot be sampled from prompts alone"
            )
        # the one file that also tells of components which a download leaves out
        parts = read_json(self._folder.parent / "model_index.json")
        if (parts.get("transformer_2") or [None])[0] is not None:
            raise ValueError(f"{args.teacher} has two transformers, one for each range of timesteps: not supported")
        if has_sparse_config(self._folder):
            raise ValueError(f"{self._folder} is sparse, a teacher must be dense: sample the run it was exported from")
        shape = latent_shape(self.codec, args)
        if shape is None:
            raise ValueError("a pipeline needs --size HEIGHT WIDTH and --frames N")
        if any(n % p for n, p in zip(shape[1:], config["patch_size"], strict=True)):
            raise ValueError(
                f"latents {shape} of {args.frames} frames do not divide into patches {config['patch_size']}"
            )
        self._shape = shape
        steps = 50 if args.steps is None else args.steps
        shift = scheduler_shift(args.teacher) if args.shift is None else args.shift
        self._sigmas = euler_sigmas(steps, shift)
        self._guidance, self._negative = 5.0 if args.guidance is None else args.guidance, args.negative_prompt
        self._dtype, self._device = getattr(torch, args.compute_dtype), args.device
        self._loaded: Any = None
        self.record = {
            "weights_digest": weights_digest(self._folder),
            "steps": steps,
            "guidance": self._guidance,
            "flow_shift": shift,
            "negative_prompt": args.negative_prompt,
            "latent_shape": list(shape),
            "compute_dtype": args.compute_dtype,
        }

    @torch.no_grad()
    def sample(self, prompts: Sequence[str], seeds: Tensor) -> Tensor:
        """Latents `[B, C, t, h, w]`, not normalised."""
        transformer, guided = self._transformer(), self._guidance != 1
        rows = self._encoder.encode_batch([*prompts, *([self._negative] * len(prompts) if guided else [])])
        # Wan's convention: zeros up to 512 tokens, attended to
        text, _ = pad_text(rows, length=self._encoder.max_tokens, padding="zeros")
        text = text.to(self._device, self._dtype)

        def velocity(x: Tensor, timestep: Tensor) -> Tensor:
            if guided:
                x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
            found = transformer(x.to(self._dtype), timestep, text, return_dict=False)[0].float()
            if not guided:
                return found
            cond, uncond = found.chunk(2)
            return guide(cond, uncond, self._guidance)

        noise = noise_like(torch.empty(len(prompts), *self._shape, device=self._device), seeds)
        latents = sample_euler(velocity, noise, self._sigmas)
        assert self.codec.statistics is not None
        mean, std = (s.to(latents.device).view(1, -1, 1, 1, 1) for s in self.codec.statistics)
        return latents * std + mean

    def _transformer(self) -> Any:
        if self._loaded is None:
            from diffusers import WanTransformer3DModel

            loaded: Any = WanTransformer3DModel.from_pretrained(
                self._folder, torch_dtype=self._dtype, output_loading_info=True
            )
            refuse_missing(loaded[1], self._folder)
            self._loaded = loaded[0].to(self._device).eval().requires_grad_(False)
        return self._loaded


def is_run(teacher: str) -> bool:
    """Whether a teacher is a run or checkpoint folder of this project; everything else is a pipeline."""
    return (Path(teacher) / "checkpoints").is_dir() or (Path(teacher) / "state.json").is_file()


def scheduler_shift(pipeline: str) -> float:
    """Flow shift of a pipeline's own scheduler.

    Raises:
        ValueError: it has no scheduler, or one without.
    """
    path = component_folder(pipeline, "scheduler") / "scheduler_config.json"
    config = read_json(path)
    shift = config.get("flow_shift", config.get("shift"))
    if shift is None:
        raise ValueError(f"{path} has no flow shift: give --shift")
    return float(shift)


def latent_shape(codec: Codec, args: argparse.Namespace) -> tuple[int, int, int, int] | None:
    """The latent shape of --size and --frames; None when neither is given.

    Raises:
        ValueError: only one of them, or a size or number of frames that the codec does not take.
    """
    if args.size is None and args.frames is None:
        return None
    if args.size is None or args.frames is None:
        raise ValueError(f"--size and --frames go together, got --size {args.size} and --frames {args.frames}")
    (height, width), (_, sh, sw) = args.size, codec.stride
    if height < 1 or width < 1 or height % sh or width % sw:
        raise ValueError(f"size {height}x{width} must be multiples of the codec stride {sh}x{sw}")
    check_frames(codec, args.frames)
    return codec.latent_shape(args.frames, height, width)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="run or checkpoint folder, otherwise a Wan pipeline: folder or hub id")
    parser.add_argument("prompts", type=Path, help='text file, one prompt a line, or .jsonl with {"prompt": "..."}')
    parser.add_argument("out", help="folder of shards to write")
    parser.add_argument("--clips-per-prompt", type=int, default=1, help="default %(default)s")
    parser.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="pixels (largest of the run)")
    parser.add_argument("--frames", type=int, help="frames of a clip (the same)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="Euler steps (those of the run's samples; 50 for a pipeline)")
    parser.add_argument("--guidance", type=float, help="uncond + G * (cond - uncond) (the same; 5 for a pipeline)")
    parser.add_argument("--shift", type=float, help="flow shift (the same; a pipeline's: that of its scheduler)")
    parser.add_argument("--negative-prompt", default="", help="what a pipeline is guided away from")
    parser.add_argument("--topk", type=int, help="tiles per query tile of a run (that of its training)")
    parser.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk; 0 is dense")
    parser.add_argument("--weights", choices=("ema", "model"), help="averaged or trained of a run (averaged if any)")
    parser.add_argument("--batch-size", type=int, default=4, help="clips sampled together (default %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, ... (cuda when there is one, shared out by rank)")
    parser.add_argument(
        "--compute-dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="what a pipeline's networks compute in (default %(default)s)",
    )
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"), help="of the latents")
    parser.add_argument(
        "--samples-per-shard", type=int, default=256, help="also what an interruption costs (default %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the data set in OUT")
    parser.add_argument("--rank", type=int, default=0, help="number of this process (default %(default)s)")
    parser.add_argument("--world-size", type=int, default=1, help="processes that share the work (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    for name in ("clips_per_prompt", "batch_size", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if args.shift is not None and not args.shift > 0:
        raise ValueError(f"shift must be positive, got {args.shift:g}")
    args.device = usable_device(args.device, rank=args.rank)
    check_target(args.out, overwrite=args.overwrite)
    prompts = read_prompts(args.prompts)
    teacher: Teacher = RunTeacher(args) if is_run(args.teacher) else PipelineTeacher(args)

    def write(part: Path, span: range, advance: Callable[[], None]) -> PartContent:
        # one more than the samples: the null embedding is in the text shard too
        with ShardWriter(
            part,
            codec=teacher.codec,
            text_encoder=teacher.text_encoder,
            samples_per_shard=len(span) + 1,
            dtype=args.dtype,
        ) as writer:
            for start in range(0, len(span), args.batch_size):
                clips = [divmod(i, args.clips_per_prompt) for i in span[start : start + args.batch_size]]
                seeds = [hash64(args.seed, "generate", *clip) >> 1 for clip in clips]
                latents = teacher.sample([prompts[n] for n, _ in clips], torch.tensor(seeds, dtype=torch.int64))
                for (n, i), seed, row in zip(clips, seeds, latents, strict=True):
                    info = {"prompt_index": n, "clip_index": i, "noise_seed": seed, "teacher": teacher.record}
                    writer.add(f"gen-{n:07d}-{i:03d}", row, [prompts[n]], info)
                    advance()
        return PartContent()

    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:12]
    report = write_parts(
        args.out,
        write,
        count=len(prompts) * args.clips_per_prompt,
        part_size=args.samples_per_shard,
        settings={
            "prompts": f"{len(prompts)} prompts ({digest})",
            "clips_per_prompt": args.clips_per_prompt,
            "seed": args.seed,
            "dtype": args.dtype,
            "codec": f"{teacher.codec.id} ({teacher.codec.hash})",
            "text_encoder": f"{teacher.text_encoder.id} ({teacher.text_encoder.hash})",
            **teacher.record,
        },
        overwrite=args.overwrite,
        rank=args.rank,
        world_size=args.world_size,
        title="sampling the teacher",
    )
    if args.world_size == 1:
        print(join_parts(args.out).summary())
    elif report.complete:
        print("every part is done: run the command once more without --rank and --world-size")
    print(f"{report.samples} samples in {args.out}")


if __name__ == "__main__":
    with one_line_errors():
        main()
