"""What the README names exists, and what it says to run parses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.replace("\\\n", "").splitlines()
    if line.split("#")[0].strip()
]


def test_paths_and_links_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    cells = re.findall(r"`((?:vsa|kernels|configs|scripts|tests|benchmarks)/[\w/.]*)`", README)
    assert len(links) >= 3
    assert len(cells) >= 8
    for path in links + cells:
        assert (ROOT / path).exists(), path


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`?make ([a-z-]+)", README))
    assert {"demo", "test", "compare"} <= named
    assert named <= targets


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python scripts/")])
def test_script_commands_know_their_options(command):
    script, *arguments = command.split()[1:]
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for option in (a for a in arguments if a.startswith("--")):
        assert option in done.stdout, option


@pytest.mark.parametrize("command", [c for c in COMMANDS if " train.py " in c])
def test_training_commands_compose(command):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=command.split(" train.py ")[1].split())
    finetunes = "experiment=finetune" in command
    assert cfg.task._target_ == f"vsa.training.{'finetune.Finetune' if finetunes else 'pretrain.Pretrain'}Module"


def test_there_are_commands_to_check():
    assert sum(c.startswith("python train.py") for c in COMMANDS) >= 4
    assert sum("experiment=finetune" in c for c in COMMANDS) >= 1
    assert sum(c.startswith("python scripts/") for c in COMMANDS) >= 8
