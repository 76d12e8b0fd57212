"""What a run does when a training step does not fit into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.errors import MemoryRanOut, is_out_of_memory, memory_reason
from vsa.training.display import never_fatal
from vsa.training.estimate.gpus import gpu_here
from vsa.training.estimate.run import estimate_of
from vsa.training.lightning_compat import around_micro_batches, restart_data
from vsa.training.modules.base import DiffusionModule

SETTING = "task.parallel.activation_checkpointing"


class OutOfMemory(L.Callback):
    """Makes a step that ran out of memory again with more recomputation, or ends the run in one line.

    A step is made again under `activation_checkpointing=auto` in a process without FSDP, before any update of it has
    begun. With FSDP other ranks wait in a collective meanwhile, and a pass that was cut off leaves gathered parameters
    behind, so such a run ends and names the level to set.

    Args:
        cfg: of the run.
    """

    def __init__(self, cfg: Any):
        self._cfg = cfg

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        around_micro_batches(trainer, partial(self._guarded, trainer, pl_module))

    def _guarded(self, trainer: L.Trainer, module: DiffusionModule, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = memory_reason(error)
        # out here the error is gone, and with it the activations that its frames held
        self._repeat(trainer, module, reason)

    def _repeat(self, trainer: L.Trainer, module: DiffusionModule, reason: str) -> None:
        """Let the trainer make the step again at the next level.

        Raises:
            MemoryRanOut: that cannot be, or would not help.
            StopIteration: ends the pass over the data, and the next one begins with this step.
        """
        level, more, step = module.recomputation.level, module.recomputation.next_level, trainer.global_step + 1
        if module.updating and module.automatic_optimization:
            raise MemoryRanOut(
                f"out of memory in the optimizer's update of step {step} ({reason}): gradients and moments do not fit "
                "beside the weights, and no level of activation checkpointing changes that; with trainer=fsdp several "
                "GPUs share them"
            )
        message = f"out of memory in step {step} with {SETTING}={level} ({reason})"
        if more is None:
            raise MemoryRanOut(f"{message}: {self._smaller(trainer, module)}")
        if not module.recomputation.automatic:
            raise MemoryRanOut(f"{message}: {SETTING}={more} keeps less, and auto takes a level that fits")
        if module.device_mesh is not None or module.updating:
            why = "with FSDP a step is not made again" if module.device_mesh is not None else "an update has begun"
            raise MemoryRanOut(f"{message}, and {why}: set {SETTING}={more}, which keeps less")
        gc.collect()
        if module.device.type == "cuda":
            # pieces of the level before would not fit what comes
            torch.cuda.empty_cache()
        rank_zero_info(f"{message}: the step is made again with {more}")
        module.repeat_step(more)
        restart_data(trainer)
        raise StopIteration

    def _smaller(self, trainer: L.Trainer, module: DiffusionModule) -> str:
        """Settings that take less where no level does."""
        gpu = gpu_here(trainer.strategy.root_device)
        if gpu is not None:
            with never_fatal("the estimate of memory"):
                datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
                return estimate_of(self._cfg, module, datamodule, gpu, ranks=trainer.world_size).at("full").smaller()
        size, now = self._cfg.data.batch_size, self._cfg.trainer.accumulate_grad_batches
        more = (n for n in range(now + 1, size + 1) if size % (n * trainer.world_size) == 0)
        divided = next(more, None)
        if divided is None:
            return "a micro-batch is one sample already, expected a smaller model or more memory"
        return f"trainer.accumulate_grad_batches={divided} takes less"
