"""What a person typed about sparsity, as against what shared files say.

An experiment or a sweep carries a schedule for whatever attention is chosen, and one that selects no tiles ignores it.
A person who types a top-k for such attention would believe in a sparsity that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.conf import HydraConf
from hydra.types import RunMode

OF_ALL_METHODS = ("sparsity.denoising", "sparsity.denoising.dense_steps", "sparsity.denoising.dense_layers")
"""Settings of the group that attention without a top-k has a use for too."""
OF_PREDICTED = ("sparsity.denoising.refresh", "sparsity.denoising.shared_cache")
"""Those that it has a use for where its tiles follow from q and k."""


def sets_tiles_kept(override: str, *, predicts: bool = False) -> bool:
    """Whether an override of a command line is about how many tiles are kept: `sparsity=linear`, `sparsity.topk=8`.

    Args:
        override: as typed.
        predicts: see `AttentionMethod.predicts`; what keeps a prediction over steps is then not about their number.
    """
    key = override.lstrip("+~").partition("=")[0]
    others = (*OF_ALL_METHODS, *OF_PREDICTED) if predicts else OF_ALL_METHODS
    return (key == "sparsity" or key.startswith("sparsity.")) and key not in others


def without_tiles_kept(overrides: Sequence[str], *, predicts: bool = False) -> tuple[str, ...]:
    """The overrides that attention which selects no tiles, or `predicts` them without a top-k, has a use for."""
    return tuple(o for o in overrides if not sets_tiles_kept(o, predicts=predicts))


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What was typed for one run about how many tiles are kept.

    Args:
        overrides: these settings.
        attention: name of the chosen method.
    """

    overrides: tuple[str, ...] = ()
    attention: str = ""

    @classmethod
    def of(cls, hydra: HydraConf) -> Typed:
        """What stands in the command line of a job; nothing of several jobs, of which some may select."""
        if hydra.mode == RunMode.MULTIRUN:
            return NOTHING
        overrides = tuple(o.lstrip("+") for o in hydra.overrides.task if sets_tiles_kept(o))
        # a run's own config has no groups to choose from
        return cls(overrides=overrides, attention=str(hydra.runtime.choices.get("attention", "of this config")))

    def refuse_without_selection(self, *, predicts: bool = False) -> None:
        """Raise ValueError when a value is set; for attention that selects no tiles, or predicts them.

        Args:
            predicts: see `AttentionMethod.predicts`.
        """
        reason = "has no top-k" if predicts else "selects no tiles"
        for override in self.overrides:
            says_nothing = override.startswith("~") or override.endswith("=null")
            if sets_tiles_kept(override, predicts=predicts) and not says_nothing:
                raise ValueError(f"{override} has no meaning for attention={self.attention}: it {reason}")


NOTHING = Typed()
"""Of a run that no command line asked for."""
