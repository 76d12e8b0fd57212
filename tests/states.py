"""`state.json` of checkpoints as another training, or an older version, would have left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vsa.checkpoints.state_file import read_state, write_state


def rewrite_state(checkpoint: Path, *without: str, **changes: Any) -> None:
    """Change values of a checkpoint's state, or leave some out, under a digest that fits."""
    state = {**json.loads((checkpoint / "state.json").read_text()), **changes}
    write_state(checkpoint, {name: value for name, value in state.items() if name not in {"digest", *without}})


def write_older_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write a state in the first schema, which had no digest."""
    content = {name: value for name, value in state.items() if name != "digest"}
    (checkpoint / "state.json").write_text(json.dumps({**content, "schema": 1}, indent=1))


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The values alone."""
    return read_state(checkpoint)
