"""Prompt files."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from vsa.files import read_text
from vsa.secrets import without_secrets

HELD_OUT_PROMPTS = 4
"""Number of captions of held-out clips that serve as prompts of a run without prompts."""

# control characters, soft hyphens, zero-width spaces, marks of direction and of byte order, and halves of characters;
# zero-width joiners stay, since they make emoji and words
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\ud800-\udfff\ufeff]")


def tidy(text: str) -> str:
    """A caption or prompt in one line: Unicode form NFC, runs of white space as one blank, no invisible characters."""
    return _INVISIBLE.sub("", " ".join(unicodedata.normalize("NFC", text).split())).strip()


def lines_of(text: str) -> list[str]:
    """Lines as editors count them; other separators of Unicode are white space inside of a line."""
    return re.split(r"\r\n|\r|\n", text)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, one per line, or of a `.jsonl` file with lines of {"prompt": "..."}; skips empty lines.

    Secrets are masked, because prompts become file names.
    """
    lines = [line.strip() for line in lines_of(read_text(path))]
    if path.suffix.lower() != ".jsonl":
        prompts = [words for words in map(tidy, lines) if words]
    else:
        prompts = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError, RecursionError):
                prompt = None
            if not isinstance(prompt, str) or not tidy(prompt):
                raise ValueError(f'prompt file {path}, line {number}: expected {{"prompt": "..."}}')
            prompts.append(tidy(prompt))
    if not prompts:
        raise ValueError(f"prompt file {path} has no prompts")
    return [without_secrets(prompt, named=False) for prompt in prompts]
