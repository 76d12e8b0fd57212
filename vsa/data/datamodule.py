"""Lightning data modules: what all share, latent shards, and clips made on the fly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from vsa.data.bad_samples import BadSampleError
from vsa.data.batch import TextPadding, VideoBatch
from vsa.data.batch_stream import RankSlice, TrainStream, ValidationStream
from vsa.data.codecs import Codec
from vsa.data.index import statistics_of
from vsa.data.plan import DataPlan, Phase, SampleRef, Shape, Source, split_ids
from vsa.data.sample_store import SampleStore, ToyStore, open_shards, refuse_other_encoders
from vsa.data.splits import SplitBy, split_group
from vsa.data.text import TextEncoder
from vsa.data.toy_shards import prepare_toy_shards
from vsa.data.toy_videos import ToyClips
from vsa.data.world.scenes import MOST_WORDS, WorldClips
from vsa.data.world.store import WorldStore
from vsa.data.world.tables import find_photographs
from vsa.settings import AtLeastOne, Count, Share, ShareBelowOne, checked
from vsa.signals import leave_signals_to_parent

# a run without max_steps ends by other means
ENDLESS = 1 << 40


@dataclass(kw_only=True, eq=False)
class PlanDataModule(LightningDataModule):
    """What both data modules share: a store, a plan over its training split, and the two streams.

    Args:
        codec: the codec of the latents.
        text_encoder: the text encoder of the captions.
        batch_size: samples of an optimizer step, over all ranks and micro-batches.
        seed: seed of order, caption choice and noise.
        validation_seed: of the noise of validation; None: `seed`.
        num_workers: worker processes of a loader; changes nothing but speed.
        val_fraction: share of the samples held out, by hash of their id, or of the groups of `val_by`.
        val_batches: most global validation batches of a latent shape (None: every held-out sample).
        caption_dropout: probability of training a sample on the null embedding.
        stats: normalise with the statistics of all stored latents (data), of the training samples alone (train), or
            with those that the codec publishes and a pretrained model expects (codec).
        text_padding: mask the padding of captions, or attend to its zeros as Wan does (zeros).
        max_bad: share of the samples drawn that may be bad; they are replaced by others, and more of them stop the run.

    Attributes:
        start_step: optimizer step that training starts from; a resume is a seek, not a replay.
        skipped_windows: see `TrainStream`.
    """

    codec: Codec
    text_encoder: TextEncoder
    batch_size: AtLeastOne
    seed: Count = 0
    validation_seed: Count | None = None
    num_workers: Count = 0
    val_fraction: ShareBelowOne = 0.05
    val_batches: Count | None = None
    caption_dropout: Share = 0.1
    stats: Literal["data", "train", "codec"] = "data"
    text_padding: TextPadding = "mask"
    max_bad: Share = 0.01

    def __post_init__(self) -> None:
        super().__init__()
        if self.stats == "codec" and self.codec.statistics is None:
            raise ValueError(f"stats=codec, but codec {self.codec.id} publishes no statistics: use stats=data")
        self._published = self.codec.statistics if self.stats == "codec" else None
        self.start_step = 0
        self.skipped_windows: tuple[tuple[int, int], ...] = ()
        self._opened: tuple[SampleStore, DataPlan, dict[Shape, tuple[SampleRef, ...]]] | None = None

    def open_store(self) -> SampleStore:
        """The samples of this module, every split."""
        raise NotImplementedError

    def source_weights(self) -> Mapping[str, float]:
        """Weight of every source of the store."""
        raise NotImplementedError

    def phases(self) -> tuple[Phase, ...]:
        """Changes of the source weights over training; none by default."""
        return ()

    def split_group(self, store: SampleStore, source: str, sample_id: str) -> str:
        """The group of a sample, which is held out as a whole; by default it is alone."""
        return sample_id

    def training_statistics(self, store: SampleStore, sources: Mapping[str, Source]) -> tuple[Tensor, Tensor]:
        """float32 mean and deviation `[C]` of the training samples.

        Raises:
            ValueError: they are not known without making every clip.
        """
        raise ValueError("stats=train: clips made on the fly have no statistics of their own, use stats=data")

    def setup(self, stage: str | None = None) -> None:
        """Opens the store and lays out the plan; further calls do nothing.

        Raises:
            ValueError: shards that cannot be read, were encoded by another codec or text encoder than this module's,
                or hold no training sample.
        """
        if self._opened is not None:
            return
        store = self.open_store()
        refuse_other_encoders(store, self.codec, self.text_encoder)
        weights = self.source_weights()
        sources: dict[str, Source] = {}
        held: dict[Shape, tuple[SampleRef, ...]] = {}
        for name, buckets in sorted(store.buckets.items()):
            train: dict[Shape, tuple[str, ...]] = {}
            for shape, ids in sorted(buckets.items()):
                train[shape], out = split_ids(sorted(ids), self.val_fraction, partial(self.split_group, store, name))
                if out:
                    held[shape] = held.get(shape, ()) + tuple(SampleRef(source=name, id=i) for i in out)
            sources[name] = Source(weight=weights[name], buckets=train)
        counts = [len(ids) for source in sources.values() for ids in source.buckets.values() if ids]
        if not counts:
            raise ValueError(f"val_fraction {self.val_fraction} leaves no training samples: add samples or set it to 0")
        if self.batch_size > sum(counts):
            least, most = (f"{self.batch_size / count:.3g}" for count in (max(counts), min(counts)))
            rank_zero_info(
                f"data.batch_size={self.batch_size} is above the number of training samples, {sum(counts)}: a batch "
                f"holds each sample of its latent shape {least if least == most else f'{least} to {most}'} times"
            )
        if self.stats == "train":
            self._published = self.training_statistics(store, sources)
        plan = DataPlan(sources=sources, batch_size=self.batch_size, seed=self.seed, phases=self.phases())
        self._opened = store, plan, held

    def train_dataloader(self) -> DataLoader[VideoBatch]:
        """Micro-batches of this rank from `start_step` to the trainer's `max_steps`."""
        limit = self.trainer.max_steps if self.trainer is not None else -1
        return self._loader(
            TrainStream,
            plan=self.plan,
            start_step=self.start_step,
            steps=max(limit - self.start_step, 0) if limit >= 0 else ENDLESS,
            caption_dropout=self.caption_dropout,
            skipped_windows=self.skipped_windows,
        )

    def val_dataloader(self) -> DataLoader[VideoBatch] | list[Any]:
        """The fixed validation set of this rank; empty when nothing is held out."""
        held = self._ready()[2]
        if not held:
            return []
        seed = self.seed if self.validation_seed is None else self.validation_seed
        return self._loader(ValidationStream, held=held, batches=self.val_batches, seed=seed)

    def held_out_captions(self, count: int) -> tuple[str, ...]:
        """At most `count` different captions of held-out samples, the same on every rank; none without such samples."""
        store, _, held = self._ready()
        found: dict[str, None] = {}
        for ref in (ref for _, refs in sorted(held.items()) for ref in refs):
            if len(found) == count:
                break
            # a bad sample is told when it is trained or validated on
            with suppress(BadSampleError):
                found |= {caption: None for caption, _ in [store.text(ref, 0)] if caption}
        return tuple(found)

    @property
    def store(self) -> SampleStore:
        """Random access to every sample."""
        return self._ready()[0]

    @property
    def plan(self) -> DataPlan:
        """The order of the training split."""
        return self._ready()[1]

    @property
    def plan_hash(self) -> str:
        """Digest of the plan; a resumed run must have the same."""
        return self.plan.hash

    @property
    def latent_mean(self) -> Tensor:
        """float32 `[C]` mean that latents are normalised with: of the stored ones, or the codec's own."""
        return self.store.latent_mean if self._published is None else self._published[0]

    @property
    def latent_std(self) -> Tensor:
        """float32 `[C]` standard deviation that latents are normalised with."""
        return self.store.latent_std if self._published is None else self._published[1]

    @property
    def cond_channels(self) -> int:
        """Channels of the image condition of every sample; 0: there is none."""
        return self.store.cond_channels

    @property
    def buckets(self) -> dict[Shape, int]:
        """Number of training samples by latent shape `(C, t, h, w)`, most frequent first."""
        counts: dict[Shape, int] = {}
        for source in self.plan.sources.values():
            for shape, ids in source.buckets.items():
                if ids:
                    counts[shape] = counts.get(shape, 0) + len(ids)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def state_dict(self) -> dict[str, Any]:
        """What the samples are and how they were encoded, for `state.json`; the position is the optimizer step."""
        return {
            "plan_hash": self.plan_hash,
            "codec": {"id": self.codec.id, "hash": self.codec.hash},
            "text_encoder": {"id": self.text_encoder.id, "hash": self.text_encoder.hash},
            "latent_shapes": [list(bucket) for bucket in self.buckets],
            # of runs without one the state is that of earlier versions
            **({"skipped_windows": [list(window) for window in self.skipped_windows]} if self.skipped_windows else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after `state["step"]`.

        Raises:
            ValueError: the order of the samples is another one.
        """
        if state["plan_hash"] != self.plan_hash:
            raise ValueError(
                f"the checkpoint was trained on another data plan (hash {state['plan_hash'][:12]}, "
                f"now {self.plan_hash[:12]}): resuming needs the same data, drop, seed and batch size; use init_from="
            )
        self.start_step = state["step"]
        self.skipped_windows = tuple((first, last) for first, last in state.get("skipped_windows", ()))

    def _ready(self) -> tuple[SampleStore, DataPlan, dict[Shape, tuple[SampleRef, ...]]]:
        if self._opened is None:
            raise RuntimeError("call prepare_data() and setup() first")
        return self._opened

    def _part(self) -> RankSlice:
        trainer = self.trainer
        if trainer is None:
            return RankSlice()
        return RankSlice(accumulate=trainer.accumulate_grad_batches, rank=trainer.global_rank, world=trainer.world_size)

    def _loader(self, kind: Callable[..., IterableDataset[VideoBatch]], **options: Any) -> DataLoader[VideoBatch]:
        stream = kind(
            store=self.store,
            part=self._part(),
            batch_size=self.batch_size,
            text_padding=self.text_padding,
            **options,
        )
        return DataLoader(
            stream,
            batch_size=None,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_parent,
            # its own generator: a loader that draws from the global one shifts every later random number of the run
            generator=torch.Generator().manual_seed(0),
        )


@checked
@dataclass(kw_only=True, eq=False)
class LatentDataModule(PlanDataModule):
    """Batches from folders of latent shards.

    Args:
        root: folder of shards; or
        sources: several folders, {name: {"root": folder, "weight": share of the steps}}.
        weight_phases: changes of the source weights, [{"from_step": n, "weights": {name: weight}}].
        val_by: samples that are held out together, by the file they come from; see `vsa.data.splits`.
        val_field: field of the caption file, for `val_by=field`.
        drop: file that lists samples to leave out, as `vsa check-data` and runs write it; it changes the order.
        toy: render these clips to `videos` and encode them to `root` when `root` has no index.
        videos: folder of the toy clips' mp4 files.

    Raises:
        ValueError: not exactly one of `root` and `sources`, or `toy` without `root` and `videos`.
    """

    root: str | None = None
    sources: Mapping[str, Mapping[str, Any]] | None = None
    weight_phases: Sequence[Mapping[str, Any]] = ()
    val_by: SplitBy = "id"
    val_field: str | None = None
    drop: str | None = None
    toy: ToyClips | None = None
    videos: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.root is None) == (self.sources is None):
            raise ValueError(f"give exactly one of root and sources, got root={self.root} and sources={self.sources}")
        if self.toy is not None and (self.root is None or self.videos is None):
            raise ValueError(f"toy clips need root and videos, got root={self.root} and videos={self.videos}")
        self._group = split_group(self.val_by, self.val_field)
        named = {"main": {"root": self.root}} if self.root is not None else dict(self.sources or {})
        for name, entry in named.items():
            if not {"root"} <= set(entry) <= {"root", "weight"}:
                raise ValueError(f"source {name} must have root and may have weight, it has {sorted(entry)}")
        self._roots = {str(name): str(entry["root"]) for name, entry in named.items()}
        self._weights = {str(name): float(entry.get("weight", 1.0)) for name, entry in named.items()}

    def prepare_data(self) -> None:
        """Renders and encodes the toy clips when they are asked for and missing.

        Raises:
            ValueError: clips of that size cannot be encoded, or `root` holds another toy set than the one asked for.
        """
        if self.toy is None or self.videos is None:
            return
        prepare_toy_shards(self.toy, Path(self.videos), Path(self._roots["main"]), self.codec, self.text_encoder)

    def open_store(self) -> SampleStore:
        """The shards of every source, without the samples of the drop list."""
        return open_shards(self._roots, drop=self.drop, tell=rank_zero_info)

    def split_group(self, store: Any, source: str, sample_id: str) -> str:
        """By `val_by`."""
        return self._group(store.entry(source, sample_id))

    def training_statistics(self, store: Any, sources: Mapping[str, Source]) -> tuple[Tensor, Tensor]:
        """Of the samples that are neither held out nor dropped."""
        entries = [
            store.entry(name, sample_id)
            for name, source in sources.items()
            for ids in source.buckets.values()
            for sample_id in ids
        ]
        mean, std = statistics_of(entries, store.codec.channels)
        return mean.float(), std.float()

    def source_weights(self) -> Mapping[str, float]:
        """The configured weights."""
        return self._weights

    def phases(self) -> tuple[Phase, ...]:
        """The configured changes of the weights."""
        return tuple(Phase(from_step=int(p["from_step"]), weights=dict(p["weights"])) for p in self.weight_phases)


@checked
@dataclass(kw_only=True, eq=False)
class ToyOnlineDataModule(PlanDataModule):
    """Toy clips rendered and encoded in the loader: no files, a pure function of (seed, sample).

    Args:
        toy: which clips.
    """

    toy: ToyClips

    def open_store(self) -> SampleStore:
        """Clips on demand."""
        return ToyStore(self.toy, self.codec, self.text_encoder)

    def source_weights(self) -> Mapping[str, float]:
        """One source."""
        return {"toy": 1.0}


@checked
@dataclass(kw_only=True, eq=False)
class WorldOnlineDataModule(PlanDataModule):
    """Clips of several objects before a photograph, drawn and encoded on the training device: no files.

    Args:
        world: which clips.

    Raises:
        ImportError: the package of the photographs is not installed.
        ValueError: a caption may be longer than the text encoder's.
    """

    world: WorldClips

    def __post_init__(self) -> None:
        super().__post_init__()
        find_photographs()
        if self.text_encoder.max_tokens < MOST_WORDS:
            raise ValueError(
                f"captions of the world have up to {MOST_WORDS} words, expected text_encoder.max_tokens of at least "
                f"that, got {self.text_encoder.max_tokens}"
            )

    def open_store(self) -> SampleStore:
        """Clips on demand."""
        return WorldStore(self.world, self.codec, self.text_encoder)

    def source_weights(self) -> Mapping[str, float]:
        """One source."""
        return {"world": 1.0}
