"""Bounds that the metrics of a checkpoint must keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """A bound that a metric must keep.

    Args:
        metric: key of the metrics.
        bound: the bound, inclusive.
        least: whether it is a lower bound; otherwise it is an upper bound.
    """

    metric: str
    bound: float
    least: bool

    def missed(self, metrics: Mapping[str, Any], missing: Mapping[str, str] | None = None) -> str | None:
        """One line with both values if the metric misses the bar, as NaN and a missing one always do; else None."""
        if self.metric in (missing or {}) or self.metric not in metrics:
            return f"{self.metric} is missing ({(missing or {}).get(self.metric, 'not measured')})"
        value = float(metrics[self.metric])
        if (value >= self.bound) if self.least else (value <= self.bound):
            return None
        side = "below the required" if self.least else "above the allowed"
        return f"{self.metric} {value:.6g} is {side} {self.bound:.6g}"


BARS = {
    "min_psnr": "psnr",
    "min_ssim": "ssim",
    "max_lpips": "lpips",
    "max_kernel_distance": "kernel_distance",
    "max_val_loss": "val/loss",
    "max_black": "black",
    "max_uniform": "uniform",
    "max_flicker": "flicker",
    "max_flicker_excess": "flicker_excess",
    "min_motion": "motion",
}
"""Metrics by the names of their bars on the command line."""

COMPARED = ("psnr", "ssim", "lpips", "flicker_excess")
NO_BROKEN_CLIP = Bar(metric="non_finite", bound=0, least=False)


def choose_bars(bounds: Mapping[str, float], *, val_loss: bool, lpips: bool, reference: bool) -> list[Bar]:
    """The bars for the given bounds, and a bar that requires finite clips.

    Args:
        bounds: bounds by the names of `BARS`.
        val_loss: whether the validation loss is measured.
        lpips: whether LPIPS is measured.
        reference: whether clips are compared with a reference.
    """
    missing: dict[str, str] = {}
    if not val_loss:
        missing["val/loss"] = "is of no use with --no-val-loss"
    if not lpips:
        missing["lpips"] = "needs --lpips FOLDER"
    if not reference:
        missing |= dict.fromkeys(COMPARED, "needs a reference, got --reference none")
    bars = [NO_BROKEN_CLIP]
    for name, bound in bounds.items():
        if BARS[name] in missing:
            raise ValueError(f"--{name.replace('_', '-')} {bound:g} {missing[BARS[name]]}")
        bars.append(Bar(metric=BARS[name], bound=bound, least=name.startswith("min_")))
    return bars
