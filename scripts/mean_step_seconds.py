"""Mean time of the settled steps of some runs, which differ in a setting whose cost is to be known."""

from __future__ import annotations

import argparse
from pathlib import Path

from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric

SETTLED = 20
"""Steps at the start of a run that are not counted."""


def mean_step_seconds(run: Path) -> float:
    """Mean seconds of the steps after the first ones; each log line has the mean of the steps since the one before.

    Raises:
        ValueError: the run has no log line after its first steps.
    """
    steps, seconds = read_metric(run / "metrics.csv", "throughput/step_seconds")
    counts = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    settled = [(n, value) for n, step, value in zip(counts, steps, seconds, strict=True) if step > SETTLED]
    if not settled:
        raise ValueError(f"{run} has no log line after step {SETTLED}")
    return float(sum(n * value for n, value in settled) / sum(n for n, _ in settled))


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    with one_line_errors():
        for run in parser.parse_args().runs:
            print(f"{run.name}: {1e3 * mean_step_seconds(run):.1f} ms a step")


if __name__ == "__main__":
    main()
