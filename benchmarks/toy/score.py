"""Scores of a run on toy prompts: the shares of sampled clips with the colour, direction and shape of their prompts.

Clips are scored by their pixels, beside the chance level and the scores of codec reconstructions of rendered clips,
which are an upper bound for a model with this codec.

python -m benchmarks.toy.score outputs/quickstart/default
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from benchmarks.toy.study import write_json
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.data.codecs import Codec
from vsa.data.toy_videos import COLOURS, DIRECTIONS, SHAPES, evaluation_prompts, render_clip, score_clip
from vsa.errors import one_line_errors
from vsa.progress import progress_bar
from vsa.sampling.pipeline import generate, load_run
from vsa.sampling.record import settings_dict

CHANCE = {"colour": 1 / len(COLOURS), "direction": 1 / len(DIRECTIONS), "shape": 1 / len(SHAPES)}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder (newest checkpoint) or checkpoint folder")
    parser.add_argument("--clips", type=int, default=96, help="clips to sample; multiples of 24 are balanced")
    parser.add_argument("--out", type=Path, help="JSON to write (RUN/score.json)")
    parser.add_argument("--weights", choices=("ema", "model"), help="averaged (where there are any) or trained weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="Euler steps (32; a distilled run: its own)")
    parser.add_argument("--guidance", type=float, help="uncond + G * (cond - uncond) (1)")
    parser.add_argument("--shift", type=float, help="flow shift (as the run samples)")
    parser.add_argument("--topk", type=int, help="tiles per query tile (that of the training)")
    parser.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--any-data", action="store_true", help="also score a run whose settings do not name toy clips")
    parser.add_argument("--min-colour", type=float, default=0.0, help="fail below this share of right colours")
    parser.add_argument("--min-direction", type=float, default=0.0, help="fail below this share of right directions")
    parser.add_argument("--min-shape", type=float, default=0.0, help="fail below this share of right shapes")
    return parser.parse_args(argv)


def refuse_other_data(checkpoint: Checkpoint) -> None:
    """Raise ValueError if the settings of a run do not name toy clips as its data."""
    data = (checkpoint.state.get("config") or {}).get("data") or {}
    if data.get("toy") is None:
        raise ValueError(
            f"{checkpoint.path} was not trained on the toy clips according to its settings (data.toy is missing): "
            "score it with `vsa evaluate`, or add --any-data if it was"
        )


def score(videos: Tensor | Sequence[Tensor], prompts: Sequence[str]) -> dict[str, float]:
    """Share of clips with the right colour, with the right direction and with the right shape.

    Args:
        videos: N uint8 clips `[T, H, W, 3]`.
        prompts: their N captions, which name a shape.
    """
    rows = [score_clip(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in CHANCE}


def reconstructions(codec: Codec, count: int, seed: int, size: tuple[int, int, int]) -> tuple[list[Tensor], list[str]]:
    """Rendered clips after a round trip through the codec, and their captions.

    Args:
        codec: codec of the run.
        count: number of clips.
        seed: seed of the rendered set.
        size: frames, height and width.
    """
    rendered = [render_clip(seed, i, size=size) for i in range(count)]
    return [codec.decode(codec.encode(video)) for video, _, _ in rendered], [caption for _, caption, _ in rendered]


def print_table(model: dict[str, float], codec: dict[str, float], clips: int) -> None:
    title, shares = (
        f"share of {clips} clips that show what their prompt says",
        (Column(x, justify="right") for x in CHANCE),
    )
    table = Table("", *shares, title=title, caption="pixels scored, no judge")
    for name, row in (("model", model), ("codec reconstructions", codec), ("chance", CHANCE)):
        table.add_row(name, *(f"{row[part]:.1%}" for part in CHANCE))
    Console().print(table)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.clips < 1:
        raise ValueError(f"clips must be at least 1, got {args.clips}")
    if not args.any_data:
        refuse_other_data(resolve_checkpoint(args.run))
    run = load_run(args.run, weights=args.weights, device=args.device)
    settings = run.settings(
        seed=args.seed,
        # the same for all runs, except for distilled ones, which have a fixed step list
        steps=32 if args.steps is None and run.step_list is None else args.steps,
        guidance=1.0 if args.guidance is None else args.guidance,
        flow_shift=args.shift,
        topk=args.topk,
        sparsity=args.sparsity,
        batch_size=args.batch_size,
    )
    prompts = evaluation_prompts(args.clips)
    with progress_bar("sampling", len(prompts) * settings.steps) as advance:
        videos = generate(run, prompts, settings, advance)
    model = score(videos, prompts)
    frames, height, width = videos.shape[1:4]
    codec = score(*reconstructions(run.codec, args.clips, args.seed, (frames, height, width)))
    print_table(model, codec, args.clips)

    path = Path(args.run)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    out = args.out if args.out is not None else folder / "score.json"
    record = {
        "clips": args.clips,
        "model": model,
        "codec_reconstructions": codec,
        "chance": CHANCE,
        "settings": settings_dict(settings, run),
        "torch": torch.__version__,
    }
    write_json(out, record)
    print(f"score in {out}")
    required = {"colour": args.min_colour, "direction": args.min_direction, "shape": args.min_shape}
    for name, least in required.items():
        # a value that is NaN fails too
        if not model[name] >= least:
            raise ValueError(f"{name} is right in {model[name]:.1%} of the clips, below the required {least:.1%}")


if __name__ == "__main__":
    with one_line_errors():
        main()
