"""What runs on a host of a cluster for as long as the connection of SSH that started it: ``python -m ...tethered``.

With ``-m NAME ...`` it runs a module as ``python -m`` does. Without arguments it keeps certificates: one line of JSON comes
in, the folder and the text of each file by its name, and a line goes out once they are there.

The server of SSH closes the input of what it started when a connection ends, however that came: the cluster was ended, or
the process that began it was killed. Signals are no way: sshd passes none on to processes of root (its
``session_signal_req``).
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

GRACE = 3.0  # Seconds that a process may take to end by itself.


def end_with_input() -> None:
    """Wait for the end of the input, and end this process: Dask's way, which takes its workers along, or at once."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def keep_files() -> None:
    """Have files in a folder while there is an input, for nobody else to read; two hosts that are one computer share it."""
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
        threading.Thread(target=end_with_input, daemon=True).start()
        sys.argv[:] = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        keep_files()
