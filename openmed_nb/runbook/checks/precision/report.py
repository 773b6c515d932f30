"""Comparing with the CPU in float32: the entities of one text in two lists, gold entities, the report, and what it means.

``parity`` runs the model in both ways and makes the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    pluralize,
    worst_status,
)
from ...._utils.text import short_type_name
from ...._utils.validation import as_integer
from ....devices.machine import is_marked_simulated
from ....errors import ConfigurationError
from .policy import (
    ENTITIES_DECIDE,
    LOAD_AGAIN,
    MAX_RECALL_LOSS,
    MIN_SPAN_AGREEMENT,
    OVERFLOW_REMEDIES,
    ROUNDING,
    TOLERANCES,
    USE_FLOAT32_REMEDY,
    AcceptanceCriteria,
    RejectionReason,
    Tolerance,
)

Span = tuple[int, int, str]  # Where an entity begins and ends, in characters, and its label.

KINDS = ("exact", "moved", "relabelled", "missing", "extra")  # What can become of an entity.

SHOWN_CHANGES = 20  # This many changes are kept with their places; all are counted.


@dataclass(frozen=True)
class EntityChange(JsonMixin):
    """An entity that is not the same in both; never a word of it.

    Attributes:
        text: The number of the text.
        kind: ``"moved"``, ``"relabelled"``, ``"missing"`` or ``"extra"``.
        reference: Its place and label in the reference; ``None`` if it is extra.
        candidate: Its place and label in the candidate; ``None`` if it is missing.
    """

    text: int
    kind: str
    reference: Span | None
    candidate: Span | None


@dataclass(frozen=True)
class EntityAgreement(JsonMixin):
    """What became of all entities; each of the reference is one of the first four.

    Attributes:
        exact: At the same place, with the same label.
        moved: With the same label and other borders, but overlapping.
        relabelled: At the same place, with another label.
        missing: Not found by the candidate.
        extra: Found by the candidate alone.
        changes: The first of those that are not exact.
    """

    exact: int = 0
    moved: int = 0
    relabelled: int = 0
    missing: int = 0
    extra: int = 0
    changes: tuple[EntityChange, ...] = ()

    JSON_PROPERTIES = ("reference", "agreement")

    @property
    def counts(self) -> dict[str, int]:
        """How many entities there are of each kind."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def reference(self) -> int:
        """How many entities the reference found."""
        return self.all - self.extra

    @property
    def all(self) -> int:
        """How many entities either found, those that both found counted once."""
        return sum(self.counts.values())

    @property
    def agreement(self) -> float:
        """The share of all entities that are exact; 1 where there is none."""
        return self.exact / self.all if self.all else 1.0

    def __add__(self, other: EntityAgreement) -> EntityAgreement:
        counts = Counter(self.counts) + Counter(other.counts)
        return EntityAgreement(**counts, changes=(self.changes + other.changes)[:SHOWN_CHANGES])


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> EntityAgreement:
    """Return what became of the entities of one text.

    As many as can be are paired: first those that are equal, then those with equal borders, then those with equal labels
    that overlap. What is left over is missing or extra, so that the two sides may change places.
    """
    ours = Counter(reference)
    theirs = Counter(candidate)
    left = list((ours - theirs).elements())
    right = list((theirs - ours).elements())
    relabelled, left, right = _paired(left, right, _have_equal_borders)
    moved, missing, extra = _paired(left, right, _overlap_with_equal_labels)
    changes = (
        *(EntityChange(text, "moved", before, after) for before, after in moved),
        *(EntityChange(text, "relabelled", before, after) for before, after in relabelled),
        *(EntityChange(text, "missing", span, None) for span in missing),
        *(EntityChange(text, "extra", None, span) for span in extra),
    )
    exact = (ours & theirs).total()
    return EntityAgreement(exact, len(moved), len(relabelled), len(missing), len(extra), changes[:SHOWN_CHANGES])


def _have_equal_borders(span: Span, other: Span) -> bool:
    return span[:2] == other[:2]


def _overlap_with_equal_labels(span: Span, other: Span) -> bool:
    """Tell whether two spans with one label overlap, of which the first does not end later."""
    return span[2] == other[2] and other[0] < span[1]


def _paired(
    left: list[Span], right: list[Span], fits: Callable[[Span, Span], bool]
) -> tuple[list[tuple[Span, Span]], list[Span], list[Span]]:
    """Pair as many spans as can be, each once; return the pairs, and what is left over on both sides.

    The span that ends first, of either side, takes the one of the other side that ends first among those that fit: for spans
    that overlap, those that begin before it ends. All that overlap it reach over its end, so the one that ends first has the
    fewest others to pair with, and no other choice leaves more pairs: greedy pairing finds as many as there can be.
    """
    ours = sorted(left, key=_end)
    theirs = sorted(right, key=_end)
    pairs: list[tuple[Span, Span]] = []
    while ours and theirs:
        turned = theirs[0][1] < ours[0][1]
        ahead, others = (theirs, ours) if turned else (ours, theirs)
        span = ahead.pop(0)
        other = next((each for each in others if fits(span, each)), None)
        if other is not None:
            others.remove(other)
            pairs.append((other, span) if turned else (span, other))
    pairs.sort(key=lambda pair: pair[1])
    alone = Counter(left) - Counter(before for before, _ in pairs)
    others_alone = Counter(right) - Counter(after for _, after in pairs)
    return pairs, sorted(alone.elements()), sorted(others_alone.elements())


def _end(span: Span) -> tuple[int, Span]:
    return span[1], span


@dataclass(frozen=True)
class EntityScore(JsonMixin):
    """How many gold entities were found, each with both borders and its label right.

    Attributes:
        gold: How many there are.
        found: How many the model found.
        right: How many of those are gold.
    """

    gold: int = 0
    predicted: int = 0
    correct: int = 0

    JSON_PROPERTIES = ("recall", "precision", "f1")

    @property
    def recall(self) -> float:
        """The share of the gold entities that were found; 1 if there are none."""
        return self.correct / self.gold if self.gold else 1.0

    @property
    def precision(self) -> float:
        """The share of the entities found that are gold; 1 if there are none."""
        return self.correct / self.predicted if self.predicted else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        return 2 * self.correct / (self.gold + self.predicted) if self.gold + self.predicted else 1.0

    @property
    def summary(self) -> str:
        """The counts as a sentence."""
        of = pluralize(self.gold, "gold entity", "gold entities")
        others = pluralize(self.predicted - self.correct, "other")
        return f"It finds {self.correct:,} of {of} (recall {100 * self.recall:.0f} %), and {others}."

    def __add__(self, other: EntityScore) -> EntityScore:
        return EntityScore(self.gold + other.gold, self.predicted + other.predicted, self.correct + other.correct)


def score(gold: Iterable[Span], found: Iterable[Span]) -> EntityScore:
    """Return the score of the entities found in one text."""
    wanted = Counter(gold)
    there = Counter(found)
    return EntityScore(wanted.total(), there.total(), (wanted & there).total())


GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


def parse_gold(gold: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the gold entities that a person gives, for each text."""
    if not _is_series(gold):
        raise ConfigurationError(f"The gold cannot be {short_type_name(gold)}.", GOLD_REMEDY)
    texts = []
    for number, entities in enumerate(gold):
        if not _is_series(entities):
            raise ConfigurationError(f"The gold of text {number} cannot be {short_type_name(entities)}.", GOLD_REMEDY)
        spans = [_gold_span(entity) for entity in entities]
        if None in spans:
            what = f"The gold of text {number} has no entity at its place {spans.index(None)}."
            raise ConfigurationError(what, GOLD_REMEDY)
        texts.append(tuple(span for span in spans if span))
    return tuple(texts)


def _gold_span(entity: Any) -> Span | None:
    """Return what a person gives as an entity as a span; ``None`` for anything else."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in ("entity_group", "label", "entity") if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    first = as_integer(entity[0])
    last = as_integer(entity[1])
    if first is None or last is None or not isinstance(entity[2], str) or not 0 <= first < last:
        return None
    return first, last, entity[2]


def _is_series(thing: Any) -> bool:
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))


REFERENCE = "cpu in float32"


# What becomes of the answers, by the worst of the findings.
WORDS = {OK: "answers as on", WARNING: "answers nearly as on", FAILED: "gives other answers than on"}


@dataclass(frozen=True)
class LogitDifferences(JsonMixin):
    """How far logits are apart, as absolute differences, the largest of each token; 0 if there is no token.

    Attributes:
        maximum: The largest.
        median: The middle one.
        ninety: The 0.9 quantile.
        p99: The 0.99 quantile.
    """

    maximum: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class GradientDifference(JsonMixin):
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
class ParityReport(Displayable):
    """What a model gives on a device and in a type, compared with the CPU in float32.

    Attributes:
        model: What the person calls the model.
        device: The device, marked if it is simulated.
        dtype: The type.
        texts: How many texts were compared.
        texts_fingerprint: Tells them from others, and holds none of them.
        tokens: How many tokens they have.
        windows: In how many windows they were read.
        logits: How far the logits are apart.
        other_labels: How many tokens have another best label.
        non_finite_tokens: How many tokens have NaN or infinity in the candidate.
        spans: What became of the entities.
        gold: The scores of reference and candidate against gold entities; ``None`` if none were given.
        gradients: How far the gradients of one step are apart; ``None`` if they were not compared.
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
    logits: LogitDifferences
    label_mismatches: int
    non_finite_tokens: int
    spans: EntityAgreement
    gold: tuple[EntityScore, EntityScore] | None = None
    gradients: GradientDifference | None = None
    distinct: int = 0
    notes: tuple[str, ...] = ()

    JSON_PROPERTIES = ("findings", "status")

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated one."""
        return is_marked_simulated(self.device)

    @property
    def tolerance(self) -> Tolerance:
        """What the type may differ by."""
        return TOLERANCES[self.dtype]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the counts mean, line by line."""
        return tuple(_evaluate_findings(self))

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst_status(self.findings)

    @property
    def is_reference(self) -> bool:
        """Whether the candidate is computed as the reference is."""
        return (self.device, self.dtype) == ("cpu", "float32")

    @property
    def differs(self) -> bool:
        """Whether anything is not as in the reference, within the tolerances."""
        bad = {finding.name for finding in self.findings if finding.status in {WARNING, FAILED}}
        return bool(bad - {"entities"}) or self.spans.exact != self.spans.all

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON; no word of a text."""
        stored = super().to_dict() | {"reference": REFERENCE}
        stored["logits"]["tolerance"] = self.tolerance.logits
        if self.gold:
            stored["gold"] = dict(zip(("reference", "candidate"), stored["gold"], strict=True))
        if self.gradients:
            stored["gradients"]["tolerance"] = self.tolerance.gradients
        return stored

    def to_report(self) -> Report:
        """Return the judgement, where entities differ, and the figures."""
        read = f"{pluralize(self.texts, 'text')} with {pluralize(self.tokens, 'token')}"
        said = [f"{read} in {pluralize(self.windows, 'window')}."]
        if self.is_reference and self.differs:
            said.append("The candidate is computed as the reference is: the difference is a fault.")
        said += self.notes
        changes = tuple(
            (f"text {change.text}", change.kind, _format_span(change.reference), _format_span(change.candidate))
            for change in self.spans.changes
        )
        count = self.spans.all - self.spans.exact
        first = f" (the first {len(changes)} of {count})" if count > len(changes) else ""
        differing = Table(f"Entities that differ{first}", ("where", "what", "reference", "candidate"), changes)
        gold = (self.gold[1].summary,) if self.gold else ()
        return Report(
            f"Parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            tuple(said),
            (findings_table("", self.findings), differing),
            metrics=(Table("Figures", ("figure", "value"), tuple(self._figures().items()), collapsed=True),),
            html_sentences=(
                f"{self.model} on {self.device} in {self.dtype} {WORDS[self.status]} {REFERENCE}",
                *gold,
                *said,
            ),
            status=self.status,
        )

    def _figures(self) -> dict[str, str]:
        same = 1 - self.label_mismatches / self.tokens if self.tokens else 1
        figures = {
            "largest difference of a logit": f"{self.logits.maximum:.3g}",
            "0.99 quantile": f"{self.logits.p99:.3g}",
            "0.9 quantile": f"{self.logits.p90:.3g}",
            "median": f"{self.logits.median:.3g}",
            "tokens with the same label": f"{100 * same:.2f} %",
            "entities that are the same": f"{100 * self.spans.agreement:.2f} %",
        }
        for name, score_of in zip(("reference", "candidate"), self.gold or (), strict=False):
            figures[f"gold, {name}"] = (
                f"recall {score_of.recall:.4f}, precision {score_of.precision:.4f}, F1 {score_of.f1:.4f}"
            )
        if self.gradients:
            where = f"{self.gradients.largest:.3g} at {self.gradients.parameter}"
            figures["largest relative difference of a gradient"] = where
        return figures


def _format_span(span: Span | None) -> str:
    return f"characters {span[0]} to {span[1]}, {span[2]}" if span else ""


def _evaluate_findings(report: ParityReport) -> Iterator[Finding]:
    """Yield what the counts of a comparison mean."""
    way_out = "Use the CPU for this model."
    if report.dtype != "float32":
        way_out = USE_FLOAT32_REMEDY
    elif report.is_reference:
        way_out = LOAD_AGAIN
    if report.non_finite_tokens:
        what = f"NaN or infinity in {pluralize(report.non_finite_tokens, 'token')}"
        yield Finding("numbers", FAILED, what, OVERFLOW_REMEDIES.get(report.dtype, way_out))
    else:
        yield Finding("numbers", OK, "every logit is a number")
    yield _judged_logits(report, way_out)
    if report.label_mismatches:  # A near tie may fall to either side.
        what = f"{report.label_mismatches:,} of {pluralize(report.tokens, 'token')} have another label"
        yield Finding("labels", WARNING, what, ENTITIES_DECIDE)
    else:
        yield Finding("labels", OK, "every token has the same label")
    yield _judged_entities(report, way_out)
    if report.gold:
        reference, candidate = report.gold
        what = f"{candidate.correct:,} of {candidate.gold:,} found, the reference {reference.correct:,}"
        lost = reference.recall - candidate.recall
        if lost <= 0:
            yield Finding("gold entities", OK, what)
        else:
            yield Finding("gold entities", WARNING if lost <= MAX_RECALL_LOSS + ROUNDING else FAILED, what, way_out)
    if report.gradients:
        yield _judged_gradients(report, report.gradients)


def _judged_logits(report: ParityReport, way_out: str) -> Finding:
    """Judge how far logits are apart.

    In a reduced type the entities decide. In float32 they do as long as no logit is further off than float16 may be: a larger
    model adds up more roundings; what is further off is no rounding.
    """
    tolerance = report.tolerance.logits
    largest = report.logits.maximum
    if tolerance is None:
        return Finding("logits", NOT_APPLICABLE, f"those of {report.dtype} tell nothing; the entities decide")
    if largest <= tolerance:
        return Finding("logits", OK, f"within {tolerance:g} of the reference")
    what = f"more than {tolerance:g} off the reference"
    only_rounded = largest <= (TOLERANCES["float16"].logits or 0.0)
    if report.dtype == "float32" and not (only_rounded and report.spans.exact == report.spans.all):
        return Finding("logits", FAILED, what, way_out)
    return Finding("logits", WARNING, what, ENTITIES_DECIDE)


def _judged_entities(report: ParityReport, way_out: str) -> Finding:
    """Judge the entities, by the share that is the same."""
    spans = report.spans
    if not spans.all:
        remedy = "Compare on texts in which it finds some."
        return Finding("entities", WARNING, "no entity was found in either: nothing can be told", remedy)
    others = "".join(f", {count:,} {kind}" for kind, count in spans.counts.items() if count and kind != "exact")
    what = f"{spans.exact:,} of {spans.reference:,} exact{others}"
    if spans.exact == spans.all:
        return Finding("entities", OK, what)
    if spans.agreement >= MIN_SPAN_AGREEMENT:
        return Finding("entities", WARNING, what, "Look at the places below.")
    return Finding("entities", FAILED, what, way_out)


def _judged_gradients(report: ParityReport, gradients: GradientDifference) -> Finding:
    """Judge the gradients of one step."""
    where = f"of {pluralize(gradients.parameters, 'parameter')}"
    tolerance = report.tolerance.gradients or 0.0
    if gradients.largest <= tolerance:
        return Finding("gradients", OK, f"the gradients {where} are within {tolerance:g} of the reference")
    what = f"the gradient of {gradients.parameter}, one {where}, is more than {tolerance:g} off the reference"
    remedy = "Train on the CPU."
    if report.is_reference:
        remedy = LOAD_AGAIN
    elif report.dtype != "float32":
        remedy = "Train in float32."
    return Finding("gradients", FAILED, what, remedy)


def rejection_reasons(report: ParityReport, gate: AcceptanceCriteria) -> Iterator[RejectionReason]:
    """Yield why a type is refused, by what was measured."""
    spans = report.spans
    if report.non_finite_tokens:
        what = f"{pluralize(report.non_finite_tokens, 'token')} became NaN or infinity."
        yield RejectionReason(what, OVERFLOW_REMEDIES.get(report.dtype, USE_FLOAT32_REMEDY))
    if spans.agreement < gate.span_agreement:
        what = f"Only {spans.exact:,} of {pluralize(spans.all, 'entity', 'entities')} are the same."
        yield RejectionReason(what, USE_FLOAT32_REMEDY)
    if report.gold:
        reference, candidate = report.gold
        if reference.recall - candidate.recall > gate.recall_loss + ROUNDING:
            recalls = f"{candidate.recall:.1%} of the gold entities, float32 {reference.recall:.1%}"
            yield RejectionReason(f"It finds {recalls}.".replace("%", " %"), USE_FLOAT32_REMEDY)
    required = (
        ("entities", spans.reference, gate.minimum_entities),
        ("different entities", report.distinct, gate.minimum_distinct),
        ("different texts", report.texts, gate.minimum_texts),
    )
    few = [f"{count:,} of the {least} {what}" for what, count, least in required if count < least]
    if few:
        what = f"Too little to tell: {', '.join(few)} that are needed."
        yield RejectionReason(what, "Repeat it with more texts, each different.", conclusive=False)
