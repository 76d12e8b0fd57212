"""Only a run's own folder is written: no key, file or link leads a run into another one."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import lightning.pytorch.profilers
import pytest
import yaml
from lightning.pytorch.trainer import Trainer

from tests.tiny_runs import CONFIGS, TINY_OVERRIDES, TinyTraining
from vsa.config import check_settings, check_targets, target_class
from vsa.settings import arguments_of
from vsa.training.hydra_guard import composed

L = "lightning.pytorch"


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Every path below a folder with its bytes or the target of its link."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[TinyTraining]:
    """A run `precious` of two steps, with checkpoints and metrics."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("runs") / "outputs", patch)
        training("run=precious", "trainer.max_steps=2", "callbacks.checkpoint.every_n_steps=1")
        yield training


def unharmed(runs: TinyTraining, *overrides: str) -> str:
    """The one-line error of a start that leaves all runs as they are."""
    before = contents(runs.output.parent)
    with pytest.raises(ValueError, match=r"\w") as refusal:
        runs(*(override.replace("PRECIOUS", str(runs.folder("precious"))) for override in overrides))
    assert contents(runs.output.parent) == before
    message = str(refusal.value)
    assert "\n" not in message
    return message


# key of a setting, and what names another run's folder there
OTHER_FOLDERS = {
    "callbacks.checkpoint.run_dir": "PRECIOUS",
    "callbacks.samples.run_dir": "PRECIOUS",
    "callbacks.nan_dump.run_dir": "PRECIOUS",
    "callbacks.diagnostics": "{_target_:vsa.training.callbacks.diagnostics.Diagnostics,run_dir:PRECIOUS}",
    "callbacks.profile": "{_target_:vsa.training.callbacks.step_profile.StepProfile,run_dir:PRECIOUS}",
    "callbacks.lightning": f"{{_target_:{L}.callbacks.ModelCheckpoint,dirpath:PRECIOUS}}",
    "callbacks.file": f"{{_target_:{L}.callbacks.ModelCheckpoint,filename:PRECIOUS/metrics}}",
    "callbacks.end": f"{{_target_:{L}.callbacks.OnExceptionCheckpoint,dirpath:PRECIOUS}}",
    "callbacks.spikes": f"{{_target_:{L}.callbacks.SpikeDetection,exclude_batches_path:PRECIOUS/metrics.csv}}",
    "logger.csv.root_dir": "PRECIOUS",
    "logger.other": f"{{_target_:{L}.loggers.CSVLogger,save_dir:PRECIOUS}}",
    "logger.name": f"{{_target_:{L}.loggers.CSVLogger,name:../precious}}",
    "logger.version": f"{{_target_:{L}.loggers.CSVLogger,version:../../precious}}",
    "logger.tensorboard": f"{{_target_:{L}.loggers.TensorBoardLogger,save_dir:PRECIOUS}}",
    "logger.sub": f"{{_target_:{L}.loggers.TensorBoardLogger,sub_dir:../../../precious}}",
    "logger.log": f"{{_target_:{L}.loggers.TensorBoardLogger,log_dir:PRECIOUS}}",
    "logger.wandb": "{_target_:vsa.training.wandb_tracker.WandbTracker,save_dir:PRECIOUS}",
    "logger.wandb2": f"{{_target_:{L}.loggers.WandbLogger,dir:PRECIOUS}}",
    "logger.inner": f"{{_target_:{L}.loggers.WandbLogger,settings:{{files_dir:PRECIOUS}}}}",
    "logger.flow": f"{{_target_:{L}.loggers.MLFlowLogger,tracking_uri:'file:PRECIOUS'}}",
    "trainer.default_root_dir": "PRECIOUS",
    "trainer.profiler": f"{{_target_:{L}.profilers.SimpleProfiler,dirpath:PRECIOUS,filename:metrics}}",
}


@pytest.mark.soak("settings that lead into another run")
@pytest.mark.parametrize("key", OTHER_FOLDERS)
def test_no_object_of_a_run_writes_to_another_run(runs, key):
    message = unharmed(runs, "run=other", "trainer.max_steps=3", f"+{key}={OTHER_FOLDERS[key]}")
    assert message.startswith(key)
    assert re.search(
        r"precious.*(: everything is written to the run folder, .*/other: leave it out|leads out)", message
    )


@pytest.mark.soak("settings that lead into another run")
def test_an_experiment_file_cannot_either(runs, command_line, tmp_path):
    folder = runs.folder("precious")
    (tmp_path / "experiment").mkdir()
    before = contents(runs.output)
    nodes = {
        "callbacks.": {"callbacks": {"checkpoint": {"run_dir": str(folder)}}},
        "hydra.": {"hydra": {"output_subdir": str(folder)}},
        "overwrite=true stands in a file": {"run_dir": str(folder), "overwrite": True},
    }
    for name, node in nodes.items():
        (tmp_path / "experiment" / "shared.yaml").write_text("# @package _global_\n" + yaml.safe_dump(node))
        words = (f"--config-dir={tmp_path}", "experiment=shared", f"output_dir={runs.output}", "run=other")
        status, _, err = command_line("train", *TINY_OVERRIDES, *words, "dry_run=true")
        assert status == 1, name
        assert [line for line in err.splitlines() if line.startswith(f"error: {name}")], err
    assert contents(runs.output) == before


@pytest.mark.soak("settings that lead into another run")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run=../other"], "run=../other is not a name"),
        (["name=a/../../b"], "name=a/../../b is not a name"),
        (["run=/tmp/x"], "run=/tmp/x is not a name"),
        (["run=."], "run=. is not a name"),
        (["name=.."], "name=.. is not a name"),
        (["run='a\x1b[2Jb'"], "is not a name"),
        (["run=' '"], "is not a name"),
        # a folder of its own beside a name that is none
        (["run=..", "run_dir=OUTPUT/x"], "run=.. is not a name"),
        (["run=link"], "is a symbolic link to"),
        (["run=link", "ckpt_path=last"], "is a symbolic link to"),
        (["run=link", "overwrite=true"], "is a symbolic link to"),
        (["output_dir=PRECIOUS"], "is inside a run"),
        (["run_dir=PRECIOUS/checkpoints/mine"], "is inside a run"),
        (["run=linked", "ckpt_path=last", "trainer.max_steps=3"], "has a link out of it"),
    ],
)
def test_names_and_links_lead_to_no_other_run(runs, settings, message):
    link, linked = runs.folder("link"), runs.folder("linked")
    link.symlink_to(runs.folder("precious"))
    # a run from elsewhere whose checkpoints are those of another one
    linked.mkdir()
    shutil.copy(runs.folder("precious") / "run.json", linked)
    (linked / "checkpoints").symlink_to(runs.folder("precious") / "checkpoints")
    try:
        assert message in unharmed(runs, *(text.replace("OUTPUT", str(runs.output)) for text in settings))
    finally:
        link.unlink()
        shutil.rmtree(linked)


@pytest.mark.soak("settings that lead into another run")
def test_a_sweep_writes_to_no_run(runs, command_line, monkeypatch):
    monkeypatch.chdir(runs.output.parent)
    before = contents(runs.output.parent)
    outer = runs.output / "pretrain"
    for words, message in (
        ((f"output_dir={outer}", "name=precious"), "is inside a run"),
        ((f"output_dir={outer}", "name=../pretrain/precious"), "is not a name"),
        (("output_dir=",), "output_dir= is not a folder"),
    ):
        status, _, err = command_line("train", "-m", *TINY_OVERRIDES, "run=a,b", *words)
        assert status == 1
        assert message in err
        assert contents(runs.output.parent) == before


EMPTY = {
    "output_dir": "",
    "name": "",
    "run": "",
    "run_dir": "",
    "ckpt_path": "",
    "init_from": "",
    "data.root": "data=folder",
    "data.videos": "data=toy",
    "data.drop": "data=folder",
    "data.sources": "data=folder",
    "data.urls": "data=stream",
    "data.codec.source": "data=wan",
    "attention.tuned": "attention=sparge",
}


@pytest.mark.parametrize("key", EMPTY)
def test_an_unset_variable_is_no_place(runs, key):
    value = "{films:{root:''}}" if key == "data.sources" else ""
    groups = [EMPTY[key]] if EMPTY[key] else []
    with pytest.raises(ValueError, match=rf"(^|; ){key}=.* is (empty: |not a (name|folder): )"):
        check_settings(composed_with(*groups, f"++{key}={value}"))


def test_an_empty_caption_is_one():
    cfg = composed_with("task=distill", "task.negative_prompt=''", "init_from=x")
    check_settings(cfg)


def test_toy_clips_are_not_rendered_into_a_run(runs):
    for where in (("data.root=PRECIOUS", "data.videos=PRECIOUS/videos"), ("data.root=OUT", "data.videos=PRECIOUS")):
        overrides = [text.replace("OUT", str(runs.output / "shards")) for text in where]
        message = unharmed(runs, "run=other", "data=toy", "~data.toy.size", "~data.toy.count", *overrides)
        assert re.match(r"data\.(root|videos)=.*precious.* is inside a run", message)


SHARDS = ("data=folder", "~data.toy.size", "~data.toy.count")


@pytest.mark.parametrize(
    "settings",
    [
        (*SHARDS, "data.root=PRECIOUS/checkpoints"),
        (*SHARDS, "data.root=OUT/link/checkpoints"),
        ("init_from=PRECIOUS",),
    ],
    ids=lambda settings: settings[-1],
)
def test_what_the_run_is_to_read_is_not_removed(runs, settings):
    folder = runs.folder("precious")
    link = runs.output / "link"
    if not link.exists():
        link.symlink_to(folder)
    settings = [text.replace("OUT", str(runs.output)).replace("PRECIOUS", str(folder)) for text in settings]
    message = unharmed(runs, "run=precious", "overwrite=true", *settings)
    assert message == f"overwrite=true cannot remove {folder}: the run is to read {settings[-1]}"


def composed_with(*overrides: str):
    return composed("trainer.accelerator=cpu", *overrides)


def test_a_private_class_is_no_setting():
    # this one starts a process
    with pytest.raises(ValueError, match=r"x\._target_=vsa\.sweeps\.job_queue\._Running is not allowed"):
        check_targets({"x": {"_target_": "vsa.sweeps.job_queue._Running"}})


# every constructor that a config may name


def writers() -> Iterator[type]:
    """Callbacks, loggers and profilers that a config may build, wherever they are defined, and the trainer."""
    import vsa.training

    kinds = (lightning.pytorch.Callback, lightning.pytorch.loggers.Logger, lightning.pytorch.profilers.Profiler)
    for package in (
        vsa.training,
        *(getattr(lightning.pytorch, name) for name in ("callbacks", "loggers", "profilers")),
    ):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(found.name)).values():
                if isinstance(value, type) and issubclass(value, kinds) and value.__module__ == found.name:
                    yield value
    yield Trainer


def read_by_config() -> Iterator[type]:
    """Classes of this project that stand in the files of the config groups."""
    for path in sorted(CONFIGS.rglob("*.yaml")):
        for name in re.findall(r"_target_: (vsa\.[\w.]+)", path.read_text()):
            yield target_class(name)


def names_a_place(name: str, hint: object) -> bool:
    text = rf"(^|_)(dir|dirpath|directory|folder|path|root|file|filename|uri|urls?|place|source|out|storage){'$'}"
    return (re.search(text, name) is not None or "Path" in str(hint)) and "Literal" not in str(hint)


WRITTEN_BELOW = {"filename", "sub_dir"}
"""Names of files in the folder of their object; they may not leave it."""

READ = {
    "LatentDataModule.root",
    "StreamDataModule.urls",
    "StreamDataModule.val_urls",
    "WanVAE.source",
    "UMT5Encoder.source",
}
"""What is read, and by `data.toy` written where nothing is yet."""


def test_every_argument_that_names_a_place_is_known():
    from vsa.places import OWN_FOLDER, PLACE

    unknown, seen = set(), set()
    for cls in {*writers(), *read_by_config()}:
        for name, parameter in arguments_of(cls).items():
            key = f"{cls.__name__}.{name}"
            seen.add(key)
            if names_a_place(name, parameter.annotation) and not (PLACE.fullmatch(name) or name in WRITTEN_BELOW):
                unknown.add(key)
            if name in OWN_FOLDER:
                assert PLACE.fullmatch(name)
    assert unknown == {key for key in READ if key in unknown}
    # controls: what the list is about is looked at
    assert {"Checkpointing.run_dir", "CSVLogger.save_dir", "SimpleProfiler.dirpath", "Trainer.default_root_dir"} <= seen
    assert {"ModelCheckpoint.dirpath", "StepProfile.run_dir", "LatentDataModule.root", "WanVAE.source"} <= seen
