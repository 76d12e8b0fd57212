"""The base of all training jobs: networks, data, sparsity, optimizer, step metrics, checkpoint state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sequence import SequenceRanks
from vsa.attention.sparsity import SparsityPoint, SparsitySchedule
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.run_weights import refuse_other_sizes
from vsa.checkpoints.wan import Gates, gate_names
from vsa.checkpoints.wan_names import is_gate
from vsa.data.parallel_dims import ParallelDims, dims_of
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.errors import told_together
from vsa.evaluation.figures import loss_curve
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.settings import Count, NonNegative, Seed, validated
from vsa.training.estimate.job import TRAINING, PlannedNetwork
from vsa.training.gradients import GradientClipper, refuse_training_free
from vsa.training.lightning_compat import continue_after
from vsa.training.log_lines import LogLines
from vsa.training.modules.checks import (
    JobSize,
    refuse_misfit,
    refuse_other_data,
    refuse_other_noise,
    refuse_ranks_apart,
)
from vsa.training.modules.teacher import Teacher
from vsa.training.optimizer import AdamW
from vsa.training.parallel import ParallelPlan, build_model, every_parameter
from vsa.training.run_state import (
    BACKEND,
    LEVEL,
    NEW_RUN,
    RunStart,
    RunStatus,
    Stateful,
    Weights,
    load_tensors,
    load_values,
    parts_of,
)

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule


@validated
class DiffusionModule(L.LightningModule):
    """Base of the training jobs: one trained network with one optimizer.

    All randomness is a function of (seed, step, sample), and learning rate and top-k are functions of the step. A
    checkpoint therefore needs no random state, and a resumed run equals one without interruption.

    Args:
        model: factory of the network.
        optim: recipe of the optimizer.
        sparsity: top-k by optimizer step.
        parallel: activation checkpointing and compile.
        start: start of the run: its weights, or the checkpoint that it resumes.
        latent_scale: divide latents by the standard deviation of each channel, or all channels by the root mean square
            of these, which keeps faint detail bands of a wavelet codec faint.
        grad_clip: largest global gradient norm; 0 disables clipping.
        max_skipped: number of consecutive steps with non-finite gradients that stops training.
        seed: seed of the initial weights, timesteps and validation noise.
        validation_seed: seed of the timesteps in validation, so that runs with different seeds are validated on the
            same timesteps; None: `seed`.
    """

    step_list: tuple[float, ...] | None = None
    """Timesteps of a few-step generator; None for a network that is sampled with many steps."""

    objective: Any
    """The training loss; it knows the distribution of denoising progress over the samples."""

    validates_last = False
    """Whether the run validates after its last step, whatever its interval."""

    headline: tuple[str, ...] = ("train/loss", "val/loss")
    """Metrics shown in the summary of a run."""

    @property
    def reference(self) -> Teacher | None:
        """Frozen network that is sampled, with many steps, for comparison with `model`."""
        return None

    def __init__(
        self,
        *,
        model: Callable[..., Network],
        optim: AdamW,
        sparsity: SparsitySchedule,
        parallel: ParallelPlan,
        start: RunStart = NEW_RUN,
        latent_scale: Literal["channel", "shared"] = "channel",
        grad_clip: NonNegative = 1.0,
        max_skipped: Count = 10,
        seed: Seed = 0,
        validation_seed: Seed | None = None,
    ):
        super().__init__()
        self.model: Network = None  # type: ignore[assignment] (made in configure_model)
        self.sparsity = sparsity
        self.latent_scale = latent_scale
        self.statistics: LatentStatistics = None  # type: ignore[assignment] (known in setup)
        self.seed = seed
        self.validation_seed = seed if validation_seed is None else validation_seed
        self.clipper = GradientClipper(clip=grad_clip, max_skipped=max_skipped)
        self.start, self.init_from = start, start.weights
        self.status = RunStatus()
        # shares of the loss of the current step on this rank: a scalar per micro-batch and network
        self.step_losses: list[Tensor] = []
        self.log_lines = LogLines(self)
        self._model_factory = model
        self._optim = optim
        self._parallel = parallel
        # with the level that this run has; `auto` stays where it is not chosen
        self.parallel = parallel if start.resume is None else parallel.resumed(start.resume.state)
        # what is being made, for messages
        self.phase: Literal["", "passes", "update", "validation", "clips"] = ""

    # the start of a run

    def setup(self, stage: str) -> None:
        # from here on: before, Lightning would refuse a trainer that accumulates, which the step does itself
        self.automatic_optimization = False
        if self.resume is not None and self.start.agree(self.trainer):
            # everything read from the checkpoint that was chosen first is determined again
            self.parallel = self._parallel.resumed(self.resume.state)
            self.check_weights(self.data)
        self.statistics = self.choose_statistics()
        refuse_ranks_apart(self.trainer, self.data, self.statistics)
        with without_memory():
            size = JobSize(self.accumulate, self.dims, self.trainer.max_steps)
            self.check_start(self._model_factory(), self.data, size)
        if self.resume is not None:
            load_values(parts_of(self.trainer), self.record(), self.resume)
            refuse_other_data(self.resume, self.data, self.statistics)

    def choose_statistics(self) -> LatentStatistics:
        """Statistics that normalise latents: those of the data, scaled by `latent_scale`."""
        std = self.data.latent_std
        std = std.square().mean().sqrt().expand_as(std) if self.latent_scale == "shared" else std
        return LatentStatistics(mean=self.data.latent_mean, std=std)

    def check_start(self, model: Network, data: PlanDataModule, size: JobSize) -> None:
        """Refuse data and settings that do not fit the model, before the model is allocated; see `refuse_misfit`."""
        if self.parallel.compile and type(model).compile_blocks is Network.compile_blocks:
            raise ValueError(f"task.parallel.compile=true: {type(model).__name__} cannot compile its blocks")
        model.refuse_data(data.text_padding, getattr(self.objective, "first_frame", 0.0))
        refuse_misfit(model, self.sparsity, data, size)

    def configure_model(self) -> None:
        if self.model is not None:
            return

        def make() -> Network:
            model = self._model_factory()
            self.prepare_model(model)
            return model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            # a checkpoint to resume contains every weight, initial weights all but gates and adapters
            initialise = every_parameter if self.init_from is None else _starts_fresh
            if self.resume is not None:
                initialise = None
            self.model = build_model(
                make, self.device_mesh, self.parallel, initialise=initialise, sequence=self.sequence
            )

    def planned_networks(self) -> tuple[PlannedNetwork, ...]:
        """The networks of a step on the meta device, the trained one first, with their number of passes."""
        with without_memory():
            model = self._model_factory()
            self.prepare_model(model)
        moments = self._optim.moments
        return (PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0, moments=moments),)

    def prepare_model(self, model: Network) -> None:
        """Apply the changes of a job to a new network, before it is sharded."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optim.build(self.model, self.model.parameter_roles())

    def check_weights(self, data: PlanDataModule) -> None:
        """Build the network on the meta device and refuse initial weights that do not fit it or the data,
        and attention that takes no gradients.

        Raises:
            ValueError: names the difference, with both values.
        """
        with without_memory():
            model = self._model_factory()
        if self.init_from is not None:
            weights, gates = self.init_from, self.gates_of(model)
            told_together(
                lambda: weights.check(model, gates),
                lambda: weights.check_data(data),
                lambda: refuse_other_noise(weights, getattr(self.objective, "noise_range", None)),
            )
        if self.resume is not None:
            refuse_other_sizes(model, self.resume)
        with without_memory():
            self.prepare_model(model)
        refuse_training_free(model)

    def gates_of(self, model: Network) -> Gates:
        """Which gates `init_from` must contain: by default those of the model."""
        return "required" if gate_names(model) else "absent"

    def on_fit_start(self) -> None:
        """Restore the state of a resumed run, which consists of weights, moments and counters only."""
        if self.resume is not None:
            load_tensors(parts_of(self.trainer), self.resume)
            continue_after(self.trainer, self.resume.step)
        else:
            self.load_start()
        self.load_frozen()

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Restore the state of an earlier checkpoint during training."""
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
        # of steps that are undone
        self.log_lines.drop()
        load_values(parts_of(self.trainer), self.record(), checkpoint)
        load_tensors(parts_of(self.trainer), checkpoint)
        continue_after(self.trainer, checkpoint.step)

    def load_start(self) -> None:
        """Load the initial weights of a new run."""
        if self.init_from is not None:
            self.init_from.load(self.model, self.gates_of(self.model))

    def load_frozen(self) -> None:
        """Load the networks that checkpoints do not contain."""

    @property
    def resume(self) -> Checkpoint | None:
        """The checkpoint that the run resumes."""
        return self.start.resume

    @property
    def data(self) -> Any:
        """The data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    @property
    def accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches

    @property
    def dims(self) -> ParallelDims:
        """Parallel dimensions of the run."""
        return dims_of(self.trainer)

    @property
    def sequence(self) -> SequenceRanks | None:
        """The ranks that share the samples of this one."""
        return getattr(self.trainer.strategy, "sequence_ranks", None)

    # the step, for what follows it

    @property
    def clippers(self) -> Mapping[str, GradientClipper]:
        """The clippers, which drop non-finite updates, by network."""
        return {"model": self.clipper}

    @property
    def model_moved(self) -> bool:
        """Whether the step that just ended changed `model`."""
        return not self.clipper.skipped

    @property
    def model_steps(self) -> int:
        """Optimizer steps of `model` so far."""
        return self.global_step

    def topk(self, latent_shape: Sequence[int], step: int) -> KeptTiles:
        """Video kv tiles per query tile in optimizer step `step` (from 0) for latents `[C, T, H, W]`; all tiles if the
        method does not select."""
        return self.topk_after(latent_shape, step + 1)

    def topk_after(self, latent_shape: Sequence[int], steps: int, at: SparsityPoint = "current") -> KeptTiles:
        """Video kv tiles per query tile for evaluating the weights after `steps` optimizer steps."""
        tiles = self.model.layout_for(tuple(latent_shape)).num_video_tiles
        if not self.model.selects:
            return KeptTiles((tiles,))
        return self.sparsity.topk_after(steps, tiles, len(self.model.blocks), at)

    def passes(self, step: int) -> Sequence[tuple[Network, bool, int]]:
        """Passes of a micro-batch in optimizer step `step` (from 0): network, whether with backward, and how often."""
        return [(self.model, True, 1)]

    # metrics

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # what follows the last step shows its metrics
        if self.global_step == self.trainer.max_steps:
            self.log_lines.write()

    def show(self, name: str, value: Tensor | float) -> None:
        """Show a value beside the progress bar."""
        # every redraw of the bar would wait for the device to read a tensor there
        self.log(name, torch.tensor(float(value), device="cpu"), prog_bar=True, logger=False)

    def on_validation_start(self) -> None:
        self.phase = "validation"

    def on_validation_end(self) -> None:
        self.phase = ""
        # a resumed run does not repeat this validation, so a kill must not lose its metrics
        self.log_lines.save()

    def on_train_end(self) -> None:
        self.log_lines.write()

    def draw_curves(self, metrics_csv: Path, path: Path, title: str) -> None:
        """Draw the curves of the run as a PNG."""
        loss_curve(metrics_csv, path, title=title)

    # checkpoints

    def parts(self) -> dict[str, Stateful]:
        """State of this module that checkpoints save and restore, by name."""
        return {
            "status": self.status,
            "gradients": self.clipper,
            "sparsity_state": self.sparsity,
            "weights": Weights(lambda: {"model": self.model, "optimizer": self.raw_optimizer}),
        }

    def record(self) -> dict[str, Any]:
        """Further values for `state.json` that describe the run."""
        return {
            "step": self.global_step,
            "seed": self.seed,
            "config": self.start.config,
            "allowed_changes": list(self.start.changes),
            LEVEL: self.parallel.level,
            # a resume asks for the names before there is a network
            BACKEND: self.model and self.model.attention_backend,
            "latent_mean": self.statistics.mean.tolist(),
            "latent_std": self.statistics.std.tolist(),
        }


def _starts_fresh(name: str) -> bool:
    """Whether a parameter is not among initial weights."""
    return is_gate(name) or ".lora_" in name
