"""Rows about data: damaged and forged shards and indexes, and runs on data with bad samples."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.soak import hostile_media
from scripts.soak.rows import Attempts, Row
from tests.forged_samples import SHAPE, TEXT, edit_index, forge, forgeries
from vsa.data.bad_samples import BadSampleError
from vsa.data.codecs import HaarCodec
from vsa.data.datamodule import LatentDataModule
from vsa.data.index import INDEX_NAME
from vsa.data.plan import is_validation
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader


def _write(root: Path, *, count: int = 24, per_shard: int = 10) -> Path:
    """A data set of random latents, each with two captions."""
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(root, codec=HaarCodec(), text_encoder=TEXT, samples_per_shard=per_shard) as writer:
        for i in range(count):
            latents = torch.randn(SHAPE, generator=generator)
            writer.add(f"clip-{i:03d}", latents, [f"clip {i}", f"the {i}th clip"], {"source": f"{i}.mp4"})
    return root


def _read(root: Path) -> dict[str, list[Tensor] | str]:
    """The tensors that training reads of each sample, or the cause of its failure."""
    reader = LatentReader(root)
    result: dict[str, list[Tensor] | str] = {}
    for name in reader.index.samples:
        try:
            result[name] = [reader.latent(name), *(reader.text(name, caption)[1] for caption in range(2))]
        except BadSampleError as error:
            result[name] = error.cause
    return result


def _same(read: dict[str, Any], good: dict[str, Any]) -> bool:
    """Whether each sample is unchanged or reported as bad."""
    return read.keys() == good.keys() and all(
        isinstance(value, str) or all(torch.equal(a, b) for a, b in zip(value, good[name], strict=True))
        for name, value in read.items()
    )


def _one_line(error: BaseException, *words: str) -> bool:
    return (
        type(error) in (ValueError, BadSampleError) and "\n" not in str(error) and all(w in str(error) for w in words)
    )


def _flipped_shards(folder: Path, tries: int, seed: int) -> Attempts:
    root, draw = _write(folder / "set"), random.Random(seed)
    good, num_reported = _read(root), 0
    for i in range(tries):
        path = draw.choice(sorted(root.glob("*.tar")))
        content = path.read_bytes()
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        try:
            reader, read = LatentReader(root), _read(root)
            num_reported += any(isinstance(value, str) for value in read.values())
            found = _same(read, good) and list(reader.damaged_shards()) == [path]
            failure = None if found else "not found"
        except ValueError as error:
            # opening a data set already reads the null embedding
            num_reported += 1
            failure = None if _one_line(error, path.name, "__null__") else repr(error)
        yield f"try {i}: bit {bit} of byte {place} of {path.name}", failure
        path.write_bytes(content)
    return (f"{num_reported} of {tries} in bytes that a training reads, all {tries} found by a whole read",)


def _flipped_index(folder: Path, tries: int, seed: int) -> Attempts:
    root, draw = _write(folder / "set"), random.Random(seed)
    path = root / INDEX_NAME
    content = path.read_bytes()
    for i in range(tries):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        yield f"try {i}: bit {bit} of byte {place}", _not_refused(root)


def _not_refused(root: Path, *words: str) -> str | None:
    """None if opening a data set raises an error of one line with the name of its file and these words."""
    try:
        LatentReader(root)
    except Exception as error:
        return None if _one_line(error, root.name, *words) else repr(error)[:200]
    return "accepted"


def _cut_shards(folder: Path, tries: int, seed: int) -> Attempts:
    root, draw = _write(folder / "set"), random.Random(seed)
    for i in range(tries):
        path = draw.choice(sorted(root.glob("*.tar")))
        content = path.read_bytes()
        # every second try cuts at the end of a tar block
        cut = draw.randrange(len(content)) // (512 if i % 2 else 1) * (512 if i % 2 else 1)
        path.write_bytes(content[:cut])
        yield f"try {i}: {path.name} cut at {cut}", _not_refused(root, path.name)
        path.write_bytes(content)


def _module(root: Path, **options: Any) -> LatentDataModule:
    return LatentDataModule(
        root=str(root), codec=HaarCodec(), text_encoder=TEXT, val_fraction=0, caption_dropout=0, **options
    )


def _forged_members(folder: Path, tries: int, seed: int) -> Attempts:
    """Draw each sample in the first step of a training, which has to skip it and report the cause."""
    good = _write(folder / "good", count=8)
    for forgery in islice(forgeries(), tries):
        root = shutil.copytree(good, folder / "set")
        forge(root, "clip-003", forgery.kind, forgery.payload)
        try:
            module = _module(root, batch_size=8)
            module.setup()
            batch = next(iter(module.train_dataloader()))
            reports = [(bad.id, bad.cause) for bad in batch.bad]
            passed = len(batch.sample_ids) == 8 and "clip-003" not in batch.sample_ids
            whole = bool(batch.latents.isfinite().all() and batch.text.isfinite().all())
            # a sample that replaces itself is reported only once
            good_report = set(reports) == {("clip-003", forgery.cause)}
            failure = None if good_report and passed and whole else f"told {reports}, expected {forgery.cause}"
        except Exception as error:
            failure = repr(error)
        yield forgery.name, failure
        shutil.rmtree(root)


def index_tricks() -> dict[str, tuple[Callable[[dict[str, Any]], object], str]]:
    """Changes of an index that must raise an error, each with a part of the message."""

    def first(index: dict[str, Any], kind: str = "latents") -> dict[str, Any]:
        return next(shard for shard in index["shards"] if shard.get(kind))

    def row(index: dict[str, Any], place: int, value: object, kind: str = "latents") -> None:
        first(index, kind)[kind][0][place] = value

    return {
        "mean NaN": (lambda i: i["latent_mean"].__setitem__(2, math.nan), "latent_mean[2]=nan"),
        "mean Inf": (lambda i: i["latent_mean"].__setitem__(0, math.inf), "latent_mean[0]=inf"),
        "mean 1e30": (lambda i: i["latent_mean"].__setitem__(0, 1e30), "latent_mean[0]=1e+30"),
        "deviation 0": (lambda i: i["latent_std"].__setitem__(1, 0.0), "latent_std[1]=0.0"),
        "deviation negative": (lambda i: i["latent_std"].__setitem__(1, -1.0), "latent_std[1]=-1.0"),
        "deviation Inf": (lambda i: i["latent_std"].__setitem__(1, math.inf), "latent_std[1]=inf"),
        "deviation as text": (lambda i: i["latent_std"].__setitem__(1, "1"), "latent_std[1]='1'"),
        "one mean short": (lambda i: i["latent_mean"].pop(), "15 and 16 values"),
        "one deviation": (lambda i: i.update(latent_std=[1.0]), "16 and 1 values"),
        "stride 0": (lambda i: i["codec"].update(stride=[0, 8, 8]), "codec.stride[0]=0"),
        "stride of two": (lambda i: i["codec"].update(stride=[8, 8]), "codec.stride=[8, 8]"),
        "channels 2^40": (lambda i: i["codec"].update(channels=1 << 40), "codec.channels=1099511627776"),
        "10^9 captions": (lambda i: row(i, 4, 10**9, "texts"), "captions=1000000000"),
        "no captions": (lambda i: row(i, 4, 0, "texts"), "captions=0"),
        "10^12 tokens": (lambda i: i["text_encoder"].update(max_tokens=10**12), "max_tokens=1000000000000"),
        "width true": (lambda i: i["text_encoder"].update(dim=True), "text_encoder.dim=True"),
        "latents of 2^60 cells": (lambda i: first(i).update(latent_shape=[16, 2**19, 2**19, 2**19]), "latent_shape"),
        "latents without frames": (lambda i: first(i).update(latent_shape=[16, 0, 2, 4]), "latent_shape[1]=0"),
        "an offset before the file": (lambda i: row(i, 1, -512), "=-512"),
        "bytes past the file": (lambda i: row(i, 2, 10**9), "which has"),
        "a shard above the folder": (lambda i: first(i).update(name="../set/x.tar"), "shard name"),
        "an id with a path": (lambda i: row(i, 0, "../../etc/passwd"), "etc/passwd"),
        "a sample without text": (lambda i: first(i, "texts")["texts"].pop(), "without latent or text"),
    }


def _index_tricks(folder: Path, tries: int, seed: int) -> Attempts:
    root = _write(folder / "set")
    content = (root / INDEX_NAME).read_text()
    for name, (change, word) in islice(index_tricks().items(), tries):
        edit_index(root, change)
        yield name, _not_refused(root, INDEX_NAME, word)
        (root / INDEX_NAME).write_text(content)


def _runs_with_bad_samples(folder: Path, tries: int, seed: int) -> Attempts:
    """A run skips a bad sample; stopping it and resuming with another number of workers changes nothing."""
    # imported here, because it imports the whole package, which other rows do not need
    from scripts.soak.tiny import STEPS, metrics, run_folder, start, words, write_shards
    from vsa.checkpoints.run_checkpoint import resolve_checkpoint

    draw, met = random.Random(seed), 0
    for i in range(tries):
        own = folder / f"try-{i}"
        own.mkdir()
        root = write_shards(own / "shards")
        index = LatentReader(root).index
        sample = draw.choice([name for name in index.samples if not is_validation(name, 0.1)])
        span = draw.choice([index.samples[sample].latent, index.samples[sample].text])
        content = bytearray((root / span.shard).read_bytes())
        content[span.offset + draw.randrange(span.size)] ^= 1 << draw.randrange(8)
        (root / span.shard).write_bytes(content)
        cut, workers = draw.randrange(1, STEPS), draw.randrange(3)

        def train(*overrides: str, own: Path = own) -> int:
            return start(words(own, "data.caption_dropout=0", *overrides), folder=own).wait()

        straight, other = run_folder(own, "straight"), run_folder(own, "cut")
        status = [
            train("run=straight"),
            train("run=cut", f"trainer.max_steps={cut}"),
            train("run=cut", "ckpt_path=last", f"data.num_workers={workers}"),
        ]
        what = f"try {i}: {sample} in {span.shard}, cut at {cut}, {workers} workers"
        if any(status):
            yield what, f"exit status {status}"
            continue
        saved = [resolve_checkpoint("last", run) for run in (straight, other)]
        losses = [{step: row["train/loss"] for step, row in metrics(run).items()} for run in (straight, other)]
        counts = [checkpoint.state["bad_samples"] for checkpoint in saved]
        tensors = [
            {f"{group}/{key}": t for group in ("model", "ema", "optimizer") for key, t in each.tensors(group).items()}
            for each in saved
        ]
        met += sum(count for _, _, count in counts[0]["counts"])
        equal = {
            "counts": counts[0] == counts[1] and counts[0]["samples"].keys() == {f"main/{sample}"},
            "losses": losses[0] == losses[1] and len(losses[0]) == STEPS,
            "tensors": all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items()),
        }
        yield what, None if all(equal.values()) else str(equal)
        shutil.rmtree(own)
    return (f"{met} draws of bad samples passed",)


ROWS: tuple[Row, ...] = (
    Row(
        name="runs that meet a bad sample pass it and resume bit-equal",
        tries=10,
        short_tries=1,
        run=_runs_with_bad_samples,
    ),
    Row(name="bit flips in shards: no wrong sample is trained on", tries=300, short_tries=20, run=_flipped_shards),
    Row(name="bit flips in index.json are refused", tries=300, short_tries=100, run=_flipped_index),
    Row(name="shards cut short are refused by name", tries=200, short_tries=40, run=_cut_shards),
    Row(name="forged members with right digests are passed and told", tries=40, short_tries=40, run=_forged_members),
    hostile_media.ROW,
    Row(name="impossible numbers and names in index.json are refused", tries=22, short_tries=22, run=_index_tricks),
)
