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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from vsa.data.video_files import VideoReader, probe_video
from vsa.threads import each_in_threads

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_MESSAGE = 1 << 20
_STARTS_WITHIN = 120.0
# pictures in an answer, whose times must fit into a message
_THUMBNAILS = 1000


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
        self._next: dict[tuple[str, int | None], dict[str, Any]] = {}
        # what is irregular about the times of the clip read last
        self.times = ""
        # the request whose answer has not been received yet
        self._sent: dict[str, Any] | None = None

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def announce(self, clips: Sequence[tuple[Path, int | None, int | None]]) -> None:
        """Set the order in which clips will be read, so that the next one is decoded while one is in use.

        Args:
            clips: file, first frame and number of frames of each, as in `read_video`.
        """
        requests = [{"path": str(path), "start": start, "frames": frames} for path, start, frames in clips]
        self._next = {(one["path"], one["start"]): following for one, following in itertools.pairwise(requests)}

    def read_video(
        self, path: str | Path, *, frames: int | None = None, fps: float | None = None, start: int | None = None
    ) -> tuple[Tensor, float]:
        """See `vsa.data.video_files.read_video`; with a `start` the file stays open for its next clip."""
        import torch

        request = {"what": "clip", "path": str(path), "frames": frames, "fps": fps, "start": start}
        answer, descriptors = self._ask(request)
        # a clip that lies far behind takes several times the limit
        while "passed" in answer:
            answer, descriptors = self._ask(request)
        following = self._next.get((str(path), start))
        if following is not None and self._process is not None:
            self._send({**request, **following})
        if "error" in answer:
            raise ValueError(answer["error"])
        self.times = answer["times"]
        return torch.from_numpy(_pixels(descriptors[0])).view(answer["shape"]), answer["fps"]

    def thumbnails(self, path: str | Path) -> Iterator[tuple[np.ndarray, list[float], float | None]]:
        """All pictures of a file in turn: uint8 `[T, 27, 48, 3]`, until when each is shown in s, the file's rate."""
        start = 0
        while True:
            answer, descriptors = self._ask({"what": "thumbnails", "path": str(path), "fps": None, "start": start})
            if "error" in answer:
                raise ValueError(answer["error"])
            if not answer["ends"]:
                return
            start += len(answer["ends"])
            yield _pixels(descriptors[0]).reshape(-1, 27, 48, 3), answer["ends"], answer["rate"]

    def probe_video(self, path: str | Path, *, fps: float | None = None) -> tuple[int | None, int, int]:
        """See `vsa.data.video_files.probe_video`; raises as `read_video`."""
        answer, _ = self._ask({"what": "size", "path": str(path), "fps": fps})
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


class DecoderPool:
    """Decoder processes for several threads; a context manager.

    Args:
        count: number of processes.
        seconds, memory_gib: limits per file; see `DecoderProcess`.
    """

    def __init__(self, count: int, *, seconds: float, memory_gib: float) -> None:
        self._all = [DecoderProcess(seconds=seconds, memory_gib=memory_gib) for _ in range(count)]
        self._free: SimpleQueue[DecoderProcess] = SimpleQueue()
        for decoder in self._all:
            self._free.put(decoder)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *error: object) -> None:
        for decoder in self._all:
            decoder.__exit__(*error)

    @contextlib.contextmanager
    def one(self) -> Iterator[DecoderProcess]:
        """A decoder that no other thread has."""
        decoder = self._free.get()
        try:
            yield decoder
        finally:
            self._free.put(decoder)

    def each(self, work: Callable[[int, DecoderProcess], None], numbers: Sequence[int]) -> None:
        """Call `work` with each number and a decoder, in as many threads as there are decoders."""

        def call(number: int, stopping: Event) -> None:
            if not stopping.is_set():
                with self.one() as decoder:
                    work(number, decoder)

        each_in_threads(call, numbers, len(self._all))


def _pixels(descriptor: int) -> np.ndarray:
    """The bytes of an unnamed file, which is closed."""
    try:
        # a private mapping: a change of the clip copies the page
        return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    finally:
        os.close(descriptor)


def main(descriptor: int, seconds: float, memory_gib: float) -> None:
    """Answer requests until the caller closes the connection."""
    # the calling process handles Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # limits private writable memory, because threads reserve stacks and arenas that they never use
    most = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answers = _Answers(seconds, memory_gib)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        connection.sendall(b"!")
        for line in requests:
            # ends a hanging decoder even if the calling process has ended
            signal.alarm(int(seconds) + 10)
            answer, descriptors = answers.answer(json.loads(line))
            signal.alarm(0)
            socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
            for each in descriptors:
                os.close(each)
            # a container and its streams refer to each other, and a decoder's threads live as long as they
            gc.collect()


class _Answers:
    """Answers to requests, with the file that is open for its next clip."""

    def __init__(self, seconds: float, memory_gib: float) -> None:
        self._seconds, self._memory_gib = seconds, memory_gib
        self._reader: VideoReader | None = None
        self._kind: tuple[str, ...] = ()

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The answer to a request and the descriptors with it."""
        path = Path(request["path"])
        try:
            return self._answer(path, request)
        except MemoryError:
            reason = f"it takes more than {self._memory_gib:g} GiB of memory (--decode-memory)"
            return {"error": f"cannot decode video {path}: {reason}"}, []
        except ValueError as error:
            return {"error": str(error)}, []
        except Exception as error:
            return {"error": f"cannot decode video {path}: {type(error).__name__} {error}"[:2000]}, []

    def _answer(self, path: Path, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if request["what"] == "size":
            return {"probed": probe_video(path, fps=request["fps"])}, []
        start = request["start"]
        kind, number = (request["what"], str(path), str(request["fps"])), start or 0
        if self._reader is None or start is None or self._kind != kind or self._reader.position > number:
            if self._reader is not None:
                self._reader.close()
            self._reader, self._kind = None, kind
            self._reader = VideoReader(path, fps=request["fps"], threads=0)
        reader = self._reader
        # an answer comes long before the limit of time, in which a whole film does not fit
        if not reader.skip(number, seconds=self._seconds / 2):
            return {"passed": reader.position}, []
        if request["what"] == "thumbnails":
            pictures, ends = reader.thumbnails(_THUMBNAILS, seconds=self._seconds / 2)
            return {"ends": ends, "rate": reader.rate}, [_unnamed_file(pictures)] if ends else []
        pictures, rate = reader.take(request["frames"])
        if start is None:
            reader.close()
            self._reader = None
        shape = [len(pictures), *pictures[0].shape]
        return {"shape": shape, "fps": rate, "times": reader.times}, [_unnamed_file(pictures)]


def _unnamed_file(pictures: Sequence[np.ndarray]) -> int:
    """Descriptor of an unnamed file with the pixels, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("frames")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    for picture in pictures:
        view = np.ascontiguousarray(picture).data.cast("B")
        while view:
            view = view[os.write(descriptor, view) :]
    return descriptor


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
