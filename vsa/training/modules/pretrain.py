"""Flow-matching training of a video DiT from data.

B samples of a micro-batch, C T H W latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsityPoint, check_points
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.data.batch import VideoBatch
from vsa.diffusion import flow_matching as fm
from vsa.diffusion.decile_means import DecileMeans
from vsa.objectives.flow_matching import VALIDATION_SEED, FlowMatchingLoss, LossTerms, NoisedBatch
from vsa.settings import validated
from vsa.training.display import never_fatal
from vsa.training.lightning_compat import call_callbacks, ends_step, set_step, validate_before_stopping
from vsa.training.loss_window import LossWindow
from vsa.training.modules.base import DiffusionModule
from vsa.training.parallel import reduced_when
from vsa.training.run_state import Stateful
from vsa.training.validation_csv import ValidationRows, write_validation


@validated
class PretrainModule(DiffusionModule):
    """Pretrain a video DiT with sparse attention from scratch (VSA paper, section 3.1).

    Args:
        objective: the loss.
        validate_at: points of the sparsity schedule to validate at: the current top-k (`val/loss`), all tiles
            (`val/loss_dense`), the end value of the schedule (`val/loss_target`), half, double and four times
            the current top-k (`val/loss_half`, `val/loss_double`, `val/loss_quadruple`); each costs a forward. The
            losses of the last validation, by sample, are written to `validation.csv` in the run folder.
        **common: see `DiffusionModule`.
    """

    validates_last = True

    def __init__(
        self, *, objective: FlowMatchingLoss, validate_at: Sequence[SparsityPoint] = ("current",), **common: Any
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
        self._window = LossWindow(self.trainer.strategy.root_device, self.dims.sequence)
        # training and validation use the noise of the samples' own seeds
        self.data.noise_ahead = True
        super().setup(stage)

    def training_step(self, batch: VideoBatch, batch_idx: int) -> None:
        """Train on one micro-batch, and update the weights after the last one of an optimizer step.

        Everything random is a function of (seed, step, sample). Finetuning differs in `loss_terms`; a distillation has
        two networks and an iteration of its own.
        """
        trainer: Any = self.trainer
        step, optimizer = self.global_step, self.raw_optimizer
        first, last = batch_idx % self.accumulate == 0, ends_step(trainer)
        # overfitting repeats the first batches by design
        assert batch.step == step or trainer.overfit_batches, (batch.step, step)
        if first:
            self.step_losses.clear()
            self._optim.set_lr(optimizer, step)
        self.phase = "passes"

        # timesteps, noise and velocity targets
        latents = self.statistics.normalise(batch.latents)
        noised = self.objective.noised(self.model, batch, latents, seed=self.seed)
        # the forward, and the error of every sample
        topk = self.topk(latents.shape[1:], step)
        terms = self.loss_terms(batch, noised, topk)
        losses = {"loss": terms.mse, **{f"loss_{name}": part for name, part in terms.parts.items()}}
        # shares of this rank and micro-batch: the weights add up to 1 over the global batch
        losses = {name: fm.weighted_loss(loss, terms.weights, terms.total_weight) for name, loss in losses.items()}
        self.step_losses.append(losses["loss"].detach())
        self._window.add(losses, terms.mse, terms.sigmas)

        if first:
            call_callbacks(trainer, "on_before_zero_grad", optimizer)
            optimizer.zero_grad()
        with reduced_when(trainer.strategy, last):
            # the strategy averages over ranks
            self.manual_backward(losses["loss"] * self.dims.data_size)
        if not last:
            return

        call_callbacks(trainer, "on_before_optimizer_step", optimizer)
        # metrics of the step before, which the device has ended while the host prepared this one
        self.log_lines.write()
        self.phase = "update"
        norms = self.clipper(optimizer, step)
        # gradients that are not finite change nothing
        optimizer.step()
        self.phase = ""
        set_step(trainer, step + 1)

        self._window.end_step()
        if self.log_lines.due(step + 1):
            self.log_lines.add({f"grad_norm/{name}": norm for name, norm in norms.items()}, step + 1)
            self.log_lines.add(lambda: {"skipped_steps": self.clipper.skipped_total}, step + 1)
            self.log_lines.add(partial(self._losses, self._window.metrics()), step + 1)
            self.log_lines.add({"lr": optimizer.param_groups[0]["lr"]}, step + 1)
            self._window = self._window.empty()

    def go_back(self, checkpoint: Checkpoint) -> None:
        # drop the losses of undone steps
        self._window = self._window.empty()
        super().go_back(checkpoint)

    def loss_terms(self, batch: VideoBatch, noised: NoisedBatch, topk: KeptTiles) -> LossTerms:
        """Terms of the training loss of a micro-batch."""
        return self.objective(self.model, batch, noised, topk=topk)

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
        self.log_lines.add(metrics, self.global_step)
        rows = self._rows.gather(self.dims)
        if self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "validation.csv"
            with never_fatal(str(path)):
                write_validation(path, self.global_step, rows)
        # for callbacks that monitor it
        self.log("val/loss", metrics["val/loss"], logger=False)

    def parts(self) -> dict[str, Stateful]:
        return {**super().parts(), "loss_window": self._window}
