"""What the toy studies share: their options, trainings of all seeds that are kept, and the record.

Every seed has a dense base model of its own in `OUT/seed-N`, and every arm of a study starts from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vsa.checkpoints.run_checkpoint import latest_checkpoint
from vsa.files import atomic_file

ROOT = Path(__file__).parents[2]
Run = tuple[int, Sequence[str]]
"""Steps and settings of a training."""


def study_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every study; parse them with `parse_counts`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default %(default)s)")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, e.g. data.root=FOLDER data.videos=FOLDER")
    return parser


def parse_counts(parser: argparse.ArgumentParser, argv: list[str] | None, *counts: str) -> argparse.Namespace:
    """Parsed arguments, of which `jobs` and `counts` are at least 1."""
    args = parser.parse_intermixed_args(argv)
    for name in ("jobs", *counts):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    args.out = args.out.resolve()
    return args


def run_folder(out: Path, seed: int, name: str) -> Path:
    """Folder of a base model or an arm."""
    return out / f"seed-{seed}" / name.replace(" ", "-")


def train(run: Path, steps: int, *overrides: str) -> None:
    """One training run in a process of its own; a finished one of as many steps is kept.

    Raises:
        ValueError: it failed; names the log.
    """
    if (run / "checkpoints").is_dir() and latest_checkpoint(run / "checkpoints").step == steps:
        return
    run.mkdir(parents=True, exist_ok=True)
    own = (f"trainer.max_steps={steps}", "overwrite=true", f"run_dir={run}", "callbacks.samples=null")
    quiet = ("callbacks.progress=null", "trainer.enable_progress_bar=false")
    log = run.parent / f"{run.name}.log"
    with open(log, "w") as file:
        command = [sys.executable, "train.py", *overrides, *own, *quiet]
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ValueError(f"training {run} ended with status {done.returncode}, see {log}")
    print(f"finished {run}", flush=True)


def train_all(
    args: argparse.Namespace,
    base: str,
    base_steps: int,
    arms: Mapping[str, Run],
    then: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Train the base model and the arms of all seeds, `args.jobs` runs at a time.

    Args:
        args: parsed options of `study_parser`.
        base: name of the base models.
        base_steps: of their training.
        arms: by name.
        then: called with the folder of a seed when its runs are finished.
    """

    def seed_runs(seed: int) -> None:
        start, common = run_folder(args.out, seed, base), (f"seed={seed}", *args.overrides)
        workers.submit(train, start, base_steps, "experiment=quickstart", "attention=full", *common).result()
        waiting = [
            workers.submit(train, run_folder(args.out, seed, arm), steps, *own, f"init_from={start}", *common)
            for arm, (steps, own) in arms.items()
        ]
        for job in waiting:
            job.result()
        then(start.parent)

    with ThreadPoolExecutor(args.jobs) as workers, ThreadPoolExecutor(len(args.seeds)) as by_seed:
        list(by_seed.map(seed_runs, args.seeds))


def write_json(path: Path, record: Any) -> None:
    """A record of a study, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
