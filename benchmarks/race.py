"""The race of docs/race.md: trains what is missing of a leg, says what is missing, packs runs, and makes the tables.

python -m benchmarks.race run scratch --seeds 0 --jobs 5     what is missing of a leg; again after an interruption
python -m benchmarks.race score scratch                      clips of runs that an interruption left without scores
python -m benchmarks.race pack                               outputs/race to benchmarks/raw/race-LEG.tar.xz
python -m benchmarks.race missing                            runs and GPU minutes to go, by the archives
python -m benchmarks.race table scratch                      tables of a leg, from its archive
python -m benchmarks.race page scratch                       its curves and tables as one HTML file, by `vsa report`
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import shutil
import signal
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
from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.checkpoints.run_history import has_finished
from vsa.config import Sweep, config_folder
from vsa.errors import one_line_errors
from vsa.reports.report import report
from vsa.reports.runs import Run, find_runs, short_name
from vsa.reports.statistics import holm, t_p_value, t_quantile
from vsa.signals import handled_by
from vsa.sweeps.devices import slots_of
from vsa.sweeps.job_queue import Job, run_jobs

OUT, RAW = Path("outputs/race"), Path(__file__).parent / "raw"
KEPT = ("config.yaml", "run.json", "metrics.csv", "validation.csv", "score.json")
COLUMNS = re.compile(r"(?!.*_decile_)(step|at|sample|noise_level|loss|lr|(train|val)/loss.*|throughput/.*|sparsity/.*)")
"""Columns of archived tables; the losses by noise level are those of validation.csv."""
REFERENCE, DENSE, START = "vsa_64", "dense", "start"
COMMON = ("experiment=ablation", "name=race", "task.parallel.compile=true", "callbacks.samples.prompts=[]")
POINTS = "task.validate_at=[current,half,double,quadruple,dense]"
FROM_SCRATCH = "flop_budget=2e16"
RATES = (1e-3, 2e-3, 4e-3)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A comparison at one budget.

    Args:
        sweep: its variants, a file of configs/sweep.
        settings: settings of all runs.
        seeds: seeds of the whole leg.
        minutes: GPU minutes of a run, as estimated before the first one.
        rates: learning rates of every variant; none: its best one of the leg `rates`, if it has `own_rate`.
        own_rate: whether variants train at their best learning rate, instead of that of the settings.
        alone: whether one run has the GPU at a time.
        scored: whether clips of its runs are scored.
        best_of: another leg, whose best variants, VSA and the dense model run in this one.
    """

    sweep: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    rates: tuple[float, ...] = ()
    own_rate: bool = True
    alone: bool = False
    scored: bool = True
    best_of: str | None = None


LEGS = {
    "rates": Leg(sweep="race", settings=("flop_budget=5e15",), seeds=(9,), minutes=0.7, rates=RATES, scored=False),
    "times": Leg(
        sweep="race",
        settings=("trainer.max_steps=80", "trainer.limit_val_batches=0", "callbacks.checkpoint=null"),
        seeds=(9,),
        minutes=0.7,
        own_rate=False,
        alone=True,
        scored=False,
    ),
    "scratch": Leg(sweep="race", settings=(FROM_SCRATCH, POINTS), seeds=(0, 1, 2), minutes=2.2),
    "second": Leg(
        sweep="race", settings=("flop_budget=5e16", POINTS), seeds=(0, 1, 2, 3, 4), minutes=5, best_of="scratch"
    ),
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
        own_rate=False,
    ),
}
BEST, CLIPS = 5, 256
"""Variants of the second round besides VSA and the dense model; scored clips of a run."""


def variants(name: str) -> dict[str, list[str]]:
    """Settings of the variants of a leg.

    Raises:
        ValueError: a leg that decides on them is incomplete.
    """
    leg = LEGS[name]
    sweep = yaml.safe_load((config_folder() / "sweep" / f"{leg.sweep}.yaml").read_text(encoding="utf-8"))["variants"]
    if leg.best_of is None:
        return sweep
    if to_go(leg.best_of):
        raise ValueError(f"{name} trains the best of {leg.best_of}, of which runs are missing")
    order = [row.name for row in ranked(finished(leg.best_of)) if row.name not in (REFERENCE, DENSE)]
    return {key: sweep[key] for key in (REFERENCE, DENSE, *order[:BEST])}


def best_rates() -> dict[str, float]:
    """The learning rate of each variant that has the lowest loss in the leg `rates`.

    Raises:
        ValueError: one of its runs is missing.
    """
    if to_go("rates"):
        raise ValueError("learning rates come from the leg rates, of which runs are missing: run and pack it first")
    losses = {key: {_rate(run): _loss(run) for run in runs} for key, runs in finished("rates").items()}
    return {key: min(own, key=own.__getitem__) for key, own in losses.items()}


def _rate(run: Run) -> float:
    return float(run.settings["optim.lr"])


def point_names(name: str, variant: str, seeds: Sequence[int]) -> list[str]:
    """Names of the runs of a variant."""
    rates = [f"-lr{rate:g}" for rate in LEGS[name].rates] or [""]
    return [f"{variant}{rate}-seed{seed}" for seed in seeds for rate in rates]


def points(name: str, seeds: Sequence[int]) -> dict[str, list[str]]:
    """Settings of the runs of a leg, seed by seed.

    Raises:
        ValueError: a leg that decides on variants or learning rates is incomplete.
    """
    leg = LEGS[name]
    best = {} if leg.rates or not leg.own_rate else best_rates()
    all_points = {}
    for seed in seeds:
        for variant, own in variants(name).items():
            rates = leg.rates or ([best[variant]] if best else [])
            common = [*own, f"seed={seed}"]
            settings = [[*common, f"optim.lr={rate}"] for rate in rates] or [common]
            all_points |= zip(point_names(name, variant, [seed]), settings, strict=True)
    return all_points


def train(name: str, seeds: Sequence[int], jobs: int) -> None:
    """Train the runs of a leg that its archive has not, and score the clips of those that have finished.

    Raises:
        SystemExit: always; with another status than 0 a run failed or a signal came, and the same command goes on.
    """
    leg, archived = LEGS[name], _archived(name)
    own = {point: settings for point, settings in points(name, seeds).items() if point not in archived}
    groups = [(own, leg.settings)]
    if name == "finetune":
        # each seed from its own dense run
        by_seed = {seed: {p: own[p] for p in own if p.endswith(f"-seed{seed}")} for seed in seeds}
        dense = ["attention=full", f"optim.lr={best_rates()[DENSE]}"]
        starts = {f"{DENSE}-seed{seed}": [*dense, f"seed={seed}"] for seed in seeds if by_seed[seed]}
        if code := _sweep(START, starts, [FROM_SCRATCH], jobs):
            raise SystemExit(code)
        start = f"init_from={OUT / START / DENSE}-seed"
        groups = [(group, (*leg.settings, f"{start}{seed}")) for seed, group in by_seed.items()]
    code = max(_sweep(name, group, settings, 1 if leg.alone else jobs) for group, settings in groups)
    score(name, jobs)
    raise SystemExit(code)


def _sweep(name: str, own: Mapping[str, Sequence[str]], settings: Sequence[str], jobs: int) -> int:
    """Train points in OUT/NAME by `vsa sweep`, which goes on from those that are there.

    Returns:
        its exit status, 1 if a run failed.

    Raises:
        SystemExit: a signal came.
    """
    if not own:
        return 0
    file = OUT / "sweeps" / "sweep" / f"leg_{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    sweep = {"name": name, "variants": {key: list(words) for key, words in own.items()}, "control": False}
    file.write_text(yaml.safe_dump(sweep, sort_keys=False, width=1000), encoding="utf-8")
    command = ["sweep", file.stem, "--config-dir", str(file.parent.parent), *COMMON, *settings]
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        # a terminal has sent it to both, and two of them would end the runs without saving
        if number != signal.SIGINT:
            process.send_signal(number)

    process = subprocess.Popen([sys.executable, "-m", "vsa.cli", *command, f"sweep.jobs_per_device={jobs}"])
    with handled_by(forward):
        code = process.wait()
    if received:
        raise SystemExit(128 + received[0])
    return code


def score(name: str, jobs: int) -> None:
    """Score clips of every finished run of a leg in `OUT` that has no scores, several at a time.

    Raises:
        SystemExit: a score failed, or a signal came.
    """
    own = [run for run in sorted((OUT / name).glob("*-seed*")) if run.is_dir() and LEGS[name].scored]
    to_score = [run for run in own if _finished(run) and list_checkpoints(run / "checkpoints")]
    command = (
        sys.executable,
        "-m",
        "benchmarks.world.score",
        "--clips",
        str(CLIPS),
        "--batch-size",
        "64",
        "--rendered",
        "0",
    )
    scores = [
        Job(run.name, [*command, str(run)], run.parent / f"{run.name}-score.log")
        for run in to_score
        if not (run / "score.json").is_file()
    ]

    def changed(job: Job) -> None:
        if job.status != "running":
            print(f"clips of {job.name}: {job.reason or job.status}")

    slots = slots_of(Sweep(jobs_per_device=jobs), {"accelerator": "auto", "devices": 1})
    number = run_jobs(scores, slots, changed=changed, tick=lambda: None, grace=5)
    if number is not None or any(job.status != "finished" for job in scores):
        raise SystemExit(1 if number is None else 128 + number)


def _finished(run: Path) -> bool:
    return (run / "run.json").is_file() and has_finished(run)


def archive(name: str) -> Path:
    """Archive of the runs of a leg."""
    return RAW / f"race-{name}.tar.xz"


def pack() -> Iterator[str]:
    """Add to the archives the runs in `OUT` that are finished and scored; yields a line for each archive.

    Seeds of `finetune` are added whole: runs of one seed have the same dense start, which only its machine has.
    """
    for name, leg in LEGS.items():
        before = _archived(name)
        done = [run for run in sorted((OUT / name).glob("*-seed*")) if run.is_dir() and run.name not in before]
        done = [run for run in done if _finished(run) and (not leg.scored or (run / "score.json").is_file())]
        if name == "finetune":
            names = {run.name for run in done}
            whole = [seed for seed in leg.seeds if names >= {*points(name, [seed])}]
            done = [run for run in done if int(run.name.rpartition("-seed")[2]) in whole]
        if not done:
            continue
        files = {
            f"{name}/{run.name}/{file}": _slim(run / file) for run in done for file in KEPT if (run / file).is_file()
        }
        if archive(name).is_file():
            with tarfile.open(archive(name)) as old:
                files |= {m.name: file.read() for m in old.getmembers() if (file := old.extractfile(m))}
        with tarfile.open(archive(name), "w:xz", preset=9) as tar:
            for path, content in sorted(files.items()):
                info = tarfile.TarInfo(path)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        yield f"{archive(name)}: {len(done)} runs more, {len(before) + len(done)} in all"


def _slim(path: Path) -> bytes:
    """A file as it is archived: tables without the columns that no comparison reads, numbers with six digits."""
    if path.suffix != ".csv":
        return path.read_bytes()
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    kept = [i for i, column in enumerate(rows[0]) if COLUMNS.fullmatch(column)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_short(row[i]) for i in kept] for row in rows)
    return text.getvalue().encode()


def _short(cell: str) -> str:
    try:
        return cell if cell.isdigit() else f"{float(cell):.6g}"
    except ValueError:
        return cell


def _archived(name: str) -> set[str]:
    """Names of the runs in the archive of a leg."""
    if not archive(name).is_file():
        return set()
    with tarfile.open(archive(name)) as tar:
        return {Path(path).parent.name for path in tar.getnames()}


def finished(name: str) -> dict[str, list[Run]]:
    """Archived runs of a leg by variant, in the order of their seeds."""
    folder = _unpacked(name)
    shutil.rmtree(folder, ignore_errors=True)
    if not archive(name).is_file():
        return {}
    with tarfile.open(archive(name)) as tar:
        tar.extractall(folder.parent, filter="data")
    by_name: dict[str, list[Run]] = {}
    for run in find_runs([folder])[1]:
        if run.status == "finished" and (run.val_loss is not None or LEGS[name].alone):
            by_name.setdefault(short_name(run), []).append(run)
    return {key: sorted(runs, key=lambda run: run.seed or 0) for key, runs in by_name.items()}


def _unpacked(name: str) -> Path:
    return OUT / "archives" / name


def to_go(name: str) -> int:
    """Number of runs of a leg that its archive has not."""
    leg = LEGS[name]
    count = BEST + 2 if leg.best_of else len(variants(name))
    return count * len(leg.seeds) * max(1, len(leg.rates)) - len(_archived(name))


def missing() -> Iterator[str]:
    """A line for each leg: runs to go and their GPU minutes."""
    total = 0.0
    for name, leg in LEGS.items():
        runs = to_go(name)
        total += runs * leg.minutes
        yield f"{name:10} {runs:4} of {runs + len(_archived(name))} runs, {runs * leg.minutes:.0f} GPU minutes"
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


def ranked(runs_by_name: Mapping[str, Sequence[Run]], reference: str = REFERENCE) -> list[Row]:
    """Variants from the lowest loss to the highest, each compared with the reference seed by seed.

    The noise of a run is what variant and seed do not explain, over all variants of the leg (a randomised block design,
    whose blocks are the seeds), since two or three seeds of one variant say little about it.
    """
    losses = {name: {run.seed: _loss(run) for run in runs} for name, runs in runs_by_name.items()}
    seeds = sorted(set.intersection(*(set(own) for own in losses.values())))
    whole = np.array([[own[seed] for seed in seeds] for own in losses.values()])
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    if freedom > 0:
        rest = whole - whole.mean(1, keepdims=True) - whole.mean(0) + whole.mean()
        noise = math.sqrt(2 * (rest**2).sum() / freedom)
    rows = []
    for name, runs in runs_by_name.items():
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
    """Markdown tables of a leg: losses by seed and differences from VSA; numbers of tiles, noise levels, clips.

    Raises:
        ValueError: the leg has no archived run.
    """
    runs_by_name, seeds = finished(name), LEGS[name].seeds
    if not runs_by_name:
        raise ValueError(f"{name} has no run in {archive(name)}")
    if LEGS[name].rates:
        yield from _rates_table(runs_by_name)
        return
    seconds = step_seconds()
    if LEGS[name].alone:
        yield from _lines(["variant", "ms a step"])
        yield from (_line([key, f"{1e3 * seconds[key]:.1f}"]) for key in sorted(seconds, key=seconds.__getitem__))
        return
    rows = ranked(runs_by_name)
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
    at_points = list(dict.fromkeys(point for row in rows for run in row.runs for point in run.validation))
    noise = [f"noise {low / 10:g} to {(low + 1) / 10:g}" for low in range(10)]
    yield from _lines(["variant", *at_points, *noise, "colour, shape, motion"])
    for row in rows:
        at = [[loss for run in row.runs for loss in run.validation.get(point, {}).values()] for point in at_points]
        current = [item for run in row.runs for item in run.validation["current"].items()]
        by_noise = [[loss for (_, level), loss in current if min(9, int(10 * level)) == low] for low in range(10)]
        means = [f"{fmean(losses):.4f}" if losses else "" for losses in (*at, *by_noise)]
        yield _line([row.name, *means, _scores(row.runs)])
    for row in rows:
        versions = sorted({str(commit) for run in row.runs for commit in run.manifest.get("commits") or ["unknown"]})
        if len(versions) > 1:
            yield f"{row.name}: runs of {len(versions)} versions of the code, {', '.join(versions)}"


def _rates_table(runs_by_name: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Losses by learning rate, the lowest in bold."""
    losses = {name: {_rate(run): _loss(run) for run in runs} for name, runs in runs_by_name.items()}
    rates = sorted({rate for own in losses.values() for rate in own})
    yield from _lines(["variant", "steps", *(f"lr {rate:g}" for rate in rates)])
    for name, own in sorted(losses.items(), key=lambda item: min(item[1].values())):
        cells = [f"{own[rate]:.4f}" if rate in own else "" for rate in rates]
        best = f"{min(own.values()):.4f}"
        cells = [f"**{cell}**" if cell == best else cell for cell in cells]
        yield _line([name, f"{runs_by_name[name][0].steps:,}", *cells])


def page(name: str) -> None:
    """Write the page of a leg, from its archive.

    Raises:
        ValueError: the leg has no archived run.
    """
    if not finished(name):
        raise ValueError(f"{name} has no run in {archive(name)}")
    report([_unpacked(name)])


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
    for command in ("run", "score"):
        own = commands.add_parser(command)
        own.add_argument("leg", choices=LEGS)
        own.add_argument("--jobs", type=int, default=5, help="runs on a GPU at a time (default %(default)s)")
        if command == "run":
            own.add_argument("--seeds", type=int, nargs="+", help="seeds to train (all of the leg)")
    commands.add_parser("pack")
    commands.add_parser("missing")
    for command in ("table", "page"):
        commands.add_parser(command).add_argument("leg", choices=LEGS, nargs="?", default="scratch")
    args = parser.parse_args()
    with one_line_errors():
        if args.command == "run":
            train(args.leg, args.seeds or LEGS[args.leg].seeds, args.jobs)
        elif args.command == "score":
            score(args.leg, args.jobs)
        elif args.command == "page":
            page(args.leg)
        else:
            lines = {"missing": missing, "pack": pack}.get(args.command, lambda: table(args.leg))
            print(*lines(), sep="\n")


if __name__ == "__main__":
    main()
