"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

TIMEOUT_SECONDS = 240


def run_python(*arguments: object, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """Run Python with some arguments and environment variables, and return the finished process with its output."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": TIMEOUT_SECONDS}
    environ = {**os.environ, **(environ or {})}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environ, check=False, **{**streams, **options})
