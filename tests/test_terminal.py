"""What others wrote moves no cursor of a terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.progress import Progress
from tqdm import tqdm

from vsa.errors import one_line_errors

EVIL = "a\x1b[2J\x1b]0;title\x07\rb\x85c\u2066d\x7f\u200f"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\rb\x85c\u2066d\x7f\u200f"


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_prints_and_errors_are_visible_and_bars_move(monkeypatch):
    from vsa.streams import _Visible

    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", _Visible(out, "utf-8", write_through=True))
    monkeypatch.setattr(sys, "stderr", _Visible(err, "utf-8", write_through=True))
    print(EVIL, "日本語\tä", end="\n\n")
    print(f"warning: {EVIL}", file=sys.stderr)
    # libraries that draw move the cursor
    for _ in tqdm(range(2), file=sys.stderr):
        pass
    with Progress() as bar:
        bar.advance(bar.add_task("x", total=1))
    assert out.getvalue().decode().startswith(f"{SHOWN} 日本語\tä\n\n")
    assert err.getvalue().decode().startswith(f"warning: {SHOWN}\n")
    assert b"\r" in err.getvalue()
    assert b"\x1b[" in out.getvalue()


def test_an_error_is_one_visible_line(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise ValueError(f"no such file: {EVIL}")
    assert (
        capsys.readouterr().err
        == f"error: no such file: {SHOWN.replace(chr(92) + 'r', ' ').replace(chr(92) + 'x85', ' ')}\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("report", ""),
        ("sample", "", "--prompt", "x"),
        ("convert", "x", ""),
        ("report", "x", "--out", ""),
        ("report", "x", "--out="),
    ],
)
def test_an_empty_word_of_a_command_is_no_place(words, capsys, tmp_path, monkeypatch):
    from vsa.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 1
    assert "has an empty value: leave it out, or give a value" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_empty_prompt_is_one(capsys):
    from vsa.cli import main

    with pytest.raises(SystemExit):
        main(["sample", "nowhere", "--prompt", "", "--prompt="])
    assert "has an empty value" not in capsys.readouterr().err
