"""How runs end: what they say, with which status, and what stands on the disk then."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from PIL import Image

import vsa.training.callbacks.samples as samples_module
import vsa.training.launch as launch_module
import vsa.training.modules.base as module_module
import vsa.training.train as run_module
from tests.disks import small_files
from tests.limits import HANGS
from tests.pictures import drawn, pictures_left_out  # noqa: F401
from tests.training.ranks import run_ranks
from tests.training.test_resume import SignalAt
from tests.training.test_training import BadGradient
from vsa.data.codecs import HaarCodec
from vsa.data.toy_videos import render_clip
from vsa.files import DiskFullError
from vsa.reports.run_page import write_run_page
from vsa.sampling.sample_writer import DATA_CLIPS
from vsa.training import ending
from vsa.training.callbacks.samples import Samples
from vsa.training.display import never_fatal
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import RunStatus
from vsa.training.summary import closing_lines

ROOT = Path(__file__).parents[2]


def test_a_training_that_changes_nothing_does_not_finish(training):
    """A loss of NaN from the first step on ended with status 0 where the run was shorter than `task.max_skipped`."""
    with pytest.raises(FloatingPointError, match="gradients were not finite in any of 3 steps"):
        training("trainer.max_steps=3", callbacks=(BadGradient(range(3)),))
    ends = json.loads((training.folder() / "run.json").read_text())
    assert "not finite in any of 3 steps" in json.dumps(ends)
    # a step that was taken is enough, wherever it stands
    training("run=one", "trainer.max_steps=3", callbacks=(BadGradient((1, 2)),))
    training("run=two", "trainer.max_steps=3", callbacks=(BadGradient((0, 1)),))


class Lines(logging.Handler):
    """Lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What rank 0 says."""
    handler = Lines()
    rank_zero_module.log.addHandler(handler)
    yield handler.lines
    rank_zero_module.log.removeHandler(handler)


def table(told: list[str]) -> dict[str, str]:
    """The summary by label; "" is its first line."""
    (first,) = (i for i, line in enumerate(told) if line.startswith(("finished at ", "stopped at ", "failed at ")))
    rows = [line.strip().partition("  ") for line in told[first + 1 :] if line.startswith("  ")]
    return {"": told[first]} | {label: text.strip() for label, _, text in rows}


# with the last step, by an error, by a signal


def test_the_page_of_a_run_shows_its_starts_and_real_clips(training, told, monkeypatch, drawn):  # noqa: F811 (the fixture)
    # not the stand-in of tiny runs
    monkeypatch.setattr(ending, "write_run_page", lambda run: write_run_page(run))
    prompts = ("callbacks.samples.prompts=[red]", "callbacks.samples.steps=1")
    with pytest.raises(SystemExit):
        training("trainer.max_steps=3", *prompts, callbacks=(SignalAt(0, signal.SIGTERM),))
    folder = training.folder()
    assert table(told)["page"] == f"{folder}/report.html"
    assert "stopped at step 1 of 3" in (folder / "report.html").read_text()
    training("trainer.max_steps=3", "ckpt_path=last", *prompts)
    first, second = json.loads((folder / "run.json").read_text())["starts"]
    assert [(s["step"], s["last_step"], s["how"]) for s in (first, second)] == [(0, 1, "stopped"), (1, 3, "finished")]
    assert first["reason"] == "SIGTERM"
    assert first["environment"]["versions"]["torch"] == torch.__version__
    assert first["environment"]["attention_backend"] == training.last(folder).state["attention_backend"] == "gather"
    text = (folder / "report.html").read_text()
    assert "finished at step 3 of 3" in text
    clips = json.loads((folder / DATA_CLIPS / "samples.json").read_text())["clips"]
    # no clip is called red: those that are held out
    assert len(clips) == 4
    for clip in clips:
        number = int(clip["sample"].rpartition("-")[2])
        video, caption, _ = render_clip(0, number, size=(8, 64, 64))
        codec = HaarCodec()
        error = (codec.decode(codec.encode(video)).double() - video.double()).square().mean()
        assert clip["psnr"] == pytest.approx(10 * np.log10(255**2 / float(error)), abs=0.01)
        assert clip["prompt"] == caption
        # the file is that clip, to the colours of a GIF
        with Image.open(folder / DATA_CLIPS / clip["original"]) as picture:
            first = np.asarray(picture.convert("RGB"), dtype=float)
        assert np.abs(first - video[0].numpy()).mean() < 4
        assert np.abs(first - render_clip(0, number + 1, size=(8, 64, 64))[0][0].numpy()).mean() > 4
        assert text.count(f'alt="{clip["prompt"]}"') >= 2


@pytest.mark.parametrize("broken", ["error", "slow"])
def test_a_page_that_cannot_be_written_costs_one_line(training, told, monkeypatch, broken):
    free = threading.Event()

    def write(run):
        if broken == "error":
            raise OSError("no room")
        free.wait()

    monkeypatch.setattr(ending, "write_run_page", write)
    if broken == "slow":
        monkeypatch.setattr(ending, "PAGE_SECONDS", 0.01)
    training("trainer.max_steps=1")
    free.set()
    page = training.folder() / "report.html"
    lines = {"error": f"{page} is missing: OSError: no room", "slow": f"{page} took more than 0.01 s"}
    assert [line for line in told if line.startswith("warning")] == [
        line for line in told if line.startswith(f"warning: {lines[broken]}")
    ]
    assert table(told)[""].startswith("finished at step 1 of 1")
    assert "page" not in table(told)


def test_a_finished_run_says_how_it_went_and_where_all_is(training, told):
    prompts = ("""callbacks.samples.prompts=["it's red",blue]""", "callbacks.samples.steps=1")
    training("trainer.max_steps=3", "trainer.val_check_interval=2", *prompts)
    folder, losses, rows = training.folder(), training.losses(), training.metrics()
    summary = table(told)
    assert summary.pop("").startswith("finished at step 3 of 3: 3 steps in ")
    assert summary == {
        "train/loss": f"{float(losses[1]):.4g} at step 1, {float(losses[3]):.4g} at step 3",
        "val/loss": f"{float(rows[2]['val/loss']):.4g} at step 2, {float(rows[3]['val/loss']):.4g} at step 3",
        "checkpoint": f"{folder}/checkpoints/step-00000003",
        "metrics": f"{folder}/metrics.csv",
        "samples": f"{folder}/samples/step-00000003",
        "pictures": f"{folder}/attention.png, {folder}/loss.png",
        "page": f"{folder}/report.html",
        "next": f"""vsa sample {folder} --prompt 'it'"'"'s red'""",
    }
    # useful lines of lightning stay, its adverts do not
    assert any(line.startswith("GPU available: ") for line in told)
    assert not [line for line in told if "litlogger" in line or "litmodels" in line]


@pytest.mark.parametrize(
    ("number", "every", "curve"),
    [
        pytest.param(signal.SIGTERM, 1000, False, marks=pytest.mark.slow),
        (signal.SIGINT, 1000, False),
        (signal.SIGTERM, 1, True),
    ],
)
def test_a_signal_before_the_first_logged_row_ends_well(training, told, number, every, curve):
    # a validation may be logged before the first loss is
    overrides = ("trainer.max_steps=9", "trainer.log_every_n_steps=9", f"trainer.val_check_interval={every}")
    with pytest.raises(SystemExit) as stop:
        training(*overrides, callbacks=(SignalAt(1, number),))
    assert stop.value.code == 128 + number
    checkpoint = training.folder() / "checkpoints" / "step-00000002"
    assert f"{signal.Signals(number).name}: saved {checkpoint}, continue with ckpt_path=last" in told
    summary = table(told)
    assert summary[""].startswith("stopped at step 2 of 9: 2 steps in ")
    assert summary["checkpoint"] == str(checkpoint)
    assert summary["next"] == "the same command with ckpt_path=last continues from there"
    assert not [line for line in told if line.startswith("warning")]
    assert (training.folder() / "loss.png").exists() == curve
    assert ("val/loss" in summary) == curve


def test_a_failed_run_names_its_last_checkpoint(training, told):
    bad = BadGradient({3, 4, 5})
    with pytest.raises(FloatingPointError):
        training("trainer.max_steps=9", "task.max_skipped=3", callbacks=(bad,))
    summary = table(told)
    assert summary[""].startswith("failed at step 5 of 9: 5 steps in ")
    assert summary["checkpoint"] == f"{training.folder()}/checkpoints/step-00000004"
    assert summary["next"] == "the same command with ckpt_path=last continues from there"
    assert "samples" not in summary


def test_a_run_that_fails_before_its_first_checkpoint_says_so(training, told):
    every = "callbacks.checkpoint.every_n_steps=100"
    with pytest.raises(FloatingPointError):
        training(every, "task.max_skipped=1", callbacks=(BadGradient({1}),))
    summary = table(told)
    assert summary["checkpoint"] == "none was written"
    assert "next" not in summary


class Fill(L.Callback):
    """The disk has room for short files only from some micro-batch on."""

    def __init__(self, batch: int):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_ends_with_the_checkpoint_before(training, told):
    # the limit that stood before is put back at the end
    with small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[0]), pytest.raises(DiskFullError) as failure:
        training("trainer.max_steps=6", callbacks=(Fill(3),))
    checkpoints = training.folder() / "checkpoints"
    assert str(failure.value).startswith(f"cannot write {checkpoints}/step-00000004: File too large (")
    assert [p.name for p in checkpoints.iterdir()] == ["step-00000002"]
    assert table(told)["checkpoint"] == f"{checkpoints}/step-00000002"
    training("trainer.max_steps=6", "ckpt_path=last")
    assert sorted(training.losses()) == [1, 2, 3, 4, 5, 6]


class Full(Logger):
    """A tracker whose disk is full from its third row on."""

    name, version = "full", None

    def __init__(self):
        super().__init__()
        self.rows = 0

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows += 1
        if self.rows > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finalize(self, status):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_tracker_that_cannot_write_never_stops_the_run(training, told, monkeypatch):
    logger, callbacks = Full(), run_module._callbacks

    def with_logger(cfg, folder, loggers):
        loggers.append(logger)
        return callbacks(cfg, folder, loggers)

    monkeypatch.setattr(run_module, "_callbacks", with_logger)
    training()
    assert training.last().step == 4
    assert logger.rows > 4
    lines = [line for line in told if "Full" in line]
    assert len(lines) == 2
    assert lines[0].startswith("warning: Full cannot write (")
    assert lines[1] == f"warning: Full could not write {logger.rows - 2 + 1} times"


def test_pictures_and_clips_that_fail_cost_a_line_each(training, told, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no font\nfound")

    clips = ("callbacks.samples.prompts=[red]", "callbacks.samples.steps=1", "callbacks.samples.every_n_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(module_module, "loss_curve", fail)
        patch.setattr(samples_module, "draw_attention", fail)
        patch.setattr(samples_module, "write_clips", fail)
        training(*clips)
    folder = training.folder()
    names = ["samples/step-00000002", "samples/step-00000004", "attention.png", "loss.png"]
    expected = {f"warning: {folder}/{name} is missing: RuntimeError: no font found" for name in names}
    assert {line for line in told if line.startswith("warning")} == expected
    assert training.last().step == 4
    assert table(told)[""].startswith("finished at step 4 of 4")
    # what makes the clips is no picture
    with monkeypatch.context() as patch:
        patch.setattr(samples_module, "generate", fail)
        with pytest.raises(RuntimeError, match="no font"):
            training(*clips, "run=second")


def test_an_assertion_is_a_defect_and_no_missing_picture():
    def broken() -> None:
        with never_fatal("picture"):
            raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        broken()


def test_the_summary_tells_only_what_there_is(tmp_path):
    common: dict[str, Any] = {"metrics": ("fake_score/loss", "val/gap")}
    common |= {"start": 40, "step": 41, "max_steps": -1, "page": None}
    unsaved, saved = (RunStatus(trained_seconds=20, saved=path) for path in (None, Path("x")))
    (tmp_path / "metrics.csv").write_text("step,fake_score/loss,val/gap\n41,nan,\n")
    lines = closing_lines(tmp_path, unsaved, how="failed", seconds=3725, **common)
    assert lines == [
        "failed at step 41: 1 step in 20 s of training, 1 h 2 min in all",
        "  fake_score/loss  nan at step 41",
        "  checkpoint       none was written",
        f"  metrics          {tmp_path}/metrics.csv",
    ]
    (tmp_path / "metrics.csv").unlink()
    lines = closing_lines(tmp_path, saved, how="finished", seconds=59.6, **common)
    assert lines == [
        "finished at step 41: 1 step in 20 s of training, 1 min 0 s in all",
        "  checkpoint  x",
        f"  next        vsa sample {tmp_path} --prompt TEXT",
    ]
    # a signal that came when all steps were done, perhaps before the last validation
    (*_, row) = closing_lines(tmp_path, saved, how="stopped", seconds=1, **{**common, "max_steps": 41})
    assert row == "  next        the same command with ckpt_path=last continues from there"


# without a step


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}


def test_a_run_that_has_its_steps_does_nothing_and_says_so(training, told, monkeypatch):
    training("trainer.max_steps=2")
    before, path = files(training.output), training.folder() / "checkpoints" / "step-00000002"
    told.clear()
    for steps in (2, 1):
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "_trainer", None)
            training(f"trainer.max_steps={steps}", "ckpt_path=last")
        line = f"nothing to do: {path} is already at step 2 and trainer.max_steps={steps}: give a larger one"
        assert told == [f"resuming from {path}", line]
        told.clear()
    assert files(training.output) == before
    training("trainer.max_steps=3", "ckpt_path=last")
    assert table(told)[""].startswith("finished at step 3 of 3: 1 step in ")


def test_a_new_run_of_no_steps_is_refused(training):
    with pytest.raises(ValueError, match=r"trainer\.max_steps=0 trains nothing: expected at least 1, or -1 for no end"):
        training("trainer.max_steps=0")
    assert not training.folder().exists()


def test_a_run_without_an_end_goes_on_until_a_signal(training, told, capsys):
    bar = "callbacks.progress={_target_:vsa.training.callbacks.progress.TimedProgressBar,log_seconds:1e-9}"
    endless = ("trainer.max_steps=-1", "trainer.enable_progress_bar=true", bar)
    with pytest.raises(SystemExit) as stop:
        training(*endless, callbacks=(SignalAt(4, signal.SIGTERM),))
    assert stop.value.code == 143
    # the bar knows no end either
    assert "| 5/? [" in capsys.readouterr().out
    assert table(told)[""].startswith("stopped at step 5: 5 steps in ")


# signals while no step is in hand


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def before(function: Callable) -> Callable:
    return lambda *args, **kwargs: (terminate(), function(*args, **kwargs))[1]


def after(function: Callable) -> Callable:
    return lambda *args, **kwargs: (function(*args, **kwargs), terminate())[0]


@pytest.mark.parametrize(
    ("owner", "name", "when", "word"),
    [
        (DiffusionModule, "configure_model", before, "stopped"),
        pytest.param(Samples, "on_train_end", before, "saved", marks=pytest.mark.slow),
        pytest.param(L.Trainer, "_teardown", after, "saved", marks=pytest.mark.slow),
        (run_module, "train", after, "stopped"),
    ],
    ids=["while it is set up", "while its pictures are drawn", "when it is put away", "between two jobs"],
)
def test_sigterm_ends_a_whole_sweep_at_any_time(
    training, tiny_overrides, tmp_path, monkeypatch, owner, name, when, word
):
    arguments = [*tiny_overrides, "trainer.max_steps=2", f"output_dir={training.output}", "run=a,b"]

    def sweep() -> None:
        monkeypatch.setattr(owner, name, when(getattr(owner, name)))
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
        rank_zero_module.log.addHandler(logging.FileHandler(tmp_path / "told"))
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    child = multiprocessing.get_context("fork").Process(target=sweep)
    child.start()
    child.join(HANGS)
    assert child.exitcode == 143
    folder = training.folder("a")
    assert not training.folder("b").exists()
    lines = (tmp_path / "told").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("SIGTERM: "))
    step = folder / "checkpoints" / "step-00000002"
    end = "continue with ckpt_path=last, which makes up for the validation and clips of the end"
    what = {"saved": f"saved {step}, {end}", "stopped": "stopped, there was nothing to save"}
    assert line == f"SIGTERM: {what[word]}"
    assert not [line for line in lines if "Received SIGTERM" in line]
    assert step.exists() == (name != "configure_model")


def test_the_handler_that_stood_before_a_command_stands_after(monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    within = []
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(launch_module, "_do", lambda *_: within.append(signal.getsignal(signal.SIGTERM)))
    launch_module.launch([])
    assert within != [handler]
    assert signal.getsignal(signal.SIGTERM) == handler


class LastClips(L.Callback):
    """A signal to one rank when all steps are done."""

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            terminate()


@pytest.mark.slow
def test_a_signal_to_one_of_several_ranks_during_the_last_clips_ends_all(training):
    def on_rank(rank: int) -> int | str | None:
        with pytest.raises(SystemExit) as stop:
            training("trainer=ddp", "trainer.accelerator=cpu", "trainer.max_steps=2", callbacks=(LastClips(),))
        return stop.value.code

    assert run_ranks(2, on_rank) == [143, 0]
    assert training.last().step == 2
    assert (training.folder() / "loss.png").exists()
