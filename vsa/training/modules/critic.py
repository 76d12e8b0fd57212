"""The critic of a distillation, and what updates it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vsa.checkpoints.weight_source import WeightSource
from vsa.models.video_dit import VideoDiT
from vsa.objectives.discriminator import Discriminator, Gan
from vsa.objectives.step_embedding import StepEmbedding
from vsa.training.gradients import GradientClipper
from vsa.training.modules.teacher import gates_from_dense
from vsa.training.optimizer import AdamW
from vsa.training.parallel import ParallelPlan, build_model
from vsa.training.run_state import Owner


class FakeScore(nn.Module):
    """The network that follows the generator's distribution, with what is trained beside it.

    Args:
        make: builds the network.
        recipe: of the optimizer.
        clipper: of its gradients.
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
        clipper: GradientClipper,
        gan: Gan | None,
        num_steps: int | None = None,
    ):
        super().__init__()
        self.network: VideoDiT = None  # type: ignore[assignment] (made in build)
        self.discriminator: Discriminator | None = None
        self.steps: StepEmbedding | None = None
        self.clipper = clipper
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

    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Owner]:
        """Groups of tensors of a checkpoint."""
        return {"fake_score": self.network, "fake_score_optimizer": optimizer, **self._beside}
