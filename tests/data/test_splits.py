"""Splits by source, and statistics of the training samples alone."""

from __future__ import annotations

import base64
import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch

from tests.data.encoding import encode_folder
from tests.data.test_datamodule import ENCODER, attach, batches, module
from tests.forged_samples import abouts, edit_index
from vsa.data.check import check_dataset
from vsa.data.codecs import HaarCodec
from vsa.data.index import About, SampleEntry, Span
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader
from vsa.data.splits import split_group
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video

FILMS, CLIPS = 30, 4


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of 30 films in two shapes, whose latents have the film's own mean."""
    root = tmp_path_factory.mktemp("films") / "shards"
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(root, codec=HaarCodec(), text_encoder=ENCODER, samples_per_shard=25) as writer:
        for i in range(FILMS * CLIPS):
            film, clip = divmod(i, CLIPS)
            shape = (16, 2, 2, 4) if clip % 2 else (16, 1, 4, 4)
            latents = film + torch.randn(shape, generator=generator)
            info = {"source": f"films/film{film}-{clip:04d}.mp4", "fields": {"director": f"person {film % 7}"}}
            writer.add(f"clip-{i:03d}", latents, ["a clip"], info)
    return root


def film_of(name: str) -> int:
    return int(name.rpartition("-")[2]) // CLIPS


def sides(data) -> tuple[set[str], set[str]]:
    train = {name for source in data.plan.sources.values() for ids in source.buckets.values() for name in ids}
    return train, {ref.id for refs in data._opened[2].values() for ref in refs}


@pytest.mark.parametrize(
    ("options", "group"),
    [
        ({"val_by": "prefix"}, film_of),
        ({"val_by": "field", "val_field": "director"}, lambda name: film_of(name) % 7),
        ({"val_by": "file"}, str),
        ({}, str),
    ],
)
def test_a_group_is_on_one_side(films: Path, options: dict, group) -> None:
    train, val = sides(module(films, val_fraction=0.3, **options))
    assert not {group(name) for name in train} & {group(name) for name in val}
    assert len(train | val) == FILMS * CLIPS
    assert 0 < len(val) < len(train)
    # the control: a split by sample tears films apart
    shared_films = {film_of(name) for name in train} & {film_of(name) for name in val}
    assert bool(shared_films) == (options.get("val_by") in (None, "file"))


def test_samples_alone_are_split_as_ever(films: Path) -> None:
    assert module(films).plan_hash == module(films, val_by="id").plan_hash != module(films, val_by="prefix").plan_hash


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips of each of 11 films, and a clip alone in its file."""
    root = tmp_path_factory.mktemp("shots") / "shards"
    with ShardWriter(root, codec=HaarCodec(1), text_encoder=ENCODER) as writer:
        for i in range(56):
            name = f"films/{i // 5}.mp4"
            writer.add(f"clip-{i:03d}", torch.full((1, 1, 2, 2), float(i)), ["a clip"], {"source": name})
    return root


def test_enough_clips_of_whole_films_are_held_out(shots: Path) -> None:
    def held(**options) -> set[int]:
        train, val = sides(module(shots, codec=HaarCodec(1), val_fraction=0.05, **options))
        assert len(train | val) == 56
        assert not train & val
        return {int(name[-3:]) for name in val}

    few, enough = held(val_by="file"), held(val_by="file", val_least=16)
    # what the fraction holds out stays so
    assert few < enough
    assert 16 <= len(enough) <= 20
    for clips in (few, enough):
        films = {i // 5 for i in clips}
        assert sum(1 for i in range(56) if i // 5 in films) == len(clips)
    # the control: by id films are torn apart
    torn = held(val_least=16)
    assert len(torn) == 16
    assert any(0 < len(torn & set(range(5 * film, 5 * film + 5))) < 5 for film in range(11))
    # never more than half, and none at all where nothing shall be held out
    assert 24 <= len(held(val_by="file", val_least=1000)) <= 28
    none = module(shots, codec=HaarCodec(1), val_fraction=0.0, val_least=16)
    assert not sides(none)[1]


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("film7-0001.mp4", "film7"),
        ("a/film7_12.mov", "a/film7"),
        ("a/0001.mp4", "a/"),
        ("scene12.mp4", "scene"),
        ("plain.mp4", "plain"),
        ("a.b/c - 3.gif", "a.b/c"),
    ],
)
def test_prefixes(source: str, group: str) -> None:
    span = Span(shard="x", offset=0, size=1, sha256="")
    about = About(moments="", source=source)
    entry = SampleEntry(id="x", latent_shape=(1, 1, 1, 1), latent=span, text=span, captions=1, about=about)
    assert split_group("prefix", None)(entry) == group


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_by": "field"}, r"data\.val_field applies to data\.val_by=field"),
        ({"val_field": "director"}, "got val_by=id and val_field=director"),
        ({"val_by": "field", "val_field": "year"}, r"data\.val_field=year: sample clip-"),
        ({"val_by": "film"}, "val_by=film: expected one of"),
    ],
)
def test_splits_that_cannot_be_are_refused(films: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(films, **options)


def test_statistics_leave_held_out_samples_out(films: Path) -> None:
    data = module(films, val_fraction=0.3, val_by="prefix", stats="train")
    reader, (train, val) = LatentReader(films), sides(data)

    def expected(names: set[str]) -> tuple[torch.Tensor, torch.Tensor]:
        flat = torch.cat([reader.latent(name).double().flatten(1) for name in sorted(names)], dim=1)
        return flat.mean(1).float(), flat.std(1, correction=0).float()

    actual = data.latent_mean, data.latent_std
    for value, right, wrong in zip(actual, expected(train), expected(train | val), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
        # the control: means of films differ
        assert ((value - wrong).abs() > 0.01).all()
    whole = module(films, val_fraction=0.3, val_by="prefix")
    torch.testing.assert_close(whole.latent_mean, expected(train | val)[0], rtol=1e-5, atol=1e-5)


def encoded(values: list[float]) -> str:
    return base64.b64encode(struct.pack("<32f", *values)).decode()


def test_a_data_set_without_files_and_statistics_names_what_it_lacks(films: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(films, tmp_path / "set"))
    edit_index(root, lambda index: [about.pop("source") for about in abouts(index)])
    assert module(root).plan_hash == module(films).plan_hash
    with pytest.raises(ValueError, match=r"data\.val_by=prefix: the index does not say which file sample clip-"):
        module(root, val_by="prefix")
    # cut, not base64, not numbers, negative deviations
    for moments in ("AAAA", "AAA", "!", "é", encoded([math.nan] * 32), encoded([1] * 16 + [-1] * 16)):
        edit_index(root, lambda index, moments=moments: [about.update(moments=moments) for about in abouts(index)])
        with pytest.raises(ValueError, match=r"index\.json: statistics of clip-.* are not 16 means and deviations"):
            module(root, stats="train")


def test_statistics_that_differ_from_the_latents_are_found(films: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(films, tmp_path / "set"))
    check_dataset(root)
    edit_index(root, lambda index: next(abouts(index)).update(moments=encoded([0] * 16 + [1] * 16)))
    with pytest.raises(ValueError, match=r"index\.json: statistics of clip-.* differ from those of its latents"):
        check_dataset(root)


def test_encoding_keeps_files_and_fields(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    lines = []
    for i in range(4):
        write_video(videos / f"film{i // 2}-{i % 2}.mp4", render_clip(0, i, size=(8, 32, 32))[0])
        entry = {"video": f"film{i // 2}-{i % 2}.mp4", "captions": ["a clip"], "film": f"F{i // 2}", "year": 1990 + i}
        lines.append(json.dumps({**entry, "tags": ["not", "kept"]}))
    (videos / "captions.jsonl").write_text("\n".join(lines))
    root = tmp_path / "shards"
    encode_folder(videos, root, codec=HaarCodec(), text_encoder=ENCODER, samples_per_shard=3)
    about = {name: sample.about for name, sample in LatentReader(root).index.samples.items()}
    assert about["film1-0"].source == "film1-0.mp4"
    assert about["film1-0"].fields == {"film": "F1", "year": "1992"}
    data = attach(module(root, val_by="field", val_field="film", val_fraction=0.0, stats="train"), steps=1)
    assert torch.allclose(data.latent_mean, module(root).latent_mean)
    assert len(batches(data)) == 1
