"""Bad samples in a stream: replaced by a rule that knows no ranks, workers or starting step, and told with cause."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.data.test_datamodule import assert_equal, attach, batches, module
from tests.forged_samples import TEXT, Forgery, forge, forgeries
from vsa.data.bad_samples import BadSampleError, NoGoodSample, read_drop_list, write_drop_list
from vsa.data.shards import LatentReader


def flip(root: Path, sample: str, what: str = "latent") -> None:
    """Flip one bit of a member."""
    span = getattr(LatentReader(root).index.samples[sample], what)
    content = bytearray((root / span.shard).read_bytes())
    content[span.offset + span.size // 2] ^= 16
    (root / span.shard).write_bytes(content)


@pytest.fixture
def spoilt(tmp_path: Path, make_dataset) -> Path:
    """A tenth of the samples is bad: latents, and texts."""
    root = make_dataset(tmp_path / "spoilt")
    for name in ("video-001", "image-024"):
        flip(root, name)
    flip(root, "video-005", "text")
    return root


BAD = {("video-001", "digest"), ("image-024", "digest"), ("video-005", "digest")}


def test_replacements_depend_on_nothing_but_the_plan(spoilt: Path, dataset: Path) -> None:
    options = {"val_fraction": 0.0, "batch_size": 4}
    whole = batches(attach(module(spoilt, **options), steps=20))
    assert {(bad.id, bad.cause) for batch in whole for bad in batch.bad} == BAD
    good = batches(attach(module(dataset, **options), steps=20))
    replacements = 0
    for a, b in zip(whole, good, strict=True):
        slots = {bad.slot for bad in a.bad}
        assert not {bad for bad, _ in BAD} & {i for i, c in zip(a.sample_ids, a.captions, strict=True) if c}
        # noise belongs to the place, and nothing else in the batch moves
        assert torch.equal(a.seeds, b.seeds)
        for slot in range(4):
            assert (a.sample_ids[slot] != b.sample_ids[slot]) == (slot in slots)
            assert torch.equal(a.latents[slot], LatentReader(dataset).latent(a.sample_ids[slot]))
            if slot not in slots:
                assert torch.equal(a.text[slot], b.text[slot])
        replacements += len(slots)
    assert 5 < replacements < 20
    for world, accumulate, workers in ((2, 1, 0), (1, 2, 2), (2, 2, 0)):
        parts = [
            batches(
                attach(
                    module(spoilt, **options, num_workers=workers), steps=20, accumulate=accumulate, rank=r, world=world
                )
            )
            for r in range(world)
        ]
        for step, batch in enumerate(whole):
            pieces = [parts[r][step * accumulate + m] for m in range(accumulate) for r in range(world)]
            assert tuple(bad for piece in pieces for bad in piece.bad) == batch.bad
            assert tuple(name for piece in pieces for name in piece.sample_ids) == batch.sample_ids
            assert torch.equal(torch.cat([piece.text for piece in pieces]), batch.text)
            assert torch.equal(torch.cat([piece.seeds for piece in pieces]), batch.seeds)
    late = attach(module(spoilt, **options), steps=20)
    late.start_step = 7
    assert_equal(batches(late), whole[7:])


def test_validation_passes_bad_samples_too(spoilt: Path) -> None:
    data = attach(module(spoilt, val_fraction=0.6), steps=1)
    first = list(data.val_dataloader())
    val_ids = {ref.id for refs in data._ready()[2].values() for ref in refs}
    problems = {(bad.id, bad.cause) for batch in first for bad in batch.bad}
    assert problems == {bad for bad in BAD if bad[0] in val_ids} != set()
    names = {name for batch in first for name in batch.sample_ids}
    assert names <= val_ids - {name for name, _ in problems}
    assert_equal(first, list(data.val_dataloader()))


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_but_bad_samples_is_one_line(tmp_path: Path, make_dataset, workers: int) -> None:
    root = make_dataset(tmp_path / "bad", videos=3, images=0)
    for i in range(3):
        flip(root, f"video-{i:03d}")
    data = attach(module(root, val_fraction=0.0, batch_size=2, num_workers=workers), steps=1)
    with pytest.raises(NoGoodSample) as caught:
        batches(data)
    assert str(caught.value).startswith(f"shard {root}/latents-C16x2x2x4-00000.tar, sample video-00")
    assert "data.drop" in str(caught.value)
    assert "\n" not in str(caught.value)


FORGERIES = {forgery.name: forgery for forgery in forgeries()}


def drawn_with(root: Path, forgery: Forgery) -> tuple[set[tuple[str, str]], bool]:
    """Draw all eight samples of a set with a forged one: what is reported, and whether the batch is good."""
    forge(root, "video-003", forgery.kind, forgery.payload)
    data = attach(module(root, batch_size=8, val_fraction=0.0, caption_dropout=0.0, text_encoder=TEXT), steps=1)
    (batch,) = batches(data)
    finite = bool(batch.latents.isfinite().all() and batch.text.isfinite().all())
    return {(bad.id, bad.cause) for bad in batch.bad}, finite and "video-003" not in batch.sample_ids


@pytest.mark.soak("forged members with right digests are passed and told")
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_member_is_passed_and_told(name: str, tmp_path: Path, make_dataset) -> None:
    root = make_dataset(tmp_path / "set", videos=8, images=0)
    # a sample that replaces itself is reported once more, with the same cause
    assert drawn_with(root, FORGERIES[name]) == ({("video-003", FORGERIES[name].cause)}, True)


@pytest.mark.parametrize("name", ["a NaN", "1e30", "latents of torch.int8"])
def test_a_reader_that_looks_less_would_be_seen(name: str, tmp_path: Path, make_dataset, monkeypatch) -> None:
    monkeypatch.setattr(LatentReader, "_numbers", lambda self, key, span, name, tensor: tensor.float())
    root = make_dataset(tmp_path / "set", videos=8, images=0)
    assert drawn_with(root, FORGERIES[name]) != ({("video-003", FORGERIES[name].cause)}, True)


def test_a_drop_list_leaves_samples_out_and_is_told(spoilt: Path, tmp_path: Path, caplog) -> None:
    path = tmp_path / "drop.txt"
    write_drop_list(path, {name: cause for name, cause in BAD}, found_by="a test")
    with caplog.at_level(logging.INFO):
        data = attach(module(spoilt, val_fraction=0.0, drop=str(path)), steps=30)
    assert f"data.drop={path} leaves out 3 of 32 samples" in caplog.text
    assert data.plan_hash != module(spoilt, val_fraction=0.0).plan_hash
    train_batches = batches(data)
    assert not any(batch.bad for batch in train_batches)
    assert not {name for name, _ in BAD} & {name for batch in train_batches for name in batch.sample_ids}
    # a shard that holds nothing else may be gone
    index = LatentReader(spoilt).index
    shard = index.samples["image-024"].latent.shard
    shard_ids = {name for name, sample in index.samples.items() if sample.latent.shard == shard}
    write_drop_list(path, dict.fromkeys(shard_ids, "gone"), found_by="a test")
    (spoilt / shard).unlink()
    with pytest.raises(ValueError, match=f"{shard} is missing"):
        module(spoilt)
    assert len(shard_ids) == 9
    assert list(module(spoilt, drop=str(path)).store.buckets["main"]) == [(16, 2, 2, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("video-001\nabsent\n", "line 2: no source has a sample absent"),
        ("films/a\n", "line 1: no source has a sample films/a"),
        ("../a b\n", "line 1: expected a sample id, got '../a b'"),
        (None, "No such file"),
    ],
)
def test_drop_lists_that_cannot_be_meant_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "drop.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"data.drop=.*{message}"):
        read_drop_list(path, {"main": ["video-001"], "stills": ["a"]})


def test_a_drop_list_may_name_the_source(tmp_path: Path) -> None:
    path = tmp_path / "drop.txt"
    path.write_text("# a remark\nstills/a\tdigest in x.tar\nb\n\n")
    sources = {"films": ["a", "b"], "stills": ["a", "b"]}
    assert read_drop_list(path, sources) == {"films": {"b"}, "stills": {"a", "b"}}


def test_reading_names_cause_shard_and_sample(spoilt: Path) -> None:
    reader = LatentReader(spoilt)
    with pytest.raises(BadSampleError) as caught:
        reader.latent("video-001")
    shard = "latents-C16x2x2x4-00000.tar"
    assert (caught.value.cause, caught.value.sample, caught.value.shard) == ("digest", "video-001", shard)
    # lost while the run goes on
    (spoilt / shard).unlink()
    with pytest.raises(BadSampleError, match="No such file") as caught:
        reader.latent("video-001")
    assert caught.value.cause == "unreadable"
