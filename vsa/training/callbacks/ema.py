"""Exponential moving average of the weights, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from vsa.checkpoints.run_checkpoint import refuse_key_difference
from vsa.models.sharding import local, place
from vsa.settings import ShareBelowOne, checked
from vsa.training.modules.base import DiffusionModule


@checked
class EMA(L.Callback):
    """Keeps an fp32 average of every parameter; validation and samples use it.

    Works on the local shard of sharded parameters, so no weights move.

    Args:
        decay: of the average.
        warmup: ramp the decay as (1 + n) / (10 + n) while that is smaller, n being the optimizer step of the model.
    """

    def __init__(self, decay: ShareBelowOne = 0.999, warmup: bool = True):
        self.decay, self.warmup = decay, warmup
        self._average: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        # runs before the module loads a checkpoint: `load` or `reset` follow in on_train_start
        self._average = {}
        # before the run folder is touched
        if pl_module.resume is not None and not pl_module.resume.has("ema"):
            raise ValueError(f"{pl_module.resume.path} has no averaged weights: resume without the EMA callback")

    def on_train_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        parameters = dict(pl_module.model.named_parameters())
        self._average = {n: p.detach().to(torch.float32, copy=True) for n, p in parameters.items()}
        if pl_module.resume is not None:
            self._load(parameters, pl_module.resume.tensors("ema"), str(pl_module.resume.path))

    def _load(self, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor], what: str) -> None:
        refuse_key_difference(set(parameters), set(saved), f"EMA of {what}")
        for name, average in self._average.items():
            local(average).copy_(local(place(saved[name], average)))

    def decay_at(self, step: int) -> float:
        """Decay used after optimizer step `step` (1 = the first)."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DiffusionModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.accumulate or not pl_module.model_moved:
            return
        averages = [local(a) for a in self._average.values()]
        weights = [local(p).float() for p in pl_module.model.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - self.decay_at(pl_module.model_steps))

    @property
    def average(self) -> Mapping[str, Tensor]:
        """The average by parameter name, sharded like the parameters."""
        return self._average

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Run with the averaged weights in place of the trained ones."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            kept = {name: local(p).clone() for name, p in parameters.items()}
            for name, p in parameters.items():
                local(p).copy_(local(self._average[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    local(p).copy_(kept[name])

    def on_validation_start(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        if self._average:
            self._validation = self.applied(pl_module.model)
            self._validation.__enter__()

    def on_validation_end(self, trainer: L.Trainer, pl_module: DiffusionModule) -> None:
        if self._average:
            self._validation.__exit__(None, None, None)


def find_ema(trainer: L.Trainer) -> EMA | None:
    """The EMA callback of a trainer, if it has one."""
    return next((c for c in trainer.callbacks if isinstance(c, EMA)), None)  # type: ignore[attr-defined]
