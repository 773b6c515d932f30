"""Run a step in a child process, and describe its outcome without names of users and hosts.

Every way in which the process can end is an outcome.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..._render.display import FAILED, OK, WARNING, Report, to_plain_data, worst_status
from ..._utils import child
from ..._utils.clock import current_time
from ..._utils.plain import Count, from_json_data, utc_timestamp
from ..._utils.text import describe_error, escape_control_characters, short_type_name
from ...devices.request import MASK, home_folder, redact_secrets
from ...errors import OpenMedError
from ...session import SESSION
from ..verdict.metrics import Evidence, ReportMetrics, extract_metrics
from .logbook import Software, UtcTimestamp
from .steps import Step, StepOptions, StepResult

# Outcomes of a step.
Outcome = Literal["done", "failed", "crashed", "timed out", "not met"]
DONE: Outcome = "done"
NOT_MET: Outcome = "not met"

MAX_OUTPUT_LINES = 30
MAX_LINE_LENGTH = 300

# Directory in front of a package in a file path, which may contain user names.
PATH_PREFIX_PATTERN = re.compile(r"[^\s\"']*[/\\](?=(?:site-packages|openmed_nb|python3\.\d+)[/\\])")

# First line of a traceback of Python's fault handler; the reason for the fault is in the lines before it.
FAULT_PATTERN = re.compile(r"Fatal Python error:|Timeout \(")
LINES_BEFORE_FAULT = 10

OUT_OF_MEMORY_REMEDY = "Close other programs, and run the report again."
RUN_ALONE = "Run the report again while no other program is running"
CRASH_REMEDY = f"{RUN_ALONE}; if it fails again, use 'cpu' for this work, and send the last lines."
TIMEOUT_REMEDY = f"{RUN_ALONE}; if it hangs again, the last lines show where, and 'cpu' does the same work."
SIGNAL_REMEDIES = {
    "SIGABRT": "The last lines contain the failed assertion of torch or Metal: search the PyTorch issues for it, and use 'cpu' until then.",
    "SIGKILL": f"The operating system kills processes that use too much memory. {OUT_OF_MEMORY_REMEDY}",
}


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step.

    Attributes:
        step: Name of the step.
        outcome: Whether the step has a result (``done``), raised an error (``failed``), was ended by a signal (``crashed``),
            exceeded its time limit (``timed out``), or has a result that does not meet the criterion of a bring-up
            (``not met``).
        status: Worst status of its findings: ok, warning, failed or not applicable; null without a result.
        message: Result or problem, in one or two sentences.
        remedy: Suggested action; empty if none is needed.
        output: Last lines of its output; empty if there is a result.
        created_at: Time of completion, in UTC.
        seconds: Duration in seconds, including the start of its process.
        report: Result as sentences, tables and charts; null without a result.
        report_json: JSON of the report itself, in its own schema; null without a result.
        metrics: Numeric metrics of the result.
        evidence: Metrics that it adds to the verdict, by name.
    """

    step: str
    outcome: Outcome
    status: Literal["ok", "warning", "failed", "not applicable"] | None
    message: str
    remedy: str
    output: tuple[str, ...]
    created_at: UtcTimestamp
    seconds: float
    report: Report | None = None
    report_json: Any = None
    metrics: tuple[ReportMetrics, ...] = ()
    evidence: dict[str, Any] | None = None


@dataclass(frozen=True)
class ReportSubject:
    """Subject of a report: machine, software and workload. A report is resumed only for the same subject.

    Attributes:
        simulated: Whether MPS is simulated, so that measurements do not represent real MPS hardware.
        defects: Silent errors of the simulated device.
        request: Requested device; null for automatic selection.
        model: Name of the model.
        texts: Number of texts; 0 for synthetic texts.
        quick: Whether fewer and shorter measurements were requested.
        training: Whether training steps are measured instead of annotation.
        bring_up: Whether the run stops at the first criterion that is not met.
        chip: Name of the processor.
        memory_bytes: Installed memory in bytes.
        software: Versions of the software.
    """

    simulated: bool
    defects: tuple[str, ...]
    request: str | None
    model: str
    texts: Count
    quick: bool
    training: bool
    bring_up: bool
    chip: str
    memory_bytes: Count
    software: Software


def run_step(step: Step, options: StepOptions, subject: ReportSubject, known: Evidence) -> StepOutcome:
    """Run a step in a child process and return its outcome, given the evidence of the other steps."""
    start = current_time()
    environ = SESSION.device_manager.user_environ
    exited = child.run(_measure, (step.run, options, subject, known), step.timeout_seconds, environ)
    created_at = utc_timestamp()
    seconds = round(current_time() - start, 1)
    if exited.value and "report" in exited.value:
        known_values = {"step": step.name, "outcome": DONE, "remedy": "", "output": []}
        data = {**exited.value, **known_values, "created_at": created_at, "seconds": seconds}
        step_outcome: StepOutcome = from_json_data(StepOutcome, data)
        return step_outcome
    # An unexpected error may quote a text.
    lines = tail_lines(exited.output) if options.texts is None else ()
    outcome, message, remedy = describe_exit(exited, step.timeout_seconds, lines)
    return StepOutcome(step.name, outcome, None, message, remedy, lines, created_at, seconds)


def describe_exit(exited: child.CallOutcome, limit: float, lines: Sequence[str]) -> tuple[Outcome, str, str]:
    """Return the outcome, message and remedy of a step without a result.

    Args:
        exited: Outcome of the process, whose value can be the description of an error.
        limit: Time limit in seconds.
        lines: Last lines of its output.

    Example:
        >>> describe_exit(child.CallOutcome(1, None, ""), 5, ("KeyError: 1",))[:2]
        ('failed', 'The process exited with status 1: KeyError: 1.')
    """
    if exited.exit_code is None:
        return "timed out", f"The time limit of {limit:g} s was exceeded.", TIMEOUT_REMEDY
    if exited.signal:
        remedy = SIGNAL_REMEDIES.get(exited.signal, CRASH_REMEDY)
        return "crashed", f"The process was ended by {exited.signal}.", remedy
    if exited.value:
        return "failed", exited.value["message"], exited.value["remedy"]
    last_line = f": {lines[-1].rstrip('.')}" if lines else ""
    return "failed", f"The process exited with status {exited.exit_code}{last_line}.", CRASH_REMEDY


def _measure(
    run: Callable[[StepOptions], StepResult], options: StepOptions, subject: ReportSubject, known: Evidence
) -> object:
    """Run the function of a step in its process, and return its result as JSON-compatible data without private names.

    An ``OpenMedError`` and exhausted memory are described; any other error ends the process.
    """
    from ...devices.registry import is_out_of_memory

    SESSION.start()
    try:
        if subject.simulated and subject.memory_bytes:
            SESSION.simulate(subject.memory_bytes, defects=subject.defects)
        if subject.request:
            SESSION.use(subject.request, "nb.report()")
        answer = _describe_result(run(options), known)
        SESSION.end_simulation()
    except OpenMedError as error:
        answer = {"message": f"{short_type_name(error)}: {error.message}", "remedy": error.remedy}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        answer = {"message": f"Out of memory: {describe_error(error)}.", "remedy": OUT_OF_MEMORY_REMEDY}
    return redact(answer)


def _describe_result(result: StepResult, known: Evidence) -> dict[str, Any]:
    """Return a result with its metrics for a logbook and a verdict, as JSON-compatible data."""
    from ..verdict.verdict import collect_evidence

    in_use = known if result.batch is None else Evidence(**{**known, "batch": result.batch})
    evidence = collect_evidence(in_use, *result.reports, task=known["task"])
    findings = getattr(result.displayed, "findings", ())
    failed = ", ".join(finding.name for finding in findings if finding.status == FAILED)
    report = result.displayed.to_report()  # Without the simulation notice, which the whole report has once.
    not_measured = getattr(result.displayed, "not_measured", "")
    summary = not_measured or result.summary or " ".join((f"{report.title}.", *report.sentences[:1]))
    status = WARNING if not_measured else result.status
    if not status:
        status = worst_status(findings) if findings else OK
    answer: dict[str, Any] = to_plain_data(
        {
            "message": f"{summary} Failed: {failed}." if failed else summary,
            "status": status,
            "report": result.displayed.final_report(),
            "report_json": result.displayed,
            "metrics": list(map(extract_metrics, result.reports)),
            "evidence": {name: value for name, value in evidence.items() if value != known.get(name)},
        }
    )
    return answer


def _private_names() -> tuple[str, ...]:
    """Return the names of the user, the home directory and the host, longest first."""
    host = platform.node()
    names = [home_folder().name, host, host.partition(".")[0]]
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # The error for a missing user name depends on the platform.
        names.append(getpass.getuser())
    return tuple(sorted({name for name in names if len(name) > 1 and name != "~"}, key=len, reverse=True))


def redact(value: object, home: str | None = None, names: Iterable[str] | None = None) -> object:
    """Return a JSON value without user and host names in its strings, and without non-finite numbers.

    Example:
        >>> redact({"where": ["/Users/jane/x.py", "jane on janes-mac"], "n": float("nan")}, "/Users/jane", ("janes-mac", "jane"))
        {'where': ['~/x.py', '*** on ***'], 'n': None}
    """
    if isinstance(value, Mapping):
        return {name: redact(item, home, names) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, home, names) for item in value]
    if isinstance(value, str):
        home = home or str(home_folder())
        if len(home) > 1:
            value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
        value = re.sub(r"([/\\](?:home|Users)[/\\])[^/\\\s'\":,]+", rf"\g<1>{MASK}", value)
        alternatives = "|".join(map(re.escape, _private_names() if names is None else names)) or r"(?!)"
        return re.sub(rf"(?<![^\W_])(?:{alternatives})(?![^\W_])", MASK, value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tail_lines(output: str) -> tuple[str, ...]:
    """Return the last output lines of a process that show why it ended, without secrets and private names."""
    lines = [line.rstrip() for line in escape_control_characters(output).splitlines() if line.strip()]
    fault = max((number for number, line in enumerate(lines) if FAULT_PATTERN.match(line)), default=len(lines))
    start = min(max(0, fault - LINES_BEFORE_FAULT), max(0, len(lines) - MAX_OUTPUT_LINES))
    tail = lines[start : start + MAX_OUTPUT_LINES]
    redacted = (str(redact(redact_secrets(PATH_PREFIX_PATTERN.sub("", line)))) for line in tail)
    return tuple(line[:MAX_LINE_LENGTH] for line in redacted)
