"""Typed words may do all; files, which may come from others, read no environment, name no server, build little."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from lightning.pytorch.callbacks import Callback, ModelSummary, RichProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.profilers import Profiler, XLAProfiler
from lightning.pytorch.trainer import Trainer
from omegaconf import OmegaConf

from tests.shard_server import serve
from tests.tiny_runs import make_config, write_run
from tests.training.test_places import names_a_place, read_by_config, writers
from vsa import trust
from vsa.config import _SettingsCheck, check_targets
from vsa.config_files import config_folder
from vsa.data.remote import expand_urls
from vsa.evaluation.follow import held_out_prompts
from vsa.places import leaves, misplaced
from vsa.sampling.first_frames import held_out_frames
from vsa.sampling.pipeline import load_run
from vsa.settings import hints_of
from vsa.training.hydra_guard import open_hydra
from vsa.training.model_sizes import fill_model
from vsa.training.train import _check_precision
from vsa.trust import refuse_untyped

L = "lightning.pytorch"
SECRET = "c4n4ry-0f-a-k3y"
GLOBAL = "# @package _global_\n"
STREAM = GLOBAL + "defaults:\n  - override /data: stream\n"


@pytest.fixture(autouse=True)
def in_environment(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)


def written(folder: Path, text: str, group: str = "experiment") -> Path:
    (folder / group).mkdir(exist_ok=True)
    (folder / group / "shared.yaml").write_text(text)
    return folder


def composed_from(folder: Path, text: str, *words: str, group: str = "experiment") -> tuple[Any, Any]:
    """The loader and the config of a command line that chooses a file of others."""
    hydra = open_hydra(str(config_folder()), str(written(folder, text, group)))
    words = (f"{group}=shared", *words)
    return hydra.config_loader, hydra.compose_config("train", [*words], RunMode.RUN, from_shell=False)


READING = {
    "a value": ("data: {urls: 'https://author.example/${oc.env:MY_API_KEY}/x.tar'}", "data.urls"),
    "a resolver named by a setting": ("name: env\nrun: '${oc.${name}:MY_API_KEY}'", "run"),
    "within a resolver": ("run: '${oc.decode:${oc.env:MY_API_KEY}}'", "run"),
    "a resolver of Hydra": ("run: '${now:%Y}'", "run"),
    "a key": ("'${oc.env:MY_API_KEY}': 1", "${oc.env:MY_API_KEY}"),
    "a list of defaults": ("defaults:\n  - override /data: ${oc.env:MY_API_KEY}", "data"),
    "a file of the defaults": ("defaults:\n  - data/${oc.env:MY_API_KEY}", "defaults.0"),
    "what is left of an escape": ("run: '\\${oc.env:MY_API_KEY}'", "run"),
    "a merge": ("a: &a {run: '${oc.env:MY_API_KEY}'}\nlogger: {<<: *a}", "a.run"),
    "an item of a list": (
        "callbacks: {samples: {prompts: [a, '${oc.env:MY_API_KEY}']}}",
        "callbacks.samples.prompts.1",
    ),
}


@pytest.mark.parametrize("way", READING)
def test_a_file_reads_no_environment(tmp_path, way):
    text, key = READING[way]
    loader: Any = open_hydra(str(config_folder()), str(written(tmp_path, GLOBAL + text))).config_loader
    message = rf"config file .*shared.yaml: {re.escape(key)}=.*: a file may refer to other settings only, as in "
    with pytest.raises(ValueError, match=message + r"\$\{KEY\}; if you trust it, type "):
        loader.repository.load_config("experiment/shared")


def test_the_word_to_type_is_told_for_files_of_groups(tmp_path):
    loader: Any = open_hydra(str(config_folder()), str(written(tmp_path, "root: ${oc.env:HOME}", "data"))).config_loader
    with pytest.raises(ValueError, match=r"""type 'data\.root="\$\{oc\.env:HOME\}"'$"""):
        loader.repository.load_config("data/shared")


def test_a_file_may_refer_to_other_settings(tmp_path):
    text = GLOBAL + "name: a\nrun: '${name}-${data.${name}.x}: {b}'\n"
    loader: Any = open_hydra(str(config_folder()), str(written(tmp_path, text))).config_loader
    assert loader.repository.load_config("experiment/shared").config.name == "a"


URL = "https://author.example/x-{0..3}.tar"


def test_a_server_has_to_be_typed(tmp_path):
    with pytest.raises(ValueError) as caught:
        composed_from(tmp_path, STREAM + f"data: {{urls: '{URL}'}}")
    assert str(caught.value) == (
        f"data.urls={URL}: a file may not name a server; if you trust it, type 'data.urls=\"{URL}\"'"
    )
    # as the message says, also with what the environment has; a file may pass it on
    typed = 'data.urls="https://mine.example/${oc.env:MY_API_KEY}/x.tar"'
    _, cfg = composed_from(tmp_path, STREAM + f"data: {{urls: '{URL}', val_urls: '${{data.urls}}'}}", typed)
    assert cfg.data.val_urls == cfg.data.urls == f"https://mine.example/{SECRET}/x.tar"


def test_a_typed_mapping_vouches_for_its_own_keys_alone(tmp_path):
    text = GLOBAL + f"logger: {{x: {{_target_: {L}.loggers.CSVLogger, name: a}}}}\n"
    with pytest.raises(ValueError, match=r"^logger\.x\.save_dir=b: a file may not set save_dir of CSVLogger; if you"):
        composed_from(tmp_path, text.replace("name: a", "save_dir: b"), "logger={x: {name: c}, csv: null}")


@pytest.mark.slow
def test_no_server_is_put_together_from_what_was_not_typed(tmp_path):
    text = "trainer: {max_time: 'https:'}\nlogger: {csv: {root_dir: '//author.example'}}\n"
    text += "data: {urls: '${trainer.max_time}${logger.csv.root_dir}/x.tar'}"
    with pytest.raises(ValueError, match=r"^data\.urls=https://author\.example/x\.tar: a file may not name a server"):
        composed_from(tmp_path, STREAM + text)


@pytest.mark.parametrize("pattern", ["{https,x}://author.example", r"\https:\//author.example", "{s3,x}:{/,x}/a"])
def test_no_braces_make_a_server_of_a_path(pattern):
    # a setting in which nobody sees one
    with pytest.raises(ValueError, match=r"^data\.urls.*(braces stand for numbers of shards|expected a path or a URL)"):
        expand_urls("data.urls", ["a.tar", pattern])
    assert expand_urls("data.urls", ["https://a.example/{0..1}.tar", "b"])[-1] == "https://a.example/1.tar"


def test_hydra_is_given_no_environment_by_a_file(tmp_path):
    text = GLOBAL + "hydra: {job: {env_copy: [MY_API_KEY]}}\nrun: '${hydra.job.env_set.MY_API_KEY}'\n"
    with pytest.raises(ValueError, match=r"^hydra\.job\.env_copy=\['MY_API_KEY'\] stands in a file"):
        composed_from(tmp_path, text)


@pytest.mark.slow
def test_hydra_is_given_what_is_typed(tmp_path):
    # control
    _, cfg = composed_from(tmp_path, GLOBAL, "hydra.job.env_copy=[MY_API_KEY]")
    assert cfg.hydra.job.env_set.MY_API_KEY == SECRET


def test_words_of_a_sweep_file_are_not_typed(tmp_path):
    words = "variants:\n  a: ['data=stream', 'data.urls=https://author.example/x.tar']\n"
    with pytest.raises(ValueError, match=r"^sweep\.variants\.a\.1=data\.urls=https://.* may not name a server"):
        composed_from(tmp_path, words, group="sweep")
    # neither is what they hide, nor what replaces a typed word
    typed = "data.urls=https://mine.example/x.tar"
    hidden = "variants:\n  a: ['++logger.csv.name=\\\\${trainer.max_time}//author.example/x']\n"
    loader, cfg = composed_from(tmp_path, hidden, typed, "++logger.csv.name=https://mine.example", group="sweep")
    own = ["data=stream", typed, "++logger.csv.name=https:${logger.csv.root_dir}", "++logger.csv.root_dir=//author"]
    with pytest.raises(ValueError, match=r"^logger\.csv\.name=https://author: a file may not name a server"):
        loader.load_sweep_config(cfg, own)
    assert loader.load_sweep_config(cfg, own[:2]).data.urls == "https://mine.example/x.tar"
    # the same text under another key, and a part of what was typed, were not typed either
    for word in ("logger.csv.name=https://mine.example/x.tar", "data.urls=https://mine.example"):
        with pytest.raises(ValueError, match=r"=https://mine\.example.*: a file may not name a server"):
            loader.load_sweep_config(cfg, ["data=stream", word])
    several = ["data=stream", f"{typed},https://two.example/x.tar"]
    loader = open_hydra(str(config_folder())).config_loader
    cfg = loader.load_configuration("train", several, RunMode.MULTIRUN)
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create(config_loader=loader).parse_overrides(several), None)
    urls = [loader.load_sweep_config(cfg, job).data.urls for job in jobs]
    assert urls == ["https://mine.example/x.tar", "https://two.example/x.tar"]


ESCAPED = r"init_from=$\{oc.env\:MY_API_KEY\}"


def test_references_that_words_of_a_sweep_file_escape_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    # the control: a typed one is resolved
    typed = open_hydra(str(config_folder())).compose_config("train", [ESCAPED], RunMode.RUN, from_shell=False)
    assert typed.init_from == SECRET
    loader, cfg = composed_from(tmp_path, f"variants:\n  a: ['{ESCAPED}']\n", group="sweep")
    for word in (ESCAPED, r"data.drop=$\{run\}$\{oc.env\:MY_API_KEY\}", r"+task.note={a:$\{oc.env\:MY_API_KEY\}}"):
        with pytest.raises(ValueError, match=r"a file may refer to other settings only") as refusal:
            loader.load_sweep_config(cfg, [word])
        assert SECRET not in str(refusal.value)


@pytest.mark.slow
def test_the_environment_is_not_read_when_words_of_a_sweep_are_composed(tmp_path):
    text = "variants:\n  a: ['data.drop=${run}{oc.env:MY_API_KEY}']\n"
    with pytest.raises(
        ValueError, match=r"^sweep\.variants\.a\.0=data\.drop=\$\{oc\.env:MY_API_KEY\}: a file may refer"
    ):
        composed_from(tmp_path, text, "run='$'", group="sweep")


@pytest.mark.slow
@pytest.mark.parametrize("typed", [False, True])
def test_a_run_sends_no_secret_to_the_author_of_a_file(command_line, tmp_path, typed):
    with serve(tmp_path) as server:
        urls = f'"{server.url}/${{oc.env:MY_API_KEY}}/latents-C16x2x2x4-00000.tar"'
        written(tmp_path, STREAM + ("" if typed else f"data: {{urls: {urls}}}\n"))
        words = [f"--config-dir={tmp_path}", "experiment=shared", f"output_dir={tmp_path}/out"]
        own = ["trainer.accelerator=cpu", "callbacks.samples=null", *([f"data.urls={urls}"] if typed else [])]
        status, _, err = command_line("train.py", *words, *own)
        assert status == 1
        assert SECRET not in err
        # the control: what was typed is asked for
        assert bool(server.asked) == typed, err


@pytest.mark.parametrize("key", ["model", pytest.param("data", marks=pytest.mark.slow)])
def test_stored_settings_read_no_environment(tmp_path, monkeypatch, key):
    # as large as the run needs it, so that nothing else is wrong
    monkeypatch.setenv("MY_WIDTH", "64")
    config, reading = make_config(), "${oc.decode:${oc.env:MY_WIDTH}}"
    if key == "model":
        config["model"]["text_dim"] = reading
    else:
        config["data"]["text_encoder"]["dim"] = reading
    run = write_run(tmp_path / "run", config=config)
    with pytest.raises(ValueError, match=r"_?dim=\$\{oc\.decode:.*: a file may refer to other settings only"):
        load_run(run, device="cpu")
    if key == "model":
        cfg = {"ckpt_path": None, "model": {"_target_": config["model"]["_target_"], "sizes_from": str(run)}}
        with pytest.raises(
            ValueError, match=r"^model\.text_dim=\$\{oc\.decode:.*: a file may refer to other settings only"
        ):
            fill_model(OmegaConf.create(cfg))
    # control
    assert load_run(write_run(tmp_path / "control"), device="cpu").text_encoder.dim == 64


def test_a_stored_run_names_no_server_but_one_that_is_typed(tmp_path, monkeypatch):
    with serve(tmp_path) as server:
        urls = f"{server.url}/latents-C16x2x2x4-00000.tar"
        data = {"_target_": "vsa.data.stream_datamodule.StreamDataModule", "batch_size": 1, **make_config()["data"]}
        data = {name: value for name, value in data.items() if name != "toy"}
        for use in (
            lambda config: held_out_prompts(config, 1),
            lambda config: held_out_frames(config)(["a"], (16, 2, 2, 4)),
        ):
            with pytest.raises(ValueError, match=rf"^data\.urls={urls}: a stored config may not name a server"):
                use({"data": {**data, "urls": urls}})
            # control: a folder is looked for
            with pytest.raises(ValueError, match=r"index\.json"):
                use({"data": {**data, "urls": f"{tmp_path}/latents-C16x2x2x4-00000.tar"}})
        folder, author = f"{server.url}/mine", "https://author.example/x.tar"
        monkeypatch.setenv("VSA_TRUST", f"s3://bucket {folder}")
        refused = pytest.raises(ValueError, match="a stored config may not name a server")
        for other in (
            f"{folder}s/x.tar",
            f"{server.url}/x.tar",
            author,
            f"{folder}/x.tar::{author}",
            f"{folder}/../x.tar",
        ):
            with refused:
                held_out_prompts({"data": {**data, "urls": other}}, 1)
        assert not server.asked
        # the typed one is asked, and has no shards
        with pytest.raises(ValueError, match=r"index\.json"):
            held_out_prompts({"data": {**data, "urls": [f"{folder}/x-{{00000..00001}}.tar"]}}, 1)
        assert server.asked


@pytest.mark.parametrize(
    ("key", "target", "message"),
    [
        ("callbacks.x", "vsa.training.optimizer.AdamW", "expected a Callback"),
        ("callbacks.x", f"{L}.loggers.CSVLogger", "expected a Callback"),
        ("logger.x", "vsa.checkpoints.run_folder.RunFolder", "expected a Logger"),
        ("data", f"{L}.loggers.CSVLogger", "a config may build classes of vsa and lightning only"),
        ("data.codec", f"{L}.loggers.CSVLogger", "a config may build classes of vsa and lightning only"),
        ("task", "vsa.models.video_dit.VideoDiT", "expected a LightningModule"),
    ],
)
def test_a_class_fits_its_place(key, target, message):
    config: dict[str, Any] = {"_target_": target}
    for name in reversed(key.split(".")):
        config = {name: config}
    with pytest.raises(ValueError, match=rf"^{key}\._target_={target} is not allowed: {message}"):
        check_targets(config)


# what a file may give to the classes that it may build

HOSTILE: dict[str, Any] = {
    "a server": "https://author.example/x",
    "a store": "s3://author/x",
    "a database": "mysql://author.example/x",
    "a class": {"_target_": "os.system", "command": "true"},
    "a class of Lightning": {"_target_": f"{L}.loggers.WandbLogger", "settings": {"base_url": "author.example"}},
    "classes": [{"x": {"_target_": f"{L}.profilers.XLAProfiler", "port": 9012}}],
}
OUTSIDE = {"above": "../../elsewhere", "a root": "/elsewhere/x", "a home": "~/x"}
SETTINGS = {"settings": {"base_url": "author.example", "http_proxy": "author.example:3128"}}
HOSTS = {"a host": "author.example", "a port": 9012, "an address": "author.example:9012"}
NAMES = re.compile(
    r"(^|_)(ur[il]s?|host(name)?s?|servers?|addr(ess)?(es)?|prox(y|ies)|ports?|endpoints?|domain|registry|kwargs)(_|$)"
)
"""Names of arguments that name servers, or that are given on to something which has such arguments."""

PATHS = {"StreamDataModule.urls", "StreamDataModule.val_urls"}
"""Where a text without :// is a path."""

RUN_DIR = "outputs/a/b"


def admits(cls: type, settings: dict[str, Any]) -> bool:
    """Whether a file may build an object of a class with these settings, as far as a run checks it."""
    kinds = ((Callback, "callbacks.x"), (Logger, "logger.x"), (Trainer, "trainer"), (Profiler, "trainer.profiler"))
    key = next((key for kind, key in kinds if issubclass(cls, kind)), "data.x")
    node = whole = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **settings}
    for name in reversed(key.split(".")):
        whole = {name: whole}
    check = _SettingsCheck()
    try:
        refuse_untyped([*leaves(whole)], lambda key: False)
        check_targets(whole)
        check.node(key, node, node)
        _check_precision(settings.get("precision", 32))
    except ValueError:
        return False
    if not key.startswith("data"):
        check.refused |= misplaced(key, node, RUN_DIR)
    return not check.problems()


def openings(classes: Iterable[type]) -> Iterator[str]:
    """Arguments with which a file may name a server, a proxy, a place outside of the run or a class of others."""
    for cls in classes:
        foreign, hints = not cls.__module__.startswith("vsa."), dict(hints_of(cls))
        allowed = trust.FOREIGN.get(cls.__name__, ()) if foreign else ()
        for name in {*hints, *allowed} - {"**"}:
            key, values = f"{cls.__name__}.{name}", dict(HOSTILE)
            if foreign or (issubclass(cls, Callback | Logger) and names_a_place(name, hints[name])):
                values |= OUTSIDE
            values |= SETTINGS if foreign else {}
            values |= HOSTS if NAMES.search(name) and key not in PATHS else {}
            yield from (f"{key}: {what}" for what, value in values.items() if admits(cls, {name: value}))


def test_no_argument_that_a_file_may_give_leads_out():
    assert sorted(openings({*writers(), *read_by_config()})) == []


@pytest.mark.parametrize(
    ("cls", "argument", "what"),
    [
        (WandbLogger, "settings", "settings"),
        (XLAProfiler, "port", "a port"),
        (RichProgressBar, "console_kwargs", "settings"),
        (Trainer, "model_registry", "a host"),
        (ModelSummary, "summarize_kwargs", "settings"),
    ],
)
def test_a_class_or_an_argument_more_would_lead_out(monkeypatch, cls, argument, what):
    # control
    assert list(openings([cls])) == []
    more = {cls.__name__: (*trust.FOREIGN.get(cls.__name__, ()), argument)}
    monkeypatch.setattr(trust, "FOREIGN", {**trust.FOREIGN, **more})
    assert f"{cls.__name__}.{argument}: {what}" in set(openings([cls]))
