"""Hardware and software of this machine, for records of measurements, and the backends that run on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from vsa_kernels import BlockIndex, Blocks, block_sparse_kernels
from vsa_kernels.block_sparse.dispatch import Kernels
from vsa_kernels.dispatch import BLOCK_SPARSE_BACKENDS, resolve_backend

PACKAGES = ("vsa-train", "lightning", "hydra-core", "diffusers", "transformers", "peft")
KERNEL_PACKAGES = ("triton", "fastvideo-kernel", "nvidia-cudnn-frontend")


def process_start() -> float:
    """Start time of this process in seconds since the epoch; the current time if the system does not provide it."""
    try:
        # field 22 of the line, counted after the process name, which may contain spaces and brackets
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware that a measurement depends on, without host name and paths."""
    info: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        info["cpu"] = names[0] if names else info["cpu"]
    if device.type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
    return info


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the software that computes on `device`."""
    software = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        software |= _installed(KERNEL_PACKAGES)
        software["cudnn"] = str(torch.backends.cudnn.version())
    return software


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and software of a run, for its record."""
    return {**machine(device), "versions": {**versions(device), **_installed(PACKAGES)}}


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    installed = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def describe_here() -> Iterator[str]:
    """Lines that describe the machine, its software, its devices and the attention backends of each device."""
    cpu = torch.device("cpu")
    here = machine(cpu)
    yield f"machine   {here['cpu']}, {here['cores']} cores, {here['threads']} threads, {platform.system()}"
    package_versions = {**versions(cpu), **_installed(KERNEL_PACKAGES + PACKAGES)}
    yield "versions  " + ", ".join(f"{name} {version}" for name, version in package_versions.items())
    devices = [cpu, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    for device in devices[1:]:
        properties = torch.cuda.get_device_properties(device)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield f"gpu {device.index}     {properties.name}, {memory}, capability {properties.major}.{properties.minor}"
    if len(devices) == 1:
        yield f"gpu       none{'' if torch.version.cuda else ', this torch is built without CUDA'}"
    for device in devices:
        # the compute dtype of training on this device, and the usual head dim
        dtype, head_dim = (torch.float32 if device.type == "cpu" else torch.bfloat16), 128
        automatic_backend = resolve_backend(None, device, dtype, head_dim)
        for name in BLOCK_SPARSE_BACKENDS:
            try:
                resolve_backend(name, device, dtype, head_dim)
                state = "runs, the automatic choice" if name == automatic_backend else "runs"
            except (ValueError, ImportError) as error:
                state = f"does not run: {error}"
            yield f"backend   {name} on {device}: {state}"
        if automatic_backend == "triton":
            for size in (64, 128):
                chosen = _kernels(size, device, dtype, head_dim)
                yield f"kernels   tiles of {size}: {chosen.forward}; dk, dv {chosen.dkv}; dq {chosen.dq}"


def _kernels(size: int, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """Kernels of attention between equal tiles of `size` tokens."""
    x = torch.empty(1, size, 1, head_dim, device=device, dtype=dtype)
    tile = Blocks.from_sizes([size], device)
    index = BlockIndex.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))
    return block_sparse_kernels(x, x, x, index, q_blocks=tile, kv_blocks=tile)


def seconds_now(device: torch.device) -> float:
    """Current time in seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
