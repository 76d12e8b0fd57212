"""Help on the options of every config group: type, default and meaning.

Names and types come from constructors, meanings from the `Args` of their docstrings, defaults from the composed config.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vsa.config import ELSEWHERE, LIMITS, OBJECTS, PLAIN, TABLES, Resume, Run, target_class
from vsa.config_files import choices, config_folder
from vsa.settings import arguments_of, describe, hints_of, shown

CONFIGS = config_folder()


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting.

    Args:
        key: key on the command line.
        type: expected type.
        default: default value.
        meaning: meaning from the docstring.
    """

    key: str
    type: str
    default: str
    meaning: str


def options(group: str) -> list[Option]:
    """Options of the default choice of a group, of one of its files (`task/distill`), or of the run itself (`run`)."""
    name, _, choice = group.partition("/")
    groups = choices()
    if group != "run" and (name not in groups or choice not in ("", *groups[name])):
        names = ["run", *groups, *(f"{key}/{file}" for key, files in groups.items() for file in files)]
        nearest = get_close_matches(group, names, 1)
        advice = f", did you mean {nearest[0]}?" if nearest else f": expected one of {', '.join(['run', *groups])}"
        raise ValueError(f"{group}: unknown config group{advice}")
    if group != "run" and name not in (*OBJECTS, *TABLES, *PLAIN):
        raise ValueError(f"{name} sets options of other groups: see {name}/*.yaml or --cfg job")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        cfg = compose("train", overrides=[f"{group.replace('/', '=')}"] if choice else [])
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    if group == "run":
        return [*_options("", Run, whole), *_options("resume.", Resume, whole["resume"])]
    if name in PLAIN:
        return [*_options(f"{name}.", PLAIN[name], vars(PLAIN[name]()) | (whole.get(name) or {}))]
    node = whole[name]
    nodes = {name: node} if "_target_" in node else {f"{name}.{key}": value for key, value in node.items()}
    return [
        option
        for key, settings in nodes.items()
        if isinstance(settings, Mapping)
        for option in _options(f"{key}.", target_class(settings["_target_"]), settings)
    ]


def _options(prefix: str, constructor: type, settings: Mapping[str, Any]) -> Iterator[Option]:
    place = f"{constructor.__module__}.{constructor.__qualname__}"
    hints = {**hints_of(constructor), **LIMITS.get(place, {})}
    arguments = arguments_of(constructor)
    for name in hints:
        key = f"{prefix}{name}"
        value = settings.get(name, arguments[name].default if name in arguments else inspect.Parameter.empty)
        # without a default, the program sets the value: the model of a task, the width and index of a layer
        if value is inspect.Parameter.empty or key in ELSEWHERE or name == "layer_idx":
            continue
        if isinstance(value, Mapping) and "_target_" in value:
            cls = target_class(value["_target_"])
            yield Option(key=key, type=describe(hints[name]), default=cls.__name__, meaning=_meaning(constructor, name))
            yield from _options(f"{key}.", cls, value)
        else:
            default = getattr(value, "__name__", None) or shown(value)
            yield Option(key=key, type=describe(hints[name]), default=default, meaning=_meaning(constructor, name))


def _meaning(constructor: type, name: str) -> str:
    """Description of an argument in the docstring, or in that of a base class where this one only says "see"."""
    meaning = ""
    for cls in constructor.__mro__:
        for text in (cls.__doc__, getattr(cls.__init__, "__doc__", None)):
            meaning = _documented(text or "").get(name, "") or meaning
            if meaning and not meaning.startswith("see "):
                return meaning
    return meaning


def _documented(docstring: str) -> dict[str, str]:
    """Arguments and their descriptions in the `Args` section of a docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("Args:\n")
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if head := re.match(r" {4}([\w, *`]+?)(?: \(.*?\))?:\s*(.*)", line):
            names = [name.strip(" *`") for name in head[1].split(",")]
            descriptions |= dict.fromkeys(names, head[2])
        else:
            descriptions |= {name: f"{descriptions[name]} {line.strip()}".strip() for name in names}
    return descriptions
