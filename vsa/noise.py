"""Noise and random choices that are functions of seeds only, drawn on the CPU."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from vsa.machine import usable_cores
from vsa.transfer import staging

_THREADS = 8
"""Most threads that draw noise at a time."""


def mixed_generator(*parts: int | str) -> torch.Generator:
    """CPU generator seeded by a digest of `parts`.

    torch's CPU generator reads only the low 32 bits of a seed, so seeds that differ in higher bits, or by one, have to
    be mixed first.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_noise(size: torch.Size, seeds: Tensor, device: torch.device | str) -> Tensor:
    """Standard normal noise, drawn for each sample from its own seed, on the CPU in float32.

    Args:
        size: `[B, ...]`.
        seeds: int64 `[B]`.
        device: device that the noise will go to: for a GPU it is in page-locked memory.
    """
    if seeds.shape != size[:1]:
        raise ValueError(f"expected one seed per sample [{size[0]}], got shape {list(seeds.shape)}")
    noise = staging(tuple(size), device)

    def draw(row: Tensor, seed: int) -> None:
        # inference mode applies to the caller's thread only, so it is entered again here
        with torch.inference_mode(noise.is_inference()):
            torch.randn(row.shape, generator=mixed_generator("noise", seed), out=row)

    # a generator uses one thread, and a GPU would wait for it
    with ThreadPoolExecutor(max(1, min(len(seeds), usable_cores(), _THREADS))) as pool:
        list(pool.map(draw, noise.unbind(), seeds.tolist()))
    return noise
