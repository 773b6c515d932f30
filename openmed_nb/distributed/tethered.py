"""Process on a host of a cluster that exits with the SSH connection that started it: ``python -m ...tethered``.

With ``-m NAME ...``, it runs a module as ``python -m`` does. Without arguments, it stores TLS certificates. It reads one line
of JSON with the directory and the text of each file by name. It prints a line when the files are written.

A connection closes when the cluster is closed or its process is killed. The SSH server then closes the standard input of the
processes that it started. Signals are not sufficient: sshd sends no signals to processes of root
(``session_signal_req``).
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

EXIT_GRACE_SECONDS = 3.0  # Time for a regular exit after SIGTERM.


def exit_on_stdin_close() -> None:
    """Terminate this process when its standard input closes.

    The process first receives SIGTERM, so that Dask stops its workers. After the grace period, it exits immediately.
    """
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(1)


def _hold_files_until_stdin_close() -> None:
    """Store private files in a directory until the standard input closes.

    Two host names of the same machine share the directory.
    """
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
        _hold_files_until_stdin_close()
