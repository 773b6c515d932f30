"""What a report of a computer holds, as values, and how names of people are kept out of it."""

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
from ..logbook.privacy import home_folder, redact_secrets
from ..logbook.sections import ReportMetrics, UtcTimestamp
from ..runner import Subject

SCHEMA: Literal["openmed_nb/report/1"] = "openmed_nb/report/1"

# Written by scripts/write_schemas.py.
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

# What became of a step, beside display.FAILED.
DONE = "done"
CRASHED = "crashed"
TIMED_OUT = "timed out"

MASK = "***"
LAST_LINES = 30
MAX_LINE_LENGTH = 300

# What stands before a package in the path of a file: a folder of the person's own.
PREFIX = re.compile(r"[^\s\"']*[/\\](?=(?:site-packages|openmed_nb|python3\.\d+)[/\\])")

# How Python's fault handler begins to say where a process was: what stands before that is why it ended.
FAULT = re.compile(r"Fatal Python error:|Timeout \(")
BEFORE_FAULT = 10


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step.

    Attributes:
        step: Its name.
        outcome: Whether it has an answer: done; failed with an error; died by a signal; or hung, and was ended.
        status: The worst of what it found: ok, warning, failed or not applicable; null without an answer.
        what: What it found, or what happened to it, in a sentence or two.
        remedy: One thing to do; empty where nothing needs to be done.
        output: The last lines that it printed; empty where it has an answer.
        written: When it ended, in UTC.
        seconds: How long it took, with the start of its process.
        report: What it says as sentences, tables and pictures; null without an answer.
        data: The same as the report's own JSON, in the schema that it names; null without an answer.
        figures: The same in numbers.
        evidence: What it adds to a verdict, by the names of the figures.
    """

    step: str
    outcome: Literal["done", "failed", "crashed", "timed out"]
    status: Literal["ok", "warning", "failed", "not applicable"] | None
    message: str
    remedy: str
    output: tuple[str, ...]
    written: UtcTimestamp
    seconds: float
    report: Report | None = None
    report_json: Any = None
    figures: tuple[ReportMetrics, ...] = ()
    evidence: dict[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class ReportData:
    """What is measured on a computer. No text of a note, no name of a person or a computer, and no home is in it.

    Attributes:
        schema: The name and the number of this form.
        written: When it was written last, in UTC.
        subject: What it is of.
        device: Where it was measured; null before that is known.
        planned: The names of all its steps, in order.
        steps: The steps that have run, in order.
        verdict: What it comes to, in two sentences.
        not_measured: What is not known after it, as sentences.
        cautions: What else to know, as sentences.
        notes: What to know about this run, as sentences.
    """

    schema: Literal["openmed_nb/report/1"]
    written: UtcTimestamp
    subject: Subject
    device: str | None
    planned_steps: tuple[str, ...]
    steps: tuple[StepOutcome, ...] = ()
    verdict: str = ""
    not_measured: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def outcome_for(self, step: str) -> StepOutcome | None:
        """Return what became of a step, ``None`` if it has not run."""
        return next((outcome for outcome in self.steps if outcome.step == step), None)


def _private_names() -> tuple[str, ...]:
    """Return the names that must not stand in a report: of this person, of their home and of this computer."""
    host = platform.node()
    names = [home_folder().name, host, host.partition(".")[0]]
    with contextlib.suppress(OSError, KeyError, ImportError):  # A person without a name, by release and system.
        names.append(getpass.getuser())
    return tuple(sorted({name for name in names if len(name) > 1 and name != "~"}, key=len, reverse=True))


def redact(value: Any, home: str | None = None, names: tuple[str, ...] | None = None) -> Any:
    """Return a value of JSON without names of people and hosts in its texts, and without numbers that are not finite.

    Example:
        >>> redact({"where": ["/Users/jane/x.py", "jane on janes-mac"], "n": float("nan")}, "/Users/jane", ("janes-mac", "jane"))
        {'where': ['~/x.py', '*** on ***'], 'n': None}
        >>> redact("File /home/tom/a.py, a janeway", "/home/jane", ("jane",))
        'File /home/***/a.py, a janeway'
    """
    home = home or str(home_folder())
    names = _private_names() if names is None else names
    named = "|".join(map(re.escape, names)) or r"(?!)"
    person = re.compile(rf"(?<![^\W_])(?:{named})(?![^\W_])")
    start = re.compile(rf"{re.escape(home)}(?![\w.-])" if len(home) > 1 else r"(?!)")

    def cleaned(part: Any) -> Any:
        if isinstance(part, str):
            text = re.sub(r"([/\\](?:home|Users)[/\\])[^/\\\s'\":,]+", rf"\g<1>{MASK}", start.sub("~", part))
            return person.sub(MASK, text)
        if isinstance(part, Mapping):
            return {name: cleaned(inner) for name, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return [cleaned(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return cleaned(value)


def tail_lines(file: Path, most: int = 65_536) -> tuple[str, ...]:
    """Return the lines at the end of what a process printed that tell why it ended, without secrets and names."""
    with file.open("rb") as stream:
        if stream.seek(max(0, file.stat().st_size - most)):
            stream.readline()  # Half a line may have half a name in it.
        text = stream.read().decode("utf-8", "replace")
    lines = [line.rstrip() for line in escape_control_characters(text).splitlines() if line.strip()]
    fault = max((number for number, line in enumerate(lines) if FAULT.match(line)), default=len(lines))
    begin = min(max(0, fault - BEFORE_FAULT), max(0, len(lines) - LAST_LINES))
    kept = redact([redact_secrets(PREFIX.sub("", line)) for line in lines[begin : begin + LAST_LINES]])
    return tuple(line[:MAX_LINE_LENGTH] for line in kept)
