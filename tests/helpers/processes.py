"""Python in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_SECONDS = 240


@contextmanager
def busy_processes(count: int = 1) -> Iterator[None]:
    """Keep processor cores busy with processes that are not children of this process."""
    command = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    processes = [int(subprocess.check_output(["/bin/sh", "-c", command])) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)


def run_python(*arguments: object, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """Run Python with some arguments and environment variables, and return the finished process with its output."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": TIMEOUT_SECONDS}
    environ = {**os.environ, **(environ or {})}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environ, check=False, **{**streams, **options})
