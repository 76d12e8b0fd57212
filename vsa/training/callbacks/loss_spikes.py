"""Loss spikes: noticed by a robust rule, undone by going back to the last good checkpoint and past other data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vsa.settings import AtLeastOne, Bound, Positive, checked
from vsa.training.callbacks.checkpoint import Checkpointing
from vsa.training.lightning_compat import restart_data
from vsa.training.metrics_csv import MetricsCSV
from vsa.training.modules.base import DiffusionModule

# of normally distributed values the standard deviation is this many times the median absolute deviation
_DEVIATIONS = 1.4826


class SpikeRule:
    """Tells losses far above those before them.

    A spike is above the median of the last losses by `threshold` of their deviations (from the median absolute
    deviation, which outliers do not move) and by a share `rise` of the median. Losses that are spikes or not finite
    never become part of the window.

    Args:
        window: losses that are looked back on.
        least: losses before the first judgement.
        threshold: deviations above the median.
        rise: share of the median above it.
    """

    def __init__(self, *, window: int, least: int, threshold: float, rise: float):
        self._least, self._threshold, self._rise = least, threshold, rise
        self.losses: deque[float] = deque(maxlen=window)

    def is_spike(self, loss: float) -> bool:
        """Judge a loss, and remember it unless it is a spike."""
        if not math.isfinite(loss):
            return False
        if len(self.losses) >= self._least:
            middle = median(self.losses)
            deviation = _DEVIATIONS * median(abs(before - middle) for before in self.losses)
            if loss > middle + max(self._threshold * deviation, self._rise * abs(middle)):
                return True
        self.losses.append(loss)
        return False


@checked
class LossSpikes(L.Callback):
    """Takes a run back to its last checkpoint before a loss spike, and trains past it on other data.

    The steps from that checkpoint to the spike draw samples, captions and noise with another seed; these windows lie in
    checkpoints, so that a resumed run takes the same path. For jobs of one network. Every step waits for its loss.

    Args:
        window: losses that are looked back on.
        least: losses before the first judgement.
        threshold: how far above their median a spike is, in deviations of the losses.
        rise: how far above it at least, as a share of the median.
        patience: spikes in a row before it goes back.
        rollbacks: how often at most; one more spike ends the run.

    Raises:
        ValueError: `least` is above `window`.
    """

    part = "loss_spikes"
    # before a checkpoint of the step is written
    order = 0

    def __init__(
        self,
        window: Annotated[int, Bound(">=", 10)] = 128,
        least: Annotated[int, Bound(">=", 3)] = 16,
        threshold: Positive = 10.0,
        rise: Positive = 0.5,
        patience: AtLeastOne = 1,
        rollbacks: AtLeastOne = 10,
    ):
        if least > window:
            raise ValueError(f"least={least} is above window={window}: nothing would ever be judged")
        self.patience, self.rollbacks = patience, rollbacks
        self._rule = SpikeRule(window=window, least=least, threshold=threshold, rise=rise)
        self._in_row = self._done = 0

    def setup(self, trainer: L.Trainer, pl_module: DiffusionModule, stage: str) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError("callbacks.loss_spikes is for jobs of one network, a distillation has task.collapse")
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        writers = [callback for callback in callbacks if isinstance(callback, Checkpointing)]
        if not writers:
            raise ValueError("callbacks.loss_spikes goes back to checkpoints: it needs callbacks.checkpoint")
        self._checkpointing = writers[0]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._rule.losses), "in_row": self._in_row, "rollbacks": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave; a run that was not watched before begins with nothing."""
        self._rule.losses.clear()
        self._rule.losses.extend(state.get("losses", ()))
        self._in_row, self._done = state.get("in_row", 0), state.get("rollbacks", 0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate:
            return
        # shares of the loss of the step, of every micro-batch and rank
        share = torch.stack(pl_module.step_losses).sum().double()
        loss = float(trainer.strategy.reduce(share, reduce_op="sum"))
        self._in_row = self._in_row + 1 if self._rule.is_spike(loss) else 0
        if self._in_row >= self.patience:
            self._go_back(trainer, pl_module, loss)
        if pl_module.logs_this_step(trainer.global_step):
            pl_module.log_step({"loss_spikes/rollbacks": self._done}, trainer.global_step)

    def _go_back(self, trainer: L.Trainer, module: DiffusionModule, loss: float) -> None:
        """Load the last good checkpoint and let the trainer fetch the data from there."""
        last = trainer.global_step - 1
        usual = f"loss {loss:.4g} in step {last} against a median of {median(self._rule.losses):.4g}"
        if self._done >= self.rollbacks:
            raise FloatingPointError(
                f"{usual}, after callbacks.loss_spikes.rollbacks={self.rollbacks} rollbacks: training stopped"
            )
        # the state before the first spike in the row
        checkpoint = self._checkpointing.last_good(trainer, last + 1 - self._in_row)
        self._in_row = 0
        if checkpoint is None:
            rank_zero_info(f"{usual}: no checkpoint to go back to, training goes on")
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        done, windows = self._done + 1, (*data.skipped_windows, (checkpoint.step, last))
        data.skipped_windows = ()
        module.go_back(checkpoint)
        self._done, data.skipped_windows = done, windows
        self._checkpointing.go_back(trainer, checkpoint)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, MetricsCSV):
                    logger.open()
        rank_zero_info(
            f"{usual}: back to {checkpoint.path}, steps {checkpoint.step} to {last} draw other data "
            f"(rollback {done} of {self.rollbacks})"
        )
        restart_data(trainer)
        # ends the pass over the data, and the next one begins where the checkpoint stands
        raise StopIteration
