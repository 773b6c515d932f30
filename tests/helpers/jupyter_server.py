"""One Jupyter server in temporary folders; JupyterLab, Notebook 7 and Voila are three addresses of it."""

from __future__ import annotations

import ast
import contextlib
import json
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

from helpers.kernels import environment

OPTIONS = (
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",
    "--no-browser",
    "--allow-root",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--VoilaConfiguration.allow_theme_override=YES",
)


class Kernel:
    """A second client of a running kernel: what the front end shows is compared with what the kernel knows."""

    def __init__(self, connection_file: Path) -> None:
        self.client = BlockingKernelClient(connection_file=str(connection_file))
        self.client.load_connection_file()
        self.client.start_channels(
            hb=False
        )  # A kernel that is busy starting misses heartbeats, and would be taken for dead.
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> str:
        """Run a cell outside the notebook, and return its output or fail with its error."""
        printed: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(
            code, store_history=False, allow_stdin=False, output_hook=keep, timeout=60
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(printed)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression made of plain literals."""
        return ast.literal_eval(self.run(f"print(repr({expression}))"))

    def begin(self, code: str) -> None:
        """Send a cell and do not wait for it."""
        self.client.execute(code, store_history=False, allow_stdin=False)

    def close(self) -> None:
        """Close the client; the kernel continues."""
        self.client.stop_channels()


class Server:
    """A Jupyter server that runs until :meth:`close`, with its files and the notebooks in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self.token = secrets.token_hex(16)
        self.kernels: list[Kernel] = []
        self._write_settings("notification", {"checkForUpdates": False, "fetchNews": "false"})
        self.log = (folder / "server.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "jupyter-lab"), *OPTIONS,
             f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}"],
            env=self._environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.url = self._wait_for_url()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the server's REST interface."""
        request = urllib.request.Request(  # noqa: S310 - the address is our own server's
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
            return json.loads(reply.read() or b"null")

    def set_theme(self, theme: str) -> None:
        """Choose the theme of the pages that are opened from now on: "light" or "dark"."""
        self._write_settings("themes", {"theme": f"JupyterLab {theme.title()}"})

    def start_session(self, name: str) -> Kernel:
        """Start the kernel of a notebook before its page is opened, which then asks for none."""
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        return self.kernel(self.ask("POST", "/api/sessions", body)["kernel"]["id"])

    def kernel(self, identifier: str) -> Kernel:
        """Return a client of a running kernel."""
        kernel = Kernel(self.folder / "runtime" / f"kernel-{identifier}.json")
        self.kernels.append(kernel)
        return kernel

    def kernels_running(self) -> set[str]:
        """Return the kernels that run now."""
        return {kernel["id"] for kernel in self.ask("GET", "/api/kernels")}

    def close(self) -> None:
        """End the clients and the server, which ends its kernels."""
        for kernel in self.kernels:
            kernel.close()
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def _write_settings(self, name: str, settings: dict[str, Any]) -> None:
        folder = self.folder / "settings" / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jupyterlab-settings").write_text(json.dumps(settings), "utf-8")

    def _environment(self) -> dict[str, str]:
        folders = {
            "HOME": "home",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "IPYTHONDIR": "ipython",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
        }
        return environment(**{name: str(self.folder / folder) for name, folder in folders.items()})

    def _wait_for_url(self) -> str:
        """Return the address, which the server writes to a file shortly before it accepts connections."""
        about = self.folder / "runtime" / f"jpserver-{self.process.pid}.json"
        for _ in range(600):
            with contextlib.suppress(OSError, ValueError):
                self.url = json.loads(about.read_text("utf-8"))["url"].rstrip("/")
                self.ask("GET", "/api/status")
                return self.url
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.process.kill()
        log = (self.folder / "server.log").read_text("utf-8")
        raise RuntimeError(f"The Jupyter server did not start:\n{log[-3000:]}")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server inside a with block."""
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()
