"""Parity: whether a model gives on a device, in a type, what it gives on the CPU in float32; the value that says so.

:mod:`.measurement` runs both and counts, and :mod:`.judgement` says what the counts mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...devices.simulation import NOTE, shows_simulated
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from ..findings import FAILED, WARNING, Finding, findings_table, worst
from .judgement import TOLERANCES, Tolerance, judged
from .spans import Score, Spans

REFERENCE = "cpu in float32"


@dataclass(frozen=True)
class Differences:
    """How far logits are apart, as absolute differences, the largest of each token; 0 where there is no token.

    Attributes:
        maximum: The largest.
        median: The middle one.
        ninety: The 0.9 quantile.
        ninety_nine: The 0.99 quantile.
    """

    maximum: float = 0.0
    median: float = 0.0
    ninety: float = 0.0
    ninety_nine: float = 0.0


@dataclass(frozen=True)
class GradientDifference:
    """How far the gradients of one step are apart.

    Attributes:
        largest: The largest relative difference of a parameter: the length of the difference over that of the gradient.
        parameter: Which parameter that is.
        parameters: How many were compared.
    """

    largest: float
    parameter: str
    parameters: int


@dataclass(frozen=True, repr=False)
class ParityReport(Shown):
    """What a model gives on a device and in a type, compared with the CPU in float32.

    Attributes:
        model: What the person calls the model.
        device: The device, marked where it is simulated.
        dtype: The type.
        texts: How many texts were compared.
        texts_fingerprint: Tells them from others, and holds none of them.
        tokens: How many tokens they have.
        windows: In how many windows they were read.
        logits: How far the logits are apart.
        other_labels: How many tokens have another best label.
        not_numbers: How many tokens have NaN or infinity in the candidate.
        spans: What became of the entities.
        gold: The scores of reference and candidate against gold entities; ``None`` where none were given.
        gradients: How far the gradients of one step are apart; ``None`` where they were not compared.
        distinct: How many entities of the reference differ in their words or labels.
        notes: What to know about the comparison.
    """

    model: str
    device: str
    dtype: str
    texts: int
    texts_fingerprint: str
    tokens: int
    windows: int
    logits: Differences
    other_labels: int
    not_numbers: int
    spans: Spans
    gold: tuple[Score, Score] | None = None
    gradients: GradientDifference | None = None
    distinct: int = 0
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> Tolerance:
        """What the type may differ by."""
        return TOLERANCES[self.dtype]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the counts mean, line by line."""
        return tuple(judged(self))

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst(self.findings)

    @property
    def is_reference(self) -> bool:
        """Whether the candidate is computed as the reference is."""
        return (self.device, self.dtype) == ("cpu", "float32")

    @property
    def differs(self) -> bool:
        """Whether anything is not as in the reference, within the tolerances."""
        judged_so = {one.name for one in self.findings if one.status in {WARNING, FAILED}}
        return bool(judged_so - {"entities"}) or self.spans.exact != self.spans.all

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON; no word of a text."""
        return {
            **vars(self),
            "reference": REFERENCE,
            "logits": {**vars(self.logits), "tolerance": self.tolerance.logits},
            "spans": self.spans.to_dict(),
            "gold": self.gold and {"reference": self.gold[0].to_dict(), "candidate": self.gold[1].to_dict()},
            "gradients": self.gradients and {**vars(self.gradients), "tolerance": self.tolerance.gradients},
            "notes": list(self.notes),
            "findings": [finding.to_dict() for finding in self.findings],
            "status": self.status,
        }

    def report(self) -> Report:
        """Return the judgement, where entities differ, and the figures."""
        title = f"Parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}"
        read = f"{counted(self.texts, 'text')} with {counted(self.tokens, 'token')}"
        sentences = [f"{read} in {counted(self.windows, 'window')}."]
        if self.is_reference and self.differs:
            sentences.append("The candidate is computed as the reference is: the difference is a fault.")
        simulated = (NOTE,) if shows_simulated(self.device) else ()
        tables = (findings_table("", self.findings), self.changes_table())
        return Report(title, (*simulated, *sentences, *self.notes), tables, figures=(self.figures_table(),))

    def changes_table(self) -> Table:
        """Return where the first entities are that are not the same: numbers of texts and of characters."""
        rows = tuple(
            (f"text {one.text}", one.kind, place(one.reference), place(one.candidate)) for one in self.spans.changes
        )
        count = self.spans.all - self.spans.exact
        caption = (
            f"Entities that differ (the first {len(rows)} of {count})" if count > len(rows) else "Entities that differ"
        )
        return Table(caption, ("where", "what", "reference", "candidate"), rows)

    def figures_table(self) -> Table:
        """Return the measured figures."""
        logits = self.logits
        rows = [
            ("largest difference of a logit", f"{logits.maximum:.3g}"),
            ("0.99 quantile", f"{logits.ninety_nine:.3g}"),
            ("0.9 quantile", f"{logits.ninety:.3g}"),
            ("median", f"{logits.median:.3g}"),
            ("tokens with the same label", f"{share(self.tokens - self.other_labels, self.tokens)}"),
            ("entities that are the same", f"{100 * self.spans.agreement:.2f}%"),
        ]
        for name, one in zip(("reference", "candidate"), self.gold or (), strict=False):
            rows.append((f"gold, {name}", f"recall {one.recall:.4f}, precision {one.precision:.4f}, F1 {one.f1:.4f}"))
        if self.gradients:
            worst_one = f"{self.gradients.largest:.3g} at {self.gradients.parameter}"
            rows.append(("largest relative difference of a gradient", worst_one))
        return Table("Figures", ("figure", "value"), tuple(rows))


def place(span: tuple[int, int, str] | None) -> str:
    """Return where an entity is and its label, empty where there is none.

    Example:
        >>> place((9, 20, "DISEASE"))
        'characters 9 to 20, DISEASE'
    """
    return f"characters {span[0]} to {span[1]}, {span[2]}" if span else ""


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent.

    Example:
        >>> share(999, 1000), share(0, 0)
        ('99.90%', '100.00%')
    """
    return f"{100 * part / whole:.2f}%" if whole else "100.00%"
