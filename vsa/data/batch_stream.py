"""Streams of training and validation batches in a planned order, for any rank, worker count and starting step.

B samples, C t h w latent channels, frames and size, S text tokens, E text width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vsa.data.bad_samples import BadSample, BadSampleError, NoGoodSample
from vsa.data.batch import TextPadding, VideoBatch, pad_text
from vsa.data.plan import DataPlan, SampleRef, Shape, draw64, hash64, occurrences, sample_seed
from vsa.data.sample_store import SampleStore

# replacements of one bad sample: with half of the data bad, one in 10^9 samples finds none
_ATTEMPTS = 30


@dataclass(frozen=True, kw_only=True)
class RankSlice:
    """The part of every global batch that this rank reads.

    Args:
        accumulate: micro-batches of an optimizer step.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
    """

    accumulate: int = 1
    rank: int = 0
    world: int = 1

    def slots(self, batch_size: int, micro: int) -> range:
        """Slots of the global batch on this rank in micro-batch `micro`, 0 to `accumulate` - 1."""
        if not (0 <= micro < self.accumulate and 0 <= self.rank < self.world):
            raise ValueError(f"micro-batch {micro} of {self.accumulate}, rank {self.rank} of {self.world}")
        parts = self.accumulate * self.world
        if batch_size % parts:
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of {self.world} ranks x {self.accumulate} accumulated "
                "micro-batches"
            )
        width = batch_size // parts
        first = (micro * self.world + self.rank) * width
        return range(first, first + width)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One slot of a batch: its sample, caption and noise seed.

    Args:
        ref: the sample.
        caption: index of its caption; None: the null embedding and the caption "".
        seed: seed of the noise.
        slot: position in the global batch, or in the whole set in validation.
    """

    ref: SampleRef
    caption: int | None
    seed: int
    slot: int


def read_batch(
    store: SampleStore, drawn: Sequence[Draw], *, text_padding: TextPadding, num_slots: int, step: int
) -> VideoBatch:
    """Read samples of one latent shape as a batch; text is padded to the encoder's `max_tokens`.

    Args:
        store: store of the samples.
        drawn: B slots.
        text_padding: see `vsa.data.batch.TextPadding`.
        num_slots: size of the global batch.
        step: optimizer step.

    Raises:
        BadSampleError: the first sample that cannot be trained on.
    """
    refs = [draw.ref for draw in drawn]
    # a sample that occurs several times in a batch is read once
    inputs_of, text_of = cache(store.image_inputs), cache(store.text)
    texts = [("", store.null_text) if d.caption is None else text_of(d.ref, d.caption) for d in drawn]
    rows = [row for _, row in texts]
    text, mask = pad_text(rows, length=store.text_encoder.max_tokens, padding=text_padding)
    images = [inputs_of(ref) for ref in refs]
    stacked: Any = {name: torch.stack([image[name] for image in images]) for name in images[0]}
    return VideoBatch(
        # pending latents become tensors when the batch moves to a device
        latents=cast(Tensor, store.latents(refs)),
        text=text,
        text_mask=mask,
        sample_ids=tuple(ref.id for ref in refs),
        captions=tuple(caption for caption, _ in texts),
        seeds=torch.tensor([draw.seed for draw in drawn], dtype=torch.int64),
        slots=torch.tensor([draw.slot for draw in drawn], dtype=torch.int64),
        num_slots=num_slots,
        step=step,
        **stacked,
    )


@dataclass(kw_only=True, eq=False)
class PlannedStream(IterableDataset[VideoBatch], ABC):
    """Micro-batches of one rank, in an order that does not depend on the number of reading processes.

    There is no shuffle buffer and no generator state. With W workers, worker w yields items w, w + W, ..., which a
    DataLoader puts back in order.

    Args:
        store: store of the samples.
        part: this rank's part of a global batch.
        batch_size: samples of a global batch.
        text_padding: padding of captions; see `vsa.data.batch.TextPadding`.
    """

    store: SampleStore
    part: RankSlice
    batch_size: int
    text_padding: TextPadding

    def __post_init__(self) -> None:
        self.part.slots(self.batch_size, 0)

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Number of global batches."""

    @abstractmethod
    def batch(self, number: int, micro: int) -> VideoBatch:
        """Micro-batch `micro` of global batch `number` on this rank."""

    @abstractmethod
    def replacement(self, number: int, slot: int, bad: SampleRef, attempt: int) -> SampleRef:
        """Replacement of a bad sample in a slot of global batch `number`; a pure function of the arguments."""

    def __len__(self) -> int:
        return self.num_batches * self.part.accumulate

    def __iter__(self) -> Iterator[VideoBatch]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, len(self), every):
            yield self.batch(*divmod(i, self.part.accumulate))

    def collate(self, number: int, drawn: Sequence[Draw], *, num_slots: int, step: int) -> VideoBatch:
        """Read samples of one latent shape as a batch, with bad samples replaced by others.

        Args:
            number: number of the global batch.
            drawn: B slots.
            num_slots: size of the global batch.
            step: optimizer step.

        Raises:
            NoGoodSample: all replacements of a sample were bad; names the first.
        """
        try:
            return self._read(drawn, num_slots=num_slots, step=step)
        except BadSampleError:
            pass
        good: list[Draw] = []
        bad: list[BadSample] = []
        for each in drawn:
            good_draw, met = self._good(number, each)
            good.append(good_draw)
            bad += met
        return replace(self._read(good, num_slots=num_slots, step=step), bad=tuple(bad))

    def _good(self, number: int, draw: Draw) -> tuple[Draw, list[BadSample]]:
        """A slot that can be read, with this sample or the first good replacement, and the bad samples before it."""
        candidate, bad, tried, first = draw, list[BadSample](), set[SampleRef](), None
        for attempt in range(_ATTEMPTS):
            if candidate.ref not in tried:
                tried.add(candidate.ref)
                try:
                    self._read([candidate], num_slots=1, step=0)
                except BadSampleError as error:
                    first = first or error
                    bad.append(
                        BadSample(
                            source=candidate.ref.source,
                            id=candidate.ref.id,
                            shard=error.shard,
                            cause=error.cause,
                            slot=draw.slot,
                        )
                    )
                else:
                    return candidate, bad
            ref = self.replacement(number, draw.slot, draw.ref, attempt)
            caption = None if draw.caption is None else draw.caption % self.store.captions(ref)
            # the noise seed belongs to the slot, not to the sample
            candidate = replace(draw, ref=ref, caption=caption)
        raise NoGoodSample(
            f"{first}; all its replacements are bad too: vsa check-data lists bad samples, data.drop leaves them out"
        )

    def _read(self, draws: Sequence[Draw], *, num_slots: int, step: int) -> VideoBatch:
        return read_batch(self.store, draws, text_padding=self.text_padding, num_slots=num_slots, step=step)


@dataclass(kw_only=True, eq=False)
class TrainStream(PlannedStream):
    """Training batches, which depend on the plan and the starting step only.

    Args:
        plan: samples of every step.
        start_step: first optimizer step.
        steps: number of optimizer steps.
        caption_dropout: probability that a sample is trained on the null embedding, drawn anew at every step.
        skipped_windows: first and last steps of windows whose data are skipped: other samples are drawn for them, with
            another seed for every further window that contains a step.
    """

    plan: DataPlan
    start_step: int
    steps: int
    caption_dropout: float
    skipped_windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._other_plans: dict[int, DataPlan] = {}

    def plan_at(self, step: int) -> DataPlan:
        """The plan that an optimizer step draws from."""
        times = sum(first <= step <= last for first, last in self.skipped_windows)
        if times == 0:
            return self.plan
        if times not in self._other_plans:
            self._other_plans[times] = replace(self.plan, seed=hash64(self.plan.seed, "skipped window", times) >> 1)
        return self._other_plans[times]

    @property
    def num_batches(self) -> int:
        return self.steps

    def batch(self, number: int, micro: int) -> VideoBatch:
        step = self.start_step + number
        seed = self.plan_at(step).seed
        plan, slots = self.plan_at(step).step(step), self.part.slots(self.batch_size, micro)
        # counted over the global batch, so that the division into micro-batches does not matter
        times = occurrences([ref.id for ref in plan.refs])
        draws = [
            Draw(ref=ref, caption=self._caption(ref, step, time), seed=sample_seed(seed, step, ref.id, time), slot=slot)
            for slot, ref, time in ((slot, plan.refs[slot], times[slot]) for slot in slots)
        ]
        return self.collate(number, draws, num_slots=self.batch_size, step=step)

    def replacement(self, number: int, slot: int, bad: SampleRef, attempt: int) -> SampleRef:
        step = self.start_step + number
        return self.plan_at(step).replacement(step, slot, bad, attempt)

    def _caption(self, ref: SampleRef, step: int, occurrence: int) -> int | None:
        """Index of the caption on which a sample is trained at a step; None: the null embedding."""
        seed = self.plan_at(step).seed
        if draw64(seed, "caption dropout", step, ref.id, occurrence) < self.caption_dropout * 2.0**64:
            return None
        return draw64(seed, "caption", step, ref.id, occurrence) % self.store.captions(ref)


@dataclass(kw_only=True, eq=False)
class ValidationStream(PlannedStream):
    """Fixed, seeded validation set: the same samples, captions, slots and noise seeds in every pass and world size.

    The held-out samples of each bucket fill whole global batches, at most `batches` of them. An incomplete last batch
    is filled with the first samples of the bucket, so that none is dropped. Slots are numbered over the whole set,
    which spreads stratified timesteps over it.

    Args:
        held: held-out samples by latent shape.
        batches: maximum number of global batches per bucket (None: all).
        seed: seed of the noise.
    """

    held: dict[Shape, tuple[SampleRef, ...]]
    batches: int | None
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._batches: list[list[SampleRef]] = []
        for _, refs in sorted(self.held.items()):
            full = -(-len(refs) // self.batch_size)
            full = full if self.batches is None else min(full, self.batches)
            padded = [refs[i % len(refs)] for i in range(full * self.batch_size)]
            self._batches += [padded[i : i + self.batch_size] for i in range(0, len(padded), self.batch_size)]

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def batch(self, number: int, micro: int) -> VideoBatch:
        draws = []
        for slot in self.part.slots(self.batch_size, micro):
            ref, place = self._batches[number][slot], number * self.batch_size + slot
            # the seed includes the slot, so that a sample that fills up a batch gets different noise
            seed = hash64(self.seed, "validation", place, ref.id) >> 1
            draws.append(Draw(ref=ref, caption=0, seed=seed, slot=place))
        return self.collate(number, draws, num_slots=self.num_batches * self.batch_size, step=0)

    def replacement(self, number: int, slot: int, bad: SampleRef, attempt: int) -> SampleRef:
        refs = next(refs for refs in self.held.values() if self._batches[number][0] in refs)
        return refs[hash64(self.seed, "validation replacement", slot, bad.id, attempt) % len(refs)]
