"""Data of a report on a computer, and redaction of user and host names."""

from __future__ import annotations

import contextlib
import getpass
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...._render.display import Report
from ...._utils.text import escape_control_characters
from ....devices.request import MASK
from ..logbook.privacy import home_folder, redact_secrets
from ..logbook.sections import ReportMetrics, UtcTimestamp
from ..runner import ReportSubject

SCHEMA: Literal["openmed_nb/report/1"] = "openmed_nb/report/1"

# Written by scripts/write_schemas.py.
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

# Outcomes of a step; "failed" is display.FAILED.
Outcome = Literal["done", "failed", "crashed", "timed out"]
DONE: Outcome = "done"
CRASHED: Outcome = "crashed"
TIMED_OUT: Outcome = "timed out"

MAX_OUTPUT_LINES = 30
MAX_LINE_LENGTH = 300

# Directory in front of a package in a file path, which may contain user names.
PATH_PREFIX_PATTERN = re.compile(r"[^\s\"']*[/\\](?=(?:site-packages|openmed_nb|python3\.\d+)[/\\])")

# First line of a traceback of Python's fault handler; the reason for the fault is in the lines before it.
FAULT_PATTERN = re.compile(r"Fatal Python error:|Timeout \(")
LINES_BEFORE_FAULT = 10


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step.

    Attributes:
        step: Name of the step.
        outcome: Whether the step has a result (``done``), raised an error (``failed``), was ended by a signal (``crashed``), or
            exceeded its time limit (``timed out``).
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


@dataclass(frozen=True, repr=False)
class ReportData:
    """Measurements of one computer, without note texts, user names, host names and home directories.

    Attributes:
        schema: Name and version of the JSON format.
        created_at: Time of the last update, in UTC.
        subject: Machine, software and workload.
        device: Measured device; null until it is known.
        planned_steps: Names of all steps, in order.
        steps: Outcomes of the steps that ran, in order.
        verdict: Conclusion in a few sentences.
        not_measured: Missing measurements, as sentences.
        warnings: Warnings about the measurements, as sentences.
        notes: Notes on this run, as sentences.
    """

    schema: Literal["openmed_nb/report/1"]
    created_at: UtcTimestamp
    subject: ReportSubject
    device: str | None
    planned_steps: tuple[str, ...]
    steps: tuple[StepOutcome, ...] = ()
    verdict: str = ""
    not_measured: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def outcome_for(self, step: str) -> StepOutcome | None:
        """Return the outcome of a step, or ``None`` if it has not run."""
        return next((outcome for outcome in self.steps if outcome.step == step), None)


def _private_names() -> tuple[str, ...]:
    """Return the names of the user, the home directory and the host, longest first."""
    host = platform.node()
    names = [home_folder().name, host, host.partition(".")[0]]
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # The error for a missing user name depends on the platform.
        names.append(getpass.getuser())
    return tuple(sorted({name for name in names if len(name) > 1 and name != "~"}, key=len, reverse=True))


def redact_text(text: str, home: str | None = None, names: tuple[str, ...] | None = None) -> str:
    """Return a text without user and host names.

    Example:
        >>> redact_text("File /home/tom/a.py, a janeway", "/home/jane", ("jane",))
        'File /home/***/a.py, a janeway'
    """
    home = home or str(home_folder())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = re.sub(r"([/\\](?:home|Users)[/\\])[^/\\\s'\":,]+", rf"\g<1>{MASK}", text)
    alternatives = "|".join(map(re.escape, _private_names() if names is None else names)) or r"(?!)"
    return re.sub(rf"(?<![^\W_])(?:{alternatives})(?![^\W_])", MASK, text)


def redact(value: object, home: str | None = None, names: tuple[str, ...] | None = None) -> object:
    """Return a JSON value without user and host names in its strings, and without non-finite numbers.

    Example:
        >>> redact({"where": ["/Users/jane/x.py", "jane on janes-mac"], "n": float("nan")}, "/Users/jane", ("janes-mac", "jane"))
        {'where': ['~/x.py', '*** on ***'], 'n': None}
    """
    if isinstance(value, str):
        return redact_text(value, home, names)
    if isinstance(value, Mapping):
        return {name: redact(item, home, names) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, home, names) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tail_lines(file: Path, max_bytes: int = 65_536) -> tuple[str, ...]:
    """Return the last output lines of a process that show why it ended, without secrets and private names."""
    with file.open("rb") as stream:
        if stream.seek(max(0, file.stat().st_size - max_bytes)):
            stream.readline()  # A truncated line may contain a truncated name, which would not be redacted.
        text = stream.read().decode("utf-8", "replace")
    lines = [line.rstrip() for line in escape_control_characters(text).splitlines() if line.strip()]
    fault = max((number for number, line in enumerate(lines) if FAULT_PATTERN.match(line)), default=len(lines))
    start = min(max(0, fault - LINES_BEFORE_FAULT), max(0, len(lines) - MAX_OUTPUT_LINES))
    tail = lines[start : start + MAX_OUTPUT_LINES]
    redacted = (redact_text(redact_secrets(PATH_PREFIX_PATTERN.sub("", line))) for line in tail)
    return tuple(line[:MAX_LINE_LENGTH] for line in redacted)
