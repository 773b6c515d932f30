"""One step in a process of its own: started, waited for, ended; whatever becomes of it is an outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...devices.machine import now
from ...plain import from_plain
from .record import ANSWER, DIED, DISK_FULL, DONE, FAILED, HUNG, MEMORY_FULL, Outcome, last_lines, private
from .steps import Step

# How long a process that was killed may take to end; one that waits for a GPU may take for ever.
GRACE = 10.0

LEAST_ROOM = 1 << 20

AGAIN = "Run the report again with nothing else running"
TO_DO = {
    "SIGABRT": "The last lines name what torch or Metal refused: look for it among the issues of PyTorch, and use 'cpu' until then.",
    "SIGKILL": f"The system ends what takes too much memory. {MEMORY_FULL}",
}
SEND = f"{AGAIN}; if it ends so again, use 'cpu' for this, and send the last lines."
HANGS = f"{AGAIN}; if it hangs again, the last lines say where, and 'cpu' does the same work."


# What a step has that has no whole answer.
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("status", "report", "data", "evidence"), None),
    "pictures": [],
    "figures": [],
}


def utc() -> str:
    """Return this moment as it is written."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_step(step: Step, task: Mapping[str, Any], environ: Mapping[str, str]) -> Outcome:
    """Run a step in a process of its own, and return what became of it; an interrupt ends that process too."""
    begin = now()
    with tempfile.TemporaryDirectory(prefix="openmed_nb_report_", ignore_cleanup_errors=True) as name:
        output, answer = Path(name, "output"), Path(name, ANSWER)
        run = f"{step.run.__module__}:{step.run.__qualname__}"
        with output.open("wb") as printed:
            process = started(printed, environ)
            try:
                code = ended_with(process, {**task, "run": run, "limit": step.limit, "aside": name})
            finally:
                end(process)
        found: dict[str, Any] = json.loads(answer.read_text("utf-8")) if answer.exists() else {}
        lines = last_lines(output)
        full = shutil.disk_usage(name).free < LEAST_ROOM
    told = {**(found if "report" in found else NOTHING), "step": step.name, "written": utc(), "outcome": DONE}
    told |= {"seconds": round(now() - begin, 1), "remedy": "", "output": []}
    if code != 0 or "report" not in found:
        outcome, what, remedy = ending(code, step.limit, found, lines, full)
        told |= {"outcome": outcome, "what": what, "remedy": remedy, "output": private(lines)}
    outcome_of_step: Outcome = from_plain(Outcome, told)
    return outcome_of_step


def started(printed: Any, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a step, apart from the terminal's Ctrl-C, with what this process can import."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.child import main; main()"
    return subprocess.Popen(  # noqa: S603 - the command is ours
        [sys.executable, "-u", "-X", "faulthandler", "-c", code],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=printed,
        start_new_session=True,
        env=environ,
    )


def ended_with(process: subprocess.Popen[bytes], task: Mapping[str, Any]) -> int | None:
    """Hand a process its task, and return its exit status; ``None`` if it did not end in time."""
    with contextlib.suppress(BrokenPipeError):  # It may be gone already, and its status says so.
        if process.stdin:
            process.stdin.write(f"{json.dumps(task)}\n".encode())
            process.stdin.flush()
    try:
        return process.wait(task["limit"])
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started; one that the system does not let go is left to it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers so for what has just ended.
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(BrokenPipeError):
        if process.stdin:
            process.stdin.close()


def ending(
    code: int | None, limit: float, found: Mapping[str, str], lines: Sequence[str], full: bool
) -> tuple[str, str, str]:
    """Return what became of a step without a whole answer: the outcome, what happened, and what to do.

    Example:
        >>> ending(None, 5, {}, (), False)[:2], ending(1, 5, {}, ("KeyError: 1",), False)[:2]
        (('hung', 'It took longer than 5 s and was ended.'), ('failed', 'It ended with status 1: KeyError: 1.'))
    """
    if code is None:
        return HUNG, f"It took longer than {limit:g} s and was ended.", HANGS
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"Signal {-code}"
        return DIED, f"{name} ended it.", TO_DO.get(name, SEND)
    if found:
        return FAILED, found["what"], found["remedy"]
    last = f": {lines[-1].rstrip('.')}" if lines else ""
    return FAILED, f"It ended with status {code}{last}.", DISK_FULL if full else SEND
