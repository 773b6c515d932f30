"""A model hub on 127.0.0.1 that the real huggingface_hub client can download from, with faults that can be switched on.

It answers what that client asks when it downloads a model: facts about a model and a revision, the list of files, and
the files themselves with an ETag, the commit, and ranges (https://huggingface.co/docs/hub/api).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ALWAYS = 1_000_000


@dataclass
class Hub:
    """What the hub has and what is wrong with it; a test sets the fields at any time.

    Attributes:
        models: The folder with the files of each hub id.
        refused: The status, 401 or 403, with which a gated model is refused.
        cuts: For each file name, how many more of its downloads break off in the middle.
        unavailable: Whether everything is answered with 503.
        requests: ``"GET /path"`` of every request so far.
        ranges: The ranges of files that were asked for.
    """

    models: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    unavailable: bool = False
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    endpoint: str = ""

    def open(self) -> None:
        """Listen on a free port of 127.0.0.1, or again on the former port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", urlsplit(self.endpoint).port or 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def reset(self) -> None:
        """Forget models, faults and requests; the address stays."""
        self.__init__(endpoint=self.endpoint)  # type: ignore[misc]

    def downloads(self, file: str) -> int:
        """Return how often the contents of a file were asked for."""
        return sum(request.startswith("GET ") and request.endswith(f"/{file}") for request in self.requests)


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub until the end of the block."""
    hub.open()
    try:
        yield hub
    finally:
        hub.close()


@contextlib.contextmanager
def closed(hub: Hub) -> Iterator[None]:
    """Let nothing listen at the address of the hub until the end of the block."""
    hub.close()
    try:
        yield
    finally:
        hub.open()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    return type("BoundHandler", (HubHandler,), {"hub": hub})


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: Hub

    def do_GET(self) -> None:
        """Answer with headers and body."""
        self.hub.requests.append(f"{self.command} {self.path}")
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case _ if self.hub.unavailable:
                self._send(503)
            case ["api", "models", organisation, name, *rest]:
                self._facts(f"{organisation}/{name}", rest)
            case [organisation, name, "resolve", revision, *path]:
                self._file(f"{organisation}/{name}", revision, "/".join(path))
            case _:
                self._send(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        """Say nothing: requests are in ``hub.requests``."""

    def _facts(self, model: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if folder := self._folder(model, revision):
            files = sorted(file for file in folder.iterdir() if file.is_file())
            self._json(self._tree(files) if rest[:1] == ["tree"] else self._model(model, files), folder)

    def _model(self, model: str, files: list[Path]) -> dict[str, Any]:
        siblings = [{"rfilename": file.name} for file in files]
        return {"id": model, "sha": commit(files[0].parent), "private": False, "tags": [], "siblings": siblings}

    def _tree(self, files: list[Path]) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.read_bytes())}
            for file in files
        ]

    def _file(self, model: str, revision: str, path: str) -> None:
        folder = self._folder(model, revision)
        if folder is None:
            return
        file = folder / path
        if not file.is_file():
            self._error(404, "EntryNotFound")
            return
        body = file.read_bytes()
        headers = {"X-Repo-Commit": commit(folder), "ETag": f'"{digest(body)}"', "Accept-Ranges": "bytes"}
        self._content(body, headers, file.name)

    def _content(self, body: bytes, headers: dict[str, str], name: str) -> None:
        asked = self.headers.get("Range")
        start = 0
        if asked:
            self.hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if self.command == "GET" and self.hub.cuts[name]:
            self.hub.cuts[name] -= 1
            self._send(206 if asked else 200, body[start:], headers, sent=max(0, len(body) // 2 - start))
        else:
            self._send(206 if asked else 200, body[start:], headers)

    def _folder(self, model: str, revision: str) -> Path | None:
        """Return the folder of a model's files, or answer with the reason why not."""
        folder = self.hub.models.get(model)
        if model in self.hub.refused:
            self._error(self.hub.refused[model], "GatedRepo")
        elif folder is None:
            self._error(404, "RepoNotFound")
        elif revision not in ("main", commit(folder)):
            self._error(404, "RevisionNotFound")
        else:
            return folder
        return None

    def _json(self, value: object, folder: Path) -> None:
        headers = {"Content-Type": "application/json", "X-Repo-Commit": commit(folder)}
        self._send(200, json.dumps(value).encode(), headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, headers={"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, sent: int | None = None
    ) -> None:
        """Send an answer; ``sent`` is the number of bytes after which the connection is cut."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body[:sent])


def digest(content: bytes) -> str:
    """Return the hash of some content, as 40 hexadecimal digits."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def commit(folder: Path) -> str:
    """Return the commit of a model: one for each state of its files."""
    return digest("".join(f"{file.name} {file.stat().st_size}" for file in sorted(folder.iterdir())).encode())
