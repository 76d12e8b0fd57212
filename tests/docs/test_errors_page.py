"""docs/errors.md explains messages that the program has."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "errors.md"
MESSAGES = re.findall(r"^- \*\*`([^`]+)`\*\*", PAGE.read_text(encoding="utf-8"), re.M)
FOREIGN = {"Could not find 'experiment/…'"}
"""Messages of Hydra."""


@cache
def texts() -> tuple[str, ...]:
    """Every text of the code, with … for the values inside it."""
    literals = []
    for folder in ("vsa", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
                    literals.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    literals.append(node.value)
    return tuple(literals)


def in_the_code(message: str) -> bool:
    """Whether a text of the code has all parts of a message in its order, and a value at each …"""
    pattern = re.compile(".*….*".join(map(re.escape, message.split("…"))), re.S)
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in FOREIGN])
def test_the_message_is_in_the_code(message):
    assert in_the_code(message)


def test_other_messages_are_not():
    assert len(MESSAGES) > 40
    assert not in_the_code("already holds checkpoints: start over")
    assert not in_the_code("no valid … checkpoint in …")
