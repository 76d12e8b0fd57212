"""The progress bar moves with the clock, however long steps take."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from vsa.training.callbacks import progress
from vsa.training.callbacks.progress import TimedProgressBar

# no step is due but the first
BAR = "callbacks.progress={_target_:vsa.training.callbacks.progress.TimedProgressBar,log_seconds:1000}"


@pytest.fixture
def redraws(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`redraws(bar, steps, seconds_per_step, hook=)`: steps after which the bar was drawn anew, by a fake clock."""

    def run(bar: Any, steps: int, seconds: float, hook: str = "on_train_batch_end") -> list[int]:
        now, draws = [100.0], []
        with monkeypatch.context() as patch:
            patch.setattr(progress.time, "monotonic", lambda: now[0])
            # Lightning's own, which draws whenever it is called
            patch.setattr(TQDMProgressBar, hook, lambda self, *arguments: draws.append(arguments[4] + 1))
            for index in range(steps):
                now[0] += seconds
                getattr(bar, hook)(None, None, None, None, index)
        return draws

    return run


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_every_slow_step_and_few_fast_ones_are_drawn(redraws, monkeypatch, hook):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert redraws(TimedProgressBar(seconds=0.25), 5, 42.0, hook) == [1, 2, 3, 4, 5]
    assert redraws(TimedProgressBar(seconds=0.25), 1000, 0.0078125, hook) == list(range(1, 1001, 32))
    # a slow step is drawn when it ends, whatever its number
    bar = TimedProgressBar(seconds=0.25)
    assert redraws(bar, 7, 0.0078125, hook) == [1]
    assert redraws(bar, 1, 1.0, hook) == [1]


def test_a_file_gets_a_line_now_and_then(redraws, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert redraws(TimedProgressBar(log_seconds=32), 100, 1.0) == [1, 33, 65, 97]


def test_the_bar_of_a_run_ends_at_its_last_step(training, capsys):
    training("trainer.max_steps=3", "trainer.enable_progress_bar=true", BAR)
    steps = re.findall(r" (\d)/3 \[", capsys.readouterr().out)
    assert steps[-1] == "3"
    assert set(steps) == {"0", "1", "3"}


def test_lightnings_switch_turns_the_bar_off(training, capsys):
    training("trainer.max_steps=2", "trainer.enable_progress_bar=false", BAR)
    assert not re.search(r"\d/2 \[", capsys.readouterr().out)


def test_the_bar_of_a_failed_run_is_closed_at_the_last_whole_step(training, capsys):
    class Fail(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        training("trainer.max_steps=3", "trainer.enable_progress_bar=true", BAR, callbacks=(Fail(),))
    gc.collect()
    last = capsys.readouterr().out.rpartition("\r")[2]
    assert " 2/3 [" in last
    # what is told next has a line of its own
    assert last.endswith("\n")


@pytest.mark.parametrize("name", ["seconds", "log_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_times_must_be_positive(name, value):
    with pytest.raises(ValueError, match=rf"{name}={value}: expected a number above 0, got {value}"):
        TimedProgressBar(**{name: value})
