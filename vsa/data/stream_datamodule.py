"""Lightning data module of shards that are streamed from URLs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from vsa.data.batch import VideoBatch
from vsa.data.index import DatasetIndex, SampleEntry, Span
from vsa.data.index_statistics import statistics_of
from vsa.data.plan import DataPlan, SampleRef, Shape, Source, hash64
from vsa.data.plan_datamodule import ENDLESS, PlanDataModule
from vsa.data.remote import RemoteError, expand_urls
from vsa.data.sample_store import chosen_samples, refuse_other_encoders
from vsa.data.stream import (
    TRAIN,
    VALIDATION,
    HeldReader,
    ShardOrder,
    StreamedBatches,
    StreamStore,
    open_index,
    open_reader,
    read_samples,
    samples_by_shard,
)
from vsa.settings import AtLeastOne, ShareBelowOne, validated


@validated
@dataclass(kw_only=True, eq=False)
class StreamDataModule(PlanDataModule):
    """Batches from shards at paths or URLs, which are read sequentially and never stored.

    Every sample is trained on at least once per epoch. A resumed run begins at the last shard boundary before which all
    samples have been used, so that samples after it may be used twice.

    Args:
        urls: latent shards of one folder written by `vsa encode`, with braces for numbers; text shards and `index.json`
            are read from the same folder.
        val_urls: latent shards whose first samples are held in memory for validation; None: no validation.
        shuffle_buffer: number of samples in the shuffle buffer of every worker of a loader.
        drop: drop list of samples to leave out, written by `vsa check-data` or a run.
        revision: revision of a folder that has grown, which determines how latents are normalised; None: the newest
            one, in a resumed run that which it began with.
    """

    urls: str | Sequence[str]
    val_urls: str | Sequence[str] | None = None
    shuffle_buffer: AtLeastOne = 128
    drop: str | None = None
    revision: AtLeastOne | None = None
    val_fraction: ShareBelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_fraction:
            raise ValueError(f"val_fraction={self.val_fraction}: a stream cannot hold out samples, set data.val_urls")
        self._train = _Shards("data.urls", expand_urls("data.urls", self.urls))
        self._val = None
        if self.val_urls is not None:
            self._val = _Shards("data.val_urls", expand_urls("data.val_urls", self.val_urls))
        self._first_shard = 0
        self._marks: dict[int, int] = {}

    @property
    def places(self) -> list[Path]:
        """Local folders and files that are read."""
        typed = (self._train.folder, self._val and self._val.folder, self.drop)
        return [Path(place) for place in typed if place is not None and "://" not in place]

    def setup(self, stage: str | None = None) -> None:
        """Reads the indexes and the validation set; further calls do nothing."""
        if self._opened is not None:
            return
        indexes = {TRAIN: open_index(self._train.folder, self.revision)}
        self.revision = indexes[TRAIN].revision
        shards = {TRAIN: self._train}
        if self._val is not None:
            same = self._val.folder == self._train.folder
            indexes[VALIDATION] = indexes[TRAIN] if same else open_index(self._val.folder)
            shards[VALIDATION] = self._val
        for name, each in shards.items():
            each.check(indexes[name])
        self._refuse_shared(indexes)
        chosen_indexes = chosen_samples(indexes, drop=self.drop, tell=rank_zero_info)
        store = StreamStore({name: open_reader(each.folder, chosen_indexes[name]) for name, each in shards.items()})
        refuse_other_encoders(store, self.codec, self.text_encoder)
        parts = [part for part in self._train.samples(chosen_indexes[TRAIN]) if part]
        self._order = ShardOrder(folder=self._train.folder, shards=parts, seed=self.seed)
        ids = {self._shape(parts): tuple(entry.id for part in parts for entry in part)}
        if self.stats == "train":
            mean, std = statistics_of([entry for part in parts for entry in part], store.codec.channels)
            self._published = mean.float(), std.float()
        plan = DataPlan(sources={TRAIN: Source(weight=1.0, buckets=ids)}, batch_size=self.batch_size, seed=self.seed)
        self._digests = {name: each.digests(indexes[name]) for name, each in shards.items()}
        validation_refs = {} if self._val is None else self._hold(self._val, store.readers[VALIDATION])
        self._opened = store, plan, validation_refs
        rank_zero_info(
            f"data=stream: {len(parts):,} shards of {self._train.folder} with {sum(map(len, parts)):,} samples, each "
            "seen at least once an epoch: a resumed run begins at a boundary of shards (exact resume needs data=folder)"
        )
        if self._val is None:
            rank_zero_info("data.val_urls is not set: there is no validation")

    def train_dataloader(self) -> DataLoader[VideoBatch]:
        """Micro-batches of this rank from `start_step` to the trainer's `max_steps`."""
        limit = self.trainer.max_steps if self.trainer is not None else -1
        self._marks = {}
        seed, windows = self.seed, len(self.skipped_windows)
        return self._loader(
            StreamedBatches,
            order=self._order,
            # after a rollback the same shards give different batches
            seed=hash64(seed, "skipped window", windows) >> 1 if windows else seed,
            start_step=self.start_step,
            steps=max(limit - self.start_step, 0) if limit >= 0 else ENDLESS,
            start_shard=self._first_shard,
            caption_dropout=self.caption_dropout,
            buffer=self.shuffle_buffer,
        )

    def on_after_batch_transfer(self, batch: VideoBatch, dataloader_idx: int) -> VideoBatch:
        """Record the position of the stream; the batch is trained on before the next checkpoint."""
        if batch.mark is not None:
            self._marks[batch.mark.worker] = batch.mark.shard
        return batch

    @property
    def plan_hash(self) -> str:
        """Digest of samples, shards and seed, which must not change in a resumed run."""
        content = ["stream", self.plan.hash, self._digests]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Description of the samples, and the epoch and number of shards that all ranks have finished; a collective."""
        epoch, shards = divmod(self._next_shard(), len(self._order.shards))
        # at the first revision the state equals that of earlier versions
        grown = {"revision": self.revision} if self.revision != 1 else {}
        return {**super().state_dict(), "stream": {"epoch": epoch, "shards": shards}, **grown}

    def keep(self, state: Mapping[str, Any]) -> None:
        """See the base; a stream has one revision."""
        used = state.get("revision", 1)
        if self.revision not in (None, used):
            raise ValueError(
                f"data.revision={self.revision}: the run began with revision {used} of {self._train.folder}"
            )
        self.revision = used

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state["step"]`, at a shard boundary; ValueError if the samples differ."""
        super().load_state_dict(state)
        epoch, shards, every = state["stream"]["epoch"], state["stream"]["shards"], len(self._order.shards)
        self._first_shard, self._marks = epoch * every + shards, {}
        rank_zero_info(
            f"data=stream continues after {shards:,} of the {every:,} shards of epoch {epoch}: samples of later shards "
            "may be used twice, none is left out (exact resume needs data=folder)"
        )

    def _next_shard(self) -> int:
        """First position in the order of shards with unused samples in a reader of any rank."""
        workers = max(self.num_workers, 1)
        part = self._part()
        first = self._first_shard + part.rank * workers
        own = min(self._marks.get(worker, first + worker) for worker in range(workers))
        if part.world == 1:
            return own
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return min(ranks)

    def _shape(self, parts: Sequence[Sequence[SampleEntry]]) -> Shape:
        shapes = sorted({entry.latent_shape for part in parts for entry in part})
        if not shapes:
            raise ValueError(f"{self._train.key}: the shards hold no samples, or data.drop leaves none")
        if len(shapes) > 1:
            names = ", ".join("x".join(map(str, shape)) for shape in shapes)
            raise ValueError(
                f"data.urls: expected latents of one shape, got {len(shapes)} ({names}); names of shards contain it"
            )
        return shapes[0]

    def _refuse_shared(self, indexes: Mapping[str, DatasetIndex]) -> None:
        if self._val is None:
            return
        train = {sha256 for _, sha256 in self._train.digests(indexes[TRAIN])}
        for name, sha256 in self._val.digests(indexes[VALIDATION]):
            if sha256 in train:
                raise ValueError(f"data.val_urls: {self._val.folder}/{name} is also in data.urls, the training set")

    def _hold(self, val: _Shards, reader: HeldReader) -> dict[Shape, tuple[SampleRef, ...]]:
        """Read the first samples of the validation shards into memory; their references by shape."""

        def refuse(error: RemoteError) -> None:
            raise ValueError(f"data.val_urls: {error}")

        parts = val.samples(reader.index)
        most = None if self.val_batches is None else self.val_batches * self.batch_size
        arrived = islice((each for part in parts for each in read_samples(val.folder, part, refuse)), most)
        refs: dict[Shape, tuple[SampleRef, ...]] = {}
        payloads: dict[Span, bytes] = {}
        for entry, members in arrived:
            refs[entry.latent_shape] = (*refs.get(entry.latent_shape, ()), SampleRef(source=VALIDATION, id=entry.id))
            payloads |= members
        reader.hold(payloads)
        return refs


class _Shards:
    """Latent shards of one folder.

    Args:
        key: name of the setting that lists them.
        urls: paths or URLs of the shards.
    """

    def __init__(self, key: str, urls: Sequence[str]) -> None:
        folders = sorted({url.rpartition("/")[0] if "/" in url else "." for url in urls})
        if len(folders) > 1:
            raise ValueError(f"{key} has shards of {len(folders)} folders, {folders[0]} and {folders[1]}: expected one")
        self.key, self.folder = key, folders[0]
        self.names = [url.rpartition("/")[2] for url in urls]

    def check(self, index: DatasetIndex) -> None:
        """Raise ValueError for a shard that the index does not list or that holds no latents."""
        shards = samples_by_shard(index)
        for name in self.names:
            if name not in index.shards:
                raise ValueError(f"{self.key}: {self.folder}/{name} is not in the index.json beside it")
            if name not in shards:
                raise ValueError(
                    f"{self.key}: {self.folder}/{name} holds no latents: expected latents-*.tar, captions are found by "
                    "the index"
                )

    def samples(self, index: DatasetIndex) -> list[list[SampleEntry]]:
        """Samples by shard, empty for a dropped shard."""
        shards = samples_by_shard(index)
        return [shards.get(name, []) for name in self.names]

    def digests(self, index: DatasetIndex) -> list[tuple[str, str]]:
        """Name and digest of every shard."""
        return [(name, index.shards[name].sha256) for name in self.names]
