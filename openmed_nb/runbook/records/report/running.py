"""One step in a process of its own: started, waited for and ended by the report; and what that process does.

It reads its task as a line of JSON, and writes its answer into a file. Its input stays open as long as the report runs: when
that ends, so does the process, whatever ended the report. Whatever becomes of it is an outcome.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ...._render.display import FAILED, to_plain_data, worst_status
from ...._utils.clock import current_time
from ...._utils.plain import atomic_write, from_json_data, utc_timestamp
from ...._utils.text import describe_error, short_type_name
from ....distributed.tethered import exit_on_stdin_close
from ....errors import OpenMedError
from ....session import SESSION
from ..logbook.sections import ReportMetrics
from ..runner import evidence_from, read_reports
from .record import CRASHED, DONE, TIMED_OUT, StepOutcome, redact, tail_lines
from .steps import Step, StepOptions, StepResult

# The file with the answer of a step, in the folder that its process has for itself.
ANSWER = "answer.json"

# How long a process that was killed may take to end; one that waits for a GPU may take for ever.
GRACE = 10.0

# A process says where it is each time that this share of its time is over, so that the last time tells where it hangs.
TRACEBACK_FRACTION = 0.3

# A disk with less room is full, and so it is with these errors.
MIN_FREE_BYTES = 1 << 20
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

DISK_FULL = "Make room on the disk, and run the report again."
MEMORY_FULL = "Close other programs, and run the report again."
AGAIN = "Run the report again with nothing else running"
SEND = f"{AGAIN}; if it ends so again, use 'cpu' for this, and send the last lines."
HANGS = f"{AGAIN}; if it hangs again, the last lines say where, and 'cpu' does the same work."
SIGNAL_REMEDIES = {
    "SIGABRT": "The last lines name what torch or Metal refused: look for it among the issues of PyTorch, and use 'cpu' until then.",
    "SIGKILL": f"The system ends what takes too much memory. {MEMORY_FULL}",
}


def run_step(step: Step, task: Mapping[str, Any], environ: Mapping[str, str]) -> StepOutcome:
    """Run a step in a process of its own, and return what became of it; an interrupt ends that process too."""
    begin = current_time()
    with tempfile.TemporaryDirectory(prefix="openmed_nb_report_", ignore_cleanup_errors=True) as name:
        output = Path(name, "output")
        answer = Path(name, ANSWER)
        run = f"{step.run.__module__}:{step.run.__qualname__}"
        with output.open("wb") as printed:
            process = _start(printed, environ)
            try:
                code = _exit_code(process, {**task, "run": run, "limit": step.limit, "aside": name})
            finally:
                _end(process)
        found: dict[str, Any] = json.loads(answer.read_text("utf-8")) if answer.exists() else {}
        lines = tail_lines(output)
        full = shutil.disk_usage(name).free < MIN_FREE_BYTES
    whole = {
        **dict.fromkeys(("status", "report", "report_json", "evidence")),  # What a step without a whole answer has not.
        "figures": [],
        **(found if "report" in found else {}),
        "step": step.name,
        "written": utc_timestamp(),
        "seconds": round(current_time() - begin, 1),
        "outcome": DONE,
        "remedy": "",
        "output": [],
    }
    if code != 0 or "report" not in found:
        outcome, what, remedy = describe_exit(code, step.limit, found, lines, full)
        whole |= {"outcome": outcome, "message": what, "remedy": remedy, "output": list(lines)}
    became: StepOutcome = from_json_data(StepOutcome, whole)
    return became


def _start(printed: Any, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a step, apart from the terminal's Ctrl-C, with what this process can import."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    return subprocess.Popen(  # noqa: S603 - the command is ours
        [sys.executable, "-u", "-X", "faulthandler", "-c", code],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=printed,
        start_new_session=True,
        env=environ,
    )


def _exit_code(process: subprocess.Popen[bytes], task: Mapping[str, Any]) -> int | None:
    """Hand a process its task, and return its exit status; ``None`` if it did not end in time."""
    with contextlib.suppress(BrokenPipeError):  # It may be gone already, and its status says so.
        if process.stdin:
            process.stdin.write(f"{json.dumps(task)}\n".encode())
            process.stdin.flush()
    try:
        return process.wait(task["limit"])
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
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


def describe_exit(
    code: int | None, limit: float, found: Mapping[str, Any], lines: Sequence[str], full: bool
) -> tuple[str, str, str]:
    """Return what became of a step without a whole answer: the outcome, what happened, and what to do.

    Example:
        >>> describe_exit(None, 5, {}, (), False)[:2], describe_exit(1, 5, {}, ("KeyError: 1",), False)[:2]
        (('timed out', 'It took longer than 5 s and was ended.'), ('failed', 'It ended with status 1: KeyError: 1.'))
    """
    if code is None:
        return TIMED_OUT, f"It took longer than {limit:g} s and was ended.", HANGS
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"Signal {-code}"
        return CRASHED, f"{name} ended it.", SIGNAL_REMEDIES.get(name, SEND)
    if "remedy" in found:
        return FAILED, found["message"], found["remedy"]
    last = f": {lines[-1].rstrip('.')}" if lines else ""
    return FAILED, f"It ended with status {code}{last}.", DISK_FULL if full else SEND


def main() -> None:
    """Do the task of this process, and write the answer; an error of ours is one too, any other one ends the process."""
    task = json.loads(sys.stdin.readline())
    tempfile.tempdir = task["aside"]
    threading.Thread(target=exit_on_stdin_close, daemon=True).start()
    faulthandler.dump_traceback_later(TRACEBACK_FRACTION * task["limit"], repeat=True)
    try:
        answer = _answer_of(task)
    except OpenMedError as error:
        answer = {"message": f"{short_type_name(error)}: {error.message}", "remedy": error.remedy}
    except (MemoryError, OSError, RuntimeError) as error:
        if (full := _exhausted_resource(error)) is None:
            raise
        answer = {"message": f"{full[0]}: {describe_error(error)}.", "remedy": full[1]}
    atomic_write(Path(task["aside"], ANSWER), json.dumps(redact(answer), allow_nan=False))


def _exhausted_resource(error: MemoryError | OSError | RuntimeError) -> tuple[str, str] | None:
    """Return what has no room left, and what to do; ``None`` for an error of another kind."""
    from ....devices.memory import is_out_of_memory

    if isinstance(error, OSError):
        return ("The disk is full", DISK_FULL) if error.errno in DISK_FULL_ERRORS else None
    return ("The memory ran out", MEMORY_FULL) if is_out_of_memory(error) else None


def _answer_of(task: dict[str, Any]) -> dict[str, Any]:
    """Return what a step found, as plain values."""
    SESSION.start()
    if task["simulated"]:
        SESSION.simulate(**task["simulated"])
    if task["request"]:
        SESSION.use(task["request"], "nb.report()")
    figures = tuple(from_json_data(ReportMetrics, stored) for stored in task["figures"])
    asked = StepOptions(task["quick"], task["training"], task["device"], figures)
    answer: StepResult = resolve_name(task["run"])(asked)
    found: dict[str, Any] = to_plain_data(_answer_to_json(answer, task))
    SESSION.end_simulation()
    return found


def _answer_to_json(answer: StepResult, task: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says as a report, for a logbook and for a verdict."""
    read = read_reports(answer.judged, evidence_from(task["evidence"]))
    findings: Any = getattr(answer.shown, "findings", ())
    findings = findings() if callable(findings) else findings
    failed = ", ".join(finding.name for finding in findings if finding.status == FAILED)
    plainly = answer.shown.to_report()  # The whole report says once whether it is simulated.
    says = answer.summary or " ".join((f"{plainly.title}.", *plainly.sentences[:1]))
    return {
        "message": f"{says} Failed: {failed}." if failed else says,
        "status": worst_status(findings) if findings else answer.status,
        "report": answer.shown.final_report(),
        "report_json": answer.shown,
        "figures": answer.figures or read.figures,
        "evidence": read.added,
    }
