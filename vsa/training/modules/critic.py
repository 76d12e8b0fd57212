"""The critic of a distillation (fake_score) with its optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vsa.attention.sequence import SequenceRanks
from vsa.models.network import Network
from vsa.models.sharding import sharded
from vsa.objectives.discriminator import Discriminator, Gan
from vsa.objectives.step_embedding import StepEmbedding
from vsa.training.gradients import GradientClipper
from vsa.training.optimizer import AdamW
from vsa.training.parallel import ParallelPlan, build_model
from vsa.training.run_state import Owner


class FakeScore(nn.Module):
    """The network that tracks the generator's distribution, with the modules trained together with it.

    Args:
        make: factory of the network.
        recipe: recipe of the optimizer.
        clipper: clipper of the gradients.
        gan: the GAN term; None without.
        num_steps: length of the generator's step list; the network gets one embedding per step. None: no embedding.

    Attributes:
        make: the factory.
        network: the network, after `build`.
        discriminator: the discriminator, after `build`; None without a GAN term.
        steps: the step embedding, after `build`; None without `num_steps`.
    """

    def __init__(
        self,
        make: Callable[[], Network],
        *,
        recipe: AdamW,
        clipper: GradientClipper,
        gan: Gan | None,
        num_steps: int | None = None,
    ):
        super().__init__()
        self.network: Network = None  # type: ignore[assignment] (made in build)
        self.discriminator: Discriminator | None = None
        self.steps: StepEmbedding | None = None
        self.clipper = clipper
        self.recipe = recipe
        self.make = make
        self._gan = gan
        self._num_steps = num_steps

    def build(self, mesh: DeviceMesh | None, plan: ParallelPlan, sequence: SequenceRanks | None, *, seed: int) -> None:
        """Build the modules; the critic's weights are loaded afterwards."""
        with torch.random.fork_rng(devices=[]):
            self.network = build_model(self.make, mesh, plan, initialise=None, sequence=sequence)
        if self._gan is not None:
            self.discriminator = self._gan.build(
                self.network.dim, len(self.network.blocks), seed=seed, mesh=mesh, offload=plan.offload
            )
        if self._num_steps is not None:
            self.steps = sharded(StepEmbedding(self._num_steps, self.network.dim), mesh, offload=plan.offload)

    @property
    def _beside(self) -> dict[str, nn.Module]:
        """Modules trained together with the network, by the name of their tensors in a checkpoint."""
        modules = {"discriminator": self.discriminator, "fake_steps": self.steps}
        return {name: module for name, module in modules.items() if module is not None}

    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of all modules; those beside the network use its learning rate, without factors."""
        optimizer = self.recipe.build(self.network, self.network.parameter_roles())
        for module_name, module in self._beside.items():
            parameters = {f"{module_name}.{name}": p for name, p in module.named_parameters()}
            optimizer.add_param_group(
                {
                    "params": list(parameters.values()),
                    "names": list(parameters),
                    "role": "head",
                    "base_lr": self.recipe.lr,
                    "weight_decay": 0.0,
                }
            )
        return optimizer

    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Owner]:
        """Groups of tensors in a checkpoint."""
        return {"fake_score": self.network, "fake_score_optimizer": optimizer, **self._beside}
