"""Whose turn it is in an iteration of a distillation."""

from __future__ import annotations

from dataclasses import dataclass

from vsa.settings import AtLeastOne, Count, checked


@checked
@dataclass(frozen=True, kw_only=True)
class UpdateCycle:
    """When the generator is updated; the critic is in every iteration.

    Args:
        generator_every: iterations per update of the generator.
        fake_score_warmup: iterations in which only the critic is trained.

    Raises:
        ValueError: a value out of range.
    """

    generator_every: AtLeastOne
    fake_score_warmup: Count

    def is_generators_turn(self, iteration: int) -> bool:
        since = iteration - self.fake_score_warmup
        return since >= 0 and since % self.generator_every == 0

    def generator_updates(self, iteration: int) -> int:
        """Turns of the generator before `iteration`."""
        return max(0, -(-(iteration - self.fake_score_warmup) // self.generator_every))
