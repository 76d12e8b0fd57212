"""Streaming: batches from shards that are read sequentially from URLs, with each sample at least once per epoch.

Shards have an endless order: epoch after epoch, each a permutation of all shards. With R readers (ranks times workers),
reader r takes the shards at positions r, r + R, ..., so that no reader waits for another one, whatever the size of the
shards. A reader shuffles its samples in a buffer. Its progress is one number, the first position with samples that it
has not yielded yet. A resumed run begins at the smallest of these numbers, with any number of readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from torch.utils.data import IterableDataset, get_worker_info

from vsa.data.bad_samples import BadSample, BadSampleError, NoGoodSample
from vsa.data.batch import StreamMark, TextPadding, VideoBatch
from vsa.data.batch_stream import Draw, RankSlice, read_batch
from vsa.data.index import DatasetIndex, SampleEntry, Span
from vsa.data.index_statistics import pooled_statistics
from vsa.data.plan import SampleRef, draw64, hash64, permute_index, sample_seed
from vsa.data.remote import RemoteError, read_file, read_spans
from vsa.data.revisions import open_revision
from vsa.data.sample_store import ShardStore
from vsa.data.shards import LatentReader

TRAIN, VALIDATION = "main", "validation"
"""Names of the sources of a store of streamed samples."""

# number of consecutive shards without a good sample after which a reader gives up
_HOPELESS = 10


class HeldReader(LatentReader):
    """Reader of samples whose bytes it holds in memory.

    Args:
        folder: path or URL of the shards, for messages.
        index: index of the folder.
        null: bytes of the null embedding.
    """

    def __init__(self, folder: str, index: DatasetIndex, null: bytes) -> None:
        super().__init__(folder, index=index, whole=False)
        self.place = folder
        self._null = {index.null_text: null}
        self._held = self._null
        self.null_text = self.read_null_text()

    def hold(self, payloads: Mapping[Span, bytes]) -> None:
        """Replace the held bytes by these, by member."""
        self._held = {**self._null, **payloads}

    def _payload(self, key: str, span: Span) -> bytes:
        if span not in self._held:
            raise self._bad(key, span, "unreadable", "did not arrive")
        return self._held[span]


class StreamStore(ShardStore):
    """Store of the samples that have arrived, of the training set and the validation set.

    Args:
        readers: readers by source: `TRAIN` and, with a validation set, `VALIDATION`.
    """

    def __init__(self, readers: Mapping[str, HeldReader]) -> None:
        super().__init__(readers)
        self.readers = readers
        mean, std = pooled_statistics([readers[TRAIN].index])
        self.latent_mean, self.latent_std = mean.float(), std.float()


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A sample with the members that could be read.

    Args:
        place: position of its shard in the order of shards.
        last: whether it is the last sample of its shard.
        entry: its entry in the index.
        payloads: bytes by member.
    """

    place: int
    last: bool
    entry: SampleEntry
    payloads: Mapping[Span, bytes]


@dataclass(frozen=True, kw_only=True)
class ShardOrder:
    """The endless order of shards.

    Args:
        folder: path or URL of the folder of the shards.
        shards: samples of each shard, by ascending offset.
        seed: seed of the order.
    """

    folder: str
    shards: Sequence[Sequence[SampleEntry]]
    seed: int

    def at(self, place: int) -> Sequence[SampleEntry]:
        """Samples of the shard at a position, which is counted through all epochs."""
        epoch, number = divmod(place, len(self.shards))
        return self.shards[permute_index(number, len(self.shards), hash64(self.seed, "shards", epoch))]

    def samples(self, first: int, every: int) -> Iterator[Arrived]:
        """Endless samples of the shards at positions `first`, `first + every`, ..."""
        for place in count(first, every):
            entries = self.at(place)
            for number, (entry, payloads) in enumerate(read_samples(self.folder, entries, told), 1):
                yield Arrived(place=place, last=number == len(entries), entry=entry, payloads=payloads)


class ShuffleBuffer:
    """Shuffle buffer of a reader.

    Args:
        samples: stream of samples without end.
        size: number of samples that the buffer holds.
        seed: seed of the shuffle.
        first, every: positions of the reader's shards.
    """

    def __init__(self, samples: Iterator[Arrived], *, size: int, seed: int, first: int, every: int) -> None:
        self._samples, self._size, self._seed, self._every = samples, size, seed, every
        self._held: list[Arrived] = []
        self._drawn, self._unread = 0, first

    @property
    def mark(self) -> int:
        """First position with samples that have not been drawn yet."""
        return min([self._unread, *(sample.place for sample in self._held)])

    def draw(self) -> Arrived:
        """Fill the buffer and draw one of its samples."""
        while len(self._held) < self._size:
            sample = next(self._samples)
            self._unread = sample.place + self._every * sample.last
            self._held.append(sample)
        place = hash64(self._seed, self._drawn) % self._size
        self._drawn += 1
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        return self._held.pop()


@dataclass(kw_only=True, eq=False)
class StreamedBatches(IterableDataset[VideoBatch]):
    """Training micro-batches of one rank; the order depends on seed, start, ranks and workers.

    Args:
        store: store of the samples of the current batch.
        order: order of the shards.
        part: this rank's part of a global batch.
        batch_size: samples of a global batch.
        text_padding: see `vsa.data.batch.TextPadding`.
        seed: seed of shuffle, captions and noise.
        start_step: first optimizer step.
        steps: number of optimizer steps.
        start_shard: position in the order of shards where reading begins.
        caption_dropout: probability that a sample is trained on the null embedding.
        buffer: number of samples in the shuffle buffer of each reader.
    """

    store: StreamStore
    order: ShardOrder
    part: RankSlice
    batch_size: int
    text_padding: TextPadding
    seed: int
    start_step: int
    steps: int
    start_shard: int
    caption_dropout: float
    buffer: int

    def __post_init__(self) -> None:
        self.part.slots(self.batch_size, 0)
        self._hopeless = _HOPELESS * max(map(len, self.order.shards))

    def __len__(self) -> int:
        return self.steps * self.part.accumulate

    def __iter__(self) -> Iterator[VideoBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = self.start_shard + self.part.rank * workers + worker
        every = self.part.world * workers
        seed = hash64(self.seed, "buffer", first)
        samples = self.order.samples(first, every)
        buffer = ShuffleBuffer(samples, size=self.buffer, seed=seed, first=first, every=every)
        for i in range(worker, len(self), workers):
            batch = self._batch(*divmod(i, self.part.accumulate), buffer)
            yield replace(batch, mark=StreamMark(worker=worker, shard=buffer.mark))

    def _batch(self, number: int, micro: int, buffer: ShuffleBuffer) -> VideoBatch:
        """A micro-batch of good samples, with a record of the bad ones that were drawn before them."""
        step, slots = self.start_step + number, self.part.slots(self.batch_size, micro)
        samples = [buffer.draw() for _ in slots]
        bad: list[BadSample] = []
        # the place in the batch that is being filled, and how many samples in a row were bad for it
        place, in_row = -1, 0
        while True:
            self.store.readers[TRAIN].hold({span: data for sample in samples for span, data in sample.payloads.items()})
            draws = [self._draw(sample.entry, step, slot) for sample, slot in zip(samples, slots, strict=True)]
            try:
                batch = read_batch(
                    self.store, draws, text_padding=self.text_padding, num_slots=self.batch_size, step=step
                )
                return replace(batch, bad=tuple(bad))
            except BadSampleError as error:
                before, place = place, next(i for i, sample in enumerate(samples) if sample.entry.id == error.sample)
                in_row = in_row + 1 if place == before else 0
                if in_row == self._hopeless:
                    raise NoGoodSample(f"{error}; all of the {in_row:,} samples drawn before it are bad too") from None
                bad.append(
                    BadSample(
                        source=TRAIN, id=error.sample, shard=error.shard, cause=error.cause, slot=draws[place].slot
                    )
                )
                samples[place] = buffer.draw()

    def _draw(self, entry: SampleEntry, step: int, slot: int) -> Draw:
        # keyed by the slot, so that a sample that occurs twice in the global batch gets different noise
        dropped = draw64(self.seed, "caption dropout", step, entry.id, slot) < self.caption_dropout * 2.0**64
        return Draw(
            ref=SampleRef(source=TRAIN, id=entry.id),
            caption=None if dropped else draw64(self.seed, "caption", step, entry.id, slot) % entry.captions,
            seed=sample_seed(self.seed, step, entry.id, slot),
            slot=slot,
        )


def open_index(folder: str, revision: int | None = None) -> DatasetIndex:
    """The index of a folder, of one of its revisions; None: the newest one."""

    def read(name: str) -> str:
        url = f"{folder}/{name}"
        try:
            return read_file(url).decode()
        except RemoteError as error:
            what = ": streaming needs a folder written by vsa encode, with its index" if error.missing else ""
            raise ValueError(f"{error}{what}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"cannot read {url}: {error}") from None

    return open_revision(read, folder, revision)[0]


def open_reader(folder: str, index: DatasetIndex) -> HeldReader:
    """A reader that holds only the null embedding."""
    try:
        (null,) = read_spans(f"{folder}/{index.null_text.shard}", [index.null_text])
    except RemoteError as error:
        raise ValueError(str(error)) from None
    return HeldReader(folder, index, null)


def samples_by_shard(index: DatasetIndex) -> dict[str, list[SampleEntry]]:
    """Samples of every latent shard, by ascending offset."""
    shards: dict[str, list[SampleEntry]] = {}
    for sample in sorted(index.samples.values(), key=lambda sample: sample.latent.offset):
        shards.setdefault(sample.latent.shard, []).append(sample)
    return shards


def read_samples(
    folder: str, entries: Sequence[SampleEntry], tell: Callable[[RemoteError], None]
) -> Iterator[tuple[SampleEntry, dict[Span, bytes]]]:
    """Samples with the bytes of their members; after an error, which is reported, the remaining ones have no bytes.

    Args:
        folder: path or URL of the shards.
        entries: samples of one latent shard, by ascending offset.
        tell: function called with an error; may raise another one.
    """
    latents = _members(folder, [entry.latent for entry in entries], tell)
    texts = _members(folder, [entry.text for entry in entries], tell)
    for entry, latent, text in zip(entries, latents, texts, strict=True):
        pairs = ((entry.latent, latent), (entry.text, text))
        yield entry, {span: payload for span, payload in pairs if payload is not None}


def told(error: RemoteError) -> None:
    """Print which shard cannot be read; its samples count as bad."""
    print(f"data=stream: {error}; its remaining samples count as bad (unreadable)", flush=True)


def _members(folder: str, spans: Sequence[Span], tell: Callable[[RemoteError], None]) -> Iterator[bytes | None]:
    """The bytes of members in the given order, None for the remaining members of a shard after an error."""
    for shard, group in groupby(spans, key=lambda span: span.shard):
        remaining = list(group)
        try:
            for payload in read_spans(f"{folder}/{shard}", list(remaining)):
                del remaining[0]
                yield payload
        except RemoteError as error:
            tell(error)
            yield from [None] * len(remaining)
