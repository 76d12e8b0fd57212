"""Detection of secrets, and their removal from files and messages.

Secrets are values of settings and environment variables with the name of a secret, and the credentials before the @ of
a URL. Files and messages contain `MARKER` instead.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

MARKER = "<secret>"
SHORTEST = 8
"""Least characters of a secret that is searched for in other texts; shorter values also occur in ordinary words."""

_WORDS = {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "secret", "secrets"}
# secret only as the last word: a token budget and a tokenizer are not secrets
_LAST = {"authorization", "bearer", "token"}
_LAST_OF_SEVERAL = {"pass", "pwd"}
_KEYS_OF = {"access", "account", "api", "auth", "deploy", "encryption", "master", "private", "signing", "ssh"}
# last words of names that hold the place of a secret: AWS_WEB_IDENTITY_TOKEN_FILE
_PLACES = {"dir", "file", "folder", "path"}

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# from the first letter of a name only, and without going back: a text of one long word takes linear time
_NAME = re.compile(r"""(?<![\w.@/-])([\w.@/-]++)(?<=\w)["']?\s*+[=:]\s*""")
_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>.+?)(?P=quote)|[^\s,;&"'\])}]*[^\s,;:.&"'\])}]""")
_USER_OF_URL = re.compile(r"(\w://)[^/\s@]+@")


def is_secret_name(name: str) -> bool:
    """Whether a name is that of a secret: WANDB_API_KEY, `hf_token`, `logger.x.password`."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    if not words or words[-1] in _PLACES:
        return False
    return (
        not _WORDS.isdisjoint(words)
        or words[-1] in _LAST
        or (len(words) > 1 and words[-1] in _LAST_OF_SEVERAL)
        or any(before in _KEYS_OF and word == "key" for before, word in pairwise(words))
    )


def known_secrets() -> tuple[str, ...]:
    """Secrets of the environment and of the command line of this process, the longest first."""
    values = [value for name, value in os.environ.items() if is_secret_name(name)]
    values += [value["quoted"] or value[0] for word in sys.argv for value in _named_secrets(word)]
    return _searched(values)


def without_secrets(text: str, secrets: Iterable[str] | None = None, *, named: bool = True) -> str:
    """Replace every secret in a text by `MARKER`.

    Args:
        text: a message or a value.
        secrets: secrets to replace beside those that the text itself names (`api_key=...`); None: `known_secrets`.
        named: whether the text may name secrets; a caption (a sign that says "secret: keep out") does not.
    """
    named_here = list(_named_secrets(text)) if named else []
    own = [value["quoted"] or value[0] for value in named_here]
    ends = [0, *(value.end() for value in named_here)]
    starts = [*(value.start() for value in named_here), len(text)]
    text = MARKER.join(text[end:start] for end, start in zip(ends, starts, strict=True))
    for secret in _searched((*(known_secrets() if secrets is None else secrets), *own)):
        text = text.replace(secret, MARKER)
    return _USER_OF_URL.sub(rf"\1{MARKER}@", text)


def masked(config: Any) -> Any:
    """A config of plain values in which `MARKER` replaces every secret, also where its value is part of other values.

    Names of settings and of classes do not change.
    """
    return _masked(config, _searched((*known_secrets(), *map(str, _under_secret_names(config)))))


def _masked(node: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(node, Mapping):
        return {
            key: value
            if key == "_target_"
            else MARKER
            if is_secret_name(str(key)) and _tells(value)
            else _masked(value, secrets)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [_masked(value, secrets) for value in node]
    if isinstance(node, str):
        return without_secrets(node, secrets)
    return MARKER if str(node) in secrets else node


def _under_secret_names(node: Any, *, secret: bool = False) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _under_secret_names(value, secret=secret or is_secret_name(str(key)))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _under_secret_names(value, secret=secret)
    elif secret and _tells(node):
        yield node


def _tells(value: Any) -> bool:
    return value is not None and not isinstance(value, bool) and value != ""


def _named_secrets(text: str) -> Iterator[re.Match[str]]:
    """Values in a text that follow the name of a secret: `api_key=...`, `"password": "..."`."""
    end = 0
    for name in _NAME.finditer(text):
        value = name.start() >= end and is_secret_name(name[1]) and _VALUE.match(text, name.end())
        if value:
            yield value
            end = value.end()


def _searched(values: Iterable[str]) -> tuple[str, ...]:
    # longer secrets first: replacing one that is part of another would leave the rest of the longer one
    return tuple(sorted({v for v in values if len(v) >= SHORTEST and v != MARKER}, key=lambda v: (-len(v), v)))


def print_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback without secrets on stderr, for `sys.excepthook`."""
    sys.stderr.write(without_secrets("".join(traceback.format_exception(kind, error, trace))))
