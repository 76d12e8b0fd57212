"""Fixtures of streams from local servers, through the real clients of S3 and the hub."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.clouds.servers import Cloud, hub, s3
from tests.data.conftest import write_dataset
from tests.limits import HANGS
from tests.tiny_runs import command_line, one_thread, training  # noqa: F401
from tests.training.test_streaming import train  # noqa: F401


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    """The port of moto's server; tests are skipped without it or without s3fs."""
    why = "is not installed: pip install s3fs 'moto[s3]' flask flask-cors"
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} {why}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + HANGS
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert server.poll() is None, "moto's server ended"
                assert time.monotonic() < end, "moto's server did not start"
                time.sleep(0.1)
            yield port
        finally:
            server.kill()


@pytest.fixture(params=["s3", "hub"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """50 videos in 5 shards, in a bucket and on a hub."""
    start = partial(s3, request.getfixturevalue("moto_port")) if request.param == "s3" else hub
    folder = write_dataset(tmp_path / "shards", videos=50, images=0)
    with start(folder, monkeypatch) as cloud:
        yield cloud


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of this project and of the hub's client take no time."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
