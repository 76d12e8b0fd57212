"""Common parts of the tests of `scripts/bench`: quick arguments, and results that are wrong on purpose."""

from __future__ import annotations

FAST = ["--shapes", "tiny", "--repeats", "2"]


def damaged(right, tamper):
    """An operator whose backend `gather` returns what `tamper` makes of its result."""

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return tamper(result) if kwargs.get("backend", args[-1]) == "gather" else result

    return wrong
