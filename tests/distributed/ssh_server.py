"""SSH server of asyncssh on 127.0.0.1 with separate keys and port."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncssh

SERVER = """
import asyncio, asyncssh, os, signal, subprocess, sys
folder, port = sys.argv[1], int(sys.argv[2])

async def run(process):
    child = await asyncio.create_subprocess_shell(
        process.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    ended = asyncio.create_task(child.wait())
    try:
        process.exit(await asyncio.shield(ended))
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)

async def main():
    await asyncssh.listen("127.0.0.1", port, server_host_keys=[f"{folder}/host"],
        authorized_client_keys=f"{folder}/user.pub", process_factory=run, encoding=None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass(frozen=True)
class SshServer:
    """SSH server that accepts one key.

    Attributes:
        folder: Directory of its files.
        port: Port of the server.
    """

    folder: Path
    port: int

    def write_settings(self, home: Path, **changes: object) -> None:
        """Write the SSH settings of a user with the port, the key and the known hosts of this server.

        Args:
            home: Home directory of the user.
            changes: Settings that differ from those of this server.
        """
        settings = {
            "Port": self.port,
            "User": getpass.getuser(),
            "IdentityFile": self.folder / "user",
            "UserKnownHostsFile": self.folder / "known_hosts",
        }
        (home / ".ssh").mkdir(exist_ok=True)
        lines = [f"{name} {value}\n" for name, value in {**settings, **changes}.items()]
        (home / ".ssh" / "config").write_text("".join(lines))


@contextlib.contextmanager
def ssh_server(folder: Path, path: str) -> Iterator[SshServer]:
    """Context manager that runs a server.

    Args:
        folder: Directory of the keys.
        path: ``PYTHONPATH`` of the processes that it starts.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # It is unused.
    for name in ("host", "user", "stranger"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(folder / name)
        key.write_public_key(folder / f"{name}.pub")
        (folder / name).chmod(0o600)
    host_key = (folder / "host.pub").read_text().strip()
    known = f"[127.0.0.1]:{port} {host_key}\n[localhost]:{port} {host_key}\n"
    (folder / "known_hosts").write_text(known)
    stranger = (folder / "stranger.pub").read_text().split()[1]
    (folder / "changed_hosts").write_text(known.replace(host_key.split()[1], stranger))
    command = [sys.executable, "-c", SERVER, folder, str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONPATH": path})
        try:
            wait_for_port(port, process)
            yield SshServer(folder, port)
        finally:
            process.terminate()
            process.wait(timeout=20)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens on the port."""
    for _attempt in range(400):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, "the SSH server exited"
        time.sleep(0.05)
    raise TimeoutError(port)
