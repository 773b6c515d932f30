"""The doctor: from facts to a report. Pure: nothing is asked and nothing computed; ``examination`` gathers the facts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...devices.simulation import MARK, NOTE
from ...interface.display import Report, Shown, Table
from ..findings import FAILED, OK, SEVERITY, WARNING, Finding, worst
from .checks import SECTIONS
from .facts import DoctorFacts

SEE_ABOVE = "see above"


@dataclass(frozen=True, repr=False)
class DoctorReport(Shown):
    """What the doctor found, in the order in which it looked.

    Attributes:
        findings: One for each thing that was looked at.
        simulated: Whether the computer is a simulated Mac.

    Example:
        >>> print(DoctorReport((Finding("torch", OK, "2.13.0"), Finding("MPS", FAILED, "no Metal device", "Ask a Mac."))))
        Doctor
          1 ok, 0 warnings, 1 failed.
          MPS, failed: no Metal device. Ask a Mac.
        Everything that was looked at
          check  result  evidence
          torch  ok      2.13.0
          MPS    failed  see above
    """

    findings: tuple[Finding, ...]
    simulated: bool = False

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 1 where something failed, else 0."""
        return int(self.status == FAILED)

    @property
    def headline(self) -> str:
        """How many findings there are of each kind, in one sentence."""
        count = Counter(one.status for one in self.findings)
        warnings = f"{count[WARNING]} warning{'' if count[WARNING] == 1 else 's'}"
        return f"{count[OK]} ok, {warnings}, {count[FAILED]} failed."

    @property
    def bad(self) -> tuple[Finding, ...]:
        """What failed, and then what may go wrong."""
        wrong = (one for one in self.findings if one.status in (WARNING, FAILED))
        return tuple(sorted(wrong, key=lambda one: -SEVERITY.index(one.status)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists and strings, ready for JSON."""
        findings = [one.to_dict() for one in self.findings]
        summary = {"status": self.status, "exit_code": self.exit_code, "headline": self.headline}
        return {**summary, "simulated": self.simulated, "findings": findings}

    def report(self) -> Report:
        """Return what there is to show: the count, what to do, and everything that was looked at."""
        rows = tuple((one.name, one.status, SEE_ABOVE if one in self.bad else one.evidence) for one in self.findings)
        sentences = (self.headline, *((NOTE,) if self.simulated else ()), *map(sentence_of, self.bad))
        table = Table("Everything that was looked at", ("check", "result", "evidence"), rows)
        return Report(f"Doctor{MARK if self.simulated else ''}", sentences, (table,))


def sentence_of(finding: Finding) -> str:
    """Return a finding as a line that can be read alone.

    Example:
        >>> sentence_of(Finding("Python", FAILED, "it runs under Rosetta", "Install an arm64 Python."))
        'Python, failed: it runs under Rosetta. Install an arm64 Python.'
    """
    return f"{finding.name}, {finding.status}: {finding.evidence.rstrip('.')}. {finding.remedy}".rstrip()


def diagnose(facts: DoctorFacts) -> DoctorReport:
    """Return what is to be said of a computer; the same facts always give the same report.

    Args:
        facts: What ``examination.examine`` gathered.
    """
    findings = tuple(finding for section in SECTIONS for finding in section(facts))
    return DoctorReport(findings, facts.machine.simulated)
