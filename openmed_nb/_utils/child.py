"""A call in a child process, because some calls abort their process, never return or exhaust the memory.

The arguments are sent through the standard input of the child, which stays open while this process runs. The child therefore
exits with this process, whatever ended it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from .._events.activity import defer_interrupts

# File with the value, in the temporary directory of the child.
VALUE_FILE = "value.json"

# Time that a killed process may take to exit. A process that waits for a GPU may never exit.
EXIT_GRACE_SECONDS = 10.0

# Time for a regular exit of the child after SIGTERM when this process has ended.
TERMINATION_GRACE_SECONDS = 3.0

# The child prints a traceback each time this fraction of its time limit has passed, so that the last traceback shows where it hangs.
TRACEBACK_FRACTION = 0.3

MAX_OUTPUT_BYTES = 65_536


class CallOutcome(NamedTuple):
    """Outcome of a call in a child process.

    Attributes:
        exit_code: Exit status of the child, or ``None`` if it exceeded its time limit.
        value: Value of the call; ``None`` unless the exit status is 0.
        output: End of the output of the child.
    """

    exit_code: int | None
    value: Any
    output: str

    @property
    def signal(self) -> str:
        """Name of the signal that ended the child, such as ``"SIGABRT"``; empty if no signal did."""
        code = -(self.exit_code or 0)
        if code <= 0:
            return ""
        return signal.Signals(code).name if code in set(signal.Signals) else f"signal {code}"


def run(
    function: Callable[..., object], arguments: tuple[object, ...], seconds: float, environ: Mapping[str, str]
) -> CallOutcome:
    """Call a function in a child process, and return its outcome. An interrupt also kills the child.

    Args:
        function: Function of a module that returns a JSON-compatible value.
        arguments: Arguments, which are pickled.
        seconds: Time limit in seconds.
        environ: Environment variables of the child.
    """
    with tempfile.TemporaryDirectory(prefix="openmed_nb_", ignore_cleanup_errors=True) as directory:
        # The child has the import path of this process.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({directory!r}, {seconds!r})"
        output_file = Path(directory, "output")
        data = pickle.dumps((function, arguments))
        exit_code = None
        with output_file.open("wb") as stream, contextlib.ExitStack() as stack:
            with defer_interrupts():  # An interrupt before the callback would leave the child running.
                process = subprocess.Popen(  # noqa: S603 - the command is a constant of this module
                    [sys.executable, "-u", "-X", "faulthandler", "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C does not reach the child.
                    env=environ,
                )
                # A child that does not read must not block this process.
                sender = threading.Thread(target=_send, args=(process.stdin, data), daemon=True)
                stack.callback(_end, process, sender)
                sender.start()
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(seconds)
        value_file = Path(directory, VALUE_FILE)
        value = json.loads(value_file.read_text("utf-8")) if exit_code == 0 and value_file.exists() else None
        with output_file.open("rb") as stream:
            if stream.seek(max(0, output_file.stat().st_size - MAX_OUTPUT_BYTES)):
                stream.readline()  # The first line is truncated.
            return CallOutcome(exit_code, value, stream.read().decode("utf-8", "replace"))


def _send(stream: IO[bytes], data: bytes) -> None:
    """Write data to a child, which may have exited; its status shows the reason."""
    with contextlib.suppress(OSError):
        stream.write(data)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started in a new session, and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises these if the process has just exited.
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _end(process: subprocess.Popen[bytes], sender: threading.Thread) -> None:
    """Kill a process and its children, and close its input. A process that the operating system cannot end is left running."""
    kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_GRACE_SECONDS)
    sender.join(EXIT_GRACE_SECONDS)
    if process.stdin and not sender.is_alive():
        process.stdin.close()


def main(directory: str, seconds: float) -> None:
    """Call the function in the standard input of this process, and write its value to a directory."""
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - sent by the process that started this process
    tempfile.tempdir = directory
    threading.Thread(target=_exit_on_stdin_close, daemon=True).start()
    faulthandler.dump_traceback_later(TRACEBACK_FRACTION * seconds, repeat=True)
    Path(directory, VALUE_FILE).write_text(json.dumps(function(*arguments), allow_nan=False), "utf-8")


def _exit_on_stdin_close() -> None:
    """Terminate this process when its standard input closes, first with SIGTERM."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATION_GRACE_SECONDS)
    os._exit(1)
