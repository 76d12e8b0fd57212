"""AdamW by parameter role and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, get_args

import torch
from torch import nn

from vsa.checkpoints.moments import Moments, refuse_missing_package
from vsa.models.network import Role
from vsa.settings import AtLeastOne, Count, NonNegative, Positive, PositiveShare, ShareBelowOne, validated

ROLES: tuple[Role, ...] = get_args(Role)


class Schedule(Protocol):
    """Factor of the base learning rate at an optimizer step, counted from 0."""

    def __call__(self, step: int) -> float: ...


def _warmup(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


@validated
@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warm-up over `warmup_steps`, then 1."""

    warmup_steps: Count = 0

    def __call__(self, step: int) -> float:
        return _warmup(step, self.warmup_steps)


@validated
@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine from 1 to `end` at `total_steps`; `end` afterwards."""

    total_steps: AtLeastOne
    warmup_steps: Count = 0
    end: NonNegative = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))


@validated
@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, decay: 1 until the last `decay_share` of `total_steps`, then linear to `end`.

    If warm-up and decay overlap, their factors are multiplied.
    """

    total_steps: AtLeastOne
    decay_share: PositiveShare
    warmup_steps: Count = 0
    end: NonNegative = 0.0

    def __call__(self, step: int) -> float:
        decay_steps = max(1.0, self.decay_share * self.total_steps)
        progress = min(1.0, max(0.0, (step - (self.total_steps - decay_steps)) / decay_steps))
        return _warmup(step, self.warmup_steps) * (1 + (self.end - 1) * progress)


def _is_pattern(key: str) -> bool:
    return "." in key or "*" in key


@validated
@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Recipe for an AdamW with one parameter group per role: that of torch, or torchao's with 8-bit moments.

    Args:
        lr: base learning rate, multiplied by the schedule and by the role's factor.
        betas: decay rates of the first and second moment.
        eps: constant added to the square root of the second moment.
        weight_decay: decoupled weight decay, applied to the roles in `decay_roles`.
        decay_roles: roles with weight decay (not vectors, embeddings and tables). For gates, biases decay too: a gate's
            bias defines its identity, so a run that should stay near the identity leaves this role out.
        lr_factors: learning-rate factor by role or by name pattern (`blocks.0.*`, `*norm*`), 1 if absent; the last
            matching pattern applies, and patterns take precedence over roles.
        schedule: factor by optimizer step.
        moments: form of both moments: fp32, or int8, a quarter of the bytes, in codes with a scale per 256 values of a
            row ("8-bit optimizers via block-wise quantization", arXiv 2110.02861).
    """

    # a step changes every weight by about lr, so a value above 1 would erase the weights
    lr: PositiveShare
    schedule: Schedule
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01
    decay_roles: tuple[Role, ...] = ("matrix", "gate", "head")
    lr_factors: Mapping[str, NonNegative] = field(default_factory=dict)
    moments: Moments = "fp32"

    def __post_init__(self):
        refuse_missing_package(self.moments)
        for role in self.lr_factors:
            if not _is_pattern(role) and role not in ROLES:
                raise ValueError(f"unknown parameter role {role!r}, expected one of {', '.join(ROLES)}")

    def build(self, model: nn.Module, roles: Mapping[str, str]) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of `model`.

        Groups carry `role`, `base_lr` and `names`, one group per role and learning-rate factor.
        """
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("no parameter is trainable")
        for pattern in filter(_is_pattern, self.lr_factors):
            if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
                raise ValueError(f"optim.lr_factors pattern {pattern!r} matches no parameter")
        groups: dict[tuple[str, float], list[str]] = {}
        for name in trainable:
            groups.setdefault((roles[name], self._lr_factor(name, roles[name])), []).append(name)
        beta1, beta2 = self.betas
        parameters: list[dict[str, Any]] = [
            {
                "params": [trainable[name] for name in names],
                "names": names,
                "role": role,
                "base_lr": self.lr * factor,
                "weight_decay": self.weight_decay if role in self.decay_roles else 0.0,
            }
            for (role, factor), names in sorted(groups.items(), key=lambda item: ROLES.index(item[0][0]))
        ]
        # torch refuses a mix of int and float
        settings: dict[str, Any] = {"lr": self.lr, "betas": (float(beta1), float(beta2)), "eps": self.eps}
        if self.moments == "int8":
            # takes seconds to import
            from vsa.training.adamw_8bit import AdamW8bit

            return AdamW8bit(parameters, **settings)
        # one pass over weights, gradients and moments, and few launches
        fused = True if all(p.is_cuda for p in trainable.values()) else None
        return torch.optim.AdamW(parameters, **settings, fused=fused)

    def _lr_factor(self, name: str, role: str) -> float:
        fitting = [f for key, f in self.lr_factors.items() if _is_pattern(key) and fnmatchcase(name, key)]
        return fitting[-1] if fitting else self.lr_factors.get(role, 1.0)

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rate of optimizer step `step` in every group; returns the schedule's factor."""
        factor = self.schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return factor
