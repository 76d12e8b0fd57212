"""Check of a whole data set: every byte against the index, and every sample for training."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from vsa.data.bad_samples import BadSampleError, write_drop_list
from vsa.data.clip_rules import patch_of
from vsa.data.index import INDEX_NAME, DatasetIndex, SampleEntry
from vsa.data.index_statistics import decoded_moments, deviation_or_one
from vsa.data.revisions import open_local_index
from vsa.data.shards import LatentReader
from vsa.errors import first_of
from vsa.settings import key_value

# relative to the standard deviation: stored statistics were summed in another order
_TOLERANCE = 1e-3


def check_dataset(root: Path, drop_list: Path | None = None) -> None:
    """Read every shard and sample of a data set, print its content, and raise ValueError for any problem.

    Args:
        root: folder of shards.
        drop_list: file in which bad samples are listed for `data.drop`, written if there are any; None: `drop.txt` in
            `root`.
    """
    # runs of earlier revisions need their indexes
    _, newest = open_local_index(root, 1)
    reader = LatentReader(root, index=newest, whole=False)
    problems, bad = list(reader.misshapen_shards().values()), dict[str, str]()
    if not reader.index.samples:
        problems.append(f"{root} holds no samples")
    sums = torch.zeros(3, reader.index.codec.channels, dtype=torch.float64)
    with Progress(transient=True) as progress:
        problems += [f"shard {path} is damaged: its digest differs from the index" for path in reader.damaged_shards()]
        try:
            reader.read_null_text()
        except BadSampleError as error:
            problems.append(f"{error}: every run needs it, encode the data set again")
        for sample in progress.track(list(reader.index.samples.values()), description="samples"):
            for cause, problem in _problems(reader, sample, sums):
                problems.append(problem)
                bad.setdefault(sample.id, cause)
    if not problems:
        problems += _wrong_statistics(reader.index, sums)
    if len(problems) > 1:
        print(*first_of(problems), sep="\n")
    if bad:
        path = root / "drop.txt" if drop_list is None else drop_list
        write_drop_list(path, bad, found_by=f"vsa check-data {root}")
        words = shlex.quote(key_value("data.drop", path))
        print(f"{len(bad)} of {len(reader.index.samples)} samples to leave out: train with {words}")
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else f"{len(problems)} problems with the data set in {root}")
    _print_content(reader.index)


def _print_content(index: DatasetIndex) -> None:
    print(index.summary())
    print(f"codec {index.codec.id} ({index.codec.hash}), {index.codec.channels} channels")
    text = index.text_encoder
    print(f"text encoder {text.id} ({text.hash}), {text.dim} wide, at most {text.max_tokens} tokens")
    if index.cond_channels:
        print(f"image condition of {index.cond_channels} channels")
    if (image := index.image_encoder) is not None:
        print(f"image encoder {image.id} ({image.hash}), {image.dim} wide, {image.tokens} tokens")
    captions = sum(sample.captions for sample in index.samples.values())
    size = sum(shard.bytes for shard in index.shards.values())
    print(f"{len(index.samples)} samples with {captions} captions in {len(index.shards)} shards of {size:,} bytes: ok")


def _problems(reader: LatentReader, sample: SampleEntry, sums: Tensor) -> Iterator[tuple[str, str]]:
    """(cause and shard, problem) for every problem of a sample; adds count, sum and squares of a good one to sums."""
    try:
        latent = reader.latent(sample.id)
        reader.image_inputs(sample.id)
        for _ in reader.texts(sample.id):
            pass
    except BadSampleError as error:
        yield f"{error.cause} in {error.shard}", str(error)
        return
    flat = latent.double().flatten(1)
    sums += torch.stack([torch.full((len(flat),), flat.shape[1]), flat.sum(1), (flat**2).sum(1)])
    try:
        stored = torch.tensor(decoded_moments(sample, len(flat)))
        actual = torch.stack([flat.mean(1), flat.std(1, correction=0)])
        if not ((stored - actual).abs() <= _TOLERANCE * actual[1] + 1e-6 * actual[0].abs()).all():
            raise ValueError(f"{INDEX_NAME}: statistics of {sample.id} differ from those of its latents")
    except ValueError as error:
        yield f"statistics in {INDEX_NAME}", str(error)
    patch = patch_of(reader.index.codec.id)
    if any(side % patch for side in sample.latent_shape[2:]):
        shape = "x".join(map(str, sample.latent_shape))
        problem = f"sample {sample.id}: latent {shape} does not divide into the {patch}x{patch} patches of models"
        yield f"shape in {sample.latent.shard}", problem


def _wrong_statistics(index: DatasetIndex, sums: Tensor) -> Iterator[str]:
    """Problems of channels whose mean or standard deviation in the index differs from that of the latents."""
    count, total, squares = sums
    mean = total / count
    std = deviation_or_one((squares / count - mean**2).clamp_min(0).sqrt())
    for channel in range(len(mean)):
        for name, actual, expected in (
            ("latent_mean", float(mean[channel]), index.latent_mean[channel]),
            ("latent_std", float(std[channel]), index.latent_std[channel]),
        ):
            if not abs(actual - expected) <= _TOLERANCE * float(std[channel]):
                yield f"{name}[{channel}]={expected:.6g} in the index, but the latents have {actual:.6g}"
