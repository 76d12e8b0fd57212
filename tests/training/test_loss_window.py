"""Losses between two log lines: their mean, and what a resume makes of them."""

from __future__ import annotations

import math

import pytest
import torch

import vsa.training.loss_window as loss_window_module
from vsa.training.loss_window import LossWindow


def test_a_step_that_is_not_finite_is_left_out_of_its_line():
    window = LossWindow(torch.device("cpu"))
    for loss in (1.0, torch.nan, 3.0):
        window.add({"loss": torch.tensor(loss)}, torch.tensor([loss, 7.0]), torch.tensor([0.1, 0.96]).double())
        window.end_step()
    assert window.metrics()() == {"loss": 2, "loss_decile_1": 2, "loss_decile_9": 7}
    # a line without a finite step says so
    broken = LossWindow(torch.device("cpu"))
    broken.add({"loss": torch.tensor(torch.nan)}, torch.tensor([torch.nan]), torch.tensor([0.5]).double())
    broken.end_step()
    assert math.isnan(broken.metrics()()["loss"])


@pytest.mark.parametrize("names", [("loss",), ("loss", "loss_mse", "loss_attention"), ("loss", "loss_other")])
def test_a_window_of_other_losses_is_dropped_at_a_resume(monkeypatch, names):
    messages: list[str] = []
    monkeypatch.setattr(loss_window_module, "rank_zero_info", messages.append)

    def step(window: LossWindow, loss: float, names: tuple[str, ...]) -> None:
        losses = {name: torch.tensor(loss) for name in names}
        window.add(losses, torch.tensor([loss]), torch.tensor([0.1]).double())
        window.end_step()

    before = LossWindow(torch.device("cpu"))
    step(before, 1.0, ("loss", "loss_attention"))
    state = before.state_dict()
    for resumed_names, mean in ((("loss", "loss_attention"), 2.0), (names, 3.0)):
        assert not messages
        after = LossWindow(torch.device("cpu"))
        after.load_state_dict(state)
        step(after, 3.0, resumed_names)
        assert after.metrics()() == dict.fromkeys((*resumed_names, "loss_decile_1"), mean)
    assert len(messages) == 1
    assert messages[0].startswith(
        "the checkpoint has loss, loss_attention of 1 steps not logged yet, the run now has loss"
    )
