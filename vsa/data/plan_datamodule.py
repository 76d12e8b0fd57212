"""The base of the Lightning data modules: a sample store, a plan over its training split, and streams of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
from vsa.data.index import USUAL_FPS, ImageInfo
from vsa.data.parallel_dims import dims_of
from vsa.data.plan import DataPlan, SampleRef, Shape, Source, begun, split_ids
from vsa.data.sample_store import SampleStore, refuse_other_encoders
from vsa.data.splits import more_held_out
from vsa.data.text import TextEncoder
from vsa.settings import AtLeastOne, Count, Seed, Share, ShareBelowOne, Workers
from vsa.signals import leave_signals_to_parent

# number of steps of a run without max_steps, which another limit ends
ENDLESS = 1 << 40
# held-out samples whose captions are compared with those asked for
_SEARCHED = 1000


@dataclass(kw_only=True, eq=False)
class PlanDataModule(LightningDataModule):
    """Base of the data modules: a sample store, a plan over its training split, and streams of batches.

    Args:
        codec: codec of the latents.
        text_encoder: text encoder of the captions.
        batch_size: samples of an optimizer step, over all ranks and micro-batches.
        seed: seed of order, caption choice and noise.
        validation_seed: seed of the noise in validation; None: `seed`.
        num_workers: worker processes of a loader; affects only the speed.
        val_fraction: share of the samples that is held out, by hash of their id, or of the groups of `val_by`.
        val_least: number of samples to hold out where a positive `val_fraction` gives fewer, but at most half of all.
        val_batches: maximum number of global validation batches per latent shape (None: every held-out sample).
        caption_dropout: probability of training a sample on the null embedding.
        stats: statistics that normalise latents: of all stored latents, held-out ones too (data), of the training
            samples only, so that nothing held out influences training (train), or those that the codec publishes and a
            pretrained model expects (codec).
        text_padding: padding of captions: hidden (mask), or attended to as in Wan (zeros).
        max_bad: largest share of bad samples among those drawn, which are replaced; a larger share stops the run.

    Attributes:
        noise_ahead: whether batches for a GPU come with their noise, see `VideoBatch`; set by the job.
        start_step: optimizer step at which training starts; a resumed run seeks to it without a replay.
        skipped_windows: see `TrainStream`.
    """

    codec: Codec
    text_encoder: TextEncoder
    batch_size: AtLeastOne
    seed: Seed = 0
    validation_seed: Seed | None = None
    num_workers: Workers = 0
    val_fraction: ShareBelowOne = 0.05
    val_least: Count = 0
    val_batches: Count | None = None
    caption_dropout: Share = 0.1
    stats: Literal["data", "train", "codec"] = "data"
    text_padding: TextPadding = "mask"
    max_bad: Share = 0.01

    def __post_init__(self) -> None:
        super().__init__()
        if self.stats == "codec" and self.codec.statistics is None:
            raise ValueError(f"stats=codec: codec {self.codec.id} has no published statistics, use stats=data")
        self._published = self.codec.statistics if self.stats == "codec" else None
        self._fps = USUAL_FPS
        self.noise_ahead = False
        self.start_step = 0
        self.skipped_windows: tuple[tuple[int, int], ...] = ()
        # groups that are held out besides `val_fraction`
        self._more: set[str] = set()
        self._opened: tuple[SampleStore, DataPlan, dict[Shape, tuple[SampleRef, ...]]] | None = None

    def before_data(self) -> PlanDataModule:
        """The module with which a run is checked before missing data are prepared."""
        return self

    def open_store(self) -> SampleStore:
        """Store of all samples of this module, of every split."""
        raise NotImplementedError

    def source_weights(self) -> Mapping[str, float]:
        """Weight of every source of the store."""
        raise NotImplementedError

    def split_group(self, store: SampleStore, source: str, sample_id: str) -> str:
        """Group of a sample, which is held out as a whole; by default every sample is its own group."""
        return sample_id

    def training_statistics(self, store: SampleStore, sources: Mapping[str, Source]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents of the training samples, float32 `[C]` each."""
        raise ValueError("stats=train is not available for clips rendered on the fly, use stats=data")

    def setup(self, stage: str | None = None) -> None:
        """Open the store and build the plan; further calls do nothing."""
        if self._opened is not None:
            return
        phases = self.open_phases()
        _, store = next(phases)
        self._fps = store.fps
        refuse_other_encoders(store, self.codec, self.text_encoder)
        if self.val_fraction and self.val_least:
            ids = ((name, i) for name, shapes in store.buckets.items() for ids in shapes.values() for i in ids)
            groups = Counter(self.split_group(store, *pair) for pair in ids)
            self._more = more_held_out(groups, self.val_fraction, self.val_least)
        sources, validation_refs = self._split(store)
        counts = [len(ids) for source in sources.values() for ids in source.buckets.values() if ids]
        if not counts:
            raise ValueError(f"val_fraction={self.val_fraction} leaves no training samples: add samples or set it to 0")
        if self.batch_size > sum(counts):
            least, most = (f"{self.batch_size / count:.3g}" for count in (max(counts), min(counts)))
            rank_zero_info(
                f"data.batch_size={self.batch_size} is above the number of training samples, {sum(counts)}: a batch "
                f"holds each sample of its latent shape {least if least == most else f'{least} to {most}'} times"
            )
        if self.stats == "train":
            self._published = self.training_statistics(store, sources)
        plan = DataPlan(sources=sources, batch_size=self.batch_size, seed=self.seed)
        for step, larger in phases:
            refuse_other_encoders(larger, self.codec, self.text_encoder)
            # what is held out and how latents are normalised stay those of the first phase
            self._published = self._published or (store.latent_mean, store.latent_std)
            sources, store = self._grown(sources, store, larger), larger
            plan = replace(plan, later=(*plan.later, (step, sources)))
        self._opened = store, plan, validation_refs

    def open_phases(self) -> Iterator[tuple[int, SampleStore]]:
        """First step and store of every phase, each with all samples of the one before it."""
        yield 0, self.open_store()

    def _split(self, store: SampleStore) -> tuple[dict[str, Source], dict[Shape, tuple[SampleRef, ...]]]:
        """Training samples by source, and held-out samples by latent shape."""
        weights = self.source_weights()
        sources: dict[str, Source] = {}
        validation_refs: dict[Shape, tuple[SampleRef, ...]] = {}
        for name, buckets in sorted(store.buckets.items()):
            train: dict[Shape, tuple[str, ...]] = {}
            for shape, ids in sorted(buckets.items()):
                group = partial(self.split_group, store, name)
                train[shape], out = split_ids(sorted(ids), self.val_fraction, group, self._more)
                if out:
                    validation_refs[shape] = validation_refs.get(shape, ()) + tuple(
                        SampleRef(source=name, id=i) for i in out
                    )
            sources[name] = Source(weight=weights[name], buckets=train)
        return sources, validation_refs

    def _grown(self, before: Mapping[str, Source], store: SampleStore, larger: SampleStore) -> dict[str, Source]:
        """Training samples of the next phase: those of the phase before, and those of the new samples' own split."""
        grown, _ = self._split(larger)
        for name, source in grown.items():
            old = {i for ids in store.buckets[name].values() for i in ids}
            buckets = {shape: [i for i in ids if i not in old] for shape, ids in source.buckets.items()}
            for shape, ids in before[name].buckets.items():
                buckets[shape] += ids
            grown[name] = replace(source, buckets={shape: tuple(sorted(ids)) for shape, ids in buckets.items()})
        return grown

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
        validation_refs = self._ready()[2]
        if not validation_refs:
            return []
        seed = self.seed if self.validation_seed is None else self.validation_seed
        return self._loader(ValidationStream, held=validation_refs, batches=self.val_batches, seed=seed)

    def held_out_captions(self, count: int) -> tuple[str, ...]:
        """At most `count` different captions of held-out samples, the same on every rank."""
        store, validation_refs = self.store, self.held_out
        captions: dict[str, None] = {}
        for ref in (ref for _, refs in sorted(validation_refs.items()) for ref in refs):
            if len(captions) == count:
                break
            # training or validation reports a bad sample
            with suppress(BadSampleError):
                captions |= {caption: None for caption, _ in [store.text(ref, 0)] if caption}
        return tuple(captions)

    @property
    def held_out(self) -> Mapping[Shape, tuple[SampleRef, ...]]:
        """Samples that are not trained on, by latent shape."""
        return self._ready()[2]

    @property
    def store(self) -> SampleStore:
        """Random access to every sample."""
        return self._ready()[0]

    @property
    def plan(self) -> DataPlan:
        """The plan of the training split."""
        return self._ready()[1]

    @property
    def plan_hash(self) -> str:
        """Digest of the plan, which must not change in a resumed run."""
        return self.plan.hash

    @property
    def latent_mean(self) -> Tensor:
        """float32 `[C]` mean for the normalisation of latents, see `stats`."""
        return self.store.latent_mean if self._published is None else self._published[0]

    @property
    def latent_std(self) -> Tensor:
        """float32 `[C]` standard deviation for the normalisation of latents, see `stats`."""
        return self.store.latent_std if self._published is None else self._published[1]

    @property
    def cond_channels(self) -> int:
        """Number of channels of the image condition of every sample; 0 without one."""
        return self.store.cond_channels

    @property
    def image_encoder(self) -> ImageInfo | None:
        """The encoder of the image tokens of every sample; None without them."""
        return self.store.image_encoder

    def first_frames(self, captions: Sequence[str], latent_shape: Shape) -> dict[str, Tensor]:
        """Image inputs of a model for N captions, of held-out samples of a latent shape: of that with the caption, else
        of the next in their order.

        Returns:
            Float32 tensors with N samples each, by the names of `Network.forward`.

        Raises:
            ValueError: no held-out sample of the shape can be read.
        """
        refs, own, rows = self.held_out.get(latent_shape, ()), dict[str, SampleRef](), list[dict[str, Tensor]]()
        for ref in refs[:_SEARCHED]:
            with suppress(BadSampleError):
                own.setdefault(self.store.text(ref, 0)[0], ref)
        for i, caption in enumerate(captions):
            first = i % max(len(refs), 1)
            for ref in (*([own[caption]] if caption in own else []), *refs[first:], *refs[:first]):
                with suppress(BadSampleError):
                    rows.append(self.store.image_inputs(ref))
                    break
            else:
                shape = "x".join(map(str, latent_shape))
                raise ValueError(f"no held-out sample of latents {shape} gives a first frame: data.val_fraction=0.1")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @property
    def buckets(self) -> dict[Shape, int]:
        """Number of training samples by latent shape `(C, t, h, w)`, most frequent first."""
        counts: dict[Shape, int] = {}
        # of the last phase, which has the samples of all
        sources = self.plan.later[-1][1] if self.plan.later else self.plan.sources
        for source in sources.values():
            for shape, ids in source.buckets.items():
                if ids:
                    counts[shape] = counts.get(shape, 0) + len(ids)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def fps(self) -> float:
        """Frames per second of most clips, in the first phase."""
        self._ready()
        return self._fps

    def keep(self, state: Mapping[str, Any]) -> None:
        """Before the set-up of a resumed run: go on with the revisions of its data; ValueError for others."""

    def state_dict(self) -> dict[str, Any]:
        """Description of samples and encoders for `state.json`; the position is the optimizer step."""
        return {
            "plan_hash": self.plan_hash,
            "codec": {"id": self.codec.id, "hash": self.codec.hash},
            "text_encoder": {"id": self.text_encoder.id, "hash": self.text_encoder.hash},
            **({"image_encoder": {"id": image.id, "hash": image.hash}} if (image := self.image_encoder) else {}),
            "latent_shapes": [list(bucket) for bucket in self.buckets],
            # at the usual rate and without windows the state equals that of earlier versions
            **({"fps": self.fps} if self.fps != USUAL_FPS else {}),
            **({"skipped_windows": [list(window) for window in self.skipped_windows]} if self.skipped_windows else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state["step"]`; ValueError if the order of the samples differs."""
        if begun(state["plan_hash"], state["step"]) != begun(self.plan_hash, state["step"]):
            raise ValueError(
                f"the checkpoint was trained on another data plan (hash {state['plan_hash'][:12]}, now "
                f"{self.plan_hash[:12]}): resuming needs the same data, drop, seed and batch size; or use init_from="
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
        dims, micro_batches = dims_of(trainer), trainer.accumulate_grad_batches
        return RankSlice(accumulate=micro_batches, rank=dims.data_rank(trainer.global_rank), world=dims.data_size)

    def _feeds_gpu(self) -> bool:
        trainer = self.trainer
        return trainer is not None and trainer.strategy.root_device.type == "cuda"

    def _loader(self, kind: Callable[..., IterableDataset[VideoBatch]], **options: Any) -> DataLoader[VideoBatch]:
        stream = kind(
            store=self.store, part=self._part(), batch_size=self.batch_size, text_padding=self.text_padding, **options
        )
        return DataLoader(
            stream,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=partial(_marked, noise_ahead=self.noise_ahead),
            # with workers, a thread prepares batches while the GPU computes
            pin_memory=self._feeds_gpu(),
            worker_init_fn=leave_signals_to_parent,
            # a separate generator, since a draw from the global one would shift all later random numbers of the run
            generator=torch.Generator().manual_seed(0),
        )


def _marked(batch: Any, *, noise_ahead: bool) -> VideoBatch:
    return replace(batch, noise_ahead=noise_ahead)
