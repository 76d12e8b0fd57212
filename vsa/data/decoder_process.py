"""Decoding of video files in a separate process, with limits of time and memory for each file.

Decoders are large C libraries and files are untrusted: a file that hangs, crashes or exhausts memory must cost only
itself. The process decodes into an unnamed file in memory and passes its descriptor to the caller, so that pixels are
not copied again.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vsa.data.video_files import decode, probe_video

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_MESSAGE = 1 << 20
_STARTS_WITHIN = 120.0


class DecoderProcess:
    """Reader of video files like `vsa.data.video_files`, in another process; a context manager.

    The process starts with the first file and again after one that ended it.

    Args:
        seconds: time limit per file.
        memory_gib: memory limit per file in GiB, without the decoded frames.
    """

    def __init__(self, *, seconds: float, memory_gib: float) -> None:
        self._seconds, self._memory_gib = seconds, memory_gib
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._next: dict[str, str] = {}
        # the request whose answer has not been received yet
        self._sent: dict[str, Any] | None = None

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def announce(self, paths: Sequence[Path]) -> None:
        """Set the order in which files will be read, so that the next one is decoded while one is in use."""
        self._next = dict(itertools.pairwise(map(str, paths)))

    def read_video(
        self, path: str | Path, *, frames: int | None = None, fps: float | None = None
    ) -> tuple[Tensor, float]:
        """See `vsa.data.video_files.read_video`."""
        import torch

        request = {"path": str(path), "frames": frames, "fps": fps, "read": True}
        answer, descriptors = self._ask(request)
        if str(path) in self._next and self._process is not None:
            self._send({**request, "path": self._next[str(path)]})
        if "error" in answer:
            raise ValueError(answer["error"])
        descriptor = descriptors[0]
        try:
            # a private mapping: a change of the clip copies the page
            memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        return torch.frombuffer(memory, dtype=torch.uint8).view(answer["shape"]), answer["fps"]

    def probe_video(self, path: str | Path, *, fps: float | None = None) -> tuple[int | None, int, int]:
        """See `vsa.data.video_files.probe_video`; raises as `read_video`."""
        answer, _ = self._ask({"path": str(path), "fps": fps, "read": False})
        if "error" in answer:
            raise ValueError(answer["error"])
        frames, height, width = answer["probed"]
        return frames, height, width

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The answer to a request and the descriptors with it; how the process ended if it did not answer."""
        if self._sent is not None and self._sent != request:
            # the answer is for another file, which was announced
            for descriptor in self._receive()[1]:
                os.close(descriptor)
        if self._sent is None:
            self._send(request)
        return self._receive()

    def _send(self, request: dict[str, Any]) -> None:
        if self._process is None:
            self._start()
        assert self._socket is not None
        self._sent = request
        # a process that has ended is reported when its answer is read
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        assert self._socket is not None
        assert self._sent is not None
        path, self._sent = self._sent["path"], None
        too_long = f"cannot decode video {path}: it takes more than {self._seconds:g} s (--decode-seconds)"
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST_MESSAGE, 1)
        except TimeoutError:
            self._end()
            return {"error": too_long}, []
        except ConnectionError:
            message, descriptors = b"", []
        if message:
            return json.loads(message), list(descriptors)
        how = self._end()
        # a process that was decoding ahead ends itself
        return {
            "error": too_long if how == "SIGALRM" else f"cannot decode video {path}: its decoder crashed ({how})"
        }, []

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            limits = [str(theirs.fileno()), str(self._seconds), str(self._memory_gib)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vsa.data.decoder_process", *limits],
                # the module path of this process
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        # the time of its imports does not count for the file
        self._socket.settimeout(_STARTS_WITHIN)
        if self._socket.recv(1) != b"!":
            raise RuntimeError(f"the decoder process does not start ({self._end()})")
        self._socket.settimeout(self._seconds)

    def _end(self) -> str:
        """End the process if it runs; returns how it ended if it had ended before."""
        process, self._process, self._sent = self._process, None, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # a crashed process needs a moment to end
            process.wait(0.1)
        exit_status = process.poll()
        process.kill()
        process.wait()
        return (
            "no reason given"
            if exit_status is None
            else signal.Signals(-exit_status).name
            if exit_status < 0
            else f"status {exit_status}"
        )


def main(descriptor: int, seconds: float, memory_gib: float) -> None:
    """Answer requests until the caller closes the connection."""
    # the calling process handles Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # limits private writable memory, because threads reserve stacks and arenas that they never use
    most = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        connection.sendall(b"!")
        for line in requests:
            # ends a hanging decoder even if the calling process has ended
            signal.alarm(int(seconds) + 10)
            answer, descriptors = _answer(json.loads(line), memory_gib)
            signal.alarm(0)
            socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
            for each in descriptors:
                os.close(each)
            # a container and its streams refer to each other, and a decoder's threads live as long as they
            gc.collect()


def _answer(request: dict[str, Any], memory_gib: float) -> tuple[dict[str, Any], list[int]]:
    path = Path(request["path"])
    try:
        if not request["read"]:
            return {"probed": probe_video(path, fps=request["fps"])}, []
        pictures, rate = decode(path, frames=request["frames"], fps=request["fps"], threads=0)
        descriptor = _unnamed_file()
        for picture in pictures:
            view = np.ascontiguousarray(picture).data.cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        return {"shape": [len(pictures), *pictures[0].shape], "fps": rate}, [descriptor]
    except MemoryError:
        reason = f"it takes more than {memory_gib:g} GiB of memory (--decode-memory)"
        return {"error": f"cannot decode video {path}: {reason}"}, []
    except ValueError as error:
        return {"error": str(error)}, []
    except Exception as error:
        return {"error": f"cannot decode video {path}: {type(error).__name__} {error}"[:2000]}, []


def _unnamed_file() -> int:
    """Descriptor of an unnamed file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("frames")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
