"""Parity: whether a model gives on a device, in a type, what it gives on the CPU in float32; the value and the judgement.

:mod:`.measurement` runs both and counts; this file says what the counts mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...devices.simulation import NOTE, shows_simulated
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from ..findings import FAILED, NOT_APPLICABLE, OK, WARNING, Finding, findings_table, worst
from .spans import Score, Spans

REFERENCE = "cpu in float32"


@dataclass(frozen=True)
class Tolerance:
    """How far a type may be from float32 on the CPU before that is told.

    Attributes:
        logits: The largest absolute difference of a logit.
        gradients: The largest relative difference of the gradient of a parameter.
    """

    logits: float
    gradients: float | None


TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(5e-2, 1e-1),
    "bfloat16": Tolerance(5e-1, 5e-1),
    "int8": Tolerance(1e1, None),
}
"""For each type. float32: what devices that add in another order may differ by in models of this size. The others are about
three times the largest difference seen with the two bundled models on a CPU, in 5,524 texts of 203,905 tokens whose logits
go up to 11: 0.017 in float16 and 0.13 in bfloat16, which is about three times the rounding of one such number there (2**-11
and 2**-8 of it); of gradients 0.024 and 0.17. int8 rounds the inputs of a layer by their largest, and a few tokens were off
by up to 3.0: its logits say little, and the entities decide. ``benchmarks/parity.py`` prints the figures."""

SPAN_AGREEMENT = 0.99
"""The share of entities that must be the same, else a comparison has failed."""

RECALL_LOSS = 0.01
"""How much of the reference's recall of gold entities may be lost."""

ROUNDING = 1e-9

DOCTOR = "Do not use this device for this model; see what nb.doctor() says of it."
ANOTHER_TYPE = "Use float32."
WHERE_THEY_DIFFER = "Look at the entities; where they differ, use float32."


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
        if self.is_reference:
            sentences.append("The candidate is computed as the reference is: any difference is a fault.")
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


def judged(report: ParityReport) -> Iterator[Finding]:
    """Yield what the counts of a comparison mean."""
    yield of_numbers(report)
    yield of_logits(report)
    yield of_labels(report)
    yield of_entities(report.spans)
    if report.gold:
        yield of_gold(*report.gold)
    if report.gradients:
        yield of_gradients(report.gradients, report.tolerance.gradients or 0.0)


def of_numbers(report: ParityReport) -> Finding:
    """Judge whether all logits are numbers."""
    if report.not_numbers:
        what = f"NaN or infinity in {counted(report.not_numbers, 'token')}"
        remedy = DOCTOR if report.dtype == "float32" else "Use float32, or bfloat16, which has the range of float32."
        return Finding("numbers", FAILED, what, remedy)
    return Finding("numbers", OK, "every logit is a number")


def of_logits(report: ParityReport) -> Finding:
    """Judge how far logits are apart; float32 has no excuse, and in a reduced type the entities decide."""
    tolerance = f"{report.tolerance.logits:.0e}"
    if report.logits.maximum <= report.tolerance.logits:
        return Finding("logits", OK, f"within {tolerance} of the reference")
    if report.dtype == "float32":
        return Finding("logits", FAILED, f"more than {tolerance} off the reference", DOCTOR)
    return Finding("logits", WARNING, f"more than {tolerance} off the reference", WHERE_THEY_DIFFER)


def of_labels(report: ParityReport) -> Finding:
    """Judge the labels of tokens; a near tie may fall to either side, and what counts are entities."""
    if not report.other_labels:
        return Finding("labels", OK, "every token has the same label")
    what = f"{report.other_labels:,} of {counted(report.tokens, 'token')} have another label"
    return Finding("labels", WARNING, what, WHERE_THEY_DIFFER)


def of_entities(spans: Spans) -> Finding:
    """Judge the entities, by the share that is the same."""
    if not spans.all:
        remedy = "Compare on texts in which it finds some."
        return Finding("entities", NOT_APPLICABLE, "none was found in these texts", remedy)
    counts = {name: getattr(spans, name) for name in ("moved", "relabelled", "missing", "extra")}
    others = "".join(f", {count:,} {name}" for name, count in counts.items() if count)
    what = f"{spans.exact:,} of {spans.reference:,} exact{others}"
    if spans.exact == spans.all:
        return Finding("entities", OK, what)
    status = WARNING if spans.agreement >= SPAN_AGREEMENT else FAILED
    return Finding("entities", status, what, ANOTHER_TYPE if status == FAILED else "Look at the places below.")


def of_gold(reference: Score, candidate: Score) -> Finding:
    """Judge how many gold entities are found."""
    what = f"{candidate.right:,} of {candidate.gold:,} found, the reference {reference.right:,}"
    lost = recall_loss(reference, candidate)
    status = OK if lost <= 0 else WARNING if lost <= RECALL_LOSS + ROUNDING else FAILED
    return Finding("gold entities", status, what, "" if status == OK else ANOTHER_TYPE)


def of_gradients(gradients: GradientDifference, tolerance: float) -> Finding:
    """Judge the gradients of one step."""
    where = f"of {counted(gradients.parameters, 'parameter')}"
    if gradients.largest <= tolerance:
        return Finding("gradients", OK, f"the gradients {where} are within {tolerance:.0e} of the reference")
    what = f"the gradient of {gradients.parameter}, one {where}, is more than {tolerance:.0e} off the reference"
    return Finding("gradients", FAILED, what, "Do not train on this device in this type; see what nb.doctor() says.")


def recall_loss(reference: Score, candidate: Score) -> float:
    """Return how much of the reference's recall a candidate has lost; negative where it found more."""
    return reference.recall - candidate.recall


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
