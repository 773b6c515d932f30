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
    Finding,
    Plain,
    Report,
    Shown,
    Table,
    counted,
    findings_table,
    worst,
)
from ...._utils.text import short_type_name
from ...._utils.validation import whole_number
from ....devices.machine import shows_simulated
from ....errors import ConfigurationError
from ....models.certificates import FLOAT32_INSTEAD, OTHER_NUMBERS, RECALL_LOSS, ROUNDING, SPAN_AGREEMENT, EntityCounts

Span = tuple[int, int, str]  # Where an entity begins and ends, in characters, and its label.

KINDS = ("exact", "moved", "relabelled", "missing", "extra")  # What can become of an entity.

SHOWN_CHANGES = 20  # This many changes are kept with their places; all are counted.


@dataclass(frozen=True)
class Change(Plain):
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
class Spans(EntityCounts, Plain):
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
    changes: tuple[Change, ...] = ()

    ALSO = ("reference", "agreement")

    def __add__(self, other: Spans) -> Spans:
        counts: dict[str, Any] = {kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS}
        return Spans(**counts, changes=(self.changes + other.changes)[:SHOWN_CHANGES])


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> Spans:
    """Return what became of the entities of one text.

    As many as can be are paired: first those that are equal, then those with equal borders, then those with equal labels
    that overlap. What is left over is missing or extra, so that the two sides may change places.
    """
    ours, theirs = Counter(reference), Counter(candidate)
    left, right = list((ours - theirs).elements()), list((theirs - ours).elements())
    relabelled, left, right = _paired(left, right, lambda one, other: one[:2] == other[:2])
    moved, missing, extra = _paired(left, right, lambda one, other: one[2] == other[2] and other[0] < one[1])
    changes = (
        *(Change(text, "moved", one, other) for one, other in moved),
        *(Change(text, "relabelled", one, other) for one, other in relabelled),
        *(Change(text, "missing", one, None) for one in missing),
        *(Change(text, "extra", None, other) for other in extra),
    )
    exact = (ours & theirs).total()
    return Spans(exact, len(moved), len(relabelled), len(missing), len(extra), changes[:SHOWN_CHANGES])


def _paired(
    left: Iterable[Span], right: Iterable[Span], fits: Callable[[Span, Span], bool]
) -> tuple[list[tuple[Span, Span]], list[Span], list[Span]]:
    """Pair as many spans as can be, each once; return the pairs, and what is left over on both sides.

    The span that ends first, of either side, takes the one of the other side that ends first among those that fit: for spans
    that overlap, those that begin before it ends. All that overlap it reach over its end, so the one that ends first has the
    fewest others to pair with, and no other choice leaves more pairs: greedy pairing finds as many as there can be.
    """
    ours, theirs = (sorted(side, key=lambda one: (one[1], one)) for side in (left, right))
    pairs: list[tuple[Span, Span]] = []
    alone: tuple[list[Span], list[Span]] = ([], [])
    while ours and theirs:
        turned = theirs[0][1] < ours[0][1]
        ahead, others = (theirs, ours) if turned else (ours, theirs)
        one = ahead.pop(0)
        other = next((each for each in others if fits(one, each)), None)
        if other is None:
            alone[turned].append(one)
        else:
            others.remove(other)
            pairs.append((other, one) if turned else (one, other))
    return sorted(pairs, key=lambda pair: pair[1]), sorted(alone[0] + ours), sorted(alone[1] + theirs)


@dataclass(frozen=True)
class Score(Plain):
    """How many gold entities were found, each with both borders and its label right.

    Attributes:
        gold: How many there are.
        found: How many the model found.
        right: How many of those are gold.
    """

    gold: int = 0
    found: int = 0
    right: int = 0

    ALSO = ("recall", "precision", "f1")

    @property
    def recall(self) -> float:
        """The share of the gold entities that were found; 1 if there are none."""
        return self.right / self.gold if self.gold else 1.0

    @property
    def precision(self) -> float:
        """The share of the entities found that are gold; 1 if there are none."""
        return self.right / self.found if self.found else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        return 2 * self.right / (self.gold + self.found) if self.gold + self.found else 1.0

    @property
    def in_words(self) -> str:
        """The counts as a sentence."""
        of, others = counted(self.gold, "gold entity", "gold entities"), counted(self.found - self.right, "other")
        return f"It finds {self.right:,} of {of} (recall {100 * self.recall:.0f} %), and {others}."

    def __add__(self, other: Score) -> Score:
        return Score(self.gold + other.gold, self.found + other.found, self.right + other.right)


def score(gold: Iterable[Span], found: Iterable[Span]) -> Score:
    """Return the score of the entities found in one text."""
    wanted, there = Counter(gold), Counter(found)
    return Score(wanted.total(), there.total(), (wanted & there).total())


GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


def gold_spans(gold: Any) -> tuple[tuple[Span, ...], ...]:
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
    first, last, label = whole_number(entity[0]), whole_number(entity[1]), entity[2]
    if first is None or last is None or not isinstance(label, str):
        return None
    return (first, last, label) if 0 <= first < last else None


def _is_series(thing: Any) -> bool:
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))


REFERENCE = "cpu in float32"


@dataclass(frozen=True)
class Tolerance:
    """How far a type may be from float32 on the CPU before the report says so.

    Attributes:
        logits: The largest absolute difference of a logit; ``None`` if logits tell nothing.
        gradients: The largest relative difference of the gradient of a parameter; ``None`` if there are none.
    """

    logits: float | None
    gradients: float | None


# For each type, some times the largest difference seen with the two bundled models in 5,524 texts of 203,905 tokens
# whose logits go up to 11. On an NVIDIA H200 (torch 2.11): logits 2.0e-05 in float32, 0.012 in float16 and 0.16 in
# bfloat16, gradients 9.2e-06, 0.0067 and 0.031; at least 0.9998 of the entities were the same in float16 and 0.9974 in
# bfloat16. On a CPU: logits 0.017 in float16 and 0.13 in bfloat16, which is about three times the rounding of one such
# number (2**-11 and 2**-8 of it), gradients 0.024 and 0.17. int8 rounds the inputs of a layer by their largest, and a
# few tokens were off by up to 3.0: its logits tell nothing, and the entities decide. ``benchmarks/parity.py`` prints
# the figures.
TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3),
    "float16": Tolerance(5e-2, 1e-1),
    "bfloat16": Tolerance(5e-1, 5e-1),
    "int8": Tolerance(None, None),
}

# What becomes of the answers, by the worst of the findings.
WORDS = {OK: "answers as on", WARNING: "answers nearly as on", FAILED: "gives other answers than on"}

LOAD_AGAIN = "Load the model again."
ENTITIES_DECIDE = "Look at the entities: they decide."


@dataclass(frozen=True)
class Differences(Plain):
    """How far logits are apart, as absolute differences, the largest of each token; 0 if there is no token.

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
class GradientDifference(Plain):
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
        device: The device, marked if it is simulated.
        dtype: The type.
        texts: How many texts were compared.
        texts_fingerprint: Tells them from others, and holds none of them.
        tokens: How many tokens they have.
        windows: In how many windows they were read.
        logits: How far the logits are apart.
        other_labels: How many tokens have another best label.
        not_numbers: How many tokens have NaN or infinity in the candidate.
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
    logits: Differences
    other_labels: int
    not_numbers: int
    spans: Spans
    gold: tuple[Score, Score] | None = None
    gradients: GradientDifference | None = None
    distinct: int = 0
    notes: tuple[str, ...] = ()

    ALSO = ("findings", "status")

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated one."""
        return shows_simulated(self.device)

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
        bad = {one.name for one in self.findings if one.status in {WARNING, FAILED}}
        return bool(bad - {"entities"}) or self.spans.exact != self.spans.all

    @property
    def way_out(self) -> str:
        """What to do if a type or a device gives wrong answers: leave the type, else the device."""
        if self.dtype != "float32":
            return FLOAT32_INSTEAD
        return LOAD_AGAIN if self.is_reference else "Use the CPU for this model."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON; no word of a text."""
        gold, gradients = self.gold, self.gradients
        return {
            **super().to_dict(),
            "reference": REFERENCE,
            "logits": {**self.logits.to_dict(), "tolerance": self.tolerance.logits},
            "gold": gold and {"reference": gold[0].to_dict(), "candidate": gold[1].to_dict()},
            "gradients": gradients and {**gradients.to_dict(), "tolerance": self.tolerance.gradients},
        }

    def report(self) -> Report:
        """Return the judgement, where entities differ, and the figures."""
        title = f"Parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}"
        read = f"{counted(self.texts, 'text')} with {counted(self.tokens, 'token')}"
        sentences = [f"{read} in {counted(self.windows, 'window')}."]
        if self.is_reference and self.differs:
            sentences.append("The candidate is computed as the reference is: the difference is a fault.")
        listed = self.spans.changes
        changes = tuple((f"text {one.text}", one.kind, place(one.reference), place(one.candidate)) for one in listed)
        count = self.spans.all - self.spans.exact
        first = f" (the first {len(changes)} of {count})" if count > len(changes) else ""
        differing = Table(f"Entities that differ{first}", ("where", "what", "reference", "candidate"), changes)
        tables = (findings_table("", self.findings), differing)
        figures = Table("Figures", ("figure", "value"), tuple(self._figures()), folded=True)
        said = (*sentences, *self.notes)
        gold = (self.gold[1].in_words,) if self.gold else ()
        spoken = (f"{self.model} on {self.device} in {self.dtype} {WORDS[self.status]} {REFERENCE}", *gold, *said)
        return Report(title, said, tables, figures=(figures,), spoken=spoken, status=self.status)

    def _figures(self) -> Iterator[tuple[str, str]]:
        logits, same = self.logits, self.tokens - self.other_labels
        yield from (
            ("largest difference of a logit", f"{logits.maximum:.3g}"),
            ("0.99 quantile", f"{logits.ninety_nine:.3g}"),
            ("0.9 quantile", f"{logits.ninety:.3g}"),
            ("median", f"{logits.median:.3g}"),
            ("tokens with the same label", f"{100 * same / self.tokens if self.tokens else 100:.2f} %"),
            ("entities that are the same", f"{100 * self.spans.agreement:.2f} %"),
        )
        for name, one in zip(("reference", "candidate"), self.gold or (), strict=False):
            yield f"gold, {name}", f"recall {one.recall:.4f}, precision {one.precision:.4f}, F1 {one.f1:.4f}"
        if self.gradients:
            yield (
                "largest relative difference of a gradient",
                f"{self.gradients.largest:.3g} at {self.gradients.parameter}",
            )


def place(span: Span | None) -> str:
    return f"characters {span[0]} to {span[1]}, {span[2]}" if span else ""


def judged(report: ParityReport) -> Iterator[Finding]:
    """Yield what the counts of a comparison mean."""
    if report.not_numbers:
        what = f"NaN or infinity in {counted(report.not_numbers, 'token')}"
        yield Finding("numbers", FAILED, what, OTHER_NUMBERS.get(report.dtype, report.way_out))
    else:
        yield Finding("numbers", OK, "every logit is a number")
    yield of_logits(report)
    if report.other_labels:  # A near tie may fall to either side.
        what = f"{report.other_labels:,} of {counted(report.tokens, 'token')} have another label"
        yield Finding("labels", WARNING, what, ENTITIES_DECIDE)
    else:
        yield Finding("labels", OK, "every token has the same label")
    yield of_entities(report)
    if report.gold:
        reference, candidate = report.gold
        what = f"{candidate.right:,} of {candidate.gold:,} found, the reference {reference.right:,}"
        lost = reference.recall - candidate.recall
        status = OK if lost <= 0 else WARNING if lost <= RECALL_LOSS + ROUNDING else FAILED
        yield Finding("gold entities", status, what, "" if status == OK else report.way_out)
    if report.gradients:
        yield of_gradients(report, report.gradients)


def of_logits(report: ParityReport) -> Finding:
    """Judge how far logits are apart.

    In a reduced type the entities decide. In float32 they do as long as no logit is further off than float16 may be: a larger
    model adds up more roundings; what is further off is no rounding.
    """
    tolerance, largest = report.tolerance.logits, report.logits.maximum
    if tolerance is None:
        return Finding("logits", NOT_APPLICABLE, f"those of {report.dtype} tell nothing; the entities decide")
    if largest <= tolerance:
        return Finding("logits", OK, f"within {tolerance:g} of the reference")
    what = f"more than {tolerance:g} off the reference"
    only_rounded = largest <= (TOLERANCES["float16"].logits or 0.0)
    if report.dtype == "float32" and not (only_rounded and report.spans.exact == report.spans.all):
        return Finding("logits", FAILED, what, report.way_out)
    return Finding("logits", WARNING, what, ENTITIES_DECIDE)


def of_entities(report: ParityReport) -> Finding:
    """Judge the entities, by the share that is the same."""
    spans = report.spans
    if not spans.all:
        remedy = "Compare on texts in which it finds some."
        return Finding("entities", WARNING, "no entity was found in either: nothing can be told", remedy)
    counts = {name: getattr(spans, name) for name in KINDS[1:]}
    others = "".join(f", {count:,} {name}" for name, count in counts.items() if count)
    what = f"{spans.exact:,} of {spans.reference:,} exact{others}"
    if spans.exact == spans.all:
        return Finding("entities", OK, what)
    status = WARNING if spans.agreement >= SPAN_AGREEMENT else FAILED
    return Finding("entities", status, what, report.way_out if status == FAILED else "Look at the places below.")


def of_gradients(report: ParityReport, gradients: GradientDifference) -> Finding:
    """Judge the gradients of one step."""
    where, tolerance = f"of {counted(gradients.parameters, 'parameter')}", report.tolerance.gradients or 0.0
    if gradients.largest <= tolerance:
        return Finding("gradients", OK, f"the gradients {where} are within {tolerance:g} of the reference")
    what = f"the gradient of {gradients.parameter}, one {where}, is more than {tolerance:g} off the reference"
    elsewhere = "Train on the CPU." if report.dtype == "float32" else "Train in float32."
    return Finding("gradients", FAILED, what, LOAD_AGAIN if report.is_reference else elsewhere)
