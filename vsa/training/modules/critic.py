"""The critic of a distillation, and what updates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vsa.checkpoints.run_checkpoint import Checkpoint, load_model_tensors, load_optimizer_tensors, optimizer_state
from vsa.checkpoints.weight_source import WeightSource
from vsa.models.video_dit import VideoDiT
from vsa.objectives.discriminator import Discriminator, Gan
from vsa.objectives.step_embedding import StepEmbedding
from vsa.training.gradients import UpdateGuard
from vsa.training.modules.teacher import gates_from_dense
from vsa.training.optimizer import AdamW
from vsa.training.parallel import ParallelPlan, build_model


class FakeScore(nn.Module):
    """The network that follows the generator's distribution, with what is trained beside it.

    Args:
        make: builds the network.
        recipe: of the optimizer.
        guard: of its updates.
        gan: the GAN term; None without.
        num_steps: of the generator's list, which the network is told apart; None: it is not told.

    Attributes:
        network: once `build` has made it.
        discriminator: the same, None without a GAN term.
        steps: the same, None where the step is not told.
    """

    def __init__(
        self,
        make: Callable[[], VideoDiT],
        *,
        recipe: AdamW,
        guard: UpdateGuard,
        gan: Gan | None,
        num_steps: int | None = None,
    ):
        super().__init__()
        self.network: VideoDiT = None  # type: ignore[assignment] (made in build)
        self.discriminator: Discriminator | None = None
        self.steps: StepEmbedding | None = None
        self.guard = guard
        self.recipe = recipe
        self._make = make
        self._gan = gan
        self._num_steps = num_steps

    def check(self, start: WeightSource) -> None:
        """Refuse weights to start from that do not fit the network; no memory is taken.

        Raises:
            ValueError: names what differs.
        """
        with torch.device("meta"):
            network = self._make()
        try:
            start.check(network, gates_from_dense(network))
        except ValueError as error:
            raise ValueError(f"as fake_score (task.fake_score_attention): {error}") from None

    def build(self, mesh: DeviceMesh | None, plan: ParallelPlan, *, seed: int) -> None:
        """Make the networks; the critic's weights come with `load_start` or `load`."""
        with torch.random.fork_rng(devices=[]):
            self.network = build_model(self._make, mesh, plan, initialise=None)
        if self._gan is not None:
            self.discriminator = self._gan.build(self.network.dim, len(self.network.blocks), seed=seed, mesh=mesh)
        if self._num_steps is not None:
            self.steps = StepEmbedding.build(self._num_steps, self.network.dim, mesh)

    @property
    def _beside(self) -> dict[str, nn.Module]:
        """What is trained beside the network, by the name of its tensors in a checkpoint."""
        found = {"discriminator": self.discriminator, "fake_steps": self.steps}
        return {name: module for name, module in found.items() if module is not None}

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all; what is beside the network has its learning rate, without factors."""
        made = self.recipe.build(self.network, self.network.parameter_roles())
        for module_name, module in self._beside.items():
            parameters = {f"{module_name}.{name}": p for name, p in module.named_parameters()}
            made.add_param_group(
                {
                    "params": list(parameters.values()),
                    "names": list(parameters),
                    "role": "head",
                    "base_lr": self.recipe.lr,
                    "weight_decay": 0.0,
                }
            )
        return made

    def load_start(self, start: WeightSource) -> None:
        """Begin as the teacher."""
        start.load(self.network, gates_from_dense(self.network))

    def checkpoint_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors of a checkpoint."""
        tensors: dict[str, dict[str, Tensor]] = {
            "fake_score": dict(self.network.named_parameters()),
            "fake_score_optimizer": optimizer_state(optimizer),
        }
        tensors |= {name: dict(module.named_parameters()) for name, module in self._beside.items()}
        return tensors

    def checkpoint_state(self) -> dict[str, Any]:
        """Counters, for `state.json`."""
        return {"fake_score": self.guard.state_dict()}

    def load(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
        """Put back what a checkpoint holds.

        Raises:
            ValueError: it was trained with a GAN term or told the steps and this is not, or the other way round; what
                does not fit.
        """
        what = str(checkpoint.path)
        for name, setting in (("discriminator", "gan"), ("fake_steps", "step_aware")):
            here = name in self._beside
            if here != checkpoint.has(name):
                raise ValueError(f"{what} was trained {'without' if here else 'with'} objective.{setting}")
        load_model_tensors(self.network, checkpoint.tensors("fake_score"), f"fake_score of {what}")
        load_optimizer_tensors(optimizer, checkpoint.tensors("fake_score_optimizer"), what)
        for name, module in self._beside.items():
            load_model_tensors(module, checkpoint.tensors(name), f"{name} of {what}")
        self.guard.load_state_dict(checkpoint.state["fake_score"])
