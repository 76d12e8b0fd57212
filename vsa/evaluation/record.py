"""JSON records of evaluations, comparisons and inspections."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsa.files import write_whole
from vsa.secrets import without_secrets


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON without secrets; infinity and NaN, which JSON cannot express, become strings."""
    text = json.dumps(plain(record), indent=1, allow_nan=False)
    write_whole(path, without_secrets(text, named=False) + "\n")


def plain(value: Any) -> Any:
    """A value as JSON holds it: infinity and NaN become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
