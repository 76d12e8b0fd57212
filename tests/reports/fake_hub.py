"""A hub on this machine for the real client: repositories with commits, large files, and answers that go wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_this_is_secret"


@dataclass
class Repository:
    """One model: its visibility, and the files of each commit."""

    private: bool = False
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b"*.safetensors lfs\n"}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]


@dataclass
class Fault:
    """What goes wrong with the next requests whose path contains a text.

    Args:
        status: of the answer; 0: the connection is cut within the answer, -1: there is no answer.
        after: whether the request does its work before.
        times: number of requests.
        late: a commit is seen after so many further requests.
        headers: of the answer.
    """

    status: int
    after: bool = False
    times: int = 1000
    late: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


class FakeHub:
    """Repositories by name, faults by a part of the path, and the requests so far."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.faults: dict[str, Fault] = {}
        self.requests: list[str] = []
        self.seen: Callable[[str], None] = self.requests.append
        self.pending: list[Any] = []
        self.wait = self.number = 0
        self.ended = threading.Event()
        self.endpoint = ""

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name].files

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content of an answer."""
        self.wait -= 1
        if self.pending and self.wait <= 0:
            repository, files = self.pending.pop()
            repository.commits.append(files)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.endpoint}/{name}"}
            self.repositories[name] = Repository(
                private=asked.get("visibility") == "private" or asked.get("private", 0)
            )
            return 200, {"url": f"{self.endpoint}/{name}", "name": name}
        if path == "/api/validate-yaml":
            wrong = b"license: made-up" in body
            return (400 if wrong else 200), {"errors": [{"message": "no such license"}] * wrong, "warnings": []}
        if path.startswith("/storage/"):
            self.large[path.rpartition("/")[2]] = body
            return 200, {}
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repository = self.repositories.get("/".join(parts[:2]).removesuffix(".git"))
        if repository is None:
            return 404, {"error": "Repository not found"}
        rest = parts[2:] or ["revision", "main"]
        number = self.number = (
            int(rest[1], 16) - 1 if re.fullmatch("[0-9a-f]{40}", rest[1]) else len(repository.commits) - 1
        )
        if rest[0] == "revision":
            return 200, {"id": "/".join(parts[:2]), "sha": sha(number), "private": repository.private, "tags": []}
        if rest[0] == "tree":
            return 200, [entry(*item) for item in sorted(repository.commits[number].items())]
        if rest[0] == "resolve":
            return 200, repository.commits[number]["/".join(rest[2:])]
        if rest[0] == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = [{"path": f["path"], "size": f["size"]} for f in json.loads(body)["files"]]
            files = [{**f, "uploadMode": modes[is_large(f["path"])], "shouldIgnore": False} for f in files]
            present = {name: entry(name, content) for name, content in repository.files.items()}
            for f in files:
                known = present.get(f["path"], {})
                f["oid"] = known.get("lfs", known).get("oid")
            return 200, {"files": files}
        if rest[0] == "info":
            objects = json.loads(body)["objects"]
            links = [{"upload": {"href": f"{self.endpoint}/storage/{each['oid']}"}} for each in objects]
            both = zip(objects, links, strict=True)
            return 200, {"transfer": "basic", "objects": [{**each, "actions": link} for each, link in both]}
        assert rest[0] == "commit", path
        return self.commit("/".join(parts[:2]), [json.loads(line) for line in body.splitlines()])

    def commit(self, name: str, lines: list[Any]) -> tuple[int, Any]:
        repository = self.repositories[name]
        if lines[0]["value"].get("parentCommit") != sha(len(repository.commits) - 1):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        files = dict(repository.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        if self.wait > 0:
            self.pending.append((repository, files))
        else:
            repository.commits.append(files)
        oid = sha(len(repository.commits) - 1 + len(self.pending))
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{name}/commit/{oid}"}


def sha(number: int) -> str:
    return f"{number + 1:040x}"


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def entry(name: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it: large ones by SHA-256, others by their name in git."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    whole: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": oid}
    if is_large(name):
        large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        whole |= {"lfs": large, "oid": hashlib.sha1(b"a pointer").hexdigest()}
    return whole


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            hub.seen(f"{self.command} {path}")
            fault = next((fault for part, fault in hub.faults.items() if part in path and fault.times), None)
            if fault is not None:
                fault.times -= 1
                hub.wait = fault.late + 1 if fault.late else 0
            status, content = (500, {}) if fault and not fault.after else hub.answer(self.command, path, body)
            if fault is None:
                self._send(status, content)
            elif fault.status > 0:
                self._send(fault.status, {"error": "it went wrong"}, fault.headers)
            elif fault.status < 0:
                hub.ended.wait(30)
                self.close_connection = True
            else:
                self._send(status, content, cut=True)

        do_HEAD = do_POST = do_PUT = do_GET

        def _send(
            self, status: int, content: Any, headers: Mapping[str, str] | None = None, *, cut: bool = False
        ) -> None:
            payload = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            git = hashlib.sha1(payload).hexdigest()
            for name, value in {"X-Repo-Commit": sha(hub.number), "ETag": f'"{git}"', **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(payload[: len(payload) // 2] if cut else payload)
            if cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextmanager
def fake_hub(patch: pytest.MonkeyPatch, cache: Any) -> Iterator[FakeHub]:
    """The hub of the real client in this process, whose pauses take no time."""
    from huggingface_hub import close_session

    hub = FakeHub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        # a client that has left is no news
        server.daemon_threads = True
        patch.setattr(server, "handle_error", lambda *_: None)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("HF_TOKEN", TOKEN)
        constants = {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
            "HF_HUB_CACHE": str(cache),
        }
        for name, value in constants.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        close_session()
        try:
            yield hub
        finally:
            hub.ended.set()
            # threads that a push has left alone
            for thread in threading.enumerate():
                if thread.name.endswith("(run)"):
                    thread.join(20)
            server.shutdown()
            close_session()
