"""Every default stands in one place: in Python, or in YAML where the constructor asks for the value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from vsa.config import resolved, target_class
from vsa.config_help import CONFIGS
from vsa.settings import arguments_of

FILES = sorted(CONFIGS.rglob("*.yaml"))
# experiments put defaults back where a group has other values
GROUPS = [path for path in FILES if "# @package _global_" not in path.read_text()]
REFERRED = set(re.findall(r"\$\{([\w.]+)\}", "".join(path.read_text() for path in FILES)))
"""Keys whose values other files take over: these have to stand in a file."""


def defaults_of(cls: type) -> dict[str, Any]:
    defaults = {name: parameter.default for name, parameter in arguments_of(cls).items()}
    if dataclasses.is_dataclass(cls):
        factory_defaults = {f.name: f.default_factory() for f in dataclasses.fields(cls) if callable(f.default_factory)}
        defaults |= factory_defaults
    return defaults


def repeated(node: Any, key: str) -> Iterator[str]:
    """Keys below `node` whose value is the default of the class they go to."""
    if not isinstance(node, dict):
        return
    target = str(node.get("_target_"))
    defaults = defaults_of(target_class(target)) if target.startswith("vsa.") else {}
    for name, value in node.items():
        default = defaults.get(name, ...)
        default = list(default) if isinstance(default, tuple) else default
        if value == default and isinstance(value, bool) == isinstance(default, bool):
            yield f"{key}.{name}"
        yield from repeated(value, f"{key}.{name}")


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.stem)
def test_no_file_repeats_a_default(path: Path):
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert [key for key in repeated(node, path.parent.name) if key not in REFERRED] == []


def test_a_repeated_default_is_found():
    wsd = {"_target_": "vsa.training.optimizer.WSD", "decay_share": 0.2, "end": 0.0}
    adamw = {"_target_": "vsa.training.optimizer.AdamW", "lr": 1e-3, "lr_factors": {}, "schedule": wsd}
    assert list(repeated(adamw, "optim")) == ["optim.lr_factors", "optim.schedule.end"]


def test_the_record_of_a_run_holds_the_defaults():
    task = {"_target_": "vsa.training.modules.pretrain.PretrainModule", "seed": 3}
    record = resolved(OmegaConf.create({"task": task, "other": {"a": [1]}}))
    assert (record["task"]["seed"], record["task"]["grad_clip"], record["task"]["validate_at"]) == (3, 1.0, ["current"])
    assert record["other"] == {"a": [1]}
