"""The level of activation checkpointing that a run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsa.checkpoints.run_checkpoint import Checkpoint
from vsa.models.recompute import LEVELS, Level
from vsa.training.run_state import LEVEL


class Recomputation:
    """The level of activation checkpointing of a run, which under `auto` depends on memory.

    Args:
        setting: `task.parallel.activation_checkpointing`; a level stays whatever happens.
        resume: what the run goes on from; under `auto` it keeps the level of that checkpoint.

    Attributes:
        automatic: whether the setting is `auto`.
        level: by now; where memory is not known, as on a CPU, `auto` is none.
    """

    def __init__(self, setting: str, resume: Checkpoint | None):
        self.automatic = setting == "auto"
        self.level: Level = "none"
        if not self.automatic:
            self.level = setting  # type: ignore[assignment] (checked with the settings)
        self._kept = False
        self.keep(resume)

    def keep(self, checkpoint: Checkpoint | None) -> None:
        """Under `auto`, go on with the level of a checkpoint, so that the run stays the same bit for bit."""
        if not self.automatic or checkpoint is None:
            return
        level = checkpoint.state.get(LEVEL, _level_of_settings(checkpoint.state))
        if level in LEVELS:
            self.level, self._kept = level, True

    def choose(self, level: Level) -> None:
        """Under `auto`, let a new run begin with the level that fits by the estimate."""
        if self.automatic and not self._kept:
            self.level = level

    @property
    def next_level(self) -> Level | None:
        """The one that computes more again; None: everything is."""
        after = LEVELS[LEVELS.index(self.level) + 1 :]
        return after[0] if after else None


def _level_of_settings(state: Mapping[str, Any]) -> Any:
    """The level of a checkpoint that does not say it: `auto` did not exist then, and none was the default."""
    parallel = state.get("config", {}).get("task", {}).get("parallel") or {}
    return parallel.get("activation_checkpointing", "none")
