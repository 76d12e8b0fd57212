"""The estimate of memory and time of a run, printed before it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.training.display import never_fatal
from vsa.training.estimate.gpus import gpu_here
from vsa.training.estimate.run import estimate_of, short_lines
from vsa.training.modules.base import DiffusionModule


class Announcement(L.Callback):
    """Chooses the level of activation checkpointing of a new run under `auto`, and prints the estimate of `vsa plan`.

    It prints one line on GPUs, with a warning when the run does not fit. It never stops a run, since the estimate may
    be wrong.

    Args:
        cfg: config of the run.
    """

    def __init__(self, cfg: Any):
        self._cfg = cfg

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        # at this point the data are known and no network is built
        gpu = gpu_here(trainer.strategy.root_device)
        if gpu is None:
            return
        # all ranks take the level that fits on the smallest GPU
        memory = torch.tensor(gpu.memory, dtype=torch.float64, device=trainer.strategy.root_device)
        gpu = replace(gpu, memory=float(trainer.strategy.reduce(memory, reduce_op="min")))
        with never_fatal("the estimate of memory and time"):
            datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
            estimate = estimate_of(self._cfg, pl_module, datamodule, gpu, ranks=trainer.world_size)
            pl_module.recomputation.choose(estimate.largest.level)
            for line in short_lines(estimate.at(pl_module.recomputation.level)):
                rank_zero_info(line)
