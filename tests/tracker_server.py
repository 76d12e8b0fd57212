"""A local server of Weights & Biases for tests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Mood = Literal["answers", "hangs", "stalls", "dies"]


class TrackerServer:
    """The part of the HTTP interface of the service that its client uses in a run, inside a `with` block.

    Args:
        mood: whether the server answers, accepts connections without answering, answers only health checks, or closes
            after the first metrics.

    Attributes:
        bodies: bodies of all understood requests.
        got_metrics: whether metrics have arrived.
    """

    def __init__(self, mood: Mood):
        self.mood = mood
        self.bodies: list[str] = []
        self.got_metrics = threading.Event()
        self._stop = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> TrackerServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self.close()

    def close(self) -> None:
        """Stop the server: further connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                if server.mood == "hangs":
                    # waits until the end of the test
                    server._stop.wait()
                    self.close_connection = True
                    return
                super().handle_one_request()

            def do_GET(self) -> None:
                self._answer({})

            def do_PUT(self) -> None:
                self._body()
                self._answer({})

            def do_POST(self) -> None:
                body = self._body()
                if server.mood == "stalls":
                    server._stop.wait()
                    self.close_connection = True
                    return
                server.bodies.append(body)
                if self.path.endswith("/file_stream"):
                    if "wandb-history.jsonl" in body:
                        server.got_metrics.set()
                        if server.mood == "dies":
                            threading.Thread(target=server.close, daemon=True).start()
                            self.close_connection = True
                            return
                    self._answer({"exitcode": None, "limits": {}})
                elif self.path == "/graphql":
                    self._answer({"data": _answers(json.loads(body))})
                else:
                    # usage statistics of the client
                    self._answer({})

            def _body(self) -> str:
                return self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")

            def _answer(self, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        return Handler


def _answers(request: dict[str, Any]) -> dict[str, Any]:
    """Answers to the queries of the client, version 0.31."""
    query, variables = request.get("query", ""), request.get("variables") or {}
    project = {"id": "cA==", "name": variables.get("project") or "p", "entity": {"id": "ZQ==", "name": "e"}}
    run = {
        "id": "cnVu",
        "name": variables.get("name") or "run",
        "displayName": variables.get("displayName") or "run",
        "description": None,
        "config": "{}",
        "sweepName": None,
        "project": project,
        "historyLineCount": 0,
    }
    if "upsertBucket" in query:
        return {"upsertBucket": {"bucket": run, "inserted": True}}
    if "createRunFiles" in query:
        files = [{"name": name, "uploadUrl": None} for name in variables.get("files", ())]
        return {"createRunFiles": {"runID": "cnVu", "uploadHeaders": [], "files": files}}
    viewer = {"id": "dXNlcg==", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}
    return {"viewer": viewer, "serverInfo": None, "model": None, "project": None, "__type": None}
