"""Prompt files."""

from __future__ import annotations

import json
from pathlib import Path

from vsa.secrets import without_secrets

HELD_OUT_PROMPTS = 4
"""Number of captions of held-out clips that serve as prompts of a run without prompts."""


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, one per line, or of a `.jsonl` file with lines of {"prompt": "..."}; skips empty lines.

    Secrets are masked, because prompts become file names.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error}") from None
    if path.suffix != ".jsonl":
        prompts = [line for line in lines if line]
    else:
        prompts = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                prompt = None
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f'prompt file {path}, line {number}: expected {{"prompt": "..."}}')
            prompts.append(prompt.strip())
    if not prompts:
        raise ValueError(f"prompt file {path} has no prompts")
    return [without_secrets(prompt, named=False) for prompt in prompts]
