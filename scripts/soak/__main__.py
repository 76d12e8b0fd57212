"""Fault injection: provokes every fault of the reliability scorecard many times and counts the survived tries.

    python -m scripts.soak                       every row, as many tries as the scorecard asks for
    python -m scripts.soak kernels "kill -9"     rows of a file, or with these words in their names
    python -m scripts.soak --list

The exit status is 1 if a row lost a try, and 130 after Ctrl-C; results until then are written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from scripts.soak.report import table, write_report
from scripts.soak.rows import Row
from scripts.soak.runner import Result, run_rows
from vsa.errors import one_line_errors

TOPICS = (
    "resume",
    "checkpoints",
    "signals",
    "ranks",
    "data",
    "streams",
    "numbers",
    "numbers_on_ranks",
    "secrets",
    "execution",
    "kernels",
)
"""Modules of this folder that define rows."""


ON_GPUS = ("gpu_kernels", "gpu_runs")
"""Modules whose rows need GPUs; they run only if they are named, as in `scripts/gpu_soak.sh`."""


def rows_by_topic(topics: Sequence[str] = TOPICS) -> dict[str, tuple[Row, ...]]:
    """Rows by module."""
    there = [topic for topic in topics if find_spec(f"scripts.soak.{topic}") is not None]
    return {topic: import_module(f"scripts.soak.{topic}").ROWS for topic in there}


def choose_rows(words: Sequence[str]) -> list[Row]:
    """Rows of the named modules, or with the words in their names, in the order of `TOPICS`; all rows without words."""
    files = [word for word in words if word in (*TOPICS, *ON_GPUS)]
    names = [word for word in words if word not in files]
    # the machine may lack packages that other modules import
    searched = (*TOPICS, *ON_GPUS) if names else files or TOPICS
    topics = rows_by_topic(searched)
    for word in words:
        if word not in topics and not any(word in row.name for rows in topics.values() for row in rows):
            raise ValueError(
                f"no row {word!r}: expected one of {', '.join(topics)}, or a part of a row's name (--list)"
            )
    return [
        row
        for topic, rows in topics.items()
        for row in rows
        if not words or topic in files or any(name in row.name for name in names)
    ]


def run(rows: Sequence[Row], out: Path, *, short: bool, seed: int, jobs: int, keep: Path | None = None) -> int:
    """Run rows, print their table and write it; returns the exit status.

    Args:
        rows: rows to run.
        out: JSON file to write; the table is written beside it.
        short: run few tries per row.
        seed: seed of every row.
        jobs: number of parallel rows.
        keep: folder that keeps the folders of the rows.
    """
    results: list[Result] = []
    began, interrupted = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        finished_rows = run_rows(rows, folder, short=short, seed=seed, jobs=jobs)
        try:
            for result in finished_rows:
                results.append(result)
                score = f"{result.outcome.survived} of {result.outcome.tried}"
                print(f"{score:>12}  {result.seconds:5.0f} s  {result.row.name}", flush=True)
                for failure in result.outcome.failures[:3]:
                    print(f"{'lost: ':>15}{failure}", flush=True)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: the rows that ran are stopped", file=sys.stderr)
        finally:
            finished_rows.close()
    order = {row.name: place for place, row in enumerate(rows)}
    results.sort(key=lambda result: order[result.row.name])
    not_run = [row.name for row in rows if row.name not in {result.row.name for result in results}]
    seconds = time.monotonic() - began
    write_report(out, results, seed=seed, short=short, jobs=jobs, seconds=round(seconds, 1), not_run=not_run)
    print(f"\n{table(results)}\n\n{len(results)} rows in {seconds:.0f} s: {out}, {out.with_suffix('.md')}")
    if interrupted:
        return 130
    return 1 if any(result.lost or not result.outcome.tried for result in results) else 0


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="scripts.soak", description=str(__doc__).partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="a file, or a part of a row's name; default all")
    parser.add_argument("--short", action="store_true", help="the few tries of `make test`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel rows (default %(default)s)")
    parser.add_argument("--out", type=Path, help="default benchmarks/soak-DATE.json, outputs/soak.json for a part")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders of the rows in this empty folder")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    args = parser.parse_args()
    with one_line_errors():
        if args.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
        if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
            raise ValueError(f"--keep {args.keep} is not empty")
        if args.list:
            for topic, rows in rows_by_topic((*TOPICS, *ON_GPUS)).items():
                for row in rows:
                    print(f"{topic:12} {row.tries:5}  {row.name}")
            return
        rows = choose_rows(args.rows)
        whole = not args.rows and not args.short
        usual = f"benchmarks/soak-{datetime.now(UTC).date().isoformat()}.json" if whole else "outputs/soak.json"
        out = args.out or Path(usual)
        sys.exit(run(rows, out.resolve(), short=args.short, seed=args.seed, jobs=args.jobs, keep=args.keep))


if __name__ == "__main__":
    main()
