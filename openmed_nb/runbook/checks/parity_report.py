"""Parity report: tolerances, comparison of entities, findings, and the acceptance criteria of a reduced dtype.

A dtype that meets the criteria gets a validation record. Loading a model does not check the criteria again. If a release
requires more, the version in the schema of :class:`~openmed_nb.models.records.ValidationRecord` increases and older records are
ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..._render.display import (
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
from ...devices.machine import is_marked_simulated

# Minimum fraction of identical entities.
MIN_SPAN_AGREEMENT = 0.99
# Maximum loss of recall of gold entities, relative to the reference.
MAX_RECALL_LOSS = 0.01
# Minimum number of entities in the reference, and of texts with different words. A few made-up sentences are not a sample of notes.
MIN_ENTITIES = 50
MIN_TEXTS = 50


@dataclass(frozen=True)
class Tolerance(JsonMixin):
    """Maximum difference of a dtype from float32 on the CPU that the report accepts.

    Attributes:
        logits: Maximum absolute difference of a logit, or ``None`` if logits are not comparable.
        gradients: Maximum relative difference of a parameter gradient, or ``None`` if there are no gradients.
    """

    logits: float | None
    gradients: float | None


# Tolerance of each dtype: a multiple of the largest difference measured with the two bundled models in 5,524 texts of 203,905
# tokens, whose logits reach 11.
#
# - NVIDIA H200 (torch 2.11): logits differ by 2.0e-05 in float32, 0.012 in float16 and 0.16 in bfloat16, gradients by 9.2e-06,
#   0.0067 and 0.031. At least 0.9998 of the entities were identical in float16 and 0.9974 in bfloat16.
# - CPU: logits differ by 0.017 in float16 and 0.13 in bfloat16, about three times the rounding error of one such value (2**-11
#   and 2**-8 of it), gradients by 0.024 and 0.17.
# - int8 scales the inputs of a layer by their maximum, and a few tokens differed by up to 3.0. Its logits are not comparable, so
#   the entities decide.
#
# ``benchmarks/parity.py`` prints these measurements.
TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(5e-2, 1e-1),
    "bfloat16": Tolerance(5e-1, 5e-1),
    "int8": Tolerance(None, None),
}

USE_FLOAT32_REMEDY = "Use float32."
TOO_FEW = "too few entities to accept or reject"
CHECK_ENTITIES_REMEDY = "Check the entities: they decide."
# Remedies for NaN and infinity in a dtype with a small range.
OVERFLOW_REMEDIES = {"float16": "Use float32, or bfloat16 if the device supports it, which has the same range."}


@dataclass(frozen=True)
class RejectionReason:
    """Reason why a reduced dtype is rejected.

    Attributes:
        reason: Problem as a sentence.
        remedy: Suggested action.
        conclusive: Whether the reason is evidence against the dtype. Too few texts are not.
    """

    reason: str
    remedy: str
    conclusive: bool = True


ChangeKind = Literal["moved", "label_changed", "missing", "extra"]

# Start and end of an entity in characters, half-open, and its label.
Span = tuple[int, int, str]

# Outcomes of the comparison of an entity.
KINDS = ("exact", "moved", "label_changed", "missing", "extra")

# Maximum number of changes that are stored with their offsets. All changes are counted.
MAX_CHANGES = 20


@dataclass(frozen=True)
class EntityChange:
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

    Each entity of the reference has one of the first four kinds. Equal entities of a text that repeats count once.

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

    @property
    def upper_bound(self) -> float | None:
        """Largest fraction of the entities of such texts that can differ, with 95% confidence, or ``None`` if it is not known.

        This is an upper bound of a Poisson distribution. The quantile of the normal distribution, rounded up, gives the rule
        of three if no entity differs. It needs more than three entities.
        """
        bound = _poisson_quantile(self.all - self.exact + 1, 1.66)
        return min(1.0, bound / self.all) if self.all > 3 else None  # noqa: PLR2004 - the rule of three

    @property
    def is_inconclusive(self) -> bool:
        """Whether the entities that differ, at least one, do not exclude with 95% confidence that the required fraction agrees."""
        return _poisson_quantile(self.all - self.exact, -1.66) <= (1 - MIN_SPAN_AGREEMENT) * self.all

    def __add__(self, other: EntityAgreement) -> EntityAgreement:
        counts = Counter(self.counts) + Counter(other.counts)
        return EntityAgreement(**counts, changes=(self.changes + other.changes)[:MAX_CHANGES])


def _poisson_quantile(count: int, deviations: float) -> float:
    """Return a confidence bound of a Poisson distribution (Wilson and Hilferty 1931)."""
    return float(count * (1 - 1 / (9 * count) + deviations / (3 * math.sqrt(count))) ** 3)


# Kinds of changes of two entities that belong together, in order of precedence.
PAIRINGS: tuple[ChangeKind, ...] = ("label_changed", "moved")


def _is_change(kind: ChangeKind, span: Span, other: Span) -> bool:
    """Return whether two entities have equal boundaries, or overlap with equal labels."""
    if kind == "label_changed":
        return span[:2] == other[:2]
    return span[2] == other[2] and span[0] < other[1] and other[0] < span[1]


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> EntityAgreement:
    """Compare the entities of one text.

    Equal entities are paired first, then those with equal boundaries, then those with equal labels that overlap. The remaining
    entities are missing or extra.
    """
    expected = Counter(reference)
    actual = Counter(candidate)
    missing = sorted((expected - actual).elements())
    extra = sorted((actual - expected).elements())
    changes: list[EntityChange] = []
    for kind in PAIRINGS:
        for before in list(missing):
            after = next((span for span in extra if _is_change(kind, before, span)), None)
            if after is not None:
                missing.remove(before)
                extra.remove(after)
                changes.append(EntityChange(text, kind, before, after))
    changes += [EntityChange(text, "missing", span, None) for span in missing]
    changes += [EntityChange(text, "extra", None, span) for span in extra]
    counts = Counter[str](change.kind for change in changes)
    return EntityAgreement((expected & actual).total(), **counts, changes=tuple(changes[:MAX_CHANGES]))


@dataclass(frozen=True)
class GoldScore(JsonMixin):
    """Gold entities that both models predict with the same boundaries and the same label.

    Attributes:
        entities: Number of gold entities.
        reference: Number that the reference predicts.
        candidate: Number that the candidate predicts.
    """

    entities: int = 0
    reference: int = 0
    candidate: int = 0

    JSON_PROPERTIES = ("reference_recall", "recall")

    @property
    def reference_recall(self) -> float:
        """Fraction of the gold entities that the reference predicts, or 1 if there are none."""
        return self.reference / self.entities if self.entities else 1.0

    @property
    def recall(self) -> float:
        """Fraction of the gold entities that the candidate predicts, or 1 if there are none."""
        return self.candidate / self.entities if self.entities else 1.0

    @property
    def recall_loss(self) -> float:
        """Loss of recall relative to the reference, negative if the candidate predicts more gold entities."""
        return (self.reference - self.candidate) / self.entities if self.entities else 0.0


REFERENCE = "cpu in float32"
BASELINE = ("cpu", "float32")  # Device and dtype of the reference.
CPU_ONLY = "Nothing was compared but the CPU with itself; without gold, of at most eight texts."


@dataclass(frozen=True)
class GradientDifference:
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
        gold: Gold entities that both models predict, or ``None`` if no gold was passed.
        gradients: Differences of the gradients of one training step, or ``None`` if they were not compared.
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
    gold: GoldScore | None = None
    gradients: GradientDifference | None = None

    JSON_PROPERTIES = ("tolerance", "findings", "status")

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        return is_marked_simulated(self.device)

    @property
    def is_baseline(self) -> bool:
        """Whether the candidate is the reference itself: the CPU in float32."""
        return (self.device, self.dtype) == BASELINE

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
        """Worst status of the findings, or ``"not applicable"`` if the CPU was only compared with itself."""
        status = worst_status(self.findings)
        return NOT_APPLICABLE if self.is_baseline and status == OK else status

    def to_report(self) -> Report:
        """Return the report: findings, differing entities and metrics."""
        size = f"{pluralize(self.texts, 'text')} with {pluralize(self.tokens, 'token')}"
        sentences = [f"{size} in {pluralize(self.windows, 'window')}."]
        if self.is_baseline:
            sentences.insert(0, CPU_ONLY)
        elif bound := self.spans.upper_bound:
            sentences.append(
                f"At most {format_percent(bound, '.2g')} of the entities of such texts differ, with 95% confidence."
            )
        rows = tuple(
            (
                f"text {change.text}",
                change.kind.replace("_", " "),
                *(
                    f"characters {span[0]} to {span[1]}, {span[2]}" if span else ""
                    for span in (change.reference, change.candidate)
                ),
            )
            for change in self.spans.changes
        )
        count = self.spans.all - self.spans.exact
        first = f" (first {len(rows)} of {count})" if count > len(rows) else ""
        differing = Table(f"Differing entities{first}", ("text", "change", "reference", "candidate"), rows)
        label_agreement = 1 - self.label_mismatches / self.tokens if self.tokens else 1
        metrics = {
            "largest logit difference": f"{self.logit_difference:.3g}",
            "tokens with the same label": format_percent(label_agreement, ".2f"),
            "identical entities": format_percent(self.spans.agreement, ".2f"),
        }
        if self.gold:
            metrics["recall of gold, reference"] = f"{self.gold.reference_recall:.4f}"
            metrics["recall of gold, candidate"] = f"{self.gold.recall:.4f}"
        if self.gradients:
            metrics["largest relative gradient difference"] = (
                f"{self.gradients.largest:.3g} at {self.gradients.parameter}"
            )
        return Report(
            f"Parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            tuple(sentences),
            (findings_table("", self.findings), differing),
            metrics=(Table("Metrics", ("metric", "value"), tuple(metrics.items()), collapsed=True),),
            status=self.status,
        )


def _evaluate_findings(report: ParityReport) -> Iterator[Finding]:
    """Yield the findings of a comparison."""
    remedy = "Use the CPU for this model."
    if report.dtype != "float32":
        remedy = USE_FLOAT32_REMEDY
    elif report.device == "cpu":
        remedy = "Reload the model."
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
        gold = report.gold
        evidence = f"{gold.candidate:,} of {gold.entities:,} found, {gold.reference:,} by the reference"
        if gold.recall_loss <= 0:
            yield Finding("gold entities", OK, evidence)
        else:
            yield Finding("gold entities", WARNING if gold.recall_loss <= MAX_RECALL_LOSS else FAILED, evidence, remedy)
    if report.gradients:
        yield _check_gradients(report, report.gradients, remedy)


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
    evidence = f"{spans.exact:,} of {spans.all:,} exact{changes}"
    if spans.exact == spans.all:
        return Finding("entities", OK, evidence)
    if spans.agreement >= MIN_SPAN_AGREEMENT:
        return Finding("entities", WARNING, evidence, "Review the entities listed below.")
    if spans.is_inconclusive and report.dtype != "float32":
        return Finding("entities", WARNING, f"{evidence}; {TOO_FEW}", "Use more texts.")
    return Finding("entities", FAILED, evidence, remedy)


def _check_gradients(report: ParityReport, gradients: GradientDifference, remedy: str) -> Finding:
    """Return the finding about the gradients of one training step."""
    parameters = f"of {pluralize(gradients.parameters, 'parameter')}"
    tolerance = report.tolerance.gradients or 0.0
    if gradients.largest <= tolerance:
        return Finding("gradients", OK, f"gradients {parameters} are within tolerance ({tolerance:g})")
    evidence = f"the gradient of {gradients.parameter}, one {parameters}, exceeds the tolerance ({tolerance:g})"
    return Finding("gradients", FAILED, evidence, remedy)


def rejection_reasons(report: ParityReport) -> Iterator[RejectionReason]:
    """Yield the reasons why a reduced dtype is rejected."""
    spans = report.spans
    if report.non_finite_tokens:
        reason = f"{pluralize(report.non_finite_tokens, 'token')} have NaN or infinity."
        yield RejectionReason(reason, OVERFLOW_REMEDIES.get(report.dtype, USE_FLOAT32_REMEDY))
    repeat_remedy = "Repeat the validation with more texts, each different."
    if spans.agreement < MIN_SPAN_AGREEMENT:
        reason = f"only {spans.exact:,} of {pluralize(spans.all, 'entity', 'entities')} are identical"
        if spans.is_inconclusive:
            yield RejectionReason(f"Inconclusive: {reason}; {TOO_FEW}.", repeat_remedy, conclusive=False)
        else:
            yield RejectionReason(f"{reason.capitalize()}.", USE_FLOAT32_REMEDY)
    if report.gold and report.gold.recall_loss > MAX_RECALL_LOSS:
        reason = (
            f"Recall of gold entities is {format_percent(report.gold.recall, '.1f')}, "
            f"compared with {format_percent(report.gold.reference_recall, '.1f')} in float32."
        )
        yield RejectionReason(reason, USE_FLOAT32_REMEDY)
    required = (
        ("entities", spans.reference, MIN_ENTITIES),
        ("different texts", report.texts, MIN_TEXTS),
    )
    missing = [f"{count:,} of {minimum} {item}" for item, count, minimum in required if count < minimum]
    if missing:
        reason = f"Inconclusive: only {', '.join(missing)} that are required."
        yield RejectionReason(reason, repeat_remedy, conclusive=False)
