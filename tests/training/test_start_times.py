"""What a run says about its start: the parts add up, and compilation is listed separately."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vsa.machine import process_start
from vsa.training.callbacks.progress import TimedProgressBar
from vsa.training.callbacks.start_times import StartTimes, _CompileTimes, start_line

LINE = r"first step done ([\d.]+) s after the process began: (.*)$"


def test_the_line_adds_up():
    parts = {"imports": 3.0, "data": 1.0, "weights": 0.5, "first batch": 0.25, "step": 6.0}
    assert start_line(parts, {"torch.compile": 4.5, "Triton kernels": 0.0}) == (
        "first step done 10.8 s after the process began: imports 3.0 s, data 1.0 s, weights 0.5 s, first batch 0.2 s, "
        "step 6.0 s (of it torch.compile 4.5 s)"
    )
    assert start_line(parts, {"torch.compile": 0.0, "Triton kernels": 0.0}).endswith("step 6.0 s")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells when a process began")
def test_the_process_began_when_it_was_started():
    code = "from vsa.machine import process_start; print(process_start())"
    before = time.time()
    began = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    # the kernel counts in hundredths; importing takes far longer than the bound on the other side
    assert before - 0.1 <= began <= time.time()
    assert process_start() < before


def test_a_run_says_it_once(training, caplog):
    caplog.set_level("INFO")
    training("trainer.max_steps=3")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("first step done")]
    match = re.match(LINE, line)
    assert match is not None
    parts = re.findall(r"([\w ]+?) ([\d.]+) s", match[2])
    assert [name.strip() for name, _ in parts] == ["imports", "data", "weights", "first batch", "step"]
    # rounded to a tenth, each of them
    assert sum(float(seconds) for _, seconds in parts) == pytest.approx(float(match[1]), abs=0.31)


def test_compilation_is_timed_and_shown_while_it_is_listened_to(monkeypatch):
    calls: list[bool] = []
    times = _CompileTimes(calls.append)

    @torch.compile(backend="eager")
    def double(x):
        return 2 * x

    times.listen()
    double(torch.ones(3))
    assert calls == [True, False]
    seconds = times.seconds["torch.compile"]
    assert seconds > 0
    # nothing is compiled again
    double(torch.ones(3))
    assert calls == [True, False]
    times.stop()
    torch.compile(nn.Identity(), backend="eager")(torch.ones(2))
    assert (calls, times.seconds["torch.compile"]) == ([True, False], seconds)


def test_triton_kernels_are_timed_and_a_listener_of_others_stays():
    knobs = pytest.importorskip("triton").knobs
    assert knobs.compilation.listener is None
    times = _CompileTimes(print)
    times.listen()
    knobs.compilation.listener(
        src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=2_500_000), cache_hit=False
    )
    times.stop()
    assert times.seconds["Triton kernels"] == 2.5
    assert knobs.compilation.listener is None
    knobs.compilation.listener = print
    try:
        times.listen()
        times.stop()
        assert knobs.compilation.listener is print
    finally:
        knobs.compilation.listener = None


def test_the_bar_says_compiling(capsys):
    bar = TimedProgressBar()
    bar._trainer = SimpleNamespace(current_epoch=0, is_global_zero=True)
    bar.train_progress_bar = bar.init_train_tqdm()
    start = StartTimes()
    start._bar = bar
    start._show(True)
    assert "Compiling" in bar.train_progress_bar.desc
    start._show(False)
    assert bar.train_progress_bar.desc == "Epoch 0: "
    bar.train_progress_bar.close()
