"""A data set read whole: is every byte what the index says, and can a model train on it?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

from vsa.data.clip_rules import PATCH
from vsa.data.index import SampleEntry
from vsa.data.shards import LatentReader

# problems that are told one by one, the rest is counted
_LISTED = 20


def check_dataset(root: Path) -> None:
    """Read every shard and every sample of a data set and print what it holds.

    Raises:
        ValueError: the index or a shard is missing, or bytes, shapes or encoders are not those of the index; further
            problems are printed first.
    """
    reader = LatentReader(root)
    problems: list[str] = []
    with Progress(transient=True) as progress:
        problems += [f"shard {path} is damaged: its digest differs from the index" for path in reader.damaged_shards()]
        for sample in progress.track(list(reader.index.samples.values()), description="samples"):
            problems += _problems(reader, sample)
    for line in problems[:_LISTED] if len(problems) > 1 else ():
        print(line)
    if len(problems) > _LISTED:
        print(f"and {len(problems) - _LISTED} more")
    if problems:
        raise ValueError(problems[0] if len(problems) == 1 else f"{len(problems)} problems with the data set in {root}")
    index = reader.index
    print(index.summary())
    print(f"codec {index.codec.id} ({index.codec.hash}), {index.codec.channels} channels")
    text = index.text_encoder
    print(f"text encoder {text.id} ({text.hash}), {text.dim} wide, at most {text.max_tokens} tokens")
    captions = sum(sample.captions for sample in index.samples.values())
    size = sum(shard.bytes for shard in index.shards.values())
    print(f"{len(index.samples)} samples with {captions} captions in {len(index.shards)} shards of {size:,} bytes: ok")


def _problems(reader: LatentReader, sample: SampleEntry) -> Iterator[str]:
    """What is wrong with one sample: bytes, encoders, values, sizes."""
    try:
        latent = reader.latent(sample.id)
        if reader.index.cond_channels:
            reader.condition(sample.id)
        widths = {reader.text(sample.id, i)[1].shape[1] for i in range(sample.captions)}
    except ValueError as error:
        yield str(error)
        return
    if not latent.isfinite().all():
        yield f"sample {sample.id}: latents are not finite"
    if widths != {reader.index.text_encoder.dim}:
        yield f"sample {sample.id}: text of width {sorted(widths)}, the index says {reader.index.text_encoder.dim}"
    if any(side % PATCH for side in sample.latent_shape[2:]):
        shape = "x".join(map(str, sample.latent_shape))
        yield f"sample {sample.id}: latent {shape} does not divide into the {PATCH}x{PATCH} patches of models"
