"""Exponential moving average of the weights, updated on local shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from vsa.models.sharding import local
from vsa.settings import ShareBelowOne, validated
from vsa.training.modules.base import DiffusionModule


@validated
class EMA(L.Callback):
    """Keeps an fp32 average of every parameter; validation and samples use it.

    Updates the local shard of sharded parameters, without communication.

    Args:
        decay: decay of the average.
        warmup: ramp the decay as (1 + n) / (10 + n) while this is below `decay`, for optimizer step n of the model.

    """

    part = "ema"

    def __init__(self, decay: ShareBelowOne = 0.999, warmup: bool = True):
        self.decay, self.warmup = decay, warmup
        self._average: dict[str, Tensor] = {}
        self._parameters: list[nn.Parameter] = []
        # module whose weights the average does not contain yet, and the decay for them
        self._due: tuple[DiffusionModule, float] | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        # allocated here, since the module loads a checkpoint into these tensors next
        parameters = pl_module.model.named_parameters()
        self._average = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters}

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        # a walk through the modules takes longer than the update; the optimizer keeps these objects as well
        self._parameters = list(pl_module.model.parameters())
        if pl_module.resume is None:
            # initial weights were loaded after on_fit_start
            for name, p in pl_module.model.named_parameters():
                local(self.average[name]).copy_(local(p.detach()))

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {"ema": self.average}

    def decay_at(self, step: int) -> float:
        """Decay used after optimizer step `step` (1 = the first)."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @property
    def average(self) -> dict[str, Tensor]:
        """The average by parameter name, sharded like the parameters."""
        self._update()
        return self._average

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate == 0:
            self._due = pl_module, self.decay_at(pl_module.model_steps)
            if not pl_module.clipper.unread:
                self._update()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: DiffusionModule, optimizer: Any) -> None:
        # weights are still those of the last step, and by now it is known whether that step changed them
        self._update()

    @torch.no_grad()
    def _update(self) -> None:
        """Add the weights of the last step, unless it left them as they were."""
        due, self._due = self._due, None
        if due is not None and due[0].model_moved:
            averages = [local(a) for a in self._average.values()]
            torch._foreach_lerp_(averages, [local(p).float() for p in self._parameters], 1 - due[1])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Run with the averaged weights in place of the trained ones."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            trained_weights = {name: local(p).clone() for name, p in parameters.items()}
            for name, p in parameters.items():
                local(p).copy_(local(self.average[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    local(p).copy_(trained_weights[name])

    def on_validation_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        if self._average:
            self._validation = self.applied(pl_module.model)
            self._validation.__enter__()

    def on_validation_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        if self._average:
            self._validation.__exit__(None, None, None)
