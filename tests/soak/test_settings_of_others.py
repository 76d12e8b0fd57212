"""A row about settings that came from others: nothing in them is read, sent or built, and plain ones work as ever."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.shard_server import serve
from tests.soak.hostile import PACKAGE, arm
from tests.soak.test_execution import with_config
from tests.tiny_runs import TINY_OVERRIDES, TinyTraining, command_line, one_thread  # noqa: F401 (fixtures)
from vsa import trust
from vsa.config import target_class
from vsa.settings import arguments_of
from vsa.sweeps import sweep_run
from vsa.sweeps.job_queue import Job

SECRET = "c4n4ry-0f-a-k3y"
L = "lightning.pytorch"
MORE = {
    "callbacks.more": f"{L}.callbacks.EarlyStopping",
    "logger.more": f"{L}.loggers.CSVLogger",
    "logger.board": f"{L}.loggers.TensorBoardLogger",
}
"""Places of classes of Lightning that a file may build."""

PLAIN = (bool, int, float, str)
OTHERWISE = ("overfit_batches",)
"""An integer here, which the default of its class is not."""


def values(server: str) -> dict[str, Any]:
    """Hostile values by what they would do."""
    evil = {"_target_": f"{PACKAGE}.run"}
    return {
        "environment": "${oc.env:MY_API_KEY}",
        "environment in a text": "x-${oc.env:MY_API_KEY}-y",
        "environment, decoded": "${oc.decode:${oc.env:MY_API_KEY}}",
        "environment by a name of settings": "${oc.${name}:MY_API_KEY}",
        "time": "${now:%Y}",
        "Hydra": "${hydra:runtime.cwd}",
        "server": f"{server}/x",
        "server with a secret": server + "/${oc.env:MY_API_KEY}",
        "store": "s3://author/x",
        "class": evil,
        "class of Python": {"_target_": "os.system", "command": "touch proof"},
        "class in a list": [{"x": evil}],
        "class of Lightning": {"_target_": f"{L}.loggers.WandbLogger", "settings": {"base_url": server}},
        "proxy": {"settings": {"http_proxy": f"{server}"}},
    }


KINDS = tuple(values("http://127.0.0.1:9"))
EXPERIMENT = ("experiment", ["train.py"], ["dry_run=true"])
"""Group of a file, and the first and last words of a command with it."""


def finish(jobs: Sequence[Job], *_: Any, changed: Callable[[Job], None], **__: Any) -> None:
    """Runs of a sweep, none of which is started."""
    for job in jobs:
        job.status = "finished"
        changed(job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyTraining]:
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("runs") / "outputs", patch)
        training("run=precious", "trainer.max_steps=2")
        yield training


def nodes(config: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, type]]:
    """Keys of the objects in a config, and their classes."""
    if isinstance(config, Mapping):
        if isinstance(config.get("_target_"), str):
            yield key, target_class(config["_target_"])
        for name, inner in config.items():
            yield from nodes(inner, f"{key}.{name}" if key else str(name))


def arguments(runs: TinyTraining) -> list[tuple[str, str, Any]]:
    """Key, argument and a plain value of every argument of every object; `...` without a plain value."""
    config: Any = OmegaConf.to_container(runs.config(), resolve=False)
    found = []
    for key, cls in [*nodes(config), *((key, target_class(name)) for key, name in MORE.items())]:
        own: Any = OmegaConf.select(OmegaConf.create(config), key) or OmegaConf.create()
        here: Any = OmegaConf.to_container(own, resolve=False)
        foreign = trust.FOREIGN.get(cls.__name__) if not cls.__module__.startswith("vsa.") else None
        for name, parameter in arguments_of(cls).items():
            if name in ("self", "**", *OTHERWISE):
                continue
            value = here.get(name, parameter.default)
            allowed = foreign is None or name in foreign
            plain = type(value) in PLAIN and "${" not in str(value) and allowed
            found.append((key, name, value if plain else ...))
    return sorted(found, key=lambda each: each[:2])


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def word(value: Any) -> str:
    """A value as a word of Hydra has it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{word(inner)}" for name, inner in value.items()) + "}"
    return f"[{','.join(map(word, value))}]" if isinstance(value, list) else json.dumps(value)


def written(folder: Path, group: str, key: str, settings: Mapping[str, Any]) -> list[str]:
    """Words that choose a file with these settings of an object: an experiment's, or those of a point of a sweep."""
    (folder / group).mkdir(exist_ok=True)
    settings = {"_target_": MORE[key], **settings} if key in MORE else settings
    text = f"# @package _global_\n{yaml.safe_dump(nested(key, settings))}"
    if group == "sweep":
        words = [f"++{key}.{name}={word(value)}" for name, value in settings.items()]
        text = yaml.safe_dump({"variants": {"shared": words}})
    (folder / group / "shared.yaml").write_text(text)
    return [f"--config-dir={folder}", *(["experiment=shared"] if group == "experiment" else [])]


@pytest.mark.soak("experiment files, sweep files and checkpoints of others", attempts=240, short=0)
def test_settings_of_others(attempt, runs, command_line, tmp_path, monkeypatch):  # noqa: F811
    draw, known = random.Random(attempt), arguments(runs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setattr(sweep_run, "run_jobs", finish)
    proof, typed = arm(tmp_path), {word.partition("=")[0] for word in TINY_OVERRIDES}
    kind = draw.choice(KINDS)
    key, name, _ = draw.choice([each for each in known if f"{each[0]}.{each[1]}" not in typed])
    with serve(tmp_path / "conf") as server:

        def start(number: int, which: str, settings: dict[str, Any]) -> tuple[int, str]:
            if attempt % 3 == 1:
                config = OmegaConf.create(runs.last("precious").state["config"])
                for argument, own in settings.items():
                    # settings of a class cannot be merged into a list
                    OmegaConf.update(config, f"{which}.{argument}", own, merge=False, force_add=True)
                stored = OmegaConf.to_container(config, resolve=False)
                assert isinstance(stored, dict)
                with_config(runs, tmp_path / f"run-{number}" / "checkpoints", {str(k): v for k, v in stored.items()})
                words = ["sample", f"run-{number}", "--prompt", "x", "--steps", "1", "--out", f"clips-{number}"]
            else:
                # a sweep checks its points and then starts runs
                group, first, last = ("sweep", ["sweep", "shared"], []) if attempt % 3 else EXPERIMENT
                own = [*TINY_OVERRIDES, f"output_dir={tmp_path}/out", *last]
                words = [*first, *written(tmp_path / "conf", group, which, settings), *own]
            status, out, err = command_line(*words)
            return status, out + err

        (tmp_path / "conf").mkdir(exist_ok=True)
        status, text = start(0, key, {name: values(server.url)[kind]})
        told = f"{key}.{name}, {kind}: {status} {text[-1500:]}"
        # a checkpoint's settings that the command does not build are data
        assert status == 1 or (attempt % 3 == 1 and status == 0), told
        assert text.count("error: ") == status, told
        assert "Traceback" not in text, told
        assert SECRET not in text, told
        assert not server.asked, told
        assert not proof.exists(), told
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        assert not (tmp_path / "out").exists(), told
        # the control: the same kind of file with a plain value
        key, name, value = draw.choice([each for each in known if each[2] is not ...])
        status, text = start(1, key, {name: value})
        assert status == 0, f"control {key}.{name}={value!r}: {text[-1500:]}"
