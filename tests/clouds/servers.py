"""Local servers for the real clients of S3 and the hub: moto's, a small hub, and a wire before them that breaks."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest

SECRET = "fourteen-secret-letters"
"""Key of the bucket and token of the hub."""
SIGNATURE = "signed-by-the-hub"
"""Part of the URLs to which the hub redirects."""
# blocks of the clients, smaller than a shard: they read several
_BLOCK = 4096


class Wire:
    """A port whose bytes go to a server and come back, until it is told to break something.

    Args:
        target: port of the server.

    Attributes:
        port: port of the wire.
        cut: number of further bytes of answers after which a connection breaks once; None: none does.
        flip: bytes of an answer, in which one bit is another once; None: none is.
        answered: number of further connections that are answered, later ones are accepted and left alone; None: all.
        asked: number of accepted connections.
    """

    def __init__(self, target: int) -> None:
        self._target, self.port = target, 0
        self.cut: int | None = None
        self.flip: bytes | None = None
        self.answered: int | None = None
        self.asked = 0
        self._sockets: list[socket.socket] = []

    def start(self) -> None:
        """Accept connections, on the port of before."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._sockets = [listener]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Break all connections and refuse others, as where a server is killed."""
        for each in [*self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.asked += 1
                self._sockets.append(client)
                if self.answered is not None:
                    self.answered -= 1
                    if self.answered < 0:
                        continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(*ends, ends[0] is server), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                whole = len(data)
                if back:
                    data = self._damaged(data)
                sink.sendall(data)
                if len(data) < whole:
                    break
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        if self.flip is not None and self.flip in data:
            data = data.replace(self.flip, bytes([self.flip[0] ^ 1]) + self.flip[1:])
            self.flip = None
        if self.cut is not None:
            part, self.cut = data[: self.cut], None if self.cut < len(data) else self.cut - len(data)
            return part
        return data


@dataclass
class Cloud:
    """A folder of shards in a bucket or a repository, behind a wire.

    Attributes:
        folder: local folder of the same files.
        url: URL of the folder.
        elsewhere: URL of a folder in a bucket or repository that does not exist.
        wire: what lies between client and server.
        refuse: refuses the client's credentials from now on.
        options: options of the client, as fsspec's configuration files hold them.
    """

    folder: Path
    url: str
    elsewhere: str
    wire: Wire
    refuse: Callable[[], None]
    options: dict[str, object]


@contextmanager
def s3(port: int, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A bucket with the files of a folder, on moto's server."""
    from s3fs import S3FileSystem

    def ask(method: str, path: str, payload: bytes, kind: str = "binary/octet-stream") -> None:
        url = f"http://127.0.0.1:{port}/{path}"
        urlopen(Request(url, data=payload, headers={"Content-Type": kind}, method=method)).close()

    def allow(requests: bytes) -> None:
        ask("POST", "moto-api/reset-auth", requests, "text/plain")

    # of an earlier test
    ask("POST", "moto-api/reset", b"")
    ask("PUT", "bucket", b"")
    for file in folder.iterdir():
        ask("PUT", f"bucket/set/{file.name}", file.read_bytes())
    wire = Wire(port)
    wire.start()
    # nothing of the machine's own settings
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("NO_PROXY", "127.0.0.1")
    patch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    # variables are read by the first client, which is kept
    S3FileSystem.clear_instance_cache()
    try:
        options = _options("s3", patch, default_block_size=_BLOCK)
        yield Cloud(folder, "s3://bucket/set", "s3://nowhere/set", wire, lambda: allow(b"0"), options)
    finally:
        allow(b"inf")
        wire.stop()


@contextmanager
def hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A repository with the files of a folder, on a hub of a few routes; skipped without huggingface_hub."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install huggingface_hub")
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    is_open = True

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            name = path.rpartition("/")[2]
            if path.startswith("/storage/"):
                # a token that went to another host would be known there
                if self.headers["Authorization"] is not None or not (folder / name).is_file():
                    self._fail(403)
                else:
                    self._send((folder / name).read_bytes())
            elif not is_open or self.headers["Authorization"] != f"Bearer {SECRET}":
                self._fail(401, message="Invalid credentials in Authorization header")
            elif "/owner/name" not in path:
                self._fail(404, "RepoNotFound", "Repository not found")
            elif "/resolve/" in path and name.endswith(".tar"):
                self.send_response(302)
                host = f"http://localhost:{self.headers['Host'].rpartition(':')[2]}"
                self.send_header("Location", f"{host}/storage/{name}?Expires=9&Signature={SIGNATURE}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif "/resolve/" in path:
                self._send((folder / name).read_bytes())
            elif path.endswith("/tree/main/set"):
                files = [{"type": "file", "path": f"set/{f.name}", "size": f.stat().st_size} for f in folder.iterdir()]
                self._send(json.dumps([{**file, "oid": "0"} for file in files]).encode())
            elif "/tree/" in path:
                self._fail(404, "EntryNotFound", "Entry not found")
            else:
                self._send(json.dumps({"id": "owner/name", "tags": []}).encode())

        def _send(self, payload: bytes) -> None:
            first, _, last = (self.headers["Range"] or "bytes=0-")[6:].partition("-")
            payload = payload[int(first) : int(last) + 1 if last else None]
            self.send_response(206 if self.headers["Range"] else 200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def _fail(self, status: int, code: str | None = None, message: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Message", message)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    def refuse() -> None:
        nonlocal is_open
        is_open = False

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        stack.callback(server.shutdown)
        wire = Wire(server.server_port)
        wire.start()
        stack.callback(wire.stop)
        # HF_ENDPOINT and HF_TOKEN are read by the import
        endpoint = f"http://127.0.0.1:{wire.port}"
        options = _options("hf", patch, endpoint=endpoint, token=SECRET, block_size=_BLOCK)
        yield Cloud(folder, "hf://datasets/owner/name/set", "hf://datasets/owner/other/set", wire, refuse, options)


def _options(scheme: str, patch: pytest.MonkeyPatch, **options: object) -> dict[str, object]:
    """Options that a user would write into fsspec's configuration files."""
    from fsspec.config import conf

    patch.setitem(conf, scheme, options)
    return options
