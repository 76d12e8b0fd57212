"""The critic of a distillation, and what updates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vsa.models.video_dit import VideoDiT
from vsa.training.checkpointing import Checkpoint, load_model_tensors, load_optimizer_tensors, optimizer_state
from vsa.training.gan import Discriminator, Gan
from vsa.training.guard import UpdateGuard
from vsa.training.optim import AdamW
from vsa.training.parallel import ParallelPlan, build_model
from vsa.training.start import Start
from vsa.training.teacher import gates_from_dense


class FakeScore(nn.Module):
    """The network that follows the generator's distribution, with the classifier of a GAN term where there is one.

    Args:
        make: builds the network.
        recipe: of the optimizer.
        guard: of its updates.
        gan: the GAN term; None without.

    Attributes:
        network: once `build` has made it.
        discriminator: the same, None without a GAN term.
    """

    def __init__(self, make: Callable[[], VideoDiT], *, recipe: AdamW, guard: UpdateGuard, gan: Gan | None):
        super().__init__()
        self.network: VideoDiT = None  # type: ignore[assignment] (made in build)
        self.discriminator: Discriminator | None = None
        self.guard = guard
        self.recipe = recipe
        self._make = make
        self._gan = gan

    def check(self, start: Start) -> None:
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
        """Make network and classifier; the network's weights come with `load_start` or `load`."""
        with torch.random.fork_rng(devices=[]):
            self.network = build_model(self._make, mesh, plan, initialise=None)
        if self._gan is not None:
            self.discriminator = self._gan.build(self.network.dim, len(self.network.blocks), seed=seed, mesh=mesh)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of both."""
        made = self.recipe.build(self.network, self.network.parameter_roles())
        if self.discriminator is not None:
            parameters = {f"discriminator.{name}": p for name, p in self.discriminator.named_parameters()}
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

    def load_start(self, start: Start) -> None:
        """Begin as the teacher."""
        start.load(self.network, gates_from_dense(self.network))

    def checkpoint_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors of a checkpoint."""
        tensors: dict[str, dict[str, Tensor]] = {
            "fake_score": dict(self.network.named_parameters()),
            "fake_score_optimizer": optimizer_state(optimizer),
        }
        if self.discriminator is not None:
            tensors["discriminator"] = dict(self.discriminator.named_parameters())
        return tensors

    def checkpoint_state(self) -> dict[str, Any]:
        """Counters, for `state.json`."""
        return {"fake_score": self.guard.state_dict()}

    def load(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
        """Put back what a checkpoint holds.

        Raises:
            ValueError: it was trained with a GAN term and this is not, or the other way round; what does not fit.
        """
        what = str(checkpoint.path)
        if (self.discriminator is None) == checkpoint.has("discriminator"):
            raise ValueError(f"{what} was trained {'without' if self.discriminator else 'with'} objective.gan")
        load_model_tensors(self.network, checkpoint.tensors("fake_score"), f"fake_score of {what}")
        load_optimizer_tensors(optimizer, checkpoint.tensors("fake_score_optimizer"), what)
        if self.discriminator is not None:
            load_model_tensors(self.discriminator, checkpoint.tensors("discriminator"), f"discriminator of {what}")
        self.guard.load_state_dict(checkpoint.state["fake_score"])
