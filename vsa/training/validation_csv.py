"""`validation.csv`: loss of every sample in a run's last validation, for paired tests between runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from vsa.attention.sparsity import SparsityPoint
from vsa.data.batch import VideoBatch
from vsa.data.parallel_dims import ParallelDims
from vsa.files import atomic_file

COLUMNS = ("step", "at", "sample", "noise_level", "loss")

# position in the validation set, sparsity point, sample, noise level, loss
Row = tuple[int, SparsityPoint, str, float, float]


class ValidationRows:
    """Losses of one validation, by sample."""

    def __init__(self) -> None:
        self._batches: list[tuple[SparsityPoint, Tensor, Sequence[str], Tensor, Tensor]] = []

    def add(self, at: SparsityPoint, batch: VideoBatch, sigmas: Tensor, losses: Tensor) -> None:
        """Add losses `[B]` of a micro-batch at noise levels `[B]`, without synchronising with the device."""
        # the batch itself is not stored, since its latents would stay in memory
        self._batches.append((at, batch.slots, batch.sample_ids, sigmas, losses.detach()))

    def gather(self, dims: ParallelDims) -> list[Row]:
        """Rows of all ranks in the order of the validation set, the same on every rank (a collective operation)."""
        own: list[Row] = [
            (slot, at, sample, sigma, loss)
            for at, slots, samples, sigmas, losses in self._batches
            for slot, sample, sigma, loss in zip(slots.tolist(), samples, sigmas.tolist(), losses.tolist(), strict=True)
        ]
        parts: list[list[Row]] = [own]
        if dims.ranks > 1:
            parts = [[]] * dims.ranks
            dist.all_gather_object(parts, own)
            parts = parts[:: dims.sequence]
        # the sort is stable, so sparsity points keep their order
        return sorted((row for part in parts for row in part), key=lambda row: row[0])


def write_validation(path: Path, step: int, rows: list[Row]) -> None:
    """Write one row per sample and sparsity point, with numbers in full precision.

    Args:
        path: CSV file to write.
        step: optimizer step of the validated weights.
        rows: see `ValidationRows.gather`.
    """
    with atomic_file(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((step, at, sample, repr(sigma), repr(loss)) for _, at, sample, sigma, loss in rows)
