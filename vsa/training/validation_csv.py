"""`validation.csv`: the loss of every sample of a run's last validation, which paired tests between runs need."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from vsa.attention.sparsity import SparsityPoint
from vsa.data.batch import VideoBatch
from vsa.files import atomic_file

COLUMNS = ("step", "at", "sample", "noise_level", "loss")

# place in the validation set, sparsity point, sample, noise level, loss
Row = tuple[int, SparsityPoint, str, float, float]


class ValidationRows:
    """Losses by sample of one validation."""

    def __init__(self) -> None:
        self._batches: list[tuple[SparsityPoint, Tensor, Sequence[str], Tensor, Tensor]] = []

    def add(self, at: SparsityPoint, batch: VideoBatch, sigmas: Tensor, losses: Tensor) -> None:
        """Add losses `[B]` of a micro-batch at noise levels `[B]`; the device is not waited for."""
        # not the batch, whose latents would stay until the end
        self._batches.append((at, batch.slots, batch.sample_ids, sigmas, losses.detach()))

    def gather(self, world_size: int) -> list[Row]:
        """Rows of all ranks in the order of the validation set, the same on every rank (a collective)."""
        own: list[Row] = [
            (slot, at, sample, sigma, loss)
            for at, slots, samples, sigmas, losses in self._batches
            for slot, sample, sigma, loss in zip(slots.tolist(), samples, sigmas.tolist(), losses.tolist(), strict=True)
        ]
        parts: list[list[Row]] = [own]
        if world_size > 1:
            parts = [[]] * world_size
            dist.all_gather_object(parts, own)
        # points keep their order
        return sorted((row for part in parts for row in part), key=lambda row: row[0])


def write_validation(path: Path, step: int, rows: list[Row]) -> None:
    """Write one row a sample and sparsity point, numbers in as many digits as they have.

    Args:
        path: CSV to write.
        step: optimizer steps of the validated weights.
        rows: see `ValidationRows.gather`.
    """
    with atomic_file(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((step, at, sample, repr(sigma), repr(loss)) for _, at, sample, sigma, loss in rows)
