"""What runs on a host of a cluster, and ends with the SSH connection that started it: ``python -m ...tethered``.

With ``-m NAME ...`` it runs a module as ``python -m`` does. Without arguments it keeps certificates: it reads one line of
JSON, the folder and the text of each file by its name, and writes a line once the files are there.

When a connection ends, because the cluster was closed or because the process that began it was killed, the SSH server
closes the input of what it started. Signals would not do: sshd sends none to processes of root (``session_signal_req``).
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

EXIT_GRACE_SECONDS = 3.0  # Seconds that a process may take to end by itself.


def exit_on_stdin_close() -> None:
    """Wait for the end of the input and end this process: with SIGTERM, so that Dask ends its workers, or else at once."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(1)


def hold_files_until_stdin_close() -> None:
    """Keep private files in a folder until the input ends; two hosts that are one computer share the folder."""
    name, files = json.loads(sys.stdin.readline())
    folder = Path(name)
    try:
        os.umask(0o077)
        folder.mkdir(exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, "ascii")
        sys.stdout.write("written\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        threading.Thread(target=exit_on_stdin_close, daemon=True).start()
        sys.argv[:] = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        hold_files_until_stdin_close()
