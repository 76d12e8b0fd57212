"""The update order of a distillation."""

from __future__ import annotations

from dataclasses import dataclass

from vsa.settings import AtLeastOne, Count, validated


@validated
@dataclass(frozen=True, kw_only=True)
class UpdateCycle:
    """Iterations in which the generator is updated; the critic is updated in every iteration.

    Args:
        generator_every: iterations per update of the generator.
        fake_score_warmup: number of first iterations that train the critic only.
    """

    generator_every: AtLeastOne
    fake_score_warmup: Count

    def is_generators_turn(self, iteration: int) -> bool:
        since = iteration - self.fake_score_warmup
        return since >= 0 and since % self.generator_every == 0

    def generator_updates(self, iteration: int) -> int:
        """Number of updates of the generator before `iteration`."""
        return max(0, -(-(iteration - self.fake_score_warmup) // self.generator_every))
