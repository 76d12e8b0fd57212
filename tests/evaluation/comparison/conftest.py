"""Rows of comparisons that a test chooses."""

from typing import Any

from vsa.evaluation.comparison.measure import Row


def row_of(method: str, **values: Any) -> Row:
    """A row of synthetic fields; other values are those of dense attention."""
    shares = dict.fromkeys(("density", "visited", "recall", "ms", "attention_ms", "speedup"), 1.0)
    rest = {
        "family": method,
        "head_recall": [1.0],
        "topk": None,
        "tiles": None,
        "error_l1": 0.1,
        "error_l2": 0.1,
        "prediction_ms": 0.0,
    }
    known = {"capture": "fields", "layer": 0, "timestep": None, "repeats": 1, **shares, **rest}
    return Row(method=method, **{**known, **values})
