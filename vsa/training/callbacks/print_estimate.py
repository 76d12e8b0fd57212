"""The estimate of memory and time of a run, printed before it starts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.data.splits import split_group
from vsa.reports.statistics import FEWEST_SAMPLES
from vsa.training.display import never_fatal
from vsa.training.estimate.gpus import gpu_here
from vsa.training.estimate.run import estimate_of, short_lines
from vsa.training.modules.base import DiffusionModule


def few_held_out(data: Any) -> str | None:
    """A note where the held-out samples are few or of one film; None otherwise, and where the data do not say."""
    refs = [ref for refs in getattr(data, "held_out", {}).values() for ref in refs]
    group, films = split_group("file", None), set[str | None]()
    with suppress(ValueError):
        for ref in refs if hasattr(data.store, "entry") else ():
            if len(films) < 2:
                films.add(group(data.store.entry(ref.source, ref.id)))
    one = f", all of {films.pop()}" if len(films) == 1 else ""
    if not refs or (len(refs) >= FEWEST_SAMPLES and not one):
        return None
    return f"note: samples held out: {len(refs)}{one}; their loss says little about others (data.val_fraction)"


class PrintEstimate(L.Callback):
    """Chooses the level of activation checkpointing of a new run under `auto`, and prints the estimate of `vsa plan`.

    It prints one line on GPUs, with a warning when the run does not fit. It never stops a run, since the estimate may
    be wrong.

    Args:
        cfg: config of the run.
        counted: whether `trainer.max_steps` is the number of steps of the run.
    """

    def __init__(self, cfg: Any, *, counted: bool = True):
        self._cfg, self._counted = cfg, counted

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        # at this point the data are known and no network is built
        datamodule = pl_module.data
        if (few := few_held_out(datamodule)) is not None:
            rank_zero_info(few)
        gpu = gpu_here(trainer.strategy.root_device)
        if gpu is None:
            return
        # all ranks take the level that fits on the smallest GPU
        memory = torch.tensor(gpu.memory, dtype=torch.float64, device=trainer.strategy.root_device)
        gpu = replace(gpu, memory=float(trainer.strategy.reduce(memory, reduce_op="min")))
        with never_fatal("the estimate of memory and time"):
            text = datamodule.text_encoder.max_tokens
            estimate = estimate_of(
                self._cfg, pl_module, datamodule.buckets, text, gpu, dims=pl_module.dims, counted=self._counted
            )
            pl_module.parallel = pl_module.parallel.at(estimate.largest.level)
            for line in short_lines(estimate.at(pl_module.parallel.level)):
                rank_zero_info(line)
