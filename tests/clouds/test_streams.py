"""Streams through the real clients of S3 and the hub, from local servers that break."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.clouds.servers import SECRET, SIGNATURE, hub
from tests.data.conftest import write_dataset
from tests.data.test_streaming import all_ids, ids_of, module_of, stream_of, urls_of
from vsa.data import remote
from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.data.remote import RemoteError, read_spans
from vsa.data.shards import LatentReader
from vsa.data.stream import samples_by_shard

LAST = 4
VIDEOS = "latents-C16x2x2x4"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.1, 0.6, 2.0))


def read_first(url: str, cloud) -> list[bytes]:
    """The samples of the first shard, from the shard of that name in another folder."""
    (shard, entries), *_ = samples_by_shard(DatasetIndex.load(cloud.folder / INDEX_NAME)).items()
    return list(read_spans(f"{url}/{shard}", [entry.latent for entry in entries]))


def told(error: RemoteError, url: str) -> str:
    """The reason in a message of one line, which has no secrets and begins with the URL."""
    message = str(error)
    assert message.startswith(f"{url}/{VIDEOS}-00000.tar cannot be read: ")
    assert len(message.splitlines()) == 1
    assert SECRET not in message
    assert SIGNATURE not in message
    return message.partition("cannot be read: ")[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_of_the_folder(cloud, workers):
    module = module_of(urls_of(cloud.url, 0, LAST), num_workers=workers, caption_dropout=0.0)
    batches = list(stream_of(module, 26))
    assert not any(batch.bad for batch in batches)
    assert set(ids_of(batches)) == all_ids(cloud.folder)
    reader = LatentReader(cloud.folder)
    for batch in batches:
        for latents, name in zip(batch.latents, batch.sample_ids, strict=True):
            assert torch.equal(latents, reader.latent(name))


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_a_server_that_breaks_within_a_shard_loses_nothing(cloud, fault):
    module = module_of(urls_of(cloud.url, 0, LAST))
    whole = ids_of(stream_of(module, 12))
    batches, again = [], threading.Timer(0.4, cloud.wire.start)
    for batch in stream_of(module, 12):
        batches.append(batch)
        if len(batches) == 1 and fault == "killed":
            cloud.wire.stop()
            again.start()
        elif len(batches) in (1, 5) and fault == "cut":
            # within the next block
            cloud.wire.cut = 3000
    assert cloud.wire.cut is None
    assert ids_of(batches) == whole
    assert not any(batch.bad for batch in batches)


def test_the_control_a_server_that_stays_away(cloud, no_sleep):
    cloud.wire.stop()
    with pytest.raises(RemoteError) as caught:
        read_first(cloud.url, cloud)
    assert "Connect" in told(caught.value, cloud.url)


def test_damaged_bytes_are_counted_once(cloud):
    module = module_of(urls_of(cloud.url, 0, LAST))
    entry = module._order.at(1)[3]
    with open(cloud.folder / entry.latent.shard, "rb") as file:
        file.seek(entry.latent.offset + entry.latent.size - 16)
        cloud.wire.flip = file.read(16)
    first, second = (list(stream_of(module, 12)) for _ in range(2))
    assert cloud.wire.flip is None
    assert [(bad.id, bad.cause) for batch in first for bad in batch.bad] == [(entry.id, "digest")]
    assert entry.id not in ids_of(first)
    # the next time they arrive whole
    assert not any(batch.bad for batch in second)
    assert entry.id in ids_of(second)


def test_what_is_not_there_is_told_at_once(cloud):
    for url in (f"{cloud.url}/nowhere", cloud.elsewhere):
        before = cloud.wire.asked
        with pytest.raises(RemoteError) as caught:
            read_first(url, cloud)
        assert caught.value.missing
        assert "not" in told(caught.value, url).lower()
        assert cloud.wire.asked - before <= 3


def test_credentials_that_are_refused_are_told_at_once(cloud):
    # clients know their schemes in small letters
    scheme, _, path = cloud.url.partition(":")
    assert len(read_first(f"{scheme.upper()}:{path}", cloud)) == 10
    cloud.refuse()
    # the hub's client knows the listing of the folder
    before = cloud.wire.asked
    with pytest.raises(RemoteError) as caught:
        read_first(cloud.url, cloud)
    reason = told(caught.value, cloud.url)
    assert reason in ("HTTP status 403: Forbidden", "HTTP status 401: Invalid credentials in Authorization header")
    assert cloud.wire.asked - before <= 1


def test_missing_credentials_are_told_at_once(cloud, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    if cloud.url.startswith("hf"):
        cloud.options["token"] = False
    # another try would take longer than the test may
    monkeypatch.setattr(remote, "PAUSES", (60.0,))
    with pytest.raises(RemoteError) as caught:
        read_first(cloud.url, cloud)
    assert "credentials" in told(caught.value, cloud.url)


def test_a_silent_server_is_given_up(cloud, no_sleep, monkeypatch):
    """The client of S3 repeats on two levels of its own, and listings of the hub have no timeout."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    cloud.options["config_kwargs"] = {"read_timeout": 0.5}
    # the hub says that there is the repository, and then nothing
    cloud.wire.answered = 0 if cloud.url.startswith("s3") else 1
    with pytest.raises(RemoteError) as caught:
        read_first(cloud.url, cloud)
    assert "Timeout" in told(caught.value, cloud.url)
    tries = len(remote.PAUSES) + 1
    # the client of the hub repeats each request five times
    assert cloud.wire.asked == (tries if cloud.url.startswith("s3") else 1 + 6 * tries)


def test_the_signature_of_a_redirect_is_not_told(tmp_path, monkeypatch):
    with hub(write_dataset(tmp_path / "shards"), monkeypatch) as cloud:
        assert read_first(cloud.url, cloud)
        (cloud.folder / f"{VIDEOS}-00000.tar").unlink()
        with pytest.raises(RemoteError) as caught:
            read_first(cloud.url, cloud)
        # the control: the client's own message has it
        assert SIGNATURE in str(caught.value.__cause__)
        assert told(caught.value, cloud.url).startswith("HTTP status 403: 403 Forbidden")
    error = RemoteError("s3://bucket/x.tar", OSError("no answer from https://host/x.tar?a=1&Signature=abc in time"))
    assert str(error) == "s3://bucket/x.tar cannot be read: OSError no answer from https://host/x.tar in time"
