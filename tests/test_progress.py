"""Progress where no terminal is: lines on standard error, not too many."""

from __future__ import annotations

import vsa.progress as progress_module
from vsa.progress import progress_bar


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 20.0, 20.0, 21.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    with progress_bar("counting", 9, done=2) as advance:
        advance(1)
        assert capsys.readouterr().err == ""
        advance(3)
        assert capsys.readouterr().err == "counting: 6 of 9\n"
        advance(1)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")


def test_a_line_says_what_is_counted_and_what_is_left(capsys, monkeypatch):
    clock = iter([0.0, 20.0, 20.0, 80.0, 80.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    with progress_bar("encoding", 100, done=40, unit="frames") as advance:
        advance(10)
        advance(20)
    lines = capsys.readouterr().err.splitlines()
    # 10 frames in 20 s, then 30 in 80 s
    assert lines == ["encoding: 50 of 100 frames, 2 min left", "encoding: 70 of 100 frames, 80 s left"]
