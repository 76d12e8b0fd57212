"""The race of docs/race.md: trains what is missing of a leg, says what is missing, packs runs, and makes the tables.

python -m benchmarks.race run scratch --seeds 0 --jobs 5     what is missing of a leg; again after an interruption
python -m benchmarks.race missing                            runs and GPU minutes to go
python -m benchmarks.race pack                               outputs/race to benchmarks/raw/race-LEG.tar.xz
python -m benchmarks.race table                              the tables, from the archives and outputs/race
"""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import yaml

from scripts.mean_step_seconds import mean_step_seconds
from vsa.config import config_folder
from vsa.errors import one_line_errors
from vsa.reports.runs import Run, find_runs, short_name
from vsa.reports.statistics import holm, t_p_value, t_quantile

OUT, RAW = Path("outputs/race"), Path(__file__).parent / "raw"
KEPT = ("sweep.json", "config.yaml", "run.json", "metrics.csv", "validation.csv", "score.json")
REFERENCE, DENSE = "vsa_64", "dense"
COMMON = ("experiment=ablation", "name=race", "task.parallel.compile=true", "callbacks.samples.prompts=[]")
POINTS = "task.validate_at=[current,half,double,quadruple,dense]"
PRETRAINED = "pretrained"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A comparison at one budget.

    Args:
        sweep: its variants, a file of configs/sweep.
        settings: settings of all runs.
        seeds: seeds of the whole leg.
        minutes: GPU minutes of a run, as estimated before the first one.
        finetunes: whether each seed starts from a dense model of that seed, trained before.
        alone: whether one run has the GPU at a time.
        rates: whether each variant is tried at three learning rates, for a table of its own.
    """

    sweep: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    finetunes: bool = False
    alone: bool = False
    rates: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of its variants."""
        sweep = yaml.safe_load((config_folder() / "sweep" / f"{self.sweep}.yaml").read_text(encoding="utf-8"))
        return (*sweep["variants"], *([DENSE] if sweep.get("control", True) else []))


LEGS = {
    "rates": Leg(sweep="race", settings=("flop_budget=5e15",), seeds=(9,), minutes=1.8, rates=True),
    "times": Leg(sweep="race", settings=("trainer.max_steps=120",), seeds=(9,), minutes=0.7, alone=True),
    "scratch": Leg(sweep="race", settings=("flop_budget=2e16", POINTS), seeds=(0, 1, 2), minutes=2.2),
    "long": Leg(
        sweep="race_long",
        settings=("flop_budget=5e16", "data.world.grid=[16,32,32]", "data.batch_size=4", POINTS),
        seeds=(0, 1),
        minutes=5,
    ),
    "finetune": Leg(
        sweep="race_finetune",
        settings=("flop_budget=1e16", "task=finetune", "start=dense", "optim.lr=5e-4", POINTS),
        seeds=(0, 1, 2),
        minutes=1.3,
        finetunes=True,
    ),
}


def train(name: str, seeds: Sequence[int], jobs: int) -> None:
    """Train what is missing of a leg, seed by seed, and score the clips of every finished run.

    Raises:
        SystemExit: a sweep or a score failed; the same command goes on from there.
    """
    leg = LEGS[name]
    unpack(name)
    for seed in seeds:
        own = [*leg.settings]
        if leg.finetunes:
            start = OUT / f"{name}-{PRETRAINED}-{seed}"
            pretrained = ["flop_budget=2e16", "attention=full", f"seed={seed}", f"run_dir={start}"]
            if not list(start.glob("checkpoints/step-*")):
                _call("vsa.cli", "train", *COMMON, *pretrained, "overwrite=true")
            own.append(f"init_from={start}")
        # every seed is a sweep of its own, which the same command continues
        folder = OUT / f"{name}-{seed}"
        placed = [f"sweep.name={folder.name}", f"sweep.jobs_per_device={1 if leg.alone else jobs}"]
        _call("vsa.cli", "sweep", leg.sweep, *COMMON, *own, *placed, *_seeds(leg, seed))
        for run in [] if leg.alone else sorted(folder.iterdir()):
            if list(run.glob("checkpoints/step-*")) and not (run / "score.json").is_file():
                _call("benchmarks.world.score", str(run), "--clips", "256", "--batch-size", "64")


def _seeds(leg: Leg, seed: int) -> list[str]:
    return [f"sweep.lr_seed={seed}", "sweep.seeds=[]", "sweep.lr=3"] if leg.rates else [f"sweep.seeds=[{seed}]"]


def _call(module: str, *arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", module, *arguments]).returncode
    if code:
        raise SystemExit(code)


def archive(name: str) -> Path:
    """Archive of the runs of a leg."""
    return RAW / f"race-{name}.tar.xz"


def pack() -> Iterator[str]:
    """Write the archives of all legs with runs in `OUT`; yields a line for each."""
    for name in LEGS:
        files = [path for folder in sorted(OUT.glob(f"{name}-[0-9]*")) for path in sorted(folder.rglob("*"))]
        kept = [path for path in files if path.name in KEPT and "checkpoints" not in path.parts]
        if not kept:
            continue
        with tarfile.open(archive(name), "w:xz", preset=9) as tar:
            for path in kept:
                content = path.read_bytes()
                info = tarfile.TarInfo(str(path.relative_to(OUT)))
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        yield f"{len({path.parent for path in kept})} folders in {archive(name)}"


def unpack(name: str) -> None:
    """Put the runs of a leg's archive into `OUT` where they are not, so that a sweep goes on from them."""
    if archive(name).is_file():
        with tarfile.open(archive(name)) as tar:
            members = [m for m in tar.getmembers() if not (OUT / m.name).exists()]
            tar.extractall(OUT, members, filter="data")


def finished(name: str) -> dict[str, list[Run]]:
    """Finished runs of a leg by variant, in the order of their seeds; without tries of learning rates."""
    unpack(name)
    folders = sorted(OUT.glob(f"{name}-[0-9]*"))
    if not folders:
        return {}
    by_name: dict[str, list[Run]] = {}
    for run in find_runs(folders)[1]:
        if run.status == "finished" and run.val_loss is not None and run.seed in LEGS[name].seeds:
            by_name.setdefault(Path(short_name(run)).name, []).append(run)
    return {key: sorted(runs, key=lambda run: run.seed or 0) for key, runs in by_name.items()}


def missing() -> Iterator[str]:
    """A line for each leg: runs to go and their GPU minutes."""
    total = 0.0
    for name, leg in LEGS.items():
        runs = len(leg.variants) * len(leg.seeds)
        to_go = runs - sum(len({run.seed for run in own}) for own in finished(name).values())
        total += to_go * leg.minutes
        yield f"{name:10} {to_go:4} of {runs} runs, {to_go * leg.minutes:.0f} GPU minutes"
    yield f"{'all':10} {total:.0f} GPU minutes, more runs at a time take less"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant beside the reference.

    Args:
        name: the variant.
        runs: its runs.
        apart: difference of its loss from the reference by seed.
        reach: half of the 95% interval of their mean; None for the reference, or with fewer than two seeds.
        p: p-value of their mean, corrected by Holm's method for all variants of the leg.
    """

    name: str
    runs: Sequence[Run]
    apart: Sequence[float] = ()
    reach: float | None = None
    p: float | None = None

    @property
    def loss(self) -> float:
        return fmean(_loss(run) for run in self.runs)

    @property
    def verdict(self) -> str:
        """`before` or `behind` where every seed says so and the seeds' noise does not explain it, otherwise `level`."""
        if self.p is None:
            return ""
        same = all(x < 0 for x in self.apart) or all(x > 0 for x in self.apart)
        return ("before" if self.apart[0] < 0 else "behind") if same and self.p < 0.05 else "level"


def ranked(variants: Mapping[str, Sequence[Run]], reference: str = REFERENCE) -> list[Row]:
    """Variants from the lowest loss to the highest, each compared with the reference seed by seed.

    The noise of a run is what variant and seed do not explain, over all variants of the leg (a randomised block design,
    whose blocks are the seeds), since two or three seeds of one variant say little about it.
    """
    losses = {name: {run.seed: _loss(run) for run in runs} for name, runs in variants.items()}
    seeds = sorted(set.intersection(*(set(own) for own in losses.values())))
    whole = np.array([[own[seed] for seed in seeds] for own in losses.values()])
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    if freedom > 0:
        rest = whole - whole.mean(1, keepdims=True) - whole.mean(0) + whole.mean()
        noise = math.sqrt(2 * (rest**2).sum() / freedom)
    rows = []
    for name, runs in variants.items():
        apart = [
            losses[name][seed] - losses[reference][seed] for seed in losses[name] if seed in losses.get(reference, {})
        ]
        row = Row(name=name, runs=runs, apart=[] if name == reference else apart)
        if row.apart and freedom > 0:
            error = noise / math.sqrt(len(apart))
            p = t_p_value(fmean(apart) / error, freedom)
            row = replace(row, reach=t_quantile(freedom) * error, p=p)
        rows.append(row)
    p_values = {row.name: row.p for row in rows if row.p is not None}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    return sorted((replace(row, p=corrected.get(row.name)) for row in rows), key=lambda row: row.loss)


def _loss(run: Run) -> float:
    assert run.val_loss is not None
    return run.val_loss


def table(name: str) -> Iterator[str]:
    """Markdown tables of a leg: losses by seed and differences from VSA; numbers of tiles, noise levels, clips."""
    variants, seconds, seeds = finished(name), step_seconds(), LEGS[name].seeds
    if not variants:
        raise ValueError(f"{name} has no finished run, in {archive(name)} or {OUT}")
    rows = ranked(variants)
    heads = ["variant", "steps", "ms a step", "seconds", *(f"seed {seed}" for seed in seeds), "mean"]
    yield from _lines([*heads, "from VSA, by seed", "mean, 95%", "p", ""])
    for row in rows:
        steps, each = row.runs[0].steps, seconds.get(row.name)
        times = ("", "") if each is None else (f"{1e3 * each:.1f}", f"{steps * each:.0f}")
        by_seed = {run.seed: f"{_loss(run):.4f}" for run in row.runs}
        mean = "" if row.reach is None else f"{fmean(row.apart):+.4f} +- {row.reach:.4f}"
        cells = [row.name, f"{steps:,}", *times, *(by_seed.get(seed, "") for seed in seeds), f"**{row.loss:.4f}**"]
        apart = ", ".join(f"{x:+.4f}" for x in row.apart)
        yield _line([*cells, apart, mean, "" if row.p is None else f"{row.p:.2g}", row.verdict])
    yield ""
    points = list(dict.fromkeys(point for row in rows for run in row.runs for point in run.validation))
    noise = [f"noise {low / 10:g} to {(low + 1) / 10:g}" for low in range(10)]
    yield from _lines(["variant", *points, *noise, "colour, shape, motion"])
    for row in rows:
        at = [[loss for run in row.runs for loss in run.validation.get(point, {}).values()] for point in points]
        current = [item for run in row.runs for item in run.validation["current"].items()]
        by_noise = [[loss for (_, level), loss in current if min(9, int(10 * level)) == low] for low in range(10)]
        means = [f"{fmean(losses):.4f}" if losses else "" for losses in (*at, *by_noise)]
        yield _line([row.name, *means, _scores(row.runs)])


def _lines(heads: Sequence[str]) -> list[str]:
    return [_line(heads), "|---" * len(heads) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _scores(runs: Sequence[Run]) -> str:
    """Shares of the right attributes of clips, means over runs."""
    paths = [run.folder / "score.json" for run in runs]
    clips = [json.loads(path.read_text(encoding="utf-8"))["scores"]["clips"] for path in paths if path.is_file()]
    return ", ".join(f"{fmean(c[part] for c in clips):.0%}" for part in ("colour", "shape", "motion")) if clips else ""


def step_seconds() -> dict[str, float]:
    """Seconds of a step by variant, measured alone in one call."""
    return {name: fmean(mean_step_seconds(run.folder) for run in runs) for name, runs in finished("times").items()}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("leg", choices=LEGS)
    run.add_argument("--seeds", type=int, nargs="+", help="seeds to train (all of the leg)")
    run.add_argument("--jobs", type=int, default=5, help="runs on a GPU at a time (default %(default)s)")
    commands.add_parser("missing")
    commands.add_parser("pack")
    commands.add_parser("table").add_argument("leg", choices=LEGS, nargs="?", default="scratch")
    args = parser.parse_args()
    with one_line_errors():
        if args.command == "run":
            train(args.leg, args.seeds or LEGS[args.leg].seeds, args.jobs)
        else:
            lines = {"missing": missing, "pack": pack}.get(args.command, lambda: table(args.leg))
            print(*lines(), sep="\n")


if __name__ == "__main__":
    main()
