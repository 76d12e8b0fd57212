from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from torch import nn

from tests.data.encoding import encode_folder
from tests.data.tiny_wan import save_pipeline
from vsa.data.batch import VideoBatch
from vsa.data.codecs import DctCodec, HaarCodec
from vsa.data.datamodule import LatentDataModule, ToyOnlineDataModule
from vsa.data.plan import SampleRef, is_validation, sample_seed
from vsa.data.plan_datamodule import PlanDataModule
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import ToyClips, render_clip

ENCODER = HashedNgramEncoder(dim=8, max_tokens=5)
TINY = ToyClips(count=12, size=(8, 32, 32), seed=4)


def module(root: Path | None = None, **options) -> LatentDataModule:
    where = {} if root is None else {"root": str(root)}
    defaults = {"codec": HaarCodec(), "text_encoder": ENCODER, "batch_size": 4, "val_fraction": 0.2}
    data = LatentDataModule(**{**defaults, **where, **options})
    data.prepare_data()
    data.setup()
    return data


def attach(data: PlanDataModule, *, steps: int, accumulate: int = 1, rank: int = 0, world: int = 1) -> PlanDataModule:
    """Gives the module what it reads from a trainer."""
    data.trainer = SimpleNamespace(  # pyright: ignore
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        global_rank=rank,
        world_size=world,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data


def batches(data: PlanDataModule) -> list[VideoBatch]:
    return list(data.train_dataloader())


def assert_equal(a: list[VideoBatch], b: list[VideoBatch]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.sample_ids, x.captions, x.step, x.num_slots) == (y.sample_ids, y.captions, y.step, y.num_slots)
        for name in ("latents", "text", "text_mask", "seeds", "slots"):
            assert torch.equal(getattr(x, name), getattr(y, name)), name


def test_batches_hold_what_the_shards_hold(dataset: Path) -> None:
    data = attach(module(dataset, caption_dropout=0.3), steps=30)
    reader = LatentReader(dataset)
    train_batches = batches(data)
    assert len(train_batches) == len(data.train_dataloader()) == 30
    empty_captions = 0
    for step, batch in enumerate(train_batches):
        assert batch.step == step
        assert batch.num_slots == 4
        assert batch.slots.tolist() == [0, 1, 2, 3]
        assert batch.text.shape == (4, 5, 8)
        assert batch.seeds.dtype == torch.int64
        for i, name in enumerate(batch.sample_ids):
            assert torch.equal(batch.latents[i], reader.latent(name))
            options = {
                caption for caption, _ in (reader.text(name, k) for k in range(reader.index.samples[name].captions))
            }
            tokens = ENCODER.encode(batch.captions[i])
            assert batch.captions[i] in options | {""}
            assert torch.equal(batch.text[i, : len(tokens)], tokens)
            assert batch.text_mask[i].tolist() == [k < len(tokens) for k in range(5)]
            assert not batch.text[i, len(tokens) :].any()
            empty_captions += batch.captions[i] == ""
    assert 15 < empty_captions < 60


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(dataset: Path, workers: int) -> None:
    here = attach(module(dataset, num_workers=0), steps=11, accumulate=2)
    there = attach(module(dataset, num_workers=workers), steps=11, accumulate=2)
    assert_equal(batches(here), batches(there))
    assert_equal(list(here.val_dataloader()), list(there.val_dataloader()))


def test_starting_late_equals_having_run(dataset: Path) -> None:
    whole = batches(attach(module(dataset), steps=25, accumulate=2))
    assert len(whole) == 50
    # cuts in the middle and at the edge of an epoch (about 20 training videos of 4 a step)
    for start in (1, 4, 5, 6, 10, 17, 24, 25):
        for workers in (0, 2) if start in (6, 17) else (0,):
            data = attach(module(dataset, num_workers=workers), steps=25, accumulate=2)
            data.start_step = start
            assert len(data.train_dataloader()) == 2 * (25 - start)
            assert_equal(batches(data), whole[2 * start :])


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_ranks_and_accumulation_split_the_same_global_batches(dataset: Path, world: int, accumulate: int) -> None:
    whole = batches(attach(module(dataset), steps=9))
    parts = [
        batches(attach(module(dataset), steps=9, accumulate=accumulate, rank=r, world=world)) for r in range(world)
    ]
    for step, batch in enumerate(whole):
        pieces = [parts[r][step * accumulate + m] for m in range(accumulate) for r in range(world)]
        assert {piece.num_slots for piece in pieces} == {4}
        for name in ("latents", "text", "seeds", "slots"):
            assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name))
        assert sum((piece.captions for piece in pieces), ()) == batch.captions


def test_an_image_bucket_trains_beside_video(dataset: Path) -> None:
    data = attach(module(dataset), steps=200)
    assert set(data.buckets) == {(16, 2, 2, 4), (16, 1, 4, 4)}
    assert sum(data.buckets.values()) == sum(
        not is_validation(name, 0.2) for name in LatentReader(dataset).index.samples
    )
    shapes = Counter(tuple(batch.latents.shape[1:]) for batch in batches(data))
    share = data.buckets[(16, 1, 4, 4)] / sum(data.buckets.values())
    assert abs(shapes[(16, 1, 4, 4)] / 200 - share) < 0.1
    for batch in batches(data)[:20]:
        assert len({name.split("-")[0] for name in batch.sample_ids}) == 1


def test_captions_dropout_and_noise_are_redrawn_every_epoch(dataset: Path) -> None:
    data = attach(module(dataset, caption_dropout=0.25), steps=400)
    draws: dict[str, list[str]] = {}
    seeds: list[int] = []
    for batch in batches(data):
        for name, caption in zip(batch.sample_ids, batch.captions, strict=True):
            draws.setdefault(name, []).append(caption)
        seeds += batch.seeds.tolist()
    assert len(set(seeds)) == len(seeds)
    total = sum(len(captions) for captions in draws.values())
    assert abs(sum(captions.count("") for captions in draws.values()) / total - 0.25) < 0.04
    for name, captions in draws.items():
        number = int(name.split("-")[1])
        assert len(set(captions)) == 2 + number % 3, name
        assert 0.08 < captions.count("") / len(captions) < 0.5
    never = attach(module(dataset, caption_dropout=0.0), steps=20)
    always = attach(module(dataset, caption_dropout=1.0), steps=20)
    assert all("" not in batch.captions for batch in batches(never))
    assert all(set(batch.captions) == {""} for batch in batches(always))


def test_a_sample_that_is_twice_in_a_batch_is_drawn_twice(dataset: Path) -> None:
    large = {"batch_size": 48, "caption_dropout": 0.5}
    whole = batches(attach(module(dataset, **large), steps=6))
    twice = mixed_fates = 0
    for batch in whole:
        assert len(set(batch.seeds.tolist())) == len(batch.seeds)
        first: dict[str, str] = {}
        for name, seed, caption in zip(batch.sample_ids, batch.seeds.tolist(), batch.captions, strict=True):
            if name in first:
                twice += 1
                mixed_fates += (first[name] == "") != (caption == "")
            else:
                # what stands in a batch once has the noise it always had
                assert seed == sample_seed(0, batch.step, name)
                first[name] = caption
    # one copy is dropped and the other is not in about half of the cases
    assert twice > 50
    assert 0.3 < mixed_fates / twice < 0.7
    # however the batch is cut
    parts = [attach(module(dataset, **large), steps=6, accumulate=2, rank=rank, world=2) for rank in (0, 1)]
    cut = [batches(part) for part in parts]
    for step, batch in enumerate(whole):
        seeds = [cut[rank][2 * step + micro].seeds for micro in (0, 1) for rank in (0, 1)]
        assert torch.equal(torch.cat(seeds), batch.seeds)


def test_training_and_validation_do_not_share_samples(dataset: Path) -> None:
    data = attach(module(dataset), steps=100)
    train_names = {name for batch in batches(data) for name in batch.sample_ids}
    val_names = {name for batch in data.val_dataloader() for name in batch.sample_ids}
    assert val_names
    assert not train_names & val_names
    assert train_names | val_names == set(LatentReader(dataset).index.samples)


def test_validation_set_is_fixed_padded_and_world_independent(dataset: Path) -> None:
    data = attach(module(dataset), steps=5)
    whole_set = list(data.val_dataloader())
    assert_equal(whole_set, list(attach(module(dataset), steps=99).val_dataloader()))
    data.start_step = 3
    assert_equal(whole_set, list(data.val_dataloader()))
    val_names = {n for n in LatentReader(dataset).index.samples if is_validation(n, 0.2)}
    counts = Counter(name for batch in whole_set for name in batch.sample_ids)
    # none dropped; what fills the last batch of a bucket is used once more than the others
    assert set(counts) == val_names
    assert all(len(batch.sample_ids) == 4 for batch in whole_set)
    slots = torch.cat([batch.slots for batch in whole_set])
    assert slots.tolist() == list(range(4 * len(whole_set)))
    assert {batch.num_slots for batch in whole_set} == {4 * len(whole_set)}
    seeds = torch.cat([batch.seeds for batch in whole_set]).tolist()
    assert len(set(seeds)) == len(seeds)
    assert all("" not in batch.captions for batch in whole_set)
    for world, accumulate in ((2, 1), (2, 2)):
        parts = [
            list(attach(module(dataset), steps=5, accumulate=accumulate, rank=r, world=world).val_dataloader())
            for r in range(world)
        ]
        order = [
            parts[r][b * accumulate + m] for b in range(len(whole_set)) for m in range(accumulate) for r in range(world)
        ]
        assert torch.equal(torch.cat([piece.seeds for piece in order]), torch.tensor(seeds))
        assert torch.equal(torch.cat([piece.slots for piece in order]), slots)
    short_set = list(attach(module(dataset, val_batches=1), steps=5).val_dataloader())
    assert len(short_set) == len({tuple(batch.latents.shape) for batch in whole_set})
    assert attach(module(dataset, val_fraction=0.0), steps=5).val_dataloader() == []


def test_more_ranks_than_samples_pad_by_rule(tmp_path: Path, make_dataset) -> None:
    """A bucket of 3 samples on 4 ranks: nobody waits, samples start over."""
    root = make_dataset(tmp_path, videos=3, images=0)
    ranks = [batches(attach(module(root, val_fraction=0.0), steps=6, rank=r, world=4)) for r in range(4)]
    assert [len(rank_batches) for rank_batches in ranks] == [6] * 4
    names = [ranks[r][step].sample_ids[0] for step in range(6) for r in range(4)]
    assert Counter(names) == dict.fromkeys(LatentReader(root).index.samples, 8)


def test_several_sources_mix_by_weight_and_pool_their_statistics(tmp_path: Path, make_dataset) -> None:
    a = make_dataset(tmp_path / "a", videos=12, images=0)
    b = make_dataset(tmp_path / "b", videos=12, images=6, prefix="b-")
    sources = {"a": {"root": str(a), "weight": 3.0}, "b": {"root": str(b)}}
    data = attach(module(sources=sources), steps=1000)
    from_b = [batch.sample_ids[0].startswith("b-") for batch in batches(data)]
    assert abs(sum(from_b) / 1000 - 0.25) < 0.005
    latents = [LatentReader(root).latent(n).flatten(1) for root in (a, b) for n in LatentReader(root).index.samples]
    values = torch.cat(latents, 1)
    torch.testing.assert_close(data.latent_mean, values.mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.latent_std, values.std(1, correction=0), atol=1e-5, rtol=0)


def test_mixing_encoders_is_refused(tmp_path: Path, make_dataset) -> None:
    a, b = make_dataset(tmp_path / "a"), make_dataset(tmp_path / "b", channels=8)
    with pytest.raises(ValueError, match=r"haar-4x8x8-c16.*haar-4x8x8-c8") as caught:
        module(sources={"a": {"root": str(a)}, "b": {"root": str(b)}})
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)
    with pytest.raises(ValueError, match=r"encoded with codec haar-4x8x8-c8 .*has haar-4x8x8-c16"):
        module(b)
    with pytest.raises(ValueError, match=r"encoded with text encoder hashed-ngrams-8x5 .*has hashed-ngrams-9x5"):
        module(a, text_encoder=HashedNgramEncoder(dim=9, max_tokens=5))


def test_the_plan_hash_follows_the_data(dataset: Path, tmp_path: Path, make_dataset) -> None:
    base = module(dataset).plan_hash
    assert module(dataset).plan_hash == base
    assert module(dataset, num_workers=2, caption_dropout=0.5).plan_hash == base
    other = module(make_dataset(tmp_path, videos=24))
    assert len({base, module(dataset, seed=1).plan_hash, module(dataset, batch_size=8).plan_hash, other.plan_hash}) == 4


def test_bad_requests(dataset: Path, tmp_path: Path, make_dataset) -> None:
    with pytest.raises(ValueError, match="exactly one of root and sources"):
        module()
    with pytest.raises(ValueError, match="exactly one of root and sources"):
        module(dataset, sources={"a": {"root": str(dataset)}})
    with pytest.raises(ValueError, match=r"source a: expected the keys root.*wieght"):
        module(sources={"a": {"root": str(dataset), "wieght": 2.0}})
    with pytest.raises(ValueError, match="toy clips need root and videos"):
        module(dataset, toy=TINY)
    with pytest.raises(ValueError, match=r"val_fraction=1\.0: expected a number of at least 0 and below 1"):
        module(dataset, val_fraction=1.0)
    with pytest.raises(ValueError, match=r"caption_dropout=1\.5: expected a number from 0 to 1"):
        module(dataset, caption_dropout=1.5)
    with pytest.raises(ValueError, match=r"no index\.json"):
        module(tmp_path)
    with pytest.raises(ValueError, match="leaves no training samples"):
        module(make_dataset(tmp_path / "one", videos=1, images=0), val_fraction=0.9999999)
    with pytest.raises(ValueError, match="batch_size 4 must be a multiple of 3 ranks x 1"):
        batches(attach(module(dataset), steps=5, world=3))
    with pytest.raises(RuntimeError, match="setup"):
        LatentDataModule(codec=HaarCodec(), text_encoder=ENCODER, batch_size=4, root=str(dataset)).train_dataloader()


def test_a_batch_beyond_the_data_is_told_and_reads_every_sample_once(
    dataset: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    videos, images = module(dataset, batch_size=24).buckets.values()
    assert videos + images == 24
    assert not [r for r in caplog.records if "batch_size" in r.message]
    module(dataset, batch_size=25)
    data = attach(module(dataset, batch_size=96), steps=2)
    assert [r.message for r in caplog.records if "batch_size" in r.message] == [
        f"data.batch_size={size} is above the number of training samples, 24: a batch holds each sample of its latent "
        f"shape {size / videos:.3g} to {size / images:.3g} times"
        for size in (25, 96)
    ]
    reads: list[str] = []
    latent = LatentReader.latent
    monkeypatch.setattr(LatentReader, "latent", lambda self, name: reads.append(name) or latent(self, name))
    for batch in data.train_dataloader():
        assert sorted(reads) == sorted(set(batch.sample_ids))
        assert len(batch.sample_ids) == 96
        for name, actual in zip(batch.sample_ids, batch.latents, strict=True):
            assert torch.equal(actual, latent(data.store._readers["main"], name))
        reads.clear()


@pytest.mark.parametrize(
    ("size", "shape"), [((1, 32, 32), (1, 4, 4)), ((9, 40, 48), (2, 4, 6)), ((4, 36, 36), (1, 4, 4))]
)
def test_toy_clips_of_odd_sizes(tmp_path: Path, size: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    toy = ToyClips(count=3, size=size, seed=4)
    data = module(tmp_path / "shards", toy=toy, videos=str(tmp_path / "videos"), val_fraction=0.0)
    assert data.buckets == {(16, *shape): 3}


def test_toy_clips_that_cannot_be_encoded_are_not_rendered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 3 frames, expected at least 4"):
        module(tmp_path / "shards", toy=ToyClips(size=(3, 32, 32)), videos=str(tmp_path / "videos"))
    assert not list(tmp_path.iterdir())


def test_toy_clips_are_rendered_and_encoded_once(tmp_path: Path) -> None:
    options = {"toy": TINY, "videos": str(tmp_path / "videos")}
    data = module(tmp_path / "shards", **options)
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 12
    index = (tmp_path / "shards" / "index.json").read_bytes()
    module(tmp_path / "shards", **options)
    assert (tmp_path / "shards" / "index.json").read_bytes() == index
    batch = batches(attach(data, steps=1))[0]
    assert batch.latents.shape == (4, 16, 2, 4, 4)
    for toy in (ToyClips(count=13, size=(8, 32, 32), seed=4), ToyClips(count=12, size=(8, 32, 48), seed=4)):
        with pytest.raises(ValueError, match="holds 12 samples, not the"):
            module(tmp_path / "shards", toy=toy, videos=options["videos"])
    # the same files through the path of a user's folder give the same shards
    encode_folder(tmp_path / "videos", tmp_path / "own", codec=HaarCodec(), text_encoder=ENCODER)
    assert (tmp_path / "own" / "index.json").read_bytes() == index


def test_toy_online_needs_no_files_and_equals_the_clips() -> None:
    options = {"toy": TINY, "codec": HaarCodec(), "text_encoder": ENCODER, "batch_size": 4, "val_fraction": 0.3}
    data = ToyOnlineDataModule(**options)
    data.prepare_data()
    data.setup()
    attach(data, steps=8)
    codec = HaarCodec()
    train_batches = batches(data)
    for batch in train_batches:
        for i, name in enumerate(batch.sample_ids):
            video, caption, _ = render_clip(4, int(name.split("-")[-1]), size=(8, 32, 32))
            assert torch.equal(batch.latents[i], codec.encode(video))
            assert batch.captions[i] == "" or caption.startswith(batch.captions[i])
    assert data.buckets == {(16, 2, 4, 4): 12 - len({n for b in data.val_dataloader() for n in b.sample_ids})}
    every = torch.stack([codec.encode(render_clip(4, i, size=(8, 32, 32))[0]) for i in range(12)])
    torch.testing.assert_close(data.latent_mean, every.mean((0, 2, 3, 4)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        data.latent_std, every.transpose(0, 1).flatten(1).std(1, correction=0), atol=1e-4, rtol=1e-4
    )
    late = ToyOnlineDataModule(**options, num_workers=2)
    late.setup()
    attach(late, steps=8)
    late.start_step = 5
    assert_equal(batches(late), train_batches[5:])


def test_zeros_padding_is_the_same_text_without_a_mask(dataset: Path) -> None:
    masked = attach(module(dataset), steps=6)
    zeros = attach(module(dataset, text_padding="zeros"), steps=6)
    for get in (batches, lambda data: list(data.val_dataloader())):
        for a, b in zip(get(masked), get(zeros), strict=True):
            assert torch.equal(a.text, b.text)
            assert a.text_mask is not None
            assert b.text_mask is None
            assert b.to("cpu").text_mask is None
    with pytest.raises(ValueError, match="text_padding=ones: expected one of mask, zeros, got 'ones'"):
        module(dataset, text_padding="ones")


def test_statistics_of_the_data_or_of_the_codec(dataset: Path) -> None:
    class Published(HaarCodec):
        statistics = (torch.arange(16.0), torch.arange(16.0) + 1)

    own, from_codec = module(dataset, codec=Published()), module(dataset, codec=Published(), stats="codec")
    assert own.latent_mean.tolist() == pytest.approx(LatentReader(dataset).index.latent_mean, rel=1e-6)
    assert from_codec.latent_mean.tolist() == list(range(16))
    assert from_codec.latent_std.tolist() == list(range(1, 17))
    with pytest.raises(ValueError, match=r"stats=codec: codec haar-4x8x8-c16 has no published statistics"):
        module(dataset, stats="codec")
    with pytest.raises(ValueError, match="stats=vae: expected one of data, train, codec, got 'vae'"):
        module(dataset, stats="vae")


def test_image_conditions_come_with_the_batch(tmp_path: Path) -> None:
    for name, channels, encoder in (("a", 20, "v1"), ("b", 0, None), ("c", 12, "v1"), ("d", 20, "v2"), ("e", 20, None)):
        image: Any = encoder and SimpleNamespace(id="clip", hash=encoder, tokens=3, dim=5)
        how: Any = {"codec": HaarCodec(), "text_encoder": ENCODER, "image_encoder": image, "dtype": "float32"}
        with ShardWriter(tmp_path / name, **how) as writer:
            for i in range(8):
                latents = torch.full((16, 2, 2, 4), float(i))
                condition = torch.full((channels, 2, 2, 4), -float(i)) if channels else None
                tokens = torch.full((3, 5), -float(i)) if encoder else None
                writer.add(f"{name}{i}", latents, ["x"], {}, condition, tokens)
    data = attach(module(tmp_path / "a"), steps=5)
    assert (data.cond_channels, data.image_encoder and data.image_encoder.dim) == (20, 5)
    for batch in batches(data) + list(data.val_dataloader()):
        assert batch.cond_latents is not None
        assert batch.cond_latents.shape == (4, 20, 2, 2, 4)
        assert torch.equal(batch.cond_latents[:, 0], -batch.latents[:, 0])
        assert batch.image_embeds is not None
        assert torch.equal(batch.image_embeds, batch.cond_latents[:, :1, 0, 0, :1].expand(4, 3, 5))
        assert batch.rows(slice(1, 3)).image_embeds is not None
        assert batch.to("meta").cond_latents.device.type == "meta"  # pyright: ignore
    for batch in batches(attach(module(tmp_path / "b"), steps=2)):
        assert batch.cond_latents is batch.image_embeds is None
    for other, what in (("d", "(image_encoder clip, v2)"), ("e", "(no image_encoder)")):
        sources = {name: {"root": str(tmp_path / name)} for name in ("a", other)}
        with pytest.raises(ValueError, match=rf"\(image_encoder clip, v1\) with .*{other} {re.escape(what)}"):
            module(sources=sources)
    for other, cond_channels in (("b", 0), ("c", 12)):
        sources = {name: {"root": str(tmp_path / name)} for name in ("a", other)}
        with pytest.raises(ValueError, match=rf"\(20 channels of image condition\) with .*{other} \({cond_channels}\)"):
            module(sources=sources)


def test_statistics_of_images_beside_videos_are_pooled(tmp_path: Path) -> None:
    """A channel that is constant in one source and varies in the other has the deviation of both together."""
    generator = torch.Generator().manual_seed(0)
    everything = []
    for name, shape in (("stills", (2, 1, 2, 4)), ("films", (2, 3, 2, 4))):
        with ShardWriter(tmp_path / name, codec=HaarCodec(2), text_encoder=ENCODER, dtype="float32") as writer:
            for i in range(6):
                latents = torch.randn(shape, generator=generator) * 0.1
                if name == "stills":
                    latents[1] = 0
                everything.append(latents.double().flatten(1))
                writer.add(f"{name}{i}", latents, ["x"], {})
    sources = {name: {"root": str(tmp_path / name)} for name in ("stills", "films")}
    data = module(sources=sources, codec=HaarCodec(2), batch_size=2)
    values = torch.cat(everything, 1)
    torch.testing.assert_close(data.latent_mean.double(), values.mean(1), atol=1e-7, rtol=0)
    torch.testing.assert_close(data.latent_std.double(), values.std(1, correction=0), atol=1e-7, rtol=0)


def test_loaders_leave_the_global_generator_alone(dataset: Path) -> None:
    data = attach(module(dataset), steps=3)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batches(data)
    list(data.val_dataloader())
    assert torch.equal(torch.rand(3), expected)


def test_samples_can_be_read_one_by_one(dataset: Path) -> None:
    data = module(dataset)
    ref = SampleRef(source="main", id="video-003")
    assert torch.equal(data.store.latents([ref])[0], LatentReader(dataset).latent("video-003"))
    assert data.codec.id == data.store.codec.id == "haar-4x8x8-c16"
    assert data.store.codec.hash == HaarCodec().hash
    assert (data.store.text_encoder.id, data.store.text_encoder.hash) == (ENCODER.id, ENCODER.hash)


class Recorder(lightning.LightningModule):
    """Trains one number and writes down which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, tuple[str, ...]]] = []
        self.validated: list[tuple[str, ...]] = []

    def training_step(self, batch: VideoBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.step, batch.sample_ids))
        return (batch.latents.mean() - self.weight) ** 2

    def validation_step(self, batch: VideoBatch, batch_idx: int) -> None:
        self.validated.append(batch.sample_ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_walks_the_plan(dataset: Path, tmp_path: Path, workers: int) -> None:
    data = module(dataset, num_workers=workers)
    model = Recorder()
    trainer = lightning.Trainer(
        max_steps=6,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=6,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, datamodule=data)
    expected = []
    for step in range(6):
        names = tuple(ref.id for ref in data.plan.step(step).refs)
        expected += [(step, names[:2]), (step, names[2:])]
    assert model.seen == expected
    assert trainer.global_step == 6
    assert len(model.validated) == 2 * len(data.val_dataloader())


@pytest.mark.parametrize("name", ["toy", "toy_online", "folder"])
def test_configs_name_constructor_arguments(name: str, tmp_path: Path) -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(Path(__file__).parents[2] / "configs" / "data" / f"{name}.yaml")
    whole = OmegaConf.create({"seed": 3, "data": config})
    data = instantiate(whole.data, _convert_="all")
    assert isinstance(data, PlanDataModule)
    assert data.batch_size == 8
    assert type(data.codec) is (DctCodec if name == "folder" else HaarCodec)
    whole.data.batch_siez = 9
    with pytest.raises(Exception, match="batch_siez"):
        instantiate(whole.data, _convert_="all")


def test_wan_config_builds_from_a_pipeline_folder(tmp_path: Path) -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.load(Path(__file__).parents[2] / "configs" / "data" / "wan.yaml")
    whole = OmegaConf.create({"seed": 3, "data": config})
    whole.data.codec.source = str(save_pipeline(tmp_path / "wan"))
    data = instantiate(whole.data, _convert_="all")
    assert isinstance(data, PlanDataModule)
    assert (data.codec.id, data.text_encoder.id, data.text_padding) == ("wan-vae-4x8x8-c16", "umt5-32x512", "zeros")
    # the VAE's own, without any data
    assert data.latent_std[0] == 0.5
