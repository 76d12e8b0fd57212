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
import torch
import yaml
from lightning.pytorch.trainer import Trainer
from safetensors.torch import save_file

from tests.tiny_runs import CONFIGS, TINY_OVERRIDES, TinyTraining
from vsa.attention.sparge.tuned import HeadSettings, Tuned
from vsa.config import check_settings, check_targets, target_class
from vsa.settings import arguments_of
from vsa.training.hydra_guard import composed
from vsa.training.launch import launch

L = "lightning.pytorch"
LOW_RANK = (("A", (2, 12)), ("B", (12, 2)))
TUNED_FOR = {
    "layers": 2,
    "heads": 1,
    "head_dim": 12,
    "q_tokens": 16,
    "kv_tokens": 8,
    "order": "hilbert",
    "keeps_sum": True,
}
TUNED = ("attention.q_tokens=16", "attention.kv_tokens=8", "attention.tuned=IN")


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


# another spelling of the folder of all runs, and what is told of it; PARENT is the folder above it
OTHER_SPELLINGS = {
    "output_dir=PARENT/missing/../outputs": "output_dir=.*: PARENT/missing is no folder, expected a path without it",
    "output_dir=PARENT/outputs/pretrain/precious/run.json/../../..": "/run.json is no folder, expected",
    "run_dir=PARENT/outputs/missing/../pretrain/precious": "run_dir=.*: PARENT/outputs/missing is no folder,",
    "run_dir=PARENT/outputs/pretrain/precious/missing/..": "run_dir=.*: .*/precious/missing is no folder,",
    "output_dir=missing/../outputs": "output_dir=.*: missing is no folder,",
    "output_dir=loop/outputs": "output_dir=.*: loop is no folder,",
    "output_dir='~/outputs'": "is not a path of this machine",
    "output_dir=file://PARENT/outputs": "is not a path of this machine",
    "output_dir=": "is not a folder|is empty",
    "output_dir=outputs": "already holds checkpoints",
    "output_dir=./outputs//": "already holds checkpoints",
    "output_dir=other/../outputs": "already holds checkpoints",
    "output_dir=once": "already holds checkpoints",
    "output_dir=twice": "already holds checkpoints",
    # the folder above what the link leads to, not that above the link
    "output_dir=link/../../outputs": "already holds checkpoints",
    "run_dir=PARENT//outputs/./pretrain/precious/": "already holds checkpoints",
    "run_dir=PARENT/outputs/pretrain/precious/checkpoints/..": "already holds checkpoints",
    "run_dir=twice/pretrain/precious": "already holds checkpoints",
}


IN_SHORT = ("output_dir=PARENT/missing/../outputs", "output_dir=loop/outputs", "output_dir=link/../../outputs")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=() if s in IN_SHORT else pytest.mark.slow, id=s) for s in OTHER_SPELLINGS],
)
def test_a_run_is_found_under_every_spelling(runs, setting, monkeypatch):
    parent = runs.output.parent
    monkeypatch.chdir(parent)
    (parent / "other" / "inner").mkdir(parents=True)
    for name, target in (("once", "outputs"), ("twice", "once"), ("link", "other/inner"), ("loop", "loop")):
        (parent / name).symlink_to(target)
    try:
        message = unharmed(runs, "run=precious", "trainer.max_steps=3", setting.replace("PARENT", str(parent)))
    finally:
        for name in ("once", "twice", "link", "loop"):
            (parent / name).unlink()
        shutil.rmtree(parent / "other")
    assert re.search(OTHER_SPELLINGS[setting].replace("PARENT", str(parent)), message), message


def test_a_run_goes_where_its_checks_look(training, tmp_path, monkeypatch):
    """The link is followed once: what it leads to later is another place."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("first")

    class Relink(lightning.pytorch.Callback):
        def on_fit_start(self, trainer, pl_module):
            (tmp_path / "link").unlink()
            (tmp_path / "link").symlink_to("second")

    training("output_dir=link", "trainer.max_steps=1", callbacks=(Relink(),))
    assert contents(tmp_path / "second") == {}
    assert (tmp_path / "first" / "pretrain" / "default" / "checkpoints" / "step-00000001").is_dir()


def test_toy_clips_go_where_their_checks_look(runs):
    place = runs.output / "missing" / ".." / "shards"
    words = ("data=toy", "~data.toy.size", "~data.toy.count", f"data.root={place}", f"data.videos={runs.output}/v")
    assert f": {runs.output}/missing is no folder" in unharmed(runs, "run=other", *words)


SHARDS = ("data=folder", "~data.toy.size", "~data.toy.count", "data.root=SHARDS")

# settings with a place IN the run that is started over, and that place
INPUTS = {
    "run": (("init_from=IN",), ""),
    "checkpoint": (("init_from=IN",), "checkpoints/step-00000002"),
    "adapters": (("init_from=BASE+IN",), "adapters"),
    "file of adapters": (("init_from=BASE+IN",), "adapters/a.safetensors"),
    "base of adapters": (("init_from=IN+ADAPTERS",), ""),
    "shards": ((*SHARDS, "data.root=IN"), "shards"),
    "drop list": ((*SHARDS, "data.drop=IN"), "drop.txt"),
    "videos": ((*SHARDS, "data.videos=IN"), "videos"),
    "sources": ((*SHARDS, "data.root=null", "data.sources={a:{root:IN}}"), "shards"),
    "stream": (
        ("data=stream", *SHARDS[1:3], "~data.val_fraction", "data.urls=IN"),
        "shards/latents-C16x2x8x8-00000.tar",
    ),
    "sizes": (("model=from_checkpoint", "model.sizes_from=IN"), ""),
    "teacher": (
        ("task=finetune", "task.gates=required", "init_from=BASE", "task.teacher=IN", "task.objective.velocity=1"),
        "dense",
    ),
    "codec": (("data.codec={_target_:vsa.data.codecs.WanVAE,source:IN}",), "vae"),
    "tuned": (("attention=sparge", "~attention.tile_thw", "attention.allow_training=true", *TUNED), "tuned.json"),
}
SPELLINGS = ("plain", "relative", "slashes", "..", "link", "links", "file links")


@pytest.fixture(scope="module")
def with_inputs(tmp_path_factory) -> Iterator[TinyTraining]:
    """A run `precious` with all kinds of inputs in its folder; a run `base`, shards and adapters beside it."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("inputs") / "outputs", patch)
        parent = training.output.parent
        toy = (f"data.root={parent}/shards", f"data.videos={parent}/videos", "data.toy.count=8")
        training("run=base", "trainer.max_steps=2", "data=toy", *toy)
        run = shutil.copytree(training.folder("base"), training.folder("precious"))
        for name in ("shards", "videos"):
            shutil.copytree(parent / name, run / name)
        (run / "drop.txt").write_text("")
        (run / "adapters").mkdir()
        names = {f"transformer.blocks.0.attn1.to_q.lora_{half}.weight": torch.ones(shape) for half, shape in LOW_RANK}
        save_file(names, run / "adapters" / "a.safetensors")
        shutil.copytree(run / "adapters", parent / "adapters")
        heads = {layer: [HeadSettings(tau=0.9, theta=-1.0)] for layer in range(2)}
        Tuned(**TUNED_FOR, made={}, found=heads).write(run / "tuned.json")
        yield training


def spelled(place: Path, how: str, elsewhere: Path) -> str | None:
    """A path that leads to a place from the working directory `elsewhere`; None if there is none of this kind."""
    if how == "relative":
        return os.path.relpath(place, elsewhere)
    if how == "slashes":
        return f"{place.parent}//./{place.name}{'/' if place.is_dir() else ''}"
    if how == "..":
        return f"{place.parent.parent}/../{place.parent.parent.name}/{place.parent.name}/{place.name}"
    if how in ("link", "links"):
        (elsewhere / "one").symlink_to(place.parent)
        (elsewhere / "two").symlink_to("one")
        return f"{'one' if how == 'link' else 'two'}/{place.name}"
    if how == "file links":
        if not place.is_dir() or place.name not in ("adapters", "shards"):
            return None
        (elsewhere / "own").mkdir()
        for path in place.iterdir():
            (elsewhere / "own" / path.name).symlink_to(path)
        return "own"
    return str(place)


def refused_input(training: TinyTraining, kind: str, how: str, elsewhere: Path) -> None:
    settings, name = INPUTS[kind]
    run, parent = training.folder("precious"), training.output.parent
    # those that take longer
    if kind == "codec" and not (run / name).exists():
        from tests.data.tiny_wan import make_vae

        make_vae().save_pretrained(run / name)
    if kind == "teacher" and not (run / name).exists():
        training("run=dense", "attention=full", "~attention.tile_thw", "trainer.max_steps=1")
        shutil.move(training.folder("dense"), run / name)
    if (place := spelled(run / name, how, elsewhere)) is None:
        pytest.skip(f"no such spelling of {name}")
    names = {"IN": place, "BASE": str(training.folder("base")), "ADAPTERS": f"{parent}/adapters"}
    names["SHARDS"] = f"{parent}/shards"
    words = [re.sub(r"\b(IN|BASE|ADAPTERS|SHARDS)\b", lambda found: names[found[0]], word) for word in settings]
    before = contents(parent)
    with pytest.raises(ValueError, match=rf"^overwrite=true cannot set {run} aside: the run is to read ") as refusal:
        training("run=precious", "overwrite=true", *words)
    # what is named lies in the run
    assert Path(str(refusal.value).rpartition("to read ")[2]).resolve().is_relative_to(run)
    assert contents(parent) == before


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("run", "plain"),
        ("adapters", ".."),
        ("shards", "file links"),
    ],
)
def test_what_a_run_opened_in_its_folder_stays(with_inputs, kind, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused_input(with_inputs, kind, how, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_under_every_spelling(with_inputs, kind, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused_input(with_inputs, kind, how, tmp_path)


@pytest.mark.slow
def test_words_that_look_like_a_path_are_none(with_inputs):
    """A caption that is the run's own folder is no input: the control of the tests above."""
    run = with_inputs.folder("other")
    shutil.copytree(with_inputs.folder("base"), run)
    words = (f"callbacks.samples.prompts=['{run}']", "callbacks.samples.steps=1", "trainer.max_steps=1")
    with_inputs("run=other", "overwrite=true", f"init_from={with_inputs.folder('base')}", *words)
    assert run.with_name("other.1").is_dir()
    for name in ("other", "other.1"):
        shutil.rmtree(with_inputs.folder(name))


def test_configs_in_the_run_are_inputs(with_inputs, command_line):
    run = with_inputs.folder("precious")
    (run / "conf" / "experiment").mkdir(parents=True, exist_ok=True)
    (run / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 3\n")
    before = contents(with_inputs.output.parent)
    words = (*TINY_OVERRIDES, f"output_dir={with_inputs.output}", "run=precious", "overwrite=true", "dry_run=true")
    status, _, err = command_line("train", f"--config-dir={run}/conf", "experiment=mine", *words)
    assert (status, f"error: overwrite=true cannot set {run} aside: the run is to read {run}/conf\n" in err) == (
        1,
        True,
    )
    assert contents(with_inputs.output.parent) == before


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (("seed=1,2",), "default"),
        pytest.param(("run=a", "seed=1,2"), "a", marks=pytest.mark.slow),
        pytest.param(("run=a,b,a",), "a", marks=pytest.mark.slow),
        pytest.param(("run_dir=OUT/pretrain/x/../a,OUT/pretrain/a",), "a", marks=pytest.mark.slow),
        pytest.param(("run_dir=OUT/pretrain/a,OUT/pretrain/a/b",), "a", marks=pytest.mark.slow),
    ],
)
def test_jobs_that_share_a_folder_are_refused_before_the_first(command_line, tmp_path, words, folder):
    out = tmp_path / "out"
    (out / "pretrain" / "x").mkdir(parents=True)
    settings = [*TINY_OVERRIDES, f"output_dir={out}", *(word.replace("OUT", str(out)) for word in words)]
    status, _, err = command_line("train", "-m", *settings)
    assert status == 1
    count = max(word.count(",") for word in words) + 1
    expected = f"error: two of {count} jobs would write to {out}/pretrain/{folder}: name each, such as 'run=s${{seed}}'"
    assert err.splitlines()[-1] == expected
    assert contents(tmp_path).keys() == {"out", "out/pretrain", "out/pretrain/x"}


@pytest.mark.slow
def test_no_job_trains_before_another_one_is_refused(command_line, with_inputs):
    before = contents(with_inputs.output.parent)
    words = (*TINY_OVERRIDES, f"output_dir={with_inputs.output}", "run=new,base")
    status, _, err = command_line("train", "-m", *words)
    assert status == 1
    assert f"run folder {with_inputs.folder('base')} already holds checkpoints" in err
    assert contents(with_inputs.output.parent) == before


def test_jobs_are_named_by_their_own_values(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    folders = []
    words = (*TINY_OVERRIDES, f"output_dir={tmp_path}", "seed=1,2", "run=s${seed}")
    launch(["-m", *words], lambda cfg: folders.append(str(cfg.run_dir)))
    assert folders == [f"{tmp_path}/pretrain/s1", f"{tmp_path}/pretrain/s2"]


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
