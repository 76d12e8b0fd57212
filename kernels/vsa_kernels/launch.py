"""Kernel launches: the pinned configuration of a kernel, and a cache that shortens repeated launches.

Configurations are looked up and never tuned while training; `scripts/tune.py` measures new ones and writes
`configs.json`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).with_name("configs.json")


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) for the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def config(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The pinned configuration of a kernel: its tile sizes as constexprs, `num_warps` and `num_stages`.

    All configurations of one kernel have the same keys; a `maxnreg` of None leaves the registers to the compiler.

    Falls back from the exact architecture to the newest older one, and from the head dim to the next larger tuned
    one, so that every supported case has a configuration.

    Args:
        kernel: name in `configs.json`.
        head_dim: D.
        dtype: dtype of q, k and v.
        device: device of q, k and v.
    """
    major, minor = capability(device)
    return dict(_config(kernel, head_dim, dtype.itemsize * 8, major * 10 + minor))


@functools.cache
def _config(kernel: str, head_dim: int, bits: int, arch: int) -> dict[str, Any]:
    table: dict[str, dict[str, dict[str, Any]]] = _table()[kernel]
    archs = sorted(int(name) for name in table)
    by_dtype = table[str(max([name for name in archs if name <= arch], default=archs[0]))][str(max(bits, 16))]
    dims = sorted(int(name) for name in by_dtype)
    return by_dtype[str(min([name for name in dims if name >= head_dim], default=dims[-1]))]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(CONFIGS.read_text())


# compiled kernel and its trailing constants; the key is everything that triton specialises a kernel on
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel[grid](*args, **constants)` with less work on the host after the first call.

    Triton inspects every argument and option of every call, which costs more than the launch itself in a step with
    hundreds of small launches. Here a call with the same dtypes, alignments, integers and constants reuses the code
    that was compiled for them.

    Args:
        kernel: a `triton.jit` function, compiled or interpreted. It runs on the device of its tensors.
        grid: programs along up to three axes.
        args: run-time arguments of the kernel in order: tensors, descriptors, numbers, None.
        constants: constexprs of the kernel and options of the launch.
    """
    device = next(x.get_device() for x in args if isinstance(x, torch.Tensor))
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **constants)
    # constants by name, since two calls may order them differently; plain integers are most of the arguments and skip
    # the call of `_kind`
    key = (kernel.fn, device, *[x if type(x) is int else _kind(x) for x in args], frozenset(constants.items()))
    entry = _compiled.get(key)
    if entry is None:
        compiled = kernel[grid](*args, **constants)
        # interpreted kernels return nothing
        if compiled is not None:
            _compiled[key] = (compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]))
    else:
        compiled, rest = entry
        compiled[(*grid, 1, 1)](*args, *rest)


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int) or x is None:
        return x
    # descriptors by dtype and block shape; triton does not specialise on floats
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else float
