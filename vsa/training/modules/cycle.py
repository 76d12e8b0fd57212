"""Whose turn it is in an iteration of a distillation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateCycle:
    """When the generator is updated; the critic is in every iteration.

    Args:
        generator_every: iterations per update of the generator.
        fake_score_warmup: iterations in which only the critic is trained.

    Raises:
        ValueError: a value out of range.
    """

    generator_every: int
    fake_score_warmup: int

    def __post_init__(self):
        if self.generator_every < 1:
            raise ValueError(f"task.generator_every must be at least 1, got {self.generator_every}")
        if self.fake_score_warmup < 0:
            raise ValueError(f"task.fake_score_warmup must not be negative, got {self.fake_score_warmup}")

    def is_generators_turn(self, iteration: int) -> bool:
        since = iteration - self.fake_score_warmup
        return since >= 0 and since % self.generator_every == 0

    def generator_updates(self, iteration: int) -> int:
        """Turns of the generator before `iteration`."""
        return max(0, -(-(iteration - self.fake_score_warmup) // self.generator_every))
