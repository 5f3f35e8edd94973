"""A W&B server that stores what it receives and fails on request: the HTTP interface that `wandb-core` 0.31 uses."""

import gzip
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "5ec2e7" + "01ab" * 8 + "2f"
ENTITY = "someone"


class FakeWandb(ThreadingHTTPServer):
    """Listens on its own port as soon as it is created.

    Attributes:
        status: HTTP status of every answer to rows; normally 200.
        rows: of the history, by run.
        alerts: title and text of each.
        exit_codes: of finished runs, by run.
        configs: by run.
        views: saved workspaces as received, by name; a new project is empty.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.alerts: list[tuple[str, str]] = []
        self.exit_codes: dict[str, int] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.operations: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL answer; an unknown operation gets no data, which the client tolerates."""
        for name, reply in (
            ("UpsertBucket", self._upserted),
            ("RunResumeStatus", lambda _: {"model": {"bucket": None}}),
            ("CreateRunFiles", self._files),
            ("NotifyScriptableRunAlert", self._alerted),
            ("UpsertView2", self._saved),
            ("allViews", self._viewed),
            ("GetDefaultEntity", lambda _: {"viewer": {"id": "1", "entity": ENTITY}}),
            ("Viewer", lambda _: {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}"}}),
        ):
            if name in query:
                self.operations.append(name)
                return dict(reply(variables))
        return {}

    def _upserted(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = str(variables.get("name"))
        if variables.get("config"):
            self.configs[name] = json.loads(variables["config"])
        project = {"id": "p", "name": str(variables.get("project")), "entity": {"id": "e", "name": ENTITY}}
        bucket = {
            "id": name,
            "name": name,
            "displayName": name,
            "config": "{}",
            "historyLineCount": 0,
            "project": project,
        }
        return {"upsertBucket": {"bucket": {**bucket, "sweepName": None}, "inserted": True}}

    def _files(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables.get("files", ())]
        return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}

    def _alerted(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.alerts.append((variables["title"], variables["text"]))
        return {"notifyScriptableRunAlert": {"success": True}}

    def _saved(self, variables: dict[str, Any]) -> dict[str, Any]:
        """As in W&B, a view without an id is new, even if its name exists."""
        if self.status != 200:
            return {}
        same_id = [name for name, view in self.views.items() if view["id"] == variables.get("id")]
        name = same_id[0] if same_id else f"{variables['name']}{'+' * (variables['name'] in self.views)}"
        self.views[name] = {**variables, "id": f"view-{name}"}
        return {"upsertView": {"view": {"id": f"view-{name}", "name": variables["name"]}, "inserted": not same_id}}

    def _viewed(self, variables: dict[str, Any]) -> dict[str, Any]:
        if not self.views:
            return {"project": None}
        same_name = [view for name, view in self.views.items() if name == variables["viewName"]]
        return {"project": {"allViews": {"edges": [{"node": view} for view in same_name]}}}

    def take(self, run: str, body: dict[str, Any]) -> None:
        """Store part of a run's file stream."""
        history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
        rows = self.rows.setdefault(run, [])
        rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if body.get("complete"):
            self.exit_codes[run] = int(body.get("exitcode", 0))


class _Handler(BaseHTTPRequestHandler):
    server: FakeWandb
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path.endswith("/file_stream"):
            if self.server.status == 200:
                self.server.take(self.path.split("/")[-2], json.loads(body))
            return self._reply({}, self.server.status)
        asked: dict[str, Any] = {}
        with suppress(ValueError):
            asked = json.loads(body)
        data = self.server.answer(str(asked.get("query", "")), asked.get("variables") or {})
        return self._reply({"data": data}, 200)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply({}, 200)

    def do_GET(self) -> None:
        self._reply({}, 200)

    def _reply(self, content: dict[str, Any], status: int) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
