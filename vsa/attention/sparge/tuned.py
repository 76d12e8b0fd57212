"""Tuned hyperparameters of every layer and head: the file that `vsa tune-sparge` writes and `SpargeAttention` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from vsa.attention.sparge.mask import without_readings
from vsa.files import check_kind, read_json, write_whole
from vsa.settings import AtLeastOne

FORMAT = "vsa-sparge-1"
SHAPE = ("layers", "heads", "head_dim", "q_tokens", "kv_tokens", "order")
"""Fields that identify the model of a file; a layer of another model is an error."""
_INCOMPLETE = "{} is not a complete file of `vsa tune-sparge`: {}"
_KIND = {
    **dict.fromkeys(SHAPE, AtLeastOne),
    "order": str,
    "keeps_sum": bool,
    "made": dict,
    "found": {str: list[dict[str, Any]]},
}


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Chosen settings of one head, with their sparsity and error on the inputs.

    Args:
        tau: share of the softmax of the first stage, in (0, 1].
        theta: similarity below which a block is always computed.
        threshold: lambda of the second stage, at most 0; None: the second stage is off.
        sparsity: share of skipped products over the inputs, (skipped QK + skipped PV) / 2 per pair of blocks.
        error: relative L1 error, sum |out - dense| / sum |dense| over the inputs.
    """

    tau: float
    theta: float
    threshold: float | None = None
    sparsity: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tuned settings of a model.

    Args:
        layers: number of layers of the model.
        heads: number of heads per layer.
        head_dim: D.
        q_tokens: tokens of a query block.
        kv_tokens: tokens of a kv block.
        order: order of the tokens, raster or hilbert.
        keeps_sum: see `SpargeAttention`.
        made: record of the tuning, for human readers.
        found: settings of each head by layer; layers may be missing while tuning runs.
    """

    layers: int
    heads: int
    head_dim: int
    q_tokens: int
    kv_tokens: int
    order: str
    keeps_sum: bool = True
    made: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[int, Sequence[HeadSettings]] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Content of the file as plain values."""
        values = {"format": FORMAT, **{name: getattr(self, name) for name in SHAPE}}
        values |= {"keeps_sum": self.keeps_sum, "made": dict(self.made)}
        return values | {"found": {str(i): [asdict(head) for head in heads] for i, heads in sorted(self.found.items())}}

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        values = self.values()
        # one line per layer
        rows = [f'  "{layer}": {json.dumps(heads)}' for layer, heads in values.pop("found").items()]
        text = json.dumps(values, indent=1).removesuffix("\n}") + ',\n "found": {\n' + ",\n".join(rows) + "\n }\n}\n"
        write_whole(path, text)

    def refuse_other(self, path: str, **given: Any) -> None:
        """Raise ValueError where a field of the file differs from the given value.

        Args:
            path: path of the file, for the message.
            given: expected values of fields, by name.
        """
        for name, value in given.items():
            if getattr(self, name) != value:
                raise ValueError(f"{path} was tuned for {name}={getattr(self, name)}, got {name}={value}")


def read_tuned(path: str) -> Tuned:
    """Read and check a file of `Tuned.write`."""
    if not Path(path).is_file():
        raise ValueError(f"tuned={path}: no such file; `vsa tune-sparge` writes one")
    stat = Path(path).stat()
    # every layer reads the same file, so it is cached
    return _read(path, (stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=8)
def _read(path: str, _version: tuple[int, int]) -> Tuned:
    try:
        values = read_json(path, kind=object)
    except ValueError as error:
        raise ValueError(_INCOMPLETE.format(path, error)) from None
    return parse_tuned(values, path)


def parse_tuned(values: Any, path: str) -> Tuned:
    """Tuned settings from the plain values of `Tuned.values`.

    Args:
        values: plain values.
        path: origin of the values, for messages.
    """
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of `vsa tune-sparge`: expected format {FORMAT}")
    try:
        check_kind(values, _KIND, "it")
    except ValueError as error:
        raise ValueError(_INCOMPLETE.format(path, error)) from None
    try:
        without_readings(values.get("readings", {}))
        rows = {int(layer): heads for layer, heads in values["found"].items()}
        for layer, heads in rows.items():
            _check(layer, heads, values)
        return Tuned(
            **{name: values[name] for name in SHAPE},
            keeps_sum=values["keeps_sum"],
            made=values["made"],
            found={layer: [HeadSettings(**head) for head in heads] for layer, heads in rows.items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(_INCOMPLETE.format(path, f"{type(error).__name__}: {error}")) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check(layer: int, heads: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    if not 0 <= layer < values["layers"]:
        raise ValueError(f"found has layer {layer}: expected 0 to {values['layers'] - 1}")
    if len(heads) != values["heads"]:
        raise ValueError(f"layer {layer}: expected {values['heads']} heads, got {len(heads)}")
    for number, head in enumerate(heads):
        place = f"layer {layer}, head {number}"
        tau, theta, threshold = (head[name] for name in ("tau", "theta", "threshold"))
        if not (_is_number(tau) and 0 < tau <= 1):
            raise ValueError(f"{place}: tau={tau}: expected a number above 0 and at most 1")
        if not _is_number(theta):
            raise ValueError(f"{place}: theta={theta}: expected a number")
        if threshold is not None and not (_is_number(threshold) and threshold <= 0):
            raise ValueError(f"{place}: threshold={threshold}: expected a number of at most 0, or null")
        for name in ("sparsity", "error"):
            if not _is_number(value := head.get(name, 0.0)):
                raise ValueError(f"{place}: {name}={value}: expected a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
