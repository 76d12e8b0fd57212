"""The pages that users read, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)


@dataclass(frozen=True)
class Command:
    """One command of a page, its variables filled in.

    Args:
        words: from the program's name on.
        page: where it stands first.
    """

    words: tuple[str, ...]
    page: str

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"

    @property
    def trains(self) -> bool:
        """Whether it starts a training, by any launcher."""
        return self.words[:2] == ("vsa", "train") or "train.py" in self.words

    @property
    def settings(self) -> list[str]:
        """What stands behind the program of a training."""
        start = self.words.index("train.py") + 1 if "train.py" in self.words else 2
        return list(self.words[start:])


def commands_of(script: str, page: str) -> list[Command]:
    """The commands of a shell script: joined lines, without comments, chains and pipes taken apart."""
    variables: dict[str, str] = {}
    listing = []
    for line in script.replace("\\\n", " ").splitlines():
        # a variable of the reader's own shell stays as it is
        expanded_line = re.sub(r"\$\{?(\w+)\}?", lambda m, values=dict(variables): values.get(m[1], m[0]), line)
        # text in single quotes is nobody's variable
        words = shlex.split(line if "'" in line and "${" in line else expanded_line, comments=True)
        for part in _parts(words):
            while part and ASSIGNMENT.fullmatch(part[0]):
                name, _, value = part.pop(0).partition("=")
                variables |= {} if part else {name: value}
            if part:
                listing.append(Command(tuple(part), page))
    return listing


def _parts(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||", "|", ";", "&"):
            parts.append([])
        elif word in (">", ">>", "2>", "2>&1"):
            break
        else:
            parts[-1].append(word)
    return parts


def header_commands(path: Path) -> list[Command]:
    """The commands behind `# Command:` of an experiment, without the remarks beside and between them."""
    text = path.read_text(encoding="utf-8").partition("# Command:")[2]
    text = re.split(r"^# \w+:", text, maxsplit=1, flags=re.M)[0]
    lines = [line.strip("# ") for line in re.sub(r"\\\n# +", "", text).splitlines()]
    script = "\n".join(re.split(" {3,}", line)[0] for line in lines if re.match("(python|torchrun|vsa) ", line))
    return commands_of(script, f"configs/experiment/{path.name}")


@cache
def commands() -> tuple[Command, ...]:
    """Every command of the pages' bash blocks and of the experiments' heads, and `vsa train` and `vsa sweep` inside
    sentences; each once."""
    by_words: dict[tuple[str, ...], Command] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(ROOT))
        script = "\n".join(body for language, body in FENCE.findall(text) if language in ("bash", "sh", "console"))
        # what a sentence leaves out (`vsa train ... key=value`) is left out here too
        inline = [c.replace(" ...", "") for c in re.findall(r"`(vsa (?:train|sweep) [^`]+)`", FENCE.sub("", text))]
        for command in commands_of("\n".join([script, *inline]), name):
            by_words.setdefault(command.words, command)
    for path in EXPERIMENTS:
        for command in header_commands(path):
            by_words.setdefault(command.words, command)
    return tuple(by_words.values())


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))
