"""Shards and indexes with other bytes than were written: refused by name, and nothing wrong is trained on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import write_dataset
from tests.data.test_shards import read_everything
from tests.forged_samples import edit_index
from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.data.shards import LatentReader


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set; a test puts back what it changes."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@contextmanager
def content(path: Path, changed: bytes) -> Iterator[None]:
    """Another content of a file inside the block."""
    good = path.read_bytes()
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(good)


def flipped(path: Path, place: int, bit: int) -> bytes:
    """The content of a file with one bit changed."""
    changed = bytearray(path.read_bytes())
    changed[place] ^= 1 << bit
    return bytes(changed)


@pytest.mark.soak("shards cut short are refused by name", attempts=200, short=10)
def test_a_cut_shard_is_refused_at_opening(attempt: int, root: Path) -> None:
    draw = random.Random(attempt)
    path = draw.choice(sorted(root.glob("*.tar")))
    size = path.stat().st_size
    # also at the ends of tar blocks, and one byte short
    cut = (draw.randrange(size), draw.randrange(0, size, 512), size - 1)[attempt % 3]
    message = rf"{path.name} is truncated or changed: .* got {cut}"
    with content(path, path.read_bytes()[:cut]), pytest.raises(ValueError, match=message):
        LatentReader(root)
    read_everything(LatentReader(root))


def test_a_shard_that_is_gone_is_refused_at_opening(tmp_path: Path, make_dataset) -> None:
    root = make_dataset(tmp_path)
    path = sorted(root.glob("*.tar"))[0]
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        LatentReader(root)


@pytest.mark.soak("bit flips in shards: no wrong sample is trained on", attempts=300, short=20)
def test_a_flipped_bit_is_noticed(attempt: int, root: Path) -> None:
    """The digest of the file notices each flip, and reading each that hits a latent or a text: every second one."""
    draw, index = random.Random(attempt), LatentReader(root).index
    spans = [(s.id, span) for s in index.samples.values() for span in (s.latent, s.text)]
    if attempt % 2:
        span = draw.choice(spans)[1]
        path, place = root / span.shard, span.offset + draw.randrange(span.size)
    else:
        path = draw.choice(sorted(root.glob("*.tar")))
        place = draw.randrange(path.stat().st_size)
    hit = [name for name, span in spans if span.shard == path.name and 0 <= place - span.offset < span.size]
    assert hit or not attempt % 2
    with content(path, flipped(path, place, draw.randrange(8))):
        if hit:
            with pytest.raises(ValueError, match=rf"{path.name}, sample {hit[0]}: the bytes are damaged"):
                read_everything(LatentReader(root))
        # a flip in the null embedding is met at opening
        with pytest.raises(ValueError, match=rf"{path.name}( is damaged|, sample __null__)"):
            LatentReader(root).verify()
    LatentReader(root).verify()


def refusal(root: Path) -> str:
    """The line with which a data set is refused, which names the index."""
    with pytest.raises(ValueError, match=r"index\.json") as caught:
        LatentReader(root)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.soak("bit flips in index.json are refused", attempts=300, short=20)
def test_a_flipped_bit_of_the_index_is_refused(attempt: int, root: Path) -> None:
    draw, path = random.Random(attempt), root / INDEX_NAME
    with content(path, flipped(path, draw.randrange(path.stat().st_size), draw.randrange(8))):
        refusal(root)


Change = Callable[[dict[str, Any]], object]


def first(index: dict[str, Any], kind: str = "latents") -> dict[str, Any]:
    """The first shard with latents or texts."""
    return next(shard for shard in index["shards"] if shard.get(kind))


def row(place: int, value: object, kind: str = "latents") -> Change:
    return lambda index: first(index, kind)[kind][0].__setitem__(place, value)


def entry(key: str, place: int, value: object) -> Change:
    return lambda index: index[key].__setitem__(place, value)


def shard(**values: object) -> Change:
    return lambda index: first(index).update(values)


CHANGES: dict[str, tuple[Change, str]] = {
    "schema": (lambda i: i.update(schema=99), "99"),
    "escape": (shard(name="../../etc/passwd"), "shard name"),
    "hidden": (shard(name=".hidden"), "shard name"),
    "absolute": (shard(name="/etc/passwd"), "shard name"),
    "a shard above the folder": (shard(name="../set/x.tar"), "shard name"),
    "outside": (row(1, 10**9), "which has"),
    "bytes past the file": (row(2, 10**9), "which has"),
    "negative": (row(1, -1), "=-1"),
    "an offset before the file": (row(1, -512), "=-512"),
    "id": (row(0, "../evil"), "evil"),
    "an id with a path": (row(0, "../../etc/passwd"), "etc/passwd"),
    "double": (lambda i: first(i)["latents"].append(first(i)["latents"][0]), "not a complete index"),
    "lost": (lambda i: first(i)["latents"].pop(), "not a complete index"),
    "a sample without text": (lambda i: first(i, "texts")["texts"].pop(), "without latent or text"),
    "shape": (shard(latent_shape=[1, 2]), "latent_shape"),
    "latents of 2^60 cells": (shard(latent_shape=[16, 2**19, 2**19, 2**19]), "latent_shape"),
    "latents without frames": (shard(latent_shape=[16, 0, 2, 4]), "latent_shape[1]=0"),
    "one mean short": (lambda i: i["latent_mean"].pop(), "15 and 16 values"),
    "one deviation": (lambda i: i.update(latent_std=[1.0]), "16 and 1 values"),
    "null": (lambda i: i["null_text"].update(shard="absent.tar"), "absent.tar"),
    "codec": (lambda i: i.pop("codec"), "codec"),
    "nothing about samples": (lambda i: first(i).pop("about"), "latents, but 0 entries about them"),
    "one sample without statistics": (lambda i: first(i)["about"][1].pop("moments"), ": expected moments and any of "),
    "list": (lambda i: i.update(shards=3), "not a complete index"),
    "mean NaN": (entry("latent_mean", 2, math.nan), "latent_mean[2]=nan"),
    "mean Inf": (entry("latent_mean", 0, math.inf), "latent_mean[0]=inf"),
    "mean 1e30": (entry("latent_mean", 0, 1e30), "latent_mean[0]=1e+30"),
    "deviation 0": (entry("latent_std", 1, 0.0), "latent_std[1]=0.0"),
    "deviation negative": (entry("latent_std", 1, -1.0), "latent_std[1]=-1.0"),
    "deviation Inf": (entry("latent_std", 1, math.inf), "latent_std[1]=inf"),
    "deviation as text": (entry("latent_std", 1, "1"), "latent_std[1]='1'"),
    "stride 0": (lambda i: i["codec"].update(stride=[0, 8, 8]), "codec.stride[0]=0"),
    "stride of two": (lambda i: i["codec"].update(stride=[8, 8]), "codec.stride=[8, 8]"),
    "channels 2^40": (lambda i: i["codec"].update(channels=1 << 40), "codec.channels=1099511627776"),
    "10^9 captions": (row(4, 10**9, "texts"), "captions=1000000000"),
    "no captions": (row(4, 0, "texts"), "captions=0"),
    "10^12 tokens": (lambda i: i["text_encoder"].update(max_tokens=10**12), "max_tokens=1000000000000"),
    "width true": (lambda i: i["text_encoder"].update(dim=True), "text_encoder.dim=True"),
}
"""Changes of an index, each with a part of the line that refuses it."""


@pytest.mark.soak("impossible numbers and names in index.json are refused")
@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_index_is_refused(name: str, root: Path) -> None:
    change, said = CHANGES[name]
    with content(root / INDEX_NAME, (root / INDEX_NAME).read_bytes()):
        edit_index(root, change)
        assert said in refusal(root)


def test_a_text_that_is_no_index_is_refused(root: Path) -> None:
    good = (root / INDEX_NAME).read_bytes()
    for text in (b"", b"[", b"[]", b"3", good[: len(good) // 2]):
        with content(root / INDEX_NAME, text):
            refusal(root)
    # without its digest, and with the digest elsewhere
    body = json.loads(good)
    seal = {"index_sha256": body.pop("index_sha256")}
    for content_of_index in (body, body | seal):
        with content(root / INDEX_NAME, json.dumps(content_of_index).encode()):
            assert "does not begin with its own digest" in refusal(root)
    assert DatasetIndex.load(root / INDEX_NAME).to_json().encode() == good
