"""Report of a soak: a table, and a JSON with the commands to repeat it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scripts.soak.runner import Result
from vsa.checkpoints.run_folder import checked_out_commit
from vsa.files import write_whole
from vsa.machine import machine, versions


def table(results: Sequence[Result]) -> str:
    """Format rows as a Markdown table, with failures and notes below."""
    lines = ["| row | tried | survived | seconds |", "|---|---|---|---|"]
    for result in results:
        outcome = result.outcome
        survived = f"{outcome.survived}" if not result.lost else f"**{outcome.survived}**"
        lines.append(f"| {result.row.name} | {outcome.tried} | {survived} | {result.seconds:.0f} |")
    tried, lost = sum(r.outcome.tried for r in results), sum(r.lost for r in results)
    lines.append(f"| all {len(results)} rows | {tried} | {tried - lost} | {sum(r.seconds for r in results):.0f} |")
    below = [f"- {r.row.name}: lost: {line}" for r in results for line in r.outcome.failures]
    below += [f"- {r.row.name}: {line}" for r in results for line in r.outcome.notes]
    return "\n".join([*lines, *([""] if below else []), *below])


def write_report(path: Path, results: Sequence[Result], **run: Any) -> None:
    """Write `path` as JSON and, with the suffix .md, as a table.

    Args:
        path: path of the JSON.
        results: results of the rows that ended.
        run: seed, form, total seconds, and rows that were not run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "case": "soak",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": checked_out_commit(),
        "machine": machine(device),
        "versions": versions(device),
        **run,
        "results": [
            {
                "row": result.row.name,
                "tried": result.outcome.tried,
                "survived": result.outcome.survived,
                "seconds": round(result.seconds, 1),
                "failures": list(result.outcome.failures),
                "notes": list(result.outcome.notes),
                "repeat": f"python -m scripts.soak '{result.row.name}' --seed {run['seed']}",
            }
            for result in results
        ],
    }
    write_whole(path, json.dumps(report, indent=1) + "\n")
    here = report["machine"]
    lines = [
        f"# Soak, {'short' if run['short'] else 'full'} form",
        "",
        f"{report['date']}, commit {report['commit']}, {here['cpu']}, {here['cores']} cores"
        f"{', ' + here['gpu'] if 'gpu' in here else ''}, seed {run['seed']}: "
        f"{run['seconds']:.0f} s with {run['jobs']} rows at a time.",
        *([f"Not run: {', '.join(run['not_run'])}."] if run["not_run"] else []),
        "",
        table(results),
    ]
    write_whole(path.with_suffix(".md"), "\n".join(lines) + "\n")
