"""Check of refusals: a command must end with status 1 and one line, and change no file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.soak import tiny


def contents(folder: Path) -> dict[str, Any]:
    """All files below a folder with their bytes, all folders and links, without the logs of this row."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
        if not (path.parent == folder and path.name.startswith(("log-", "row.log")))
    }


def refusal_failure(run: tiny.Started, *, seconds: float = 60) -> str | None:
    """Failure of a command to end with status 1 and one line, None if it did."""
    try:
        status = run.wait(seconds)
    except TimeoutError as error:
        run.kill()
        return str(error)
    lines, output = run.error_lines(), run.output()
    if status == 1 and len(lines) == 1 and "Traceback" not in output:
        return None
    return f"status {status}, {len(lines)} error lines, it ended: {output[-300:]}"


def drawn(values: Sequence[Any], tries: int, seed: int) -> list[Any]:
    """A random choice of as many values as tries, in their order."""
    indices = sorted(random.Random(seed).sample(range(len(values)), min(tries, len(values))))
    return [values[number] for number in indices]
