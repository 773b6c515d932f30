"""A model hub on 127.0.0.1 that the real huggingface_hub client can download from, with faults that can be switched on.

It answers what that client asks when it downloads a model: facts about a model and a revision, the list of files, and
the files themselves with an ETag and the commit (https://huggingface.co/docs/hub/api).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What the hub has and what is wrong with it; a test sets the fields at any time.

    Attributes:
        models: The folder with the files of each hub id.
        refused: The status, 401 or 403, with which a gated model is refused.
        unavailable: Whether everything is answered with 503.
        requests: ``"GET /path"`` of every request so far.
    """

    models: dict[str, Path] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    unavailable: bool = False
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def open(self) -> None:
        """Listen on a free port of 127.0.0.1, or again on the former port."""
        handler = type("BoundHandler", (HubHandler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", urlsplit(self.endpoint).port or 0), handler)
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
        """Return the number of requests for the contents of a file."""
        return sum(request.startswith("GET ") and request.endswith(f"/{file}") for request in self.requests)


@contextlib.contextmanager
def closed(hub: Hub) -> Iterator[None]:
    """Let nothing listen at the address of the hub until the end of the block."""
    hub.close()
    try:
        yield
    finally:
        hub.open()


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: Hub

    def do_GET(self) -> None:
        """Answer with headers and body."""
        self.hub.requests.append(f"{self.command} {self.path}")
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case _ if self.hub.unavailable:
                self._send(503)
            case ["api", "models", organisation, name, "tree", revision]:
                if folder := self._folder(f"{organisation}/{name}", revision):
                    files = [(file.name, file.read_bytes()) for file in sorted(folder.iterdir())]
                    tree = [
                        {"type": "file", "path": path, "size": len(content), "oid": digest(content)}
                        for path, content in files
                    ]
                    self._send(200, json.dumps(tree).encode())
            case ["api", "models", organisation, name, *rest]:
                model = f"{organisation}/{name}"
                if folder := self._folder(model, rest[1] if rest else "main"):
                    siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                    about = {"id": model, "sha": commit(folder), "private": False, "tags": [], "siblings": siblings}
                    self._send(200, json.dumps(about).encode())
            case [organisation, name, "resolve", revision, *path]:
                if folder := self._folder(f"{organisation}/{name}", revision):
                    self._file(folder, folder / "/".join(path))
            case _:
                self._send(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        """Say nothing: requests are in ``hub.requests``."""

    def _file(self, folder: Path, file: Path) -> None:
        if not file.is_file():
            self._send(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        body = file.read_bytes()
        self._send(200, body, {"X-Repo-Commit": commit(folder), "ETag": f'"{digest(body)}"'})

    def _folder(self, model: str, revision: str) -> Path | None:
        """Return the folder of a model's files, or answer with the reason why not."""
        folder = self.hub.models.get(model)
        if model in self.hub.refused:
            self._send(self.hub.refused[model], headers={"X-Error-Code": "GatedRepo"})
        elif folder is None:
            self._send(404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", commit(folder)):
            self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return folder
        return None

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)


def digest(content: bytes) -> str:
    """Return the hash of some content, as 40 hexadecimal digits."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def commit(folder: Path) -> str:
    """Return the commit of a model: one for each state of its files."""
    return digest("".join(f"{file.name} {file.stat().st_size}" for file in sorted(folder.iterdir())).encode())
