"""A run that was stopped and resumed is the run that was not: losses and tensors bit for bit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_module

import vsa.checkpoints.run_checkpoint as checkpointing
import vsa.training.start as start_module
from tests.limits import HANGS
from tests.states import rewrite_state, state_of
from tests.tiny_runs import TinyTraining
from vsa.training.run_state import BACKEND, LEVEL

ROOT = Path(__file__).parents[2]


class SignalAt(L.Callback):
    """Sends this process a signal while micro-batch `batch` (counted over the run from 0) is in hand."""

    def __init__(self, batch: int, number: int, times: int = 1):
        self.batch, self.number, self.times = batch, number, times

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


class CountBatches(L.Callback):
    def __init__(self):
        self.steps, self.validations, self.lrs = [], 0, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(batch.step)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def on_validation_start(self, trainer, pl_module):
        self.validations += 1


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def assert_moved(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The control: one step apart, the same comparison fails."""
    assert any(not torch.equal(a[name], b[name]) for name in a)


def train_apart(factory: pytest.TempPathFactory, *overrides: str) -> TinyTraining:
    """A run of a folder that tests only read."""
    with pytest.MonkeyPatch.context() as patch:
        runs = TinyTraining(factory.mktemp("apart"), patch)
        runs(*overrides)
    return runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> TinyTraining:
    """A run of 6 steps that nothing stopped."""
    return train_apart(tmp_path_factory, "trainer.max_steps=6")


@pytest.mark.parametrize(
    ("number", "status", "accumulate"),
    [
        pytest.param(signal.SIGTERM, 143, 1, marks=pytest.mark.slow),
        (signal.SIGINT, 130, 1),
        (signal.SIGTERM, 143, 2),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(training, straight, tmp_path_factory, number, status, accumulate):
    common = ("trainer.max_steps=6", f"trainer.accumulate_grad_batches={accumulate}")
    if accumulate > 1:
        straight = train_apart(tmp_path_factory, *common)
    # a job started in the background inherits an ignored SIGINT: whatever stood before must stand after
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    # in the first micro-batch of step 4: the step is finished first
    with pytest.raises(SystemExit) as stop:
        training(*common, callbacks=(SignalAt(3 * accumulate, number),))
    assert stop.value.code == status
    assert training.last().step == 4
    assert sorted(training.losses()) == [1, 2, 3, 4]
    half = training.tensors()
    assert {n: signal.getsignal(n) for n in handlers} == handlers

    counter = CountBatches()
    training(*common, "ckpt_path=last", callbacks=(counter,))
    # a seek, not a replay
    assert counter.steps == [s for s in range(4, 6) for _ in range(accumulate)]
    assert training.losses() == straight.losses()
    assert len(set(training.losses().values())) == 6
    same = ("grad_norm/total", "lr", "throughput/flops_total", "skipped_steps")
    for step, row in training.metrics().items():
        assert [row[k] for k in same] == [straight.metrics()[step][k] for k in same]
    assert_same(training.tensors(), straight.tensors())
    assert_moved(half, straight.tensors())


def test_the_format_of_checkpoints_stays(training):
    training("trainer.max_steps=2", "run=half")
    path = training.last("half").path
    state = state_of(path)
    # nothing may be missing but what earlier ones lacked (test_recomputation.py)
    for key in sorted(set(state) - {"schema", LEVEL, BACKEND}):
        rewrite_state(path, key)
        with pytest.raises(ValueError, match=key if key != "config" else "is a checkpoint of None"):
            training("run=half", f"ckpt_path={path}")
        rewrite_state(path, **state)
    counters = {"step", "skipped_steps", "skipped_in_row", "flops_total"}
    data = {"plan_hash", "codec", "text_encoder", "latent_shapes", "latent_mean", "latent_std"}
    parts = {"sparsity_state", "loss_window", "bad_samples", "without_gradient", "allowed_changes", LEVEL, BACKEND}
    assert set(state) == {"schema", "files", "seed", "config", *counters, *data, *parts}
    assert set(state["loss_window"]) == {"names", "steps", "deciles"}
    assert set(state["files"]) == {"model.safetensors", "ema.safetensors", "optimizer.safetensors"}


def test_a_log_line_goes_on_over_a_resume(training):
    settings = ("trainer.log_every_n_steps=4", "trainer.max_steps=8")
    training(*settings, "run=straight")
    # in the middle of the second line
    with pytest.raises(SystemExit):
        training(*settings, callbacks=(SignalAt(5, signal.SIGTERM),))
    assert len(training.last().state["loss_window"]["steps"]) == 2
    training(*settings, "ckpt_path=last")
    names = ["train/loss", *(f"train/loss_decile_{d}" for d in range(10))]
    ours, straight = (
        {name: row[8].get(name) for name in names} for row in (training.metrics(), training.metrics("straight"))
    )
    assert ours == straight
    assert sum(bool(value) for value in ours.values()) > 5


def test_a_signal_saves_and_stops_without_validation_or_samples(training):
    counter = CountBatches()
    samples = ("callbacks.samples.prompts=[a red circle moving left slowly]", "callbacks.samples.steps=1")
    with pytest.raises(SystemExit):
        training(*samples, callbacks=(SignalAt(0, signal.SIGTERM), counter))
    assert counter.steps == [0]
    assert counter.validations == 0
    assert training.last().step == 1
    assert not (training.folder() / "samples").exists()


def test_a_second_interrupt_ends_the_run_at_once(training):
    with pytest.raises(SystemExit) as stop:
        training(callbacks=(SignalAt(3, signal.SIGINT, times=2),))
    assert stop.value.code == 130
    # the periodic checkpoint stands, the step in hand is lost
    assert training.last().step == 2


@pytest.mark.parametrize("when", ["in a step", "in a save"])
def test_a_killed_run_resumes_from_its_last_whole_checkpoint(training, straight, monkeypatch, when):
    def victim() -> None:
        if when == "in a save":
            replace, names = os.replace, []

            def kill_second(source, target):
                if Path(target).name.startswith("step-"):
                    names.append(target)
                    if len(names) == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                replace(source, target)

            monkeypatch.setattr(os, "replace", kill_second)
            training("trainer.max_steps=6")
        training("trainer.max_steps=6", callbacks=(SignalAt(3, signal.SIGKILL),))

    child = multiprocessing.get_context("fork").Process(target=victim)
    child.start()
    child.join(HANGS)
    assert child.exitcode == -signal.SIGKILL
    litter = [p for p in (training.folder() / "checkpoints").iterdir() if p.name.startswith(".")]
    assert len(litter) == (when == "in a save")
    assert training.last().step == 2
    training("trainer.max_steps=6", "ckpt_path=last")
    assert training.losses() == straight.losses()
    assert_same(training.tensors(), straight.tensors())
    assert not [p for p in (training.folder() / "checkpoints").iterdir() if p.name.startswith(".")]


def test_a_kill_right_after_a_save_loses_no_metric(training):
    common = ("trainer.max_steps=5", "callbacks.checkpoint.every_n_steps=1", "trainer.val_check_interval=3")
    training(*common, "run=straight")

    def victim() -> None:
        training(*common, callbacks=(SignalAt(3, signal.SIGKILL),))

    child = multiprocessing.get_context("fork").Process(target=victim)
    child.start()
    child.join(HANGS)
    assert child.exitcode == -signal.SIGKILL
    assert training.last().step == 3
    training(*common, "ckpt_path=last")
    metrics, straight = training.metrics(), training.metrics("straight")
    assert straight[3]["val/loss"]
    for step, row in straight.items():
        names = {name for name in row if row[name] and not name.startswith("throughput/")}
        assert {name: metrics[step][name] for name in names} == {name: row[name] for name in names}


def test_as_many_checkpoints_are_kept_as_asked_for(training):
    training("trainer.max_steps=5", "callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=3")
    names = [p.name for p in checkpointing.list_checkpoints(training.folder() / "checkpoints")]
    assert names == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_run_that_went_back_goes_on_from_the_line_it_trains(training, straight, capsys):
    training("trainer.max_steps=6", "callbacks.checkpoint.keep=3")
    folder = training.folder() / "checkpoints"
    with pytest.raises(SystemExit):
        training("trainer.max_steps=6", f"ckpt_path={folder}/step-00000002", callbacks=(SignalAt(0, signal.SIGTERM),))
    assert training.last().step == 3
    assert sorted(training.losses()) == [1, 2, 3]
    aside = folder / "abandoned-after-step-00000002"
    assert [p.name for p in checkpointing.list_checkpoints(aside)] == ["step-00000004", "step-00000006"]
    training("trainer.max_steps=6", "ckpt_path=last")
    assert training.losses() == straight.losses()
    assert_same(training.tensors(), straight.tensors())
    # the point where the lines part stays
    names = [p.name for p in checkpointing.list_checkpoints(folder)]
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_damaged_checkpoint_is_skipped_and_the_one_before_it_resumed(training, straight, capsys):
    training("trainer.max_steps=4")
    whole = training.folder() / "checkpoints" / "step-00000004" / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-8])
    training("trainer.max_steps=6", "ckpt_path=last")
    assert "step-00000004 is damaged: model.safetensors" in capsys.readouterr().out
    assert training.losses() == straight.losses()
    assert_same(training.tensors(), straight.tensors())


def test_a_run_is_not_resumed_as_another_model_of_the_same_tensors(training):
    training("trainer.max_steps=2")
    before = training.tensors()
    for override, message in (
        ("model.absolute_positions=true", r"has model\.absolute_positions=False, the model has True"),
        ("model.rope_theta=100", r"has model\.rope_theta=10000\.0, the model has 100"),
    ):
        with pytest.raises(ValueError, match=message):
            training("ckpt_path=last", override, "resume.allow=[model]")
    assert_same(training.tensors(), before)


def test_resuming_a_finished_run_changes_nothing(training):
    training()
    before, losses = training.tensors(), training.losses()
    training("ckpt_path=last")
    assert_same(training.tensors(), before)
    assert training.losses() == losses
    # and longer: the end is a setting
    training("ckpt_path=last", "trainer.max_steps=5")
    assert sorted(training.losses()) == [1, 2, 3, 4, 5]


def test_validation_stands_at_the_same_steps_after_a_resume(training):
    common = ("trainer.max_steps=6", "trainer.val_check_interval=2", "trainer.accumulate_grad_batches=2")
    training(*common, "run=straight")
    with pytest.raises(SystemExit):
        training(*common, callbacks=(SignalAt(4, signal.SIGTERM),))
    training(*common, "ckpt_path=last")
    losses = {step: row["val/loss"] for step, row in training.metrics("straight").items()}
    # every 2 micro-batches are one step
    assert all(losses.values())
    assert len(set(losses.values())) > 3
    # that of step 3 was cut short by the signal
    assert {step: row["val/loss"] for step, row in training.metrics().items()} == losses
    last = {run: (training.folder(run) / "validation.csv").read_bytes() for run in ("default", "straight")}
    assert last["default"] == last["straight"]
    assert last["default"].splitlines()[1].startswith(b"6,current,toy-")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Files with what they hold, and folders."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> TinyTraining:
    """A run that is never changed, whatever is tried."""
    return train_apart(tmp_path_factory, "trainer.max_steps=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "already holds checkpoints.*ckpt_path=last.*overwrite=true"),
        (("ckpt_path=last", "seed=1"), r"was trained with seed=0, the settings have 1: resume\.allow=\[seed\] lets"),
        (
            ("ckpt_path=last", "optim.lr=1", "resume.allow=[optim.lr_factors]"),
            r"with optim\.lr=0\.01, the settings have 1:",
        ),
        (("ckpt_path=last", "resume.allow=[optim.lrr]"), r"unknown setting optim\.lrr, did you mean optim\.lr or"),
        (("overwrite=true", "resume.allow=[optim.lrr]"), r"unknown setting optim\.lrr, did you mean optim\.lr or"),
        # what is allowed must still fit
        (("ckpt_path=last", "seed=1", "resume.allow=[seed]"), "another data plan"),
        (("ckpt_path=last", "data.batch_size=2", "resume.allow=[data]"), "another data plan"),
        (
            ("ckpt_path=last", "model.ffn_dim=36", "resume.allow=[model.ffn_dim]"),
            r"blocks\.0\.ffn.*has shape \(24, 12\), the model needs \(36, 12\)",
        ),
        (
            ("ckpt_path=last", "attention.fine_gate=false", "resume.allow=[attention]"),
            "has 4 tensors the model has no place for: .*to_gate_fine",
        ),
        (("ckpt_path=last", "run=other"), "no valid checkpoint in .*other"),
        (("ckpt_path=nowhere", "run=other"), "no such checkpoint or run folder: nowhere"),
        (("init_from=nowhere", "run=other"), "no such folder: nowhere"),
        (("ckpt_path=last", "init_from=nowhere"), "init_from=nowhere, but the run of ckpt_path=last began from None"),
        (("overwrite=true", "sparsity.topk=99", "sparsity.sparsity=null"), "topk=99 is above the number of tiles, 8"),
        (("overwrite=true", "run=."), "run=. is not a name"),
        # found out by the loaders, which are made last
        (("overwrite=true", "data.num_workers=-1"), r"data\.num_workers=-1: expected"),
        (
            ("ckpt_path=last", "resume.allow=[callbacks]", "callbacks.ema={_target_:vsa.training.callbacks.ema.EMA}"),
            "trained without callbacks.ema",
        ),
    ],
)
def test_refused_starts_leave_the_run_as_it_was(two_steps, tmp_path_factory, overrides, message):
    training = two_steps
    if "ema" in message:
        training = train_apart(tmp_path_factory, "trainer.max_steps=2", "callbacks.ema=null")
    before = contents(training.output)
    with pytest.raises(ValueError, match=message):
        training("trainer.max_steps=4", *overrides)
    assert contents(training.output) == before


def test_a_resume_tells_which_settings_changed(training, monkeypatch):
    messages = []
    monkeypatch.setattr(start_module, "rank_zero_info", messages.append)
    training("trainer.max_steps=2")
    messages.clear()
    overrides = (
        "ckpt_path=last",
        "optim.lr=0.001",
        "sparsity.sparsity=0.75",
        "callbacks.samples.fps=4",
        "logger.csv=null",
    )
    with pytest.raises(
        ValueError, match=r"sparsity=0.5, the settings have 0.75; optim.lr=0.01, the settings have 0.001: "
    ):
        training("trainer.max_steps=3", *overrides)
    training("trainer.max_steps=3", *overrides, "resume.allow=[optim.lr,sparsity]")
    lines = [line for line in messages if "differ" in line]
    changes = "sparsity.sparsity 0.5 -> 0.75, optim.lr 0.01 -> 0.001, trainer.max_steps 2 -> 3"
    assert lines == [f"settings that differ from the checkpoint's: {changes}"]
    sparsity, lr = training.last().state["allowed_changes"]
    assert sparsity == {"step": 2, "key": "sparsity.sparsity", "before": 0.5, "now": 0.75}
    assert lr == {"step": 2, "key": "optim.lr", "before": 0.01, "now": 0.001}
    # nothing changed: nothing is said
    messages.clear()
    training("trainer.max_steps=3", "ckpt_path=last", "optim.lr=0.001", "sparsity.sparsity=0.75")
    assert [line for line in messages if "differ" in line] == []
    # the record goes on
    more = ("optim.lr=0.001", "sparsity.sparsity=0.75", "task.grad_clip=2", "resume.allow=[task.grad_clip]")
    training("trainer.max_steps=4", "ckpt_path=last", *more)
    assert training.last().state["allowed_changes"][:2] == [sparsity, lr]
    assert training.last().state["allowed_changes"][2]["key"] == "task.grad_clip"


def test_overwrite_starts_anew(training):
    training("trainer.max_steps=4")
    (training.folder() / "stale.txt").write_text("of the old run")
    training("trainer.max_steps=2", "overwrite=true", "seed=5")
    assert not (training.folder() / "stale.txt").exists()
    assert training.last().step == 2
    assert sorted(training.losses()) == [1, 2]


class FirstWeights(L.Callback):
    """What a run starts from."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {n: p.detach().clone() for n, p in pl_module.model.named_parameters()}
        self.step, self.state = trainer.global_step, dict(trainer.optimizers[0].state)


@pytest.mark.parametrize("with_ema", [True, False])
def test_init_from_takes_weights_only(training, with_ema):
    training("run=first", *([] if with_ema else ["callbacks.ema=null"]))
    first, counter = FirstWeights(), CountBatches()
    source = training.folder("first") / "checkpoints" / "step-00000004"
    training(f"init_from={source}", "seed=3", "run=second", "trainer.max_steps=2", callbacks=(first, counter))
    expected = training.last("first").tensors("ema" if with_ema else "model")
    assert_same(first.weights, expected)
    assert (first.step, first.state) == (0, {})
    assert counter.steps == [0, 1]
    # warm-up begins again
    assert counter.lrs == [0.005, 0.01]
    steps = {v.item() for k, v in training.last("second").tensors("optimizer").items() if k.endswith("/step")}
    assert steps == {2}


class Forked(multiprocessing.get_context("fork").Process):
    """`train.py` in a copy of this process, with the methods of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], told: Path):
        super().__init__()
        self.arguments, self.told = arguments, told

    def run(self) -> None:
        rank_zero_module.log.addHandler(logging.FileHandler(self.told))
        sys.argv = ["train.py", *self.arguments]
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode


@pytest.mark.parametrize("start", ["fork", pytest.param("command", marks=pytest.mark.slow)])
def test_sigterm_of_the_real_process(training, tiny_overrides, tmp_path, start):
    arguments = [*tiny_overrides, f"output_dir={training.output}", "trainer.max_steps=100000"]
    arguments += ["trainer.log_every_n_steps=1", "callbacks.checkpoint.every_n_steps=100000"]
    if start == "fork":
        process = Forked(arguments, tmp_path / "err")
        process.start()
    else:
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(tmp_path / "err", "w") as err:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment, cwd=tmp_path)
    metrics = training.folder() / "metrics.csv"
    deadline = time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            process.terminate()
            break
        time.sleep(0.05)
    try:
        assert process.wait(HANGS) == 143, (tmp_path / "err").read_text()
    finally:
        process.kill()
        process.wait()
    step = training.last().step
    output = (tmp_path / "err").read_text()
    assert "SIGTERM: saving after this step" in output
    assert f"SIGTERM: saved {training.folder()}/checkpoints/step-{step:08d}, continue with ckpt_path=last" in output
    assert step > 2
    losses = training.losses()
    assert sorted(losses) == list(range(1, step + 1))
    # the same run in this process
    training(f"trainer.max_steps={step}", "run=here")
    assert training.losses("here") == losses
