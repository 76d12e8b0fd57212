"""Archives of the race: finished runs by leg, without their weights."""

from __future__ import annotations

import csv
import io
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.race.legs import LEGS, archive, folder
from vsa.checkpoints.run_history import has_finished
from vsa.reports.runs import Run, find_runs, short_name

KEPT = ("config.yaml", "run.json", "metrics.csv", "validation.csv", "profile.json", "score.json")
COLUMNS = re.compile(
    r"(?!.*_decile_)(step|at|sample|noise_level|loss|lr|(train|val)/loss.*|sparsity/.*"
    r"|throughput/(step_seconds|tokens_per_second|flops_total|memory_gib))"
)
"""Columns of archived tables; the losses by noise level are those of validation.csv, other speeds follow from these."""


def is_finished(run: Path) -> bool:
    """Whether a run on this machine has ended."""
    return (run / "run.json").is_file() and has_finished(run)


def pack(*, unscored: bool = False) -> Iterator[str]:
    """Add to the archives the runs of this machine that are finished and scored; yields a line for each archive.

    Seeds of `finetune` are added whole: runs of one seed have the same dense start, which only its machine has.

    Args:
        unscored: whether to add finished runs without scores too, whose clips will then never be scored.
    """
    for name, leg in LEGS.items():
        before = archived(name)
        done = [run for run in sorted(folder(name).glob("*-seed*")) if run.is_dir() and run.name not in before]
        scored = [
            run for run in done if not leg.scored or (unscored and not leg.repeats) or (run / "score.json").is_file()
        ]
        done = [run for run in scored if is_finished(run)]
        if name == "finetune":
            done = _whole_seeds(done)
        if not done:
            continue
        files = {
            f"{name}/{run.name}/{file}": _slim(run / file) for run in done for file in KEPT if (run / file).is_file()
        }
        if before:
            with tarfile.open(archive(name)) as old:
                files |= {m.name: file.read() for m in old.getmembers() if (file := old.extractfile(m))}
        with tarfile.open(archive(name), "w:xz", preset=9) as tar:
            for path, content in sorted(files.items()):
                info = tarfile.TarInfo(path)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        yield f"{archive(name)}: {len(done)} runs more, {len(before) + len(done)} in all"


def _whole_seeds(runs: Sequence[Path]) -> list[Path]:
    seeds = Counter(run.name.rpartition("-seed")[2] for run in runs)
    count = len(LEGS["finetune"].variants)
    return [run for run in runs if seeds[run.name.rpartition("-seed")[2]] == count]


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


def archived(name: str) -> set[str]:
    """Names of the runs in the archive of a leg."""
    if not archive(name).is_file():
        return set()
    with tarfile.open(archive(name)) as tar:
        return {Path(path).parent.name for path in tar.getnames()}


def unscored(name: str) -> set[str]:
    """Names of the runs in the archive of a leg whose clips were not scored."""
    if not archive(name).is_file():
        return set()
    with tarfile.open(archive(name)) as tar:
        scored = {Path(path).parent.name for path in tar.getnames() if path.endswith("/score.json")}
    return archived(name) - scored


def finished(name: str) -> dict[str, list[Run]]:
    """Archived runs of a leg by variant, in the order of their seeds."""
    by_name: dict[str, list[Run]] = {}
    for run in find_runs([unpacked(name)])[1] if archive(name).is_file() else ():
        if run.status == "finished" and (run.val_loss is not None or LEGS[name].alone):
            by_name.setdefault(short_name(run), []).append(run)
    return {key: sorted(runs, key=lambda run: run.seed or 0) for key, runs in by_name.items()}


def unpacked(name: str, where: Path | None = None) -> Path:
    """Folder with the archived runs of a leg, below `where`, or below one of this process, since others may read too.

    Raises:
        ValueError: the leg has none.
    """
    if not archive(name).is_file():
        raise ValueError(f"{name} has no run in {archive(name)}")
    where = where or Path(_own_folder().name)
    shutil.rmtree(where / name, ignore_errors=True)
    with tarfile.open(archive(name)) as tar:
        tar.extractall(where, filter="data")
    return where / name


@cache
def _own_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="vsa-race-")
