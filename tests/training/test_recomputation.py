"""`activation_checkpointing=auto`: the level follows the memory, a run keeps it, and out of memory is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.states import rewrite_state
from tests.tiny_runs import TinyTraining
from tests.training.ranks import run_ranks
from tests.training.test_ranks import RANKS, ended
from tests.training.test_resume import assert_same
from vsa.data.parallel_dims import ParallelDims
from vsa.errors import MemoryRanOut
from vsa.evaluation.figures import read_metric
from vsa.models.recompute import LEVELS
from vsa.training.estimate.gpus import GIB, GPUS
from vsa.training.estimate.run import MARGIN, estimate_of
from vsa.training.gradients import GradientClipper
from vsa.training.modules.pretrain import PretrainModule
from vsa.training.parallel import ParallelPlan
from vsa.training.run_state import LEVEL

DEEP = "model.num_layers=6"
"""So many that every level needs less than the one before it."""

H200 = GPUS[0]
REASON = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 byte"


def explicit(level: str) -> str:
    return f"task.parallel.activation_checkpointing={level}"


def here(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """Lets a CPU be an H200 of that many bytes to those who ask for its memory."""
    for place in ("train", "callbacks.print_estimate"):
        monkeypatch.setattr(f"vsa.training.{place}.gpu_here", lambda device: replace(H200, memory=memory))


class RunsOut(L.Callback):
    """Passes with gradients run out of memory at some levels.

    Args:
        levels: at which they do.
        step: the first of such steps, from 0.
        micro_batch: of that step.
        backward: they do so in their backward.
        network: whose pass.
        most: samples of a micro-batch that fit all the same.
    """

    def __init__(
        self,
        *levels: str,
        step: int = 0,
        micro_batch: int = 0,
        backward: bool = False,
        network: str = "model",
        most: int = 0,
    ):
        self.levels, self.step, self.micro_batch, self.backward = levels, step, micro_batch, backward
        self.network, self.most = network, most

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._module = pl_module
        network = pl_module.fake_score.network if self.network == "fake_score" else pl_module.model
        network.blocks[-1].register_forward_hook(self._after)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._micro_batch = batch_idx % pl_module.accumulate

    def _after(self, block: Any, inputs: Any, output: torch.Tensor) -> None:
        due = (self._module.global_step, self._micro_batch) >= (self.step, self.micro_batch)
        level = self._module.model.activation_checkpointing
        if not (due and output.requires_grad and level in self.levels and len(output) > self.most):
            return
        if self.backward:
            output.register_hook(lambda gradient: self._raise())
        else:
            self._raise()

    def _raise(self) -> None:
        raise torch.OutOfMemoryError(REASON)


class BeforeStep3(L.Callback):
    """Memory runs out before the third step, in no phase of it."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            raise torch.OutOfMemoryError(REASON)


def with_margin(memory: float) -> float:
    """Memory of a GPU on which `auto` takes a level that needs `memory`."""
    return (1 + 1e-9) * memory / (1 - MARGIN)


def level_of(training: TinyTraining, run: str = "default") -> str:
    return training.last(run).state[LEVEL]


@pytest.fixture(scope="module")
def needed(tmp_path_factory) -> dict[str, float]:
    """Bytes that the deep tiny run needs at each level."""
    result: dict[str, float] = {}

    class Look(L.Callback):
        def setup(self, trainer, pl_module, stage):
            data = trainer.datamodule
            estimate = estimate_of(
                config, pl_module, data.buckets, data.text_encoder.max_tokens, H200, dims=ParallelDims()
            )
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
    ("fitting", "share", "expected"),
    [
        # with the margin, and a little less
        ("none", 1 + 1e-9, "none"),
        ("none", 1 - 1e-9, "attention"),
        ("attention", 1 + 1e-9, "attention"),
        ("attention_mlp", 1 + 1e-9, "attention_mlp"),
        ("full", 1 + 1e-9, "full"),
        # it fits, but does not leave the margin
        ("full", 1 - MARGIN / 2, "full"),
        ("full", 1 - 2 * MARGIN, "full"),
    ],
)
def test_a_new_run_takes_the_least_recomputation_that_leaves_the_margin(
    training, needed, monkeypatch, caplog, fitting, share, expected
):
    caplog.set_level("INFO")
    memory = share * needed[fitting] / (1 - MARGIN)
    here(monkeypatch, memory)
    trainer = training(DEEP, "trainer.max_steps=1")
    assert trainer.lightning_module.model.activation_checkpointing == expected
    assert level_of(training) == expected
    line = next(text for text in caplog.messages if text.startswith("estimate: "))
    assert f"(activation_checkpointing={expected} by auto, 4 samples a micro-batch)" in line
    # a run that fits nowhere is told so
    assert ("warning: by the estimate it needs" in caplog.text) == (needed["full"] > memory)
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
    here(monkeypatch, with_margin(needed["attention"]))
    training(DEEP, "dry_run=true")
    output = capsys.readouterr().out
    assert "activation_checkpointing=attention by auto" in output
    assert (
        "activation_checkpointing=auto takes attention: the least recomputation that fits and leaves 2% of the memory"
    ) in output
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
    ("setting", "settings", "where", "step"),
    [
        ("none", (), {}, 1),
        # in the second micro-batch of a later step, whose gradients and losses are half there
        ("auto", ("trainer.accumulate_grad_batches=2",), {"step": 3, "micro_batch": 1, "backward": True}, 4),
    ],
    ids=["first", "later"],
)
def test_one_line_names_the_next_level_and_nothing_is_lost(training, setting, settings, where, step):
    settings = (*settings, "callbacks.checkpoint.every_n_steps=2")
    with pytest.raises(MemoryRanOut) as error:
        training(*settings, explicit(setting), callbacks=(RunsOut("none", **where),))
    saved = f"; ckpt_path=last continues from {training.folder()}/checkpoints/step-00000002" if step > 1 else ""
    assert str(error.value) == (
        f"out of memory in step {step} with task.parallel.activation_checkpointing=none (CUDA out of memory. Tried to "
        f"allocate 2.00 GiB): set task.parallel.activation_checkpointing=attention, which keeps less{saved}"
    )
    # an error in the first step leaves no run behind
    assert training.folder().exists() == bool(saved)
    again = ("ckpt_path=last",) if saved else ()
    training(*settings, explicit("attention"), *again, callbacks=(RunsOut("none", **where),))
    assert level_of(training) == "attention"
    training(*settings, explicit("attention"), "run=straight")
    assert_same(training.tensors(), training.tensors("straight"))


def test_beyond_full_the_line_names_smaller_micro_batches(training):
    fault = RunsOut(*LEVELS, most=2)
    with pytest.raises(MemoryRanOut) as error:
        training(explicit("full"), callbacks=(fault,))
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith("out of memory in step 1 with task.parallel.activation_checkpointing=full (CUDA out of")
    setting = next(word for word in line.split() if word.startswith("trainer.accumulate_grad_batches="))
    assert not training.folder().exists()
    trainer = training(setting, explicit("full"), callbacks=(fault,))
    assert trainer.global_step == 4
    with pytest.raises(MemoryRanOut, match="a micro-batch is one sample already"):
        training(explicit("full"), "data.batch_size=1", "run=single", callbacks=(RunsOut("full"),))


def test_an_update_that_does_not_fit_is_no_matter_of_levels(training, monkeypatch):
    def runs_out(*args: Any) -> None:
        raise torch.OutOfMemoryError(REASON)

    monkeypatch.setattr(GradientClipper, "__call__", runs_out)
    with pytest.raises(MemoryRanOut, match=r"out of memory in the optimizer's update of step 1 .* trainer=fsdp"):
        training()


def test_clips_that_do_not_fit_can_be_left_out(training, monkeypatch):
    def runs_out(*args: Any) -> None:
        raise torch.OutOfMemoryError(REASON)

    settings = ("callbacks.samples.prompts=[a,b]", "callbacks.samples.every_n_steps=2", "callbacks.samples.steps=1")
    with monkeypatch.context() as patch:
        patch.setattr("vsa.sampling.pipeline.decode_latents", runs_out)
        with pytest.raises(MemoryRanOut) as error:
            training(*settings)
    without = "callbacks.samples.prompts=[]"
    assert str(error.value) == (
        "out of memory in the clips of step 2 (CUDA out of memory. Tried to allocate 2.00 GiB): fewer "
        f"callbacks.samples.prompts take less, {without} leaves clips out; ckpt_path=last continues from "
        f"{training.folder()}/checkpoints/step-00000002"
    )
    # no word of clips or validations where memory runs out after them
    for own in (settings, ("trainer.val_check_interval=2",)):
        with pytest.raises(torch.OutOfMemoryError):
            training(*own, "run=after", "overwrite=true", callbacks=(BeforeStep3(),))
    training(*settings[1:], without, "ckpt_path=last")
    training(*settings, "run=straight")
    assert_same(training.tensors(), training.tensors("straight"))


def test_a_validation_that_does_not_fit_has_smaller_micro_batches(training, monkeypatch):
    step = PretrainModule.validation_step

    def runs_out(module: Any, batch: Any, batch_idx: int) -> None:
        if len(batch.latents) > 2:
            raise torch.OutOfMemoryError(REASON)
        step(module, batch, batch_idx)

    monkeypatch.setattr(PretrainModule, "validation_step", runs_out)
    settings = ("callbacks.checkpoint.every_n_steps=2", "trainer.val_check_interval=2")
    with pytest.raises(MemoryRanOut) as error:
        training(*settings)
    line = str(error.value)
    assert line.startswith(
        "out of memory in the validation after step 2 (CUDA out of memory. Tried to allocate 2.00 GiB): "
    )
    assert "\n" not in line
    setting = next(word for word in line.split() if word.startswith("trainer.accumulate_grad_batches="))
    training(*settings, setting, "ckpt_path=last")
    # that validation is made up for; the interval counts micro-batches
    assert read_metric(training.folder() / "metrics.csv", "val/loss")[0].tolist() == [2, 3, 4]


def test_other_errors_stay_what_they_are(training, monkeypatch):
    def fails(self: Any) -> None:
        raise RuntimeError("a defect")

    class AfterTheStep(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise torch.OutOfMemoryError(REASON)

    # no level keeps less of what is outside of steps
    with pytest.raises(torch.OutOfMemoryError):
        training(callbacks=(AfterTheStep(),))
    monkeypatch.setattr(RunsOut, "_raise", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        training("run=other", callbacks=(RunsOut("none"),))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["model", "fake_score"])
def test_a_distillation_names_the_next_level(distill, network):
    with pytest.raises(MemoryRanOut, match=r"out of memory in step 1 with .*: set task.*=attention, which keeps less"):
        distill("trainer.max_steps=2", callbacks=(RunsOut("none", network=network, backward=True),))


# kept


@pytest.mark.slow
def test_a_resumed_run_keeps_its_level(training, needed, monkeypatch):
    two, four = (DEEP, "trainer.max_steps=2"), (DEEP, "trainer.max_steps=4")
    here(monkeypatch, with_margin(needed["attention"]))
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


@pytest.mark.slow
def test_checkpoints_without_a_level_have_that_of_their_settings(training, monkeypatch):
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
    assert ParallelPlan().resumed({**training.last().state, LEVEL: "most"}).level == "none"


# several ranks


@pytest.mark.slow
def test_the_line_is_that_of_every_rank(training, tmp_path: Path):
    def on_rank(rank: int) -> None:
        training(*RANKS, callbacks=(RunsOut("none", step=2),) if rank == 1 else ())

    status, err = ended(2, on_rank, tmp_path)
    # the other one waits in a collective by then
    assert status == [1, 1]
    line = (
        "out of memory in step 3 with task.parallel.activation_checkpointing=none (CUDA out of memory. Tried to "
        "allocate 2.00 GiB): set task.parallel.activation_checkpointing=attention, which keeps less; ckpt_path=last "
        f"continues from {training.last().path}"
    )
    assert [text for text in err[0].splitlines() if text.startswith("error: ")] == [f"error: {line}"]
    assert err[1].splitlines()[-1] == f"vsa.errors.MemoryRanOut: {line}"


@pytest.mark.slow
def test_ranks_take_the_level_of_the_smallest_gpu(training, needed, monkeypatch, tmp_path: Path):
    def on_rank(rank: int) -> str:
        # alone, the first one would keep everything
        here(monkeypatch, (2.0, 0.5)[rank] * needed["none"])
        trainer = training(DEEP, *RANKS, "trainer.max_steps=1")
        return trainer.lightning_module.model.activation_checkpointing

    assert run_ranks(2, on_rank) == ["full", "full"]
