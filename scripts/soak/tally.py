"""Counting the tries of a row."""

from __future__ import annotations

from scripts.soak.rows import Outcome


class Tally:
    """How many tries were made, and what went wrong in which."""

    def __init__(self) -> None:
        self.tried = 0
        self.failures: list[str] = []
        self.notes: list[str] = []

    def add(self, name: str, failure: str | None) -> None:
        """Count a try.

        Args:
            name: what is needed to repeat it.
            failure: what went wrong; None: it was survived.
        """
        self.tried += 1
        if failure is not None:
            self.failures.append(" ".join(f"{name}: {failure}".split())[:600])

    def outcome(self) -> Outcome:
        return Outcome(
            tried=self.tried,
            survived=self.tried - len(self.failures),
            failures=tuple(self.failures),
            notes=tuple(self.notes),
        )
