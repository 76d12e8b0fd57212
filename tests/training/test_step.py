"""The step that pretraining and finetuning make themselves, at the places where Lightning would make it."""

from __future__ import annotations

from itertools import chain

import lightning as L

STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


class Hooks(L.Callback):
    """Hooks of callbacks in the order of their calls, each with the number of completed steps."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in ("on_train_batch_start", *STEP, "on_train_batch_end"):
            setattr(self, name, lambda trainer, *_, name=name: self.calls.append((name, trainer.global_step)))


def micro_batch(step: int, *, first: bool, last: bool) -> list[tuple[str, int]]:
    """The hooks of a micro-batch by Lightning's documentation, in optimizer step `step` from 0."""
    names = [name for name in STEP if (first or name != STEP[0]) and (last or name != STEP[-1])]
    return [("on_train_batch_start", step), *((name, step) for name in names), ("on_train_batch_end", step + last)]


def test_callbacks_hear_of_a_step_as_in_lightning(training):
    hooks = Hooks()
    training("trainer.max_steps=2", "trainer.accumulate_grad_batches=3", "data.batch_size=6", callbacks=(hooks,))
    expected = [micro_batch(step, first=i == 0, last=i == 2) for step in range(2) for i in range(3)]
    assert hooks.calls == list(chain.from_iterable(expected))


def test_the_end_of_the_data_ends_a_step(training):
    hooks = Hooks()
    settings = ("trainer.overfit_batches=3", "trainer.accumulate_grad_batches=2", "callbacks.checkpoint=null")
    training(*settings, "trainer.max_steps=4", callbacks=(hooks,))
    pass_ends = [(True, False), (False, True), (True, True)]
    steps = [0, 0, 1, 2, 2, 3]
    expected = [micro_batch(step, first=f, last=e) for step, (f, e) in zip(steps, 2 * pass_ends, strict=True)]
    assert hooks.calls == list(chain.from_iterable(expected))
