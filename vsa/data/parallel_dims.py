"""How the ranks of a run divide the model and the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel dimensions. What depends on samples uses the data-parallel size, never the world size.

    Args:
        replicate: number of copies of the model.
        shard: number of ranks over which each copy is sharded.
        sequence: number of consecutive ranks that share a sample, whatever the copies; the data-parallel sizes follow
            from it.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1

    @classmethod
    def of_settings(cls, strategy: str | Mapping[str, Any], ranks: int, sequence: int = 1) -> ParallelDims:
        """The dimensions of a number of ranks under `trainer.strategy`, of which `replicate` is read.

        Raises:
            ValueError: the copies, or the ranks that share a sample, do not divide the ranks.
        """
        replicate = 1 if isinstance(strategy, str) else strategy.get("replicate", 1)
        copies = ranks if replicate == "all" else int(replicate)
        if ranks % copies:
            raise ValueError(f"trainer.strategy.replicate={copies} must divide the {ranks} ranks")
        if ranks % sequence:
            raise ValueError(f"task.parallel.sequence={sequence} must divide the number of ranks, which is {ranks}")
        return cls(replicate=copies, shard=ranks // copies, sequence=sequence)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.replicate * self.shard

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks: parts into which a global batch is divided."""
        return self.ranks // self.sequence

    def data_rank(self, rank: int) -> int:
        """Data-parallel rank of global rank `rank`."""
        return rank // self.sequence

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
                f"(trainer.accumulate_grad_batches={micro_batches} times {self.data_size} ranks"
                f"{f' of {self.sequence} that share their samples' if self.sequence > 1 else ''})"
            )
        return batch_size // parts


def dims_of(trainer: Any) -> ParallelDims:
    """Parallel dimensions of a Lightning trainer; those of a strategy without `dims` shard over all of its ranks."""
    return getattr(trainer.strategy, "dims", None) or ParallelDims(shard=trainer.world_size)
