"""Measured rates of GPUs, which are the only basis of estimated times.

D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

GIB = 2**30

MEASURED_BY = {
    "matrix_flops": "python -m scripts.bench step --device cuda --shapes wan1.3b-480p (matrix products)",
    "copy_bytes": "vsa train experiment=ablation debug=profile (the line under its table)",
    "dense_flops": "python -m scripts.bench fine --device cuda --against dense",
    "operator_flops": "python -m scripts.bench vsa --device cuda",
    "cross_flops": "python -m scripts.bench step --device cuda --shapes wan1.3b-480p (attention of `free`)",
    "sharding_bytes": "python -m scripts.bench step --device cuda --shapes wan1.3b-480p (copies of `free`)",
    "optimizer_parameters": "python -m scripts.bench step --device cuda --shapes wan1.3b-480p (optimizer)",
    "link_bytes": "all_reduce_perf of nccl-tests on the GPUs of one host",
}
"""The command that measures each rate."""


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """FLOPs per second of an attention kernel: 4 D per pair in the forward and 10 D in the backward.

    A multiply-add counts as two FLOPs.

    Args:
        forward: rate of the forward.
        both: rate of forward and backward together, 14 D per pair.
    """

    forward: float
    both: float

    def seconds(self, forward_flops: float, *, forwards: int, backward: bool) -> float:
        """Seconds of `forwards` forwards and, if set, one backward."""
        alone = forward_flops / self.forward
        # the time of the backward is the difference of both and the forward
        return alone * (forwards - backward) + (3.5 * forward_flops / self.both if backward else 0.0)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU. Rates that were not measured are None, and no time is estimated from guesses.

    Args:
        name: part of the device's name.
        memory: bytes available to a program.
        chip: compute capability; None: unknown.
        matrix_flops: rate of linear layers, FLOPs per second.
        copy_bytes: bytes per second that elementwise kernels read and write.
        dense_flops: rates of dense attention, by head dim.
        operator_flops: rates of VSA's whole operator, by head dim, with every tile counted as full.
        cross_flops: rate of cross-attention to text, forward and backward, FLOPs per second.
        sharding_bytes: bytes per second that FSDP2 reads and writes around its collectives.
        optimizer_parameters: parameters per second that AdamW updates.
        link_bytes: bytes per second that a GPU sends to others of its host while it receives as many.
        sources: origin of each rate, a file of `benchmarks/`.
    """

    name: str
    memory: float
    chip: tuple[int, int] | None = None
    matrix_flops: float | None = None
    copy_bytes: float | None = None
    dense_flops: Mapping[int, AttentionRate] | None = None
    operator_flops: Mapping[int, AttentionRate] | None = None
    cross_flops: float | None = None
    sharding_bytes: float | None = None
    optimizer_parameters: float | None = None
    link_bytes: float | None = None
    sources: Mapping[str, str]

    @property
    def lacks(self) -> list[str]:
        """Missing rates that an estimate of time needs; communication can be left out of it."""
        return [name for name in MEASURED_BY if name != "link_bytes" and getattr(self, name) is None]


_STEP, _FINE, _VSA = "h200-2026-11-21-step-wan-1-3b", "h200-2026-11-21-fine", "h200-2026-11-21-vsa"

GPUS = (
    Gpu(
        name="H200",
        memory=139.8 * GIB,
        chip=(9, 0),
        # 232.9 TFLOP of the compiled dense step in 325.9 ms
        matrix_flops=715e12,
        copy_bytes=4.15e12,
        dense_flops={
            64: AttentionRate(forward=464e12, both=452e12),
            128: AttentionRate(forward=616e12, both=562e12),
        },
        operator_flops={
            64: AttentionRate(forward=326e12, both=336e12),
            128: AttentionRate(forward=416e12, both=375e12),
        },
        # 9.9 TFLOP in 35.4 ms
        cross_flops=280e12,
        # two gathers and a reduction of 1.419e9 parameters, 42 bytes each, in 91.0 ms
        sharding_bytes=655e9,
        # 1.419e9 in 30.3 ms
        optimizer_parameters=46.8e9,
        sources={
            "matrix_flops": f"{_STEP}, compiled dense",
            "copy_bytes": "h200-2026-11-23-profile-ablation",
            "dense_flops": f"{_FINE}, 16k",
            "operator_flops": f"{_VSA} (D=128) and {_VSA}-ahead (D=64), 16k without fine gate",
            "cross_flops": f"{_STEP}, compiled, attention free",
            "sharding_bytes": f"{_STEP}, compiled, attention free",
            "optimizer_parameters": f"{_STEP}, compiled, attention free",
        },
    ),
    Gpu(
        name="H100",
        memory=79.1 * GIB,
        chip=(9, 0),
        operator_flops={
            64: AttentionRate(forward=311e12, both=326e12),
            128: AttentionRate(forward=365e12, both=378e12),
        },
        sources={"operator_flops": "h100-2026-11-22-vsa-before-after"},
    ),
    Gpu(name="A100", memory=79.1 * GIB, chip=(8, 0), sources={}),
    Gpu(name="L40S", memory=44.4 * GIB, chip=(8, 9), sources={}),
    Gpu(name="RTX 5090", memory=31.4 * GIB, chip=(12, 0), sources={}),
    Gpu(name="RTX 4090", memory=23.5 * GIB, chip=(8, 9), sources={}),
)


def how_to_measure(rates: Iterable[str]) -> str:
    """Rates by the command that measures them, on one line."""
    commands: dict[str, list[str]] = {}
    for name in rates:
        commands.setdefault(MEASURED_BY[name].partition(" (")[0], []).append(name)
    return "; ".join(f"{', '.join(names)} ({command})" for command, names in commands.items())


def known_gpu(name: str) -> Gpu | None:
    """The kind of GPU whose name is contained in `name`, ignoring case."""
    return next((gpu for gpu in GPUS if gpu.name.lower() in name.lower()), None)


def gpu_here(device: torch.device) -> Gpu | None:
    """The kind of a device, an unknown one without rates, with the memory that this process may take; None: no GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = known_gpu(properties.name) or Gpu(name=properties.name, memory=0.0, sources={})
    memory = properties.total_memory * torch.cuda.get_per_process_memory_fraction(device)
    return replace(gpu, memory=memory, chip=(properties.major, properties.minor))
