"""Lines that find no room are lost, and end nothing; what else goes wrong is no line's loss."""

import errno
import os
import sys

import pytest

from vsa.training.lossy_output import lossy_output

LONG = "x" * 100_000


def test_a_full_disk_loses_lines_only(monkeypatch):
    # the device that is always full
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with lossy_output():
            print(LONG)
            print("short", flush=True)
            assert not sys.stdout.isatty()
        assert sys.stdout is stream
        # nothing waits in it that would fail again
        stream.flush()


def test_without_it_a_line_ends_the_process(monkeypatch):
    with open("/dev/full", "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            print(LONG)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_other_errors_are_told(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError), lossy_output():
            print("x", flush=True)
