"""What every training job shares: networks, optimizer, clipping, step metrics, checkpoint state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vsa.models.checkpoint import Gates, gate_names
from vsa.models.key_names import is_gate
from vsa.models.video_dit import VideoDiT
from vsa.training.checkpointing import Checkpoint, load_model_tensors, load_optimizer_tensors
from vsa.training.optim import ROLES, AdamW
from vsa.training.parallel import ParallelPlan, build_model
from vsa.training.start import Start

if TYPE_CHECKING:
    # the data module loads the video libraries
    from vsa.data.datamodule import PlanDataModule


class DiffusionModule(L.LightningModule):
    """One trained network under one optimizer.

    Everything random is a function of (seed, step, sample), the learning rate and the top-k of the step, so a
    checkpoint needs no random state and a resumed run is the same run.

    Args:
        model: builds the network.
        optim: recipe of the optimizer.
        parallel: activation checkpointing and compile.
        grad_clip: largest global gradient norm; 0 clips nothing.
        max_skipped: consecutive steps with non-finite gradients after which training stops.
        seed: of the initial weights, timesteps and validation noise.
    """

    def __init__(
        self,
        *,
        model: Callable[..., VideoDiT],
        optim: AdamW,
        parallel: ParallelPlan,
        grad_clip: float = 1.0,
        max_skipped: int = 10,
        seed: int = 0,
    ):
        super().__init__()
        self.model: VideoDiT = None  # type: ignore[assignment] (made in configure_model)
        self.seed = seed
        self.grad_clip = grad_clip
        self.resume: Checkpoint | None = None
        self.init_from: Start | None = None
        self.config: Mapping[str, Any] = {}
        # called once nothing speaks against the run any more, before it writes anything
        self.on_ready: Callable[[], None] = lambda: None
        self.step_skipped = False
        self.flops_total = 0.0
        self._model_factory = model
        self._optim = optim
        self._parallel = parallel
        self._max_skipped = max_skipped
        self._skipped_in_row = 0
        self._skipped_total = 0

    # set-up

    def setup(self, stage: str) -> None:
        with torch.device("meta"):
            self.check_start(self._model_factory())

    def check_start(self, model: VideoDiT) -> None:
        """Refuse data and settings that do not fit the model, before it takes any memory.

        Args:
            model: on the meta device.

        Raises:
            ValueError: names what does not fit.
        """

    def configure_model(self) -> None:
        if self.model is not None:
            return

        def make() -> VideoDiT:
            model = self._model_factory()
            self.prepare_model(model)
            return model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            # a checkpoint to resume from holds every weight, one to start from all but gates and adapters
            initialise = None if self.resume is not None else self._starts_fresh
            self.model = build_model(make, self.device_mesh, self._parallel, initialise=initialise)

    def _starts_fresh(self, name: str) -> bool:
        return self.init_from is None or is_gate(name) or ".lora_" in name

    def prepare_model(self, model: VideoDiT) -> None:
        """What a job changes about a fresh network before it is sharded."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optim.build(self.model, self.model.parameter_roles())

    def check_weights(self, data: PlanDataModule) -> None:
        """Build the network without memory and refuse weights to start from that do not fit it or the data.

        Raises:
            ValueError: names what differs, with both values.
        """
        with torch.device("meta"):
            model = self._model_factory()
        if self.init_from is not None:
            self.init_from.check(model, self.gates_of(model))
            self.init_from.check_data(data)
        with torch.device("meta"):
            self.prepare_model(model)

    def gates_of(self, model: VideoDiT) -> Gates:
        """Which gates `init_from` has to hold: those of the model."""
        return "required" if gate_names(model) else "absent"

    def on_fit_start(self) -> None:
        """Put a resumed run where it stopped; weights, moments and counters are all the state there is."""
        if self.resume is not None:
            load_model_tensors(self.model, self.resume.tensors("model"), str(self.resume.path))
            load_optimizer_tensors(self.raw_optimizer, self.resume.tensors("optimizer"), str(self.resume.path))
            self._skipped_total = self.resume.state["skipped_steps"]
            self._skipped_in_row = self.resume.state["skipped_in_row"]
            self.flops_total = self.resume.state["flops_total"]
            self._set_trainer_step(self.resume.step)
        elif self.init_from is not None:
            self.init_from.load(self.model, self.gates_of(self.model))
        self.load_frozen()
        self.on_ready()

    def load_frozen(self) -> None:
        """Fill the networks that checkpoints leave out."""

    def _set_trainer_step(self, step: int) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        optimizer_steps = loop.automatic_optimization.optim_progress.optimizer.step.total
        optimizer_steps.ready = optimizer_steps.completed = step
        batches: Any = loop.batch_progress.total
        batches.ready = batches.started = batches.processed = batches.completed = step * self.accumulate
        loop._batches_that_stepped = step

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    @property
    def accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches

    # one step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._optim.set_lr(self.raw_optimizer, self.global_step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradient norms by role, the finite check and clipping.

        A non-finite gradient drops all gradients, so weights and moments keep every bit.
        """
        grads: dict[str, list[Tensor]] = {}
        for group in optimizer.param_groups:
            grads.setdefault(group["role"], []).extend(p.grad for p in group["params"] if p.grad is not None)
        norms = {}
        for role in filter(grads.get, grads):
            norm = torch.nn.utils.get_total_norm(grads[role])
            norms[role] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        self.step_skipped = not math.isfinite(total.item())
        if self.step_skipped:
            optimizer.zero_grad(set_to_none=True)
            self._skipped_in_row += 1
            self._skipped_total += 1
            if self._skipped_in_row >= self._max_skipped:
                raise FloatingPointError(
                    f"gradients were not finite for {self._skipped_in_row} steps in a row, "
                    f"the last one step {self.global_step}: training stopped"
                )
        else:
            self._skipped_in_row = 0
            if self.grad_clip > 0:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grads_with_norm_(parameters, self.grad_clip, total)
        if self.logs_this_step(self.global_step + 1):
            named = {f"grad_norm/{role}": norms[role] for role in ROLES if role in norms}
            self.log_step(
                {"grad_norm/total": total, **named, "skipped_steps": self._skipped_total}, self.global_step + 1
            )

    # metrics

    def logs_this_step(self, step: int) -> bool:
        """Whether optimizer step `step` (counted from 1 when complete) writes metrics."""
        trainer: Any = self.trainer
        return step % trainer.log_every_n_steps == 0 or step == trainer.max_steps

    def log_step(self, metrics: Mapping[str, Tensor | float], step: int) -> None:
        """Send metrics of a completed optimizer step to every logger; this is where the device is waited for."""
        values = {name: float(value) for name, value in metrics.items()}
        if self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step)

    # checkpoints

    def checkpoint_state(self) -> dict[str, Any]:
        """The part of `state.json` that this module owns."""
        return {
            "step": self.global_step,
            "seed": self.seed,
            "skipped_steps": self._skipped_total,
            "skipped_in_row": self._skipped_in_row,
            "flops_total": self.flops_total,
            # the resolved config: what builds the model again for sampling
            "config": self.config,
        }
