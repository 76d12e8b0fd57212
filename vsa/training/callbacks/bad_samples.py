"""Bad samples of a run: counted over all ranks, reported, stored in checkpoints; too many of them stop the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.data.bad_samples import BadSample, write_drop_list
from vsa.data.batch import VideoBatch
from vsa.data.parallel_dims import ParallelDims, dims_of
from vsa.settings import key_value
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.display import never_fatal
from vsa.training.hosts import hosts_of
from vsa.training.modules.base import DiffusionModule

# number of bad samples that are reported one by one
_LISTED = 20
# number of bad samples that checkpoints name; the others are only counted
_KEPT = 10_000
# smallest denominator of the share, so that a few bad samples at the start do not stop a run
_FEWEST_DRAWS = 1000


class BadSamples(L.Callback):
    """Counts the bad samples that a run drew and replaced, by cause and shard.

    The counts of the ranks are summed at logged steps and in checkpoints. A run stops when more than `data.max_bad` of
    the samples drawn were bad, where the share is taken over at least 1,000 draws. One single bad sample stops a run
    only if `data.max_bad` is 0.

    Args:
        run_dir: the run folder, where `bad_samples.txt` lists the bad samples; `data.drop` accepts this list.
    """

    part = "bad_samples"
    # after the callbacks that change the state of a run, before the checkpoint
    order = 0.5

    def __init__(self, run_dir: str | Path):
        self._report = Path(run_dir) / "bad_samples.txt"
        self._drawn = 0
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, str] = {}
        # bad samples of this rank since the counts were last summed
        self._new: list[tuple[int, BadSample]] = []
        self._told: set[BadSample] = set()
        self._dims, self._writes = ParallelDims(), False
        self._hosts: dist.ProcessGroup | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._dims, self._writes = dims_of(trainer), trainer.is_global_zero
        self._hosts = hosts_of(trainer.strategy)

    def state_dict(self) -> Mapping[str, Any]:
        """The counts of all ranks; a collective operation."""
        self._meet()
        counts = [[*key.split("/"), count] for key, count in sorted(self._counts.items())]
        return {"drawn": self._drawn, "counts": counts, "samples": self._samples}

    def load_state_dict(self, state: Any, /) -> None:
        """Continue the counts."""
        self._drawn = state["drawn"]
        self._counts = Counter({f"{cause}/{shard}": count for cause, shard, count in state["counts"]})
        self._samples = dict(state["samples"])

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: VideoBatch, batch_idx: int
    ) -> None:
        self._drawn += len(batch.sample_ids) * self._dims.data_size
        self._new += [(batch.step, bad) for bad in batch.bad]
        step = trainer.global_step
        if (batch_idx + 1) % pl_module.accumulate or not pl_module.log_lines.due(step):
            return
        self._meet()
        if not self._counts:
            return
        by_cause = Counter[str]()
        for key, count in self._counts.items():
            by_cause[key.partition("/")[0]] += count
        metrics = {f"bad_samples/{cause}": count for cause, count in by_cause.items()}
        pl_module.log_lines.add({"bad_samples": by_cause.total(), **metrics}, step)
        data = pl_module.data
        if self._too_many(data.max_bad):
            # the run can continue from here with a larger bound
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, Checkpointing):
                    callback.save(trainer, pl_module)
            raise ValueError(self._verdict(by_cause, data.max_bad))

    def on_validation_batch_end(  # type: ignore[override]
        self,
        trainer: L.Trainer,
        pl_module: DiffusionModule,
        outputs: Any,
        batch: VideoBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        for bad in batch.bad:
            # every validation has the same ones, and a resume may skip one, so they are not counted
            if bad not in self._told:
                self._told.add(bad)
                print(f"bad sample in validation: {_where(bad)}; another one is validated on in its place", flush=True)

    def _meet(self) -> None:
        """Sum what the ranks have collected since the last call."""
        new = self._new
        self._new = []
        if self._dims.ranks > 1:
            parts: list[Any] = [[]] * self._dims.ranks
            mine = [(step, asdict(bad)) for step, bad in new]
            dist.all_gather_object(parts, mine, group=self._hosts)
            new = [(step, BadSample(**bad)) for part in parts[:: self._dims.sequence] for step, bad in part]
        for step, bad in sorted(new, key=lambda each: (each[0], each[1].slot)):
            self._counts[f"{bad.cause}/{bad.shard}"] += 1
            name = f"{bad.source}/{bad.id}"
            if name not in self._samples and len(self._samples) < _KEPT:
                self._samples[name] = f"{bad.cause} in {bad.shard}"
                if len(self._samples) <= _LISTED:
                    rank_zero_info(f"bad sample {_where(bad)}, drawn for step {step}: another one takes its place")
        if new:
            total, share = self._counts.total(), self._counts.total() / max(self._drawn, 1)
            rank_zero_info(f"bad samples: {total:,} of {self._drawn:,} drawn ({share:.2%}), listed in {self._report}")
            if self._writes:
                with never_fatal(str(self._report)):
                    write_drop_list(self._report, self._samples, found_by="a training run")

    def _too_many(self, most: float) -> bool:
        share = self._counts.total() / max(self._drawn, _FEWEST_DRAWS)
        return most == 0 or (share > most and len(self._samples) > 1)

    def _verdict(self, by_cause: Mapping[str, int], most: float) -> str:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in sorted(by_cause.items()))
        name, what = next(iter(self._samples.items()))
        return (
            f"{self._counts.total():,} of {self._drawn:,} samples drawn were bad ({causes}), more than "
            f"data.max_bad={most:g} allows; first {name}: {what}. {self._report} lists them, vsa check-data finds all: "
            f"start over with {key_value('data.drop', self._report)}, or continue with a larger data.max_bad"
        )


def _where(bad: BadSample) -> str:
    return f"{bad.source}/{bad.id} ({bad.cause} in {bad.shard})"
