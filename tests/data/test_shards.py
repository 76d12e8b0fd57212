from __future__ import annotations

import hashlib
import json
import pickle
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.disks import small_files
from tests.forged_samples import edit_index
from vsa.data.codecs import HaarCodec
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.files import DiskFullError

ENCODER = HashedNgramEncoder(dim=8, max_tokens=5)


def read_everything(reader: LatentReader) -> None:
    for sample in reader.index.samples.values():
        reader.latent(sample.id)
        for caption in range(sample.captions):
            reader.text(sample.id, caption)


def test_round_trip(dataset: Path) -> None:
    reader = LatentReader(dataset)
    generator = torch.Generator().manual_seed(1)
    assert len(reader.index.samples) == 32
    values = []
    for i, sample in enumerate(reader.index.samples.values()):
        shape = (16, 2, 2, 4) if i < 23 else (16, 1, 4, 4)
        original = torch.randn(shape, generator=generator)
        latent = reader.latent(sample.id)
        assert latent.dtype == torch.float32
        assert sample.latent_shape == shape
        assert torch.equal(latent, original.half().float())
        values.append(latent.flatten(1))
        assert sample.captions == 1 + i % 3
        for k in range(sample.captions):
            caption, tokens = reader.text(sample.id, k)
            assert caption == f"{'video' if i < 23 else 'image'} {i} caption {k}"
            assert torch.equal(tokens, ENCODER.encode(caption))
    assert torch.equal(reader.null_text, ENCODER.encode(""))
    all_values = torch.cat(values, 1).double()
    mean, std = torch.tensor([reader.index.latent_mean, reader.index.latent_std], dtype=torch.float64)
    torch.testing.assert_close(mean, all_values.mean(1), atol=1e-12, rtol=0)
    torch.testing.assert_close(std, all_values.std(1, correction=0), atol=1e-12, rtol=0)
    assert reader.index.codec.hash == HaarCodec().hash
    assert reader.index.text_encoder.hash == ENCODER.hash
    reader.verify()


def test_shards_are_plain_tars_of_one_shape_each(dataset: Path) -> None:
    names = sorted(path.name for path in dataset.iterdir())
    assert names == [
        "index.json",
        "latents-C16x1x4x4-00000.tar",
        "latents-C16x2x2x4-00000.tar",
        "latents-C16x2x2x4-00001.tar",
        "latents-C16x2x2x4-00002.tar",
        *(f"text-{i:05d}.tar" for i in range(4)),
    ]
    with tarfile.open(dataset / "latents-C16x2x2x4-00001.tar") as tar:
        members = tar.getnames()
        record = json.loads(tar.extractfile("video-010.json").read())  # pyright: ignore
    assert members[:2] == ["video-010.json", "video-010.latent.safetensors"]
    assert record["latent_shape"] == [16, 2, 2, 4]
    assert record["codec_hash"] == HaarCodec().hash
    assert record["source"] == "10.mp4"


def test_webdataset_reads_the_shards(dataset: Path) -> None:
    import webdataset

    stream = webdataset.WebDataset(str(dataset / "latents-C16x1x4x4-00000.tar"), shardshuffle=False)
    samples = list(stream)
    assert [s["__key__"] for s in samples] == [f"image-{i:03d}" for i in range(23, 32)]
    assert set(samples[0]) >= {"json", "latent.safetensors"}


def test_equal_samples_give_equal_files(dataset: Path, make_dataset, tmp_path: Path) -> None:
    again = make_dataset(tmp_path / "again")
    for path in dataset.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11)])
def test_storage_types(tmp_path: Path, make_dataset, dtype: str, error: float) -> None:
    reader = LatentReader(make_dataset(tmp_path, dtype=dtype))
    original = torch.randn((16, 2, 2, 4), generator=torch.Generator().manual_seed(1))
    difference = (reader.latent("video-000") - original).abs() / original.abs()
    assert difference.max() <= error
    assert error == 0 or difference.max() > error / 4


def test_constant_channels_keep_deviation_one(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, codec=HaarCodec(2), text_encoder=ENCODER) as writer:
        for i in range(3):
            writer.add(f"s{i}", torch.stack([torch.full((1, 2, 2), 7.0), torch.full((1, 2, 2), float(i))]), ["a"], {})
    index = LatentReader(tmp_path).index
    assert index.latent_mean == pytest.approx((7.0, 1.0))
    assert index.latent_std == pytest.approx((1.0, (2 / 3) ** 0.5))


def test_an_error_while_writing_leaves_no_data_set_and_no_litter(tmp_path: Path, make_dataset) -> None:
    def write_and_fail() -> None:
        writer = ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER, samples_per_shard=2)
        with writer:
            for i in range(5):
                writer.add(f"s{i}", torch.zeros(1, 1, 1, 1), ["a"], {})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_and_fail()
    assert not list(tmp_path.glob(".tmp-*"))
    # finished shards are whole files
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latents-C1x1x1x1-00000.tar",
        "latents-C1x1x1x1-00001.tar",
        "text-00000.tar",
        "text-00001.tar",
        "text-00002.tar",
    ]
    for path in tmp_path.iterdir():
        with tarfile.open(path) as tar:
            assert tar.getnames()
    with pytest.raises(ValueError, match=r"no index\.json"):
        LatentReader(tmp_path)
    # the next run sweeps what the broken one left
    read_everything(LatentReader(make_dataset(tmp_path)))
    assert not list(tmp_path.glob("*C1x*"))


def test_a_full_disk_names_the_shard(tmp_path: Path, make_dataset) -> None:
    def fill() -> None:
        with small_files(50_000), ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER) as writer:
            for i in range(100):
                writer.add(f"s{i}", torch.zeros(1, 1, 1, 1), ["a"], {})

    with pytest.raises(DiskFullError, match=rf"cannot write {tmp_path}/(latents|text)-.*tar: File too large \(.* free"):
        fill()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path: Path, make_dataset) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from vsa.data.codecs import HaarCodec\n"
        "from vsa.data.shard_writer import ShardWriter\n"
        "from vsa.data.text import HashedNgramEncoder\n"
        "writer = ShardWriter(sys.argv[1], codec=HaarCodec(1), text_encoder=HashedNgramEncoder(8, 5), "
        "samples_per_shard=3, overwrite=True)\n"
        "with writer:\n"
        "    for i in range(int(sys.argv[2])):\n"
        "        writer.add(f's{i}', torch.zeros(1, 1, 1, 1), ['a'], {})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    make_dataset(tmp_path)
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path), "7"], check=False)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"no index\.json"):
        LatentReader(tmp_path)
    for path in tmp_path.glob("[!.]*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) >= 3
    make_dataset(tmp_path)
    read_everything(LatentReader(tmp_path))
    assert not list(tmp_path.glob(".tmp-*"))


def test_an_existing_data_set_is_not_overwritten_by_accident(tmp_path: Path, make_dataset) -> None:
    make_dataset(tmp_path)
    before = (tmp_path / "index.json").read_bytes()
    with pytest.raises(ValueError, match="already holds a data set"):
        make_dataset(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == before
    make_dataset(tmp_path, videos=3, images=0, overwrite=True)
    assert len(LatentReader(tmp_path).index.samples) == 3
    assert not (tmp_path / "latents-C16x1x4x4-00000.tar").exists()


@pytest.mark.parametrize("content", [b"mine", b"", None])
def test_shards_of_others_stay(tmp_path: Path, make_dataset, content: bytes | None) -> None:
    foreign = tmp_path / "text-holiday.tar"
    if content is None:
        (tmp_path / "note").write_text("mine")
        with tarfile.open(foreign, "w") as tar:
            tar.add(tmp_path / "note", arcname="note")
    else:
        foreign.write_bytes(content)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"text-holiday\.tar is not part of a data set in"):
        make_dataset(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    foreign.rename(tmp_path / ".tmp-holiday")
    make_dataset(tmp_path)
    # a shard of ours that the index of a finished data set does not list
    shard = tmp_path / "text-00000.tar"
    shard.with_name("text-other.tar").write_bytes(shard.read_bytes())
    with pytest.raises(ValueError, match=r"text-other\.tar is not part of a data set in"):
        make_dataset(tmp_path, overwrite=True)
    assert shard.with_name("text-other.tar").exists()
    (tmp_path / "index.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="does not begin with its own digest"):
        make_dataset(tmp_path, overwrite=True)
    assert (tmp_path / ".tmp-holiday").read_bytes() == before[foreign.name]


@pytest.mark.parametrize(
    ("name", "latents", "captions", "message"),
    [
        ("../../evil", torch.zeros(1, 1, 1, 1), ["a"], r"\.\./\.\./evil"),
        ("a.b", torch.zeros(1, 1, 1, 1), ["a"], r"a\.b"),
        ("", torch.zeros(1, 1, 1, 1), ["a"], "''"),
        ("__null__", torch.zeros(1, 1, 1, 1), ["a"], "__null__"),
        ("x" * 81, torch.zeros(1, 1, 1, 1), ["a"], "1 to 80"),
        ("first", torch.zeros(1, 1, 1, 1), ["a"], "used twice"),
        ("s", torch.zeros(2, 1, 1, 1), ["a"], r"got \[2, 1, 1, 1\]"),
        ("s", torch.full((1, 1, 1, 1), float("nan")), ["a"], "not finite"),
        ("s", torch.full((1, 1, 1, 1), 1e6), ["a"], "not finite as float16"),
        ("s", torch.zeros(1, 1, 1, 1), [], "no caption"),
    ],
)
def test_bad_samples_are_refused(
    tmp_path: Path, name: str, latents: torch.Tensor, captions: list[str], message: str
) -> None:
    def write() -> None:
        with ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER) as writer:
            writer.add("first", torch.zeros(1, 1, 1, 1), ["a"], {})
            writer.add(name, latents, captions, {})

    with pytest.raises(ValueError, match=message):
        write()
    assert not list(tmp_path.iterdir())


def test_image_conditions_must_fit(tmp_path: Path) -> None:
    cases = [
        (torch.zeros(5, 2, 2, 3), r"cond_latents of b must be \[Cc, 2, 2, 2\], got \[5, 2, 2, 3\]"),
        (torch.full((5, 2, 2, 2), float("nan")), "cond_latents of b are not finite"),
        (torch.zeros(6, 2, 2, 2), "sample b has 6 channels of image condition, expected 5 as before"),
        (None, "sample b has 0 channels of image condition, expected 5 as before"),
    ]

    def write(condition: torch.Tensor | None) -> None:
        with ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER) as writer:
            writer.add("a", torch.zeros(1, 2, 2, 2), ["x"], {}, torch.zeros(5, 2, 2, 2))
            writer.add("b", torch.zeros(1, 2, 2, 2), ["x"], {}, condition)

    for condition, message in cases:
        with pytest.raises(ValueError, match=message):
            write(condition)
    with (
        pytest.raises(ValueError, match=r"image_embeds of a must be None, got \[3, 5\]"),
        ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER) as writer,
    ):
        writer.add("a", torch.zeros(1, 2, 2, 2), ["x"], {}, None, torch.zeros(3, 5))


def test_bad_writers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no samples"), ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="int8"):
        ShardWriter(tmp_path, codec=HaarCodec(1), text_encoder=ENCODER, dtype="int8")


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_pickles_and_other_members_are_refused_and_never_run(tmp_path: Path, make_dataset) -> None:
    root = make_dataset(tmp_path / "set")
    proof = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(proof))
    torch.save({"latent": Bomb(proof)}, tmp_path / "bomb.pt")
    np.save(tmp_path / "bomb.npy", np.array([Bomb(proof)], dtype=object), allow_pickle=True)
    payloads = [
        bomb,
        (tmp_path / "bomb.pt").read_bytes(),
        (tmp_path / "bomb.npy").read_bytes(),
        b"\0" * 100,
        b"{}",
        b"x",
    ]
    header = b'{"latent":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    payloads.append(len(header).to_bytes(8, "little") + header + b"\0" * 4)  # ours has a header of its own
    payloads.append((2**62).to_bytes(8, "little") + header)
    entry = LatentReader(root).index.samples["video-000"]
    for payload in payloads:
        shard = root / entry.latent.shard
        good, index = shard.read_bytes(), (root / "index.json").read_text()
        shard.write_bytes(good + payload)

        def repoint(content: dict, payload: bytes = payload, end: int = len(good)) -> None:
            for record in content["shards"]:
                if record["name"] == entry.latent.shard:
                    record["bytes"] = end + len(payload)
                    record["latents"][0][1:] = [end, len(payload), hashlib.sha256(payload).hexdigest()]

        edit_index(root, repoint)
        with pytest.raises(ValueError, match="sample video-000"):
            LatentReader(root).latent("video-000")
        shard.write_bytes(good)
        (root / "index.json").write_text(index)
    assert not proof.exists()
    # the bomb does go off where pickles are read
    pickle.loads(bomb)
    assert proof.exists()


def test_shards_of_another_encoder_under_this_index_are_refused(tmp_path: Path, make_dataset) -> None:
    root = make_dataset(tmp_path / "set")
    edit_index(root, lambda c: c["codec"].update(id="other", hash="0"))
    with pytest.raises(ValueError, match=rf"expected encoder other 0, got haar-4x8x8-c16 {HaarCodec().hash}"):
        LatentReader(root).latent("video-000")
    edit_index(root, lambda c: c["text_encoder"].update(id="other", hash="0"))
    with pytest.raises(ValueError, match="expected encoder other 0"):
        LatentReader(root)


def test_unknown_samples_and_captions(dataset: Path) -> None:
    reader = LatentReader(dataset)
    with pytest.raises(ValueError, match="absent"):
        reader.latent("absent")
    for number in (1, -1):
        with pytest.raises(ValueError, match=rf"must be in 0\.\.0, got {number}"):
            reader.text("video-000", number)
