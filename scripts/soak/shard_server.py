"""Web servers of this machine with shards of a folder, and with the faults that tests ask for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ShardServer:
    """What a server does, and what it was asked for.

    Args:
        root: folder whose files it sends.

    Attributes:
        url: of the folder.
        breaks: how many more answers of a file end in the middle, by its name.
        ends: the byte of a file beyond which nothing is ever sent, by name.
        status: what it answers instead of a file, by name.
        ranges: whether it knows ranges.
        asked: how often each file was asked for.
        starts: files in the order in which they were sent, and from which byte on.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, ""
        self.breaks: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.status: dict[str, int] = {}
        self.ranges = True
        self.asked: Counter[str] = Counter()
        self.starts: list[tuple[str, int]] = []


@contextmanager
def serve(root: Path) -> Iterator[ShardServer]:
    """A server of a folder on a free port, for as long as the context lasts."""
    about = ShardServer(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            about.asked[name] += 1
            status = about.status.get(name, 200 if (root / name).is_file() else 404)
            if status != 200:
                self.send_error(status)
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
