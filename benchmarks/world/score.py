"""Scores of clips of the world: whether they show the colours, shapes, motions and camera motion of their captions.

Clips are read from a folder of `vsa sample` or of a training, or sampled from a run for captions of clips that no
training draws. The table also has the chance level, the scores of rendered clips, and those of their reconstructions by
the codec, which are an upper bound for a model with this codec.

python -m benchmarks.world.score outputs/world/default                             a run: samples and scores clips
python -m benchmarks.world.score outputs/world/default/samples/step-00010000       a folder of clips
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks.toy.study import write_json
from benchmarks.world.pixel_score import ATTRIBUTES, chance, score_clips
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.data.codecs import Codec, HaarCodec
from vsa.data.video_files import read_video
from vsa.data.world.render import render
from vsa.data.world.scenes import draw_scene, parse_caption, world_attributes, world_caption
from vsa.errors import one_line_errors
from vsa.progress import progress_bar
from vsa.sampling.pipeline import generate, load_run
from vsa.sampling.record import settings_dict
from vsa.signals import StopNow, handled_by

# first seed of clip sets that no training draws
_UNSEEN = 1_000_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips_or_run", type=Path, help="folder with samples.json, run folder or checkpoint folder")
    parser.add_argument("--clips", type=int, default=96, help="clips to sample from a run (%(default)s)")
    parser.add_argument("--rendered", type=int, help="rendered clips to compare with (as many as CLIPS; 0: none)")
    parser.add_argument("--out", type=Path, help="JSON to write (score.json in the folder of the clips or of the run)")
    parser.add_argument("--weights", choices=("ema", "model"), help="averaged (where there are any) or trained weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="Euler steps (32; a distilled run: its own)")
    parser.add_argument("--guidance", type=float, help="uncond + G * (cond - uncond) (3)")
    parser.add_argument("--shift", type=float, help="flow shift (as the run samples)")
    parser.add_argument("--topk", type=int, help="tiles per query tile (that of the training)")
    parser.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="compile the blocks, as trainings do")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    return parser.parse_args(argv)


def unseen_captions(count: int, seed: int) -> list[str]:
    """Captions of clips that no training draws."""
    return [world_caption(world_attributes(_UNSEEN + seed, i)) for i in range(count)]


def unseen_clips(count: int, seed: int, size: tuple[int, int, int]) -> list[Tensor]:
    """The clips of `unseen_captions`, uint8 `[T, H, W, 3]` each."""
    return [render(draw_scene(_UNSEEN + seed, i, size), size)[0] for i in range(count)]


def read_clips(folder: Path) -> tuple[list[Tensor], list[str], dict[str, Any], Codec]:
    """Clips of a folder of samples, their captions, the settings of their sampling, and their codec."""
    settings = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    clips, codec = settings.pop("clips"), HaarCodec()
    theirs = (settings.get("codec") or {}).get("hash")
    if theirs != codec.hash:
        raise ValueError(f"{folder} is decoded by another codec than {codec.id} (hash {theirs}): score its run instead")
    for clip in clips:
        parse_caption(clip["prompt"])
    videos = [read_video(folder / clip["mp4"])[0] for clip in clips]
    return videos, [clip["prompt"] for clip in clips], settings, codec


def refuse_other_data(checkpoint: Checkpoint) -> None:
    """Raise ValueError if the settings of a run do not name the world as its data."""
    data = (checkpoint.state.get("config") or {}).get("data") or {}
    if data.get("world") is None:
        raise ValueError(f"{checkpoint.path} was not trained in the world: its settings have no data.world")


def sample(args: argparse.Namespace) -> tuple[Tensor, list[str], dict[str, Any], Codec]:
    """Clips of a run for captions that it has not seen, the captions, the sampling settings, and the codec."""
    refuse_other_data(resolve_checkpoint(args.clips_or_run))
    run = load_run(args.clips_or_run, weights=args.weights, device=args.device)
    if args.compile:
        run.model.compile_blocks()
    settings = run.settings(
        seed=args.seed,
        # the same for all runs, except for distilled ones, which have a fixed step list
        steps=32 if args.steps is None and run.step_list is None else args.steps,
        guidance=3.0 if args.guidance is None and run.step_list is None else args.guidance,
        flow_shift=args.shift,
        topk=args.topk,
        sparsity=args.sparsity,
        batch_size=args.batch_size,
    )
    prompts = unseen_captions(args.clips, args.seed)
    with progress_bar("sampling", len(prompts) * settings.steps) as advance:
        videos = generate(run, prompts, settings, advance)
    return videos, prompts, dict(settings_dict(settings, run)), run.codec


def score_beside(
    videos: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    codec: Codec,
    *,
    rendered: int,
    seed: int,
    device: torch.device | str,
) -> dict[str, dict[str, float]]:
    """Scores of clips, of rendered clips of the same size and their codec reconstructions if asked, and of chance."""
    scores = {"clips": score_clips(videos, captions, device), "chance": chance(captions)}
    if not rendered:
        return scores
    frames, height, width = videos[0].shape[:3]
    real, truth = unseen_clips(rendered, seed, (frames, height, width)), unseen_captions(rendered, seed)
    rebuilt = [codec.decode(codec.encode(video)) for video in real]
    scores["codec_reconstructions"] = score_clips(rebuilt, truth, device)
    scores["rendered"] = score_clips(real, truth, device)
    return scores


def print_table(scores: dict[str, dict[str, float]], clips: int) -> None:
    title = f"share of attributes of {clips} clips that are what the caption says"
    table = Table("", *(Column(x, justify="right") for x in ATTRIBUTES), title=title, caption="pixels scored, no judge")
    for name, row in scores.items():
        table.add_row(name.replace("_", " "), *(f"{row[part]:.1%}" for part in ATTRIBUTES))
    Console().print(table)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.clips < 1:
        raise ValueError(f"clips must be at least 1, got {args.clips}")
    if args.rendered is not None and args.rendered < 0:
        raise ValueError(f"rendered must be at least 0, got {args.rendered}")
    folder: Path = args.clips_or_run
    if (folder / "samples.json").is_file():
        videos, captions, settings, codec = read_clips(folder)
    else:
        videos, captions, settings, codec = sample(args)
        folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    rendered = args.clips if args.rendered is None else args.rendered
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    scores = score_beside(videos, captions, codec, rendered=rendered, seed=args.seed, device=device)
    print_table(scores, len(captions))
    out = args.out if args.out is not None else folder / "score.json"
    record = {
        "clips": len(captions),
        "scores": scores,
        "codec": codec.id,
        "settings": settings,
        "torch": torch.__version__,
    }
    write_json(out, record)
    print(f"score in {out}")


if __name__ == "__main__":
    # under MPS a process that a signal ends within a kernel takes others along
    with one_line_errors(ImportError), handled_by(StopNow()):
        main()
