"""Every row of the soak in its short form, and the runner with rows that fail in every way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.soak.__main__ import choose_rows, rows_by_topic, run
from scripts.soak.rows import Attempts, Row
from scripts.soak.runner import run_rows

ROWS = [row for rows in rows_by_topic().values() for row in rows]

# ten seconds and more: what they provoke has tests of its own beside them
LONG = {
    "hostile files in encode cost themselves alone",
    "kill -9 of a distillation",
    "kill -9 of a pretraining, resumed bit for bit",
    "annealed top-k across a resume",
    "a dead rank (SIGKILL): the other ends in time and names it",
    "runs that meet a bad sample pass it and resume bit-equal",
    "loss spikes: one batch times 40",
    "refused starts in the folder of a run",
    "a tracker whose server answers, hangs, refuses or dies",
}


def marks(row: Row) -> list[pytest.MarkDecorator]:
    return [] if row.short_tries and row.name not in LONG else [pytest.mark.slow]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=marks(row)) for row in ROWS])
def test_short_form(row, tmp_path):
    (result,) = run_rows([row], tmp_path, short=True)
    assert result.outcome.tried >= max(1, row.short_tries)
    assert result.lost == 0, "\n".join(result.outcome.failures)


def test_every_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(names) >= LONG


def good(folder: Path, tries: int, seed: int) -> Attempts:
    assert os.getcwd() == str(folder)
    # the log alone
    assert [path.name for path in folder.iterdir()] == ["row.log"]
    for number in range(tries):
        yield f"try {number}", None
    return (f"seed {seed}",)


def loses_one(folder: Path, tries: int, seed: int) -> Attempts:
    for number in range(tries):
        yield f"try {number} |", "of\nseed 7" if number == 2 else None


def raises(folder: Path, tries: int, seed: int) -> Attempts:
    raise RuntimeError("of the row")


def dies(folder: Path, tries: int, seed: int) -> Attempts:
    # what it leaves behind holds what it has open
    if os.fork() == 0:
        time.sleep(600)
    os._exit(5)


def hangs(folder: Path, tries: int, seed: int) -> Attempts:
    # a child, an orphan, and one in a session of its own that no signal but SIGKILL ends
    script = "trap '' TERM HUP INT; echo $$ >> ../pids; exec sleep 600"
    subprocess.Popen(["sh", "-c", script])
    subprocess.run(["sh", "-c", f"({script}) & sleep 0"])
    subprocess.Popen(["sh", "-c", script], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return good(folder, tries, seed)


def row(function, **limits) -> Row:
    return Row(name=function.__name__, tries=5, short_tries=2, run=function, **limits)


def test_what_fails_is_shown_as_failed(tmp_path, capsys):
    out = tmp_path / "soak.json"
    rows = [row(good), row(loses_one), row(raises), row(dies)]
    assert run(rows, out, short=False, seed=7, jobs=2) == 1
    output = capsys.readouterr().out
    for line in ("| good | 5 | 5 |", "| loses_one | 5 | **4** |", "| raises | 5 | **0** |", "| all 4 rows | 20 | 9 |"):
        assert line in output
        assert line in out.with_suffix(".md").read_text()
    report = json.loads(out.read_text())
    assert [(r["row"], r["tried"], r["survived"]) for r in report["results"]] == [
        ("good", 5, 5),
        ("loses_one", 5, 4),
        ("raises", 5, 0),
        ("dies", 5, 0),
    ]
    assert report["results"][0]["notes"] == ["seed 7"]
    assert [r["failures"] for r in report["results"][1:]] == [
        ["try 2 |: of seed 7"],
        [f"RuntimeError: of the row (test_runner.py:{raises.__code__.co_firstlineno + 1})"],
        ["the process of the row has status 5"],
    ]
    assert report["results"][1]["repeat"] == "python -m scripts.soak 'loses_one' --seed 7"
    # control
    assert run([row(good)], out, short=True, seed=7, jobs=1) == 0
    assert json.loads(out.read_text())["results"][0]["tried"] == 2


def gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_row_that_hangs_is_ended_with_all_it_started(tmp_path):
    (result,) = run_rows([row(hangs, seconds=10)], tmp_path, short=True)
    assert (result.outcome.tried, result.outcome.survived) == (2, 0)
    assert result.outcome.failures == ("not finished in 10 s",)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    def soak() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = tmp_path / "soak.json"
        sys.exit(run([row(good), row(hangs)], out, short=True, seed=0, jobs=1, keep=tmp_path / "rows"))

    process = multiprocessing.get_context("fork").Process(target=soak)
    process.start()
    pids = tmp_path / "rows" / "pids"
    try:
        while not (pids.exists() and len(pids.read_text().split()) == 3):
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    finally:
        process.kill()
    report = json.loads((tmp_path / "soak.json").read_text())
    assert [r["row"] for r in report["results"]] == ["good"]
    assert report["not_run"] == ["hangs"]
    assert all(gone(pid) for pid in pids.read_text().split())


def test_rows_are_chosen_by_file_and_by_words(monkeypatch):
    by_topic = {"numbers": (row(good), row(raises)), "data": (row(dies),)}
    monkeypatch.setattr(
        "scripts.soak.__main__.rows_by_topic", lambda topics: {t: by_topic[t] for t in topics if t in by_topic}
    )
    assert [r.name for r in choose_rows([])] == ["dies", "good", "raises"]
    assert [r.name for r in choose_rows(["data"])] == ["dies"]
    assert [r.name for r in choose_rows(["data", "rais"])] == ["dies", "raises"]
    with pytest.raises(ValueError, match="no row 'nope': expected one of data, numbers"):
        choose_rows(["nope"])
