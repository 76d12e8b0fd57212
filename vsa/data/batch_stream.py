"""Batches of a plan, in order, for any rank, worker count and starting step.

B samples, C t h w latent channels, frames and size, S text tokens, E text width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vsa.data.batch import TextPadding, VideoBatch, pad_text
from vsa.data.plan import DataPlan, SampleRef, Shape, draw64, hash64, occurrences, rank_slice, sample_seed
from vsa.data.sample_store import SampleStore


@dataclass(frozen=True, kw_only=True)
class RankSlice:
    """Which part of every global batch is read here.

    Args:
        accumulate: micro-batches of an optimizer step.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
    """

    accumulate: int = 1
    rank: int = 0
    world: int = 1

    def slots(self, batch_size: int, micro: int) -> range:
        """Slots of micro-batch `micro` on this rank; see `rank_slice`."""
        return rank_slice(
            batch_size=batch_size, micro=micro, accumulate=self.accumulate, rank=self.rank, world=self.world
        )


class TrainStream(IterableDataset[VideoBatch]):
    """The training batches of one rank, one item a micro-batch.

    The items depend on the plan and the starting step alone: no shuffle buffer, no generator state, and with W workers
    worker w makes items w, w + W, ..., which a DataLoader puts back in order.

    Args:
        store: where samples come from.
        plan: which samples a step trains on.
        part: this rank's part of the global batch.
        start_step: first optimizer step.
        steps: number of optimizer steps.
        caption_dropout: probability that a sample is trained on the null embedding, redrawn at every step.
        text_padding: what fills a caption up; see `vsa.data.batch.TextPadding`.

    Raises:
        ValueError: the global batch does not divide into ranks and micro-batches.
    """

    def __init__(
        self,
        store: SampleStore,
        plan: DataPlan,
        *,
        part: RankSlice,
        start_step: int,
        steps: int,
        caption_dropout: float,
        text_padding: TextPadding = "mask",
    ) -> None:
        super().__init__()
        part.slots(plan.batch_size, 0)
        self._store = store
        self._plan = plan
        self._part = part
        self._start_step = start_step
        self._steps = steps
        self._caption_dropout = caption_dropout
        self._text_padding: TextPadding = text_padding

    def __len__(self) -> int:
        return self._steps * self._part.accumulate

    def __iter__(self) -> Iterator[VideoBatch]:
        for i in _worker_items(len(self)):
            step, micro = divmod(i, self._part.accumulate)
            yield self.batch(self._start_step + step, micro)

    def batch(self, step: int, micro: int) -> VideoBatch:
        """Micro-batch `micro` of optimizer step `step` on this rank."""
        plan = self._plan.step(step)
        slots = self._part.slots(self._plan.batch_size, micro)
        # counted over the global batch, so that the micro-batch a sample falls into does not matter
        times = occurrences([ref.id for ref in plan.refs])
        refs, times = [plan.refs[slot] for slot in slots], [times[slot] for slot in slots]
        choices = [self._caption(ref, step, time) for ref, time in zip(refs, times, strict=True)]
        seeds = [sample_seed(self._plan.seed, step, ref.id, time) for ref, time in zip(refs, times, strict=True)]
        return collate(
            self._store,
            refs,
            choices,
            seeds=seeds,
            slots=slots,
            num_slots=self._plan.batch_size,
            step=step,
            text_padding=self._text_padding,
        )

    def _caption(self, ref: SampleRef, step: int, occurrence: int) -> int | None:
        """Which caption a sample is trained on at a step; None: the null embedding."""
        seed = self._plan.seed
        if draw64(seed, "caption dropout", step, ref.id, occurrence) < self._caption_dropout * 2.0**64:
            return None
        return draw64(seed, "caption", step, ref.id, occurrence) % self._store.captions(ref)


class ValidationStream(IterableDataset[VideoBatch]):
    """A fixed, seeded validation set: the same samples, captions, slots and noise seeds at every pass and world size.

    Each bucket's held-out samples fill whole global batches, at most `batches` of them; a last batch that they do not
    fill starts over with the bucket's first ones, so none is dropped. Slots run through the whole set, which spreads
    stratified timesteps over it.

    Args:
        store: where samples come from.
        held: held-out samples by latent shape.
        batch_size: samples of a global batch.
        batches: most global batches of a bucket (None: all).
        part: this rank's part of a global batch.
        seed: seed of the noise.
        text_padding: what fills a caption up.
    """

    def __init__(
        self,
        store: SampleStore,
        held: dict[Shape, tuple[SampleRef, ...]],
        *,
        batch_size: int,
        batches: int | None,
        part: RankSlice,
        seed: int,
        text_padding: TextPadding = "mask",
    ) -> None:
        super().__init__()
        part.slots(batch_size, 0)
        self._store = store
        self._part = part
        self._batch_size = batch_size
        self._seed = seed
        self._text_padding: TextPadding = text_padding
        self._batches: list[tuple[SampleRef, ...]] = []
        for _, refs in sorted(held.items()):
            full = -(-len(refs) // batch_size)
            full = full if batches is None else min(full, batches)
            padded = [refs[i % len(refs)] for i in range(full * batch_size)]
            self._batches += [tuple(padded[i : i + batch_size]) for i in range(0, len(padded), batch_size)]

    def __len__(self) -> int:
        return len(self._batches) * self._part.accumulate

    def __iter__(self) -> Iterator[VideoBatch]:
        for i in _worker_items(len(self)):
            number, micro = divmod(i, self._part.accumulate)
            slots = self._part.slots(self._batch_size, micro)
            refs = [self._batches[number][slot] for slot in slots]
            slots = [number * self._batch_size + slot for slot in slots]
            # the slot is in the seed: a sample that fills up a batch meets another noise
            seeds = [hash64(self._seed, "validation", slot, ref.id) >> 1 for slot, ref in zip(slots, refs, strict=True)]
            num_slots = len(self._batches) * self._batch_size
            yield collate(
                self._store,
                refs,
                [0] * len(refs),
                seeds=seeds,
                slots=slots,
                num_slots=num_slots,
                step=0,
                text_padding=self._text_padding,
            )


def collate(
    store: SampleStore,
    refs: Sequence[SampleRef],
    captions: Sequence[int | None],
    *,
    seeds: Sequence[int],
    slots: Sequence[int],
    num_slots: int,
    step: int,
    text_padding: TextPadding = "mask",
) -> VideoBatch:
    """Reads samples of one latent shape into a batch; text is padded to the encoder's longest, so shapes never vary.

    Args:
        store: where samples come from.
        refs: B samples.
        captions: caption number of each; None: the null embedding and the caption "".
        seeds: noise seed of each.
        slots: position of each in the global batch.
        num_slots: size of the global batch.
        step: optimizer step.
        text_padding: what fills a caption up.
    """
    # a sample that a batch holds many times is read once
    latent, condition, caption_text = cache(store.latent), cache(store.condition), cache(store.text)
    texts = [("", store.null_text) if c is None else caption_text(r, c) for r, c in zip(refs, captions, strict=True)]
    text, mask = pad_text([rows for _, rows in texts], length=store.text_encoder.max_tokens, padding=text_padding)
    conditions = [cond for cond in map(condition, refs) if cond is not None]
    return VideoBatch(
        latents=torch.stack([latent(ref) for ref in refs]),
        text=text,
        text_mask=mask,
        sample_ids=tuple(ref.id for ref in refs),
        captions=tuple(caption for caption, _ in texts),
        seeds=torch.tensor(seeds, dtype=torch.int64),
        slots=torch.tensor(list(slots), dtype=torch.int64),
        num_slots=num_slots,
        step=step,
        cond_latents=torch.stack(conditions) if conditions else None,
    )


def _worker_items(count: int) -> range:
    """This worker's share of items 0..count-1, the one a DataLoader asks it for."""
    worker = get_worker_info()
    return range(count) if worker is None else range(worker.id, count, worker.num_workers)
