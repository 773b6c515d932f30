"""Runs a module as ``python -m`` does, until the connection of SSH that started it ends: ``python -m ...tethered -m NAME ...``.

The server of SSH closes the input of what it started when a connection ends, however that came: the cluster was ended, or
the process that began it was killed. Signals are no way: sshd passes none on to processes of root (its
``session_signal_req``).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE = 3.0
"""How long a process may take to end by itself, in seconds."""


def end_with_input() -> None:
    """Wait for the end of the input, and end this process: Dask's way, which takes its workers along, or at once."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def main() -> None:
    """Run the module that the arguments name, with the rest of them."""
    threading.Thread(target=end_with_input, daemon=True).start()
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
