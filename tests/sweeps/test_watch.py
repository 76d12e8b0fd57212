"""What a sweep shows of its runs."""

from __future__ import annotations

import io
import math
import warnings

import pytest
from rich.console import Console

from vsa.evaluation.figures import final_loss
from vsa.sweeps.job_queue import Job
from vsa.sweeps.watch import RunView, SweepDisplay


def write(folder, rows: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.csv").write_text("step,train/loss,val/loss,throughput/step_seconds\n" + rows)


def test_the_newest_values_are_found_in_a_long_file(tmp_path):
    run = tmp_path / "run"
    view = RunView(run)
    view.read()
    assert view.values == {}
    long = "".join(f"{step},{1 / step:.9g},,0.5\n" for step in range(1, 5001))
    write(run, "".join(long) + "5001,0.25,0.75,\n5002,9")
    (run / "config.yaml").write_text("optim:\n  lr: 1\ntrainer:\n  max_steps: 6001\n")
    view.read()
    # of a line in the middle or without its end nothing is taken
    assert view.values == {"step": 5001, "train/loss": 0.25, "val/loss": 0.75, "throughput/step_seconds": 0.5}
    assert view.seconds_left == 500
    write(run, "1,2,,\n")
    view.read()
    assert view.values["train/loss"] == 2


def test_the_loss_of_a_run_is_its_last_validation(tmp_path):
    assert final_loss(tmp_path) is None
    write(tmp_path, "1,2,,\n2,1,1.5,\n3,0.5,,\n")
    assert final_loss(tmp_path) == 1.5
    write(tmp_path, "1,2,,\n2,1,,\n")
    # a training loss is none
    assert final_loss(tmp_path) is None
    write(tmp_path, "1,2,nan,\n")
    assert final_loss(tmp_path) == math.inf


def test_a_terminal_has_a_table_and_a_file_has_lines(tmp_path):
    write(tmp_path / "a", "3,2,1.5,60\n")
    (tmp_path / "a" / "config.yaml").write_text("trainer:\n  max_steps: 5\n")
    jobs = [Job("a", (), tmp_path / "a.log"), Job("b", (), tmp_path / "b.log")]

    def output(terminal: bool) -> str:
        file = io.StringIO()
        with SweepDisplay(tmp_path, Console(file=file, force_terminal=terminal, width=120, color_system=None)) as watch:
            watch.add(jobs)
            jobs[0].status, jobs[0].device = "running", "gpu 1"
            watch.changed(jobs[0])
            watch.tick()
            jobs[1].status, jobs[1].reason = "failed", "no [room]"
            watch.changed(jobs[1])
        return file.getvalue()

    assert output(terminal=False) == "[0/2] running a on gpu 1\n[1/2] failed b (no [room])\n"
    jobs[1].status, jobs[1].reason = "waiting", None
    table = output(terminal=True)
    assert "[room]" in table
    rows = [line.split() for line in table.splitlines()]
    assert ["a", "running", "3/5", "2", "1.5", "60", "0:02:00", "gpu", "1"] in rows
    assert ["b", "waiting"] in rows


def test_reasons_of_runs_move_no_cursor(tmp_path):
    file = io.StringIO()
    jobs = [Job("a", (), tmp_path / "a.log", status="failed", reason="because\x1b[2J of\x07")]
    with SweepDisplay(tmp_path, Console(file=file, width=120)) as watch:
        watch.add(jobs)
        watch.changed(jobs[0])
    assert r"because\x1b[2J of\x07" in file.getvalue()
    assert not set("\x1b\x07") & set(file.getvalue())


@pytest.mark.parametrize("damage", [b"3,gar,,0.5", b"3,\xff\xfe,,0.5", b"3,0.5,,1e400", b"nan,0.5,,0.5", b"3,\0,,0.5"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_damaged_row_of_one_run_ends_no_display(tmp_path, damage, terminal):
    write(tmp_path / "a", "1,2,,0.5\n2,1.5,,0.5\n")
    with open(tmp_path / "a" / "metrics.csv", "ab") as file:
        file.write(damage + b"\n")
    (tmp_path / "a" / "config.yaml").write_bytes(b"\xff\xfe")
    text = io.StringIO()
    with SweepDisplay(tmp_path, Console(file=text, force_terminal=terminal, width=100)) as watch:
        job = Job("a", ("a",), tmp_path / "a.log", status="running")
        watch.add([job])
        watch.changed(job)
        watch.tick()
        job.status = "finished"
        watch.changed(job)
    assert "finished" in text.getvalue()
    # nor the search that asks for its loss
    final_loss(tmp_path / "a")


def test_an_error_of_the_display_is_said_once_and_ends_no_sweep(tmp_path):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise ValueError("no display")

    console = Console(file=Broken(), force_terminal=True)
    with warnings.catch_warnings(record=True) as said, SweepDisplay(tmp_path, console) as watch:
        warnings.simplefilter("always")
        watch.add([Job("a", ("a",), tmp_path / "a.log", status="running")])
        watch.tick()
        watch.say("a line")
    assert [str(one.message).partition(":")[0] for one in said] == ["the display of the sweep is incomplete"]
