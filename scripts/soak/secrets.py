"""Rows about secrets, and about a tracker with a faulty server."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.soak.rows import Attempts, Row
from scripts.soak.tiny import STEPS, metrics, run_folder, start, words
from tests.tracker_server import TrackerServer

CANARY = "c4n4ry-0f-a-k3y"
ENVIRONMENT = "MY_API_KEY"
SAMPLED = ("callbacks.samples.steps=1", "data=toy_online", "data.toy.size=[8,64,64]", "tile_thw=[1,2,2]")
SHORT = ("trainer.max_steps=2", "callbacks.checkpoint.every_n_steps=1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way in which a secret may enter a run.

    Args:
        name: name in the report.
        settings: settings of the run, which may contain `{folder}`.
        status: expected exit status of the command.
        typed: the secret is only in the command line or a file, not in the environment.
        env: further environment variables.
        fresh: run in a new interpreter, because a forked process prints tracebacks differently.
        experiment: content of `experiment/mine.yaml` in the folder.
    """

    name: str
    settings: tuple[str, ...]
    status: int = 0
    typed: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    experiment: str = ""


CASES = (
    Case(name="typed, refused", settings=(f"+wandb_api_key={CANARY}",), status=1, typed=True),
    Case(
        name="prompt by interpolation",
        settings=(*SAMPLED, "callbacks.samples.prompts=['a ${{oc.env:MY_API_KEY}} circle']"),
    ),
    Case(
        name="prompt in the command line, wandb",
        settings=(*SAMPLED, f"callbacks.samples.prompts=['a {CANARY} circle']", "logger=wandb"),
    ),
    Case(
        name="in a config file, refused",
        settings=("--config-dir={folder}", "experiment=mine"),
        experiment=f"wandb_api_key: {CANARY}",
        status=1,
        typed=True,
    ),
    Case(
        name="value of an experiment",
        settings=(*SAMPLED, "--config-dir={folder}", "experiment=mine"),
        experiment=f"callbacks:\n  samples:\n    prompts: [the {CANARY}]",
    ),
    Case(name="new setting by interpolation", settings=("+note=${{oc.env:MY_API_KEY}}",), status=1),
    Case(name="name of the run", settings=("run=${{oc.env:MY_API_KEY}}",), status=1),
    Case(name="missing checkpoint", settings=("ckpt_path=${{oc.env:MY_API_KEY}}/x",), status=1),
    Case(
        name="traceback",
        settings=(f"+hf_token={CANARY}",),
        env={"HYDRA_FULL_ERROR": "1"},
        status=1,
        typed=True,
        fresh=True,
    ),
    Case(name="sweep", settings=("-m", "seed=1,2", f"name={CANARY}"), status=1),
    Case(name="environment alone, csv", settings=()),
    Case(name="environment alone, wandb", settings=("logger=wandb",)),
)


def secrets(folder: Path, tries: int, seed: int) -> Attempts:
    for number, case in enumerate(CASES[:tries]):
        own = folder / f"case-{number}"
        own.mkdir()
        yield case.name, _leaks(own, case)


def _leaks(folder: Path, case: Case) -> str | None:
    """None, or what went wrong."""
    settings = [setting.format(folder=folder) for setting in case.settings]
    if case.experiment:
        files = folder / "experiment"
        files.mkdir()
        (files / "mine.yaml").write_text(f"# @package _global_\n{case.experiment}\n")
    arguments = words(folder, *SHORT, *settings)
    if "data=toy_online" in settings:
        arguments = [
            word for word in arguments if word != "callbacks.samples=null" and not word.startswith("data.root=")
        ]
    env = {"WANDB_SILENT": "true", "WANDB_MODE": "offline", **case.env}
    env = env if case.typed else {ENVIRONMENT: CANARY, **env}
    process = start(arguments, folder=folder, env=env, fresh=case.fresh)
    status = process.wait()
    (folder / "experiment" / "mine.yaml").unlink(missing_ok=True)
    # separators are optional, because names of files may lack them
    pattern = re.compile(re.sub(r"\W", r"[^a-z0-9]?", CANARY).encode())
    paths = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if pattern.search(path.name.encode()) or (path.is_file() and pattern.search(path.read_bytes()))
    ]
    if paths:
        return f"found in {paths[:4]}"
    if status != case.status:
        return f"exit status {status}, expected {case.status}: {process.output()[-300:]}"
    return None


# trackers

MOODS = ("refuses", "answers", "hangs", "dies")


def trackers(folder: Path, tries: int, seed: int) -> Attempts:
    notes = []
    for mood in MOODS[:tries]:
        own = folder / mood
        own.mkdir()
        began = time.monotonic()
        yield mood, _held_up(own, mood)
        notes.append(f"{mood}: {time.monotonic() - began:.0f} s in all")
    return tuple(notes)


def _held_up(folder: Path, mood: str) -> str | None:
    """None, or what went wrong."""
    server = TrackerServer("answers" if mood == "refuses" else mood)  # type: ignore[arg-type]
    env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "f" * 40, "WANDB_MODE": "online", "HOME": str(folder)}
    with server:
        if mood == "refuses":
            server.close()
        process = start(words(folder, "logger=wandb", "logger.wandb.offline=false"), folder=folder, env=env)
        status, output, run = process.wait(180), process.output(), run_folder(folder)
        rows = metrics(run)
        online = mood in ("answers", "dies")
        if status or len(rows) != STEPS:
            return f"exit status {status}, {len(rows)} of {STEPS} steps: {output[-300:]}"
        if ("wandb: kept offline" in output) == online:
            return f"expected a run that is {'online' if online else 'offline'}: {output[-300:]}"
        match = re.search(r"wandb: to upload this run: wandb sync (\S+)", output)
        if (match is None) != (mood == "answers") or (match and not list(Path(match[1]).glob("*.wandb"))):
            return f"told {match and match[0]}"
        if server.got_metrics.is_set() != online:
            return "the server got no metrics" if online else "the server got metrics"
    return None


ROWS: tuple[Row, ...] = (
    Row(name="secrets in settings, files, names and messages", tries=len(CASES), short_tries=2, run=secrets),
    Row(name="a tracker whose server answers, hangs, refuses or dies", tries=len(MOODS), short_tries=1, run=trackers),
)
