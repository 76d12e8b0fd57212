"""Signs of health of a distillation: what is measured in its iterations, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from vsa.diffusion.decile_means import DecileMeans
from vsa.objectives.distribution_matching import ScoredRollout
from vsa.settings import AtLeastOne, Bound, Positive, PositiveShare, ShareBelowOne, checked

SATURATED = 5.0
"""Latents beyond so many standard deviations of the data count as saturated."""


@dataclass(frozen=True, kw_only=True)
class LatentSpread:
    """How generated latents lie, in standard deviations of the data.

    Args:
        std: root of the mean over the channels of the variance over samples, time and space; that of the data is 1.
        mean: root mean square of the channels' means; that of the data is 0. A cast of colour raises it.
        saturation: share of values beyond `SATURATED`.
    """

    std: float
    mean: float
    saturation: float

    def metrics(self, prefix: str) -> dict[str, float]:
        """`PREFIX/std`, `PREFIX/mean` and `PREFIX/saturation`."""
        return {f"{prefix}/std": self.std, f"{prefix}/mean": self.mean, f"{prefix}/saturation": self.saturation}


class SpreadMeter:
    """Adds latents up, batch by batch, to their `LatentSpread`."""

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
        """Of everything added on all ranks (a collective); None when nothing was."""
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


@checked
@dataclass(frozen=True, kw_only=True)
class CollapseRule:
    """When the output of a generator counts as collapsed: blank, blown up, or of one colour.

    Samples that are all alike are not noticed: their latents spread as those of a single clip do.

    Args:
        min_std: smallest standard deviation, that of the data is 1.
        max_std: largest standard deviation.
        max_saturation: largest share of saturated values.
        max_mean: largest root mean square of the channels' means; a cast of colour raises it.
        patience: judged batches in a row after which training stops.

    Raises:
        ValueError: a value out of range.
    """

    min_std: ShareBelowOne = 0.1
    max_std: Annotated[float, Bound(">", 1)] = 5.0
    max_saturation: PositiveShare = 0.2
    max_mean: Positive = 1.0
    patience: AtLeastOne = 20

    def breaks(self, spread: LatentSpread) -> bool:
        """Whether a batch counts as collapsed; nan does."""
        within = self.min_std <= spread.std <= self.max_std and spread.mean <= self.max_mean
        return not (within and spread.saturation <= self.max_saturation)


class CollapseWatch:
    """Counts collapsed batches in a row and stops the run.

    Args:
        rule: what counts; None: nothing does.
    """

    def __init__(self, rule: CollapseRule | None):
        self._rule = rule
        self._in_row = 0

    def judge(self, spread: LatentSpread) -> bool:
        """Look at the last-step output of one iteration: whether too many in a row were collapsed."""
        if self._rule is None:
            return False
        self._in_row = self._in_row + 1 if self._rule.breaks(spread) else 0
        return self._in_row >= self._rule.patience

    def report(self, spread: LatentSpread) -> str:
        """What was seen last, and what it should have been."""
        rule = self._rule
        assert rule is not None
        return (
            f"the generator has collapsed: {self._in_row} batches in a row had latents of standard deviation "
            f"{spread.std:.3g} (data 1, allowed {rule.min_std} to {rule.max_std}), mean {spread.mean:.3g} (data 0, "
            f"allowed {rule.max_mean}) and {spread.saturation:.1%} beyond {SATURATED:g} (allowed "
            f"{rule.max_saturation:.1%}): training stopped; go on from an earlier checkpoint, if there is one, with a "
            "lower optim.lr or a smaller task.objective.guidance"
        )

    def state_dict(self) -> dict[str, int]:
        """For `state.json`."""
        return {"collapsed_in_row": self._in_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put back what `state_dict` gave."""
        # empty: of a run without a rule, by an older version
        self._in_row = state["collapsed_in_row"] if state else 0


class IterationMetrics:
    """What iterations measured, to be logged together.

    Args:
        device: where the sums lie.
    """

    # of the others the mean says all
    BY_DECILE = ("dmd/gap", "fake_score/loss")

    def __init__(self, device: torch.device):
        self._device = device
        self._means: dict[str, DecileMeans] = {}
        self.spread = SpreadMeter()
        self._norms: dict[str, Tensor] = {}

    def _add(self, name: str, values: Tensor, sigmas: Tensor) -> None:
        self._means.setdefault(name, DecileMeans(self._device, finite_only=True)).add(values, sigmas)

    def add_generator(self, scored: ScoredRollout) -> None:
        """A micro-batch of the generator's update."""
        assert scored.raw_norm is not None
        assert scored.normalizer is not None
        self._add("dmd/gap", scored.raw_norm, scored.sigmas)
        self._add("dmd/normalizer", scored.normalizer, scored.sigmas)
        for name, part in scored.parts.items():
            self._add(f"generator/loss_{name}", part, scored.sigmas)

    def add_fake_score(self, scored: ScoredRollout) -> None:
        """A micro-batch of the critic's update."""
        for name, part in scored.parts.items():
            # flow matching is what all critics have
            self._add("fake_score/loss" if name == "flow" else f"fake_score/loss_{name}", part, scored.sigmas)

    def add_norms(self, norms: Mapping[str, Tensor], prefix: str = "") -> None:
        """Gradient norms of an update, by name; those of the last one count."""
        self._norms |= {f"{prefix}grad_norm/{name}": norm for name, norm in norms.items()}

    def metrics(self, strategy: Any) -> dict[str, Tensor | float]:
        """Everything by name; a collective."""
        values: dict[str, Tensor | float] = {}
        for name, means in self._means.items():
            means.gather(strategy)
            by_decile = means.metrics(name)
            values |= {key: value for key, value in by_decile.items() if key == name or name in self.BY_DECILE}
        spread = self.spread.spread(strategy)
        return {**values, **({} if spread is None else spread.metrics("generated")), **self._norms}
