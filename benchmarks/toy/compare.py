"""Train dense attention at the training FLOPs of a finished sparse quickstart run, score both, print them side by side.

python -m benchmarks.toy.compare outputs/quickstart/default outputs/quickstart/dense
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vsa.checkpoints.run_checkpoint import Checkpoint, resolve_checkpoint
from vsa.errors import one_line_errors
from vsa.evaluation.figures import read_metric
from vsa.files import atomic_file

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> None:
    """Run one of this project's commands with its progress bars.

    Raises:
        ValueError: it failed; its own message stands above.
    """
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT)
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)} ended with status {done.returncode}")


def row(run: Path, checkpoint: Checkpoint) -> dict[str, float | str]:
    """What a run cost and reached, from its metrics, checkpoint and score."""
    score = json.loads((run / "score.json").read_text(encoding="utf-8"))
    metrics = run / "metrics.csv"
    return {
        "run": run.name,
        "steps": checkpoint.step,
        "flops": checkpoint.state["flops_total"],
        "seconds_per_step": float(read_metric(metrics, "throughput/step_seconds")[1].mean()),
        "val_loss": float(read_metric(metrics, "val/loss")[1][-1]),
        "colour": score["model"]["colour"],
        "direction": score["model"]["direction"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sparse", type=Path, help="folder of a finished and scored quickstart run")
    parser.add_argument("dense", type=Path, help="folder of the dense run to make: OUTPUT_DIR/quickstart/NAME")
    parser.add_argument("--guidance", default="3", help="of the dense run's score; use the sparse run's")
    parser.add_argument("--steps", default="20", help="Euler steps of the dense run's score; use the sparse run's")
    args = parser.parse_args()
    if not (args.sparse / "score.json").is_file():
        raise ValueError(f"{args.sparse} has no score.json: run benchmarks.toy.score on it first")
    sparse = resolve_checkpoint(args.sparse)
    name = (f"run={args.dense.name}", f"output_dir={args.dense.resolve().parent.parent}")
    budget = f"flop_budget={sparse.state['flops_total']}"
    command("train.py", "experiment=quickstart", "attention=full", "overwrite=true", budget, *name)
    command("-m", "benchmarks.toy.score", str(args.dense), "--guidance", args.guidance, "--steps", args.steps)

    rows = [row(args.sparse, sparse), row(args.dense, resolve_checkpoint(args.dense))]
    table = Table(title="sparse against dense attention at equal training FLOPs")
    for heading in ("run", "steps", "PFLOPs", "s/step", "val loss", "colour", "direction"):
        table.add_column(heading)
    for found in rows:
        table.add_row(
            str(found["run"]),
            str(found["steps"]),
            f"{float(found['flops']) / 1e15:.4f}",
            f"{float(found['seconds_per_step']):.3f}",
            f"{float(found['val_loss']):.4f}",
            f"{float(found['colour']):.1%}",
            f"{float(found['direction']):.1%}",
        )
    Console().print(table)
    with atomic_file(args.dense / "compare.json") as temporary:
        temporary.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
