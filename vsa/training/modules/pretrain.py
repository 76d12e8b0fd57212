"""Flow-matching training of a video DiT from data.

B samples of a micro-batch, C T H W latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsityPoint, check_points
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.data.batch import VideoBatch
from vsa.diffusion import flow_matching as fm
from vsa.diffusion.decile_means import DecileMeans
from vsa.objectives.flow_matching import VALIDATION_SEED, FlowMatchingLoss, LossTerms, NoisedBatch
from vsa.settings import validated
from vsa.training.display import never_fatal
from vsa.training.lightning_compat import validate_before_stopping
from vsa.training.loss_window import LossWindow
from vsa.training.modules.base import DiffusionModule
from vsa.training.run_state import Stateful
from vsa.training.validation_csv import ValidationRows, write_validation


@validated
class PretrainModule(DiffusionModule):
    """Pretrain a video DiT with sparse attention from scratch (VSA paper, section 3.1).

    Args:
        objective: the loss.
        validate_at: points of the sparsity schedule to validate at: the current top-k (`val/loss`), all tiles
            (`val/loss_dense`), the end value of the schedule (`val/loss_target`), half and double the current top-k
            (`val/loss_half`, `val/loss_double`); each costs a forward. The losses of the last validation, by sample,
            are written to `validation.csv` in the run folder.
        **common: see `DiffusionModule`.
    """

    validates_last = True

    def __init__(
        self,
        *,
        objective: FlowMatchingLoss,
        validate_at: Sequence[SparsityPoint] = ("current",),
        **common: Any,
    ):
        points = check_points("validate_at", validate_at)
        if "current" not in points:
            raise ValueError(f"validate_at must contain current, whose loss is val/loss, got {list(validate_at)}")
        super().__init__(**common)
        self.objective: FlowMatchingLoss = objective
        self.validate_at = points
        # for the progress bar
        self._shown_loss: float | None = None
        self._validated: dict[SparsityPoint, DecileMeans] = {}
        self._rows = ValidationRows()

    def setup(self, stage: str) -> None:
        # the module is on the device later
        self._window = LossWindow(self.trainer.strategy.root_device, self.dims.ranks_per_sample)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        # training and validation use the noise of the samples' own seeds
        data.noise_ahead = True
        super().setup(stage)

    def training_step(self, batch: VideoBatch, batch_idx: int) -> Tensor:
        # overfitting repeats the first batches by design
        trainer: Any = self.trainer
        assert batch.step == self.global_step or trainer.overfit_batches, (batch.step, self.global_step)
        topk = self.topk(batch.latents.shape[1:], self.global_step)
        latents = self.statistics.normalise(batch.latents)
        noised = self.objective.noised(self.model, batch, latents, seed=self.seed)
        terms = self.loss_terms(batch, noised, topk)
        loss = fm.weighted_loss(terms.mse, terms.weights, terms.total_weight)
        parts = {
            f"loss_{name}": fm.weighted_loss(part, terms.weights, terms.total_weight)
            for name, part in terms.parts.items()
        }
        self.step_losses.append(loss.detach())
        self._window.add({"loss": loss, **parts}, terms.mse, terms.sigmas)
        # the trainer divides by the micro-batches and the strategy averages over ranks, but the normaliser is global
        return loss * self.accumulate * self.dims.data_size

    def go_back(self, checkpoint: Checkpoint) -> None:
        # drop the losses of undone steps
        self._window = self._window.empty()
        super().go_back(checkpoint)

    def loss_terms(self, batch: VideoBatch, noised: NoisedBatch, topk: KeptTiles) -> LossTerms:
        """Terms of the training loss of a micro-batch."""
        return self.objective(self.model, batch, noised, topk=topk)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # logged here and not in on_train_batch_end, since the checkpoint is written before
        step = self.global_step + 1
        self._window.end_step()
        if self.logs_this_step(step):
            losses, self._window = self._window.metrics(), self._window.empty()
            self.log_step(partial(self._losses, losses), step)
            self.log_step({"lr": self.raw_optimizer.param_groups[0]["lr"]}, step)

    def _losses(self, arriving: Callable[[], dict[str, float]]) -> dict[str, float]:
        losses = arriving()
        self._shown_loss = losses["loss"]
        return {f"train/{name}": value for name, value in losses.items()}

    def on_train_batch_end(self, outputs: Any, batch: VideoBatch, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._shown_loss is not None:
            self.show("loss", self._shown_loss)
            self._shown_loss = None
        if self.global_step == self.trainer.max_steps:
            # runs are compared by their final validation
            validate_before_stopping(self.trainer)

    def validation_step(self, batch: VideoBatch, batch_idx: int) -> None:
        latents = self.statistics.normalise(batch.latents)
        noised = self.objective.noised(self.model, batch, latents, seed=self.validation_seed + VALIDATION_SEED)
        losses: dict[KeptTiles, LossTerms] = {}
        for at, means in self._validated.items():
            topk = self.topk_after(batch.latents.shape[1:], self.global_step, at)
            if topk not in losses:
                losses[topk] = self.objective(self.model, batch, noised, topk=topk)
            means.add(losses[topk].mse, losses[topk].sigmas)
            self._rows.add(at, batch, losses[topk].sigmas, losses[topk].mse)

    def on_validation_epoch_start(self) -> None:
        self._validated = {at: DecileMeans(self.device) for at in self.validate_at}
        self._rows = ValidationRows()

    def on_validation_epoch_end(self) -> None:
        if self.status.received is not None:
            # an incomplete validation is not logged
            return
        metrics: dict[str, float] = {}
        for at, means in self._validated.items():
            means.gather(self.trainer.strategy)
            metrics |= means.metrics("val/loss" if at == "current" else f"val/loss_{at}")
        self.log_step(metrics, self.global_step)
        rows = self._rows.gather(self.dims)
        if self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "validation.csv"
            with never_fatal(str(path)):
                write_validation(path, self.global_step, rows)
        # for callbacks that monitor it
        self.log("val/loss", metrics["val/loss"], logger=False)

    def parts(self) -> dict[str, Stateful]:
        return {**super().parts(), "loss_window": self._window}
