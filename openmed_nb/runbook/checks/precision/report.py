"""Parity report: comparison of entities, scores against gold entities, findings and rejection reasons.

``parity`` runs the reference and the candidate and builds the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Finding,
    JsonMixin,
    Report,
    Table,
    findings_table,
    format_percent,
    pluralize,
    worst_status,
)
from ....devices.machine import is_marked_simulated
from .policy import (
    CHECK_ENTITIES_REMEDY,
    MAX_RECALL_LOSS,
    MIN_SPAN_AGREEMENT,
    OVERFLOW_REMEDIES,
    RELOAD_REMEDY,
    ROUNDING,
    TOLERANCES,
    USE_FLOAT32_REMEDY,
    AcceptanceCriteria,
    RejectionReason,
    Tolerance,
)

ChangeKind = Literal["moved", "label_changed", "missing", "extra"]

# Start and end of an entity in characters, half-open, and its label.
Span = tuple[int, int, str]

# Outcomes of the comparison of an entity.
KINDS = ("exact", "moved", "label_changed", "missing", "extra")

# Maximum number of changes that are stored with their offsets. All changes are counted.
MAX_CHANGES = 20


@dataclass(frozen=True)
class EntityChange(JsonMixin):
    """An entity that differs between reference and candidate, without any of its text.

    Attributes:
        text: Index of the text.
        kind: ``"moved"``, ``"label_changed"``, ``"missing"`` or ``"extra"``.
        reference: Offsets and label in the reference, or ``None`` if the entity is extra.
        candidate: Offsets and label in the candidate, or ``None`` if the entity is missing.
    """

    text: int
    kind: ChangeKind
    reference: Span | None
    candidate: Span | None


@dataclass(frozen=True)
class EntityAgreement(JsonMixin):
    """Agreement of the entities of reference and candidate.

    Each entity of the reference has one of the first four kinds.

    Attributes:
        exact: Number of entities with the same offsets and label.
        moved: Number of entities with the same label and overlapping, but different offsets.
        label_changed: Number of entities with the same offsets and a different label.
        missing: Number of entities of the reference only.
        extra: Number of entities of the candidate only.
        changes: The first entities that are not exact.
    """

    exact: int = 0
    moved: int = 0
    label_changed: int = 0
    missing: int = 0
    extra: int = 0
    changes: tuple[EntityChange, ...] = ()

    JSON_PROPERTIES = ("reference", "agreement")

    @property
    def counts(self) -> dict[str, int]:
        """Number of entities of each kind."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def reference(self) -> int:
        """Number of entities of the reference."""
        return self.all - self.extra

    @property
    def all(self) -> int:
        """Number of entities of either side. Entities of both sides count once."""
        return sum(self.counts.values())

    @property
    def agreement(self) -> float:
        """Fraction of all entities that are exact, or 1 if there are no entities."""
        return self.exact / self.all if self.all else 1.0

    def __add__(self, other: EntityAgreement) -> EntityAgreement:
        counts = Counter(self.counts) + Counter(other.counts)
        return EntityAgreement(**counts, changes=(self.changes + other.changes)[:MAX_CHANGES])


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> EntityAgreement:
    """Compare the entities of one text.

    Equal entities are paired first, then those with equal boundaries, then those with equal labels that overlap. The remaining
    entities are missing or extra.
    """
    expected = Counter(reference)
    actual = Counter(candidate)
    missing = sorted((expected - actual).elements())
    extra = sorted((actual - expected).elements())
    label_changed = _pop_pairs(missing, extra, _have_equal_boundaries)
    moved = _pop_pairs(missing, extra, _overlap_with_equal_labels)
    changes = (
        *(EntityChange(text, "moved", before, after) for before, after in moved),
        *(EntityChange(text, "label_changed", before, after) for before, after in label_changed),
        *(EntityChange(text, "missing", span, None) for span in missing),
        *(EntityChange(text, "extra", None, span) for span in extra),
    )
    exact = (expected & actual).total()
    return EntityAgreement(exact, len(moved), len(label_changed), len(missing), len(extra), changes[:MAX_CHANGES])


def _have_equal_boundaries(span: Span, other: Span) -> bool:
    return span[:2] == other[:2]


def _overlap_with_equal_labels(span: Span, other: Span) -> bool:
    return span[2] == other[2] and span[0] < other[1] and other[0] < span[1]


def _pop_pairs(left: list[Span], right: list[Span], matches: Callable[[Span, Span], bool]) -> list[tuple[Span, Span]]:
    """Remove pairs of matching spans from two sorted lists and return them, each span with the first that matches."""
    pairs = []
    for span in list(left):
        other = next((candidate for candidate in right if matches(span, candidate)), None)
        if other is not None:
            left.remove(span)
            right.remove(other)
            pairs.append((span, other))
    return pairs


@dataclass(frozen=True)
class EntityScore(JsonMixin):
    """Score against gold entities. An entity is correct if its boundaries and its label match.

    Attributes:
        gold: Number of gold entities.
        predicted: Number of predicted entities.
        correct: Number of predicted entities that are gold entities.
    """

    gold: int = 0
    predicted: int = 0
    correct: int = 0

    JSON_PROPERTIES = ("recall",)

    @property
    def recall(self) -> float:
        """Fraction of the gold entities that were found, or 1 if there are none."""
        return self.correct / self.gold if self.gold else 1.0

    def __add__(self, other: EntityScore) -> EntityScore:
        return EntityScore(self.gold + other.gold, self.predicted + other.predicted, self.correct + other.correct)


def score(gold: Iterable[Span], predicted: Iterable[Span]) -> EntityScore:
    """Return the score of the entities of one text."""
    expected = Counter(gold)
    actual = Counter(predicted)
    return EntityScore(expected.total(), actual.total(), (expected & actual).total())


REFERENCE = "cpu in float32"


@dataclass(frozen=True)
class GradientDifference(JsonMixin):
    """Difference of the gradients of one training step.

    Attributes:
        largest: Largest relative difference of a parameter (norm of the difference divided by the norm of the gradient).
        parameter: Name of that parameter.
        parameters: Number of parameters that were compared.
    """

    largest: float
    parameter: str
    parameters: int


@dataclass(frozen=True, repr=False)
class ParityReport(Displayable):
    """Comparison of a model on a device in a dtype with the same model on the CPU in float32.

    Attributes:
        model: Name of the model as given by the user.
        device: Device of the candidate, labeled if it is simulated.
        dtype: Dtype of the candidate.
        texts: Number of texts.
        texts_fingerprint: Fingerprint of the texts, which contains no text content.
        tokens: Number of tokens.
        windows: Number of windows.
        logit_difference: Largest absolute difference of a logit, or 0 if there are no tokens.
        label_mismatches: Number of tokens whose best label differs.
        non_finite_tokens: Number of tokens with NaN or infinity in the candidate.
        spans: Agreement of the entities.
        gold: Scores of reference and candidate against gold entities, or ``None`` if there are no gold entities.
        gradients: Differences of the gradients of one training step, or ``None`` if they were not compared.
        notes: Notes on the comparison, as sentences.
    """

    model: str
    device: str
    dtype: str
    texts: int
    texts_fingerprint: str
    tokens: int
    windows: int
    logit_difference: float
    label_mismatches: int
    non_finite_tokens: int
    spans: EntityAgreement
    gold: tuple[EntityScore, EntityScore] | None = None
    gradients: GradientDifference | None = None
    notes: tuple[str, ...] = ()

    JSON_PROPERTIES = ("findings", "status")

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        return is_marked_simulated(self.device)

    @property
    def tolerance(self) -> Tolerance:
        """Tolerance of the dtype."""
        return TOLERANCES[self.dtype]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about values, logits, labels, entities and gradients."""
        return tuple(_evaluate_findings(self))

    @property
    def status(self) -> str:
        """Worst status of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst_status(self.findings)

    @property
    def is_reference(self) -> bool:
        """Whether the candidate has the device and dtype of the reference."""
        return (self.device, self.dtype) == ("cpu", "float32")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values, without any text content."""
        values = super().to_dict() | {"reference": REFERENCE, "tolerance": asdict(self.tolerance)}
        if self.gold:
            values["gold"] = dict(zip(("reference", "candidate"), values["gold"], strict=True))
        return values

    def to_report(self) -> Report:
        """Return the report: findings, differing entities and metrics."""
        size = f"{pluralize(self.texts, 'text')} with {pluralize(self.tokens, 'token')}"
        sentences = (f"{size} in {pluralize(self.windows, 'window')}.", *self.notes)
        rows = []
        for change in self.spans.changes:
            sides = map(_format_span, (change.reference, change.candidate))
            rows.append((f"text {change.text}", change.kind.replace("_", " "), *sides))
        count = self.spans.all - self.spans.exact
        first = f" (first {len(rows)} of {count})" if count > len(rows) else ""
        differing = Table(f"Differing entities{first}", ("text", "change", "reference", "candidate"), tuple(rows))
        return Report(
            f"Parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            sentences,
            (findings_table("", self.findings), differing),
            metrics=(Table("Metrics", ("metric", "value"), tuple(self._metrics().items()), collapsed=True),),
            status=self.status,
        )

    def _metrics(self) -> dict[str, str]:
        label_agreement = 1 - self.label_mismatches / self.tokens if self.tokens else 1
        metrics = {
            "largest logit difference": f"{self.logit_difference:.3g}",
            "tokens with the same label": format_percent(label_agreement, ".2f"),
            "identical entities": format_percent(self.spans.agreement, ".2f"),
        }
        for name, side_score in zip(("reference", "candidate"), self.gold or (), strict=False):
            metrics[f"recall of gold, {name}"] = f"{side_score.recall:.4f}"
        if self.gradients:
            gradient = f"{self.gradients.largest:.3g} at {self.gradients.parameter}"
            metrics["largest relative gradient difference"] = gradient
        return metrics


def _format_span(span: Span | None) -> str:
    return f"characters {span[0]} to {span[1]}, {span[2]}" if span else ""


def _evaluate_findings(report: ParityReport) -> Iterator[Finding]:
    """Yield the findings of a comparison."""
    remedy = "Use the CPU for this model."
    training_remedy = "Train on the CPU."
    if report.dtype != "float32":
        remedy = USE_FLOAT32_REMEDY
        training_remedy = "Train in float32."
    elif report.is_reference:
        remedy = RELOAD_REMEDY
        training_remedy = RELOAD_REMEDY
    if report.non_finite_tokens:
        evidence = f"NaN or infinity in {pluralize(report.non_finite_tokens, 'token')}"
        yield Finding("finite values", FAILED, evidence, OVERFLOW_REMEDIES.get(report.dtype, remedy))
    else:
        yield Finding("finite values", OK, "all logits are finite")
    yield _check_logits(report, remedy)
    if report.label_mismatches:  # Rounding decides near ties.
        evidence = f"{report.label_mismatches:,} of {pluralize(report.tokens, 'token')} have a different label"
        yield Finding("labels", WARNING, evidence, CHECK_ENTITIES_REMEDY)
    else:
        yield Finding("labels", OK, "every token has the same label")
    yield _check_entities(report, remedy)
    if report.gold:
        reference, candidate = report.gold
        evidence = f"{candidate.correct:,} of {candidate.gold:,} found, {reference.correct:,} by the reference"
        lost = reference.recall - candidate.recall
        if lost <= 0:
            yield Finding("gold entities", OK, evidence)
        else:
            yield Finding("gold entities", WARNING if lost <= MAX_RECALL_LOSS + ROUNDING else FAILED, evidence, remedy)
    if report.gradients:
        yield _check_gradients(report, report.gradients, training_remedy)


def _check_logits(report: ParityReport, remedy: str) -> Finding:
    """Return the finding about logit differences.

    In a reduced dtype, the entities decide. In float32, the entities decide up to the tolerance of float16, because a larger
    model accumulates more rounding errors. A larger difference is not due to rounding.
    """
    tolerance = report.tolerance.logits
    largest = report.logit_difference
    if tolerance is None:
        return Finding("logits", NOT_APPLICABLE, f"logits of {report.dtype} are not comparable; see the entity check")
    if largest <= tolerance:
        return Finding("logits", OK, f"within tolerance ({tolerance:g})")
    evidence = f"a difference exceeds the tolerance ({tolerance:g})"
    is_rounding = largest <= (TOLERANCES["float16"].logits or 0.0)
    if report.dtype == "float32" and not (is_rounding and report.spans.exact == report.spans.all):
        return Finding("logits", FAILED, evidence, remedy)
    return Finding("logits", WARNING, evidence, CHECK_ENTITIES_REMEDY)


def _check_entities(report: ParityReport, remedy: str) -> Finding:
    """Return the finding about the fraction of identical entities."""
    spans = report.spans
    if not spans.all:
        evidence = "no entities found by either model: inconclusive"
        return Finding("entities", WARNING, evidence, "Use texts that contain entities.")
    changes = "".join(
        f", {count:,} {kind.replace('_', ' ')}" for kind, count in spans.counts.items() if count and kind != "exact"
    )
    evidence = f"{spans.exact:,} of {spans.reference:,} exact{changes}"
    if spans.exact == spans.all:
        return Finding("entities", OK, evidence)
    if spans.agreement >= MIN_SPAN_AGREEMENT:
        return Finding("entities", WARNING, evidence, "Review the entities listed below.")
    return Finding("entities", FAILED, evidence, remedy)


def _check_gradients(report: ParityReport, gradients: GradientDifference, remedy: str) -> Finding:
    """Return the finding about the gradients of one training step."""
    parameters = f"of {pluralize(gradients.parameters, 'parameter')}"
    tolerance = report.tolerance.gradients or 0.0
    if gradients.largest <= tolerance:
        return Finding("gradients", OK, f"gradients {parameters} are within tolerance ({tolerance:g})")
    evidence = f"the gradient of {gradients.parameter}, one {parameters}, exceeds the tolerance ({tolerance:g})"
    return Finding("gradients", FAILED, evidence, remedy)


def rejection_reasons(report: ParityReport, criteria: AcceptanceCriteria) -> Iterator[RejectionReason]:
    """Yield the reasons why a reduced dtype is rejected."""
    spans = report.spans
    if report.non_finite_tokens:
        reason = f"{pluralize(report.non_finite_tokens, 'token')} have NaN or infinity."
        yield RejectionReason(reason, OVERFLOW_REMEDIES.get(report.dtype, USE_FLOAT32_REMEDY))
    if spans.agreement < criteria.span_agreement:
        reason = f"Only {spans.exact:,} of {pluralize(spans.all, 'entity', 'entities')} are identical."
        yield RejectionReason(reason, USE_FLOAT32_REMEDY)
    if report.gold:
        reference, candidate = report.gold
        if reference.recall - candidate.recall > criteria.recall_loss + ROUNDING:
            recall, reference_recall = (format_percent(score.recall, ".1f") for score in (candidate, reference))
            reason = f"Recall of gold entities is {recall}, compared with {reference_recall} in float32."
            yield RejectionReason(reason, USE_FLOAT32_REMEDY)
    required = (
        ("entities", spans.reference, criteria.minimum_entities),
        ("different texts", report.texts, criteria.minimum_texts),
    )
    missing = [f"{count:,} of {minimum} {item}" for item, count, minimum in required if count < minimum]
    if missing:
        reason = f"Inconclusive: only {', '.join(missing)} that are required."
        yield RejectionReason(reason, "Repeat the validation with more texts, each different.", conclusive=False)
