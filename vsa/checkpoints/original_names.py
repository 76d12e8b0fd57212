"""Names of parameters in the original code of transformer classes, as in files of ComfyUI and musubi-tuner.

An original tensor may hold several parameters of the class, one after the other in its rows. Classes without a table
here have their original names.

Sources: diffusers 0.42, `loaders/single_file_utils.py` and `loaders/lora_conversion_utils.py`; its script
`convert_hunyuan_video1_5_to_diffusers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from torch import Tensor

from vsa.checkpoints.wan_names import diffusers_to_wan

Shapes = Mapping[str, tuple[int, ...]]

Stacks = list[tuple[str, str, Mapping[str, str]]]

# classes whose original names are those of `wan_names`
_WAN = re.compile("(Wan|WanVACE|WanAnimate|SkyReelsV2|ChronoEdit|AnyFlow|Helios)Transformer3DModel")


@cache
def _tables() -> Mapping[str, Stacks]:
    """The tables of `original_names.yaml`."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Rows(NamedTuple):
    """The rows of an original tensor that are a parameter of the class.

    Args:
        key: name of the original tensor.
        start: first row.
        stop: row after the last one.
        total: rows of the original tensor.
        swapped: whether the halves of the rows change places.
    """

    key: str
    start: int
    stop: int
    total: int
    swapped: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The parameter `[stop - start, ...]` in the original tensor `[total, ...]`."""
        return self.ordered(tensor[self.start : self.stop]) if tensor.ndim else tensor

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows of the parameter in the order of the original tensor, and the other way round."""
        return rows.roll(len(rows) // 2, 0) if self.swapped else rows


def named_class(cls: type) -> str:
    """Name of a class, or of the first one that it is derived from and that has original names here."""
    names = [base.__name__ for base in cls.__mro__]
    return next((name for name in names if _WAN.fullmatch(name) or name in _tables()), names[0])


def original_rows(shapes: Shapes, class_name: str) -> dict[str, Rows]:
    """Where the original tensors hold each parameter.

    Args:
        shapes: shapes of all parameters of the class by name.
        class_name: name of the class in diffusers.
    """
    stacks = _tables().get(class_name, [])
    found: dict[str, dict[int, tuple[str, bool]]] = {}
    for name in shapes:
        key, place, swapped = _original(name, stacks)
        if _WAN.fullmatch(class_name):
            with suppress(ValueError):
                key = diffusers_to_wan(name)
        found.setdefault(key, {})[place] = name, swapped
    rows = {}
    for key, parts in found.items():
        counts = [(*shapes[name], 1)[0] for _, (name, _) in sorted(parts.items())]
        for i, (_, (name, swapped)) in enumerate(sorted(parts.items())):
            rows[name] = Rows(key, sum(counts[:i]), sum(counts[: i + 1]), sum(counts), swapped)
    return rows


def own_name(key: str, class_name: str) -> str:
    """The name that the class gives to a gate with an original name."""
    for original, own, _ in _tables().get(class_name, []):
        if original and key.startswith(f"{original}."):
            return own + key.removeprefix(original)
    return key


def _original(name: str, stacks: Stacks) -> tuple[str, int, bool]:
    """The original name of a parameter, its place among those of the same tensor, and whether its halves change."""
    for original, own, layers in stacks:
        match = re.match(rf"{re.escape(own)}(\.\d+\.)(.+)" if own else "()(.+)", name)
        if match is None:
            continue
        module, _, kind = match[2].rpartition(".")
        for layer, parts in layers.items():
            for place, part in enumerate(parts.split()):
                if part.removeprefix("~") == module:
                    return f"{original}{match[1]}{layer}.{kind}", place, part[0] == "~"
        if own:
            return f"{original}{match[1]}{match[2]}", 0, False
    return name, 0, False
