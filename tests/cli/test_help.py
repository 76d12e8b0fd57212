"""Help appears at once: every command's is drawn without the packages that its work needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vsa.cli import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "lightning", "matplotlib", "hydra", "omegaconf", "numpy", "av", "diffusers", "triton")
SHOW = f"""
import contextlib, io, sys
from vsa.cli import COMMANDS, main
for command in ("", *COMMANDS):
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        main([*command.split(), "--help"])
    shown = text.getvalue().partition("Options")[0]
    print(command or "vsa", f"\\n vsa {{command}}".rstrip() in shown.partition("Usage")[2])
print([name for name in {HEAVY!r} if name in sys.modules])
import torch
print([name for name in {HEAVY!r} if name in sys.modules][:1])
"""


def test_the_help_of_every_command_has_an_example_and_imports_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=True)
    *helps, modules, control = result.stdout.splitlines()
    assert helps == [f"{command} True" for command in ("vsa", *COMMANDS)]
    assert modules == "[]"
    assert control == "['torch']"


def test_sentences_of_the_help_break_at_the_edge_of_the_terminal_alone(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = command_line("tune-sparge", "--help")
    assert "Writes tuned.json, for attention=sparge attention.tuned=FILE, and tuning.html with errors" in out
    # examples keep their lines
    assert "--out TUNED vsa" not in out


def test_train_py_shows_the_help_of_vsa_train(command_line):
    assert command_line("train.py", "--help") == command_line("train", "--help")
    status, out, _ = command_line("train.py", "--help")
    assert status == 0
    assert "vsa train experiment=quickstart" in out


def test_an_unknown_command_is_a_usage_error(command_line):
    status, _, err = command_line("smaple")
    assert status == 2
    assert "sample" in err


def test_a_shell_completes_commands_and_their_options(command_line, monkeypatch):
    def completions(*words: str) -> list[str]:
        monkeypatch.setenv("_VSA_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(("vsa", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return command_line("vsa")[1].split()

    assert completions("sam") == ["sample"]
    assert completions("sample", "--gui") == ["--guidance"]
    assert completions("nothing") == []
