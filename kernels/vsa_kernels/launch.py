"""Pinned launch configurations: which tile sizes, warps and stages a kernel runs with.

They are looked up, never searched for while training; `scripts/tune.py` measures new ones and writes `configs.json`.
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


def config(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """The pinned configuration of a kernel: its tile sizes as constexprs, `num_warps` and `num_stages`.

    Falls back from the exact architecture to the newest older one, and from the head dim to the next larger tuned
    one, so that every supported case has a configuration.

    Args:
        kernel: name in `configs.json`.
        head_dim: D.
        dtype: of q, k and v.
        device: where they live.
    """
    major, minor = capability(device)
    return dict(_config(kernel, head_dim, dtype.itemsize * 8, major * 10 + minor))


@functools.cache
def _config(kernel: str, head_dim: int, bits: int, arch: int) -> dict[str, int]:
    table: dict[str, dict[str, dict[str, Any]]] = _table()[kernel]
    known = sorted(int(name) for name in table)
    by_dtype = table[str(max([name for name in known if name <= arch], default=known[0]))][str(max(bits, 16))]
    dims = sorted(int(name) for name in by_dtype)
    return by_dtype[str(min([name for name in dims if name >= head_dim], default=dims[-1]))]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(CONFIGS.read_text())
