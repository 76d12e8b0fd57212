"""Data plan: the samples of step n are a pure function of (plan, seed, step), so resuming is a seek without a replay.

A stream is one bucket (latent shape) of one source. Every step draws its whole global batch from one stream. Streams
alternate by integer quotas within periods of 1,000 steps, and each stream goes through permutations of its samples, one
permutation per epoch. All randomness comes from keyed hashes defined here, because library generators may change
between versions and a plan must not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Shape = tuple[int, int, int, int]
PLAN_VERSION = 1
_PERIOD = 1000


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set of a plan.

    Args:
        weight: share of the steps, relative to the other sources; buckets share it by their number of samples.
        buckets: sample ids by latent shape `(C, t, h, w)`.
    """

    weight: float
    buckets: Mapping[Shape, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class SampleRef:
    """A sample of a source."""

    source: str
    id: str


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Latent shape and samples of one step, in slot order."""

    step: int
    bucket: Shape
    refs: tuple[SampleRef, ...]


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The order of a training run.

    Args:
        sources: data sets by name.
        batch_size: samples of an optimizer step, over all ranks and micro-batches.
        seed: seed of the order.
        later: data sets of later phases with their first steps, ascending; each phase begins with epochs of its own.
    """

    sources: Mapping[str, Source]
    batch_size: int
    seed: int = 0
    later: tuple[tuple[int, Mapping[str, Source]], ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self._streams:
            raise ValueError(f"the sources {sorted(self.sources)} of the data plan have no samples")
        if any(not math.isfinite(w) or w < 0 for w in self._weights.values()):
            raise ValueError(f"source weights must be finite and not negative, got {self._weights}")
        if self._rates.sum() <= 0:
            raise ValueError(f"source weights {self._weights} give no source with samples a weight")

    def step(self, step: int) -> StepPlan:
        """The samples of optimizer step `step`, in constant time."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        first, phase = self._phase(step)
        if phase is not self:
            return replace(phase.step(step - first), step=step)
        stream = self._stream_at(step)
        name, bucket, ids = self._streams[stream]
        first = self._batches_before(stream, step) * self.batch_size
        refs = []
        for position in range(first, first + self.batch_size):
            epoch, place = divmod(position, len(ids))
            key = hash64(self.seed, "epoch", name, bucket, epoch)
            refs.append(SampleRef(source=name, id=ids[permute_index(place, len(ids), key)]))
        return StepPlan(step=step, bucket=bucket, refs=tuple(refs))

    def replacement(self, step: int, slot: int, bad: SampleRef, attempt: int) -> SampleRef:
        """Replacement of a bad sample in a slot, from the same stream; a pure function of the arguments.

        Args:
            step: optimizer step.
            slot: position in the global batch.
            bad: the bad sample of the slot.
            attempt: number of replacements that were bad too.
        """
        first, phase = self._phase(step)
        if phase is not self:
            return phase.replacement(step - first, slot, bad, attempt)
        name, _, ids = self._streams[self._stream_at(step)]
        return SampleRef(source=name, id=ids[hash64(self.seed, "replacement", step, slot, bad.id, attempt) % len(ids)])

    @cached_property
    def hash(self) -> str:
        """Digest of everything that determines the order, stored in checkpoints; those of later phases follow it."""
        streams = [
            [name, bucket, hashlib.sha256("\n".join(ids).encode()).hexdigest()] for name, bucket, ids in self._streams
        ]
        # as it was when the weights could change at a step
        weights = [[0, sorted((name, float(weight)) for name, weight in self._weights.items())]]
        content = [PLAN_VERSION, self.seed, self.batch_size, streams, weights]
        own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return ",".join([own, *(f"{first}:{phase.hash}" for first, phase in self._phases)])

    def _phase(self, step: int) -> tuple[int, DataPlan]:
        """First step and plan of the phase of a step."""
        return next(((first, plan) for first, plan in reversed(self._phases) if first <= step), (0, self))

    @cached_property
    def _phases(self) -> list[tuple[int, DataPlan]]:
        return [
            (first, replace(self, sources=sources, later=(), seed=hash64(self.seed, "phase", first) >> 1))
            for first, sources in self.later
        ]

    @property
    def _weights(self) -> dict[str, float]:
        return {name: source.weight for name, source in self.sources.items()}

    @cached_property
    def _streams(self) -> list[tuple[str, Shape, tuple[str, ...]]]:
        """(source, bucket, ids), sorted, so that the order in a config file or a folder does not matter."""
        return [
            (name, bucket, tuple(sorted(ids)))
            for name, source in sorted(self.sources.items())
            for bucket, ids in sorted(source.buckets.items())
            if ids
        ]

    @cached_property
    def _rates(self) -> np.ndarray:
        """float64 weight of every stream: its source's weight times its share of the source's samples."""
        totals = {name: 0 for name in self.sources}
        for name, _, ids in self._streams:
            totals[name] += len(ids)
        return np.array([self._weights[name] * len(ids) / totals[name] for name, _, ids in self._streams])

    @cached_property
    def _quota(self) -> np.ndarray:
        """int64 steps of every stream in a period: largest remainders, at least 1 where weighted."""
        rates = self._rates
        exact = rates / rates.sum() * self._period
        quota = np.where(rates > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
        while quota.sum() < self._period:
            quota[int(np.argmax(np.where(rates > 0, exact - quota, -np.inf)))] += 1
        while quota.sum() > self._period:
            quota[int(np.argmin(np.where(quota > 1, exact - quota, np.inf)))] -= 1
        return quota

    @cached_property
    def _period(self) -> int:
        return max(_PERIOD, 2 * len(self._streams))

    def _order(self, period: int) -> np.ndarray:
        """int64 `[period]` stream of every step of one period."""
        if period not in self._orders:
            blocks = np.repeat(np.arange(len(self._streams)), self._quota)
            key = hash64(self.seed, "streams", 0, period)
            # a small cache is enough, because steps are requested in order
            if len(self._orders) >= 8:
                self._orders.clear()
            self._orders[period] = blocks[[permute_index(i, self._period, key) for i in range(self._period)]]
        return self._orders[period]

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}

    def _stream_at(self, step: int) -> int:
        if len(self._streams) == 1:
            return 0
        period, place = divmod(step, self._period)
        return int(self._order(period)[place])

    def _batches_before(self, stream: int, step: int) -> int:
        """Number of the steps 0..step-1 that draw from the stream."""
        if len(self._streams) == 1:
            return step
        periods, rest = divmod(step, self._period)
        count = periods * int(self._quota[stream])
        return count + int((self._order(periods)[:rest] == stream).sum()) if rest else count


def begun(plan_hash: str, step: int) -> str:
    """The digest of a plan without phases that begin at `step` or later."""
    own, *later = plan_hash.split(",")
    return ",".join([own, *(phase for phase in later if int(phase.partition(":")[0]) < step)])


def is_validation(sample_id: str, fraction: float) -> bool:
    """Whether a sample belongs to the validation split, which depends on the hash of its id only."""
    return hash64("validation", sample_id) < fraction * 2.0**64


def split_ids(
    ids: Iterable[str], fraction: float, group: Callable[[str], str] = str, more: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split of the ids into (training ids, validation ids), in the given order.

    Args:
        ids: ids of the samples.
        fraction: share of the groups that is held out.
        group: function from an id to its group; a group is never split.
        more: groups that are held out besides.
    """
    train: list[str] = []
    validation: list[str] = []
    for sample_id in ids:
        name = group(sample_id)
        (validation if is_validation(name, fraction) or name in more else train).append(sample_id)
    return tuple(train), tuple(validation)


def hash64(*parts: object) -> int:
    """Hash of `parts` in 0..2^64-1, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def draw64(seed: int, what: str, step: int, sample_id: str, occurrence: int = 0) -> int:
    """A 64-bit random number for a sample at a step.

    Args:
        seed: seed of the run.
        what: name of the draw, since a sample needs several.
        step: optimizer step.
        sample_id: id of the sample.
        occurrence: number of earlier occurrences of the sample in the global batch of the step (see `occurrences`), so
            that a sample that occurs twice gets two numbers.
    """
    # the first occurrence keeps the number of earlier versions
    return hash64(seed, what, step, sample_id, *((occurrence,) if occurrence else ()))


def sample_seed(seed: int, step: int, sample_id: str, occurrence: int = 0) -> int:
    """The 63-bit seed of a sample's noise at a step; arguments as in `draw64`."""
    return draw64(seed, "noise", step, sample_id, occurrence) >> 1


def occurrences(ids: Sequence[str]) -> list[int]:
    """For each id of a global batch, in slot order, the number of its earlier occurrences."""
    counts: Counter[str] = Counter()
    result = []
    for sample_id in ids:
        result.append(counts[sample_id])
        counts[sample_id] += 1
    return result


def permute_index(i: int, n: int, key: int) -> int:
    """Image of `i` under a keyed permutation of 0..n-1, in constant time and memory.

    A balanced Feistel network of six rounds on the next even power of two, walked until it lands inside 0..n-1
    (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(((n - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for round_ in range(6):
            left, right = right, left ^ (_mix(right ^ (round_ << 32) ^ key) & mask)
        i = left << half | right
        if i < n:
            return i


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
