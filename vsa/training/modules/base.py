"""The base of all training jobs: networks, data, sparsity, optimizer, step metrics, checkpoint state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.sparsity import SparsityPoint, SparsitySchedule
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.state_file import one_line
from vsa.checkpoints.wan import Gates, gate_names
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_source import refuse_other_sizes
from vsa.data.batch import VideoBatch
from vsa.data.parallel_dims import ParallelDims, dims_of
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.errors import told_together
from vsa.evaluation.figures import loss_curve
from vsa.models.flops import FlopCount
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.settings import Count, NonNegative, Seed, validated
from vsa.training.estimate.job import TRAINING, PlannedNetwork
from vsa.training.gradients import GradientClipper, refuse_training_free
from vsa.training.lightning_compat import set_step
from vsa.training.log_lines import LogLines, Metrics
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
    read_by_all,
    refuse_missing,
)

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.datamodule import PlanDataModule


class JobSize(NamedTuple):
    """Size of a job, from the settings of the trainer.

    Attributes:
        micro_batches: micro-batches of an optimizer step on one rank.
        dims: parallel dimensions of its ranks.
        max_steps: number of optimizer steps; negative: unlimited.
    """

    micro_batches: int
    dims: ParallelDims
    max_steps: int


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
        self._start, self.resume, self.init_from = start, start.resume, start.weights
        self.status = RunStatus()
        # shares of the loss of the current step on this rank: a scalar per micro-batch and network
        self.step_losses: list[Tensor] = []
        self._log_lines = LogLines()
        self._config, self._micro_batches = start.config, start.micro_batches
        self._changes = list(start.changes)
        self._flops: dict[Any, FlopCount] = {}
        self._model_factory = model
        self._optim = optim
        self._parallel = parallel
        # with the level that this run has; `auto` stays where it is not chosen
        self.parallel = parallel if start.resume is None else parallel.resumed(start.resume.state)
        # what of the current step is being made
        self.phase: Literal["", "passes", "update"] = ""

    # setup

    def setup(self, stage: str) -> None:
        self._agree_on_resume()
        self.statistics = self.choose_statistics()
        with without_memory():
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            size = JobSize(self.accumulate, self.dims, self.trainer.max_steps)
            self.check_start(self._model_factory(), data, size)
        if self.resume is not None:
            load_values(parts_of(self.trainer), self.record(), self.resume)
            self._refuse_other_data(self.resume)

    def _agree_on_resume(self) -> None:
        """Resume the newest checkpoint that is intact on all ranks."""
        if self.resume is None:
            return
        chosen_path = self.resume.path
        self.resume = read_by_all(self.trainer, self.resume, newest=self._start.newest)
        if self.resume.path != chosen_path:
            rank_zero_info(f"resuming from {self.resume.path}")
            self.parallel = self._parallel.resumed(self.resume.state)
            self._changes = list(self._start.changes_since(self.resume))
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            # everything read from the replaced checkpoint is determined again
            self.check_weights(data)

    def _refuse_other_data(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of other data; samples of the same names may have been encoded again."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        refuse_missing(checkpoint, ("latent_mean",))
        now = {**data.state_dict(), "latent_mean": self.statistics.mean.tolist()}
        for name in ("codec", "text_encoder", "latent_shapes", "latent_mean"):
            if checkpoint.state[name] != now[name]:
                raise ValueError(
                    f"{checkpoint.path} was trained on data with {name}={one_line(checkpoint.state[name])}, these have "
                    f"{one_line(now[name])}: use init_from="
                )

    def choose_statistics(self) -> LatentStatistics:
        """Statistics that normalise latents: those of the data, scaled by `latent_scale`."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        std = data.latent_std
        std = std.square().mean().sqrt().expand_as(std) if self.latent_scale == "shared" else std
        return LatentStatistics(mean=data.latent_mean, std=std)

    def check_start(self, model: Network, data: PlanDataModule, size: JobSize) -> None:
        """Refuse data and settings that do not fit the model, before the model is allocated.

        Args:
            model: model on the meta device.
            data: data module after `setup`.
            size: size of the job.

        Raises:
            ValueError: names the mismatch.
        """
        # the stream would refuse an indivisible batch too, but it is created after the run folder is opened
        size.dims.micro_batch(data.batch_size, size.micro_batches)
        if model.image_dim is not None:
            raise ValueError(f"model.image_dim={model.image_dim}: the data hold no image embeddings to train it with")
        expected = model.in_channels - model.out_channels
        if data.cond_channels != expected:
            raise ValueError(
                f"the model takes {expected} channels of image condition (model.in_channels - model.out_channels), "
                f"the data have {data.cond_channels}"
            )
        shapes = list(data.buckets)
        # a top-k above the tiles of every bucket is an error; smaller buckets clamp it
        tiles = max(model.layout_for(shape).num_video_tiles for shape in shapes)
        if tiles == 1 and model.selects:
            largest = max(shapes, key=lambda shape: math.prod(shape[1:]))
            raise ValueError(
                f"attention.tile_thw={list(model.layout_for(largest).tile_thw or ())} makes one tile of the largest "
                f"latents, {largest}: there is nothing to select"
            )
        # attention that selects no tiles ignores the top-k
        self.sparsity.check(tiles if model.selects else 1, len(model.blocks))

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
            self.model = build_model(make, self.device_mesh, self.parallel, initialise=initialise)

    def planned_networks(self) -> tuple[PlannedNetwork, ...]:
        """The networks of a step on the meta device, the trained one first, with their number of passes."""
        with without_memory():
            model = self._model_factory()
            self.prepare_model(model)
        return (PlannedNetwork(name="model", model=model, passes={TRAINING: 1.0}, updates=1.0),)

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
            told_together(lambda: weights.check(model, gates), lambda: weights.check_data(data))
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
            self.set_step(self.resume.step)
        else:
            self.load_start()
        self.load_frozen()

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Restore the state of an earlier checkpoint during training."""
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
        # of steps that are undone
        self._log_lines.drop()
        load_values(parts_of(self.trainer), self.record(), checkpoint)
        load_tensors(parts_of(self.trainer), checkpoint)
        self.set_step(checkpoint.step)

    def set_step(self, step: int) -> None:
        """Set the trainer to continue after `step` optimizer steps."""
        set_step(self.trainer, step)

    def load_start(self) -> None:
        """Load the initial weights of a new run."""
        if self.init_from is not None:
            self.init_from.load(self.model, self.gates_of(self.model))

    def load_frozen(self) -> None:
        """Load the networks that checkpoints do not contain."""

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

    # one step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.accumulate == 0:
            self.step_losses.clear()
        self.phase = "passes"
        self._optim.set_lr(self.raw_optimizer, self.global_step)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # of the last step, which the device has ended while the host prepared this one
        self.write_log()
        self.phase = "update"
        norms = self.clipper(optimizer, self.global_step)
        if self.logs_this_step(self.global_step + 1):
            self.log_step({f"grad_norm/{name}": norm for name, norm in norms.items()}, self.global_step + 1)
            self.log_step(lambda: {"skipped_steps": self.clipper.skipped_total}, self.global_step + 1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.phase = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # what follows the last step shows its metrics
        if self.global_step == self.trainer.max_steps:
            self.write_log()

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

    def expected_topk(self, latent_shape: Sequence[int], steps: int) -> KeptTiles:
        """Mean of `topk_after` over training samples."""
        return self.topk_after(latent_shape, steps).expected(self._share(self.model, tuple(latent_shape)))

    def _share(self, network: Network, shape: tuple[int, ...]) -> Callable[[float, float], float]:
        """Function that gives the fraction of training samples whose denoising progress lies in a range."""
        return partial(self.objective.progress_share, num_tokens=network.layout_for(shape).num_tokens)

    def step_flops(self, batch: VideoBatch, step: int) -> FlopCount:
        """Training FLOPs of one sample in optimizer step `step` (from 0)."""
        return self.flops_of(self.model, batch, step, training=True)

    def flops_of(self, network: Network, batch: VideoBatch, step: int, *, training: bool) -> FlopCount:
        """FLOPs of one sample in one pass of a network, forward only or with backward, at the mean top-k of the
        training samples."""
        shape = tuple(batch.latents.shape[1:])
        topk, text_len = self.topk(shape, step), batch.text.shape[1]
        key = (id(network), shape, topk, text_len, training)
        if key not in self._flops:
            expected = topk.expected(self._share(network, shape)) if network.selects else None
            self._flops[key] = network.flops(shape, expected, text_len, training=training)
        return self._flops[key]

    # metrics

    def logs_this_step(self, step: int) -> bool:
        """Whether optimizer step `step` (counted from 1 when complete) writes metrics."""
        trainer: Any = self.trainer
        return step % trainer.log_every_n_steps == 0 or step == trainer.max_steps

    def log_step(self, metrics: Metrics, step: int) -> None:
        """Log metrics of a completed optimizer step; nothing waits for the device until `write_log`."""
        self._log_lines.add(metrics, step)

    def write_log(self) -> None:
        """Give the loggers all metrics of `log_step`, after waiting for them."""
        self._log_lines.write(self.trainer.loggers if self.trainer.is_global_zero else ())

    def save_log(self) -> None:
        """Let the loggers write all metrics of `log_step` to their files."""
        self.write_log()
        if self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.save()

    def show(self, name: str, value: Tensor | float) -> None:
        """Show a value beside the progress bar."""
        # every redraw of the bar would wait for the device to read a tensor there
        self.log(name, torch.tensor(float(value), device="cpu"), prog_bar=True, logger=False)

    def on_validation_end(self) -> None:
        # a resumed run does not repeat this validation, so a kill must not lose its metrics
        self.save_log()

    def on_train_end(self) -> None:
        self.write_log()

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
            "config": self._config,
            "allowed_changes": self._changes,
            LEVEL: self.parallel.level,
            # a resume asks for the names before there is a network
            BACKEND: self.model and self.model.attention_backend,
            "latent_mean": self.statistics.mean.tolist(),
            "latent_std": self.statistics.std.tolist(),
        }


def _starts_fresh(name: str) -> bool:
    """Whether a parameter is not among initial weights."""
    return is_gate(name) or ".lora_" in name
