"""Published results of other computers of the same type, compared with a report; and the detection of a virtual GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from ...._render.display import FAILED, OK, WARNING, Table
from ...checks.doctor.checks import SILENT_ERRORS
from ..runner import ReportSubject
from .record import DONE, ReportData

# Suffix of the title of a report on a virtual GPU.
VIRTUAL_SUFFIX = " (paravirtual: correctness, no speed)"

# Name of the Metal device in a virtual machine, as on the macOS runners of GitHub (VeloxQuant-MLX#395, 2026-09-16).
VIRTUAL_METAL_DEVICE = "Apple Paravirtual device"

# Check of the selected device. Other checks are issues that the doctor probes.
DEVICE_CHECK = "device"
FAILS = "fails"
PASSES = "passes"


class Expectation(NamedTuple):
    """Published result of a check on a type of computer.

    Attributes:
        chip: Regular expression for the name of the processor.
        macos: Versions of macOS, in the syntax of pip.
        torch: Releases of torch, in the syntax of pip.
        check: ``"device"``, or the issue of a probe of the doctor.
        expected: Name of the device; for a probe, ``"passes"`` or ``"fails"``.
        source: Issue or binary in which the result was published.
        date: Date of the result, as in ISO 8601.
    """

    chip: str
    macos: str
    torch: str
    check: str
    expected: str
    source: str
    date: str


EXPECTATIONS = tuple(Expectation(**row) for row in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")))


def find_virtual_gpu(report: ReportData) -> str:
    """Return the name of the GPU of a report, or of its chip, if it is virtual, otherwise an empty string."""
    outcome = report.outcome_for("doctor")
    if outcome is not None and VIRTUAL_METAL_DEVICE in json.dumps(outcome.report_json):
        return VIRTUAL_METAL_DEVICE
    chip = report.subject.chip
    return chip if chip.endswith("(Virtual)") else ""


def find_expectations(subject: ReportSubject) -> list[Expectation]:
    """Return the expectations for the chip, macOS and torch of a report. There are none for other systems."""
    system, _, macos = subject.software.system.partition(" ")
    torch = subject.software.torch
    if system != "macOS" or torch is None:
        return []
    return [
        expectation
        for expectation in EXPECTATIONS
        if re.search(expectation.chip, subject.chip)
        and SpecifierSet(expectation.macos).contains(macos)
        and SpecifierSet(expectation.torch).contains(torch, prereleases=True)
    ]


def compare_with_expectations(report: ReportData) -> Table:
    """Return a table of the published results for a type of computer, with those of a report."""
    rows = []
    for expectation in find_expectations(report.subject):
        observed = _observe(report, expectation.check)
        result = "as expected" if observed == expectation.expected else "different"
        if observed is None:
            result = "no result"
        source = f"{expectation.source}, {expectation.date}"
        rows.append((expectation.check, expectation.expected, observed or "", result, source))
    if not rows:
        rows.append(("none", "", "", "no result is published for this processor, system and torch", ""))
    return Table("Compared with published results", ("check", "expected", "observed", "result", "source"), tuple(rows))


def _observe(report: ReportData, check: str) -> str | None:
    """Return the result of a check in a report, or ``None`` if there is none."""
    outcome = report.outcome_for("device" if check == DEVICE_CHECK else "doctor")
    if outcome is None or outcome.outcome != DONE:
        return None
    if check == DEVICE_CHECK:
        return report.device
    issue = re.compile(rf"{re.escape(check)}\b")
    probes_ran = False
    for finding in outcome.report_json["findings"]:
        if finding["status"] in {FAILED, WARNING} and issue.search(f"{finding['evidence']} {finding['details']}"):
            return FAILS
        if (finding["name"], finding["status"]) == (SILENT_ERRORS, OK):
            probes_ran = True
    return PASSES if probes_ran else None
