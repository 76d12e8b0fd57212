"""A secret that is typed, stands in a file or in the environment is in nothing that a run writes or prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_runs import ROOT

pytestmark = pytest.mark.soak("secrets in settings, files, names and messages")
CANARY = "c4n4ry-0f-a-k3y"


@pytest.fixture
def in_environment(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", CANARY)


def places_of(canary: str, folder: Path) -> list[str]:
    """Where a text stands in the files below a folder or in their names."""
    return [
        str(path)
        for path in folder.rglob("*")
        if canary in path.name or (path.is_file() and canary.encode() in path.read_bytes())
    ]


@pytest.mark.parametrize(
    "setting", [f"+wandb_api_key={CANARY}", f"+logger.csv.api_key={CANARY}", f"+note='${{x}}',api_key={CANARY}"]
)
def test_a_refused_setting_is_told_without_its_value(command_line, tmp_path, setting):
    status, out, err = command_line("train.py", f"output_dir={tmp_path}", setting)
    assert (status, CANARY in out + err) == (1, False)
    assert "api_key" in err or "mismatched input" in err


def test_a_secret_of_a_config_file_is_told_without_its_value(command_line, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nwandb_api_key: {CANARY}\n")
    status, out, err = command_line(
        "train.py", f"output_dir={tmp_path}/o", f"--config-dir={tmp_path}", "experiment=mine"
    )
    assert (status, CANARY in out + err) == (1, False)
    assert "wandb_api_key=<secret>" in err


@pytest.mark.usefixtures("in_environment")
@pytest.mark.parametrize("setting", ["run=${oc.env:MY_API_KEY}", "output_dir={tmp}/${oc.env:MY_API_KEY}"])
def test_no_folder_is_named_after_a_secret(command_line, tmp_path, setting):
    status, out, err = command_line("train.py", f"output_dir={tmp_path}", setting.replace("{tmp}", str(tmp_path)))
    assert (status, CANARY in out + err) == (1, False)
    assert "run_dir contains a secret" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_environment")
@pytest.mark.parametrize("setting", [f"name={CANARY}", f"+wandb_token={CANARY[:-1]}-"])
def test_a_sweep_writes_no_secret(command_line, tmp_path, setting):
    status, out, err = command_line("train.py", "-m", f"output_dir={tmp_path}", "seed=1,2", setting)
    assert status == 1
    assert "which a sweep would write into its folder" in err or "run_dir contains a secret" in err
    assert CANARY[:-1] not in out + err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("in_environment")
def test_prompts_that_hold_a_secret_are_masked_in_files_and_their_names(training):
    prompts = "callbacks.samples.prompts=['a ${oc.env:MY_API_KEY} circle']"
    training("trainer.max_steps=2", prompts, "callbacks.samples.steps=1")
    run_folder = training.folder()
    assert "a <secret> circle" in (run_folder / "config.yaml").read_text()
    assert list(run_folder.rglob("000-a-secret-circle.mp4"))
    assert not places_of(CANARY, training.output)
    assert not places_of("c4n4ry", training.output)
    # resumed with the same setting, which stands in the checkpoint with the marker
    training("trainer.max_steps=4", prompts, "callbacks.samples.steps=1", "ckpt_path=last")
    assert training.last().step == 4
    # the control: without such a variable it is a word as any other
    os.environ.pop("MY_API_KEY")
    training("trainer.max_steps=2", "run=control", f"callbacks.samples.prompts=['a {CANARY} circle']")
    assert places_of(CANARY, training.output)


def test_a_traceback_of_a_command_has_no_secret(tmp_path):
    (tmp_path / "defect.py").write_text(
        "import os\n\ndef fail():\n    raise RuntimeError(f\"a defect with {os.environ['MY_API_KEY']}\")\n"
    )
    code = "import vsa.cli\nvsa.cli.COMMANDS['info'] = 'defect:fail'\nvsa.cli.main(['info'])"
    path = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "kernels")))
    env = {**os.environ, "MY_API_KEY": CANARY, "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False
    )
    assert (result.returncode, CANARY in result.stdout + result.stderr) == (1, False)
    assert "RuntimeError: a defect with <secret>" in result.stderr


WANDB = ("logger=wandb", "logger.wandb.offline=true")
SAMPLED = "callbacks.samples.steps=1"
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "a new setting": (1, ("+note=${oc.env:MY_API_KEY}",)),
    "a checkpoint that is missing": (1, ("ckpt_path=${oc.env:MY_API_KEY}/x",)),
    "the environment": (0, ()),
    "the environment, wandb": (0, WANDB),
    "a prompt, wandb": (0, (*WANDB, SAMPLED, f"callbacks.samples.prompts=['a {CANARY} circle']")),
    "an experiment": (0, (SAMPLED, "--config-dir=FOLDER", "experiment=mine")),
}


@pytest.mark.usefixtures("in_environment")
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if "wandb" in way else []) for way in WAYS])
def test_no_way_leads_a_secret_into_a_run(way, command_line, tiny_overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "experiment").mkdir()
    prompts = f"callbacks: {{samples: {{prompts: [the {CANARY}]}}}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{prompts}")
    status, words = WAYS[way]
    own = [word for word in tiny_overrides if way != "an experiment" or "prompts" not in word]
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    short = (f"output_dir={tmp_path / 'out'}", "trainer.max_steps=2")
    actual, out, err = command_line("train.py", *own, *short, *words)
    assert (actual, CANARY in out + err) == (status, False), out + err
    # names of files may lack the separators
    pattern = re.compile(re.sub(r"\W", r"[^a-z0-9]?", CANARY).encode())
    for path in (tmp_path / "out").rglob("*"):
        assert not pattern.search(path.name.encode())
        assert not path.is_file() or not pattern.search(path.read_bytes()), path


@pytest.mark.slow
def test_a_traceback_of_hydra_has_no_secret(tmp_path):
    # known by the name of its setting alone
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    env = {**os.environ, "HYDRA_FULL_ERROR": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "train.py"), f"output_dir={tmp_path}", f"+hf_token={CANARY}"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    output = result.stdout + result.stderr
    assert (result.returncode, CANARY in output, "hf_token" in output) == (1, False, True)
