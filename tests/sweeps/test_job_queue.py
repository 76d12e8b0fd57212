"""The queue of processes, with commands that cost nothing."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.limits import HANGS
from vsa.streams import LOADING
from vsa.sweeps.job_queue import Job, Slot, run_jobs
from vsa.sweeps.lifeline import OPTION

ROOT = Path(__file__).parents[2]


def job(folder: Path, name: str, script: str) -> Job:
    return Job(name, ["sh", "-c", script], folder / f"{name}.log")


# a grace time that no test outlives
ENDLESS = 1e6


def run(jobs: list[Job], slots: list[Slot], grace: float = ENDLESS, at_tick=lambda: None) -> tuple[int | None, list]:
    events = []
    number = run_jobs(jobs, slots, changed=lambda one: events.append((one.name, one.status)), tick=at_tick, grace=grace)
    return number, events


@pytest.mark.parametrize("own", ["3", None])
def test_threads_that_the_user_has_set_stand(own, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    one = job(tmp_path, "a", f'echo "$OMP_NUM_THREADS $DEVICE" > {tmp_path / "a"}')
    run([one], [Slot("cpu 0", {"OMP_NUM_THREADS": "4", "DEVICE": "0"})])
    assert (tmp_path / "a").read_text() == f"{own or 4} 0\n"


def most_at_once(seen: list[tuple[str, str]]) -> int:
    counts = itertools.accumulate(1 if status == "running" else -1 for _, status in seen)
    return max(counts)


def test_every_job_runs_on_a_slot_of_its_own_and_a_failure_stops_no_other(tmp_path):
    script = 'echo "$DEVICE" > "%s"; sleep 0.3; %s'
    ends = {
        "a": "exit 0",
        "b": "echo error: no room; exit 1",
        "c": "echo Traceback; echo Defect: x; exit 2",
        "d": "kill -9 $$",
    }
    jobs = [job(tmp_path, name, script % (tmp_path / name, end)) for name, end in ends.items()]
    slots = [Slot("first", {"DEVICE": "0"}), Slot("second", {"DEVICE": "1"})]
    number, events = run(jobs, slots)
    assert number is None
    assert [(one.status, one.reason) for one in jobs] == [
        ("finished", None),
        ("failed", "no room"),
        ("failed", "Defect: x"),
        ("failed", "ended by SIGKILL"),
    ]
    assert [name for name, status in events if status == "running"] == ["a", "b", "c", "d"]
    assert {(tmp_path / name).read_text().strip() for name in "ab"} == {"0", "1"}
    assert all((tmp_path / one.name).read_text().strip() == {"first": "0", "second": "1"}[one.device] for one in jobs)
    # never more at a time than there are slots
    assert most_at_once(events) == 2


def test_two_jobs_share_a_device_that_has_two_slots(tmp_path):
    # each ends when the other has begun
    meet = f"touch {tmp_path}/%s; while [ ! -e {tmp_path}/%s ]; do sleep 0.02; done"
    jobs = [job(tmp_path, one, meet % (one, other)) for one, other in ("ab", "ba", "cd", "dc")]
    _, events = run(jobs, [Slot("gpu 0"), Slot("gpu 0")])
    assert [(one.status, one.device) for one in jobs] == [("finished", "gpu 0")] * 4
    assert most_at_once(events) == 2


ASKED = "trap 'echo asked; exit 130' INT TERM; touch %s; sleep 300 & wait"
DEAF = "trap 'touch %s' INT TERM; touch %s; while :; do sleep 0.05; done"


def after_start(marks: list[Path], *numbers: int, heard: Path | None = None):
    """Sends the first signal when all marks are there, and the second when the job has heard the first."""

    def send() -> None:
        for number, paths in zip(numbers, (marks, [heard]), strict=False):
            while not all(mark.exists() for mark in paths):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_all_and_starts_no_other(tmp_path, number):
    marks = [tmp_path / "up-a", tmp_path / "up-b"]
    jobs = [job(tmp_path, name, ASKED % mark) for name, mark in zip("ab", marks, strict=True)]
    jobs.append(job(tmp_path, "c", "exit 0"))
    before = signal.getsignal(number)
    thread = after_start(marks, number)
    actual, _ = run(jobs, [Slot("x"), Slot("y")])
    thread.join()
    assert actual == number
    assert [one.status for one in jobs] == ["stopped", "stopped", "waiting"]
    assert (tmp_path / "a.log").read_text() == "asked\n"
    assert signal.getsignal(number) == before


def test_stuck_process_is_killed_after_grace_time_or_second_signal(tmp_path):
    for numbers, grace in (([signal.SIGTERM], 0.5), ([signal.SIGINT, signal.SIGINT], ENDLESS)):
        mark, heard = (tmp_path / f"{name}-{len(numbers)}" for name in ("up", "heard"))
        deaf = job(tmp_path, f"deaf-{len(numbers)}", DEAF % (heard, mark))
        thread = after_start([mark], *numbers, heard=heard)
        actual, _ = run([deaf], [Slot("x")], grace=grace)
        thread.join()
        assert actual == numbers[0]
        assert deaf.status == "stopped"


PARENT = """
import os
import sys
from pathlib import Path
from vsa.sweeps.job_queue import Job, Slot, run_jobs
child = "import os, sys, time; from vsa.sweeps.lifeline import end_with_sweep; end_with_sweep(sys.argv[1:]); " \\
    "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(60)"
command = [sys.executable, "-c", child, f"--with-sweep={os.getpid()}", sys.argv[1]]
run_jobs([Job("a", command, Path(sys.argv[1] + ".log"))], [Slot("x")],
    changed=lambda _: None, tick=lambda: None, grace=1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of the parent's end")
def test_no_run_outlives_a_sweep_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, path], cwd=ROOT)
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)
    pid = int(path.read_text())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    until = time.monotonic() + HANGS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        # a process that ended and that nobody has asked for is a zombie
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_a_run_whose_sweep_has_ended_before_it_began_does_not_begin():
    code = "import sys; from vsa.sweeps.lifeline import end_with_sweep; print('began', end_with_sweep(sys.argv[1:]))"
    for words, began in (
        ([f"{OPTION}{os.getpid()}", "train"], True),
        ([f"{OPTION}1", "train"], False),
        (["train"], True),
    ):
        result = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
        assert (result.stdout == "began ['train']\n") == began, result.stderr


def test_the_environment_of_a_user_ends_no_command():
    environment = {**os.environ, "VSA_SWEEP_PROCESS": "1"}
    command = [sys.executable, "-m", "vsa.cli", "config"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.returncode
    assert "group" in result.stdout


def test_a_job_that_says_nothing_of_its_own_tells_its_status(tmp_path):
    # the first line of every command is no reason
    silent = job(tmp_path, "silent", f"echo '{LOADING}'; exit 3")
    run([silent], [Slot("x")])
    assert silent.reason == "exit status 3"
