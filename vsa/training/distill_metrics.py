"""Health of a distillation: metrics of its iterations, and collapse detection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from vsa.diffusion.decile_means import DecileMeans
from vsa.objectives.distribution_matching import ScoredRollout
from vsa.settings import AtLeastOne, Bound, Positive, PositiveShare, ShareBelowOne, validated

SATURATED = 5.0
"""Latents further than this many standard deviations of the data from 0 count as saturated."""


@dataclass(frozen=True, kw_only=True)
class LatentSpread:
    """Statistics of generated latents, in standard deviations of the data.

    Args:
        std: square root of the mean over channels of the variance over samples, time and space; 1 for the data.
        mean: root mean square of the means of the channels; 0 for the data. A colour cast raises it.
        saturation: fraction of values beyond `SATURATED`.
    """

    std: float
    mean: float
    saturation: float

    def metrics(self, prefix: str) -> dict[str, float]:
        """The metrics `PREFIX/std`, `PREFIX/mean` and `PREFIX/saturation`."""
        return {f"{prefix}/std": self.std, f"{prefix}/mean": self.mean, f"{prefix}/saturation": self.saturation}


class SpreadMeter:
    """Accumulates batches of latents for their `LatentSpread`."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, latents: Tensor) -> None:
        """Add normalised latents `[B, C, T, H, W]`."""
        x = latents.detach().double()
        axes = (0, *range(2, x.ndim))
        count = torch.full((x.shape[1],), x.numel() / x.shape[1], dtype=torch.float64, device=x.device)
        beyond = (x.abs() > SATURATED).double().sum(axes)
        sums = torch.stack([x.sum(axes), x.square().sum(axes), beyond, count])
        self._sums = sums if self._sums is None else self._sums + sums

    def spread(self, strategy: Any) -> LatentSpread | None:
        """Statistics of everything added on all ranks (collective); None if nothing was added."""
        if self._sums is None:
            return None
        total, squares, beyond, count = strategy.reduce(self._sums, reduce_op="sum").cpu()
        means = total / count
        variance = (squares / count - means.square()).clamp(min=0)
        return LatentSpread(
            std=float(variance.mean().sqrt()),
            mean=float(means.square().mean().sqrt()),
            saturation=float(beyond.sum() / count.sum()),
        )


@validated
@dataclass(frozen=True, kw_only=True)
class CollapseRule:
    """Criterion for a collapsed generator: blank output, exploding output, or a colour cast.

    It does not detect a generator whose samples are all alike, since their latents spread like those of one clip.

    Args:
        min_std: smallest standard deviation, relative to the data.
        max_std: largest standard deviation.
        max_saturation: largest fraction of saturated values.
        max_mean: largest root mean square of the means of the channels; a colour cast raises it.
        patience: number of consecutive collapsed batches that stops training.
    """

    min_std: ShareBelowOne = 0.1
    max_std: Annotated[float, Bound(">", 1)] = 5.0
    max_saturation: PositiveShare = 0.2
    max_mean: Positive = 1.0
    patience: AtLeastOne = 20

    def breaks(self, spread: LatentSpread) -> bool:
        """Whether a batch is collapsed; nan counts as collapsed."""
        within = self.min_std <= spread.std <= self.max_std and spread.mean <= self.max_mean
        return not (within and spread.saturation <= self.max_saturation)


class CollapseWatch:
    """Counts consecutive collapsed batches and stops the run.

    Args:
        rule: the criterion; None: no batch is collapsed.
    """

    def __init__(self, rule: CollapseRule | None):
        self._rule = rule
        self._in_row = 0

    def judge(self, spread: LatentSpread) -> bool:
        """Check the last-step output of one iteration: whether too many consecutive ones were collapsed."""
        if self._rule is None:
            return False
        self._in_row = self._in_row + 1 if self._rule.breaks(spread) else 0
        return self._in_row >= self._rule.patience

    def report(self, spread: LatentSpread) -> str:
        """Message with the last statistics and their allowed ranges."""
        rule = self._rule
        assert rule is not None
        return (
            f"the generator has collapsed: {self._in_row} batches in a row had latents of standard deviation "
            f"{spread.std:.3g} (data 1, allowed {rule.min_std} to {rule.max_std}), mean {spread.mean:.3g} (data 0, "
            f"allowed {rule.max_mean}) and {spread.saturation:.1%} beyond {SATURATED:g} (allowed "
            f"{rule.max_saturation:.1%}): training stopped; continue from an earlier checkpoint, if there is one, with "
            "a lower optim.lr or a smaller task.objective.guidance"
        )

    def state_dict(self) -> dict[str, int]:
        """The counter, for `state.json`."""
        return {"collapsed_in_row": self._in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counter of `state_dict`."""
        # older versions stored an empty state without a rule
        self._in_row = state["collapsed_in_row"] if state else 0


class IterationMetrics:
    """Accumulates measurements of iterations until they are logged.

    Args:
        device: device of the sums.
    """

    # for the other metrics a mean is sufficient
    BY_DECILE = ("dmd/gap", "fake_score/loss")

    def __init__(self, device: torch.device):
        self._device = device
        self._means: dict[str, DecileMeans] = {}
        self.spread = SpreadMeter()
        self._norms: dict[str, Tensor] = {}

    def _add(self, name: str, values: Tensor, sigmas: Tensor) -> None:
        self._means.setdefault(name, DecileMeans(self._device, finite_only=True)).add(values, sigmas)

    def add_generator(self, scored: ScoredRollout) -> None:
        """Add a micro-batch of the generator's update."""
        assert scored.raw_norm is not None
        assert scored.normalizer is not None
        self._add("dmd/gap", scored.raw_norm, scored.sigmas)
        self._add("dmd/normalizer", scored.normalizer, scored.sigmas)
        for name, part in scored.parts.items():
            self._add(f"generator/loss_{name}", part, scored.sigmas)

    def add_fake_score(self, scored: ScoredRollout) -> None:
        """Add a micro-batch of the critic's update."""
        for name, part in scored.parts.items():
            # every critic has the flow-matching loss
            self._add("fake_score/loss" if name == "flow" else f"fake_score/loss_{name}", part, scored.sigmas)

    def add_norms(self, norms: Mapping[str, Tensor], prefix: str = "") -> None:
        """Set the gradient norms of an update, by name; the last ones are logged."""
        self._norms |= {f"{prefix}grad_norm/{name}": norm for name, norm in norms.items()}

    def metrics(self, strategy: Any) -> dict[str, Tensor | float]:
        """All metrics by name; a collective operation."""
        values: dict[str, Tensor | float] = {}
        for name, means in self._means.items():
            means.gather(strategy)
            by_decile = means.metrics(name)
            values |= {key: value for key, value in by_decile.items() if key == name or name in self.BY_DECILE}
        spread = self.spread.spread(strategy)
        return {**values, **({} if spread is None else spread.metrics("generated")), **self._norms}
