"""One line of a report that judges: what was looked at, how it is, the evidence, and one thing to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..interface.display import Table

OK = "ok"
WARNING = "warning"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"

SEVERITY = (NOT_APPLICABLE, OK, WARNING, FAILED)
"""From the mildest to the worst."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at, in a few words.
        status: ``"ok"``, ``"warning"``, ``"failed"`` or ``"not applicable"``.
        evidence: What was seen, in words that are the same in every run; never a time.
        remedy: One thing to do, as a sentence; empty where nothing is wrong.
    """

    name: str
    status: str
    evidence: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the finding as a mapping of strings."""
        return dict(vars(self))


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst status of findings.

    Example:
        >>> worst([Finding("torch", OK, "2.13.0"), Finding("MPS", NOT_APPLICABLE, "no Mac")])
        'ok'
    """
    return max((one.status for one in findings), key=SEVERITY.index, default=NOT_APPLICABLE)


def findings_table(caption: str, findings: Iterable[Finding]) -> Table:
    """Return findings as a table.

    Example:
        >>> findings_table("Checks", [Finding("torch", OK, "2.13.0")]).rows
        (('torch', 'ok', '2.13.0', ''),)
    """
    rows = tuple((one.name, one.status, one.evidence, one.remedy) for one in findings)
    return Table(caption, ("check", "result", "evidence", "what to do"), rows)
