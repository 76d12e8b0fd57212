"""Sample videos from a run: prompts in, mp4 and GIF out, with a JSON of everything that made them.

python scripts/sample.py outputs/quickstart/default --prompt "a red circle moving left slowly"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vsa.cli import one_line_errors
from vsa.training.attention_view import draw_attention
from vsa.training.clips import write_clips
from vsa.training.inference import generate, load_run, settings_dict


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder (newest checkpoint) or checkpoint folder")
    parser.add_argument("--prompt", action="append", default=[], help="a caption; may be repeated")
    parser.add_argument("--prompts", type=Path, help="text file with one caption per line")
    parser.add_argument("--out", type=Path, help="folder to write to (RUN/samples)")
    parser.add_argument("--weights", choices=("ema", "model"), default="ema", help="averaged or trained weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32, help="Euler steps")
    parser.add_argument("--guidance", type=float, default=1.0, help="uncond + G * (cond - uncond); 1 is one pass")
    parser.add_argument("--shift", type=float, help="flow shift (that of the training)")
    parser.add_argument("--topk", type=int, help="tiles per query tile (that of the training)")
    parser.add_argument("--sparsity", type=float, help="share of tiles skipped, instead of --topk")
    parser.add_argument("--latent-shape", type=int, nargs=4, metavar=("C", "T", "H", "W"), help="shape of one clip")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--fps", type=float, default=8)
    parser.add_argument("--device", help="cpu, cuda, ... (cuda when there is one)")
    parser.add_argument("--attention", action="store_true", help="draw which tiles the first clip's queries attend to")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Prompts of the command line, then those of the file; empty lines are skipped.

    Raises:
        ValueError: there is none, or the file is not text.
    """
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt file {args.prompts} is not UTF-8 text: {error}") from None
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE with one caption per line")
    return prompts


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    prompts = read_prompts(args)
    if args.fps <= 0:
        raise ValueError(f"fps must be positive, got {args.fps}")
    run = load_run(args.run, weights=args.weights, device=args.device)
    settings = run.settings(
        seed=args.seed,
        steps=args.steps,
        guidance=args.guidance,
        flow_shift=args.shift,
        topk=args.topk,
        sparsity=args.sparsity,
        latent_shape=args.latent_shape,
        batch_size=args.batch_size,
    )
    out = args.out if args.out is not None else default_out(args.run)
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("sampling", total=len(prompts) * settings.steps)
        videos = generate(run, prompts, settings, lambda clips: progress.advance(task, clips))
    write_clips(out, prompts, videos, settings_dict(settings, run), fps=args.fps)
    if args.attention:
        draw_attention(run, prompts[0], settings, out / "attention.png")
    print(f"{len(prompts)} clips, contact sheet and samples.json in {out}")


def default_out(run: str) -> Path:
    """`samples` in the run folder, also when a checkpoint of it was named."""
    path = Path(run)
    return (path.parent.parent if path.parent.name == "checkpoints" else path) / "samples"


if __name__ == "__main__":
    with one_line_errors():
        main()
