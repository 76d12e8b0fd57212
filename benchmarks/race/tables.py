"""Tables and pages of legs, from their archives."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.race.archive import finished, unpacked
from benchmarks.race.legs import LEGS, archive, folder
from benchmarks.race.points import rate_of
from benchmarks.race.ranking import Row, loss_of, ranked
from vsa.reports.report import report
from vsa.reports.runs import Run
from vsa.training.step_times import DATA, HOST, IDLE

SCORES = ("colour", "shape", "motion", "camera")
SECONDS, SPEED = "throughput/step_seconds", "throughput/tokens_per_second"


def table(name: str) -> Iterator[str]:
    """Markdown tables of a leg.

    Raises:
        ValueError: the leg has no archived run.
    """
    runs_by_name, leg = finished(name), LEGS[name]
    if not runs_by_name:
        raise ValueError(f"{name} has no finished run in {archive(name)}")
    if leg.rates:
        yield from _rates_table(runs_by_name)
    elif leg.alone:
        yield from _times_table(step_times(name))
    elif leg.repeats:
        yield from _repeats_table(finished(leg.repeats), runs_by_name)
    else:
        rows = ranked(runs_by_name)
        yield from _losses_table(rows, leg.seeds, step_times(name))
        yield ""
        repeats = _repeats_of(name)
        yield from _details_table(rows, repeats)
        yield from _versions({row.name: _with_repeats(row.runs, repeats) for row in rows})


def _rates_table(runs_by_name: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Losses by learning rate, the lowest in bold."""
    losses = {name: {rate_of(run): loss_of(run) for run in runs} for name, runs in runs_by_name.items()}
    rates = sorted({rate for own in losses.values() for rate in own})
    yield from _heads(["variant", "steps", *(f"lr {rate:g}" for rate in rates)])
    for name, own in sorted(losses.items(), key=lambda item: min(item[1].values())):
        cells = [f"{own[rate]:.4f}" if rate in own else "" for rate in rates]
        best = f"{min(own.values()):.4f}"
        cells = [f"**{cell}**" if cell == best else cell for cell in cells]
        yield _line([name, f"{runs_by_name[name][0].steps:,}", *cells])


def _repeats_of(name: str) -> dict[str, Run]:
    """Repeats of the runs of a leg, by name."""
    legs = [key for key, leg in LEGS.items() if leg.repeats == name]
    return {run.folder.name: run for key in legs for runs in finished(key).values() for run in runs}


def _with_repeats(runs: Sequence[Run], repeats: Mapping[str, Run]) -> list[Run]:
    return [*runs, *(repeats[run.folder.name] for run in runs if run.folder.name in repeats)]


def _repeats_table(first: Mapping[str, Sequence[Run]], again: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Losses of runs that were made twice."""
    before = {run.folder.name: run for runs in first.values() for run in runs}
    pairs = {run.folder.name: (before[run.folder.name], run) for _, runs in sorted(again.items()) for run in runs}
    yield from _heads(["run", "loss", "once more", "apart"])
    apart = []
    for name, (old, new) in pairs.items():
        apart.append(loss_of(new) - loss_of(old))
        yield _line([name, f"{loss_of(old):.4f}", f"{loss_of(new):.4f}", f"{apart[-1]:+.4f}"])
    yield ""
    # the variance of a difference is twice that of a run
    yield f"standard deviation of a run: {math.sqrt(fmean(x**2 for x in apart) / 2):.4f}"
    yield from _versions(pairs)


def _times_table(times: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    yield from _heads(["variant", "ms a step", "of it on the GPU"])
    for name, (step, on_gpu) in sorted(times.items(), key=lambda item: item[1][1]):
        yield _line([name, f"{step:.1f}", f"{on_gpu:.1f}"])


def _losses_table(rows: Sequence[Row], seeds: Sequence[int], times: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Losses by seed and differences from VSA; seconds are steps times the time of a step alone."""
    heads = ["variant", "steps", "seconds", "on the GPU", *(f"seed {seed}" for seed in seeds), "mean"]
    yield from _heads([*heads, "from VSA, by seed", "mean, 95%", "p", ""])
    for row in rows:
        steps = row.runs[0].steps
        seconds = [f"{steps * ms / 1e3:.0f}" for ms in times[row.name]] if row.name in times else ["", ""]
        by_seed = {run.seed: f"{loss_of(run):.4f}" for run in row.runs}
        mean = "" if row.reach is None else f"{fmean(row.apart):+.4f} +- {row.reach:.4f}"
        cells = [row.name, f"{steps:,}", *seconds, *(by_seed.get(seed, "") for seed in seeds), f"**{row.loss:.4f}**"]
        apart = ", ".join(f"{x:+.4f}" for x in row.apart)
        yield _line([*cells, apart, mean, "" if row.p is None else f"{row.p:.2g}", row.verdict])


def _details_table(rows: Sequence[Row], repeats: Mapping[str, Run]) -> Iterator[str]:
    """Losses by number of tiles and noise level, and scores of clips, of a repeat where the run has none."""
    at_points = list(dict.fromkeys(point for row in rows for run in row.runs for point in run.validation))
    levels = sorted({_tenth(level) for _, level in rows[0].runs[0].validation["current"]})
    noise = [f"noise {low / 10:g} to {(low + 1) / 10:g}" for low in levels]
    yield from _heads(["variant", *at_points, *noise, "scored runs", *SCORES])
    for row in rows:
        at = [[loss for run in row.runs for loss in run.validation.get(point, {}).values()] for point in at_points]
        current = [item for run in row.runs for item in run.validation["current"].items()]
        by_noise = [[loss for (_, level), loss in current if _tenth(level) == low] for low in levels]
        means = [f"{fmean(losses):.4f}" if losses else "" for losses in (*at, *by_noise)]
        first = [own for run in row.runs if (own := scores_of(run))]
        second = [
            own for run in row.runs if not scores_of(run) and (own := scores_of(repeats.get(run.folder.name, run)))
        ]
        scores = [*first, *second]
        shares = [f"{fmean(own[part] for own in scores):.1%}" if scores else "" for part in SCORES]
        of_repeats = f", {len(second)} of repeats" if second else ""
        yield _line([row.name, *means, f"{len(scores)} of {len(row.runs)}{of_repeats}", *shares])


def _tenth(noise_level: float) -> int:
    return min(9, int(10 * noise_level))


def _versions(runs_by_name: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """A line for each variant, or run and its repeat, of several versions of the code."""
    for name, runs in runs_by_name.items():
        versions = sorted({str(commit) for run in runs for commit in run.manifest.get("commits") or ["unknown"]})
        if len(versions) > 1:
            yield f"{name}: runs of {len(versions)} versions of the code, {', '.join(versions)}"


def _heads(heads: Sequence[str]) -> list[str]:
    return [_line(heads), "|---" * len(heads) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def scores_of(run: Run) -> dict[str, float]:
    """Shares of the right attributes of its clips; empty where they were not scored."""
    path = run.folder / "score.json"
    return json.loads(path.read_text(encoding="utf-8"))["scores"]["clips"] if path.is_file() else {}


def step_times(name: str) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step by variant, measured alone in one call, and those of them in which the GPU works.

    They are those of the leg that times this one's sweep; another sweep has other tokens or losses.
    """
    times: dict[str, tuple[float, float]] = {}
    timed = next((key for key, leg in LEGS.items() if leg.alone and leg.sweep == LEGS[name].sweep), None)
    for variant, runs in ({} if timed is None else finished(timed)).items():
        profiles = [json.loads((run.folder / "profile.json").read_text(encoding="utf-8")) for run in runs]
        on_gpu = [
            sum(part["milliseconds"] for kind, part in profile["kinds"].items() if kind not in (DATA, HOST, IDLE))
            for profile in profiles
        ]
        times[variant] = (fmean(profile["milliseconds"] for profile in profiles), fmean(on_gpu))
    return times


def page(name: str) -> None:
    """Write the page of a leg, from its archive, with step times measured alone where there are any.

    Raises:
        ValueError: the leg has no archived run.
    """
    where, times = unpacked(name, folder("pages")), step_times(name)
    for path in where.glob("*/metrics.csv"):
        if (own := times.get(re.sub(r"-seed\d+$", "", path.parent.name))) is not None:
            _set_step_seconds(path, own[0] / 1e3)
    report([where])


def _set_step_seconds(path: Path, alone: float) -> None:
    """Replace the step times of a table: those of several runs on one GPU say nothing about a run."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row[SECONDS]:
            row[SPEED] = str(float(row[SPEED]) * float(row[SECONDS]) / alone)
            row[SECONDS] = str(alone)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
