"""Choice of the backend of an op: a pure function of the requested name, the device, the dtype and the head dim."""

from __future__ import annotations

import importlib.util

import torch

from vsa_kernels.launch import capability

BLOCK_SPARSE_BACKENDS = ("reference", "gather", "triton", "cudnn")
"""Implementations of `block_sparse_attn` by name."""

MAX_HEAD_DIM = 256


def check_backend_name(name: str | None) -> None:
    """Raise a ValueError for a name that is not a backend; whether it can run here is not checked."""
    if name is not None and name not in BLOCK_SPARSE_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BLOCK_SPARSE_BACKENDS)} or None (automatic), got {name!r}")


def resolve_backend(name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend of one call.

    None picks `triton` where it can run and `gather` elsewhere, never `cudnn`. A named backend never falls back to
    another one.

    Args:
        name: requested backend, None for the automatic choice.
        device: device of q, k and v.
        dtype: dtype of q, k and v.
        head_dim: D.
    """
    check_backend_name(name)
    # the interpreter runs only on request, in tests
    if name in ("reference", "gather") or (name is None and device.type != "cuda"):
        return name or "gather"
    refusal = (_cudnn_refusal if name == "cudnn" else _triton_refusal)(device, dtype, head_dim)
    if name is None:
        return "triton" if refusal is None else "gather"
    if refusal is not None:
        raise ValueError(f"backend {name} {refusal}")
    return name


def resolve_plain(name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int = 1) -> str:
    """The backend of an op that has only `reference` and `triton`; arguments and errors as in `resolve_backend`."""
    if name not in (None, "reference", "triton"):
        raise ValueError(f"backend must be reference, triton or None (automatic), got {name!r}")
    return "triton" if resolve_backend(name, device, dtype, head_dim) == "triton" else "reference"


def _triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dtype}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"takes a head dim of at most {MAX_HEAD_DIM}, got {head_dim}"
    if device.type != "meta" and not _has("triton"):
        return "needs the package triton, which is not installed: set backend=gather or backend=reference"
    if not _can_launch(device):
        return f"needs a CUDA device of capability 8.0 or newer, or the environment TRITON_INTERPRET=1, got {device}"
    return None


def _cudnn_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if not _is_hopper(device):
        return f"needs a GPU of compute capability 9.0, got {device}: set backend=triton"
    if not _has("cudnn"):
        return "needs the package nvidia-cudnn-frontend: pip install 'vsa-train[cudnn]'"
    if dtype != torch.bfloat16:
        return f"takes bfloat16, got {dtype}: cast q, k and v, or set backend=triton"
    if head_dim != 128:
        return f"takes a head dim of 128, got {head_dim}: set backend=triton"
    return None


@torch.compiler.assume_constant_result
def _is_hopper(device: torch.device) -> bool:
    return device.type == "meta" or capability(device) == (9, 0)


@torch.compiler.assume_constant_result
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@torch.compiler.assume_constant_result
def _can_launch(device: torch.device) -> bool:
    if device.type == "cuda":
        return capability(device) >= (8, 0)
    if device.type != "cpu":
        # fake tensors of the meta device never launch anything
        return device.type == "meta"
    from triton import knobs

    return knobs.runtime.interpret
