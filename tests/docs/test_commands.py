"""What the pages and the experiments say to run parses, and composes to settings that fit together."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from functools import cache
from typing import Any

import pytest
import torch
import typer
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.docs.pages import EXPERIMENTS, PAGES, ROOT, Command, commands, commands_of, header_commands, prose
from vsa.checkpoints.wan_config import transformer_config
from vsa.cli import COMMANDS, app
from vsa.config import Sweep, check_settings, model_factory
from vsa.sweeps.points import variants_of
from vsa.training import hydra_guard

ELSEWHERE = {
    *("pip", "source", "cd", "export", "git", "ls", "nvidia-smi", "sbatch", "squeue", "scancel", "kill", "tensorboard"),
    *("curl", "tar", "unzip", "rsync", "open", "xdg-open", "jupyter", "docker", "wandb", "hf", "apt-get", "sudo"),
}
"""Programs that are not ours: their arguments are not looked at."""

TRAININGS = [c for c in commands() if c.trains]
SWEEPS = [c for c in commands() if c.words[:2] == ("vsa", "sweep")]
OURS = [c for c in commands() if c.words[0] == "vsa" and c.words[1:2] not in (("train",), ("sweep",))]
MODULES = [c for c in commands() if c.words[0] in ("python", "python3") and not c.trains]
OTHERS = [c for c in commands() if c not in (*TRAININGS, *SWEEPS, *OURS, *MODULES)]


OF_WEIGHTS = ("model=from_checkpoint", "model=diffusers")


@cache
def composed(*overrides: str) -> Any:
    # the weights that have the sizes are not here
    cfg = hydra_guard.composed(*(word for word in overrides if word not in OF_WEIGHTS))
    check_settings(cfg)
    return cfg


def settings_of(words: list[str]) -> list[str]:
    """The settings among the arguments of a training, the first value of those that a sweep varies.

    Flags must be Hydra's. Settings of Hydra itself are left out: its plugins are extras.
    """
    settings = []
    for override in OverridesParser.create().parse_overrides(get_args_parser().parse_intermixed_args(words).overrides):
        if override.key_or_group.startswith("hydra"):
            continue
        if not override.is_sweep_override():
            settings.append(override.input_line)
        elif isinstance(sweep := override.value(), IntervalSweep):
            settings.append(f"{override.key_or_group}={sweep.start}")
        else:
            settings.append(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
    return settings


class Parsed(Exception):
    """Ends a program once its arguments have been parsed."""


@pytest.fixture
def only_parse(monkeypatch):
    """Run `python -m MODULE ARGUMENTS` as far as its arguments are parsed."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parse(*args, original=original, **kwargs):
            original(*args, **kwargs)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)

    def run(module: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        runpy.run_module(module, run_name="__main__", alter_sys=False)

    return run


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("command", MODULES, ids=str)
def test_modules_take_their_arguments(command, only_parse):
    flag, *words = command.words[1:]
    name, arguments = (words[0], words[1:]) if flag == "-m" else (flag.removesuffix(".py").replace("/", "."), words)
    if name in ("venv", "pytest", "pip", "http.server", "mkdocs"):
        return
    with pytest.raises(Parsed):
        only_parse(name, *arguments)
    # control
    with pytest.raises(SystemExit):
        only_parse(name, *arguments, "--no-such-option")


@pytest.mark.parametrize("command", OURS, ids=str)
def test_our_commands_parse(command):
    if command.words[1] == "--help":
        return
    name, *arguments = command.words[1:]
    group = typer.main.get_command(app)
    parser = group.get_command(group.make_context("vsa", ["x"]), name)
    context = parser.make_context(name, [word for word in arguments if word != "--help"])
    if "settings" in context.params:
        # those of a training, and flags of Hydra
        composed(*settings_of(context.params["settings"] or []))
    # control: refused by its name, or by Hydra with status 2
    with pytest.raises(BaseException, match=r"--no-such-option|^2$"):
        settings_of(parser.make_context(name, [*arguments, "--no-such-option"]).params["settings"])


@pytest.mark.parametrize("command", TRAININGS, ids=str)
def test_trainings_compose_and_fit_the_ranks_they_start(command):
    cfg = composed(*settings_of(command.settings))
    job = next((job for job in ("finetune", "distill") if f"experiment={job}" in str(command)), "pretrain")
    assert cfg.task._target_ == f"vsa.training.modules.{job}.{job.title()}Module"
    trainer, ranks, own_nodes = cfg.trainer, 1, cfg.trainer.get("num_nodes", 1)
    if "torchrun" in command.words:
        numbers = dict(re.findall(r"--(nnodes|nproc-per-node)[ =](\d+)", str(command)))
        nodes = int(numbers.get("nnodes", 1))
        ranks = nodes * int(numbers.get("nproc-per-node", 1))
        # lightning refuses its world otherwise
        assert own_nodes == nodes
    elif trainer.devices != "auto":
        ranks = trainer.devices * own_nodes
    assert cfg.data.batch_size % (trainer.accumulate_grad_batches * ranks) == 0
    assert trainer.val_check_interval % trainer.accumulate_grad_batches == 0


@pytest.mark.parametrize("command", SWEEPS, ids=str)
def test_sweeps_have_points_that_compose(command):
    name, *words = command.words[2:]
    overrides = settings_of(words)
    has_overrides = overrides != [word for word in words if not word.startswith("hydra")]
    cfg = composed(f"sweep={name}", *overrides)
    points = variants_of(Sweep(**{"name": name, **OmegaConf.to_container(cfg.sweep)}), {})
    assert len(points) > 1 or has_overrides
    # another seed composes as the first one does
    for own in {tuple(word for word in point.overrides if not word.startswith("seed=")) for point in points}:
        composed(*overrides, *own)


@pytest.mark.parametrize("setting", ["sweep=no-such-sweep", "no_such_key=1", "optim.lr=-1", "optim.no_such_key=1"])
def test_a_wrong_setting_does_not_compose(setting):
    with pytest.raises((HydraException, ValueError), match=setting.partition("=")[0].rpartition(".")[2]):
        composed(setting)


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_other_programs_are_known(command):
    program, *words = command.words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
        assert set(words) <= targets
    elif program in ("srun", "torchrun", "nohup"):
        pytest.fail(f"{program} starts something that is not looked at: {command}")
    elif "/" in program:
        assert (ROOT / program).is_file() or program.startswith(".venv/bin/"), command
    else:
        assert program in ELSEWHERE, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_in_sentences_exist(page):
    group = typer.main.get_command(app)
    context = group.make_context("vsa", ["x"])
    for text in re.findall(r"`vsa ([^`]+)`", prose(page)):
        name, *words = text.split()
        if name in ("--help", "COMMAND", "train", "sweep"):
            continue
        assert name in COMMANDS, text
        options = {option for parameter in group.get_command(context, name).params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= {*options, "--help"}, text


def test_make_targets_in_sentences_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    mentions = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", prose(page))}
    assert {"demo", "test", "soak"} <= mentions <= targets


def test_models_of_own_videos_can_be_exported():
    own = [
        c.settings for c in TRAININGS if "experiment=own_videos" in c.words and not {"-m", "--multirun"} & set(c.words)
    ]
    assert own
    exportable = []
    for settings in (*own, ["experiment=quickstart"]):
        with torch.device("meta"):
            model = model_factory(composed(*settings))()
        try:
            exportable.append(transformer_config(model)["_class_name"])
        except ValueError as error:
            exportable.append(str(error))
    assert set(exportable[:-1]) == {"WanTransformer3DModel"}
    # the toy's models place shapes on a small grid, and their recorded losses belong to it
    assert exportable[-1].endswith("it needs model.absolute_positions=false")


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_says_how_to_run_it(path):
    assert any(c.trains and f"experiment={path.stem}" in c.words for c in header_commands(path))


def test_there_are_commands_to_check():
    assert MODULES
    assert len(SWEEPS) >= 2
    assert {c.words[1] for c in OURS} >= {
        "encode",
        "sample",
        "evaluate",
        "verify-export",
        "latents",
        "convert",
        "merge",
    }
    for words in (
        "vsa train experiment=quickstart",
        "experiment=own_videos",
        "torchrun.*experiment=finetune",
        "torchrun.*experiment=distill",
    ):
        assert any(re.search(words, str(c)) for c in TRAININGS), words


def test_commands_are_read_as_a_shell_reads_them():
    script = (
        "W=org/name  # a hub id\nA=1 vsa train init_from=$W \\\n  run=x && vsa info | cat\nmake demo  # all of it\n"
    )
    assert [c.words for c in commands_of(script, "page")] == [
        ("vsa", "train", "init_from=org/name", "run=x"),
        ("vsa", "info"),
        ("cat",),
        ("make", "demo"),
    ]
    assert Command(("torchrun", "--nnodes", "2", "train.py", "a=b"), "page").settings == ["a=b"]
