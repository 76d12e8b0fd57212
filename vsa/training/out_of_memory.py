"""The line with which a run ends when a training step, a validation or clips do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vsa.checkpoints.moments import EIGHT_BIT
from vsa.errors import MemoryRanOut, is_out_of_memory, memory_reason
from vsa.models.recompute import LEVELS

SETTING = "task.parallel.activation_checkpointing"


@contextmanager
def told_out_of_memory(module: Any) -> Iterator[None]:
    """Turn an out-of-memory error of a run into `MemoryRanOut` with what to set.

    Args:
        module: training module of the run.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        line = out_of_memory_line(module, error)
        if line is None:
            raise
        raise MemoryRanOut(line) from error


def out_of_memory_line(module: Any, error: BaseException) -> str | None:
    """What to set after an error of a run; None if memory did not run out, or not in a phase of the module."""
    if not is_out_of_memory(error) or not module.phase:
        return None
    reason, step, level = memory_reason(error), module.global_step + 1, module.parallel.level
    saved = module.status.saved
    resume = "" if saved is None else f"; ckpt_path=last continues from {saved}"
    if module.phase == "validation":
        remedy = _smaller_micro_batch(module)
        return f"out of memory in the validation after step {module.global_step} ({reason}): {remedy}{resume}"
    if module.phase == "clips":
        remedy = "fewer callbacks.samples.prompts take less, callbacks.samples.prompts=[] leaves clips out"
        return f"out of memory in the clips of step {module.global_step} ({reason}): {remedy}{resume}"
    if module.phase == "update":
        # a resumed run converts the moments if it is allowed to
        return (
            f"out of memory in the optimizer's update of step {step} ({reason}): gradients and moments do not fit "
            f"beside the weights, and no level of activation checkpointing changes that; {EIGHT_BIT} makes moments "
            f"smaller, and with trainer=fsdp several GPUs share them{resume}"
        )
    higher_levels = LEVELS[LEVELS.index(level) + 1 :]
    remedy = f"set {SETTING}={higher_levels[0]}, which keeps less" if higher_levels else _smaller_micro_batch(module)
    return f"out of memory in step {step} with {SETTING}={level} ({reason}): {remedy}{resume}"


def _smaller_micro_batch(module: Any) -> str:
    size, ranks = module.data.batch_size, module.dims.data_size
    for micro_batches in range(module.accumulate + 1, size + 1):
        if size % (micro_batches * ranks) == 0:
            return f"trainer.accumulate_grad_batches={micro_batches} takes less"
    return "a micro-batch is one sample already, expected a smaller model or more memory"
