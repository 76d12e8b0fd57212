"""Counter of the tries of a row."""

from __future__ import annotations

from scripts.soak.rows import Outcome


class Tally:
    """Number of tries, and the failures by name."""

    def __init__(self) -> None:
        self.tried = 0
        self.failures: list[str] = []
        self.notes: list[str] = []

    def add(self, name: str, failure: str | None) -> None:
        """Count a try.

        Args:
            name: description of the try, with the values that are needed to repeat it.
            failure: description of the failure, None for a survived try.
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
