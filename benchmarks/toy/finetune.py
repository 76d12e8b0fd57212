"""Pretrain the toy model dense, finetune it in four ways, draw and print what each one lost.

Arms: dense (no sparsity), annealed, at once (the target sparsity from the first step) and velocity (annealed, trained
on the frozen dense model's velocity alone). Every seed has a dense model of its own. Finished runs are kept.

python -m benchmarks.toy.finetune outputs/finetune_toy --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from vsa.checkpoints.run_checkpoint import latest_checkpoint
from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric
from vsa.files import atomic_file

ROOT = Path(__file__).parents[2]
AT_ONCE = ("sparsity=constant",)
ARMS = {
    "dense": ("attention=full", *AT_ONCE),
    "annealed": (),
    "at once": AT_ONCE,
    "velocity": ("task.objective.data=0", "task.objective.velocity=1"),
}


def train(run: Path, steps: int, *overrides: str) -> None:
    """One training run in a process of its own; a finished one of as many steps is kept.

    Raises:
        ValueError: it failed; names the log.
    """
    if (run / "checkpoints").is_dir() and latest_checkpoint(run / "checkpoints").step == steps:
        return
    run.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "train.py", *overrides, f"trainer.max_steps={steps}", "overwrite=true"),
        *(
            f"run_dir={run.resolve()}",
            "callbacks.progress=null",
            "trainer.enable_progress_bar=false",
            "callbacks.samples=null",
        ),
    ]
    log = run.parent / f"{run.name}.log"
    with open(log, "w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ValueError(f"training {run} ended with status {done.returncode}, see {log}")
    print(f"finished {run}", flush=True)


def finish(out: Path, seed: int, pretrain_steps: int, steps: int, common: Sequence[str], workers: Any) -> None:
    """The runs of one seed."""
    folder = out / f"seed-{seed}"
    pretrained = folder / "pretrained"
    quick = ("experiment=quickstart", "attention=full", f"seed={seed}", *common)
    workers.submit(train, pretrained, pretrain_steps, *quick).result()
    waiting = [
        workers.submit(
            train,
            folder / arm.replace(" ", "-"),
            steps,
            *("experiment=finetune_toy", f"init_from={pretrained.resolve()}", f"seed={seed}", *overrides, *common),
        )
        for arm, overrides in ARMS.items()
    ]
    for job in waiting:
        job.result()


def summary(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Curves and end values of all runs."""
    curves: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for arm in ARMS:
            metrics = out / f"seed-{seed}" / arm.replace(" ", "-") / "metrics.csv"
            steps, loss = read_metric(metrics, "val/loss")
            topk_steps, topk = read_metric(metrics, "sparsity/topk")
            curves[arm].append(
                {
                    "step": steps.tolist(),
                    "val_loss": loss.tolist(),
                    "topk_step": topk_steps.tolist(),
                    "topk": topk.tolist(),
                }
            )
    start = [
        float(read_metric(out / f"seed-{seed}" / "pretrained" / "metrics.csv", "val/loss")[1][-1]) for seed in seeds
    ]
    end = {arm: [curve["val_loss"][-1] for curve in found] for arm, found in curves.items()}
    return {"seeds": list(seeds), "pretrained": start, "end": end, "curves": curves}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pretrain-steps", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default %(default)s)")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, e.g. data.root=FOLDER data.videos=FOLDER")
    args = parser.parse_intermixed_args(argv)
    if args.jobs < 1 or args.steps < 1 or args.pretrain_steps < 1:
        raise ValueError("--jobs, --steps and --pretrain-steps must be at least 1")
    with ThreadPoolExecutor(args.jobs) as workers, ThreadPoolExecutor(len(args.seeds)) as by_seed:
        waiting = [
            by_seed.submit(finish, args.out, seed, args.pretrain_steps, args.steps, args.overrides, workers)
            for seed in args.seeds
        ]
        for job in waiting:
            job.result()
    found = summary(args.out, args.seeds)
    found |= {"pretrain_steps": args.pretrain_steps, "steps": args.steps, "overrides": args.overrides}
    with atomic_file(args.out / "compare.json") as temporary:
        temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw(found, args.out / "compare.png")
    show(found)


def draw(found: dict[str, Any], path: Path) -> None:
    """Validation loss of every arm over the steps, mean over seeds and each seed faintly, and the tiles kept."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    losses, tiles = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    colours = dict(zip(ARMS, ("tab:gray", "tab:blue", "tab:red", "tab:green"), strict=True))
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
    losses.legend()
    tiles.set_ylabel("tiles kept")
    tiles.set_xlabel("optimizer step")
    for axes in (losses, tiles):
        axes.grid(alpha=0.3)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def show(found: dict[str, Any]) -> None:
    """End values as a table, each against the dense arm of its seed."""
    table = Table(title="validation loss at the end (against dense finetuning of the same seed)")
    for heading in ("arm", *(f"seed {seed}" for seed in found["seeds"]), "mean"):
        table.add_column(heading)
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
