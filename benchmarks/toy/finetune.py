"""Dense pretraining of the toy model and ten ways of finetuning, with a figure and a table of the validation losses.

Arms: dense (no sparsity), annealed, at once (the target sparsity from the first step), velocity (annealed, trained
only on the velocity of the frozen dense model), and attention with a pooled tail of order 1, of order 2, and of order 2
with the score `mass`, each at once and annealed. Every seed has its own dense model. Finished runs are kept.

python -m benchmarks.toy.finetune outputs/finetune_toy --seeds 0 1 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.toy.study import parse_counts, run_folder, study_parser, train_all, write_json
from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric
from vsa.plotting import COLOURS, save_figure

AT_ONCE = ("sparsity=constant",)
TAILS = {
    "tail 1": ("attention.order=1",),
    "tail 2": ("attention.order=2",),
    "tail 2 mass": ("attention.order=2", "attention.score=mass"),
}
ARMS = {
    "dense": ("attention=full",),
    "annealed": (),
    "at once": AT_ONCE,
    "velocity": ("task.objective.data=0", "task.objective.velocity=1"),
    **{
        f"{name} {how}": ("attention=pooled_tail", *options, *schedule)
        for name, options in TAILS.items()
        for how, schedule in (("at once", AT_ONCE), ("annealed", ()))
    },
}


def summary(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Curves and final values of all runs."""

    def read(seed: int, run: str, column: str) -> tuple[list[float], list[float]]:
        steps, values = read_metric(run_folder(out, seed, run) / "metrics.csv", column)
        return steps.tolist(), values.tolist()

    curves: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for arm, arm_curves in curves.items():
        for seed in seeds:
            (steps, loss), (topk_steps, topk) = (read(seed, arm, name) for name in ("val/loss", "sparsity/topk"))
            arm_curves.append({"step": steps, "val_loss": loss, "topk_step": topk_steps, "topk": topk})
    start = [read(seed, "pretrained", "val/loss")[1][-1] for seed in seeds]
    end = {arm: [curve["val_loss"][-1] for curve in arm_curves] for arm, arm_curves in curves.items()}
    return {"seeds": list(seeds), "pretrained": start, "end": end, "curves": curves}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = study_parser(__doc__)
    parser.add_argument("--pretrain-steps", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=800)
    return parse_counts(parser, argv, "steps", "pretrain_steps")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    arms = {arm: (args.steps, ("experiment=finetune_toy", *own)) for arm, own in ARMS.items()}
    train_all(args, "pretrained", args.pretrain_steps, arms)
    results = summary(args.out, args.seeds)
    results |= {"pretrain_steps": args.pretrain_steps, "steps": args.steps, "overrides": args.overrides}
    write_json(args.out / "compare.json", results)
    draw(results, args.out / "compare.png")
    show(results)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the validation loss of every arm over the steps, as mean and faint seeds, and the number of kept tiles."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    losses, tiles = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    colours = dict(zip(ARMS, COLOURS, strict=False))
    for arm, seeds in found["curves"].items():
        for curve in seeds:
            losses.plot(curve["step"], curve["val_loss"], color=colours[arm], alpha=0.3, linewidth=0.8)
        mean = np.mean([curve["val_loss"] for curve in seeds], axis=0)
        losses.plot(seeds[0]["step"], mean, color=colours[arm], linewidth=2, label=f"{arm}, {mean[-1]:.4f} at the end")
        if arm != "dense":
            tiles.plot(seeds[0]["topk_step"], seeds[0]["topk"], color=colours[arm], drawstyle="steps-post")
    losses.axhline(np.mean(found["pretrained"]), color="black", linestyle=":", label="dense, before finetuning")
    losses.set_ylabel("validation loss (at the sparsity of the step)")
    losses.set_title(f"finetuning the toy model, seeds {found['seeds']}")
    # below the axes, where no curve is
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    tiles.set_ylabel("tiles kept")
    tiles.set_xlabel("optimizer step")
    for axes in (losses, tiles):
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def show(found: dict[str, Any]) -> None:
    """Print a table of the final values, each relative to the dense arm of its seed."""
    headings = ("arm", *(f"seed {seed}" for seed in found["seeds"]), "mean")
    table = Table(*headings, title="validation loss at the end (against dense finetuning of the same seed)")
    dense = np.array(found["end"]["dense"])
    table.add_row("before finetuning, dense", *(f"{x:.4f}" for x in found["pretrained"]))
    for arm, values in found["end"].items():
        worse = np.array(values) / dense - 1
        cells = [f"{x:.4f} ({w:+.1%})" for x, w in zip(values, worse, strict=True)]
        table.add_row(arm, *cells, f"{np.mean(values):.4f} ({worse.mean():+.1%})")
    Console().print(table)


if __name__ == "__main__":
    with one_line_errors():
        main()
