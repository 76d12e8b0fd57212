"""The files of the config groups, without the packages that compose and build them."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path


def config_folder() -> Path:
    """The folder of the Hydra groups: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def choices() -> dict[str, dict[str, str]]:
    """The files of every group, each with the first sentence of its header."""
    files: dict[str, dict[str, str]] = {}
    for path in sorted(config_folder().glob("*/*.yaml")):
        head = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        lines = [line[1:].strip() for line in head if not line.startswith("# @package")]
        text = " ".join(takewhile(lambda line: not line.startswith("Command:"), lines))
        files.setdefault(path.parent.name, {})[path.stem] = text.removeprefix("Purpose:").partition(". ")[0].strip(" .")
    return files
