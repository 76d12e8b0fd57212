"""Rows about runs that are killed and resumed: they end with the bits of a run that nothing interrupted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_runs import TinyTraining, one_thread, training  # noqa: F401
from tests.training.conftest import distill, teacher_dir  # noqa: F401
from tests.training.distillations import DISTILL
from tests.training.ranks import Ranks, wait_for
from vsa.checkpoints.run_checkpoint import list_checkpoints
from vsa.data.codecs import HaarCodec
from vsa.data.datamodule import LatentDataModule
from vsa.data.plan import split_ids
from vsa.data.shard_writer import ShardWriter
from vsa.data.text import HashedNgramEncoder

STEPS = 24
COMMON = (f"trainer.max_steps={STEPS}", "callbacks.checkpoint.every_n_steps=3", "data.val_batches=1")
ACCUMULATED = "trainer.accumulate_grad_batches=2"
ANNEALED = ("~sparsity.sparsity", "sparsity=linear", "sparsity.topk=2", "sparsity.dense_steps=3")
ANNEALED += ("sparsity.total_steps=20",)
FSDP, DDP = "trainer=fsdp", "trainer=ddp"
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("data.num_workers=1",),
    ("data.num_workers=2", "data.toy.count=12"),
    (FSDP,),
    ("data.num_workers=1", ACCUMULATED),
    (DDP, "data.num_workers=1"),
    ("data.num_workers=2", "trainer.val_check_interval=5"),
    ANNEALED,
    (FSDP, ACCUMULATED),
    ("task.grad_clip=0.01", "data.toy.count=12"),
)
TIMES = ("time", "second", "tflops", "mfu", "wait", "memory")
"""Parts of the names of metrics that differ between equal runs."""


def world_of(settings: Sequence[str]) -> int:
    return 2 if {FSDP, DDP} & set(settings) else 1


def record_of(runs: TinyTraining, run: str = "default") -> tuple[dict[str, Any], dict[int, dict[str, str]]]:
    """What equal runs share: the newest checkpoint with the digests of its tensors, and all metrics but times."""
    state = {key: value for key, value in runs.last(run).state.items() if key != "config"}
    rows = runs.metrics(run).items()
    return state, {
        step: {key: value for key, value in row.items() if not any(part in key for part in TIMES)} for step, row in rows
    }


def finish(runs: TinyTraining, settings: Sequence[str], folder: Path) -> None:
    """Train to the end."""
    with Ranks(world_of(settings), lambda _: runs(*settings), folder) as ranks:
        assert set(ranks.statuses()) == {0}, ranks.output()[-2000:]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], tuple[Any, ...]]:
    """`straight(settings)`: the record of the run that nothing interrupts, trained once."""
    records: dict[tuple[str, ...], tuple[Any, ...]] = {}

    def record(settings: tuple[str, ...]) -> tuple[Any, ...]:
        if settings not in records:
            folder = tmp_path_factory.mktemp("straight")
            runs = TinyTraining(folder, pytest.MonkeyPatch())
            # composed here, for all forks
            runs.config(*settings)
            finish(runs, settings, folder / "printed")
            records[settings] = record_of(runs)
        return records[settings]

    return record


def steps_of(runs: TinyTraining, run: str = "default") -> int:
    """Steps that a run has logged so far."""
    try:
        return len((runs.folder(run) / "metrics.csv").read_text().splitlines()) - 1
    except OSError:
        return -1


def killed(runs: TinyTraining, settings: Sequence[str], step: int, draw: random.Random, folder: Path) -> bool:
    """Kill all ranks some milliseconds after a step; whether they all still ran."""
    goes_on = ["ckpt_path=last"] * bool(list_checkpoints(runs.folder() / "checkpoints"))
    with Ranks(world_of(settings), lambda _: runs(*settings, *goes_on), folder) as ranks:
        there = runs.folder().is_dir if step == 0 else lambda: steps_of(runs) >= step
        assert wait_for(lambda: there() or ranks.ended())
        time.sleep(draw.uniform(0, 0.08))
        ranks.send(signal.SIGKILL)
        return set(ranks.statuses()) == {-signal.SIGKILL}


def kill_and_finish(runs: TinyTraining, settings: tuple[str, ...], attempt: int, *, now: Sequence[str] = ()) -> None:
    """Kill a run once or twice at random moments and let it end, with the settings `now`.

    A kill that came too late is none: all are made again, earlier.
    """
    draw, folder = random.Random(attempt), runs.output / "printed"
    steps = sorted(draw.randint(0, STEPS - 2) for _ in range(1 + attempt % 2))
    while not all([killed(runs, settings, step, draw, folder) for step in steps]):
        shutil.rmtree(runs.folder())
        steps = [step // 2 for step in steps]
    there = list_checkpoints(runs.folder() / "checkpoints")
    finish(runs, (*settings, *now, *["ckpt_path=last"] * bool(there)), folder)


@pytest.mark.soak("kill -9 of a pretraining, resumed bit for bit", attempts=20, short=0)
def test_kills_of_a_pretraining(training: TinyTraining, straight: Any, attempt: int):  # noqa: F811
    settings = (*COMMON, *KINDS[attempt // 2 % len(KINDS)])
    kill_and_finish(training, settings, attempt)
    assert record_of(training) == straight(settings)


@pytest.mark.soak("kill -9 of a finetune from dense weights", attempts=6, short=0)
def test_kills_of_a_finetune(training, straight, teacher_dir, attempt: int):  # noqa: F811
    kinds = ((), ("task.objective.velocity=0.5",), (FSDP,))
    settings = (
        *COMMON,
        "task=finetune",
        "start=dense",
        f"init_from={teacher_dir}",
        *ANNEALED,
        *kinds[attempt // 2 % 3],
    )
    settings += ("name=pretrain",)
    kill_and_finish(training, settings, attempt)
    assert record_of(training) == straight(settings)


@pytest.mark.soak("kill -9 of a distillation", attempts=10, short=0)
def test_kills_of_a_distillation(training, straight, teacher_dir, attempt: int):  # noqa: F811
    kinds = ((), (ACCUMULATED,), (FSDP,), ANNEALED, ("data.num_workers=1",))
    settings = (*DISTILL, f"init_from={teacher_dir}", *COMMON, "name=pretrain", *kinds[attempt // 2 % 5])
    kill_and_finish(training, settings, attempt)
    assert record_of(training) == straight(settings)


@pytest.mark.soak("annealed top-k across a resume", attempts=10, short=0)
def test_annealed_topk_across_a_resume(training, straight, attempt: int):  # noqa: F811
    settings = (*COMMON, *ANNEALED)
    kill_and_finish(training, settings, attempt)
    # of 8 tiles: all for 3 steps, then linearly down to 2 in 20 steps, rounded up
    expected = {step + 1: 2 + -(-6 * (20 - min(max(step - 3, 0), 20)) // 20) for step in range(STEPS)}
    assert {step: int(row["sparsity/topk"]) for step, row in training.metrics().items()} == expected
    assert record_of(training) == straight(settings)


@pytest.mark.soak("other number of workers on a resume", attempts=10, short=0)
def test_other_workers_on_a_resume(training, straight, attempt: int):  # noqa: F811
    before, after = attempt % 3, (attempt + 1 + attempt // 3 % 2) % 3
    kill_and_finish(training, (*COMMON, f"data.num_workers={before}"), attempt, now=[f"data.num_workers={after}"])
    assert record_of(training) == straight(COMMON)


# data


def write_shards(folder: Path, *, count: int, per_shard: int) -> Path:
    """Write random latents of the shape of the toy clips."""
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, codec=HaarCodec(), text_encoder=HashedNgramEncoder(), samples_per_shard=per_shard) as out:
        for n in range(count):
            out.add(f"random-{n:04d}", torch.randn(16, 2, 8, 8, generator=generator), [f"latents {n}"], {})
    return folder


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "forty", count=40, per_shard=10)


@pytest.mark.soak("order of samples across a resume", attempts=24, short=6)
def test_order_of_samples_across_a_resume(forty: Path, attempt: int):
    """The same further samples and noise seeds, for any number of workers, from any step of two epochs and more."""

    def order(start: int, workers: int) -> list[tuple[int, tuple[str, ...], tuple[int, ...]]]:
        encoders = {"codec": HaarCodec(), "text_encoder": HashedNgramEncoder()}
        data = LatentDataModule(root=str(forty), batch_size=4, num_workers=workers, val_fraction=0.1, **encoders)
        data.prepare_data()
        data.setup("fit")
        data.start_step = start
        batches = zip(range(STEPS - start), data.train_dataloader(), strict=False)
        return [(batch.step, batch.sample_ids, tuple(batch.seeds.tolist())) for _, batch in batches]

    whole = order(0, 0)
    epoch = [sample for _, samples, _ in whole[:9] for sample in samples]
    assert len(set(epoch)) == len(epoch) == 36
    cut = (9, 18, 8, 10, *range(8), *range(11, 18), *range(19, 24))[attempt % 24]
    assert order(cut, attempt % 3) == whole[cut:]


def on_shards(root: Path) -> tuple[str, ...]:
    """Settings of a run on shards instead of clips that it renders itself."""
    return ("~data", "~data.toy.size", "~data.toy.count", "data=folder", "data.val_least=0", f"data.root={root}")


@pytest.mark.soak("1 to 30 samples on ranks and workers", attempts=12, short=0)
def test_few_samples_on_ranks_and_workers(training: TinyTraining, tmp_path: Path, attempt: int):  # noqa: F811
    """It trains wherever the split leaves a sample to train on, and ends with one line where it leaves none."""
    draw = random.Random(attempt)
    count, workers, batch = draw.choice((1, 2, 3, 5, 7, 30)), draw.randint(0, 3), draw.choice((2, 4, 6))
    root = write_shards(tmp_path / "few", count=count, per_shard=draw.choice((1, 30)))
    left, _ = split_ids([f"random-{n:04d}" for n in range(count)], 0.1, str)
    settings = (*on_shards(root), f"data.num_workers={workers}", f"data.batch_size={batch}", *[FSDP] * (attempt % 2))
    with Ranks(world_of(settings), lambda _: training(*settings), tmp_path / "printed") as ranks:
        statuses = ranks.statuses()
        assert set(statuses) == {0} if left else 0 not in statuses, ranks.output()[-2000:]
        assert None not in statuses
    if left:
        assert training.last().step == 4
    else:
        assert "val_fraction=0.1 leaves no training samples" in ranks.output()


@pytest.mark.soak("memory and descriptors over 400 steps", attempts=4, short=0)
def test_memory_and_descriptors(training: TinyTraining, tmp_path: Path, attempt: int, record_property):  # noqa: F811
    """They do not grow after the first quarter of a run with saves and validations."""
    workers = 2 * (attempt % 2)
    settings = ("trainer.max_steps=400", f"data.num_workers={workers}", "trainer.val_check_interval=50")
    settings += ("callbacks.checkpoint.every_n_steps=20",)

    def size_at(step: int) -> tuple[int, int]:
        assert wait_for(lambda: steps_of(training) >= step or ranks.ended())
        pid = ranks.processes[0].pid
        ranks.send(signal.SIGSTOP)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        size = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        ranks.send(signal.SIGCONT)
        return size, opened

    with Ranks(1, lambda _: training(*settings), tmp_path / "printed") as ranks:
        (before, opened), (after, open_then) = size_at(105), size_at(395)
        assert ranks.statuses() == [0], ranks.output()[-2000:]
    record_property("note", f"{workers} workers: {before} to {after} kB, {opened} to {open_then} descriptors")
    # two more: files that are being written
    assert open_then <= opened + 2
    assert after <= 1.01 * before
