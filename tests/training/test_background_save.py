"""`callbacks.checkpoint.asynchronous`: the same checkpoints, written while training continues."""

from __future__ import annotations

import threading

import lightning as L
import pytest
import torch

import vsa.checkpoints.run_checkpoint as checkpointing
import vsa.training.callbacks.checkpoint as callback_module
from tests.states import state_of
from tests.training.ranks import run_ranks
from vsa.checkpoints.tensor_parts import own_parts
from vsa.files import DiskFullError
from vsa.training.background_save import Save, copied

ASYNC = "callbacks.checkpoint.asynchronous=true"
RUN = ("trainer.max_steps=5", "callbacks.checkpoint.keep=3")


class Gate(L.Callback):
    """Saves wait until the step after theirs is done, where there is one: what they hold has changed by then."""

    def __init__(self, patch):
        self.moved, self.step, self.waited = threading.Condition(), 0, 0
        save_file = checkpointing.save_file

        def slow(path, parts):
            save_step = int(path.parent.name.rpartition("-")[2])
            with self.moved:
                self.waited += self.moved.wait_for(lambda: self.step > min(save_step, 4), timeout=60)
            return save_file(path, parts)

        patch.setattr(checkpointing, "save_file", slow)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with self.moved:
            self.step = trainer.global_step
            self.moved.notify_all()


def same_checkpoints(training, *runs):
    """Whether two runs wrote the same values and tensors at the steps 2, 4 and 5."""
    states = []
    for run in runs:
        paths = checkpointing.list_checkpoints(training.folder(run) / "checkpoints")
        assert [path.name for path in paths] == ["step-00000002", "step-00000004", "step-00000005"]
        states.append([{k: v for k, v in state_of(path).items() if k != "config"} for path in paths])
    return states[0] == states[1]


@pytest.mark.slow
def test_the_same_checkpoints_are_written_while_weights_change(training, monkeypatch):
    training(*RUN, "run=sync")
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        training(*RUN, ASYNC, "run=async", callbacks=(gate,))
        # three files a save
        assert gate.waited == 9
    assert same_checkpoints(training, "sync", "async")
    # control: without a copy they are of the step after
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        patch.setattr(callback_module, "copied", lambda parts: parts)
        training(*RUN, ASYNC, "run=torn", callbacks=(gate,))
    assert not same_checkpoints(training, "sync", "torn")
    training("trainer.max_steps=6", "run=async", "ckpt_path=last", ASYNC)
    training("trainer.max_steps=6", "run=sync", "ckpt_path=last")
    assert training.losses("async") == training.losses("sync")
    assert all(torch.equal(training.tensors("async")[name], t) for name, t in training.tensors("sync").items())


def test_a_failure_ends_the_run_at_the_next_step(training, monkeypatch):
    def full(path, parts):
        raise OSError(28, "No space left on device")

    class Watch(L.Callback):
        last = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            # a save of the step before is over, one way or another
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            if trainer.global_step == 3:
                monkeypatch.setattr(checkpointing, "save_file", full)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.last = trainer.global_step

    watch = Watch()
    with pytest.raises(OSError, match=r"cannot write .*step-00000004"):
        training("trainer.max_steps=20", ASYNC, callbacks=(watch,))
    assert 4 <= watch.last <= 5
    assert training.last().step == 2
    assert [path.name for path in (training.folder() / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_ranks_agree_on_a_save_in_the_background(training):
    small = ("model.num_layers=1", "trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu")

    def on_rank(rank: int) -> None:
        training(*small, *RUN, "run=sync")
        training(*small, *RUN, ASYNC, "run=async")

    run_ranks(2, on_rank)
    assert same_checkpoints(training, "sync", "async")


def test_a_copy_is_another_tensor_and_one_failure_is_raised():
    weight = torch.ones(3)
    duplicate = copied(own_parts({"model": {"w": weight}}))["model"]["w"]
    weight.zero_()
    assert torch.equal(duplicate.rows, torch.ones(3))

    def fail():
        raise OSError("full")

    save = Save(fail, background=True)
    with pytest.raises(OSError, match="full"):
        save.result()
    assert not save.is_running


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_without_room_is_tried_again_and_may_be_missed(training, monkeypatch, asynchronous):
    save_file, attempts = checkpointing.save_file, []

    def full(path, parts):
        step = int(path.parent.name.rpartition("-")[2])
        if path.name.startswith("model"):
            there = [p.name[-1] for p in checkpointing.list_checkpoints(training.folder() / "checkpoints")]
            attempts.append((step, "".join(there)))
        # the first save of step 2, and both of step 4
        if step == 4 or [number for number, _ in attempts] == [1, 2]:
            raise OSError(28, "No space left on device")
        return save_file(path, parts)

    monkeypatch.setattr(checkpointing, "save_file", full)
    settings = (
        f"callbacks.checkpoint.asynchronous={str(asynchronous).lower()}",
        "callbacks.checkpoint.every_n_steps=1",
    )
    settings += ("trainer.max_steps=5", "callbacks.checkpoint.keep=3", "callbacks.checkpoint.max_missed=1")
    messages = []
    monkeypatch.setattr(callback_module, "rank_zero_info", messages.append)
    training(*settings)
    # before the second try of step 4 the oldest makes room, which has two good ones after it
    assert attempts == [(1, ""), (2, "1"), (2, "1"), (3, "12"), (4, "123"), (4, "23"), (5, "23")]
    names = [path.name[-1] for path in checkpointing.list_checkpoints(training.folder() / "checkpoints")]
    assert names == ["2", "3", "5"]
    assert all(line.startswith(f"cannot write {training.folder()}/checkpoints/step-0000000") for line in messages)
    ends = [line.rpartition(": ")[2] for line in messages]
    again, miss = "trying once more", "training continues without it (1 in a row, callbacks.checkpoint.max_missed=1)"
    assert ends == [again, again, miss]
    assert len(training.losses()) == 5
    # one miss too many, and one at the end
    for steps, limit in ((9, 0), (4, 5)):
        monkeypatch.setattr(callback_module, "rank_zero_info", lambda line: None)
        ends = (f"trainer.max_steps={steps}", f"callbacks.checkpoint.max_missed={limit}", f"run=ends{steps}")
        with pytest.raises(DiskFullError, match=r"cannot write .*step-00000004: No space left"):
            training(*settings, *ends)
        assert training.last(f"ends{steps}").step == 3
