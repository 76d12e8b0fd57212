"""Distillations that are killed, resumed, spread over ranks: the same run, bit for bit, or a refusal."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as library_load
from safetensors.torch import save_file as library_save

from tests.commands import run_command
from tests.limits import HANGS
from tests.states import largest_difference, rewrite_state, state_of
from tests.tiny_runs import TinyTraining
from tests.training.distillations import (
    DENSE,
    DISTILL,
    GAN,
    TOLD,
    At,
    checkpoints,
    different,
    everything,
)
from tests.training.ranks import run_ranks
from vsa.cli.convert import convert
from vsa.training.run_state import tensors_of

# resume


CYCLE = (
    *("task.generator_every=3", "callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=9"),
    *("sparsity=linear", "sparsity.topk=2", "sparsity.dense_steps=1", "sparsity.total_steps=8"),
    *("~sparsity.sparsity", "task.fake_score_warmup=1", "trainer.accumulate_grad_batches=2"),
    *("trainer.val_check_interval=6", "trainer.max_steps=8"),
)


@pytest.fixture(scope="module")
def straight(teacher_dir, tmp_path_factory) -> TinyTraining:
    """A run of some cycles that nothing interrupts, with a checkpoint of every iteration."""
    training = TinyTraining(tmp_path_factory.mktemp("straight"), pytest.MonkeyPatch())
    training(*DISTILL, f"init_from={teacher_dir}", *CYCLE)
    return training


@pytest.mark.parametrize("phase", [0, *(pytest.param(phase, marks=pytest.mark.slow) for phase in (1, 2))])
def test_a_run_killed_at_any_phase_resumes_bit_for_bit(distill, training, straight, phase):
    iteration = 3 + phase

    def victim() -> None:
        def kill(trainer, module):
            os.kill(os.getpid(), signal.SIGKILL)

        distill(*CYCLE, callbacks=(At(iteration, before=kill),))

    child = multiprocessing.get_context("fork").Process(target=victim)
    child.start()
    child.join(HANGS)
    assert child.exitcode == -signal.SIGKILL
    assert training.last().step == iteration
    half = everything(training.last())
    distill(*CYCLE, "ckpt_path=last")
    end = everything(straight.last())
    assert different(everything(training.last()), end) == set()
    assert different(half, end) == {"model", "ema", "optimizer", "fake_score", "fake_score_optimizer"}
    rows, resumed_rows = straight.metrics(), training.metrics()
    assert set(rows) == set(resumed_rows)
    timings = ("throughput/step_seconds", "throughput/tokens_per_second", "throughput/tflops")
    for step, row in rows.items():
        ours, theirs = (
            {k: v for k, v in r.items() if v and not k.startswith(timings)} for r in (row, resumed_rows[step])
        )
        assert ours == theirs, step
    states = [
        {k: v for k, v in runs.last().state.items() if k not in ("config", "files")} for runs in (straight, training)
    ]
    assert states[0] == states[1]


@pytest.mark.slow
def test_what_a_checkpoint_leaves_out_would_be_missed(distill, training, straight):
    """The control of the resume: each group that is changed changes the run."""
    end, half = everything(straight.last()), straight.folder() / "checkpoints" / "step-00000007"
    for group in ("model", "optimizer", "fake_score", "fake_score_optimizer"):

        def scale(trainer, module, group=group):
            tensors = tensors_of(module.parts())[group]
            with torch.no_grad():
                for value in tensors.values():
                    value.mul_(1.01)

        distill(*CYCLE, f"run={group}", f"ckpt_path={half}", callbacks=(At(7, before=scale),))
        assert different(everything(training.last(group)), end)


def test_a_resume_with_another_cycle_or_teacher_is_refused(distill, training, teacher_dir):
    distill("task.generator_every=2", "trainer.max_steps=1", "run=cycle")
    same = ("trainer.max_steps=2", "run=cycle", "ckpt_path=last")
    for overrides, message in (
        (("task.generator_every=1",), "was trained with task.generator_every=2, the settings have 1"),
        (("task.generator_every=2", "task.fake_score_warmup=4"), "task.fake_score_warmup=0, the settings have 4"),
        (("task.generator_every=2", "task.objective.timesteps=[1000,300]"), r"timesteps=\[1000.0, 757.0, 522.0\], the"),
        (("task.generator_every=2", "task.teacher=elsewhere"), r"cannot be opened \(no such folder: elsewhere"),
        (("task.generator_every=2", "task.objective.source=data_latent"), "with task.objective.source=simulate, the"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(*same, *overrides, "resume.allow=[task]")
    with pytest.raises(ValueError, match=r"task.generator_every=2, the settings have 1: resume.allow=\[task.gen"):
        distill(*same, "task.generator_every=1")
    sparse = ("start=dense", f"init_from={teacher_dir}")
    with pytest.raises(ValueError, match=r"is a checkpoint of vsa\.training\.modules\.distill\.DistillModule"):
        training("task=finetune", *sparse, *same)
    path = training.last("cycle").path
    state = state_of(path)
    for key in ("collapse", "fake_score", "step_list", "teacher"):
        rewrite_state(path, key)
        with pytest.raises(ValueError, match=f"not a complete checkpoint of this run: missing {key}"):
            distill(*same, "task.generator_every=2", f"ckpt_path={path}")
        rewrite_state(path, **state)
    # what may change: the rule, and when it is allowed learning rates and guidance
    free = ("task.generator_every=2", "optim.lr=0.02", "task.objective.guidance=1", "task.collapse=null")
    distill(*same, *free, "resume.allow=[optim.lr,task.objective.guidance]")
    assert training.last("cycle").step == 2


def test_a_folder_as_teacher_is_pinned_by_what_it_was(distill, training, tmp_path):
    """Weights in diffusers' layout are read once: what becomes of their folder meanwhile changes nothing."""
    folder = tmp_path / "dense"
    # diffusers has no absolute positions
    plain = "model.absolute_positions=false"
    training(*DENSE, plain, "run=plain", "trainer.max_steps=1")
    run_command(convert, training.folder("plain"), folder, "--to", "diffusers")
    own = (plain, "task.latent_scale=shared", f"task.teacher={folder}", f"init_from={folder}", "task.generator_every=1")
    removal = At(1, before=lambda trainer, module: folder.rename(tmp_path / "away"))
    distill(*own, "trainer.max_steps=2", "run=moved", "callbacks.checkpoint.every_n_steps=1", callbacks=(removal,))
    shutil.copytree(tmp_path / "away", folder)
    distill(*own, "trainer.max_steps=3", "run=moved", "ckpt_path=last")
    digest = training.last("moved").state["teacher"]["digest"]
    assert digest
    weights = next(folder.glob("*.safetensors"))
    library_save({name: value * 1.01 for name, value in library_load(weights).items()}, weights)
    with pytest.raises(ValueError, match=r"is not what .*moved.* began with, or has changed since"):
        distill(*own, "trainer.max_steps=5", "run=moved", "ckpt_path=last")


def test_a_distilled_model_is_no_teacher(distill, training, teacher_dir):
    dense = [o for o in DISTILL if not o.startswith("attention.")]
    training(
        *dense, "attention=full", "~attention.tile_thw", f"init_from={teacher_dir}", "run=few", "trainer.max_steps=1"
    )
    with pytest.raises(ValueError, match=r"is distilled already, to the timesteps \[1000.0, 757.0, 522.0\]"):
        distill(f"init_from={training.folder('few')}", "run=again")


def test_the_frozen_teacher_is_outside_of_the_checkpoint_and_pinned(distill, training, teacher_dir, tmp_path):
    own = tmp_path / "teacher"
    shutil.copytree(teacher_dir, own)
    distill(f"init_from={own}", "trainer.max_steps=1", "run=pinned")
    state = training.last("pinned").state
    assert Path(state["teacher"]["source"]).is_relative_to(own)
    assert {name.removesuffix(".safetensors") for name in state["files"]} == {
        "model", "ema", "optimizer", "fake_score", "fake_score_optimizer",
    }  # fmt: skip
    # the start is gone, the teacher is found where it was; another one in its place is refused
    distill(f"init_from={own}", "trainer.max_steps=2", "run=pinned", "ckpt_path=last")
    assert training.last("pinned").step == 2
    # moved, and named where it is now
    own.rename(tmp_path / "moved")
    again = ("trainer.max_steps=3", "run=pinned", "ckpt_path=last")
    with pytest.raises(ValueError, match=r"cannot be opened .* set task\.teacher= to its new place"):
        distill(f"init_from={own}", *again)
    distill(f"init_from={own}", f"task.teacher={tmp_path / 'moved'}", *again)
    assert training.last("pinned").step == 3
    training(*DENSE, "seed=1", "run=other", "trainer.max_steps=1")
    shutil.copytree(training.folder("other"), own)
    with pytest.raises(ValueError, match=r"is not what .*pinned.* began with, or has changed since"):
        distill(f"init_from={own}", f"task.teacher={own}", "trainer.max_steps=5", "run=pinned", "ckpt_path=last")


# several ranks


@pytest.mark.soak("any number of ranks is one process, over a resume too")
@pytest.mark.parametrize(
    ("trainer", "term", "sequence"),
    [
        ("fsdp", ("model.num_layers=1",), 1),
        pytest.param("fsdp", (GAN, TOLD), 1, marks=pytest.mark.slow),
        pytest.param("ddp", (GAN, TOLD), 2, marks=pytest.mark.slow),
        pytest.param("ddp", (), 1, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_one(distill, training, trainer, term, sequence):
    term += ("model.num_attention_heads=2", "model.attention_head_dim=6") if sequence > 1 else ()
    steps, every = (3, 2) if sequence == 1 else (12, 8)
    training(*DENSE, *(o for o in term if o.startswith("model.")))
    common = (
        f"init_from={training.folder('dense')}",
        *term,
        "task.generator_every=2",
        f"callbacks.checkpoint.every_n_steps={every}",
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={every}",
    )
    distill(*common, "run=one")
    spread = (
        f"trainer={trainer}",
        "trainer.accelerator=cpu",
        "trainer.accumulate_grad_batches=2",
        f"trainer.val_check_interval={2 * every}",
        f"task.parallel.sequence={sequence}",
    )

    def on_rank(rank: int) -> None:
        distill(*common, *spread, "run=two")
        source = checkpoints(training.folder("one"))[0].path
        distill(*common, *spread, "run=resumed", f"ckpt_path={source}")

    run_ranks(2, on_rank)
    bound = 1e-6 if sequence == 1 else 1e-5
    one = everything(training.last("one"))
    assert largest_difference(one, everything(training.last("two"))) < bound
    assert largest_difference(one, everything(training.last("resumed"))) < bound
    rows, others = training.metrics("one"), training.metrics("two")
    for step, row in rows.items():
        for name in ("fake_score/loss", "dmd/gap", "generated/std", "fake_score/grad_norm/total", "val/gap", "val/std"):
            assert (row[name] == "") == (others[step][name] == "")
            assert row[name] == "" or float(row[name]) == pytest.approx(float(others[step][name]), rel=1e-6), name
    assert {step for step, row in rows.items() if row["val/gap"]} == {every}
    # control: the last iteration moved everything by more
    half = checkpoints(training.folder("one"))[0]
    assert half.step == every
    assert largest_difference(everything(half), one) > 1e-3
