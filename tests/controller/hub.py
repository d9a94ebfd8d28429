"""As much of the Hugging Face Hub as `datasets` asks for one data set of one JSON-lines file, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

SHA = "a" * 40


class Hub:
    def __init__(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.name, self.asked = name, list[str]()
        self.files = {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_POST(self) -> None:
                self.wanted = json.loads(self.rfile.read(int(self.headers["content-length"])))
                hub.answer(self, body=True)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: Any, body: bool) -> None:
        path = urlparse(request.path).path
        self.asked.append(f"{request.command} {request.path}")
        api = f"/api/datasets/{self.name}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{SHA}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            facts = {"id": self.name, "sha": SHA, "private": False, "gated": False, "disabled": False, "tags": []}
            self._json(request, facts | {"siblings": siblings, "downloads": 0, "likes": 0})
        elif path.startswith(f"{api}/tree/"):
            self._json(request, [] if path.count("/") > 6 else self._tree())
        elif path.startswith(f"{api}/paths-info/"):
            wanted = request.wanted.get("paths", [])
            self._json(request, [entry for entry in self._tree() if entry["path"] in wanted])
        elif path.startswith(f"/datasets/{self.name}/resolve/") and path.rpartition("/")[2] in self.files:
            self._file(request, self.files[path.rpartition("/")[2]], body)
        else:
            self._json(request, {"error": "not found"}, 404)

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]

    def _file(self, request: Any, data: bytes, body: bool) -> None:
        low, high = 0, len(data)
        status = 200
        if (wanted := request.headers.get("range", "")).startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            low, high, status = int(first), min(int(last) + 1 if last else high, high), 206
        request.send_response(status)
        request.send_header("content-length", str(high - low))
        request.send_header("etag", f'"{hashlib.sha1(data).hexdigest()}"')
        request.send_header("x-repo-commit", SHA)
        request.send_header("accept-ranges", "bytes")
        if status == 206:
            request.send_header("content-range", f"bytes {low}-{high - 1}/{len(data)}")
        request.end_headers()
        if body:
            request.wfile.write(data[low:high])

    def _json(self, request: Any, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("content-type", "application/json")
        request.send_header("content-length", str(len(data)))
        if status == 404:
            request.send_header("x-error-code", "EntryNotFound" if "resolve" in request.path else "RepoNotFound")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def close(self) -> None:
        self.server.shutdown()
