"""Shards that are streamed: every sample at least once, by library clients alone, past whatever breaks."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.conftest import write_dataset
from tests.shard_server import serve
from tests.training.test_bad_samples import spoil
from vsa.data import remote
from vsa.data.batch_stream import RankSlice
from vsa.data.codecs import HaarCodec
from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.data.shards import LatentReader
from vsa.data.stream import StreamedBatches
from vsa.data.stream_datamodule import StreamDataModule
from vsa.data.text import HashedNgramEncoder

VIDEOS = "latents-C16x2x2x4"
# 80 videos in 8 shards of 10
SHARDS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 videos and 10 images; tests must not change it."""
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", videos=80, images=10)


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """The same for a test that damages it."""
    return write_dataset(tmp_path / "shards", videos=80, images=10)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0, 0.0))


def urls_of(folder: Path | str, first: int = 0, last: int = SHARDS - 1) -> str:
    return f"{folder}/{VIDEOS}-{{{first:05d}..{last:05d}}}.tar"


def module_of(urls, **options) -> StreamDataModule:
    """A module that is set up, without a trainer."""
    encoders = {"codec": HaarCodec(16), "text_encoder": HashedNgramEncoder(dim=8, max_tokens=5)}
    module = StreamDataModule(urls=urls, **{**encoders, "batch_size": 4, "shuffle_buffer": 1, **options})
    module.setup()
    return module


def stream_of(module: StreamDataModule, steps: int, *, rank: int = 0, world: int = 1, start: int = 0):
    """The loader of one rank, as the module makes it."""
    module._part = lambda: RankSlice(rank=rank, world=world)  # type: ignore[method-assign]
    module._first_shard = start
    stream = module.train_dataloader().dataset
    assert isinstance(stream, StreamedBatches)
    stream.steps = steps
    return DataLoader(stream, batch_size=None, num_workers=module.num_workers)


def ids_of(batches) -> list[str]:
    return [name for batch in batches for name in batch.sample_ids]


def all_ids(folder: Path, kind: str = "video") -> set[str]:
    return {name for name in DatasetIndex.load(folder / INDEX_NAME).samples if name.startswith(kind)}


def test_two_ranks_with_two_workers_see_every_sample_once_an_epoch(folder):
    """8 shards of 10 samples for 4 readers: 20 samples of each are an epoch, 10 steps of 2 samples a rank."""
    epochs = []
    with serve(folder) as server:
        module = module_of(urls_of(server.url), num_workers=2)
        ranks = [list(stream_of(module, 40, rank=rank, world=2)) for rank in range(2)]
    for epoch in range(2):
        counts = Counter(ids_of(batch for rank in ranks for batch in rank[20 * epoch : 20 * epoch + 20]))
        assert counts == Counter(all_ids(folder)), epoch
        epochs.append(ids_of(batch for rank in ranks for batch in rank[20 * epoch : 20 * epoch + 20]))
    assert epochs[0] != epochs[1]
    # the control: the ranks of a run in which both believe to be the first one
    twice = Counter(ids_of([*ranks[0][:20], *ranks[0][:20]]))
    assert twice != Counter(all_ids(folder))
    # slots of a global batch are those of the ranks, and no two have the same noise
    slots = [int(slot) for rank in ranks for slot in rank[0].slots]
    assert sorted(slots) == [0, 1, 2, 3]
    seeds = [int(seed) for rank in ranks for batch in rank for seed in batch.seeds]
    assert len(set(seeds)) == len(seeds) == 160


def test_samples_are_those_of_the_folder(folder):
    reader = LatentReader(folder)
    with serve(folder) as server:
        batches = list(stream_of(module_of(urls_of(server.url), caption_dropout=0.0), 20))
        # nothing was asked for twice, each text shard at most once a latent shard
        assert server.asked[f"{VIDEOS}-00000.tar"] == 1
    assert set(ids_of(batches)) == all_ids(folder)
    for batch in batches:
        for row, name in enumerate(batch.sample_ids):
            assert torch.equal(batch.latents[row], reader.latent(name))
            texts = [reader.text(name, k) for k in range(reader.index.samples[name].captions)]
            (tokens,) = [text for caption, text in texts if caption == batch.captions[row]]
            assert torch.equal(batch.text[row, : len(tokens)], tokens)
    # the control: another sample has other latents
    first, second = batches[0].sample_ids[:2]
    assert not torch.equal(reader.latent(first), reader.latent(second))


def test_the_order_follows_the_seed(folder):
    def order(**options):
        return ids_of(stream_of(module_of(urls_of(folder), shuffle_buffer=16, **options), 20))

    assert order(seed=3) == order(seed=3)
    assert order(seed=3) != order(seed=4)
    # also the shards, and what the buffer does with them
    first = [module_of(urls_of(folder), seed=seed)._order.at(0)[0].id for seed in range(6)]
    assert len(set(first)) > 1
    plain_order = ids_of(stream_of(module_of(urls_of(folder), seed=3), 20))
    assert plain_order != order(seed=3)
    assert plain_order[:10] == sorted(plain_order[:10])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [7, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (1, 13))])
def test_after_a_cut_no_sample_is_left_out(folder, workers, cut):
    """Two ranks are killed after some steps; resumed ones, of another number too, see the rest of the epoch."""
    urls = urls_of(folder)
    module = module_of(urls, num_workers=workers, shuffle_buffer=6)
    before, marks = [], []
    for rank in range(2):
        batches = list(stream_of(module, cut, rank=rank, world=2))
        for batch in batches:
            module.on_after_batch_transfer(batch, 0)
        before += ids_of(batches)
        # with its own part alone, as there is no process group here
        module._part = lambda rank=rank: RankSlice(rank=rank)  # type: ignore[method-assign]
        marks.append(module._next_shard())
    start = min(marks)
    assert start <= 2 * cut * 2 // 10
    for world in (1, 2, 3):
        continuation = module_of(urls, num_workers=workers, shuffle_buffer=6, batch_size=6)
        after = set()
        for rank in range(world):
            after |= {
                name
                for batch in stream_of(continuation, 60, rank=rank, world=world, start=start)
                for name in batch.sample_ids
            }
        # shards before the boundary had been seen whole
        assert {entry.id for place in range(start) for entry in module._order.at(place)} <= set(before)
        assert set(before) | after >= all_ids(folder)
    # the control: a boundary that is one round of readers too late would leave samples out
    late = {entry.id for place in range(start + 4) for entry in module._order.at(place)}
    assert not late <= set(before)


def test_the_checkpoint_holds_the_boundary(folder, capsys):
    module = module_of(urls_of(folder))
    assert module.state_dict()["stream"] == {"epoch": 0, "shards": 0}
    for batch in stream_of(module, 28):
        module.on_after_batch_transfer(batch, 0)
    state = module.state_dict()
    # 112 samples are 11 shards and a part of one
    assert state["stream"] == {"epoch": 1, "shards": 3}
    continuation = module_of(urls_of(folder))
    continuation.load_state_dict({**state, "step": 28})
    assert (continuation.start_step, continuation._first_shard) == (28, 11)
    assert continuation.state_dict() == state
    for other in ({"seed": 1}, {"batch_size": 8}, {"urls": urls_of(folder, 1)}):
        with pytest.raises(ValueError, match="another data plan"):
            module_of(**{"urls": urls_of(folder), **other}).load_state_dict({**state, "step": 28})


def test_a_connection_that_breaks_is_made_anew_where_it_broke(folder):
    names = [f"{VIDEOS}-0000{i}.tar" for i in range(SHARDS)]
    with serve(folder) as server:
        module = module_of(urls_of(server.url))
        whole = ids_of(stream_of(module, 20))
        server.breaks = {name: 2 for name in names}
        server.starts.clear()
        batches = list(stream_of(module, 20))
        assert ids_of(batches) == whole
        assert not any(batch.bad for batch in batches)
        starts = [start for name, start in server.starts if name == names[0]]
        assert len(starts) == 3
        assert 0 < starts[1] < starts[2]
        # a server that knows no ranges sends the shard from its beginning
        server.breaks, server.ranges = {name: 2 for name in names}, False
        assert ids_of(stream_of(module, 20)) == whole
        # the control: one that breaks for ever loses samples, which count
        entries = [entry for entry in LatentReader(folder).index.samples.values() if entry.latent.shard == names[0]]
        server.ends, server.breaks, server.ranges = {names[0]: entries[6].latent.offset + 1}, {}, True
        server.asked.clear()
        batches = list(stream_of(module, 19))
        bad = [bad for batch in batches for bad in batch.bad]
        assert [each.id for each in bad] == [entry.id for entry in entries[6:]]
        assert {(each.shard, each.cause) for each in bad} == {(names[0], "unreadable")}
        assert server.asked[names[0]] == 1 + len(remote.PAUSES)


@pytest.mark.parametrize(("status", "times"), [(404, 1), (403, 1), (503, 4), (429, 4)])
def test_a_shard_that_is_gone_counts_as_bad_and_is_told_with_its_url(folder, capsys, status, times):
    name = f"{VIDEOS}-00003.tar"
    with serve(folder) as server:
        module = module_of(urls_of(server.url), batch_size=2)
        server.status[name] = status
        batches = list(stream_of(module, 35))
        bad = [bad for batch in batches for bad in batch.bad]
        assert server.asked[name] == times
    shard_ids = {entry.id for entry in LatentReader(folder).index.samples.values() if entry.latent.shard == name}
    assert {each.id for each in bad} == shard_ids
    assert len(bad) == len(shard_ids) == 10
    assert set(ids_of(batches)) == all_ids(folder) - shard_ids
    assert f"{server.url}/{name} cannot be read: HTTP status {status}" in capsys.readouterr().out


def test_when_every_shard_is_gone_the_stream_ends(folder):
    with serve(folder) as server:
        module = module_of(urls_of(server.url), num_workers=1)
        server.status = {f"{VIDEOS}-0000{i}.tar": 404 for i in range(SHARDS)}
        with pytest.raises(ValueError, match=r"did not arrive; all of the 100 samples drawn before it are bad too"):
            next(iter(stream_of(module, 1)))


@pytest.mark.slow
def test_bad_samples_between_good_ones_do_not_end_a_stream(folder):
    with serve(folder) as server:
        module = module_of(urls_of(server.url), batch_size=160)
        server.status = {f"{VIDEOS}-0000{i}.tar": 404 for i in range(4)}
        (batch,) = stream_of(module, 1)
    # 100 in a row would end it
    assert len(batch.bad) > 100
    assert len(batch.sample_ids) == 160


def test_what_is_missing_at_the_start_is_named(folder, tmp_path):
    with serve(folder) as server:
        server.status = {INDEX_NAME: 404}
        with pytest.raises(ValueError, match=rf"{server.url}/index.json cannot be read: HTTP status 404: streaming"):
            module_of(urls_of(server.url))
        server.status = {"text-00000.tar": 404}
        with pytest.raises(ValueError, match=rf"{server.url}/text-00000.tar cannot be read: HTTP status 404"):
            module_of(urls_of(server.url))
        server.status = {f"{VIDEOS}-00007.tar": 404}
        with pytest.raises(ValueError, match=rf"data.val_urls: {server.url}/{VIDEOS}-00007.tar cannot be read"):
            module_of(urls_of(server.url, 0, 6), val_urls=f"{server.url}/{VIDEOS}-00007.tar")
    with pytest.raises(ValueError, match=r"nowhere/index.json cannot be read: FileNotFoundError"):
        module_of(f"{tmp_path}/nowhere/{VIDEOS}-00000.tar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "data.urls lists no shards"),
        ({"urls": "{folder}/latents-{00000..0001.tar"}, "unbalanced braces"),
        ({"urls": ["{folder}/{videos}-00000.tar"] * 2}, "twice"),
        ({"urls": ["{folder}/{videos}-00000.tar", "/elsewhere/x.tar"]}, "shards of 2 folders"),
        ({"urls": "{folder}/{videos}-00009.tar"}, "is not in the index.json beside it"),
        ({"urls": "{folder}/text-00000.tar"}, "holds no latents"),
        (
            {"urls": ["{folder}/{videos}-00000.tar", "{folder}/latents-C16x1x4x4-00000.tar"]},
            r"expected latents of one shape, got 2 \(16x1x4x4, 16x2x2x4\)",
        ),
        ({"val_urls": "{folder}/{videos}-00001.tar"}, "is also in data.urls, the training set"),
        ({"val_fraction": 0.1}, "a stream cannot hold out samples, set data.val_urls"),
        ({"codec": HaarCodec(17)}, "encoded with codec"),
    ],
)
def test_what_cannot_be_streamed_is_refused(folder, options, message):
    def fill(value):
        if isinstance(value, list):
            return [fill(each) for each in value]
        if not isinstance(value, str):
            return value
        return value.replace("{folder}", str(folder)).replace("{videos}", VIDEOS)

    settings = {name: fill(value) for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        module_of(**{"urls": urls_of(folder), **settings})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "pipe:touch {marker}; cat {folder}/x.tar",
            "got scheme pipe:",
        ),
        ("PIPE:touch {marker}", "got scheme pipe:"),
        ("ftp://host/x.tar", "got scheme ftp:"),
        ("gs://bucket/x.tar", "got scheme gs:"),
        ("file:{folder}/x.tar", "got scheme file:"),
        ("http://example.org/x.tar", "http://example.org is not encrypted, use https://"),
        ("https://user:word@example.org/x.tar", "credentials into"),
        ("https://example.org/x.tar?signature=abc", "credentials into"),
    ],
)
def test_other_schemes_are_refused_and_nothing_runs(folder, tmp_path, url, message):
    marker = tmp_path / "marker"
    with pytest.raises(ValueError, match=message) as caught:
        module_of(url.format(marker=marker, folder=folder))
    assert "\n" not in str(caught.value)
    assert "word" not in str(caught.value)
    assert "abc" not in str(caught.value)
    assert not marker.exists()


def test_gopen_rewrite_has_no_effect(folder, tmp_path, monkeypatch):
    """webdataset follows the variable, which is the control; a stream reads what it was told to."""
    from webdataset.gopen import gopen

    marker = tmp_path / "marker"
    monkeypatch.setenv("GOPEN_REWRITE", f"{folder}=pipe:touch {marker} && cat {folder}")
    name = f"{VIDEOS}-00000.tar"
    gopen(f"{folder}/{name}").read()
    assert marker.exists()
    marker.unlink()
    with serve(folder) as server:
        monkeypatch.setenv("GOPEN_REWRITE", f"{server.url}=pipe:touch {marker} && cat {folder}")
        assert len(ids_of(stream_of(module_of(f"{server.url}/{name}"), 2))) == 8
        assert len(ids_of(stream_of(module_of(f"{folder}/{name}"), 2))) == 8
    assert not marker.exists()


@pytest.mark.parametrize(
    ("scheme", "package", "name"), [("s3", "s3fs", "S3FileSystem"), ("hf", "huggingface_hub", "HfFileSystem")]
)
def test_clients_of_s3_and_the_hub(folder, monkeypatch, scheme, package, name):
    """Their packages are optional; a stand-in fails now and then with its own error. `tests/clouds` has real ones."""
    failures = []

    class Client:
        config_kwargs: dict[str, object] = {}  # noqa: RUF012

        def open(self, path, mode):
            assert mode == "rb"
            if len(failures) < 2 and path.endswith(".tar"):
                failures.append(path)
                raise RuntimeError("SlowDown")
            return open(folder / path.rpartition("/")[2], mode)

    url = f"{scheme}://bucket/set"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{scheme}:// need the package {package}: pip install {package}"):
        module_of(urls_of(url))
    session = SimpleNamespace(event_hooks={"request": []})
    fake: ModuleType = SimpleNamespace(**{name: Client}, get_session=lambda: session)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, package, fake)
    batches = list(stream_of(module_of(urls_of(url)), 20))
    assert set(ids_of(batches)) == all_ids(folder)
    assert len(failures) == 2


def test_an_older_client_of_the_hub_is_one_line(monkeypatch):
    older = SimpleNamespace(HfFileSystem=object, get_session=object, __version__="0.36.0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", older)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^URLs of hf:// need huggingface_hub 1 or newer, got 0\.36\.0$"):
        module_of(urls_of("hf://datasets/owner/name"))


def test_a_flipped_bit_is_skipped_and_counted(own_folder):
    spoil(own_folder, ["video-011", "video-042"])
    spoil(own_folder, ["video-070"], what="text")
    with serve(own_folder) as server:
        batches = list(stream_of(module_of(urls_of(server.url), caption_dropout=0.0, batch_size=7), 11))
    bad = {(each.id, each.cause) for batch in batches for each in batch.bad}
    assert bad == {("video-011", "digest"), ("video-042", "digest"), ("video-070", "digest")}
    assert set(ids_of(batches)) == all_ids(own_folder) - {"video-011", "video-042", "video-070"}
    for batch in batches:
        assert all(each.slot in batch.slots for each in batch.bad)


def test_dropped_samples_are_left_out(folder, tmp_path):
    drop = tmp_path / "drop.txt"
    dropped_ids = {f"video-{i:03d}" for i in (*range(10, 20), 33)}
    drop.write_text("".join(f"main/{name}\n" for name in sorted(dropped_ids)))
    module = module_of(urls_of(folder), drop=str(drop))
    assert len(module._order.shards) == SHARDS - 1
    assert set(ids_of(stream_of(module, 40))) == all_ids(folder) - dropped_ids
    assert module.plan_hash != module_of(urls_of(folder)).plan_hash


def test_validation_is_a_fixed_set_in_memory(folder):
    def batches(module):
        return list(module.val_dataloader())

    with serve(folder) as server:
        module = module_of(urls_of(server.url, 0, 6), val_urls=f"{server.url}/{VIDEOS}-00007.tar", val_batches=2)
        requests = Counter(server.asked)
        first, second = batches(module), batches(module)
        assert server.asked == requests
    assert ids_of(first) == ids_of(second) == [f"video-{i:03d}" for i in range(70, 78)]
    assert all(torch.equal(a.seeds, b.seeds) for a, b in zip(first, second, strict=True))
    reader = LatentReader(folder)
    assert torch.equal(first[1].latents[3], reader.latent("video-077"))
    assert module.held_out_captions(2) == ("video 70 caption 0", "video 71 caption 0")
    # trained on as before, and normalised with the same statistics
    assert torch.equal(module.latent_mean, module_of(urls_of(folder)).latent_mean)
    local = module_of(urls_of(folder, 0, 6), val_urls=f"{folder}/{VIDEOS}-00007.tar", val_batches=2)
    assert ids_of(batches(local)) == ids_of(first)
    assert not set(ids_of(stream_of(local, 40))) & set(ids_of(first))
    assert module_of(urls_of(folder)).val_dataloader() == []


def test_statistics_of_the_training_shards(folder):
    part = module_of(urls_of(folder, 0, 1), stats="train")
    latents = torch.stack([LatentReader(folder).latent(f"video-{i:03d}") for i in range(20)]).double()
    flat = latents.transpose(0, 1).flatten(1)
    torch.testing.assert_close(part.latent_mean, flat.mean(1).float(), rtol=0, atol=1e-5)
    assert not torch.allclose(module_of(urls_of(folder)).latent_mean, part.latent_mean, rtol=0, atol=1e-5)
