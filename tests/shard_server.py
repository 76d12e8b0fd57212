"""Local web servers with the shards of a folder, and with faults for tests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ShardServer:
    """Behaviour of a server, and the requests that it received.

    Args:
        root: folder of the files.

    Attributes:
        url: URL of the folder.
        breaks: number of further responses that end in the middle, by file name.
        ends: byte of a file after which nothing is sent, by file name.
        status: status of the response instead of a file, by file name.
        ranges: whether the server supports range requests.
        seconds: how long a response hangs or drips.
        moods: how the next responses for a file fail, by name: it "hangs" or "drips", sends a page of "html", "lies"
            about its length, "redirects" for ever, or "moves" to another path that answers.
        asked: number of requests by file name.
        starts: names and first bytes of the files in the order of the responses.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, ""
        self.breaks: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.status: dict[str, int] = {}
        self.ranges = True
        self.seconds = 2.5
        self.moods: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.starts: list[tuple[str, int]] = []


@contextmanager
def serve(root: Path) -> Iterator[ShardServer]:
    """A server of a folder on a free port, which runs in the block."""
    about = ShardServer(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            about.asked[name] += 1
            status = about.status.get(name, 200 if (root / name).is_file() else 404)
            if status != 200:
                self.send_error(status)
                return
            if about.moods.get(name):
                payload = self.misbehave(about.moods[name].pop(0), (root / name).stat().st_size)
                with suppress(OSError):
                    self.wfile.write(payload)
                return
            start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if about.ranges else 0
            about.starts.append((name, start))
            payload = (root / name).read_bytes()[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if about.breaks.get(name, 0):
                about.breaks[name] -= 1
                payload = payload[: len(payload) // 2]
            payload = payload[: max(about.ends.get(name, 1 << 40) - start, 0)]
            self.wfile.write(payload)

        def misbehave(self, mood: str, size: int) -> bytes:
            """Answer with a wrong header; returns the wrong body."""
            if mood in ("redirects", "moves"):
                self.send_response(302)
                self.send_header("Location", self.path if mood == "redirects" else f"/elsewhere{self.path}")
                if mood == "redirects":
                    about.moods[self.path.rpartition("/")[2]].insert(0, mood)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(size + 1000 if mood == "lies" else size))
            self.end_headers()
            if mood == "hangs":
                time.sleep(about.seconds)
            for _ in range(20 if mood == "drips" else 0):
                with suppress(OSError):
                    self.wfile.write(b"x")
                time.sleep(about.seconds / 20)
            return {"html": b"<html>sorry</html>" * (size // 18 + 1), "lies": bytes(size)}.get(mood, b"")[: size + 1]

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        about.url = f"http://127.0.0.1:{server.server_port}/data"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield about
        finally:
            server.shutdown()
            thread.join()
