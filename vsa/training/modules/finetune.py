"""Finetuning of a pretrained video DiT to sparse attention, optionally with a frozen dense teacher.

B samples of a micro-batch, C T H W latent dims, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.lora import LoRA
from vsa.checkpoints.wan import Gates
from vsa.data.batch import VideoBatch
from vsa.diffusion.latent_statistics import LatentStatistics
from vsa.models.network import Network
from vsa.objectives.flow_matching import FinetuneLoss, LossTerms, NoisedBatch
from vsa.settings import validated
from vsa.training.estimate.job import FORWARD, PlannedNetwork
from vsa.training.modules.checks import JobSize
from vsa.training.modules.pretrain import PretrainModule
from vsa.training.modules.teacher import Teacher
from vsa.training.parallel import ParallelPlan
from vsa.training.run_state import refuse_missing

if TYPE_CHECKING:
    # not imported at run time, since the data module imports the video libraries
    from vsa.data.plan_datamodule import PlanDataModule


@validated
class FinetuneModule(PretrainModule):
    """Finetune a pretrained checkpoint to sparse attention (VSA paper, section 2.3 and appendix C.5).

    Starts from `init_from`: a run, whose latent statistics are used, or a folder or Hugging Face id in diffusers' Wan
    layout. The gates of a dense checkpoint start at the identity, so that with all tiles kept the first step equals the
    pretrained model.

    Args:
        objective: the loss.
        parallel: see `DiffusionModule`.
        gates: initial (the checkpoint is dense) or required (the checkpoint has trained gates).
        trainable: patterns of the names of trained parameters; None: all, with `lora` the gates only.
        lora: low-rank adapters to train instead of the weights they are added to.
        teacher: dense checkpoint for the velocity and attention terms of the loss; None: `init_from`.
        **common: see `PretrainModule`.
    """

    objective: FinetuneLoss

    def __init__(
        self,
        *,
        objective: FinetuneLoss,
        parallel: ParallelPlan,
        gates: Literal["initial", "required"] = "initial",
        trainable: Sequence[str] | None = None,
        lora: LoRA | None = None,
        teacher: str | None = None,
        **common: Any,
    ):
        if objective.attention > 0 and parallel.compile:
            raise ValueError(
                "task.objective.attention is not supported with parallel.compile: it needs tensors within the blocks"
            )
        super().__init__(objective=objective, parallel=parallel, **common)
        self.gates: Literal["initial", "required"] = gates
        self.lora = lora
        self.trainable = tuple(trainable) if trainable is not None else None
        # the teacher is the trained network with full attention and without adapters
        make_teacher = partial(self._model_factory, attention=FullAttention)
        self._teacher = Teacher(make_teacher, teacher) if objective.needs_teacher else None

    def prepare_model(self, model: Network) -> None:
        """Add adapters and freeze the other parameters."""
        roles = model.parameter_roles()
        patterns = self.trainable
        if patterns is None:
            patterns = ("*",) if self.lora is None else tuple(name for name in roles if roles[name] == "gate")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in roles):
                raise ValueError(f"task.trainable pattern {pattern!r} matches no parameter")
        trainable_names = {name for name in roles if any(fnmatchcase(name, pattern) for pattern in patterns)}
        own = dict(model.named_parameters())
        if self.lora is not None:
            self.lora.inject(model)
        for name, parameter in own.items():
            parameter.requires_grad_(name in trainable_names)

    def gates_of(self, model: Network) -> Gates:
        return self.gates

    def check_start(self, model: Network, data: PlanDataModule, size: JobSize) -> None:
        if self.objective.attention > 0 and model.attention_output is None:
            raise ValueError(
                f"task.objective.attention={self.objective.attention}: {model.title} has layers without an output of "
                "self-attention alone, use task.objective.velocity"
            )
        super().check_start(model, data, size)

    def check_weights(self, data: PlanDataModule) -> None:
        if self.init_from is None and self.resume is None:
            raise ValueError("init_from=null, but finetuning starts from a checkpoint: a run, a folder or a hub id")
        if self.resume is not None:
            node = self.resume.state["config"]["task"].get("lora")
            if (node is None) != (self.lora is None):
                raise ValueError(f"{self.resume.path} was trained with task.lora={node}, the settings have {self.lora}")
        super().check_weights(data)
        if self._teacher is not None:
            self._teacher.find(self.resume, self.init_from, data)

    def choose_statistics(self) -> LatentStatistics:
        """Statistics of the run that provides the initial weights, for any data; otherwise as in pretraining."""
        if self.resume is not None:
            refuse_missing(self.resume, ("latent_mean", "latent_std"))
            return LatentStatistics.of((self.resume.state["latent_mean"], self.resume.state["latent_std"]))
        statistics = self.init_from.statistics if self.init_from is not None else None
        return super().choose_statistics() if statistics is None else LatentStatistics.of(statistics)

    def record(self) -> dict[str, Any]:
        record = super().record()
        return record if self._teacher is None else {**record, "teacher": self._teacher.state()}

    def configure_model(self) -> None:
        super().configure_model()
        if self._teacher is not None:
            self._teacher.build(self.device_mesh, self._parallel, self.sequence)

    def planned_networks(self) -> tuple[PlannedNetwork, ...]:
        networks = super().planned_networks()
        if self._teacher is None:
            return networks
        return (*networks, PlannedNetwork(name="teacher", model=self._teacher.planned(), passes={FORWARD: 1.0}))

    def load_frozen(self) -> None:
        if self._teacher is not None:
            self._teacher.load(self.device)

    def loss_terms(self, batch: VideoBatch, noised: NoisedBatch, topk: KeptTiles) -> LossTerms:
        teacher = None if self._teacher is None else self._teacher.network
        return self.objective.mixed(self.model, teacher, batch, noised, topk=topk)
