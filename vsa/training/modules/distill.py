"""Distillation of a dense teacher into a sparse few-step generator (DMD2), with three networks.

B samples of a micro-batch, C T H W latent dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from vsa.attention.base import AttentionMethod
from vsa.attention.full import FullAttention
from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.checkpoints.wan import Gates
from vsa.data.batch import VideoBatch
from vsa.diffusion import flow_matching as fm
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.evaluation.figures import health_curves
from vsa.models.init import without_memory
from vsa.models.network import Network
from vsa.objectives.distribution_matching import DistributionMatching, NegativeText, Networks, ScoredRollout
from vsa.objectives.flow_matching import VALIDATION_SEED
from vsa.settings import AtLeastOne, Count, NonNegative, validated
from vsa.training.distill_metrics import CollapseRule, CollapseWatch, IterationMetrics, SpreadMeter
from vsa.training.estimate.job import PlannedNetwork
from vsa.training.gradients import GradientClipper, refuse_training_free
from vsa.training.lightning_compat import set_step
from vsa.training.modules.base import DiffusionModule
from vsa.training.modules.checks import JobSize, refuse_other_noise
from vsa.training.modules.critic import FakeScore
from vsa.training.modules.cycle import UpdateCycle
from vsa.training.modules.teacher import Teacher, gates_from_dense, refuse_other_network
from vsa.training.optimizer import AdamW
from vsa.training.parallel import reduced_when, refuse_shared_parameters
from vsa.training.run_state import Stateful, Weights, refuse_missing

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule

_PLANNED_TURNS = 30
"""Number of generator updates over which an estimate averages the passes of an iteration."""


@validated
class DistillModule(DiffusionModule):
    """Distil a dense teacher into a generator of few steps and sparse attention (VSA paper, section 2.3).

    `model` is the generator. An iteration updates the generator, every `generator_every` iterations, and then the
    critic, on the same samples with separate noise. `global_step` and the sparsity schedule count iterations; the
    learning rate of each network follows its own updates. All random choices are functions of (seed, iteration,
    sample). Metrics are means since the last log line, or since the resume. If the teacher comes from a run, the latent
    statistics of that run are used.

    Args:
        fake_score_optim: recipe of the critic's optimizer.
        objective: the losses, with step list and guidance.
        generator_every: iterations per update of the generator.
        fake_score_warmup: number of first iterations that train the critic only.
        teacher: dense checkpoint of real and fake score; None: `init_from`.
        gates: initial (the generator starts from a dense checkpoint) or required (its checkpoint has trained gates).
        negative_prompt: caption of the teacher's unconditional pass; "" is the null embedding of the data.
        fake_score_attention: attention method of the critic.
        real_score_attention: attention method of the teacher. Score networks with sparse attention keep as many tiles
            as the generator.
        collapse: rule that stops training when the generator's output is broken; None: never.
        fake_score_grad_clip: largest global gradient norm of the critic; 0 disables clipping.
        **common: see `DiffusionModule`; they apply to the generator, `max_skipped` to both networks.

    Source: DMD2 (arXiv:2405.14867), sections 4.2 to 4.5.
    """

    headline = ("fake_score/loss", "dmd/gap", "val/gap")

    def __init__(
        self,
        *,
        fake_score_optim: AdamW,
        objective: DistributionMatching,
        generator_every: AtLeastOne = 5,
        fake_score_warmup: Count = 0,
        teacher: str | None = None,
        gates: Literal["initial", "required"] = "initial",
        negative_prompt: str | None = "",
        fake_score_attention: Callable[..., AttentionMethod] = FullAttention,
        real_score_attention: Callable[..., AttentionMethod] = FullAttention,
        collapse: CollapseRule | None = None,
        fake_score_grad_clip: NonNegative = 1.0,
        **common: Any,
    ):
        if objective.guided and negative_prompt is None:
            raise ValueError(
                f"objective.guidance={objective.guidance} ({objective.cfg_form}) needs a negative embedding, but "
                'task.negative_prompt=null: "" is the null embedding of the data'
            )
        if not objective.guided and negative_prompt:
            raise ValueError(
                f"task.negative_prompt={negative_prompt!r} has no effect: objective.guidance={objective.guidance} "
                f"({objective.cfg_form}) does not guide"
            )
        super().__init__(**common)
        # what follows an update depends on whether it was made
        self.clipper.waits = True
        self.objective = objective
        self.step_list = objective.step_list
        self.cycle = UpdateCycle(generator_every=generator_every, fake_score_warmup=fake_score_warmup)
        self.gates: Literal["initial", "required"] = gates
        self.negative_prompt = negative_prompt
        self.teacher = Teacher(partial(self._model_factory, attention=real_score_attention), teacher)
        self.fake_score = FakeScore(
            partial(self._model_factory, attention=fake_score_attention),
            recipe=fake_score_optim,
            clipper=GradientClipper(
                clip=fake_score_grad_clip, max_skipped=self.clipper.max_skipped, network="fake_score", waits=True
            ),
            gan=objective.gan,
            num_steps=len(objective.timesteps) if objective.step_aware else None,
        )
        self._collapse = CollapseWatch(collapse)
        self._negative: NegativeText | None = None
        self._batches: list[VideoBatch] = []
        self._generator_moved = False
        self._window = self._validation = IterationMetrics(torch.device("cpu"))

    # setup

    def check_weights(self, data: PlanDataModule) -> None:
        if self.resume is not None:
            refuse_missing(self.resume, ("teacher", "step_list", "fake_score", "collapse"))
            self._refuse_other_cycle(self.resume)
        self.teacher.find(self.resume, self.init_from, data)
        refuse_other_noise(self.teacher.start, None)
        if self.init_from is None and self.resume is None:
            self.init_from = self.teacher.start
        super().check_weights(data)
        refuse_other_network(self.teacher.start, self.fake_score.make, "fake_score (task.fake_score_attention)")
        with without_memory():
            refuse_training_free(self.fake_score.make(), "task.fake_score_attention")

    def _refuse_other_cycle(self, checkpoint: Checkpoint) -> None:
        """The generator's updates are counted from iterations, and its weights belong to its step list."""
        task = checkpoint.state["config"]["task"]
        pairs = {f"task.{name}": (task[name], value) for name, value in asdict(self.cycle).items()}
        for name in ("source", "cfg_form"):
            pairs[f"task.objective.{name}"] = task["objective"][name], getattr(self.objective, name)
        pairs["the timesteps"] = checkpoint.state["step_list"], list(self.objective.step_list)
        for name, (before, now) in pairs.items():
            if before != now:
                raise ValueError(f"{checkpoint.path} was trained with {name}={before}, the settings have {now}")

    def check_start(self, model: Network, data: PlanDataModule, size: JobSize) -> None:
        super().check_start(model, data, size)
        if self.objective.step_aware and model.time_embedder is None:
            raise ValueError(f"task.objective.step_aware=true: {model.title} has no time embedding of its own width")
        if self.objective.gan is not None and not model.one_pass:
            raise ValueError(
                f"task.objective.gan: {model.title} takes a batch in several passes, so a layer has no features"
            )
        turns = self.cycle.generator_updates(size.max_steps)
        total = getattr(self._optim.schedule, "total_steps", turns)
        if total < turns:
            raise ValueError(
                f"optim.schedule.total_steps={total}, but the generator has {turns} updates in "
                f"trainer.max_steps={size.max_steps}: its learning rate would end before the run"
            )

    def gates_of(self, model: Network) -> Gates:
        return self.gates

    @property
    def reference(self) -> Teacher:
        return self.teacher

    def setup(self, stage: str) -> None:
        super().setup(stage)
        start = None if self.init_from is None else self.init_from.statistics
        own = (self.statistics.mean, self.statistics.std)
        if start is not None and not all(torch.allclose(torch.tensor(a), b) for a, b in zip(start, own, strict=True)):
            raise ValueError(
                f"{self.init_from.source} was trained on latents of another scale than the teacher "  # type: ignore
                f"{self.teacher.start.source}: their means and deviations differ"
            )

    def choose_statistics(self) -> LatentStatistics:
        """Statistics that the teacher was trained with, for any data; otherwise as in pretraining."""
        statistics = self.teacher.start.statistics
        return super().choose_statistics() if statistics is None else LatentStatistics.of(statistics)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.fake_score.build(self.device_mesh, self.parallel, self.sequence, seed=self.seed)
        self.teacher.build(self.device_mesh, self.parallel, self.sequence)
        refuse_shared_parameters(
            {"generator": self.model, "fake_score": self.fake_score.network, "real_score": self.teacher.network}
        )

    def planned_networks(self) -> tuple[PlannedNetwork, ...]:
        # whole cycles of updates, which use every step of the list
        first, count = self.cycle.fake_score_warmup, _PLANNED_TURNS * self.cycle.generator_every
        passes: dict[str, dict[bool, float]] = {}
        for iteration in range(first, first + count):
            turn = self.cycle.is_generators_turn(iteration)
            turn_passes = self.objective.passes(seed=self.seed, iteration=iteration, generator=turn)
            for (name, training), times in turn_passes.items():
                own = passes.setdefault(name, {})
                own[training] = own.get(training, 0.0) + times / count
        (generator,) = super().planned_networks()
        with without_memory():
            critic = self.fake_score.make()
        teacher = self.teacher.planned().requires_grad_(False)
        return (
            replace(generator, name="generator", passes=passes["generator"], updates=1 / self.cycle.generator_every),
            PlannedNetwork(
                name="fake_score",
                model=critic,
                passes=passes["fake_score"],
                updates=1.0,
                moments=self.fake_score.recipe.moments,
            ),
            PlannedNetwork(name="real_score", model=teacher, passes=passes.get("real_score", {})),
        )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [self._optim.build(self.model, self.model.parameter_roles()), self.fake_score.optimizer()]

    def load_start(self) -> None:
        super().load_start()
        # the critic is initialised with the teacher's weights
        self.teacher.start.load(self.fake_score.network, gates_from_dense(self.fake_score.network))

    def load_frozen(self) -> None:
        self.teacher.load(self.device)
        if self.objective.guided:
            self._negative = NegativeText.of(self.data, self.negative_prompt or "").to(self.device)
        self._window = IterationMetrics(self.device)

    @property
    def networks(self) -> Networks:
        return Networks(
            generator=self.model,
            fake_score=self.fake_score.network,
            real_score=self.teacher.network,
            discriminator=self.fake_score.discriminator,
            fake_steps=self.fake_score.steps,
        )

    # one iteration

    @property
    def model_steps(self) -> int:
        return self.cycle.generator_updates(self.global_step)

    @property
    def clippers(self) -> Mapping[str, GradientClipper]:
        return {"model": self.clipper, "fake_score": self.fake_score.clipper}

    @property
    def model_moved(self) -> bool:
        return self._generator_moved

    def training_step(self, batch: VideoBatch, batch_idx: int) -> None:
        """Keep a micro-batch, and make the iteration with the last one.

        The critic learns from the updated generator, so there are two passes over the micro-batches, each as the step
        of `PretrainModule`: draw, forward, loss and backward of all micro-batches (`_scored`), norms, update.
        """
        trainer: Any = self.trainer
        iteration, (generator, critic) = self.global_step, trainer.optimizers
        # overfitting repeats the first batches by design
        assert batch.step == iteration or trainer.overfit_batches, (batch.step, iteration)
        if not self._batches:
            self.step_losses.clear()
            self._optim.set_lr(generator, self.model_steps)
            self.fake_score.recipe.set_lr(critic, iteration)
        self.phase = "passes"
        self._batches.append(batch)
        if len(self._batches) < self.accumulate:
            return

        self._generator_moved = False
        if self.cycle.is_generators_turn(iteration):
            for scored in self._scored(self.objective.generator_update, self._negative):
                self._window.add_generator(scored)
            self._window.add_norms(self.clipper(generator, iteration))
            self.clipper.step(generator)
            self._generator_moved = not self.clipper.skipped
            # the gradient of a GAN term passes through the critic
            critic.zero_grad(set_to_none=True)

        spread = SpreadMeter()
        for scored in self._scored(self.objective.fake_score_update):
            self._window.add_fake_score(scored)
            if scored.index == len(self.objective.timesteps) - 1:
                spread.add(scored.x0)
                self._window.spread.add(scored.x0)
        self._window.add_norms(self.fake_score.clipper(critic, iteration), "fake_score/")
        self.fake_score.clipper.step(critic)

        self._batches.clear()
        self.phase = ""
        set_step(trainer, iteration + 1)
        judged = spread.spread(trainer.strategy)
        stop = judged is not None and self._collapse.judge(judged)
        if stop or self.log_lines.due(iteration + 1):
            self._log_window()
        if stop:
            raise FloatingPointError(f"iteration {iteration}: {self._collapse.report(judged)}")  # type: ignore

    def _scored(self, update: Callable[..., ScoredRollout], *more: Any) -> Iterator[ScoredRollout]:
        """Accumulate the gradients of all micro-batches of the iteration; ranks reduce them at the last one."""
        iteration = self.global_step
        for number, batch in enumerate(self._batches, 1):
            latents = self.statistics.normalise(batch.latents)
            topk = self.topk(batch.latents.shape[1:], iteration)
            scored = update(self.networks, batch, latents, *more, seed=self.seed, iteration=iteration, topk=topk)
            loss = fm.weighted_loss(scored.loss, torch.ones_like(scored.loss), batch.num_slots)
            self.step_losses.append(loss.detach())
            with reduced_when(self.trainer.strategy, number == len(self._batches)):
                # the strategy averages over ranks; the normaliser is global already
                (loss * self.dims.data_size).backward()
            yield scored

    def passes(self, step: int) -> Sequence[tuple[Network, bool, int]]:
        turn = self.cycle.is_generators_turn(step)
        passes = self.objective.passes(seed=self.seed, iteration=step, generator=turn)
        return [(getattr(self.networks, name), training, times) for (name, training), times in passes.items()]

    # metrics

    def on_train_batch_end(self, outputs: Any, batch: VideoBatch, batch_idx: int) -> None:
        # an iteration waits for the device several times, so that nothing is gained by waiting for the next one
        self.log_lines.write()

    def _log_window(self) -> None:
        generator, critic = self.trainer.optimizers
        metrics = self._window.metrics(self.trainer.strategy)
        for label, name in (("loss", "fake_score/loss"), ("gap", "dmd/gap")):
            # missing if the generator had no update or every value was non-finite
            if name in metrics:
                self.show(label, metrics[name])
        self.log_lines.add(
            {
                **metrics,
                "lr": generator.param_groups[0]["lr"],
                "fake_score/lr": critic.param_groups[0]["lr"],
                "updates/generator": self.model_steps - self.clipper.skipped_total,
                "updates/fake_score": self.global_step - self.fake_score.clipper.skipped_total,
                "skipped_steps": self.clipper.skipped_total,
                "fake_score/skipped_steps": self.fake_score.clipper.skipped_total,
            },
            self.global_step,
        )
        self._window = IterationMetrics(self.device)

    def on_validation_epoch_start(self) -> None:
        self._validation = IterationMetrics(self.device)

    def validation_step(self, batch: VideoBatch, batch_idx: int) -> None:
        """Score the last-step output of the averaged generator, from fixed noise, at fixed noise levels."""
        # validation does not use the classifier
        scored = replace(self.objective, gan=None).generator_update(
            self.networks,
            batch,
            self.statistics.normalise(batch.latents),
            self._negative,
            seed=self.validation_seed + VALIDATION_SEED,
            iteration=0,
            topk=self.topk_after(batch.latents.shape[1:], self.global_step),
            index=len(self.objective.timesteps) - 1,
        )
        self._validation.add_generator(scored)
        self._validation.spread.add(scored.x0)

    def on_validation_epoch_end(self) -> None:
        if self.status.received is not None:
            # an incomplete validation is not logged
            return
        values = self._validation.metrics(self.trainer.strategy)
        metrics = {f"val/{name.rpartition('/')[2]}": value for name, value in values.items() if "loss" not in name}
        self.log_lines.add(metrics, self.global_step)
        # for callbacks that monitor it
        self.log("val/gap", metrics.get("val/gap", math.nan), logger=False)

    def draw_curves(self, metrics_csv: Path, path: Path, title: str) -> None:
        health_curves(metrics_csv, path, title=title)

    # checkpoints

    def parts(self) -> dict[str, Stateful]:
        return {
            **super().parts(),
            "fake_score": self.fake_score.clipper,
            "collapse": self._collapse,
            "fake_score_weights": Weights(lambda: self.fake_score.groups(self.trainer.optimizers[1])),
        }

    def record(self) -> dict[str, Any]:
        return {**super().record(), "teacher": self.teacher.state(), "step_list": list(self.objective.step_list)}
