"""How the ranks of a run divide the model and the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel dimensions. What depends on samples uses the data-parallel size, never the world size.

    Args:
        replicate: number of copies of the model.
        shard: number of ranks over which each copy is sharded.
    """

    replicate: int = 1
    shard: int = 1

    ranks_per_sample: ClassVar[int] = 1
    """Number of consecutive ranks that train on the same samples; the data-parallel sizes follow from it."""

    @classmethod
    def of_settings(cls, strategy: str | Mapping[str, Any], ranks: int) -> ParallelDims:
        """The dimensions of a number of ranks under `trainer.strategy`, of which `replicate` is read.

        Raises:
            ValueError: the copies do not divide the ranks.
        """
        replicate = 1 if isinstance(strategy, str) else strategy.get("replicate", 1)
        copies = ranks if replicate == "all" else int(replicate)
        if ranks % copies:
            raise ValueError(f"trainer.strategy.replicate={copies} must divide the {ranks} ranks")
        return cls(replicate=copies, shard=ranks // copies)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.replicate * self.shard

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks: parts into which a global batch is divided."""
        return self.ranks // self.ranks_per_sample

    def data_rank(self, rank: int) -> int:
        """Data-parallel rank of global rank `rank`."""
        return rank // self.ranks_per_sample

    def micro_batch(self, batch_size: int, micro_batches: int) -> int:
        """Samples of a micro-batch on one rank.

        Args:
            batch_size: samples of an optimizer step.
            micro_batches: micro-batches of an optimizer step on one rank.

        Raises:
            ValueError: the step cannot be divided.
        """
        parts = micro_batches * self.data_size
        if batch_size % parts:
            raise ValueError(
                f"data.batch_size={batch_size} must be a multiple of the {parts} micro-batches of a step "
                f"(trainer.accumulate_grad_batches={micro_batches} times {self.data_size} ranks)"
            )
        return batch_size // parts


def dims_of(trainer: Any) -> ParallelDims:
    """Parallel dimensions of a Lightning trainer; those of a strategy without `dims` shard over all of its ranks."""
    return getattr(trainer.strategy, "dims", None) or ParallelDims(shard=trainer.world_size)
