"""Slots of a machine for the runs of a sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from vsa.config import Sweep
from vsa.machine import usable_cores
from vsa.sweeps.job_queue import Slot


def slots_of(sweep: Sweep, trainer: Mapping[str, Any]) -> list[Slot]:
    """Slots for concurrent runs, each with the number of GPUs that a run needs, or with a share of the CPU cores.

    Args:
        sweep: settings of the sweep: GPUs, runs per GPU, and cores per run.
        trainer: settings of every run's trainer: accelerator and devices.

    Raises:
        ValueError: GPUs that this machine does not have.
    """
    cores = usable_cores()
    here = torch.cuda.device_count() if trainer["accelerator"] in ("auto", "gpu", "cuda") else 0
    if here == 0:
        if sweep.devices is not None:
            raise ValueError(
                f"sweep.devices={sweep.devices}: there is no GPU for trainer.accelerator="
                f"{trainer['accelerator']}, expected null"
            )
        each = min(sweep.cores, cores)
        return [Slot(f"cpu {i}", {"OMP_NUM_THREADS": str(each)}) for i in range(cores // each)]
    gpus = list(range(here))
    if isinstance(sweep.devices, int):
        gpus = gpus[: sweep.devices]
    elif sweep.devices is not None:
        gpus = list(sweep.devices)
    if not gpus or max(gpus) >= here or (isinstance(sweep.devices, int) and sweep.devices > here):
        raise ValueError(f"sweep.devices={sweep.devices}: this machine has {here} GPUs, numbered from 0")
    devices = trainer["devices"]
    width = len(gpus) if devices in ("auto", -1) else devices if isinstance(devices, int) else 0
    if not 1 <= width <= len(gpus):
        raise ValueError(f"trainer.devices={devices}: expected a number of GPUs from 1 to {len(gpus)} in a sweep")
    # the indices count the GPUs visible to this process, which may be only some of them
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [visible[i].strip() if len(visible) == here and all(visible) else str(i) for i in gpus]
    groups = [names[i : i + width] for i in range(0, len(names) - width + 1, width)]
    threads = max(1, cores // (len(groups) * sweep.jobs_per_device))
    return [
        Slot(f"gpu {'+'.join(group)}", {"CUDA_VISIBLE_DEVICES": ",".join(group), "OMP_NUM_THREADS": str(threads)})
        for _ in range(sweep.jobs_per_device)
        for group in groups
    ]
