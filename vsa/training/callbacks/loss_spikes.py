"""Loss spikes: detected by a robust rule, followed by a rollback to the last good checkpoint and by other data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.settings import AtLeastOne, Bound, Positive, validated
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.lightning_compat import restart_data
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.modules.base import DiffusionModule

# ratio of standard deviation and median absolute deviation of a normal distribution
_DEVIATIONS = 1.4826

RISE = 0.5
"""Smallest distance of a spike from the median, as a fraction of the median."""


class SpikeRule:
    """Detects losses far above the preceding ones.

    A spike exceeds the median of the last losses by `threshold` standard deviations, estimated from the median absolute
    deviation, which is robust to outliers, and by the fraction `RISE` of the median. Spikes and non-finite losses are
    not added to the window.

    Args:
        window: number of preceding losses to compare with.
        least: number of losses before the first decision.
        threshold: smallest distance of a spike from the median, in standard deviations.
    """

    def __init__(self, *, window: int, least: int, threshold: float):
        self._least, self._threshold = least, threshold
        self.losses: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is a spike; if it is not, add it to the window."""
        if not math.isfinite(loss):
            return False
        if len(self.losses) >= self._least:
            middle = median(self.losses)
            deviation = _DEVIATIONS * median(abs(before - middle) for before in self.losses)
            if loss > middle + max(self._threshold * deviation, RISE * abs(middle)):
                return True
        self.losses.append(loss)
        return False


@validated
class LossSpikes(L.Callback):
    """Rolls a run back to its last checkpoint before a loss spike, and continues from there with other data.

    Checkpoints at multiples of `callbacks.checkpoint.every_n_steps` count, not those that a signal wrote, so that a
    stopped and resumed run takes the path of one that was not. The steps from that checkpoint to the spike draw
    samples, captions and noise with another seed. Checkpoints store these windows, so that a resumed run draws the same
    data. Only for jobs of one network. Every step synchronises with the device to read its loss.

    Args:
        window: number of preceding losses to compare with.
        least: number of losses before the first decision.
        threshold: smallest distance of a spike from the median of the losses, in standard deviations.
        rollbacks: maximum number of rollbacks; the next spike ends the run.
    """

    part = "loss_spikes"
    # before the checkpoint of the step
    order = 0

    def __init__(
        self,
        window: Annotated[int, Bound(">=", 10)] = 128,
        least: Annotated[int, Bound(">=", 3)] = 16,
        threshold: Positive = 10.0,
        rollbacks: AtLeastOne = 10,
    ):
        if least > window:
            raise ValueError(f"least must be at most window={window}, got {least}")
        self.rollbacks = rollbacks
        self._rule = SpikeRule(window=window, least=least, threshold=threshold)
        self._done = 0

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        if len(pl_module.clippers) > 1:
            raise ValueError("callbacks.loss_spikes applies to jobs of one network, a distillation has task.collapse")
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        writers = [callback for callback in callbacks if isinstance(callback, Checkpointing)]
        if not writers:
            raise ValueError("callbacks.loss_spikes goes back to checkpoints: it needs callbacks.checkpoint")
        self._checkpointing = writers[0]
        self._checkpointing.keeps_regular = True

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._rule.losses), "rollbacks": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the window is empty if the run had no spike detection before."""
        self._rule.losses.clear()
        self._rule.losses.extend(state.get("losses", ()))
        self._done = state.get("rollbacks", 0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate:
            return
        # these are shares of the loss of the step, over micro-batches and ranks
        share = torch.stack(pl_module.step_losses).sum().double()
        loss = float(trainer.strategy.reduce(share, reduce_op="sum")) / pl_module.dims.sequence
        if self._rule.is_spike(loss):
            self._go_back(trainer, pl_module, loss)
        if pl_module.log_lines.due(trainer.global_step):
            pl_module.log_lines.add({"loss_spikes/rollbacks": self._done}, trainer.global_step)

    def _go_back(self, trainer: L.Trainer, module: DiffusionModule, loss: float) -> None:
        """Load the last good checkpoint and restart the data from its step."""
        last = trainer.global_step - 1
        usual = f"loss {loss:.4g} in step {last} against a median of {median(self._rule.losses):.4g}"
        if self._done >= self.rollbacks:
            raise FloatingPointError(
                f"{usual}, after callbacks.loss_spikes.rollbacks={self.rollbacks} rollbacks: training stopped"
            )
        checkpoint = self._checkpointing.last_good(trainer, last)
        if checkpoint is None:
            rank_zero_info(f"{usual}: no checkpoint to go back to, training continues")
            return
        data = module.data
        rollback_count, windows = self._done + 1, (*data.skipped_windows, (checkpoint.step, last))
        data.skipped_windows = ()
        module.go_back(checkpoint)
        self._done, data.skipped_windows = rollback_count, windows
        self._checkpointing.go_back(trainer, checkpoint)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, MetricsCSV):
                    logger.open()
        rank_zero_info(
            f"{usual}: back to {checkpoint.path}, steps {checkpoint.step} to {last} draw other data "
            f"(rollback {rollback_count} of {self.rollbacks})"
        )
        restart_data(trainer)
        # ends the epoch loop; the next one begins at the step of the checkpoint
        raise StopIteration
