"""Runs on streamed shards: they train, validate, stop and go on, and say that a resume may see samples twice."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.data.conftest import write_dataset
from tests.shard_server import ShardServer, serve
from tests.training.ranks import run_ranks
from tests.training.test_bad_samples import spoil
from vsa.data import remote
from vsa.data.batch import StreamMark
from vsa.data.batch_stream import RankSlice
from vsa.data.codecs import HaarCodec
from vsa.data.index import INDEX_NAME, DatasetIndex, SampleEntry
from vsa.data.shards import LatentReader
from vsa.data.stream import samples_by_shard
from vsa.data.stream_datamodule import StreamDataModule
from vsa.data.text import HashedNgramEncoder
from vsa.training.config_changes import changed_settings

VIDEOS = "latents-C16x2x2x4"


class Seen(L.Callback):
    """Ids of the samples that a run trained on, by step; a checkpoint is of the batch in hand, no later one."""

    def __init__(self):
        self.ids: dict[int, tuple[str, ...]] = {}
        self.marks: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ids[batch.step] = batch.sample_ids
        self.marks.append(batch.mark.shard)
        assert trainer.datamodule._marks[batch.mark.worker] == batch.mark.shard


class Killed(L.Callback):
    """Ends the run like a crash after so many steps."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch.step == self.step:
            raise RuntimeError("killed")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """50 videos in 5 shards."""
    return write_dataset(tmp_path / "shards", videos=50, images=0)


@pytest.fixture
def train(training):
    """Trains on shards of 16 x 2 x 2 x 4 at a URL; the last one is validated on."""

    def start(url, *overrides: str, callbacks: tuple[L.Callback, ...] = ()):
        return training(
            *("~data", "~data.toy.size", "~data.toy.count", "~data.val_fraction", "data=stream"),
            f'data.urls="{url}/{VIDEOS}-{{00000..00003}}.tar"',
            f"data.val_urls={url}/{VIDEOS}-00004.tar",
            "data.val_batches=2",
            "data.shuffle_buffer=6",
            "data.text_encoder.dim=8",
            "data.codec._target_=vsa.data.codecs.HaarCodec",
            "data.text_encoder.max_tokens=5",
            "data.num_workers=0",
            "model.text_dim=8",
            "attention.tile_thw=[1,1,1]",
            *overrides,
            callbacks=callbacks,
        )

    return start


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_is_killed_and_goes_on(train, training, shards, caplog, workers):
    before, after = Seen(), Seen()
    with serve(shards) as server:
        options = (f"data.num_workers={workers}", "trainer.max_steps=24", "trainer.val_check_interval=4")
        with pytest.raises(RuntimeError, match="killed"):
            train(server.url, *options, callbacks=(before, Killed(7)))
        assert "each seen at least once an epoch: a resumed run begins at a boundary of shards" in caplog.text
        checkpoint = training.last()
        assert checkpoint.step == 6
        stream = checkpoint.state["stream"]
        # 24 samples were drawn, 6 (of each worker) lie in the buffer
        assert stream["epoch"] == 0
        assert 0 <= stream["shards"] <= 2
        # the server may be another one
        with serve(shards) as other:
            train(other.url, *options, "ckpt_path=last", callbacks=(after,))
    assert f"data=stream continues after {stream['shards']} of the 4 shards of epoch 0" in caplog.text
    assert "(exact resume needs data=folder)" in caplog.text
    assert min(after.ids) == 6
    # marks differ, or a mark of another batch would not be seen
    assert len(set(after.marks)) > 3
    names = {name for name in DatasetIndex.load(shards / INDEX_NAME).samples if name < "video-040"}
    first = {name for step in range(6) for name in before.ids[step]}
    rest = {name for ids in after.ids.values() for name in ids}
    assert first | rest == names
    # the control: the first part alone is no epoch
    assert first != names
    metrics = training.metrics()
    assert sorted(metrics) == list(range(1, 25))
    assert all(float(row["train/loss"]) > 0 for row in metrics.values())
    assert float(metrics[24]["val/loss"]) > 0
    # what was streamed is what a folder holds: the statistics are the same
    assert training.last().state["latent_mean"] == pytest.approx(
        list(DatasetIndex.load(shards / INDEX_NAME).latent_mean), abs=1e-6
    )


class Checked(Seen):
    """Notes what was lost too; every latent is that of its sample."""

    def __init__(self, good: dict[str, torch.Tensor]):
        super().__init__()
        self.good, self.bad = good, set[str]()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.bad |= {bad.id for bad in batch.bad}
        for name, latents in zip(batch.sample_ids, batch.latents, strict=True):
            assert torch.equal(latents, self.good[name]), name


def spoil_server(server: ShardServer, samples: dict[str, list[SampleEntry]], draw: random.Random) -> set[str]:
    """Give a server faults that pass, and one shard a fault that does not; returns the samples that may be lost."""
    server.ranges = draw.random() < 0.7
    names = [*samples, *{entry.text.shard for entries in samples.values() for entry in entries}]
    server.moods = {name: draw.choices(["hangs", "drips", "moves"], k=draw.randrange(2)) for name in names}
    server.breaks = {name: 1 for name in names if draw.random() < 0.3}
    shard = draw.choice([*samples])
    entries, fault = samples[shard], draw.choice(["html", "lies", "redirects", 403, 404, 429, 503, "ends", "flip", ""])
    if isinstance(fault, int):
        server.status[shard] = fault
    elif fault == "ends":
        # nothing from here on
        entries = entries[draw.randrange(1, len(entries)) :]
        server.ends[shard] = entries[0].latent.offset + 1
    elif fault == "flip":
        entries = [draw.choice(entries)]
        spoil(server.root, [entries[0].id])
    elif fault:
        server.moods[shard] = [fault]
    return {entry.id for entry in entries} if fault else set()


@pytest.mark.soak("streams past broken servers and over a resume", attempts=12, short=0)
def test_two_ranks_are_killed_and_go_on_past_faulty_servers(attempt, train, training, shards, monkeypatch):
    """Two gloo processes with a server that fails in many ways, then one or two with another such server."""
    for name, value in (("PAUSES", (0.0, 0.0, 0.0)), ("PATIENCE", 1.0), ("_TIMEOUT", 1.0)):
        monkeypatch.setattr(remote, name, value)
    draw, reader = random.Random(attempt), LatentReader(shards)
    names = {name for name in reader.index.samples if name < "video-040"}
    samples = {shard: part for shard, part in samples_by_shard(reader.index).items() if part[0].id in names}
    good, kill = {name: reader.latent(name) for name in names}, draw.randrange(3, 9)

    def on_rank(rank: int, world: int, url: str, *overrides: str, kill: int = -1) -> tuple[dict[int, Any], set[str]]:
        callback = Checked(good)
        ranks = ("trainer=fsdp", "trainer.accelerator=cpu") if world > 1 else ()
        own = ("data.max_bad=1", "data.shuffle_buffer=3", "trainer.max_steps=40")
        with pytest.raises(RuntimeError, match="killed") if kill > 0 else nullcontext():
            train(url, *ranks, *own, *overrides, callbacks=(callback, Killed(kill)))
        return callback.ids, callback.bad

    workers = f"data.num_workers={draw.randrange(3)}"
    with serve(shards) as server:
        # validation shards and the index are read at the start
        lost = spoil_server(server, samples, draw)
        before = run_ranks(2, lambda rank: on_rank(rank, 2, server.url, workers, kill=kill))
    step, world = training.last().step, draw.choice((1, 2))
    workers = f"data.num_workers={draw.randrange(2)}"
    with serve(shards) as server:
        lost |= spoil_server(server, samples, draw)
        again = ("ckpt_path=last", workers)
        after = run_ranks(world, lambda rank: on_rank(rank, world, server.url, *again))
    assert kill - 2 <= step <= kill
    assert training.last().state["stream"]["epoch"] >= 1
    trained = {name for ids, _ in before for at, part in ids.items() if at < step for name in part}
    trained |= {name for ids, _ in after for part in ids.values() for name in part}
    told = {name for _, bad in (*before, *after) for name in bad}
    # whole samples are not given up, and each of an epoch is trained on or told
    assert told <= lost
    assert trained | told == names


def test_two_straight_runs_are_one(train, training, shards):
    for run in ("first", "second"):
        train(shards, "trainer.max_steps=6", f"run={run}")
    assert training.losses("first") == training.losses("second")
    tensors = training.tensors("first")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in training.tensors("second").items())
    train(shards, "trainer.max_steps=6", "run=other", "seed=5")
    assert training.losses("first") != training.losses("other")


def test_a_rollback_mixes_the_shards_differently(train, training, shards):
    """A batch times forty takes the run back; the steps are drawn again, other samples with other noise."""
    draws: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = []

    class Outlier(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch.step == 11 and not any(step == 11 for step, _, _ in draws):
                batch.latents.mul_(40)
            draws.append((batch.step, batch.sample_ids, tuple(batch.seeds.tolist())))

    settings = ("callbacks=loss_spikes", "callbacks.loss_spikes.least=6", "trainer.max_steps=14")
    train(shards, *settings, callbacks=(Outlier(),))
    assert training.last().state["skipped_windows"] == [[10, 11]]
    assert sorted(training.losses()) == list(range(1, 15))
    for step in (10, 11):
        first, second = [draw for draw in draws if draw[0] == step]
        assert first[1] != second[1]
        assert not set(first[2]) & set(second[2])
    # the control: steps outside the window are drawn once
    assert len([draw for draw in draws if draw[0] == 9]) == 1


def test_bad_samples_are_counted_and_too_many_stop_the_run(train, training, shards):
    spoil(shards, ["video-003"])
    train(shards, "trainer.max_steps=10")
    state = training.last().state["bad_samples"]
    assert state["samples"] == {"main/video-003": f"digest in {VIDEOS}-00000.tar"}
    assert training.metrics()[10]["bad_samples/digest"] == str(state["counts"][0][2])
    spoil(shards, [f"video-{i:03d}" for i in range(10, 40, 2)])
    with pytest.raises(ValueError, match=r"samples drawn were bad \(digest \d+\), more than data.max_bad=0.01"):
        train(shards, "trainer.max_steps=40", "run=worse")


def test_another_order_or_other_shards_are_refused(train, shards):
    train(shards, "trainer.max_steps=2")
    with pytest.raises(ValueError, match=r"data\.shuffle_buffer=6, the settings have 7"):
        train(shards, "trainer.max_steps=4", "ckpt_path=last", "data.shuffle_buffer=7")
    resume = ("ckpt_path=last", "data.shuffle_buffer=7", "resume.allow=[data.shuffle_buffer]")
    train(shards, "trainer.max_steps=4", *resume)
    with pytest.raises(ValueError, match="another data plan"):
        train(shards, "trainer.max_steps=6", *resume, f"data.urls={shards}/{VIDEOS}-00000.tar")


def test_where_shards_lie_may_change(training):
    stream = ("~data", "~data.toy.size", "~data.toy.count", "~data.val_fraction", "data=stream")
    before = OmegaConf.to_container(training.config(*stream), resolve=True)
    now = training.config(*stream, "data.urls=a.tar", "data.val_urls=b.tar", "data.seed=3")
    changes = {change.key: change.free for change in changed_settings(before, now)}
    assert changes == {"data.urls": True, "data.val_urls": True, "data.seed": False}


def test_ranks_agree_on_the_boundary(shards):
    """Rank 0 is done with places 0 and 2, rank 1 with place 1 only."""
    module = StreamDataModule(
        codec=HaarCodec(16),
        text_encoder=HashedNgramEncoder(dim=8, max_tokens=5),
        urls=f"{shards}/{VIDEOS}-{{00000..00003}}.tar",
        batch_size=4,
    )
    module.setup()

    def boundary(rank: int) -> tuple[dict, dict]:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        module._part = lambda: RankSlice(rank=rank, world=2)  # type: ignore[method-assign]
        begin = module.state_dict()["stream"]
        module._marks = {0: StreamMark(worker=0, shard=(4, 3)[rank]).shard}
        return begin, module.state_dict()["stream"]

    assert run_ranks(2, boundary) == [({"epoch": 0, "shards": 0}, {"epoch": 0, "shards": 3})] * 2
