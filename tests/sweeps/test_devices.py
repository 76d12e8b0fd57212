"""What a machine has for the runs of a sweep."""

from __future__ import annotations

import pytest
import torch

from vsa.config import Sweep
from vsa.sweeps import devices
from vsa.sweeps.devices import slots_of


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus, cores)` makes this one another one."""

    def make(gpus: int, cores: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def seen(sweep: Sweep, *, accelerator="auto", devices=1):
    slots = slots_of(sweep, {"accelerator": accelerator, "devices": devices})
    key = "CUDA_VISIBLE_DEVICES"
    return [(slot.name, slot.environment.get(key), slot.environment["OMP_NUM_THREADS"]) for slot in slots]


def test_a_cpu_is_shared_out_by_cores(machine):
    machine(0, 9)
    assert seen(Sweep()) == [("cpu 0", None, "4"), ("cpu 1", None, "4")]
    assert seen(Sweep(cores=16)) == [("cpu 0", None, "9")]
    machine(4, 2)
    assert seen(Sweep(cores=1), accelerator="cpu") == [("cpu 0", None, "1"), ("cpu 1", None, "1")]


def test_every_gpu_has_a_run(machine, monkeypatch):
    machine(4, 16)
    assert seen(Sweep()) == [(f"gpu {i}", str(i), "4") for i in range(4)]
    assert seen(Sweep(devices=2)) == [("gpu 0", "0", "8"), ("gpu 1", "1", "8")]
    assert seen(Sweep(devices=[3], jobs_per_device=2)) == [("gpu 3", "3", "8")] * 2
    # a run of two GPUs, and the odd one stays free
    assert seen(Sweep(devices=3), devices=2) == [("gpu 0+1", "0,1", "16")]
    assert seen(Sweep(), devices="auto") == [("gpu 0+1+2+3", "0,1,2,3", "16")]
    # one that may see some of them only has its own numbers
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-ab,9")
    assert seen(Sweep(devices=[0, 2])) == [("gpu 5", "5", "8"), ("gpu GPU-ab", "GPU-ab", "8")]


@pytest.mark.parametrize(
    ("sweep", "wanted", "message"),
    [
        (Sweep(devices=5), 1, "sweep.devices=5: this machine has 4 GPUs, numbered from 0"),
        (Sweep(devices=[4]), 1, "sweep.devices=.4.: this machine has 4 GPUs"),
        (Sweep(devices=[]), 1, "sweep.devices=..: this machine has 4 GPUs"),
        (Sweep(devices=2), 3, "trainer.devices=3: expected a number of GPUs from 1 to 2"),
        (Sweep(), [0, 1], "trainer.devices=.0, 1.: expected a number of GPUs"),
    ],
)
def test_gpus_that_are_not_here_are_refused(machine, sweep, wanted, message):
    machine(4, 16)
    with pytest.raises(ValueError, match=message):
        slots_of(sweep, {"accelerator": "auto", "devices": wanted})
