"""Rows about settings that would run code or delete other files: the commands must end with one line and touch nothing.

Every hostile value creates a file `proof` if it is executed or imported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.soak import tiny
from scripts.soak.hostile import FILES, KEYS, PACKAGE, TARGETS, arm, grammar, hydra_nodes
from scripts.soak.pickles import unpickle
from scripts.soak.refusals import contents, drawn, refusal_failure
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.run_checkpoint import read_checkpoint, resolve_checkpoint, write_checkpoint
from vsa.config import check_settings, check_targets
from vsa.training.hydra_guard import composed

CONFIGS = tiny.ROOT / "configs"


def overwrite(folder: Path, tries: int, seed: int) -> Attempts:
    """`overwrite=true` in folders that hold other files than the run: no other file is deleted."""
    assert tiny.start(tiny.words(folder, "trainer.max_steps=3"), folder=folder).wait() == 0
    outputs, run = folder / "outputs", tiny.run_folder(folder)
    mine = folder / "mine"
    (mine / "photos").mkdir(parents=True)
    (mine / "photos" / "one.jpg").write_bytes(b"mine")
    (folder / "link").symlink_to(run)
    settings = [
        ["run="],
        ["run=."],
        ["run=.."],
        ["run=../../mine"],
        ["name=.."],
        [f"run_dir={mine}"],
        [f"run_dir={outputs}"],
        [f"run_dir={folder / 'link'}"],
        [f"run_dir={folder / 'shards'}"],
        # the folder of the run itself, refused for another reason
        ["optim.lr=-1"],
    ]
    before = contents(folder)
    for overrides in drawn(settings, tries, seed):
        words = tiny.words(folder, "overwrite=true", "trainer.max_steps=1", *overrides)
        failure = refusal_failure(tiny.start(words, folder=folder))
        if contents(folder) != before:
            failure = f"files changed: {sorted(set(before.items()) ^ set(contents(folder).items()))[:3]}"
        yield " ".join(overrides), failure


def two_runs(folder: Path, tries: int, seed: int) -> Attempts:
    """Start a second run in the folder of a running one: it is refused, and the first ends as it would alone."""
    rng = random.Random(seed)
    alone = tiny.words(folder, "run=alone")
    assert tiny.start(alone, folder=folder).wait() == 0
    expected = tiny.digest_of_run(tiny.run_folder(folder, "alone"))
    for number in range(tries):
        words, run = tiny.words(folder, f"run=r{number}"), tiny.run_folder(folder, f"r{number}")
        how = (["overwrite=true"], ["ckpt_path=last"], [])[number % 3]
        first = tiny.start(words, folder=folder)
        step = rng.randint(1, tiny.STEPS // 2)
        tiny.wait_for_step(run, step)
        # the second run needs half a second to start, in which the first one would end
        first.send_signal(tiny.signal.SIGSTOP)
        failure = refusal_failure(second := tiny.start([*words, *how], folder=folder))
        if failure is None and "is in use by process" not in second.output():
            failure = f"refused for another reason: {second.error_lines()}"
        first.send_signal(tiny.signal.SIGCONT)
        status = first.wait()
        if failure is None and (status != 0 or tiny.digest_of_run(run) != expected):
            failure = f"the first run ended with status {status}, or with other weights"
        yield f"{how} at step {step}", failure


def refused_starts(folder: Path, tries: int, seed: int) -> Attempts:
    """A refused start leaves an existing run folder unchanged, byte for byte."""
    settings = [
        *("optim.lr=-1", "model.num_layers=two", "sparsity.sparsity=2", "data.batch_size=0", "nope=3", "model=nope"),
        *("data.root=nowhere", "init_from=nowhere", "trainer.precision=99", "trainer.max_steps=0", "seed=x"),
        *("attention.tile_thw=[0,2,2]", "model.text_dim=32", f"callbacks.x._target_={PACKAGE}.run"),
    ]
    starts = [(how, setting) for how in ("", "overwrite=true", "ckpt_path=last") for setting in settings]
    # this combination is not refused, because the run already has all of its steps
    starts = [(how, setting) for how, setting in starts if (how, setting) != ("ckpt_path=last", "trainer.max_steps=0")]
    starts += [("", "trainer.max_steps=9"), ("ckpt_path=nowhere", "seed=0"), ("ckpt_path=last", "seed=1")]
    arm(folder)
    assert tiny.start(tiny.words(folder, "trainer.max_steps=6"), folder=folder).wait() == 0
    before = contents(folder)
    for how, setting in drawn(starts, tries, seed):
        run = tiny.start(tiny.words(folder, "trainer.max_steps=9", *filter(None, (how, setting))), folder=folder)
        failure = refusal_failure(run)
        if contents(folder) != before:
            failure = f"files changed, and {failure}"
        yield f"{how} {setting}", failure


def _hostile_start(arguments: list[str], folder: Path, proof: Path, before: Mapping[str, Any]) -> str | None:
    failure = refusal_failure(tiny.start(arguments, folder=folder))
    if proof.exists():
        proof.unlink()
        return f"it was executed, and {failure}"
    return failure or (None if contents(folder) == before else "files changed")


def _hostile_file(folder: Path, content: bytes, proof: Path, *flags: str) -> str | None:
    path = folder / "configs" / "experiment" / "evil.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    words = tiny.words(folder, "--config-dir", str(path.parents[1]), "experiment=evil")
    return _hostile_start([*flags, *words], folder, proof, contents(folder))


def _flags(node: Mapping[str, Any]) -> list[str]:
    # Hydra uses launchers and sweepers only for several runs
    return ["-m"] if {"launcher", "sweeper"} & set(node) else []


def hydra_files(folder: Path, tries: int, seed: int) -> Attempts:
    """Hostile `hydra` nodes in an experiment file."""
    proof = arm(folder)
    for name, node in drawn([*hydra_nodes(proof).items()], tries, seed):
        text = "# @package _global_\n" + yaml.safe_dump({"hydra": node})
        yield name, _hostile_file(folder, text.encode(), proof, *_flags(node))


def hydra_overrides(folder: Path, tries: int, seed: int) -> Attempts:
    """Hostile `hydra` nodes on the command line."""
    proof = arm(folder)
    words = tiny.words(folder)
    before = contents(folder)
    for name, node in drawn([*hydra_nodes(proof).items()], tries, seed):
        settings = [
            # ++ also adds keys that the config of a launcher lacks
            f"++hydra.{top}.{key}={grammar(value)}"
            for top, inner in node.items()
            for key, value in inner.items()
        ]
        yield name, _hostile_start([*_flags(node), *words, *settings], folder, proof, before)


def _with_config(run: Path, target: Path, config: Mapping[str, Any]) -> Path:
    """A complete checkpoint with the tensors of the newest one of a run and another config."""
    checkpoint = resolve_checkpoint("last", run)
    state = {name: value for name, value in checkpoint.state.items() if name not in ("schema", "files")}
    return write_checkpoint(
        target, {name: checkpoint.tensors(name) for name in checkpoint.groups}, {**state, "config": config}
    )


def hydra_checkpoints(folder: Path, tries: int, seed: int) -> Attempts:
    """Hostile `hydra` nodes in the config of a resumed checkpoint, where they are only data."""
    proof = arm(folder)
    assert tiny.start(tiny.words(folder, "trainer.max_steps=3"), folder=folder).wait() == 0
    config = resolve_checkpoint("last", tiny.run_folder(folder)).state["config"]
    for number, (name, node) in enumerate(drawn([*hydra_nodes(proof).items()], tries, seed)):
        checkpoint = _with_config(tiny.run_folder(folder), folder / f"evil{number}", {**config, "hydra": node})
        words = tiny.words(folder, f"ckpt_path={checkpoint}", "trainer.max_steps=4", f"run=r{number}")
        run = tiny.start(words, folder=folder)
        failure = refusal_failure(run)
        if run.returncode == 0:
            failure = None
        yield name, "it was executed" if proof.exists() else failure
        proof.unlink(missing_ok=True)


def targets(folder: Path, tries: int, seed: int) -> Attempts:
    """Classes and functions of other packages, in four places of a config."""
    proof = arm(folder)
    for target in drawn(TARGETS, tries, seed):
        evil = {"_target_": target}
        places = (
            {"model": evil},
            {"callbacks": {"ema": {"_target_": "vsa.training.callbacks.ema.EMA", "decay": evil}}},
            {"data": {"sources": [[evil]]}},
            {"trainer": {"_target_": "lightning.pytorch.Trainer", "plugins": {"x": [{"y": evil}]}}},
        )
        passed = []
        for place in places:
            try:
                check_targets(place)
            except ValueError as error:
                if "\n" in str(error) or "_target_" not in str(error):
                    passed.append(f"{place}: it says {error}")
            except Exception as error:
                passed.append(f"{place}: {error!r}")
            else:
                passed.append(str(place))
        if proof.exists():
            passed.append("it was imported")
            proof.unlink()
        yield repr(target), "; ".join(passed) or None


def keys(folder: Path, tries: int, seed: int) -> Attempts:
    """A class of another package below every key, on the command line."""
    proof = arm(folder)
    words = tiny.words(folder)
    before = contents(folder)
    for key in drawn(KEYS, tries, seed):
        yield key, _hostile_start([*words, f"++{key}._target_={PACKAGE}.run"], folder, proof, before)


def checkpoints(folder: Path, tries: int, seed: int) -> Attempts:
    """Nodes in the config of a checkpoint that name other classes, through three commands that instantiate it."""
    proof = arm(folder)
    assert tiny.start(tiny.words(folder, "trainer.max_steps=3"), folder=folder).wait() == 0
    config = resolve_checkpoint("last", tiny.run_folder(folder)).state["config"]
    nodes = ("model", "attention", "sparsity", "data", "data.codec", "data.text_encoder", "task", "task.objective")
    nodes = (*nodes, "task.objective.shift", "denoising")
    cases = [(command, node) for node in nodes for command in ("sample", "convert", "evaluate")]
    for number, (command, node) in enumerate(drawn(cases, tries, seed)):
        evil = {"_target_": f"{PACKAGE}.run"}
        inner = changed = yaml.safe_load(yaml.safe_dump(config))
        *above, last = node.split(".")
        for name in above:
            inner = inner[name]
        inner[last] = evil
        run = folder / f"evil{number}"
        checkpoint = _with_config(tiny.run_folder(folder), run / "checkpoints", changed)
        read_checkpoint(checkpoint)
        source = str(run if command == "evaluate" else checkpoint)
        options = {
            "sample": ["--prompt", "x", "--steps", "1", "--out", str(run / "out")],
            "convert": [str(run / "out"), "--to", "run"],
            "evaluate": ["--prompt", "x", "--steps", "1", "--out", str(run / "out")],
        }[command]
        process = tiny.start([source, *options], folder=folder, script=command)
        failure = refusal_failure(process)
        # a command may not use the node
        if process.returncode == 0:
            failure = None
        yield f"{command} {node}", "it was executed" if proof.exists() else failure
        proof.unlink(missing_ok=True)


def shipped(folder: Path, tries: int, seed: int) -> Attempts:
    """All experiments of the project pass the checks."""
    names = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
    for name in drawn(names, tries, seed):
        try:
            cfg = composed(f"experiment={name}")
            check_targets(cfg)
            check_settings(cfg)
            failure = None
        except Exception as error:
            failure = repr(error)
        yield name, failure


def hostile_files(folder: Path, tries: int, seed: int) -> Attempts:
    """Experiment files that are not valid settings."""
    proof = arm(folder)
    for name, content in drawn([*FILES.items()], tries, seed):
        yield name, _hostile_file(folder, content, proof)


ROWS = (
    Row(name="overwrite=true beside what is not its run", tries=10, short_tries=2, run=overwrite),
    Row(name="two runs in one folder at once", tries=12, short_tries=0, run=two_runs),
    Row(name="refused starts in the folder of a run", tries=44, short_tries=3, run=refused_starts),
    Row(name="Hydra's own nodes in files", tries=40, short_tries=3, run=hydra_files),
    Row(name="Hydra's own nodes on the command line", tries=40, short_tries=3, run=hydra_overrides),
    Row(name="Hydra's own nodes in checkpoints", tries=40, short_tries=0, run=hydra_checkpoints),
    Row(name="hostile _target_ values", tries=len(TARGETS), short_tries=len(TARGETS), run=targets),
    Row(name="hostile classes by key of the config", tries=len(KEYS), short_tries=0, run=keys),
    Row(name="hostile classes in checkpoints", tries=30, short_tries=0, run=checkpoints),
    Row(name="shipped experiments pass the checks", tries=10, short_tries=2, run=shipped),
    Row(name="hostile experiment files", tries=len(FILES), short_tries=3, run=hostile_files),
    Row(name="pickles in place of weights and data", tries=65, short_tries=3, run=unpickle),
)
