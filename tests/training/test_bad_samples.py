"""Runs that meet bad samples: passed, counted, replaced by a rule, and too many of them stop the run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.data.conftest import write_dataset
from tests.training.ranks import run_ranks
from vsa.data.bad_samples import BadSample
from vsa.data.datamodule import LatentDataModule
from vsa.data.parallel_dims import ParallelDims
from vsa.data.plan import is_validation
from vsa.data.shards import LatentReader
from vsa.training.callbacks.bad_samples import BadSamples


def spoil(root: Path, names: list[str], what: str = "latent") -> None:
    """Flip one bit in the middle of some samples."""
    index = LatentReader(root).index
    for name in names:
        span = getattr(index.samples[name], what)
        with (root / span.shard).open("r+b") as file:
            file.seek(span.offset + span.size // 2)
            byte = file.read(1)[0]
            file.seek(span.offset + span.size // 2)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "shards", videos=40, images=0)


@pytest.fixture
def train(training, shards):
    """Trains on `shards`, whose latents are 16 x 2 x 2 x 4."""

    def start(*overrides: str, **options):
        return training(
            "~data",
            "~data.toy.size",
            "~data.toy.count",
            "data=folder",
            f"data.root={shards}",
            "data.text_encoder.dim=8",
            "data.text_encoder.max_tokens=5",
            "data.val_least=0",
            "data.num_workers=0",
            "model.text_dim=8",
            "attention.tile_thw=[1,1,1]",
            *overrides,
            **options,
        )

    return start


def state_of(training, run: str = "default") -> dict:
    return training.last(run).state["bad_samples"]


@pytest.mark.soak("runs that meet a bad sample pass it and resume bit-equal", attempts=10, short=1)
def test_a_bad_sample_is_passed_and_a_resume_is_the_same_run(attempt, train, training, shards, caplog):
    draw = random.Random(attempt)
    # the validation set is drawn by name, and no sample of it is trained on
    sample = draw.choice([name for name in LatentReader(shards).index.samples if not is_validation(name, 0.1)])
    what, cut, workers = draw.choice(["latent", "text"]), draw.randrange(1, 12), draw.randrange(3)
    spoil(shards, [sample], what)
    shard = getattr(LatentReader(shards).index.samples[sample], what).shard
    settings = ("data.caption_dropout=0", "data.max_bad=0.1")
    train("trainer.max_steps=12", "run=straight", *settings)
    state = state_of(training, "straight")
    draws = sum(row[2] for row in state["counts"])
    assert draws >= 1
    assert state["drawn"] == 48
    assert state["counts"] == [["digest", shard, draws]]
    assert state["samples"] == {f"main/{sample}": f"digest in {shard}"}
    assert training.metrics("straight")[12]["bad_samples"] == str(draws)
    report = (training.folder("straight") / "bad_samples.txt").read_text()
    assert f"main/{sample}\tdigest in {shard}\n" in report
    assert sum(f"bad sample main/{sample} (digest in" in record.getMessage() for record in caplog.records) == 1
    # cut at some step and gone on with other workers
    train(f"trainer.max_steps={cut}", "run=cut", *settings)
    train("trainer.max_steps=12", "run=cut", "ckpt_path=last", f"data.num_workers={workers}", *settings)
    assert training.losses("cut") == training.losses("straight")
    assert state_of(training, "cut") == state
    tensors = training.tensors("straight")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in training.tensors("cut").items())


def test_good_data_are_read_as_ever(train, training, shards, tmp_path):
    """A run whose bad samples are never drawn has the losses of one without; the control is a sample that is."""
    train("trainer.max_steps=3", "run=good")
    assert "bad_samples" not in training.metrics("good")[3]
    assert not (training.folder("good") / "bad_samples.txt").exists()
    module = LatentDataModule(**data_of(training.last("good").state["config"]))
    module.setup()
    drawn_ids = {ref.id for step in range(3) for ref in module.plan.step(step).refs}
    rest = sorted(set(module.plan.sources["main"].buckets[16, 2, 2, 4]) - drawn_ids)
    assert rest
    spoil(shards, rest)
    train("trainer.max_steps=3", "run=others")
    assert training.losses("others") == training.losses("good")
    spoil(shards, [sorted(drawn_ids)[0]])
    train("trainer.max_steps=3", "run=bad", "data.max_bad=1")
    assert training.losses("bad") != training.losses("good")


def data_of(config: dict) -> dict:
    """Arguments of the data module of a run."""
    from vsa.config import build

    data = {key: value for key, value in config["data"].items() if key not in ("_target_", "codec", "text_encoder")}
    return {**data, **{name: build(config["data"][name]) for name in ("codec", "text_encoder")}}


def test_too_many_bad_samples_stop_the_run_and_nothing_is_lost(train, training, shards):
    spoil(shards, [f"video-{i:03d}" for i in range(0, 40, 2)])
    with pytest.raises(ValueError, match=r"of 2\d samples drawn were bad \(digest \d+\), more than data.max_bad=0.01"):
        train("trainer.max_steps=40", "trainer.log_every_n_steps=1")
    checkpoint = training.last()
    assert 3 <= checkpoint.step < 12
    # as told: it may go on where it stopped, or start anew without the bad ones that it met
    train(f"trainer.max_steps={checkpoint.step + 2}", "ckpt_path=last", "data.max_bad=0.9")
    assert training.last().step == checkpoint.step + 2
    # what was saved when it stopped is the whole state of that step
    train(f"trainer.max_steps={checkpoint.step + 2}", "run=allowed", "data.max_bad=0.9")
    tensors = training.tensors("allowed")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in training.tensors().items())
    assert state_of(training) == state_of(training, "allowed")
    drop = training.folder() / "bad_samples.txt"
    bad = {line.partition("\t")[0] for line in drop.read_text().splitlines()[1:]}
    train("trainer.max_steps=2", "run=anew", f"data.drop={drop}")
    assert not bad & state_of(training, "anew")["samples"].keys()
    assert training.last("anew").state["plan_hash"] != checkpoint.state["plan_hash"]


def test_no_bad_sample_is_allowed_where_a_run_says_so(train, shards):
    spoil(shards, [f"video-{i:03d}" for i in range(0, 40, 3)])
    with pytest.raises(ValueError, match=r"data\.max_bad=0 allows"):
        train("trainer.max_steps=12", "data.max_bad=0")


def test_ranks_count_together(tmp_path):
    samples = [[(4, "a", 3), (5, "c", 0)], [(4, "b", 1)]]

    def count(rank: int) -> dict:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        counter = BadSamples(tmp_path)
        counter._dims = ParallelDims(shard=2)
        counter._new = [
            (step, BadSample(source="main", id=name, shard="x.tar", cause="nan", slot=slot))
            for step, name, slot in samples[rank]
        ]
        return dict(counter.state_dict())

    first, second = run_ranks(2, count)
    assert first == second
    assert first["counts"] == [["nan", "x.tar", 3]]
    # in the order in which they were drawn, whichever rank drew them
    assert list(first["samples"]) == ["main/b", "main/a", "main/c"]
