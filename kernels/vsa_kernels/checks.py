"""Argument checks that all ops share; each message names the argument, the expected value and the actual one."""

from __future__ import annotations

import functools
import numbers
import types
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from vsa_kernels.block_index import Blocks

Function = TypeVar("Function", bound=Callable[..., Any])


def typed(function: Function) -> Function:
    """Decorator of a public function that raises ValueError for an argument of another type than its annotation says.

    Numbers may be of another library, a float also a tensor of no dims; nothing is converted. An integer is a number,
    but 2.5 and True are no integers, a truth value is no number, and an array of another library is no tensor.
    """
    # in the order of the arguments, all of which are annotated
    kinds = {name: tuple(_kinds(hint)) for name, hint in get_type_hints(function).items()}

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for name, x in (*zip(kinds, args, strict=False), *named.items()):
            own = kinds.get(name, (object,))
            for part in x if isinstance(x, tuple | list) and type(x) in own else (x,):
                scalar = numbers.Real in own and isinstance(part, Tensor) and not part.ndim and part.dtype != torch.bool
                if not (scalar or isinstance(part, own)) or (isinstance(part, bool) and bool not in own):
                    raise ValueError(f"{name} must be {function.__annotations__[name]}, got {type(part).__name__}")
        return function(*args, **named)

    return call  # type: ignore[return-value]


def _kinds(hint: Any) -> list[type]:
    """The types that an annotation allows, and those of the parts of its sequences."""
    if not get_args(hint):
        # the values of a literal are text
        scalars = {float: [numbers.Real, torch.SymFloat, torch.SymInt], int: [numbers.Integral, torch.SymInt]}
        return scalars.get(hint, [hint] if isinstance(hint, type) else [str])
    parts = [kind for part in get_args(hint) for kind in _kinds(part)]
    return parts if get_origin(hint) is types.UnionType else [tuple, list, *parts]


def check_tokens(name: str, x: Tensor) -> None:
    """Check tokens x `[B, L, H, D]`: a float dtype, and no empty dim but the batch."""
    shape = x.shape
    if len(shape) != 4 or not x.is_floating_point():
        raise ValueError(f"{name} must be a float [B, tokens, heads, D], got {x.dtype} {list(shape)}")
    if 0 in shape[1:]:
        raise ValueError(f"{name} must have at least one token, head and head dim, got {list(shape)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check shapes, dtypes and devices of q `[B, L, H, D]`, k and v `[B, S, Hkv, D]`."""
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    check_tokens("q", q)
    check_tokens("k", k)
    shape, kv_shape = q.shape, k.shape
    if kv_shape[0] != shape[0] or kv_shape[3] != shape[3]:
        raise ValueError(f"q and k must have the same batch and head dim, got {list(shape)} and {list(kv_shape)}")
    if shape[2] % kv_shape[2]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {shape[2]} and {kv_shape[2]}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must have the same float dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    check_device("k", k, "q", q)
    check_device("v", v, "q", q)


def check_blocks(name: str, blocks: Blocks, of: str, x: Tensor) -> None:
    """Check that a partition can cover the tokens of x `[B, L, H, D]`, by what the host knows without the device.

    Args:
        name: name of the partition in the message.
        blocks: the partition.
        of: name of x in the message.
        x: the tokens that the partition divides.
    """
    offsets, num, tokens = blocks.offsets, blocks.num, x.shape[1]
    if offsets.ndim != 1 or offsets.dtype != torch.int32:
        raise ValueError(f"{name}.offsets must be int32 [N + 1], got {offsets.dtype} {list(offsets.shape)}")
    if not num * blocks.min_size <= tokens <= num * blocks.max_size:
        sizes = f"{blocks.min_size} to {blocks.max_size}" if blocks.min_size < blocks.max_size else f"{blocks.max_size}"
        raise ValueError(f"{name} must cover the {tokens} tokens of {of}, got {num} blocks of {sizes} tokens")
    check_device(f"{name}.offsets", offsets, of, x)


def check_allowed(name: str, allowed: Tensor | None, num_q: int, num_kv: int, like: str, other: Tensor) -> None:
    """Check a mask of allowed block pairs, bool `[Nq, Nkv]` or None, on the device of the other tensor."""
    if allowed is not None and (allowed.dtype != torch.bool or allowed.shape != (num_q, num_kv)):
        raise ValueError(f"{name} must be bool {[num_q, num_kv]}, got {allowed.dtype} {list(allowed.shape)}")
    check_device(name, allowed, like, other)


def has_sizes(x: Tensor, sizes: list[int]) -> bool:
    """Whether x has this shape; also in a compiled graph in which some of the sizes are symbols."""
    return x.ndim == len(sizes) and all(actual == size for actual, size in zip(x.shape, sizes, strict=True))


def check_projection(projection: tuple[Tensor, Tensor], name: str, x: Tensor, outputs: int | None = None) -> None:
    """Check weight and bias of a linear layer with the input x, and its width if `outputs` is given."""
    matrix, bias = projection
    width = x.shape[-1]
    fits = matrix.ndim == 2 and matrix.shape[1] == width and matrix.shape[0] > 0 and matrix.is_floating_point()
    if not fits or outputs not in (None, matrix.shape[0]):
        expected = f"a float [{outputs or 'channels'}, {width}] like {name}"
        raise ValueError(f"the weight of projection must be {expected}, got {matrix.dtype} {list(matrix.shape)}")
    if not has_sizes(bias, [matrix.shape[0]]) or not bias.is_floating_point():
        expected = f"a float {[matrix.shape[0]]} like its weight"
        raise ValueError(f"the bias of projection must be {expected}, got {bias.dtype} {list(bias.shape)}")
    for part, tensor in (("weight", matrix), ("bias", bias)):
        check_device(f"the {part} of projection", tensor, name, x)


def check_device(name: str, x: Tensor | None, like: str, other: Tensor) -> None:
    """Check that x, unless it is None, is on the device of the other tensor; both names are for the message."""
    if x is not None and x.device != other.device:
        raise ValueError(f"{name} must be on {other.device} like {like}, got {x.device}")


def check_scale(scale: float | None, head_dim: int, backend: str = "reference") -> float:
    """The factor of the logits that is passed to a backend, default `head_dim ** -0.5`.

    A scale of 0 gives all visible keys of a query the same weight. `triton` and `cudnn` get the smallest normal number
    instead: masked logits are -inf before they are scaled, and -inf * 0 is NaN; visible logits below 1e30 round to 0.

    Raises:
        ValueError: a factor that is NaN or not finite in fp32, or negative for `triton` or `cudnn`.
    """
    factor = head_dim**-0.5 if scale is None else scale
    if not abs(factor) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be finite, got {factor}")
    if backend not in ("triton", "cudnn"):
        return factor
    if not factor >= 0:
        raise ValueError(f"scale must not be negative for backend {backend}, got {factor}")
    return max(factor, torch.finfo(torch.float32).tiny)
