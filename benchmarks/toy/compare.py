"""Dense training with the training FLOPs of a finished sparse quickstart run, and a table of the scores of both.

python -m benchmarks.toy.compare outputs/quickstart/default outputs/quickstart/dense
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.toy.study import ROOT, write_json
from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric


def command(*arguments: str) -> None:
    """Run a command of this project with its progress bars; raises ValueError if it fails."""
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT)
    if process.returncode:
        raise ValueError(f"{' '.join(arguments)} ended with status {process.returncode}")


def row(run: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Cost and scores of a run, from its metrics, checkpoint and score.json."""
    score = json.loads((run / "score.json").read_text(encoding="utf-8"))
    metrics = run / "metrics.csv"
    return {
        "run": run.name,
        "steps": checkpoint.step,
        "flops": checkpoint.state["flops_total"],
        "seconds_per_step": float(read_metric(metrics, "throughput/step_seconds")[1].mean()),
        "val_loss": float(read_metric(metrics, "val/loss")[1][-1]),
        **score["model"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sparse", type=Path, help="folder of a finished and scored quickstart run")
    parser.add_argument("dense", type=Path, help="folder of the dense run to train: OUTPUT_DIR/quickstart/NAME")
    parser.add_argument("--guidance", default="3", help="guidance of the dense run's score; use that of the sparse run")
    parser.add_argument(
        "--steps", default="20", help="Euler steps of the dense run's score; use those of the sparse run"
    )
    args = parser.parse_args()
    if not (args.sparse / "score.json").is_file():
        raise ValueError(f"{args.sparse} has no score.json: run benchmarks.toy.score on it first")
    sparse = resolve_checkpoint(args.sparse)
    name = (f"run={args.dense.name}", f"output_dir={args.dense.resolve().parent.parent}")
    budget = f"flop_budget={sparse.state['flops_total']}"
    command("train.py", "experiment=quickstart", "attention=full", "overwrite=true", budget, *name)
    command("-m", "benchmarks.toy.score", str(args.dense), "--guidance", args.guidance, "--steps", args.steps)

    rows = [row(args.sparse, sparse), row(args.dense, resolve_checkpoint(args.dense))]
    columns = {
        "run": "{run}",
        "steps": "{steps}",
        "PFLOPs": "{pflops:.4f}",
        "s/step": "{seconds_per_step:.3f}",
        "val loss": "{val_loss:.4f}",
        "colour": "{colour:.1%}",
        "direction": "{direction:.1%}",
        "shape": "{shape:.1%}",
    }
    table = Table(*columns, title="sparse against dense attention at equal training FLOPs")
    for record in rows:
        table.add_row(*(cell.format(**record, pflops=record["flops"] / 1e15) for cell in columns.values()))
    Console().print(table)
    write_json(args.dense / "compare.json", rows)


if __name__ == "__main__":
    with one_line_errors():
        main()
