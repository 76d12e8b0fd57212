"""Training beside a server of Weights & Biases that answers, hangs, refuses or dies; a real client, a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.tracker_server import TrackerServer
from vsa.training import wandb_tracker
from vsa.training.wandb_tracker import WandbTracker

KEY = "f" * 40
CANARY = "c4n4ry-0f-a-k3y"


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # what it does is tested, not how long the shipped patience is
    monkeypatch.setattr(wandb_tracker, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(wandb_tracker, "_END_SECONDS", 2.0)


@contextmanager
def server_at(mood: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackerServer]:
    """A server that the client takes for that of the service; one that refuses is gone before it is asked."""
    import wandb

    server = TrackerServer("answers" if mood == "refuses" else mood)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    # the client keeps the address that it met first
    wandb.teardown()
    with ExitStack() as stack:
        stack.enter_context(server)
        if mood == "refuses":
            stack.close()
        yield server
        wandb.teardown()


def told(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    out, err = capsys.readouterr()
    return out + err + caplog.text


@pytest.mark.soak("a tracker whose server answers, hangs, refuses or dies")
@pytest.mark.parametrize("mood", ["answers", pytest.param("refuses", marks=pytest.mark.slow), "hangs", "dies"])
def test_a_run_trains_to_its_end_whatever_the_server_does(mood, training, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    with server_at(mood, monkeypatch) as server:
        training("logger=wandb", "logger.wandb.offline=false", "trainer.max_steps=4")
        output = told(capsys, caplog)
        assert training.last().step == 4
        assert len(training.losses()) == 4
        (path,) = (training.folder() / "wandb").glob("*run-*/*.wandb")
        online = not path.parent.name.startswith("offline")
        assert online == (mood in ("answers", "dies"))
        assert ("kept offline" in output) == (not online)
        # what did not arrive lies there for the command that is told
        sync = re.search(r"wandb sync (\S+)", output)
        assert (sync is None) == (mood == "answers")
        assert sync is None or Path(sync[1]) == path.parent
        assert server.got_metrics.is_set() == online
        if mood == "answers":
            assert any("train/loss" in body for body in server.bodies)


def test_a_run_that_wandb_followed_can_be_resumed(training):
    """Its logs are links out of the run folder, to its cache."""
    for more in (("trainer.max_steps=1",), ("trainer.max_steps=2", "ckpt_path=last")):
        training("logger=wandb", "logger.wandb.offline=true", *more)
    assert training.last().step == 2
    logs = (training.folder() / "wandb").rglob("*.log")
    # the control
    assert any(path.is_symlink() for path in logs)


@pytest.mark.soak("secrets in settings, files, names and messages")
def test_offline_files_hold_no_command_line_and_no_output(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setattr("sys.argv", ["train.py", f"callbacks.x={CANARY}"])
    monkeypatch.setenv("MY_TOKEN", "t0ken-0f-mine")
    monkeypatch.delenv("WANDB_API_KEY")
    tracker = WandbTracker(str(tmp_path), name="mine", tags=["a", "t0ken-0f-mine"])
    tracker.log_metrics({"loss": 1.5}, 1)
    print(f"printed {CANARY}")
    tracker.finalize("success")
    # the client's other process writes until it ends
    wandb.teardown()
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file() and not path.is_symlink()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"loss" in content
    assert b"<secret>" in content
    assert CANARY.encode() not in content
    assert b"t0ken-0f-mine" not in content


def test_a_client_that_fails_ends_tracking_and_not_the_run(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    tracker = WandbTracker(str(tmp_path))

    class Broken:
        def log(self, metrics):
            raise ConnectionError("the service process is gone")

    tracker._experiment = Broken()
    for step in range(3):
        tracker.log_metrics({"loss": 1.0}, step)
    assert told(capsys, caplog).count("tracking ended, training continues: the service process is gone") == 1
