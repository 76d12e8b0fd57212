"""Few-step distillation of the toy model in three ways, with a figure and a table of students and teacher.

Students: dense, sparse (both by distribution matching) and merged (the weight deltas of the dense student added to
those of a sparse adaptation of the teacher, `vsa merge`). Every seed has its own teacher. Finished runs with the same
number of steps are kept: use another folder for other settings.

python -m benchmarks.toy.distill outputs/distill_toy --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from benchmarks.toy.distill_report import MEASURES, RECONSTRUCTIONS, draw, show
from benchmarks.toy.frechet import latent_distance, refuse_too_few
from benchmarks.toy.score import CHANCE, score
from benchmarks.toy.study import parse_counts, study_parser, train_all, write_json
from vsa.attention.full import FullAttention
from vsa.checkpoints.merge import merge_checkpoints
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.data.codecs import HaarCodec
from vsa.data.toy_videos import caption_of, clip_attributes, evaluation_prompts, render_clip
from vsa.errors import one_line_errors
from vsa.sampling.pipeline import (
    ProgressFn,
    SampleSettings,
    SamplingPipeline,
    clip_seeds,
    decode_latents,
    load_run,
    sample_latents,
)
from vsa.sampling.record import settings_dict

ARMS = {
    "dense": ("experiment=distill_toy", "attention=full"),
    "sparse": ("experiment=distill_toy",),
    # at the sparsity of distill_toy
    "adapted": (
        *("experiment=finetune_toy", "sparsity.sparsity=0.8"),
        *("task.objective.data=0", "task.objective.velocity=1"),
    ),
}
STUDENTS = ("dense", "sparse", "merged")
# first seed of rendered sets that no training uses; each seed has two
REAL_SETS = 1_000_000
# clips in the figure, of different colours and directions
SHOWN = [0, 7, 14, 21]


def merge(folder: Path) -> None:
    """Write the merged student of one seed; always recomputed, in seconds, so that it matches its sources."""
    merged, teacher, adapted, dense = (folder / name for name in ("merged", "teacher", "adapted", "dense"))
    shutil.rmtree(merged, ignore_errors=True)
    merge_checkpoints(str(teacher), merged, sparse=str(adapted), few_step=str(dense))


def load_runs(folder: Path, device: str | None) -> dict[str, SamplingPipeline]:
    """Teacher and students of one seed.

    Raises:
        ValueError: a run is missing, or the students cannot be compared because of different step lists, losses, top-k
            of the two sparse ones, or latent statistics than those of the teacher.
    """
    runs = {name: load_run(folder / name, device=device) for name in ("teacher", *STUDENTS)}
    teacher, dense = runs["teacher"], runs["dense"]
    for name in STUDENTS:
        run = runs[name]
        if run.step_list is None or run.step_list != dense.step_list:
            raise ValueError(f"step lists differ: {run.source} has {run.step_list}, {dense.source} {dense.step_list}")
        if not torch.equal(run.latent_mean, teacher.latent_mean) or not torch.equal(run.latent_std, teacher.latent_std):
            raise ValueError(f"latent statistics of {run.source} are not those of its teacher {teacher.source}")
    refuse_other_objectives([dense, runs["sparse"]])
    sparse, merged = (runs[name].settings().topk for name in ("sparse", "merged"))
    if sparse != merged:
        raise ValueError(f"{runs['sparse'].source} has topk {sparse}, {runs['merged'].source} topk {merged}")
    return runs


def objective(run: SamplingPipeline) -> Mapping[str, Any]:
    """Settings of the losses that a run was trained with."""
    return resolve_checkpoint(run.source).state["config"]["task"]["objective"]


def refuse_other_objectives(runs: Sequence[SamplingPipeline]) -> None:
    """Raise ValueError for runs with different losses, because finished runs with any settings are kept."""
    first = objective(runs[0])
    for run in runs[1:]:
        other = objective(run)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{run.source} was trained with objective.{key}={other.get(key)}, {runs[0].source} with "
                    f"{first.get(key)}: use another folder"
                )


def sampled(
    runs: Mapping[str, SamplingPipeline], seed: int, steps: int, guidance: float, batch_size: int
) -> dict[str, tuple[SamplingPipeline, SampleSettings]]:
    """The compared rows by name, each a run with its sampling settings."""
    few = len(runs["dense"].step_list or ())
    how: dict[str, tuple[SamplingPipeline, dict[str, Any]]] = {
        "teacher": (runs["teacher"], {"steps": steps, "guidance": guidance}),
        "teacher, few steps": (runs["teacher"], {"steps": few, "guidance": guidance}),
        **{f"{name} student": (runs[name], {}) for name in STUDENTS},
    }
    rows = {}
    for name, (run, options) in how.items():
        blocks: Any = run.model.blocks
        # full attention does not read the top-k of its schedule
        dense = all(isinstance(block.method, FullAttention) for block in blocks)
        rows[name] = run, run.settings(seed=seed, batch_size=batch_size, at="dense" if dense else "current", **options)
    return rows


def sample(run: SamplingPipeline, prompts: Sequence[str], settings: SampleSettings, progress: ProgressFn) -> Tensor:
    """Normalised latents `[N, C, T, H, W]` on the CPU, from the noise of `clip_seeds`."""
    seeds = clip_seeds(settings.seed, prompts)
    batches = []
    for start in range(0, len(prompts), settings.batch_size):
        part = slice(start, start + settings.batch_size)
        batches.append(
            sample_latents(run.model, run.text_encoder, prompts[part], seeds[part], settings, progress).cpu()
        )
    latents = torch.cat(batches)
    broken = int((~latents.isfinite()).flatten(1).any(1).sum())
    if broken:
        raise ValueError(f"{broken} of {len(prompts)} clips of {run.source} in {settings.steps} steps are not finite")
    return latents


def matching_clips(prompts: Sequence[str], seed: int) -> list[int]:
    """Indices of distinct clips of the rendered set `seed` with the prompts as captions, in the order of prompts."""
    open_places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        open_places.setdefault(prompt, []).append(place)
    indices = [0] * len(prompts)
    index = 0
    while open_places:
        caption = caption_of(clip_attributes(seed, index))
        if caption in open_places:
            indices[open_places[caption].pop(0)] = index
            if not open_places[caption]:
                del open_places[caption]
        index += 1
    return indices


def real_latents(run: SamplingPipeline, prompts: Sequence[str], seed: int, shape: Sequence[int]) -> Tensor:
    """Rendered clips of the prompts as normalised latents of the run: `[N, C, T, H, W]`."""
    frames, height, width = run.codec.decode(torch.zeros(*shape)).shape[:3]
    clips = (render_clip(seed, index, size=(frames, height, width))[0] for index in matching_clips(prompts, seed))
    return run.statistics.normalise(torch.stack([run.codec.encode(clip) for clip in clips]))


def evaluate(
    rows: Mapping[str, tuple[SamplingPipeline, SampleSettings]],
    prompts: Sequence[str],
    seed: int,
    out: Path,
    progress: Progress,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Metrics of the rows of one seed, and of real clips reconstructed by the codec.

    Returns:
        The record of each row, and the middle frames of the clips in the figure, uint8 `[P, H, W, 3]`.
    """
    teacher, settings = rows["teacher"]
    reference, other = (
        real_latents(teacher, prompts, REAL_SETS + 2 * seed + i, settings.latent_shape) for i in range(2)
    )
    records: dict[str, dict[str, Any]] = {}
    pictures: dict[str, Tensor] = {}

    def measure(name: str, latents: Tensor, settings: Mapping[str, Any]) -> None:
        videos = decode_latents(teacher.codec, latents, teacher.statistics)
        distance = latent_distance(latents, reference)
        records[name] = {**score(videos, prompts), "distance": distance, "settings": settings}
        pictures[name] = videos[SHOWN, videos.shape[1] // 2]

    measure(RECONSTRUCTIONS, other, {})
    for name, (run, settings) in rows.items():
        task = progress.add_task(f"seed {seed}, {name}", total=len(prompts) * settings.steps)
        latents = sample(run, prompts, settings, lambda clips, task=task: progress.advance(task, clips))
        # relative, because absolute paths are meaningless on other machines
        place = Path(run.source).relative_to(out)
        measure(name, latents, {**settings_dict(settings, run), "checkpoint": str(place)})
    return records, pictures


def summary(seeds: Sequence[int], records: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Values of all seeds, mean and standard deviation (None for a single seed) of each metric of each row."""
    rows: dict[str, Any] = {}
    for name in records[0]:
        rows[name] = {"settings": [record[name]["settings"] for record in records]}
        for measure in MEASURES:
            values = [record[name][measure] for record in records]
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
            rows[name][measure] = {"seeds": values, "mean": float(np.mean(values)), "spread": spread}
        if settings := rows[name]["settings"][0]:
            rows[name]["forwards"] = settings["steps"] * (1 if settings["guidance"] == 1 else 2)
    return {"seeds": list(seeds), "chance": CHANCE, "rows": rows}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__)
    parser.add_argument("--teacher-steps", type=int, default=5000)
    parser.add_argument("--distill-steps", type=int, default=1000, help="steps of the dense and the sparse student")
    parser.add_argument("--adapt-steps", type=int, default=800, help="steps of the sparse adaptation that is merged")
    parser.add_argument("--evaluate-only", action="store_true", help="score existing runs without training")
    parser.add_argument(
        "--clips", type=int, default=192, help="clips of each row, 132 or more; multiples of 24 are balanced"
    )
    parser.add_argument("--steps", type=int, default=50, help="Euler steps of the teacher (default %(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="guidance of the teacher (default %(default)s)")
    parser.add_argument(
        "--sample-seed", type=int, default=1, help="seed of the noise of the clips, the same in all rows"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", help="device of sampling: cpu, cuda, ... (default: cuda if there is one)")
    counts = ("teacher_steps", "distill_steps", "adapt_steps", "clips", "steps", "batch_size")
    args = parse_counts(parser, argv, *counts)
    # checked now, not after hours of training
    refuse_too_few(args.clips, HaarCodec().channels)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not args.evaluate_only:
        # the generator's schedule counts its updates, one in five iterations, and ends with the run
        decay = f"optim.schedule.total_steps={math.ceil(args.distill_steps / 5)}"
        students = {arm: (args.distill_steps, (*ARMS[arm], decay)) for arm in ("dense", "sparse")}
        arms = {**students, "adapted": (args.adapt_steps, ARMS["adapted"])}
        train_all(args, "teacher", args.teacher_steps, arms, then=merge)
    prompts = evaluation_prompts(args.clips)
    # the runs of all seeds are checked before the first is sampled
    loaded = {seed: load_runs(args.out / f"seed-{seed}", args.device) for seed in args.seeds}
    refuse_other_objectives([runs["dense"] for runs in loaded.values()])
    records, pictures = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for seed, runs in loaded.items():
            rows = sampled(runs, args.sample_seed, args.steps, args.guidance, args.batch_size)
            record, frames = evaluate(rows, prompts, seed, args.out, progress)
            records.append(record)
            pictures.append(frames)
    results = summary(args.seeds, records)
    results["objective"] = objective(loaded[args.seeds[0]]["dense"])
    results |= {"clips": args.clips, "overrides": args.overrides, "torch": torch.__version__}
    write_json(args.out / "compare.json", results)
    draw(results, [prompts[i] for i in SHOWN], pictures[0], args.out / "compare.png")
    show(results)


if __name__ == "__main__":
    with one_line_errors():
        main()
