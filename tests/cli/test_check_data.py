"""`vsa check-data` and `vsa info`."""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import torch

from tests.data.conftest import write_dataset
from tests.forged_samples import edit_index, forge, forgeries
from vsa.data.check import _problems, _wrong_statistics
from vsa.data.codecs import HaarCodec
from vsa.data.datamodule import LatentDataModule
from vsa.data.index_statistics import decoded_moments
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder


def test_a_whole_data_set_and_one_with_damaged_bytes(command_line, tmp_path):
    root = write_dataset(tmp_path / "shards")
    status, out, err = command_line("check-data", str(root))
    assert (status, err) == (0, "")
    assert "32 samples with 63 captions" in out
    assert "haar-4x8x8-c16" in out
    span = next(iter(LatentReader(root).index.samples.values())).latent
    victim = root / span.shard
    content = bytearray(victim.read_bytes())
    content[span.offset + span.size - 1] ^= 1
    victim.write_bytes(content)
    status, out, err = command_line("check-data", str(root))
    assert (status, err) == (1, f"error: 2 problems with the data set in {root}\n")
    assert f"shard {victim} is damaged: its digest differs from the index" in out
    assert "the bytes are damaged" in out


def test_what_cannot_be_trained_on_is_listed_and_left_out(command_line, tmp_path):
    root = write_dataset(tmp_path / "shards")
    samples = LatentReader(root).index.samples
    nan_forgery = next(forgery for forgery in forgeries() if forgery.name == "a NaN")
    forge(root, "video-003", "latents", nan_forgery.payload)
    shard = samples["image-023"].text.shard
    (root / shard).unlink()
    missing = {name for name, sample in samples.items() if sample.text.shard == shard}
    arguments = ["check-data", str(root), "--drop-list", str(tmp_path / "drop.txt")]
    status, out, err = command_line(*arguments)
    assert status == 1
    # the shard and each sample
    assert err == f"error: {1 + len(missing | {'video-003'})} problems with the data set in {root}\n"
    assert f"shard {root / shard} is missing" in out
    assert f"train with data.drop={tmp_path / 'drop.txt'}" in out
    reasons = dict(line.split("\t") for line in (tmp_path / "drop.txt").read_text().splitlines()[1:])
    assert reasons.keys() == missing | {"video-003"}
    assert reasons["video-003"] == "nan in latents-C16x2x2x4-00000.tar"
    data = LatentDataModule(
        root=str(root),
        drop=str(tmp_path / "drop.txt"),
        codec=HaarCodec(),
        text_encoder=HashedNgramEncoder(dim=8, max_tokens=5),
        batch_size=4,
        val_fraction=0,
    )
    data.setup()
    assert {name for ids in data.store.buckets["main"].values() for name in ids} == samples.keys() - reasons.keys()


def test_statistics_that_are_not_those_of_the_latents_are_told(command_line, tmp_path):
    root = write_dataset(tmp_path / "shards")
    edit_index(root, lambda index: index["latent_mean"].__setitem__(3, index["latent_mean"][3] + 0.01))
    status, _, err = command_line("check-data", str(root))
    assert status == 1
    assert "latent_mean[3]=" in err
    assert not (root / "drop.txt").exists()


def test_every_stored_statistic_is_compared_and_nan_is_none(tmp_path):
    reader = LatentReader(write_dataset(tmp_path / "shards"))
    index, channels = reader.index, reader.index.codec.channels
    sums = torch.zeros(3, channels, dtype=torch.float64)
    assert not [problem for sample in index.samples.values() for problem in _problems(reader, sample, sums)]
    assert not [*_wrong_statistics(index, sums)]
    for name in ("latent_mean", "latent_std"):
        for value in (math.nan, math.inf, getattr(index, name)[2] + 0.01, getattr(index, name)[2] - 0.01):
            values = [*getattr(index, name)]
            values[2] = value
            (problem,) = _wrong_statistics(replace(index, **{name: values}), sums)
            assert problem.startswith(f"{name}[2]={value:.6g} in the index, but the latents have ")
    sample = next(iter(index.samples.values()))
    for row in range(2):
        for value in (math.nan, math.inf, 3.0):
            moments = decoded_moments(sample, channels).copy()
            moments[row, 5] += value
            about = replace(sample.about, moments=base64.b64encode(moments.tobytes()).decode())
            ((cause, problem),) = _problems(reader, replace(sample, about=about), sums.clone())
            assert cause == "statistics in index.json"
            assert f"statistics of {sample.id} " in problem


def test_a_data_set_without_samples_is_not_ok(command_line, tmp_path):
    root = write_dataset(tmp_path / "shards")

    def empty(index):
        for shard in index["shards"]:
            for name in ("latents", "texts", "about"):
                shard.pop(name, None)

    edit_index(root, empty)
    status, out, err = command_line("check-data", str(root))
    assert (status, ": ok" in out) == (1, False)
    assert f"{root} holds no samples" in out + err


def test_a_folder_without_an_index_is_one_line(command_line, tmp_path):
    status, _, err = command_line("check-data", str(tmp_path))
    assert status == 1
    assert "no index.json" in err


def test_info_names_the_backends_and_why_one_does_not_run(command_line):
    status, out, _ = command_line("info")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("backend ")]
    assert lines[0].endswith("reference on cpu: runs")
    assert "gather on cpu: runs, the automatic choice" in lines[1]
    assert "triton on cpu" in lines[2]
