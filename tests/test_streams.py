"""Streams that are closed, full or without a reader: they change neither a command's files nor its status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vsa.cli import COMMANDS
from vsa.streams import LOADING

ROOT = Path(__file__).parents[1]

# a command that writes a file and talks about it, through all ways that end at a standard stream
COMMAND = """
import logging, subprocess, sys
from rich.console import Console
from vsa.progress import progress_bar
def train(settings: list[str] = None) -> None:
    with open("data", "w") as file:
        logging.basicConfig()
        for i in range(200):
            print("out", "x" * 1000, flush=i % 2 == 0)
            print("err", "x" * 1000, file=sys.stderr)
        logging.warning("log")
        Console().print("rich")
        with progress_bar("bar", 2) as advance:
            advance(2)
        subprocess.run(["sh", "-c", "echo child; echo child >&2"])
        file.write(f"{settings or ''}data")
"""
RUN = "import vsa.cli as cli; cli.COMMANDS['train'] = cli.COMMANDS['config'] = 'command:train'; cli.main()"


def streams(folder: Path, redirection: str, command: str = "train") -> tuple[int, str]:
    """Status and output of a command in a folder of its own, which a shell starts with these streams."""
    (folder / "command.py").write_text(COMMAND)
    path = os.pathsep.join((str(folder), str(ROOT)))
    line = f'"{sys.executable}" -c "{RUN}" {command} {redirection}'
    result = subprocess.run(
        # the reader of the pipe has gone before the command begins
        ["bash", "-c", f"exec 9> >(:); sleep 0.1; {line}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


STREAMS = {
    "open": "",
    "closed": "<&- >&- 2>&-",
    "no reader": ">&9 2>&9",
    "full disk": "> /dev/full 2> /dev/full",
}


@pytest.mark.soak("closed, full and unread streams of commands")
@pytest.mark.parametrize("redirection", STREAMS.values(), ids=STREAMS)
def test_streams_change_neither_files_nor_status(tmp_path, redirection):
    status, told = streams(tmp_path, redirection)
    assert status == 0, told
    assert (tmp_path / "data").read_text() == "data"
    assert "Traceback" not in told
    # what can be written is
    assert ("out" in told, "err" in told) == ((not redirection,) * 2)


@pytest.mark.soak("closed, full and unread streams of commands")
@pytest.mark.parametrize(("redirection", "status"), [(">&9", 141), (">&-", 0), (">/dev/full", 28)])
def test_lost_output_of_a_printing_command_sets_its_exit_status(tmp_path, redirection, status):
    actual, told = streams(tmp_path, redirection + " 2> err", "config")
    assert actual == status, told
    # its files are written all the same
    assert (tmp_path / "data").read_text() == "data"
    errors = (tmp_path / "err").read_text()
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert lines == (["error: [Errno 28] No space left on device: 'standard output'"] if status == 28 else [])


SHOW = """
import sys
from vsa.cli import COMMANDS, main
slow = ("torch", "lightning", "matplotlib", "numpy", "hydra", "omegaconf", "av", "triton")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in slow:
            print("import", file=sys.stderr)
            raise SystemExit(7)
sys.meta_path.insert(0, Finder())
words = dict(zip(COMMANDS, [""] * len(COMMANDS)))
words |= dict(sweep="topk", replay="x", encode="x y", latents="x y z", sample="x", evaluate="x", inspect="x y",
              convert="x y", push="x y", merge="x y --sparse x --few-step x", report="x", toy="x", tiles="4 4 4",
              simulate="4 4 4 --window 2 2 2", config="model")
words |= {"verify-export": "x", "certify": "x", "check-data": "x"}
for name, text in words.items():
    print(name, file=sys.stderr)
    try:
        main([name, *text.split()])
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
"""


def test_the_first_line_of_every_command_comes_before_what_takes_seconds():
    environment = {**os.environ, "LOCAL_RANK": "0"}
    result = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    names = lines[::4]
    assert names == [*COMMANDS], result.stderr
    for i, name in enumerate(names):
        assert lines[4 * i + 1 : 4 * i + 4] == [LOADING, "import", "7"], (name, result.stderr)
    # the result of a command is alone on standard output
    assert result.stdout == ""


@pytest.mark.parametrize("words", [["config"], ["train", "--cfg", "job"]])
def test_settings_are_listed_without_torch(words):
    code = f"import sys; from vsa.cli import main\ntry:\n main({words})\nfinally:\n print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pretrain" in result.stdout
    assert result.stdout.endswith("False\n")


def test_letters_that_a_stream_cannot_encode_are_written_out():
    script = "import vsa.streams as s; s.make_steady(); print('\\xfc \\ud83d')"
    for encoding, expected in (("ascii", "\\xfc \\ud83d\n"), ("utf-8", "\xfc \\ud83d\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
        output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
        assert output.decode("utf-8") == expected


def test_a_package_that_warns_when_it_is_imported_is_not_heard(tmp_path: Path) -> None:
    """transformers and peft import torchao wherever it is installed."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text(
        'import logging\nlogging.getLogger("torchao.kernels").warning("Failed to load a library")\n'
        'logging.getLogger("torch.utils._pytree").warning("deprecated")\n'
    )
    program = "import vsa.streams\nvsa.streams.make_steady()\nimport torchao"
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
