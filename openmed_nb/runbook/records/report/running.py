"""Run a step of a report in a separate process, and describe its outcome.

The process reads the report so far as a line of JSON and writes its answer to a file. Its standard input stays open while the report
runs, so the process exits with the report, whatever ended the report. Every way in which the process can end is an outcome.
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from ...._render.display import FAILED, to_plain_data, worst_status
from ...._utils.clock import current_time
from ...._utils.plain import atomic_write, from_json_data, utc_timestamp
from ...._utils.text import describe_error, short_type_name
from ....errors import OpenMedError
from ....session import SESSION
from ..runner import merge_evidence, read_reports
from .record import CRASHED, DONE, TIMED_OUT, Outcome, ReportData, StepOutcome, redact, tail_lines
from .steps import Step, StepOptions, StepResult

# File with the answer of a step, in the temporary directory of its process.
ANSWER_FILE = "answer.json"

# Time that a killed process may take to exit. A process that waits for a GPU may never exit.
EXIT_GRACE_SECONDS = 10.0

# Time for a regular exit of a process after SIGTERM when its report has ended.
TERMINATION_GRACE_SECONDS = 3.0

# A process prints a traceback each time this fraction of its time limit has passed, so that the last traceback shows where it hangs.
TRACEBACK_FRACTION = 0.3

# A disk with less free space counts as full, as do these errors.
MIN_FREE_BYTES = 1 << 20
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

DISK_FULL_REMEDY = "Free disk space, and run the report again."
OUT_OF_MEMORY_REMEDY = "Close other programs, and run the report again."
RUN_ALONE = "Run the report again while no other program is running"
CRASH_REMEDY = f"{RUN_ALONE}; if it fails again, use 'cpu' for this work, and send the last lines."
TIMEOUT_REMEDY = f"{RUN_ALONE}; if it hangs again, the last lines show where, and 'cpu' does the same work."
SIGNAL_REMEDIES = {
    "SIGABRT": "The last lines contain the failed assertion of torch or Metal: search the PyTorch issues for it, and use 'cpu' until then.",
    "SIGKILL": f"The operating system kills processes that use too much memory. {OUT_OF_MEMORY_REMEDY}",
}


class ExitDescription(NamedTuple):
    """Outcome of a process without a complete answer."""

    outcome: Outcome
    message: str
    remedy: str


def run_step(step: Step, report: ReportData, environ: Mapping[str, str]) -> StepOutcome:
    """Run the next step of a report in a separate process and return its outcome. An interrupt also kills the process."""
    start = current_time()
    # The process needs only metrics and evidence of the steps so far. A pipe holds them even if the process does not read.
    steps = tuple(replace(outcome, output=(), report=None, report_json=None) for outcome in report.steps)
    line = json.dumps(to_plain_data(replace(report, steps=steps)))
    with tempfile.TemporaryDirectory(prefix="openmed_nb_report_", ignore_cleanup_errors=True) as directory:
        function = f"{step.run.__module__}:{step.run.__qualname__}"
        arguments = (directory, function, step.timeout_seconds)
        # The process has the import path of this process.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main{arguments!r}"
        output = Path(directory, "output")
        with output.open("wb") as stream:
            process = subprocess.Popen(  # noqa: S603 - the command is a constant of this module
                [sys.executable, "-u", "-X", "faulthandler", "-c", code],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C does not reach the process.
                env=environ,
            )
            exit_code = None
            try:
                # The process may have exited before it reads; its status shows the reason.
                with contextlib.suppress(BrokenPipeError):
                    if process.stdin:
                        process.stdin.write(f"{line}\n".encode())
                        process.stdin.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(step.timeout_seconds)
            finally:
                _kill_process(process)
        answer_file = Path(directory, ANSWER_FILE)
        answer: dict[str, Any] = json.loads(answer_file.read_text("utf-8")) if answer_file.exists() else {}
        lines = tail_lines(output)
        is_disk_full = shutil.disk_usage(directory).free < MIN_FREE_BYTES
    stored = {
        # A step without a complete answer lacks these values.
        **dict.fromkeys(("status", "report", "report_json", "evidence")),
        "metrics": [],
        **(answer if "report" in answer else {}),
        "step": step.name,
        "created_at": utc_timestamp(),
        "seconds": round(current_time() - start, 1),
        "outcome": DONE,
        "remedy": "",
        "output": [],
    }
    if exit_code != 0 or "report" not in answer:
        description = describe_exit(exit_code, step.timeout_seconds, answer, lines, is_disk_full)
        stored |= {**description._asdict(), "output": list(lines)}
    outcome: StepOutcome = from_json_data(StepOutcome, stored)
    return outcome


def _kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children. A process that the operating system cannot end is left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises these if the process has just exited.
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_GRACE_SECONDS)
    with contextlib.suppress(BrokenPipeError):
        if process.stdin:
            process.stdin.close()


def describe_exit(
    code: int | None, limit: float, answer: Mapping[str, Any], lines: Sequence[str], is_disk_full: bool
) -> ExitDescription:
    """Return the outcome, message and remedy of a step without a complete answer.

    Args:
        code: Exit status of the process, or ``None`` if it exceeded its time limit.
        limit: Time limit in seconds.
        answer: Answer of the process, which may be empty.
        lines: Last lines of its output.
        is_disk_full: Whether the disk is full.

    Example:
        >>> describe_exit(None, 5, {}, (), False)[:2], describe_exit(1, 5, {}, ("KeyError: 1",), False)[:2]
        (('timed out', 'The time limit of 5 s was exceeded.'), ('failed', 'The process exited with status 1: KeyError: 1.'))
    """
    if code is None:
        return ExitDescription(TIMED_OUT, f"The time limit of {limit:g} s was exceeded.", TIMEOUT_REMEDY)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return ExitDescription(CRASHED, f"The process was ended by {name}.", SIGNAL_REMEDIES.get(name, CRASH_REMEDY))
    if "remedy" in answer:
        return ExitDescription("failed", answer["message"], answer["remedy"])
    last_line = f": {lines[-1].rstrip('.')}" if lines else ""
    remedy = DISK_FULL_REMEDY if is_disk_full else CRASH_REMEDY
    return ExitDescription("failed", f"The process exited with status {code}{last_line}.", remedy)


def main(directory: str, function: str, limit: float) -> None:
    """Run a step for the report in the standard input, and write its answer to a directory.

    An ``OpenMedError`` and an exhausted disk or memory are answers; any other error ends the process.
    """
    from ....devices.memory import is_out_of_memory

    report: ReportData = from_json_data(ReportData, json.loads(sys.stdin.readline()))
    tempfile.tempdir = directory
    threading.Thread(target=_exit_on_stdin_close, daemon=True).start()
    faulthandler.dump_traceback_later(TRACEBACK_FRACTION * limit, repeat=True)
    try:
        answer = _run_function(function, report)
    except OpenMedError as error:
        answer = {"message": f"{short_type_name(error)}: {error.message}", "remedy": error.remedy}
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            answer = {"message": f"The disk is full: {describe_error(error)}.", "remedy": DISK_FULL_REMEDY}
        elif is_out_of_memory(error):
            answer = {"message": f"Out of memory: {describe_error(error)}.", "remedy": OUT_OF_MEMORY_REMEDY}
        else:
            raise
    atomic_write(Path(directory, ANSWER_FILE), json.dumps(redact(answer), allow_nan=False))


def _exit_on_stdin_close() -> None:
    """Terminate this process when its standard input closes, first with SIGTERM."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATION_GRACE_SECONDS)
    os._exit(1)


def _run_function(function: str, previous: ReportData) -> dict[str, Any]:
    """Run the function of a step, and return its result with metrics for a logbook and a verdict, as JSON-compatible data."""
    subject = previous.subject
    SESSION.start()
    if subject.simulated and subject.memory_bytes:
        SESSION.simulate(subject.memory_bytes, defects=subject.defects)
    request = previous.device or subject.request  # Once the device is known, all other steps measure it.
    if request:
        SESSION.use(request, "nb.report()")
    metrics = tuple(metrics for outcome in previous.steps for metrics in outcome.metrics)
    options = StepOptions(subject.quick, subject.training, previous.device or "cpu", metrics)
    result: StepResult = resolve_name(function)(options)
    known = merge_evidence(subject, previous.device, [outcome.evidence for outcome in previous.steps])
    readings = read_reports(result.reports, known)
    findings = getattr(result.displayed, "findings", ())
    if callable(findings):
        findings = findings()
    failed = ", ".join(finding.name for finding in findings if finding.status == FAILED)
    report = result.displayed.to_report()  # Without the simulation notice, which the whole report has once.
    summary = result.summary or " ".join((f"{report.title}.", *report.sentences[:1]))
    answer: dict[str, Any] = to_plain_data(
        {
            "message": f"{summary} Failed: {failed}." if failed else summary,
            "status": worst_status(findings) if findings else result.status,
            "report": result.displayed.final_report(),
            "report_json": result.displayed,
            "metrics": result.metrics or readings.metrics,
            "evidence": readings.new_evidence,
        }
    )
    SESSION.end_simulation()
    return answer
