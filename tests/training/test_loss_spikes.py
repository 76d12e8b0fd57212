"""A loss spike takes a run back to its last good checkpoint and past other data, the same way each time."""

from __future__ import annotations

import math
import random
import signal

import lightning as L
import numpy as np
import pytest
import torch

from tests.training.ranks import run_ranks
from vsa.data.plan import hash64
from vsa.training.callbacks.loss_spikes import LossSpikes, SpikeRule

WATCHED = ("callbacks=loss_spikes", "callbacks.loss_spikes.least=6", "trainer.max_steps=16")
SPIKE = 11


class Outlier(L.Callback):
    """Multiplies the batch that the plan has for a step by 40, whenever it is drawn, and notes what is drawn."""

    def __init__(self, *steps: int):
        self.steps, self.drawn = steps, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        plan = trainer.datamodule.plan
        self.drawn.append((batch.step, batch.sample_ids, tuple(batch.seeds.tolist())))
        for step in self.steps:
            ids = [ref.id for ref in plan.step(step).refs]
            if batch.step == step and all(sample in ids for sample in batch.sample_ids):
                batch.latents.mul_(40)


def of_step(drawn, step):
    return [(ids, seeds) for at, ids, seeds in drawn if at == step]


@pytest.fixture
def rule():
    return SpikeRule(window=32, least=8, threshold=10.0)


def test_the_rule_is_that_of_median_and_median_absolute_deviation(rule):
    numbers, before, spikes = random.Random(0), [], 0
    for _ in range(400):
        loss = numbers.gauss(1, 0.1) * (numbers.choice([1.3, 1.6, 2.2, 30]) if numbers.random() < 0.1 else 1)
        last = np.array(before[-32:])
        middle = np.median(last) if len(last) else 0
        expected = len(last) >= 8 and loss > middle + max(14.826 * np.median(np.abs(last - middle)), 0.5 * middle)
        assert rule.is_spike(loss) == expected
        spikes += expected
        if not expected:
            before.append(loss)
    assert 3 < spikes < 40


def test_what_is_not_finite_is_no_spike_and_spoils_nothing(rule):
    for _ in range(20):
        assert not rule.is_spike(1.0)
        assert not rule.is_spike(math.nan)
        assert not rule.is_spike(math.inf)
    assert set(rule.losses) == {1.0}
    assert rule.is_spike(1.6)
    assert not rule.is_spike(1.4)


@pytest.mark.soak("loss spikes: one batch times 40 is undone", attempts=12, short=1)
def test_one_batch_times_forty_is_undone(training, attempt):
    extra = ("trainer.accumulate_grad_batches=2", "data.num_workers=1") if attempt % 2 else ()
    # one step after the last checkpoint, or none
    spike = SPIKE - attempt % 4 // 2
    extra += (f"seed={attempt // 4}",)
    training(*WATCHED, *extra, "run=clean")
    outlier = Outlier(spike)
    trainer = training(*WATCHED, *extra, callbacks=(outlier,))
    # every step has one row, those before the checkpoint are those of a run without the batch
    clean, mended = training.losses("clean"), training.losses()
    assert list(mended) == list(clean) == list(range(1, 17))
    assert {step: mended[step] for step in range(1, 11)} == {step: clean[step] for step in range(1, 11)}
    assert mended[11] != clean[11]
    assert max(map(float, mended.values())) < 2 * max(map(float, clean.values()))
    assert training.metrics()[16]["loss_spikes/rollbacks"] == "1"
    state = training.last().state
    assert state["skipped_windows"] == [[10, spike]]
    assert state["loss_spikes"]["rollbacks"] == 1
    assert len(state["loss_spikes"]["losses"]) == 16
    # the steps of the window were drawn twice, with other noise, all others once
    micro_batches = trainer.accumulate_grad_batches
    for step in range(16):
        draws = of_step(outlier.drawn, step)
        twice = step in range(10, spike + 1)
        assert len(draws) == (2 if twice else 1) * micro_batches
        assert len(set(draws)) == len(draws)
    # and the new ones are those of the plan with another seed
    data = trainer.datamodule
    other = type(data.plan)(
        sources=data.plan.sources,
        batch_size=data.batch_size,
        seed=hash64(data.seed, "skipped window", 1) >> 1,
    )
    sample_ids = {sample for ids, _ in of_step(outlier.drawn, spike)[micro_batches:] for sample in ids}
    assert sample_ids == {ref.id for ref in other.step(spike).refs}


def test_without_the_watch_the_spike_is_taken(training):
    """The control of the test above."""
    training("trainer.max_steps=16", callbacks=(Outlier(SPIKE),))
    assert max(map(float, training.losses().values())) > 100


@pytest.mark.soak("loss spikes: false alarms in clean runs", attempts=10, short=0)
def test_no_false_alarm(training, attempt):
    training("callbacks=loss_spikes", f"seed={attempt}", "trainer.max_steps=150")
    assert training.metrics()[150]["loss_spikes/rollbacks"] == "0"


def test_the_watch_changes_nothing_in_a_run_without_spikes(training):
    training(*WATCHED, "run=watched")
    training("trainer.max_steps=16", "run=plain")
    assert training.losses("watched") == training.losses("plain")
    assert "skipped_windows" not in training.last("watched").state


@pytest.mark.soak("loss spikes: a kill before, in and after them, resumed", attempts=16, short=1)
def test_a_run_that_was_stopped_takes_the_same_path(training, attempt):
    """Stopped before the spike, between the spike and the next checkpoint, and after it; two spikes."""
    batches = (9, *range(3, 9), *range(10, 19))[attempt % 16]

    class Stop(L.Callback):
        """A kill after a number of batches: nothing is saved."""

        def __init__(self, batches: int):
            self.left = batches

        def on_train_batch_end(self, trainer, *_):
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("killed")

    spikes = (7, SPIKE)
    training(*WATCHED, "run=straight", callbacks=(Outlier(*spikes),))
    assert training.last("straight").state["loss_spikes"]["rollbacks"] == 2
    expected = training.tensors("straight"), training.losses("straight")
    with pytest.raises(RuntimeError, match="killed"):
        training(*WATCHED, "run=stopped", callbacks=(Outlier(*spikes), Stop(batches)))
    training(*WATCHED, "run=stopped", "ckpt_path=last", callbacks=(Outlier(*spikes),))
    tensors, losses = training.tensors("stopped"), training.losses("stopped")
    assert losses == expected[1]
    assert all(torch.equal(tensors[name], value) for name, value in expected[0].items())


class Signal(L.Callback):
    """SIGTERM in a step, counted from 1, after which the run saves and ends."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step - 1:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_signals_leave_the_path_as_it_is(training):
    """Their checkpoints are no targets, and push no target out of the number that is kept."""
    watched = (*WATCHED[:2], "callbacks.checkpoint.every_n_steps=3", "trainer.max_steps=13")
    spikes = (7, SPIKE)
    training(*watched, "run=straight", callbacks=(Outlier(*spikes),))
    expected = training.tensors("straight"), training.losses("straight")
    assert training.last("straight").state["skipped_windows"] == [[6, 7], [9, SPIKE]]
    # in the step before the first spike; in the two before the second one
    for run, stops in (("once", (7,)), ("twice", (10, 11))):
        for number, stop in enumerate(stops):
            goes_on = ("ckpt_path=last",) if number else ()
            with pytest.raises(SystemExit):
                training(*watched, *goes_on, f"run={run}", callbacks=(Outlier(*spikes), Signal(stop)))
            assert training.last(run).step == stop
        training(*watched, f"run={run}", "ckpt_path=last", callbacks=(Outlier(*spikes),))
        assert training.last(run).state["skipped_windows"] == [[6, 7], [9, SPIKE]]
        tensors, losses = training.tensors(run), training.losses(run)
        assert losses == expected[1]
        assert all(torch.equal(tensors[name], value) for name, value in expected[0].items())


@pytest.mark.soak("loss spikes on two ranks: one batch times 40 is undone", attempts=5, short=0)
def test_two_ranks_go_back_together(training, attempt):
    common = (*WATCHED, "optim.eps=0.01", f"seed={attempt}")

    def rank(number: int) -> None:
        training(*common, "run=ranks", "trainer=fsdp", "trainer.devices=2", callbacks=(Outlier(SPIKE),))

    run_ranks(2, rank)
    training(*common, "run=one", callbacks=(Outlier(SPIKE),))
    assert training.last("ranks").state["skipped_windows"] == training.last("one").state["skipped_windows"]
    one, ranks = ({step: float(loss) for step, loss in training.losses(run).items()} for run in ("one", "ranks"))
    assert ranks == pytest.approx(one, rel=1e-4)
    # the control: what is drawn instead matters
    assert one[SPIKE + 1] != pytest.approx(one[SPIKE], rel=1e-4)


def test_a_run_whose_spikes_do_not_end_is_stopped(training):
    class Always(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch.step == SPIKE:
                batch.latents.mul_(40)

    with pytest.raises(FloatingPointError, match=r"after callbacks.loss_spikes.rollbacks=2 rollbacks: training stop"):
        training(*WATCHED, "callbacks.loss_spikes.rollbacks=2", callbacks=(Always(),))
    # what stands is from before the spike
    assert training.last().step == 10


def test_a_spike_before_the_first_checkpoint_is_told(training, caplog):
    caplog.set_level("INFO")
    training(*WATCHED, "callbacks.checkpoint.every_n_steps=100", callbacks=(Outlier(SPIKE),))
    assert "no checkpoint to go back to, training continues" in caplog.text
    assert training.last().step == 16


def test_without_checkpoints_there_is_nothing_to_watch_for(training):
    with pytest.raises(ValueError, match=r"it needs callbacks.checkpoint"):
        training("callbacks=loss_spikes", "~callbacks.checkpoint.every_n_steps", "callbacks.checkpoint=null")


def test_a_window_that_is_never_full_enough_is_refused():
    with pytest.raises(ValueError, match="least must be at most window=12, got 16"):
        LossSpikes(window=12)


def test_a_distillation_is_refused(distill):
    with pytest.raises(ValueError, match=r"callbacks.loss_spikes applies to jobs of one network"):
        distill("callbacks=loss_spikes")
