"""Overrides of sparsity on the command line, as opposed to values of shared files.

An experiment or a sweep sets a sparsity schedule for any attention, and attention that selects no tiles ignores it.
But a top-k typed for such attention is refused, since it would suggest a sparsity that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.conf import HydraConf
from hydra.types import RunMode

OF_ALL_METHODS = ("sparsity.denoising", "sparsity.denoising.dense_steps", "sparsity.denoising.dense_layers")
"""Settings of the group that also apply to attention without a top-k."""
OF_PREDICTED = ("sparsity.denoising.refresh", "sparsity.denoising.shared_cache")
"""Settings that also apply to attention that predicts its tiles from q and k."""


def sets_tiles_kept(override: str, *, predicts: bool = False) -> bool:
    """Whether a command-line override changes how many tiles are kept: `sparsity=linear`, `sparsity.topk=8`.

    Args:
        override: the override as typed.
        predicts: see `AttentionMethod.predicts`; settings that reuse a prediction over steps then do not count.
    """
    key = override.lstrip("+~").partition("=")[0]
    others = (*OF_ALL_METHODS, *OF_PREDICTED) if predicts else OF_ALL_METHODS
    return (key == "sparsity" or key.startswith("sparsity.")) and key not in others


def without_tiles_kept(overrides: Sequence[str], *, predicts: bool = False) -> tuple[str, ...]:
    """The overrides that also apply to attention that selects no tiles, or `predicts` them without a top-k."""
    return tuple(o for o in overrides if not sets_tiles_kept(o, predicts=predicts))


@dataclass(frozen=True, kw_only=True)
class SparsityOverrides:
    """Overrides typed for one run that change how many tiles are kept.

    Args:
        overrides: the overrides.
        attention: name of the chosen method.
    """

    overrides: tuple[str, ...] = ()
    attention: str = ""

    @classmethod
    def of(cls, hydra: HydraConf) -> SparsityOverrides:
        """Overrides on the command line of a job; none for several jobs, some of which may select tiles."""
        if hydra.mode == RunMode.MULTIRUN:
            return NOTHING
        overrides = tuple(o.lstrip("+") for o in hydra.overrides.task if sets_tiles_kept(o))
        # a config from an existing run has no group choices
        return cls(overrides=overrides, attention=str(hydra.runtime.choices.get("attention", "of this config")))

    def refuse_without_selection(self, *, predicts: bool = False, rule: str | None = None) -> None:
        """Raise ValueError if an override is present; for attention that selects no tiles, or predicts them.

        Args:
            predicts: see `AttentionMethod.predicts`.
            rule: what decides which tiles are kept, if that is a setting.
        """
        reason = f"it{f's rule={rule}' if rule else ''} has no top-k" if predicts else "it selects no tiles"
        for override in self.overrides:
            says_nothing = override.startswith("~") or override.endswith("=null")
            if sets_tiles_kept(override, predicts=predicts) and not says_nothing:
                raise ValueError(f"{override} does not apply to attention={self.attention}: {reason}")


NOTHING = SparsityOverrides()
"""No overrides, for a run that was not started from a command line."""
