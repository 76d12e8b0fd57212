"""A fused optimizer drops bad updates by itself, so that the host reads the norm of the gradients one step later."""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import pytest
import torch

from tests.training.ranks import run_ranks
from tests.training.test_training import BadGradient
from vsa.models.sharding import local
from vsa.training.replay import replay_step

DEVICES = [
    "cpu",
    pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
SELDOM = "trainer.log_every_n_steps=4"


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """The optimizer that training uses on a GPU, on any device."""
    plain = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **settings: plain(*args, **settings | {"fused": True}))


class Watch(L.Callback):
    """Whether norms were unread at the end of steps, and optionally the rule that reads them at once."""

    def __init__(self, waits: bool = False):
        self.waits, self.unread = waits, []

    def on_train_start(self, trainer, pl_module):
        pl_module.clipper.waits = self.waits

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.unread.append(pl_module.clipper.unread)


class Bad(BadGradient):
    """The gradients alone; looking at the average would read the norm."""

    def __init__(self, batches, values=(math.nan,), shard: bool = False):
        super().__init__(batches, values)
        self.shard = shard

    def on_after_backward(self, trainer, pl_module):
        if not self.shard:
            super().on_after_backward(trainer, pl_module)
        elif self.batch in self.values:
            local(pl_module.model.blocks[1].attn1.to_q.weight.grad)[0, 0] = self.values[self.batch]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


@pytest.fixture(params=DEVICES)
def train(request, training):
    return partial(training, f"trainer.accelerator={request.param}", SELDOM, "callbacks.checkpoint.every_n_steps=3")


def kept(training, run):
    checkpoint = training.last(run)
    files = ("model", "optimizer", "ema")
    tensors = {(file, name): tensor for file in files for name, tensor in checkpoint.tensors(file).items()}
    return tensors, {name: checkpoint.state[name] for name in ("step", "skipped_steps", "skipped_in_row")}


def test_a_norm_that_is_read_late_gives_the_same_run(training, train):
    runs = {}
    for name, waits in (("late", False), ("at_once", True)):
        runs[name] = watch = Watch(waits)
        train(f"run={name}", "trainer.max_steps=8", callbacks=(Bad((1, 4, 5, 7), (math.nan, math.inf)), watch))
    # checkpoints of steps 3 and 6 read the norm, and log lines are written later
    assert runs["late"].unread == [True, True, False, True, True, False, True, True]
    assert runs["at_once"].unread == [False] * 8
    (late, counts), (at_once, counts_at_once) = kept(training, "late"), kept(training, "at_once")
    assert counts == counts_at_once == {"step": 8, "skipped_steps": 4, "skipped_in_row": 1}
    assert late.keys() == at_once.keys()
    assert all(torch.equal(late[name], at_once[name]) for name in late)
    assert {v.item() for (_, n), v in late.items() if n.endswith("/step")} == {4}
    names = ("train/loss", "val/loss", "grad_norm/total", "skipped_steps", "lr")
    rows, others = training.metrics("late"), training.metrics("at_once")
    assert {s: [row.get(n) for n in names] for s, row in rows.items()} == {
        s: [row.get(n) for n in names] for s, row in others.items()
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks ranks, which a process that uses a GPU cannot")
def test_a_norm_that_sharded_ranks_read_late_gives_the_same_run(training):
    settings = ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.max_steps=5", "callbacks.throughput=null")

    def on_rank(rank: int) -> dict[str, list[bool]]:
        unread = {}
        for name, waits in (("late", False), ("at_once", True)):
            watch = Watch(waits)
            # a rank whose gradients are finite drops the update as well
            bad = Bad((1, 3), (math.nan, math.inf), shard=True) if rank == 1 else Bad(())
            training(*settings, f"run={name}", SELDOM, "callbacks.checkpoint.every_n_steps=3", callbacks=(bad, watch))
            unread[name] = watch.unread
        return unread

    late_and_at_once = {"late": [True, True, False, True, True], "at_once": [False] * 5}
    assert run_ranks(2, on_rank) == [late_and_at_once] * 2
    (late, counts), (at_once, counts_at_once) = kept(training, "late"), kept(training, "at_once")
    assert counts == counts_at_once == {"step": 5, "skipped_steps": 2, "skipped_in_row": 0}
    assert all(torch.equal(late[name], at_once[name]) for name in late)
    assert {v.item() for (_, n), v in late.items() if n.endswith("/step")} == {3}
    assert all(value.isfinite().all() for value in late.values())


def test_a_dropped_step_alone_leaves_no_trace(training, train):
    train("run=with", "trainer.max_steps=3", callbacks=(Bad((2,)), Watch()))
    train("run=without", "trainer.max_steps=2")
    (longer, _), (shorter, _) = kept(training, "with"), kept(training, "without")
    assert all(torch.equal(longer[name], shorter[name]) for name in shorter)


def test_a_resumed_run_is_the_same(training, train):
    bad = (1, 2, 5)
    train("run=straight", "trainer.max_steps=7", callbacks=(Bad(bad),))
    train("run=resumed", "trainer.max_steps=3", callbacks=(Bad(bad),))
    # batches are counted from 0 again
    train("run=resumed", "trainer.max_steps=7", "ckpt_path=last", callbacks=(Bad([step - 3 for step in bad]),))
    (straight, counts), (resumed, resumed_counts) = kept(training, "straight"), kept(training, "resumed")
    assert counts == resumed_counts
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


class BadLatents(L.Callback):
    """A value of a batch that is not finite, in one step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            batch.latents[0, 0, 0, 0, 0] = math.nan


# read by the next update, by the checkpoint after the step, and by its log line during the next step
@pytest.mark.parametrize(("step", "late"), [(1, True), (2, False), (3, True)])
def test_a_step_that_is_dropped_late_is_replayed(training, train, step, late):
    watch = Watch()
    train("trainer.max_steps=5", "trainer.accumulate_grad_batches=2", callbacks=(BadLatents(step), watch))
    assert watch.unread[2 * step + 1] == late
    (path,) = (training.folder() / "nan-dumps").glob("*")
    assert path.name == f"step-{step:08d}-model"
    result = replay_step(path, accelerator="cpu")
    assert result.first is not None
    assert result.first.startswith("latents of sample ")
    assert all(math.isnan(float.fromhex(loss)) for loss in result.recorded)


def test_too_many_late_drops_end_the_run(training, train):
    with pytest.raises(FloatingPointError, match="not finite for 3 steps in a row, the last one step 6"):
        train(
            "trainer.max_steps=9", "trainer.log_every_n_steps=9", "task.max_skipped=3", callbacks=(Bad((2, 4, 5, 6)),)
        )
    assert training.last().step == 6
    assert training.last().state["skipped_in_row"] == 2
