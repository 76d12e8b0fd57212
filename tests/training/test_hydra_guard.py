"""Hydra's own nodes run before a job: none of them may bring code along, wherever it comes from."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from vsa.training.hydra_guard import check_hydra, composed

SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
CONSOLE = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}


@pytest.fixture(scope="module")
def plain():
    """The composed config with Hydra's node, open for changes."""
    cfg = composed(with_hydra=True)
    OmegaConf.set_struct(cfg, False)
    return cfg


def with_node(plain, **nodes):
    cfg = plain.copy()
    for name, node in nodes.items():
        merges = name in ("run", "sweep", "job")
        value = OmegaConf.merge(cfg.hydra[name], node) if merges else node
        cfg.hydra[name] = OmegaConf.create(value) if isinstance(value, dict) else value
    # what interpolations may point to
    cfg.evil = {"_target_": "os.system", "command": "true"}
    cfg.by_folder = {"x": {"_target_": "os.system"}}
    return cfg.hydra


def logging_of(handler, **more):
    return {"version": 1, "root": {"handlers": ["x"]}, "handlers": {"x": handler}, **more}


@pytest.mark.parametrize(
    ("nodes", "key"),
    [
        ({"callbacks": {"x": {"_target_": "pathlib.Path.touch", "self": "proof"}}}, "callbacks.x._target_"),
        ({"callbacks": {"x": {"_target_": "vsa.training.callbacks.ema.EMA"}}}, "callbacks.x._target_"),
        ({"callbacks": {"x": "${evil}"}}, "callbacks.x._target_"),
        ({"callbacks": "${by_folder}"}, "callbacks.x._target_"),
        ({"launcher": {"_target_": "os.system", "command": "true"}}, "launcher._target_"),
        ({"launcher": {"_target_": "hydra_plugins.mine.Launcher"}}, "launcher._target_"),
        ({"launcher": {"_target_": OPTUNA}}, "launcher._target_"),
        ({"launcher": "${evil}"}, "launcher._target_"),
        ({"launcher": "${by_folder[${hydra.runtime.output_dir}]}"}, "launcher"),
        ({"launcher": {"_target_": SLURM, "setup": ["touch proof"]}}, r"launcher.setup.0"),
        ({"launcher": {"_target_": SLURM, "partition": "a\ntouch proof #"}}, "launcher.partition"),
        ({"launcher": {"_target_": SLURM, "additional_parameters": {"a\nb": 1}}}, "launcher.additional_parameters"),
        ({"launcher": {"_target_": SLURM, "additional_parameters": {"x": "${evil}"}}}, "additional_parameters.x"),
        ({"launcher": {"_target_": SLURM, "srun_args": ["bash", "-c", "touch proof"]}}, r"launcher.srun_args.0"),
        ({"launcher": {"_target_": SLURM.replace("Slurm", "Local"), "python": "./evil"}}, "launcher.python"),
        *(
            ({"launcher": {"_target_": SLURM, "additional_parameters": {name: "x"}}}, f"additional_parameters.{name}")
            for name in ("export", "expor", "EXPORT_FILE", "wrap", "task_prolog", "task-epi", "comment=x --export")
        ),
        ({"sweeper": {"_target_": "torch.load", "f": "bomb.pt"}}, "sweeper._target_"),
        ({"sweeper": {"_target_": OPTUNA, "sampler": {"_target_": "os.system"}}}, "sweeper.sampler._target_"),
        ({"sweeper": {"_target_": OPTUNA, "custom_search_space": "os.system"}}, "sweeper.custom_search_space"),
        ({"sweeper": {"_target_": OPTUNA, "storage": {"_target_": "os.system"}}}, "sweeper.storage._target_"),
        (
            {
                "sweeper": {
                    "_target_": OPTUNA,
                    "sampler": {"_target_": "optuna.samplers.TPESampler", "gamma": "${evil}"},
                }
            },
            "sweeper.sampler.gamma._target_",
        ),
        ({"job_logging": logging_of({"class": "evil.Handler"})}, "job_logging"),
        ({"job_logging": logging_of({"class": "logging.handlers.SocketHandler"})}, "job_logging"),
        ({"job_logging": logging_of({"()": "evil.make"})}, "job_logging"),
        ({"job_logging": logging_of({**CONSOLE, "stream": "ext://evil.stream"})}, "job_logging"),
        ({"job_logging": logging_of({**CONSOLE, "stream": "cfg://evil"})}, "job_logging"),
        ({"job_logging": logging_of({**CONSOLE, ".": {"x": 1}})}, "job_logging"),
        ({"job_logging": logging_of({"class": "logging.FileHandler", "filename": "/home/me/.bashrc"})}, "job_logging"),
        (
            {"job_logging": logging_of({"class": "logging.FileHandler", "filename": "x.log", "mode": "w"})},
            "job_logging",
        ),
        ({"hydra_logging": logging_of({"class": "logging.FileHandler", "filename": "x.log"})}, "hydra_logging"),
        ({"launcher": {"_target_": SLURM, "submitit_folder": "outputs/r/precious"}}, "launcher.submitit_folder"),
        ({"launcher": {"_target_": SLURM, "submitit_folder": "${hydra.sweep.dir}/../r"}}, "launcher.submitit_folder"),
        ({"launcher": {"_target_": JOBLIB, "temp_folder": "/tmp/x"}}, "launcher.temp_folder"),
        ({"sweeper": {"_target_": OPTUNA, "storage": "sqlite:////home/me/x.db"}}, "sweeper.storage"),
        ({"run": {"dir": "/home/me"}}, "run.dir"),
        ({"sweep": {"dir": "/home/me", "subdir": "."}}, "sweep.dir"),
        ({"sweep": {"dir": "${output_dir}/${name}", "subdir": "../r/precious"}}, "sweep.subdir"),
        ({"output_subdir": "outputs/r/precious"}, "output_subdir"),
        ({"job": {"chdir": True}}, "job.chdir"),
        ({"job_logging": logging_of(CONSOLE, formatters={"f": {"class": "evil.F"}})}, "job_logging"),
        ({"job_logging": logging_of("${by_folder[${hydra.runtime.output_dir}]}")}, "job_logging"),
        ({"hydra_logging": logging_of(CONSOLE, filters={"f": {"()": "evil.F"}})}, "hydra_logging"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_node_with_code_is_refused(plain, nodes, key):
    with pytest.raises(ValueError, match=rf"(?s)^hydra\..*{key}.*=.* is not allowed: "):
        check_hydra(with_node(plain, **nodes))


def test_a_node_that_contains_itself_is_refused(plain):
    with pytest.raises(ValueError, match=r"hydra\.launcher\.x=.* is not allowed: it cannot be resolved"):
        check_hydra(with_node(plain, launcher={"x": "${hydra.launcher}"}))


def test_variables_of_the_environment_are_refused(plain):
    node = with_node(plain)
    node.job.env_set = {"PYTHONPATH": "evil"}
    with pytest.raises(ValueError, match=r"hydra\.job\.env_set\.PYTHONPATH=evil is not allowed"):
        check_hydra(node)
    # Hydra fills in what a job is to have from here
    node.job.env_copy = ["PYTHONPATH"]
    check_hydra(node)


@pytest.mark.parametrize("path", ["pkg://evil", "pkg://hydra", "pkg://vsax", "pkg://hydra.confx", "s3://evil"])
def test_packages_of_others_are_not_looked_into(path):
    with pytest.raises(ValueError, match=f"^{path} is not allowed in hydra.searchpath"):
        composed(f"hydra.searchpath=[{path}]")


@pytest.mark.parametrize(
    "nodes",
    [
        {},
        # as these plugins come
        {"launcher": {"_target_": JOBLIB, "n_jobs": -1, "temp_folder": None}},
        {
            "launcher": {
                "_target_": SLURM,
                "submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
                "name": "${hydra.job.name}",
                "partition": "gpu",
                "setup": None,
                "additional_parameters": {"mail-type": "END", "exclusive": True, "reservation": "x", "time": 60},
                "timeout_min": 60,
                "cpus_per_task": 8,
                "gpus_per_node": 8,
                "tasks_per_node": 8,
                "mem_gb": 64,
                "nodes": 1,
                "stderr_to_stdout": False,
                "qos": None,
                "comment": None,
                "constraint": None,
                "exclude": None,
                "gres": None,
                "cpus_per_gpu": None,
                "gpus_per_task": None,
                "account": None,
                "mem_per_gpu": None,
                "mem_per_cpu": None,
                "signal_delay_s": 120,
                "max_num_timeout": 0,
                "array_parallelism": 256,
            },
        },
        {
            "launcher": {"_target_": SLURM.replace("Slurm", "Local"), "timeout_min": 60},
            "sweeper": {
                "_target_": OPTUNA,
                "sampler": {"_target_": "optuna.samplers.TPESampler", "seed": 1},
                "custom_search_space": None,
                "storage": "sqlite:///outputs/pretrain/search.db",
                "params": {"optim.lr": "interval(0.1, 1)"},
            },
        },
        {
            "launcher": {"_target_": "vsa.sweeps.sweeper.QueueLauncher"},
            "sweeper": {"_target_": "vsa.sweeps.sweeper.PointSweeper"},
        },
    ],
    ids=["default", "joblib", "slurm", "local and optuna", "sweep"],
)
def test_launchers_and_sweepers_that_are_known_stay(plain, nodes):
    check_hydra(with_node(plain, **nodes))


def test_our_own_packages_stay_and_the_logging_of_hydra_does_not():
    composed("hydra.searchpath=[pkg://vsa.data]")
    # the file of `default` would stand in the folder where the command was started
    for name in ("default", "stdout", "disabled"):
        with pytest.raises(
            ValueError, match=r"^hydra\.job_logging\.\w+.* is not allowed: expected hydra/job_logging=none"
        ):
            composed(f"hydra/job_logging={name}")


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


EVIL = "hydra: {callbacks: {x: {_target_: pathlib.Path.touch, self: %s}}}\n"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder of configs and a package, each of which leaves `proof` behind when it is run."""
    monkeypatch.chdir(tmp_path)
    proof = tmp_path / "proof"
    configs, package = tmp_path / "configs", tmp_path / "path" / "evil_package"
    (configs / "experiment").mkdir(parents=True)
    package.mkdir(parents=True)
    (configs / "experiment" / "evil.yaml").write_text("# @package _global_\n" + EVIL % proof)
    (configs / "experiment" / "good.yaml").write_text("# @package _global_\n")
    (configs / "evil.yaml").write_text(EVIL % proof)
    (configs / "search.yaml").write_text("hydra: {searchpath: ['pkg://evil_package']}\n")
    (package / "__init__.py").write_text(f"from pathlib import Path\n\nPath({str(proof)!r}).touch()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "evil_package", raising=False)
    return proof


ROUTES = {
    "override": ["+hydra.callbacks.x={_target_:pathlib.Path.touch,self:proof}"],
    "experiment": ["--config-dir", "configs", "experiment=evil"],
    "config": ["--config-dir", "configs", "--config-name", "evil"],
    "job of a sweep": ["--config-dir", "configs", "-m", "experiment=good,evil"],
    "package of the command line": ["hydra.searchpath=[pkg://evil_package]"],
    "package of a config": ["--config-dir", "configs", "--config-name", "search"],
    "package as folder of configs": ["--config-path", "pkg://evil_package"],
    "logging": [
        "hydra.job_logging.root={handlers:[x]}",
        "+hydra.job_logging.handlers={x:{class:logging.StreamHandler,stream:'ext://evil_package.x'}}",
    ],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_no_way_into_hydra_runs_code(command_line, hostile, tmp_path, route):
    before = tree(tmp_path)
    status, _, err = command_line("train.py", *route)
    assert status == 1, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "is not allowed" in lines[0]
    assert "Traceback" not in err
    assert tree(tmp_path) == before


# each line repeats the one before nine times
ALIASES = "a: &a [1]\n" + "\n".join(f"{y}: &{y} [{', '.join(9 * ['*' + x])}]" for x, y in pairwise("abcdefg"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: !!python/object/apply:os.system [touch proof]", "could not determine a constructor for the tag"),
        ("a: \x00", "contains NUL bytes"),
        ("a: " + 31 * "[" + 31 * "]", "is nested more than 30 levels deep"),
        # deep enough to end the parser in C, and the process with it; PyYAML 6.0.4 has a limit of its own
        ("a: " + 300_000 * "[", "is nested more than 30 levels deep|exceeded maximum nesting depth"),
        (ALIASES, "has more than 100000 values"),
        ("a: &a [1, [*a]]", r"\*a contains itself"),
        ("a: *b", "found undefined alias"),
    ],
    ids=["tag", "characters", "levels", "many levels", "aliases", "itself", "unknown alias"],
)
def test_a_file_that_is_no_plain_data_is_one_line(command_line, hostile, tmp_path, content, message):
    (tmp_path / "configs" / "experiment" / "evil.yaml").write_text(content)
    before = tree(tmp_path)
    status, _, err = command_line("train.py", *ROUTES["experiment"], "ckpt_path=nowhere")
    assert status == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)
    assert "Traceback" not in err
    assert tree(tmp_path) == before


def test_aliases_and_levels_that_a_config_may_have_stay(command_line, hostile, tmp_path):
    # control: read, and refused for what it says
    text = "a: &a " + 20 * "[" + "1" + 20 * "]" + "\nb: [*a, *a]\n"
    (tmp_path / "configs" / "experiment" / "evil.yaml").write_text("# @package _global_\n" + text)
    status, _, err = command_line("train.py", *ROUTES["experiment"])
    assert status == 1
    assert "unknown setting" in err


def test_without_the_check_the_same_would_run(hostile):
    # control
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path

    plain = Hydra.create_main_hydra2("train", create_config_search_path(str(hostile.parent / "configs")))
    with suppress(Exception):
        plain.run("evil", lambda cfg: None, [])
    assert hostile.exists()


def test_a_refused_sweep_leaves_nothing(command_line, tiny_overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = command_line("train.py", "-m", *tiny_overrides, "output_dir=out", "run=a,b", "model.num_layers=0")
    assert status == 1
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1, err
    assert tree(tmp_path) == []
