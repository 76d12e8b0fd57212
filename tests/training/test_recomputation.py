"""`activation_checkpointing=auto`: the level follows the memory, one that runs out included, and a run keeps it."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.states import rewrite_state
from tests.tiny_runs import TinyTraining
from tests.training.distillations import everything
from tests.training.test_ranks import RANKS, ended
from tests.training.test_resume import assert_same
from vsa.errors import MemoryRanOut
from vsa.models.recompute import LEVELS
from vsa.training.estimate.gpus import GIB, GPUS
from vsa.training.estimate.run import estimate_of
from vsa.training.gradients import GradientClipper
from vsa.training.recomputation import Recomputation
from vsa.training.run_state import LEVEL
from vsa.training.watch import LOST_STATUS

DEEP = "model.num_layers=6"
"""So many that every level needs less than the one before it."""

H200 = GPUS[0]
REASON = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 byte"


def explicit(level: str) -> str:
    return f"task.parallel.activation_checkpointing={level}"


def here(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """Lets a CPU be an H200 of that many bytes to those who ask for its memory."""
    for place in ("train", "callbacks.announcement", "callbacks.out_of_memory"):
        monkeypatch.setattr(f"vsa.training.{place}.gpu_here", lambda device: replace(H200, memory=memory))


class RunsOut(L.Callback):
    """Passes with gradients run out of memory at some levels, once each or always.

    Args:
        levels: at which they do.
        step: the first of such steps, from 0.
        micro_batch: of that step.
        backward: they do so in their backward.
        always: at every pass of these levels from there on.
        network: whose pass.
        most: samples of a micro-batch that fit all the same.
    """

    def __init__(
        self,
        *levels: str,
        step: int = 0,
        micro_batch: int = 0,
        backward: bool = False,
        always: bool = False,
        network: str = "model",
        most: int = 0,
    ):
        self.levels, self.step, self.micro_batch, self.backward = set(levels), step, micro_batch, backward
        self.always, self.network, self.most = always, network, most
        self.steps: list[int] = []
        self._held = self._nothing = lambda: None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._module = pl_module
        network = pl_module.fake_score.network if self.network == "fake_score" else pl_module.model
        network.blocks[-1].register_forward_hook(self._after)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # what the pass that was cut off has kept would lie beside what comes
        assert self._held() is None
        self._held = self._nothing
        self.steps.append(batch.step)
        self._micro_batch = batch_idx % pl_module.accumulate

    def _after(self, block: Any, inputs: Any, output: torch.Tensor) -> None:
        due = (self._module.global_step, self._micro_batch) >= (self.step, self.micro_batch)
        if not (due and output.requires_grad and self._level in self.levels and len(output) > self.most):
            return
        self._held = weakref.ref(output)
        if self.backward:
            output.register_hook(lambda gradient: self._raise())
        else:
            self._raise()

    @property
    def _level(self) -> str:
        return self._module.model.activation_checkpointing

    def _raise(self) -> None:
        if not self.always:
            self.levels.discard(self._level)
        raise torch.OutOfMemoryError(REASON)


def logged(training: TinyTraining, run: str = "default") -> list[dict[str, str]]:
    """All metrics that are not of time."""
    timings = ("throughput/step_seconds", "throughput/tokens_per_second", "throughput/tflops")
    return [{k: v for k, v in row.items() if not k.startswith(timings)} for row in training.metrics(run).values()]


def level_of(training: TinyTraining, run: str = "default") -> str:
    return training.last(run).state[LEVEL]


@pytest.fixture(scope="module")
def needed(tmp_path_factory) -> dict[str, float]:
    """Bytes that the deep tiny run needs at each level."""
    result: dict[str, float] = {}

    class Look(L.Callback):
        def setup(self, trainer, pl_module, stage):
            estimate = estimate_of(config, pl_module, trainer.datamodule, H200, ranks=1)
            result.update({level: estimate.at(level).needed for level in LEVELS})

    with pytest.MonkeyPatch.context() as patch:
        runs = TinyTraining(tmp_path_factory.mktemp("needed"), patch)
        config = runs.config(DEEP)
        runs(DEEP, "trainer.max_steps=1", callbacks=(Look(),))
    return result


# the choice


def test_each_level_needs_less(needed):
    assert list(needed) == list(LEVELS)
    assert sorted(set(needed.values()), reverse=True) == list(needed.values())


@pytest.mark.parametrize(
    ("fitting", "less", "expected"),
    [("none", 0, "none"), ("none", 1, "attention"), ("attention_mlp", 0, "attention_mlp"), ("full", 1, "full")],
)
def test_a_new_run_takes_the_least_recomputation_that_fits(
    training, needed, monkeypatch, caplog, fitting, less, expected
):
    caplog.set_level("INFO")
    here(monkeypatch, needed[fitting] - less)
    trainer = training(DEEP, "trainer.max_steps=1")
    assert trainer.lightning_module.model.activation_checkpointing == expected
    assert level_of(training) == expected
    line = next(text for text in caplog.messages if text.startswith("estimate: "))
    assert f"(activation_checkpointing={expected} by auto, 4 samples a micro-batch)" in line
    # a run that fits nowhere is told so
    assert ("warning: by the estimate it needs" in caplog.text) == (needed["full"] > needed[fitting] - less)
    (start,) = json.loads((training.folder() / "run.json").read_text())["starts"]
    assert start["environment"][LEVEL] == expected


def test_a_level_that_is_set_and_a_cpu_have_no_choice(training, needed, monkeypatch, caplog):
    caplog.set_level("INFO")
    # where no memory is known nothing is computed again
    training(DEEP, "trainer.max_steps=1", "run=cpu")
    assert level_of(training, "cpu") == "none"
    here(monkeypatch, needed["full"])
    training(DEEP, "trainer.max_steps=1", "run=set", explicit("attention"))
    assert level_of(training, "set") == "attention"
    assert "(activation_checkpointing=attention, 4 samples" in caplog.text


def test_plans_and_dry_runs_choose_too(training, needed, monkeypatch, capsys, command_line):
    here(monkeypatch, needed["attention"])
    training(DEEP, "dry_run=true")
    output = capsys.readouterr().out
    assert "activation_checkpointing=attention by auto" in output
    assert "activation_checkpointing=auto takes attention: the least recomputation that fits" in output
    # 64 samples of dit_60m, by the memory that is given
    plan = ("plan", "model=dit_60m", "model.text_dim=64", "trainer.devices=1", "--grid", "8", "16", "16")
    levels = []
    for gib in ("80", "40", "20"):
        status, out, err = command_line(*plan, "data.batch_size=64", "--gpu", "some", "--memory", gib)
        assert status == 0, err
        levels.append(next(level for level in LEVELS if f"activation_checkpointing={level} by auto" in out))
    assert levels == sorted(set(levels), key=LEVELS.index)


# memory runs out


@pytest.mark.parametrize(
    ("settings", "where", "steps"),
    [
        ((), {}, [0, 0, 1, 2, 3]),
        # in the second micro-batch of a later step, whose gradients and losses are half there
        (
            # what counts micro-batches, validations among it, must not count those that were lost
            ("trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=4", "trainer.val_check_interval=4"),
            {"step": 2, "micro_batch": 1, "backward": True},
            [0, 0, 1, 1, 2, 2, 2, 2, 3, 3],
        ),
    ],
    ids=["first", "later"],
)
def test_the_step_is_made_again_with_more_recomputation(training, caplog, settings, where, steps):
    caplog.set_level("INFO")
    training(*settings, "run=straight", explicit("attention"))
    fault = RunsOut("none", **where)
    training(*settings, callbacks=(fault,))
    # the control: the run was hit, and read the same data again
    assert fault.steps == steps
    assert fault.levels == set()
    assert_same(training.tensors(), training.tensors("straight"))
    assert logged(training) == logged(training, "straight")
    step = where.get("step", 0) + 1
    assert (
        f"out of memory in step {step} with task.parallel.activation_checkpointing=none (CUDA out of memory. Tried to "
        "allocate 2.00 GiB): the step is made again with attention"
    ) in caplog.messages
    assert "finished at step 4 of 4: 4 steps in" in caplog.text
    # the level is of the run from now on, also where nothing makes it necessary
    assert level_of(training) == "attention"
    (start,) = json.loads((training.folder() / "run.json").read_text())["starts"]
    assert start["environment"][LEVEL] == "attention"
    training(*settings, "trainer.max_steps=5", "ckpt_path=last")
    assert level_of(training) == "attention"


def test_it_goes_up_to_full_and_then_ends_with_a_setting_that_fits(training, monkeypatch):
    fault = RunsOut(*LEVELS, always=True, most=2)
    for memory in (None, 80 * GIB):
        if memory is not None:
            here(monkeypatch, memory)
        with pytest.raises(MemoryRanOut) as error:
            training(callbacks=(fault,))
        line = str(error.value)
        assert "\n" not in line
        assert line.startswith("out of memory in step 1 with task.parallel.activation_checkpointing=full (CUDA out of")
        setting = next(word for word in line.split() if word.startswith("trainer.accumulate_grad_batches="))
        assert not training.folder().exists()
    trainer = training(setting, callbacks=(fault,))
    assert trainer.global_step == 4


def test_a_level_that_is_set_is_not_changed(training):
    with pytest.raises(MemoryRanOut) as error:
        training(explicit("attention"), callbacks=(RunsOut("attention"),))
    assert str(error.value) == (
        "out of memory in step 1 with task.parallel.activation_checkpointing=attention (CUDA out of memory. Tried to "
        "allocate 2.00 GiB): task.parallel.activation_checkpointing=attention_mlp keeps less, and auto takes a level "
        "that fits"
    )
    assert not training.folder().exists()


def test_an_update_that_does_not_fit_is_no_matter_of_levels(training, monkeypatch):
    def runs_out(*args: Any) -> None:
        raise torch.OutOfMemoryError(REASON)

    monkeypatch.setattr(GradientClipper, "__call__", runs_out)
    with pytest.raises(MemoryRanOut, match=r"out of memory in the optimizer's update of step 1 .* trainer=fsdp"):
        training()


def test_other_errors_stay_what_they_are(training, monkeypatch):
    def fails(self: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(RunsOut, "_raise", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        training(callbacks=(RunsOut("none"),))


@pytest.mark.slow
def test_a_distillation_makes_an_iteration_again_before_its_first_update(distill, training):
    few = ("trainer.max_steps=2",)
    distill(*few, "run=straight", explicit("attention"))
    distill(*few, callbacks=(RunsOut("none", backward=True),))
    assert level_of(training) == "attention"
    assert_same(everything(training.last()), everything(training.last("straight")))
    # the generator of the first iteration has moved by then
    with pytest.raises(MemoryRanOut, match=r"an update has begun: set task.*=attention, which keeps less"):
        distill(*few, "run=critic", callbacks=(RunsOut("none", network="fake_score", backward=True),))


# kept


def test_a_resumed_run_keeps_its_level(training, needed, monkeypatch):
    two, four = (DEEP, "trainer.max_steps=2"), (DEEP, "trainer.max_steps=4")
    here(monkeypatch, needed["attention"])
    training(*two)
    assert level_of(training) == "attention"
    for memory in (needed["full"], 2 * needed["none"]):
        here(monkeypatch, memory)
        training(*four, "run=resumed", f"ckpt_path={training.folder()}", "callbacks.checkpoint.every_n_steps=4")
        assert level_of(training, "resumed") == "attention"
        (training.folder("resumed") / "checkpoints").rename(training.output / f"aside-{memory}")
    # the control, and what is set wins
    training(*two, "run=new")
    assert level_of(training, "new") == "none"
    training(*four, explicit("full"), "ckpt_path=last")
    assert level_of(training) == "full"
    training(DEEP, "trainer.max_steps=6", "ckpt_path=last")
    assert level_of(training) == "full"


def test_a_checkpoint_of_auto_without_its_level_is_refused(training):
    training("trainer.max_steps=2")
    rewrite_state(training.last().path, LEVEL)
    with pytest.raises(ValueError, match=f"is not a complete checkpoint of this run: missing {LEVEL}"):
        training("trainer.max_steps=4", "ckpt_path=last")


def test_checkpoints_that_do_not_say_their_level_have_that_of_their_settings(training, monkeypatch):
    # with memory for another level
    for run, settings, level, memory in (("set", (explicit("full"),), "full", 80 * GIB), ("default", (), "none", 1.0)):
        training("trainer.max_steps=2", f"run={run}", *settings)
        path = training.last(run).path
        config = training.last(run).state["config"]
        if not settings:
            config["task"]["parallel"].pop("activation_checkpointing", None)
        rewrite_state(path, LEVEL, config=config)
        assert LEVEL not in training.last(run).state
        here(monkeypatch, memory)
        training("trainer.max_steps=4", f"run={run}", "ckpt_path=last")
        assert level_of(training, run) == level
    # a damaged word is none
    checkpoint = training.last()
    assert Recomputation("auto", replace(checkpoint, state={**checkpoint.state, LEVEL: "most"})).level == "none"


# several ranks


@pytest.mark.slow
def test_with_several_ranks_one_line_names_the_level(training, tmp_path: Path):
    def on_rank(rank: int) -> None:
        training(*RANKS, callbacks=(RunsOut("none", step=2),) if rank == 1 else ())

    status, err = ended(2, on_rank, tmp_path)
    # the other one waits in a collective by then
    assert status == [LOST_STATUS, 1]
    (line,) = [line for line in err[0].splitlines() if line.startswith("error: ")]
    assert line == (
        "error: out of memory in step 3 with task.parallel.activation_checkpointing=none (CUDA out of memory. Tried to "
        "allocate 2.00 GiB), and with FSDP a step is not made again: set "
        "task.parallel.activation_checkpointing=attention, which keeps less"
    )
