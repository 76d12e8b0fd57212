"""Several ranks are one: weights, averages, moments and metrics of a run do not depend on how it is spread."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from torch.distributed.fsdp import FSDPModule

import vsa.checkpoints.run_checkpoint as checkpointing
import vsa.data.plan_datamodule as plan_datamodule
import vsa.training.callbacks.samples as samples
from tests.integrations.test_trained_families import Family
from tests.limits import HANGS
from tests.states import largest_difference
from tests.training.ranks import run_ranks
from vsa.attention.sequence import Division
from vsa.checkpoints.wan import export_pretrained
from vsa.config import model_factory
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.modules.pretrain import PretrainModule
from vsa.training.parallel import ShardedDataParallel, rank_zero_reports

ROOT = Path(__file__).parents[2]
# weights of different sizes inside a batch; the large eps keeps Adam from turning rounding of near-zero gradients into
# whole steps
COMMON = (
    "task.objective.weighting=sigma_sqrt",
    "optim.eps=0.01",
    "callbacks.throughput=null",
    "callbacks.samples=null",
    "callbacks.checkpoint.every_n_steps=3",
    "trainer.val_check_interval=2",
    "trainer.max_steps=4",
)
# rounding of sums in another order grows by steps: after twelve on four ranks, norms of gradients differ by 1.5e-6
OVER_TWELVE_STEPS = 1e-5
SAME = ("train/loss", "val/loss", "grad_norm/total", "lr", "skipped_steps")


class SignalTo(L.Callback):
    """Sends this process SIGTERM in an optimizer step counted from 1."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def assert_same_metrics(
    a: dict[int, dict[str, str]], b: dict[int, dict[str, str]], names: tuple[str, ...] = SAME, rel: float = 1e-6
) -> None:
    assert set(a) == set(b)
    deciles = [name for name in next(iter(a.values())) if "_decile_" in name]
    assert len(deciles) > 10
    for step, row in a.items():
        for name in (*names, *deciles):
            assert (row[name] == "") == (b[step][name] == ""), (step, name)
            if row[name]:
                assert float(row[name]) == pytest.approx(float(b[step][name]), rel=rel, abs=1e-9), (step, name)


def validation(training, run: str) -> list[str]:
    return (training.folder(run) / "validation.csv").read_text().splitlines()


def ranks_are_one(training, world: int, overrides: tuple[str, ...], common: tuple[str, ...] = COMMON) -> None:
    training(*common, "run=one")
    step_3 = training.folder("one") / "checkpoints" / "step-00000003"

    def on_rank(rank: int) -> int | str | None:
        training(*common, *overrides, "run=straight")
        # only the last rank is signalled
        with pytest.raises(SystemExit) as stop:
            training(*common, *overrides, "run=stopped", callbacks=(SignalTo(3),) if rank == world - 1 else ())
        assert training.last("stopped").step == 3
        dist.barrier()
        training(*common, *overrides, "run=stopped", "ckpt_path=last")
        training(*common, *overrides, "run=from_one", f"ckpt_path={step_3}")
        return stop.value.code

    # rank 0 tells: launchers kill all ranks once one has failed
    assert run_ranks(world, on_rank) == [143] + [0] * (world - 1)
    one, straight = training.tensors("one"), training.tensors("straight")
    assert largest_difference(one, straight) < 1e-6
    assert_same_metrics(training.metrics("one"), training.metrics("straight"))
    # every sample counts once
    assert training.last("one").state["bad_samples"]["drawn"] == training.last("straight").state["bad_samples"]["drawn"]
    rows, spread = ([line.split(",")[:3] for line in validation(training, run)] for run in ("one", "straight"))
    assert rows == spread
    assert len({row["val/loss"] for row in training.metrics("one").values()} - {""}) == 2
    # resumed in as many ranks: bit for bit
    assert largest_difference(straight, training.tensors("stopped")) == 0
    assert training.metrics("stopped") == training.metrics("straight")
    # and in another number
    assert largest_difference(one, training.tensors("from_one")) < 1e-6
    source = training.folder("straight") / "checkpoints" / "step-00000003"
    training(*common, "run=to_one", f"ckpt_path={source}")
    assert largest_difference(one, training.tensors("to_one")) < 1e-6
    # control: the steps after the stop do move everything
    half = {
        f"{group}/{name}": value
        for group in ("model", "ema", "optimizer")
        for name, value in checkpointing.read_checkpoint(step_3).tensors(group).items()
    }
    assert largest_difference(half, one) > 1e-2


@pytest.mark.soak("any number of ranks is one process, over a resume too")
@pytest.mark.parametrize("trainer", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_ranks_are_one(training, trainer):
    ranks_are_one(training, 2, (f"trainer={trainer}", "trainer.accelerator=cpu"))


@pytest.mark.soak("any number of ranks is one process, over a resume too")
@pytest.mark.slow
def test_four_ranks_in_two_copies_are_one(training):
    ranks_are_one(training, 4, ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.strategy.replicate=2"))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_samples_are_one(training, world):
    # 3 x 3 x 4 tokens in tiles of which the last ones are partial: 2, 1, 2, 1
    heads = ("model.num_attention_heads=2", "model.attention_head_dim=6")
    shared = ("trainer=fsdp", "trainer.accelerator=cpu", "task.parallel.sequence=2")
    ranks_are_one(training, world, shared, (*COMMON, *heads))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sequence", "heads", "trainer"),
    [(2, 2, 2, "fsdp"), (4, 4, 2, "fsdp"), (2, 2, 3, "ddp"), (4, 2, 4, "ddp")],
)
def test_twelve_steps_and_clips_of_shared_samples_are_one(training, monkeypatch, world, sequence, heads, trainer):
    # 2 x 5 x 7 tokens, in tiles of which the last ones are partial
    common = (
        *COMMON,
        f"model.num_attention_heads={heads}",
        "model.attention_head_dim=6",
        "data.toy.size=[8,80,112]",
        "attention.tile_thw=[1,2,2]",
        "trainer.max_steps=12",
        "trainer.val_check_interval=6",
        "callbacks.samples.prompts=[a red square]",
        "callbacks.samples.steps=4",
        "callbacks=diagnostics",
        "callbacks.diagnostics.every_n_steps=6",
    )
    common = tuple(o for o in common if o != "callbacks.samples=null")
    shared = (f"trainer={trainer}", "trainer.accelerator=cpu", f"task.parallel.sequence={sequence}")
    clips, generate, gather = [], samples.generate, Division.gather
    monkeypatch.setattr(samples, "generate", lambda *given: clips.append(generate(*given)) or clips[-1])
    training(*common, "run=one")

    def on_rank(rank: int) -> list[np.ndarray]:
        clips.clear()
        training(*common, *shared, "run=several")
        return [clip.numpy() for clip in clips]

    several = run_ranks(world, on_rank)
    # every group of ranks measures attention on samples of its own
    recall = tuple(name for name in training.metrics("one")[6] if name.startswith("diag/recall"))
    assert recall
    recall = recall if world == sequence else ()
    assert_same_metrics(training.metrics("one"), training.metrics("several"), (*SAME, *recall), OVER_TWELVE_STEPS)
    assert largest_difference(training.tensors("one"), training.tensors("several")) < 1e-5
    for theirs in several:
        for clip, other in zip(clips, theirs, strict=True):
            assert (clip.int() - torch.from_numpy(other).int()).abs().max() <= 1
    # control: gradients of the ranks that share a sample are averaged, not summed
    monkeypatch.setattr(
        Division, "gather", lambda self, x: gather(self, x / sequence + x.detach() * (1 - 1 / sequence))
    )
    run_ranks(world, lambda rank: training(*common, *shared, "run=averaged") and None)
    assert largest_difference(training.tensors("one"), training.tensors("averaged")) > 1e-3
    with pytest.raises(AssertionError):
        assert_same_metrics(training.metrics("one"), training.metrics("averaged"), rel=OVER_TWELVE_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cogvideox", "hunyuan", "hunyuan15", "minimax_h3"])
def test_twelve_steps_of_rows_with_text_are_one(tmp_path, monkeypatch, name):
    # 2 x 5 x 7 tokens, in tiles of which the last ones are partial, and texts of several lengths
    family, gather = Family(name, tmp_path), Division.gather
    common = (*COMMON, "data.toy.size=[8,80,112]", "trainer.max_steps=12", "trainer.val_check_interval=6")
    shared = ("trainer=fsdp", "trainer.accelerator=cpu", "task.parallel.sequence=2")
    family.train(*common, "run=one")
    run_ranks(2, lambda rank: family.train(*common, *shared, "run=several"))
    assert_same_metrics(family.runs.metrics("one"), family.runs.metrics("several"), rel=OVER_TWELVE_STEPS)
    one = family.runs.tensors("one")
    assert largest_difference(one, family.runs.tensors("several")) < 1e-5
    # control: gradients of the ranks that share a sample are averaged, not summed
    monkeypatch.setattr(Division, "gather", lambda self, x: gather(self, x / 2 + x.detach() / 2))
    run_ranks(2, lambda rank: family.train(*common, *shared, "run=averaged"))
    assert largest_difference(one, family.runs.tensors("averaged")) > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "setting", ["trainer=ddp", "trainer=fsdp", "task.parallel.sequence=2", "task.parallel.offload=true"]
)
def test_two_gpus_are_one(training, setting):
    common = (
        *COMMON,
        "trainer.max_steps=12",
        "trainer.val_check_interval=6",
        "trainer.accelerator=gpu",
        "task.parallel.compute_dtype=float32",
        "model.num_attention_heads=2",
        "model.attention_head_dim=6",
    )
    # forks use GPUs if this process has not
    run_ranks(1, lambda _: training(*common, "run=one") and None)
    run_ranks(2, lambda _: training(*common, "trainer=fsdp", "trainer.devices=2", setting, "run=two") and None)
    assert_same_metrics(training.metrics("one"), training.metrics("two"), rel=OVER_TWELVE_STEPS)
    difference = largest_difference(training.tensors("one"), training.tensors("two"))
    print(f"{setting}: weights, averages and moments differ by {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.slow
def test_broken_slices_and_scales_would_be_seen(training, monkeypatch):
    few = (*COMMON, "trainer.max_steps=1")
    training(*few, "run=one")
    fsdp = ("trainer=fsdp", "trainer.accelerator=cpu")
    part, backward = plan_datamodule.PlanDataModule._part, PretrainModule.manual_backward

    def first_part(self):
        return plan_datamodule.RankSlice(accumulate=1, rank=0, world=part(self).world)

    def on_rank(rank: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plan_datamodule.PlanDataModule, "_part", first_part)
            training(*few, *fsdp, "run=slice")
        with monkeypatch.context() as patch:
            patch.setattr(PretrainModule, "manual_backward", lambda self, loss: backward(self, loss / 2))
            training(*few, *fsdp, "run=scale")

    run_ranks(2, on_rank)
    for run in ("slice", "scale"):
        assert largest_difference(training.tensors("one"), training.tensors(run)) > 1e-5, run


LORA = "+task.lora={_target_:vsa.checkpoints.lora.LoRA,rank:2,alpha:2}"


@pytest.mark.soak("any number of ranks is one process, over a resume too")
@pytest.mark.slow
@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize(("start", "extra"), [("run", ()), ("folder", (LORA,))], ids=["teacher", "adapters"])
def test_finetuning_on_two_ranks_is_one(training, start, extra, sequence):
    # what diffusers' layout can express
    small = (*COMMON, "model.absolute_positions=false")
    small += ("model.num_attention_heads=2", "model.attention_head_dim=6") if sequence > 1 else ()
    full = (*small, "run=dense", "attention=full", "~attention.tile_thw")
    # far from its start, so that what it wants is no small thing
    training(*full, "trainer.max_steps=4", "optim.eps=1e-8")
    dense = training.last("dense").tensors("ema")
    source = training.folder("dense")
    if start == "folder":
        source = export_pretrained(
            model_factory(training.config(*full))(), training.output / "folder", sparse=None, tensors=dense.__getitem__
        )
    common = (
        *small,
        "task=finetune",
        "start=dense",
        f"init_from={source}",
        "task.objective.velocity=0.5",
        f"task.objective.attention={0.5 * (sequence - 1)}",
        "optim.lr=0.1",
    )
    steps, every = (3, 2) if sequence == 1 else (12, 6)
    common += (f"trainer.max_steps={steps}", f"callbacks.checkpoint.every_n_steps={every}", *extra)
    fsdp = ("trainer=fsdp", "trainer.accelerator=cpu", f"task.parallel.sequence={sequence}")
    training(*common, "run=one")

    def on_rank(rank: int) -> None:
        training(*common, *fsdp, "run=straight")
        half = training.folder("straight") / "checkpoints" / f"step-{every:08d}"
        # the checkpoint has no teacher: it comes from where the run began, which the checkpoint knows
        settings = [o for o in common if not o.startswith("init_from=")]
        training(*settings, *fsdp, "run=resumed", f"ckpt_path={half}")

    run_ranks(2, on_rank)
    one, straight = training.tensors("one"), training.tensors("straight")
    assert largest_difference(one, straight) < (1e-6 if sequence == 1 else 1e-5)
    assert_same_metrics(training.metrics("one"), training.metrics("straight"), (*SAME, "train/loss_velocity"))
    assert largest_difference(straight, training.tensors("resumed")) == 0
    # frozen weights are those it began from, under the names they had
    frozen = [name for name in straight if name.startswith("model/") and ".base_layer." in name]
    assert len(frozen) == (0 if not extra else 2 * 10 * 2)
    assert all(torch.equal(straight[n], dense[n.removeprefix("model/").replace(".base_layer.", ".")]) for n in frozen)
    # control: the teacher does steer what is trained
    training(*common, "run=alone", "task.objective.velocity=0")
    assert largest_difference(one, training.tensors("alone")) > 1e-4


class Reductions(L.Callback):
    """Whether a micro-batch left reduced gradients."""

    def __init__(self):
        self.seen = []

    def on_after_backward(self, trainer, pl_module):
        blocks = (p for name, p in pl_module.named_parameters() if name.startswith("model.blocks."))
        self.seen.append(all(p.grad is not None for p in blocks))


def test_accumulated_gradients_are_reduced_once_a_step(training):
    few = (*COMMON, "trainer.max_steps=2", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=1000")
    training(*few, "run=one")

    def on_rank(rank: int) -> list[list[bool]]:
        reductions = []
        for each in (False, True):
            callback = Reductions()
            sharding = ("trainer=fsdp", "trainer.accelerator=cpu", f"trainer.strategy.reduce_each={str(each).lower()}")
            # blocks that are run again in the backward pass gather their weights again
            again = f"task.parallel.activation_checkpointing={'full' if each else 'attention_mlp'}"
            training(*few, *sharding, again, f"run=each_{each}", callbacks=(callback,))
            reductions.append(callback.seen)
        return reductions

    assert run_ranks(2, on_rank)[0] == [[False, True] * 2, [True, True] * 2]
    for run in ("each_False", "each_True"):
        assert largest_difference(training.tensors("one"), training.tensors(run)) < 1e-6


def test_state_in_the_memory_of_the_host_is_the_same(training):
    few = (*COMMON, "model.num_layers=1", "trainer.val_check_interval=1000")
    few += ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.accumulate_grad_batches=2")
    policies: list[str] = []

    class Places(L.Callback):
        def on_train_start(self, trainer, pl_module):
            groups = [m._get_fsdp_state()._fsdp_param_group for m in pl_module.modules() if isinstance(m, FSDPModule)]
            policies.extend(type(group.offload_policy).__name__ for group in groups if group is not None)

    def on_rank(rank: int) -> set[str]:
        training(*few, "run=here")
        half = training.folder("here") / "checkpoints" / "step-00000003"
        host = (*few, "task.parallel.offload=true")
        training(*host, "run=host", callbacks=(Places(),))
        training(*host, "run=resumed", f"ckpt_path={half}", callbacks=(Places(),))
        return set(policies)

    assert run_ranks(2, on_rank) == [{"CPUOffloadPolicy"}] * 2
    for run in ("host", "resumed"):
        assert largest_difference(training.tensors("here"), training.tensors(run)) == 0
    assert training.metrics("host") == training.metrics("here")
    with pytest.raises(ValueError, match="offload=true is for FSDP2: set trainer=fsdp"):
        training(*COMMON, "task.parallel.offload=true", "run=one")


# checkpoints


def test_a_full_disk_of_one_rank_ends_all(training, monkeypatch):
    few = (*COMMON, "model.num_layers=1", "callbacks.checkpoint.every_n_steps=1", "trainer=fsdp")
    few += ("trainer.val_check_interval=1000",)
    save_file = checkpointing.save_file

    def full_from_second(path, parts):
        # of the second rank alone, when the first checkpoint stands
        if "step-00000001" not in str(path) and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return save_file(path, parts)

    def full_disk(logger, rows):
        raise OSError(28, "No space left on device")

    def on_rank(rank: int) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(checkpointing, "save_file", full_from_second)
            with pytest.raises(OSError) as failure:
                training(*few, "trainer.accelerator=cpu", "run=checkpoint")
        # no room for a row of metrics costs that row
        with monkeypatch.context() as patch:
            patch.setattr(MetricsCSV, "_append", full_disk)
            training(*few, "trainer.accelerator=cpu", "run=metrics", "trainer.max_steps=2")
        return str(failure.value)

    first, second = run_ranks(2, on_rank)
    assert first.startswith("rank 1: cannot write ")
    assert "step-00000002: No space left on device (" in second
    assert [training.last(run).step for run in ("checkpoint", "metrics")] == [1, 2]


class Begin(L.Callback):
    """What a resumed rank goes on from."""

    def on_train_start(self, trainer, pl_module):
        self.found = (pl_module.resume.path.name, trainer.global_step, trainer.datamodule.start_step)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.first = min(batch.step, getattr(self, "first", batch.step))


@pytest.mark.parametrize("task", ["pretrain", pytest.param("finetune", marks=pytest.mark.slow)])
def test_ranks_share_the_reading_of_digests_and_take_the_newest_good_one(training, monkeypatch, task):
    common = (*COMMON, "model.num_layers=1", "callbacks.checkpoint.every_n_steps=1", "trainer.max_steps=2")
    common += ("trainer.val_check_interval=1000",)
    if task == "finetune":
        # its teacher is found again through the checkpoint that is resumed
        training(
            *COMMON, "model.num_layers=1", "run=dense", "attention=full", "~attention.tile_thw", "trainer.max_steps=4"
        )
        common += ("task=finetune", "start=dense", "task.objective.velocity=0.5")
        training(*common, f"init_from={training.folder('dense')}")
    else:
        training(*common)
    shutil.copytree(training.folder(), training.folder("straight"))
    training(*common, "trainer.max_steps=3", "run=straight", "ckpt_path=last")
    straight = training.tensors("straight")
    newest = training.folder() / "checkpoints" / "step-00000002" / "model.safetensors"
    whole = bytearray(newest.read_bytes())
    # in full length: only its digest tells
    whole[-1] ^= 1
    newest.write_bytes(whole)
    digest, read = checkpointing.file_digest, []

    def spy(path):
        read.append(path)
        return digest(path)

    def on_rank(rank: int) -> tuple[list[str], tuple[str, int, int], int]:
        monkeypatch.setattr(checkpointing, "file_digest", spy)
        begin = Begin()
        # a step more than the damaged one has: with no step left every rank would read all to know whether that is so
        training(*more, "trainer=fsdp", "trainer.accelerator=cpu", "ckpt_path=last", callbacks=(begin,))
        return [f"{path.parent.name}/{path.name}" for path in read], begin.found, begin.first

    more = (*common, "trainer.max_steps=3")
    (first, *begin), (second, *also) = run_ranks(2, on_rank)
    assert begin == also == [("step-00000001", 1, 1), 1]
    # the second rank reads a share, finds the damage, and reads the same share of the one before
    shares = [f"step-0000000{step}/model.safetensors" for step in (2, 1)]
    # a teacher is looked at by every rank
    assert [path for path in second if "step-00000004" not in path] == shares
    # the first one all the others, in no order
    assert {f"step-0000000{step}/{name}.safetensors" for step in (2, 1) for name in ("ema", "optimizer")} <= set(first)
    assert largest_difference(straight, training.tensors()) < 1e-6


# starting


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(launcher: str) -> list[str]:
    """Two ranks of `train.py`, started by Lightning or by torchrun."""
    script, devices = str(ROOT / "train.py"), ["trainer.accelerator=cpu"]
    if launcher == "lightning":
        return [sys.executable, script, *devices, "trainer.devices=2"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, *devices]


@pytest.mark.slow
def test_torchrun_starts_what_it_says(training, tiny_overrides, tmp_path):
    words = [*command("torchrun"), *tiny_overrides, f"output_dir={training.output}", "trainer.max_steps=2"]
    words += ["trainer=fsdp"]
    result = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    assert "Starting with 2 processes" in result.stderr
    assert result.stderr.count("run folder: ") == 1
    assert sorted(training.losses()) == [1, 2]
    assert training.last().step == 2


def in_a_fork(arguments: list[str], folder: Path) -> tuple[int | None, str]:
    """Status and stderr of a Python script: its own process needs no imports, those that it starts do."""

    def run() -> None:
        os.chdir(folder)
        with open("err", "w") as err:
            os.dup2(err.fileno(), 2)
        sys.stderr = sys.__stderr__
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(HANGS)
    process.kill()
    return process.exitcode, (folder / "err").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "setting", "told"),
    [
        *(
            (launcher, "data.batch_size=3", "data.batch_size=3 must be a multiple of the 2 micro-batches")
            for launcher in ("lightning", "torchrun")
        ),
        (
            "torchrun",
            "task.parallel.sequence=3",
            "task.parallel.sequence=3 must divide the number of ranks, which is 2",
        ),
        ("lightning", "task.parallel.sequence=2", "task.parallel.sequence=2: score=random needs all heads on one rank"),
    ],
)
def test_an_error_of_all_ranks_is_reported_once(training, tiny_overrides, tmp_path, launcher, setting, told):
    # found out when both ranks stand
    words = [*command(launcher), *tiny_overrides, f"output_dir={training.output}", "trainer=ddp", setting]
    words += ["attention.score=random"] if "sequence=2" in setting else []
    if launcher == "lightning":
        status, err = in_a_fork(words[1:], tmp_path)
    else:
        result = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=HANGS)
        status, err = result.returncode, result.stderr
    assert status == 1
    assert err.count("error: ") == 1
    assert f"error: {told}" in err
    # torchrun adds one of its own
    assert "vsa/training" not in err
    assert launcher == "torchrun" or "Traceback" not in err
    assert not (training.folder() / "config.yaml").exists()


@pytest.mark.parametrize("stops", [True, False])
def test_a_failing_rank_ends_by_its_own_error_and_not_by_a_signal(stops):
    # in place of rank 0, and of a rank that it started
    main = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = subprocess.Popen(["false"])
    child.wait()
    watch = _ChildProcessObserver(main.pid, [child], sleep_period=0)
    # so that it looks after the stop, not before
    looks, look = threading.Event(), watch._run
    watch._run = lambda: looks.wait() and look()
    watch.start()
    if stops:
        with pytest.raises(ValueError, match="mine"), rank_zero_reports(ValueError):
            raise ValueError("mine")
    looks.set()
    watch.join()
    main.communicate(b"\n")
    assert main.returncode == (0 if stops else -signal.SIGKILL)


def test_ranks_wait_for_the_report_of_rank_0(monkeypatch):
    def on_rank(rank: int) -> list[list[float]]:
        waits = []
        for error in (ValueError, KeyError):
            sleeps = []
            monkeypatch.setattr(time, "sleep", sleeps.append)
            with pytest.raises(error), rank_zero_reports(ValueError, patience=42):
                raise error
            waits.append(sleeps)
        return waits

    assert run_ranks(2, on_rank) == [[[], []], [[42], []]]


@pytest.mark.slow
def test_ctrl_c_saves_once_and_ends_all_ranks(training, tiny_overrides, tmp_path):
    arguments = [*command("lightning"), *tiny_overrides, f"output_dir={training.output}", "trainer=fsdp"]
    arguments += ["trainer.max_steps=10000", "callbacks.checkpoint.every_n_steps=10000"]
    metrics = training.folder() / "metrics.csv"
    with open(tmp_path / "err", "w") as err:
        # as in a terminal, the signal goes to every process of the group
        process = subprocess.Popen(arguments, stderr=err, env=environment(), cwd=tmp_path, start_new_session=True)
        try:
            end = time.monotonic() + HANGS
            while not metrics.exists() or len(training.losses()) < 3:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(HANGS) == 130
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (tmp_path / "err").read_text()
    assert text.count("SIGINT: saving after this step") == 1
    assert text.count("SIGINT: saved ") == 1
    assert "Traceback" not in text
    # the losses of all steps, the last with the checkpoint
    assert sorted(training.losses()) == list(range(1, training.last().step + 1))


@pytest.mark.slow
def test_the_quickstart_runs_on_two_ranks(training, tmp_path):
    arguments = [*command("lightning"), "experiment=quickstart", "trainer=ddp", "trainer.max_steps=4"]
    arguments += [f"output_dir={training.output}", "data.toy.count=64", "callbacks.samples.steps=2"]
    arguments += ["callbacks.progress=null"]
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    run = training.output / "quickstart" / "default"
    assert (run / "checkpoints" / "step-00000004" / "state.json").exists()
    assert (run / "loss.png").exists()


@pytest.mark.parametrize("replicate", [0, "each", 1.5])
def test_copies_that_cannot_be_are_refused(replicate):
    with pytest.raises(
        ValueError, match=rf"replicate={replicate}: expected an integer of at least 1 or all, got {replicate!r}"
    ):
        ShardedDataParallel(replicate=replicate)


def test_copies_must_divide_the_ranks(training):
    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError) as failure:
            training("trainer=fsdp", "trainer.accelerator=cpu", "trainer.strategy.replicate=3")
        return str(failure.value)

    assert run_ranks(2, on_rank) == ["trainer.strategy.replicate=3 must divide the 2 ranks"] * 2


def test_ranks_that_do_not_fit_the_world_or_see_other_data_all_say_so(training):
    def on_rank(rank: int) -> list[str]:
        lines = []
        for own in ("trainer.devices=3", f"data.toy.count={48 - rank}", f"data.seed={rank}"):
            with pytest.raises(ValueError) as failure:
                training("trainer=fsdp", "trainer.accelerator=cpu", own)
            lines.append(str(failure.value))
        return lines

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert first[0] == "trainer.devices=3 and trainer.num_nodes=1 are 3 ranks, torchrun has started 2"
    host = re.escape(socket.gethostname())
    for line in first[1:]:
        assert re.fullmatch(
            rf"rank 1 sees other data than rank 0: on {host} \d+ training samples \(plan \w{{12}}\), and on {host} "
            r"\d+ training samples \(plan \w{12}\): every host needs the same files under the data's folders",
            line,
        )
    assert not training.folder().exists()
