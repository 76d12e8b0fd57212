"""Training and validation losses of two runs that should converge equally, and their difference at the end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric

REPEATED = 0.008
"""Largest difference of the final validation loss between repeated equal runs (`docs/benchmarks/ablation.md`)."""


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Losses over steps of both runs by name of the folder, and the differences second - first of the last ones.

    Raises:
        ValueError: the runs were validated or logged at different steps.
    """
    result: dict[str, Any] = {"runs": {first.name: {}, second.name: {}}, "difference": {}}
    for loss in ("train/loss", "val/loss"):
        (steps, ours), (other_steps, theirs) = (read_metric(run / "metrics.csv", loss) for run in (first, second))
        if steps.tolist() != other_steps.tolist() or not len(steps):
            last = [s[-1:].tolist() for s in (steps, other_steps)]
            raise ValueError(f"{first} and {second} have {loss} at different steps, the last ones are {last}")
        for run, values in ((first, ours), (second, theirs)):
            result["runs"][run.name][loss] = dict(zip(steps.tolist(), values.tolist(), strict=True))
        result["difference"][loss] = float(theirs[-1] - ours[-1])
    result["largest_difference_of_repeated_runs"] = {"val/loss": REPEATED}
    return result


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, help="run folder")
    parser.add_argument("second", type=Path, help="run folder with another name")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    with one_line_errors():
        if args.first.name == args.second.name:
            raise ValueError(f"both run folders have the name {args.first.name}")
        result = compare(args.first, args.second)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for name, losses in result["runs"].items():
            print(f"{name}: " + ", ".join(f"{s} {v:.4f}" for s, v in losses["val/loss"].items()))
        difference = result["difference"]["val/loss"]
        print(f"final validation loss: {difference:+.4f}; repeated equal runs differ by up to {REPEATED}")


if __name__ == "__main__":
    main()
