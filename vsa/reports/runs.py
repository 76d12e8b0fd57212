"""Runs as a report reads them: settings, metrics and the status in a sweep."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vsa.checkpoints.manifest import MANIFEST, PROJECT, read_manifest
from vsa.checkpoints.run_checkpoint import list_checkpoints, read_checkpoint, step_of
from vsa.checkpoints.run_folder import in_use
from vsa.evaluation.figures import Curve, read_metrics
from vsa.files import check_kind, is_regular, open_regular, read_csv, read_json, read_yaml

METRICS, SWEEP = "metrics.csv", "sweep.json"
# folders of a run that contain no other runs
_INSIDE = ("checkpoints", "samples", "data-clips", "diagnostics", "evaluation", "report")
# metrics that a comparison uses; the others are not parsed, to save time with long files
_COMPARED = re.compile(
    r"(train/loss(_data)?|val/(loss|gap)(_.*)?|fake_score/loss|throughput/(step_seconds|tokens_per_second|flops_total)"
    r"|sparsity/(topk|density)|diag/(?!.*_layer_).*)"
)
# metrics that the page of a run uses
_WHOLE = re.compile(r"(?!.*_layer_|grad_norm/.*layer).*")
# a metrics.csv without run.json is a run's if it has one of these; other programs write files of this name too
_LOSSES = ("train/loss", "train/loss_data", "val/loss", "fake_score/loss")
_SEED_OR_LR = re.compile(r"([-_,.]?(lr|seed)[-_=]?\d[\d.e+-]*)+$")
# content of sweep.json
_SWEEP_KIND = {"points": [{"name": str, "status": str, "reason?": str | None, "device?": str | None, "control?": bool}]}
_WITHOUT_METRICS = {"waiting": "not started yet", "running": "no metrics yet"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Entry of a run in the `sweep.json` of its sweep.

    Args:
        name: name of the run in the folder of the sweep.
        status: waiting, running, finished, failed, refused or stopped.
        reason: reason why the run failed or was refused.
        control: whether it is the dense control that the others are compared with.
        device: device that it ran on.
    """

    name: str
    status: str
    reason: str | None = None
    control: bool = False
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A run that cannot be compared, with the reason."""

    name: str
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    Args:
        folder: the run folder.
        name: path of the folder relative to that of the report.
        settings: values of `config.yaml` by dotted key; empty without this file.
        metrics: curves by column of `metrics.csv`.
        validation: losses of the last validation by sparsity point, then by (sample, noise level).
        manifest: content of `run.json`.
        point: entry in the sweep that the run belongs to, None without a sweep.
        parameters: number of parameters of the network, None without a readable checkpoint.
        writing: whether a process is writing to the folder.
        damaged: reason why `run.json` cannot be read; empty where it can, or is missing.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, Curve]
    validation: Mapping[str, Mapping[tuple[str, float], float]]
    manifest: Mapping[str, Any]
    point: Point | None
    parameters: int | None
    writing: bool
    damaged: str = ""

    def last(self, *columns: str) -> float | None:
        """Last value of the first of `columns` that was logged, None if none was."""
        curve = self.curve(*columns)
        return float(curve[1][-1]) if len(curve[1]) else None

    def curve(self, *columns: str) -> Curve:
        """Steps and values of the first of `columns` that was logged, empty if none was."""
        return next((self.metrics[name] for name in columns if name in self.metrics), (np.array([]), np.array([])))

    @property
    def distilled(self) -> bool:
        """Whether the run logged a critic's loss and no training loss."""
        return not {"train/loss", "train/loss_data"} & set(self.metrics) and "fake_score/loss" in self.metrics

    @property
    def train(self) -> Curve:
        """The training loss; for a mixture the part that validation measures, for a distillation the critic's loss."""
        return self.curve("fake_score/loss") if self.distilled else self.curve("train/loss_data", "train/loss")

    @property
    def val(self) -> Curve:
        """The validation loss; for a distillation the gap between critic and teacher."""
        return self.curve("val/gap") if self.distilled else self.curve("val/loss")

    @property
    def val_loss(self) -> float | None:
        """The last validation loss."""
        return float(self.val[1][-1]) if len(self.val[1]) else None

    @property
    def steps(self) -> int:
        """Optimizer steps so far, the most of what was logged, saved and noted at the end of the last start."""
        noted = [start.get("last_step", start.get("step", 0)) for start in self.starts[-1:]]
        saved = [step_of(path) for path in list_checkpoints(self.folder / "checkpoints")]
        return max([0, *noted, *saved, *(int(steps[-1]) for steps, _ in self.metrics.values() if len(steps))])

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """All starts in the manifest; empty for a run of an earlier version."""
        return self.manifest.get("starts", [])

    @property
    def status(self) -> str:
        """running, finished, failed, stopped or the status in the sweep; without other records a run is finished."""
        # a process that has recorded the end of its run may still lock the folder
        outcome = self.starts[-1].get("how") if self.starts else None
        if self.writing and outcome is None:
            return "running"
        if self.point is not None and self.point.status != "running":
            stopped = self.point.status == "finished" and self.starts and outcome != "finished"
            return str(outcome or "stopped") if stopped else self.point.status
        if self.starts:
            # a killed run recorded no end
            return str(outcome or "stopped")
        most = self.settings.get("trainer.max_steps")
        return "stopped" if isinstance(most, int) and self.steps < most else "finished"

    @property
    def seed(self) -> int | None:
        """Seed of the settings, else the seed in the name."""
        match = re.search(r"seed[-_=]?(\d+)", self.name)
        seed = self.settings.get("seed", int(match[1]) if match else None)
        return seed if isinstance(seed, int) else None

    @property
    def step_seconds(self) -> float | None:
        """Median time of a training step in seconds, without the first tenth of the run."""
        values = self.curve("throughput/step_seconds")[1]
        return float(np.median(values[len(values) // 10 :])) if len(values) else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens of all samples of a step."""
        rate, seconds = (self.curve(f"throughput/{name}") for name in ("tokens_per_second", "step_seconds"))
        return float(np.mean(rate[1] * seconds[1])) if len(rate[1]) and len(rate[1]) == len(seconds[1]) else None

    def spent(self, what: str, steps: np.ndarray) -> np.ndarray | None:
        """FLOPs, tokens, seconds or steps of training up to each of `steps`, None if they were not logged."""
        if what == "steps":
            return steps
        at, total = self._totals.get(what, (np.array([]), np.array([])))
        return np.interp(steps, at, total) if len(at) else None

    def total(self, what: str) -> float | None:
        """FLOPs, tokens or seconds of training so far, None if they were not logged."""
        values = self.spent(what, np.array([self.steps]))
        return None if values is None else float(values[0])

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Versions and devices of each start, empty where none were recorded."""
        recorded = [start.get("environment") for start in self.starts]
        return [each if isinstance(each, Mapping) else {} for each in recorded]

    @cached_property
    def _totals(self) -> dict[str, Curve]:
        """Cumulative FLOPs, seconds and tokens at step 0 and at the logged steps."""
        totals: dict[str, Curve] = {}
        at, flops = self.curve("throughput/flops_total")
        totals["flops"] = np.insert(at, 0, 0), np.insert(flops, 0, 0.0)
        at, seconds = self.curve("throughput/step_seconds")
        between = seconds * np.diff(at, prepend=0)
        totals["seconds"] = np.insert(at, 0, 0), np.insert(np.cumsum(between), 0, 0.0)
        rates = self.curve("throughput/tokens_per_second")[1]
        if len(rates) == len(at):
            totals["tokens"] = np.insert(at, 0, 0), np.insert(np.cumsum(rates * between), 0, 0.0)
        # a single entry is only that of step 0
        return {name: curve for name, curve in totals.items() if len(curve[0]) > 1}


def find_runs(folders: Sequence[Path]) -> tuple[Path, list[Run], list[Missing]]:
    """All runs in `folders` at any depth, and the runs that cannot be compared: unreadable, failed or not started.

    Args:
        folders: run folders, sweeps or folders that contain them; a run in two of them counts once.

    Returns:
        The folder that contains all runs, the runs by name, and the missing ones.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: expected a run, a sweep or a folder of them")
    tops = [folder.resolve() for folder in folders]
    root = tops[0] if len(tops) == 1 else Path(os.path.commonpath([top.parent for top in tops]))
    paths_by_top = {top: sorted(_walk(top)) for top in tops}
    for folder, top in zip(folders, tops, strict=True):
        if not paths_by_top[top]:
            raise ValueError(f"no run in {folder}: {METRICS} is missing there and in every folder below")
    paths = sorted({path for inside in paths_by_top.values() for path in inside})
    points, runs, missing = {}, [], []
    for path in paths:
        try:
            points |= {path / point.name: point for point in _points(path / SWEEP)}
        except ValueError as error:
            missing.append(Missing(name=SWEEP, status="unreadable", reason=_one_line(error)))
    for path in (path for path in paths if os.path.lexists(path / METRICS)):
        if path not in points and path.suffix[1:].isdecimal() and path.with_suffix("") in points:
            # of a point that was started over
            continue
        try:
            _refuse_foreign(path)
            runs.append(_read_run(path, root, points.get(path)))
        except (ValueError, OSError) as error:
            missing.append(Missing(name=_name(path, root), status="unreadable", reason=_one_line(error)))
    for path, point in points.items():
        if point.reason is not None or not (path / METRICS).is_file():
            reason = point.reason or _WITHOUT_METRICS.get(point.status, "it left no metrics")
            missing.append(Missing(name=_name(path, root), status=point.status, reason=reason))
    return root, runs, missing


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder; the run may have logged nothing yet."""
    return (folder / METRICS).is_file() or _manifest(folder)[0].get("written_by") == PROJECT


def read_run(folder: Path) -> Run:
    """One run with all of its metrics, which are empty if it has logged nothing yet."""
    if not _columns(folder) and _manifest(folder)[0].get("written_by") != PROJECT:
        raise ValueError(_not_a_run(folder, "is empty"))
    _refuse_foreign(folder)
    try:
        return _read_run(folder.resolve(), folder.resolve(), None, pattern=_WHOLE)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {_one_line(error)}") from None


def _columns(folder: Path) -> list[str]:
    """Columns of `metrics.csv`; empty without the file."""
    if not os.path.lexists(folder / METRICS):
        return []
    with open_regular(folder / METRICS) as file:
        return [name for name in file.readline(1 << 20).decode(errors="replace").strip().split(",") if name]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse_foreign(folder: Path) -> None:
    """Raise ValueError if another program wrote `metrics.csv`; one without metrics may be that of a run's beginning.

    So does a file that lies elsewhere, whose content would go into a page that is shared.
    """
    for name in (METRICS, MANIFEST, "config.yaml", "validation.csv"):
        path = folder / name
        if path.is_file() and not is_regular(path, inside=folder):
            raise ValueError(f"{path} leads out of the run folder, to {path.resolve()}")
    columns = _columns(folder)
    if columns in ([], ["step"]) or _manifest(folder)[0].get("written_by") == PROJECT:
        return
    if "step" not in columns:
        raise ValueError(_not_a_run(folder, "has no column step"))
    if not set(_LOSSES) & set(columns):
        raise ValueError(_not_a_run(folder, f"has none of the columns {', '.join(_LOSSES)}"))


def _not_a_run(folder: Path, reason: str) -> str:
    return f"{folder} is not a run of {PROJECT}: {folder / METRICS} {reason} and there is no {MANIFEST}"


def _walk(top: Path) -> Iterator[Path]:
    """Folders of runs and sweeps."""
    for place, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _INSIDE]
        if METRICS in (*files, *folders) or SWEEP in files:
            yield Path(place)


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path != root else path.name


def _points(path: Path) -> Iterator[Point]:
    """Points of a sweep; none without the file."""
    with suppress(OSError):
        content = read_json(path, kind=object, inside=path.parent)
        # another program's file of this name is no sweep
        ours = isinstance(content, dict) and "points" in content
        check_kind(content if ours else {"points": []}, _SWEEP_KIND, path)
        for point in content["points"] if ours else ():
            yield Point(**{field.name: point[field.name] for field in fields(Point) if field.name in point})


def _read_run(folder: Path, root: Path, point: Point | None, *, pattern: re.Pattern[str] = _COMPARED) -> Run:
    manifest, damaged = _manifest(folder)
    metrics = read_metrics(folder / METRICS, pattern.fullmatch) if os.path.lexists(folder / METRICS) else {}
    # as long as its first line has no end, the file reads as one without columns
    if not metrics and (columns := _columns(folder)) and "step" not in columns:
        raise ValueError(f"{folder / METRICS} has no column step")
    return Run(
        folder=folder,
        name=_name(folder, root),
        settings=dict(_leaves(read_yaml(config))) if (config := folder / "config.yaml").exists() else {},
        # NaN, which marks missing values in tables of several runs, is as bad as infinity
        metrics={name: (at, np.where(np.isnan(values), np.inf, values)) for name, (at, values) in metrics.items()},
        validation=_validation(folder / "validation.csv"),
        manifest=manifest,
        point=point,
        parameters=_parameters(folder),
        writing=in_use(folder),
        damaged=damaged,
    )


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        # lists are not hashable
        plain = isinstance(node, str | int | float | None)
        yield key, node if plain else json.dumps(node, default=str, skipkeys=True)


def _validation(path: Path) -> dict[str, dict[tuple[str, float], float]]:
    losses: dict[str, dict[tuple[str, float], float]] = {}
    for row in read_csv(path, ("at", "sample", "noise_level", "loss"))[1] if path.exists() else ():
        try:
            losses.setdefault(row["at"], {})[row["sample"], float(row["noise_level"])] = float(row["loss"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return losses


def _manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The content of `run.json`, and why it cannot be read."""
    try:
        return read_manifest(folder), ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, _one_line(error)


def _parameters(folder: Path) -> int | None:
    for checkpoint in reversed(list_checkpoints(folder / "checkpoints")):
        # a checkpoint may be incomplete, or of another format
        with suppress(Exception):
            shapes = read_checkpoint(checkpoint, verify=False).open("model").shapes
            return sum(map(math.prod, shapes.values()))
    return None


def short_name(run: Run) -> str:
    """Name of a run without its learning rate and seed."""
    return _SEED_OR_LR.sub("", run.name) or run.name


def code_versions(runs: Iterable[Run]) -> dict[str, int]:
    """Number of runs by version of the code, as `VERSION (COMMIT)`; a run can have several versions."""
    versions: Counter[str] = Counter()
    for run in runs:
        version = str(run.manifest.get("version", "unknown version"))
        commits = run.manifest.get("commits") or [None]
        versions.update(f"{version} ({commit})" if commit else version for commit in commits)
    return versions
