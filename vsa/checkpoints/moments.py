"""AdamW's moments: fp32, or torchao's 8-bit codes in blocks within a row, each with an fp32 scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vsa.models.sharding import local

Moments = Literal["fp32", "int8"]

EIGHT_BIT = "optim.moments=int8 (extra lowbit)"
"""The setting of 8-bit moments, for messages."""

BLOCK = 256
"""Values of a block (torchao 0.18, and bitsandbytes)."""

SCALE = ".scale"
"""Suffix of the name of a moment's scales in a checkpoint."""

_LEAST = 4096


def refuse_missing_package(moments: Moments) -> None:
    """Raise ValueError if moments of this form need a package that is not installed."""
    if moments == "int8" and find_spec("torchao") is None:
        raise ValueError("moments=int8 needs the package torchao: pip install 'vsa-train[lowbit]'")


def has_codes(shape: Sequence[int], moments: Moments) -> bool:
    """Whether the moments of a parameter of this shape are codes.

    Its rows are then whole blocks, so that any number of ranks divides codes and scales by rows. The moments of
    vectors, of other rows and of small tensors are fp32.
    """
    return moments == "int8" and math.prod(shape) >= _LEAST and math.prod(shape[1:]) % BLOCK == 0


def moment_bytes(shape: Sequence[int], moments: Moments) -> int:
    """Bytes of both moments of a parameter."""
    numbers = math.prod(shape)
    # codes, scales, and the 256 values that codes stand for
    return 2 * (numbers + 4 * (numbers // BLOCK) + 4 * 256 if has_codes(shape, moments) else 4 * numbers)


def new_moment(like: Tensor, moments: Moments, *, signed: bool) -> Tensor:
    """A moment of zeros with the device and sharding of a parameter.

    Args:
        like: the parameter.
        moments: form of the moments.
        signed: whether values can be negative, as in the first moment.
    """
    part = local(like.detach())
    # torchao cannot decode a rank's part without rows
    if not has_codes(like.shape, moments) or not part.numel():
        return _sharded_like(like, torch.zeros_like(part, dtype=torch.float32), like.shape)
    refuse_missing_package("int8")
    from torchao.optim.subclass_8bit import OptimState8bit

    codes = OptimState8bit.zeros(part.shape, signed, BLOCK, part.device, dtype=torch.float32)
    return _sharded_like(like, codes, like.shape)


def stored_shapes(key: str, shape: Sequence[int], moments: Moments) -> dict[str, tuple[int, ...]]:
    """Shapes of what a checkpoint holds of a moment: the moment, or codes and, as `KEY.scale`, a row's scales a row."""
    scales = (shape[0], math.prod(shape[1:]) // BLOCK) if has_codes(shape, moments) else None
    return {key: tuple(shape)} | ({} if scales is None else {key + SCALE: scales})


def stored(key: str, moment: Tensor, moments: Moments) -> Mapping[str, Tensor]:
    """The tensors of `stored_shapes`, not copied, sharded by rows as the moment is."""
    if not has_codes(moment.shape, moments):
        return {key: moment}
    part = local(moment)
    rows, blocks = part.shape[0], math.prod(part.shape[1:]) // BLOCK
    if rows:
        codes, scale = part.codes, part.scale.view(rows, blocks)  # type: ignore[attr-defined] (torchao's tensor)
    else:
        codes, scale = part.to(torch.uint8), part.new_empty(0, blocks)
    shapes = stored_shapes(key, moment.shape, moments)
    return {name: _sharded_like(moment, t, shapes[name]) for name, t in ((key, codes), (key + SCALE, scale))}


def _sharded_like(like: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """This rank's rows of a tensor of `shape` that is sharded as `like` is, if it is."""
    if not isinstance(like, DTensor):
        return part
    stride = torch.empty(*shape, device="meta").stride()
    size = torch.Size(shape)
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride)
