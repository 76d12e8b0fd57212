"""Kernel launches: the pinned configuration of a kernel, and a cache that shortens repeated launches.

Configurations are looked up and never tuned while training; `scripts/tune.py` measures new ones and writes
`configs.json`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIGS = Path(__file__).with_name("configs.json")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes microseconds on the host, where several of them precede each launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n of 1 or more."""
    return 1 << (n - 1).bit_length()


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


# how to launch a compiled kernel, by everything that triton specialises it on
_compiled: dict[tuple[Any, ...], Callable[[tuple[int, ...], tuple[Any, ...]], None]] = {}
# far more than a run has, unless all its lengths differ
_MOST_COMPILED = 1 << 14


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
    for x in args:
        if isinstance(x, Tensor):
            device = x.get_device()
            break
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **constants)
    # a call of a function for each argument would take as long as all the rest
    kinds = [
        x if type(x) is int or x is None else (x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor) else _kind(x)
        for x in args
    ]
    key = (kernel.fn, device, *kinds, *constants.items())
    run = _compiled.get(key)
    if run is None:
        # by name, since two calls may order their constants differently
        named = (kernel.fn, device, *kinds, frozenset(constants.items()))
        run = _compiled.get(named)
        if run is None:
            compiled = kernel[grid](*args, **constants)
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            # interpreted kernels return nothing
            if compiled is not None:
                rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
                _compiled[key] = _compiled[named] = _runner(compiled, rest, device)
            return
        _compiled[key] = run
    run(grid, args)


def _runner(compiled: Any, rest: tuple[Any, ...], device: int) -> Callable[[tuple[int, ...], tuple[Any, ...]], None]:
    """The launch of compiled code with trailing constants; without what triton prepares for hooks if there are none."""
    from triton import knobs

    # as `compiled[grid]` does, in the versions that this package allows
    code, function, metadata, hooks = compiled.run, compiled.function, compiled.packed_metadata, knobs.runtime

    def run(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        x, y, z, *_ = (*grid, 1, 1)
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled[x, y, z](*args, *rest)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            code(x, y, z, stream, function, metadata, None, None, None, *args, *rest)

    return run


def _kind(x: Any) -> Any:
    if isinstance(x, int):
        return x
    # descriptors by dtype and block shape; triton does not specialise on floats
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else float
