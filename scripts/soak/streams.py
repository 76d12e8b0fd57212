"""Row about `data=stream`: a web server that truncates, refuses and damages files, and interrupted runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from scripts.soak.rows import Attempts, Row
from tests.shard_server import ShardServer, serve
from vsa.data import remote
from vsa.data.batch import VideoBatch
from vsa.data.batch_stream import RankSlice
from vsa.data.codecs import HaarCodec
from vsa.data.index import SampleEntry
from vsa.data.shard_writer import ShardWriter
from vsa.data.shards import LatentReader
from vsa.data.stream import samples_by_shard
from vsa.data.stream_datamodule import StreamDataModule
from vsa.data.text import HashedNgramEncoder

_SHAPE = (16, 2, 2, 4)
_TEXT = HashedNgramEncoder(dim=8, max_tokens=5)
# permanent and temporary HTTP errors
_STATUSES = (403, 404, 429, 503)


def _module(urls: Sequence[str], *, shuffle_buffer: int, num_workers: int) -> StreamDataModule:
    module = StreamDataModule(
        urls=list(urls),
        codec=HaarCodec(16),
        text_encoder=_TEXT,
        batch_size=12,
        shuffle_buffer=shuffle_buffer,
        num_workers=num_workers,
    )
    module.setup()
    return module


def _batches(module: StreamDataModule, *, rank: int, world: int, steps: int, start: int) -> Iterator[VideoBatch]:
    """Batches of one rank, without a process group."""
    module._part = lambda: RankSlice(rank=rank, world=world)  # type: ignore[method-assign]
    module._first_shard = start
    stream = module.train_dataloader().dataset
    stream.steps = steps  # type: ignore[attr-defined]
    for batch in DataLoader(stream, batch_size=None, num_workers=module.num_workers):
        module.on_after_batch_transfer(batch, 0)
        yield batch


def _write(root: Path, shards: int, per_shard: int, seed: int) -> LatentReader:
    generator = torch.Generator().manual_seed(seed)
    with ShardWriter(root, codec=HaarCodec(16), text_encoder=_TEXT, samples_per_shard=per_shard) as writer:
        for i in range(shards * per_shard):
            writer.add(f"clip-{i:03d}", torch.randn(_SHAPE, generator=generator), [f"clip {i}"], {})
    return LatentReader(root)


def _damage(server: ShardServer, parts: dict[str, list[SampleEntry]], draw: random.Random) -> set[str]:
    """Add faults to a server and its files; returns the samples that may be lost."""
    lost: set[str] = set()
    server.ranges = draw.random() < 0.7
    server.breaks = {name: draw.randrange(len(remote.PAUSES)) for name in parts if draw.random() < 0.6}
    if draw.random() < 0.4:
        lost_shard = draw.choice(sorted(parts))
        server.status[lost_shard] = draw.choice(_STATUSES)
        lost |= {entry.id for entry in parts[lost_shard]}
    if draw.random() < 0.4:
        short = draw.choice(sorted(parts))
        # one sample at least arrives: where hardly any does, the stream ends by itself
        first = draw.randrange(1, len(parts[short]))
        server.ends[short] = parts[short][first].latent.offset + draw.randrange(parts[short][first].latent.size)
        lost |= {entry.id for entry in parts[short][first:]}
    if draw.random() < 0.6:
        entry = draw.choice(parts[draw.choice(sorted(parts))])
        path, place = server.root / entry.latent.shard, entry.latent.offset + draw.randrange(entry.latent.size)
        content = bytearray(path.read_bytes())
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        lost.add(entry.id)
    return lost


def _one(root: Path, draw: random.Random) -> str | None:
    """Stream a part of an epoch with faults, stop, and resume with other settings; returns the failure, or None."""
    reader = _write(root, shards := draw.randint(3, 6), draw.randint(5, 10), draw.randrange(1 << 30))
    good = {name: reader.latent(name) for name in reader.index.samples}
    parts = samples_by_shard(reader.index)
    buffer, world = draw.randint(1, 12), draw.choice((1, 2, 3))
    wrong: list[str] = []
    trained_ids: set[str] = set()
    reported_ids: set[str] = set()

    def take(batch: VideoBatch) -> None:
        trained_ids.update(batch.sample_ids)
        reported_ids.update(bad.id for bad in batch.bad)
        wrong.extend(
            name
            for name, latents in zip(batch.sample_ids, batch.latents, strict=True)
            if not torch.equal(latents, good[name])
        )

    with serve(root) as server:
        urls = [f"{server.url}/{name}" for name in parts]
        module, ends = _module(urls, shuffle_buffer=buffer, num_workers=draw.choice((0, 0, 0, 2))), []
        lost = _damage(server, parts, draw)
        steps = draw.randint(1, max(1, len(good) // 12))
        for rank in range(world):
            for batch in _batches(module, rank=rank, world=world, steps=steps, start=0):
                take(batch)
            # set by hand, because there is no process group
            module._part = lambda rank=rank: RankSlice(rank=rank)  # type: ignore[method-assign]
            ends.append(module._next_shard())
        start = min(ends)
        before = {entry.id for place in range(start) for entry in module._order.at(place)}
        if not before <= trained_ids | reported_ids:
            return f"a resume would leave out {sorted(before - trained_ids - reported_ids)[:3]}"
        module = _module(urls, shuffle_buffer=buffer, num_workers=draw.choice((0, 0, 0, 1)))
        world = draw.choice((1, 2, 3))
        # enough steps for the share of a reader in the shards of an epoch, and for its shuffle buffer
        steps = 2 * shards * len(next(iter(parts.values()))) * world // 12 + 3 * buffer
        for rank in range(world):
            for batch in _batches(module, rank=rank, world=world, steps=steps, start=start):
                take(batch)
    if wrong:
        return f"wrong latents of {wrong[:3]}"
    if not reported_ids <= lost:
        return f"whole samples were given up: {sorted(reported_ids - lost)[:3]}"
    missing = good.keys() - trained_ids - reported_ids
    return f"neither trained on nor told: {sorted(missing)[:3]}" if missing else None


def _faults(folder: Path, tries: int, seed: int) -> Attempts:
    # changes only the process of this row
    remote.PAUSES = (0.0, 0.0, 0.0)
    for number in range(tries):
        yield f"try {number}", _one(folder / f"set-{number}", random.Random(f"{seed}/{number}"))


ROWS: tuple[Row, ...] = (
    Row(name="streams past broken servers and over a resume", tries=60, short_tries=2, run=_faults),
)
