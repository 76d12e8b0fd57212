"""Hyperparameters of every layer and head, as `vsa tune-sparge` writes them and `SpargeAttention` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from vsa.attention.sparge.mask import Readings
from vsa.files import write_whole

FORMAT = "vsa-sparge-1"
SHAPE = ("layers", "heads", "head_dim", "q_tokens", "kv_tokens", "order")
"""What a file is for; a layer of another model is refused by these."""


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What was chosen for one head, and what it gave on the inputs.

    Args:
        tau: share of the softmax of the first stage, in (0, 1].
        theta: similarity below which a block is always computed.
        threshold: lambda of the second stage, at most 0; None: it is off.
        sparsity: skipped products over all, both of a pair of blocks: (QK + PV) / 2, the mean over the inputs.
        error: sum |out - dense| / sum |dense| over the inputs.
    """

    tau: float
    theta: float
    threshold: float | None = None
    sparsity: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuned model.

    Args:
        layers: layers of the model.
        heads: heads of a layer.
        head_dim: of a head.
        q_tokens: tokens of a query block.
        kv_tokens: of a kv block.
        order: of the tokens, raster or hilbert.
        readings: of the first stage.
        keeps_sum: of the second stage.
        made: how it was tuned, for a reader.
        found: settings of each head by layer; layers may be missing while tuning goes on.
    """

    layers: int
    heads: int
    head_dim: int
    q_tokens: int
    kv_tokens: int
    order: str
    readings: Readings = field(default_factory=Readings)
    keeps_sum: bool = True
    made: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[int, Sequence[HeadSettings]] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """What the file holds, as plain values."""
        values = {"format": FORMAT, **{name: getattr(self, name) for name in SHAPE}}
        values |= {"readings": asdict(self.readings), "keeps_sum": self.keeps_sum, "made": dict(self.made)}
        return values | {"found": {str(i): [asdict(head) for head in heads] for i, heads in sorted(self.found.items())}}

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        values = self.values()
        # a line for each layer
        rows = [f'  "{layer}": {json.dumps(heads)}' for layer, heads in values.pop("found").items()]
        text = json.dumps(values, indent=1).removesuffix("\n}") + ',\n "found": {\n' + ",\n".join(rows) + "\n }\n}\n"
        write_whole(path, text)

    def refuse_other(self, path: str, **given: Any) -> None:
        """Raise ValueError where the file is for another model than the given values say.

        Args:
            path: of the file, for the message.
            given: some of `SHAPE` and of the other fields, by name.
        """
        for name, value in given.items():
            if getattr(self, name) != value:
                raise ValueError(f"{path} was tuned for {name}={getattr(self, name)}, got {name}={value}")


def read_tuned(path: str) -> Tuned:
    """Read what `Tuned.write` wrote.

    Raises:
        ValueError: no such file, another format, or a value that is impossible; names the file, the key and the value.
    """
    if not Path(path).is_file():
        raise ValueError(f"tuned={path}: no such file; `vsa tune-sparge` makes one")
    found = Path(path).stat()
    # every layer reads the same file
    return _read(path, (found.st_mtime_ns, found.st_ino))


@lru_cache(maxsize=8)
def _read(path: str, _version: tuple[int, int]) -> Tuned:
    try:
        return parse_tuned(json.loads(Path(path).read_text(encoding="utf-8")), path)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no complete file of `vsa tune-sparge`: {type(error).__name__}: {error}") from None


def parse_tuned(values: Any, path: str) -> Tuned:
    """What `Tuned.values` gave.

    Args:
        values: plain values.
        path: where they are from, for messages.

    Raises:
        ValueError: see `read_tuned`.
    """
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not from `vsa tune-sparge`: its format is not {FORMAT}")
    try:
        rows = {int(layer): heads for layer, heads in values["found"].items()}
        for layer, heads in rows.items():
            _check(layer, heads, values)
        return Tuned(
            **{name: values[name] for name in SHAPE},
            readings=Readings(**values["readings"]),
            keeps_sum=values["keeps_sum"],
            made=values["made"],
            found={layer: [HeadSettings(**head) for head in heads] for layer, heads in rows.items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no complete file of `vsa tune-sparge`: {type(error).__name__}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check(layer: int, heads: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    if not 0 <= layer < values["layers"]:
        raise ValueError(f"found has layer {layer}, but layers is {values['layers']}")
    if len(heads) != values["heads"]:
        raise ValueError(f"layer {layer} has {len(heads)} heads, but heads is {values['heads']}")
    for number, head in enumerate(heads):
        place = f"layer {layer}, head {number}"
        tau, theta, threshold = (head[name] for name in ("tau", "theta", "threshold"))
        if not (_is_number(tau) and 0 < tau <= 1):
            raise ValueError(f"{place}: tau={tau}: expected a number above 0 and of at most 1")
        if not _is_number(theta):
            raise ValueError(f"{place}: theta={theta}: expected a number")
        if threshold is not None and not (_is_number(threshold) and threshold <= 0):
            raise ValueError(f"{place}: threshold={threshold}: expected a number of at most 0, or null")
        for name in ("sparsity", "error"):
            if not _is_number(value := head.get(name, 0.0)):
                raise ValueError(f"{place}: {name}={value}: expected a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
