"""The hosts of several ranks agree without their GPUs."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

import vsa.training.parallel as parallel
from tests.training.ranks import run_ranks
from vsa.training.hosts import connect_hosts, largest

MINUTE = timedelta(minutes=1)
# what a GPU would be told; the group itself needs none
GPU = torch.device("cuda")


def test_they_agree_without_the_default_group():
    def agree(rank: int) -> tuple[list[int], bool]:
        dist.init_process_group("gloo")
        group = connect_hosts(GPU, MINUTE)
        trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(hosts=group))
        return [largest(value, trainer) for value in (rank, 7 - rank, rank == 1)], group is not None

    assert run_ranks(2, agree) == [([1, 7, 1], True)] * 2
    # one process asks nobody, and CPUs are connected
    assert largest(5, SimpleNamespace(world_size=1)) == 5  # type: ignore[arg-type]
    assert connect_hosts(torch.device("cpu"), MINUTE) is None


def test_where_they_cannot_connect_a_line_says_what_to_set(monkeypatch):
    limits: list[timedelta] = []

    def fail(backend: str, timeout: timedelta):
        limits.append(timeout)
        raise RuntimeError("no interface\nlong trace")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(ConnectionError, match=r"cannot connect \(no interface\): GLOO_SOCKET_IFNAME names"):
        connect_hosts(GPU, timedelta(hours=1))
    # and says so soon
    assert limits == [MINUTE]


class Collectives(L.Callback):
    """Names and groups of the collectives of whole steps, from the second on."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, Any]] = []
        self._on = False
        for name in ("all_reduce", "all_gather_object", "broadcast", "barrier"):
            patch.setattr(dist, name, self._recorded(name, getattr(dist, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        def record(*args: Any, **settings: Any) -> Any:
            if self._on:
                self.calls.append((name, settings.get("group")))
            return function(*args, **settings)

        return record

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._on = trainer.global_step < trainer.max_steps


def test_a_run_of_several_ranks_asks_its_gpus_for_sums_of_losses_alone(training, monkeypatch):
    monkeypatch.setattr(parallel, "connect_hosts", lambda device, timeout: connect_hosts(GPU, timeout))

    def on_rank(rank: int) -> tuple[set[str], set[str]]:
        with monkeypatch.context() as patch:
            callback = Collectives(patch)
            trainer = training(
                "trainer=fsdp",
                "trainer.accelerator=cpu",
                "callbacks.checkpoint.every_n_steps=100",
                callbacks=(callback,),
            )
        hosts = trainer.strategy.hosts
        assert hosts is not None
        by_hosts = {name for name, group in callback.calls if group is hosts}
        return by_hosts, {name for name, group in callback.calls if group is not hosts}

    # signals, times and bad samples by the hosts; a barrier or a broadcast would wait for a GPU
    assert run_ranks(2, on_rank) == [({"all_reduce", "all_gather_object"}, {"all_reduce"})] * 2
