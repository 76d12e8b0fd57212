"""Draw the loss curve of one or more runs beside their metrics, and print where each ended.

python scripts/report.py outputs/quickstart/default
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vsa.cli import one_line_errors
from vsa.training.figures import health_curves, loss_curve, read_metric


def last_value(metrics: Path, column: str) -> float | None:
    """Last value of a column of `metrics.csv`, None where the run never logged it."""
    try:
        values = read_metric(metrics, column)[1]
    except ValueError:
        return None
    return float(values[-1]) if len(values) else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    args = parser.parse_args(argv)
    table = Table()
    for heading in ("run", "steps", "train loss", "val loss", "tokens/s", "figure"):
        table.add_column(heading)
    for run in args.runs:
        metrics = run / "metrics.csv"
        if not metrics.is_file():
            raise ValueError(f"{run} is no run folder: it has no metrics.csv")
        # of a distillation: the critic's loss, and the gap between critic and teacher
        distilled = last_value(metrics, "train/loss") is None
        loss, val = ("fake_score/loss", "val/gap") if distilled else ("train/loss", "val/loss")
        steps = read_metric(metrics, loss)[0]
        figure = (health_curves if distilled else loss_curve)(metrics, run / "loss.png", title=str(run))
        shown = [last_value(metrics, name) for name in (loss, val, "throughput/tokens_per_second")]
        cells = ["-" if value is None else f"{value:.4g}" for value in shown]
        table.add_row(str(run), str(steps[-1]) if len(steps) else "0", *cells, str(figure))
    Console().print(table)


if __name__ == "__main__":
    with one_line_errors():
        main()
