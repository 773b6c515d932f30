"""Scores of entities against gold entities: strict, partial and type matches, by label and in total."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, NamedTuple

from .._render.display import UNKNOWN, Displayable, JsonMixin, Report, Table, format_percent, pluralize
from .gold import GoldSpan

if TYPE_CHECKING:
    import numpy as np

# Resamples of the texts for an interval; with 1,000, its ends vary by a few tenths of a percentage point.
NUM_RESAMPLES = 1000

# Fraction of the resamples inside the interval.
CONFIDENCE = 0.95

Scheme = Literal["strict", "partial", "type"]
SCHEMES: tuple[Scheme, ...] = ("strict", "partial", "type")

OUTCOMES = ("correct", "incorrect", "partial", "missed", "spurious")


class Interval(NamedTuple):
    """A 95% interval: the bootstrap over texts, or Wilson's interval over entities if all resamples are equal.

    Attributes:
        low: Lower end.
        high: Upper end.
    """

    low: float
    high: float


@dataclass(frozen=True)
class SchemeScores(JsonMixin):
    """Counts of matches between predicted and gold entities over all texts, as in SemEval 2013, task 9.1.

    Attributes:
        correct: Predicted entities that match a gold entity.
        incorrect: Predicted entities that overlap a gold entity, but do not match it.
        partial: Predicted entities that overlap a gold entity with other boundaries, in the scheme ``partial`` only.
        missed: Gold entities without a prediction.
        spurious: Predicted entities without a gold entity.
        f1_interval: Interval of F1, or ``None`` if there are no entities.
    """

    correct: int = 0
    incorrect: int = 0
    partial: int = 0
    missed: int = 0
    spurious: int = 0
    f1_interval: Interval | None = None

    JSON_PROPERTIES = ("precision", "recall", "f1")

    @property
    def predicted(self) -> int:
        """Number of predicted entities."""
        return self.correct + self.incorrect + self.partial + self.spurious

    @property
    def gold(self) -> int:
        """Number of gold entities."""
        return self.correct + self.incorrect + self.partial + self.missed

    @property
    def precision(self) -> float | None:
        """Fraction of the predicted entities that match, or ``None`` if there are none. A partial match counts as half."""
        return (self.correct + 0.5 * self.partial) / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        """Fraction of the gold entities that match, or ``None`` if there are none. A partial match counts as half."""
        return (self.correct + 0.5 * self.partial) / self.gold if self.gold else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall, 0 if one of them is not known, or ``None`` if both are not known."""
        total = self.predicted + self.gold
        return (2 * self.correct + self.partial) / total if total else None


@dataclass(frozen=True)
class LabelScores:
    """The scores of one label, or of all labels.

    Attributes:
        strict: A match has the boundaries and the label of a gold entity.
        partial: A match has the boundaries of a gold entity. An overlap counts as half, and labels are not compared.
        type: A match overlaps a gold entity with the same label.
    """

    strict: SchemeScores
    partial: SchemeScores
    type: SchemeScores


@dataclass(frozen=True)
class ScoredSpan:
    """A gold entity that was missed, or a predicted entity that was added.

    Attributes:
        text: Index of the text.
        start: First character.
        end: End in characters, exclusive.
        label: Label.
    """

    text: int
    start: int
    end: int
    label: str
    _show: Callable[[ScoredSpan], Displayable] = field(compare=False, repr=False)

    def show(self) -> Displayable:
        """Return the text in which only this entity is highlighted; see :meth:`Annotations.show`."""
        return self._show(self)


@dataclass(frozen=True, repr=False)
class Scores(Displayable):
    """Scores of predicted entities against gold entities.

    Attributes:
        model: Name of the model.
        num_texts: Number of texts with gold.
        num_failed: Number of those that failed. Their gold entities count as missed.
        num_without_rows: Number of those without a row in a table of gold entities. They count as texts without gold entities.
        total: Scores over all labels.
        labels: Scores of each label.
        gold_characters: Number of characters in gold entities.
        uncovered_characters: Number of those characters that are not in a predicted entity of any label. A mask does not hide
            them.
        missed: Gold entities that do not overlap a predicted entity.
        added: Predicted entities that do not overlap a gold entity.
        context: Scores of each context label, such as ``negated``, over the predicted entities with the boundaries of a gold
            entity whose context is known.
    """

    model: str
    num_texts: int
    num_failed: int
    total: LabelScores
    labels: dict[str, LabelScores]
    gold_characters: int
    uncovered_characters: int
    missed: tuple[ScoredSpan, ...]
    added: tuple[ScoredSpan, ...]
    context: dict[str, SchemeScores] = field(default_factory=dict)
    num_without_rows: int = 0

    JSON_EXCLUDE = ("missed", "added")

    def to_report(self) -> Report:
        """Return the scores as sentences and a table."""
        strict = self.total.strict
        gold = pluralize(strict.gold, "gold entity", "gold entities")
        title = f'The model "{self.model}" found {strict.correct:,} of {gold} exactly'
        sentences = [f"Strict F1: {_format_rate(strict.f1)} in {pluralize(self.num_texts, 'text')}."]
        if self.gold_characters:
            fraction = format_percent(self.uncovered_characters / self.gold_characters, ".1f")
            sentences.append(
                f"{self.uncovered_characters:,} of the {self.gold_characters:,} characters in gold entities are not in any entity "
                f"that the model found ({fraction})."
            )
        if self.num_without_rows:
            texts = pluralize(self.num_without_rows, "text has", "texts have")
            sentences.append(f"{texts} no row in the table of gold entities, and count as texts without entities.")
        if self.num_failed:
            sentences.append(f"{pluralize(self.num_failed, 'text')} failed; gold entities there count as missed.")
        # With one label, the scores of this label are those of all labels.
        name = next(iter(self.labels)) if len(self.labels) == 1 else "all"
        rows = [_row(name, scheme, getattr(self.total, scheme)) for scheme in SCHEMES]
        rows += [_row(label, "strict", scores.strict) for label, scores in self.labels.items() if label != name]
        rows += [_row(label, "context", scores) for label, scores in self.context.items()]
        columns = ("label", "match", "precision", "recall", "F1", "95% interval", "gold", "found")
        return Report(title, tuple(sentences), (Table("Scores", columns, tuple(rows)),))


def _row(label: str, scheme: str, scores: SchemeScores) -> tuple[str, ...]:
    precision, recall, f1 = map(_format_rate, (scores.precision, scores.recall, scores.f1))
    interval = " to ".join(map(_format_rate, scores.f1_interval)) if scores.f1_interval else UNKNOWN
    return label, scheme, precision, recall, f1, interval, f"{scores.gold:,}", f"{scores.predicted:,}"


def _format_rate(rate: float | None) -> str:
    return UNKNOWN if rate is None else format_percent(rate, ".1f")


def _find_overlaps(spans: Sequence[GoldSpan], others: Iterable[GoldSpan]) -> list[list[int]]:
    """Return the indices of the other spans, in sorted order, that each span overlaps."""
    others = sorted(others)
    starts = [other.start for other in others]
    max_length = max((other.end - other.start for other in others), default=0)
    overlaps = []
    for span in spans:
        first = bisect.bisect_right(starts, span.start - max_length)
        last = bisect.bisect_left(starts, span.end)
        overlaps.append([index for index in range(first, last) if others[index].end > span.start])
    return overlaps


def count_matches(predicted: Sequence[GoldSpan], gold: Sequence[GoldSpan]) -> list[list[int]]:
    """Return the counts of one text for each scheme, in the order of :data:`OUTCOMES`, as nervaluate counts them.

    A predicted entity is paired with the first unpaired gold entity that it equals, else with the first that it overlaps. In the
    scheme ``type``, it is paired with the gold entity with the same label and the closest boundaries among those it overlaps.
    The order of the entities does not matter.
    """
    predicted = sorted(predicted)
    gold = sorted(gold)
    overlaps = _find_overlaps(predicted, gold)
    rows = []
    for scheme in SCHEMES:
        counts = dict.fromkeys(OUTCOMES, 0)
        unpaired = dict(enumerate(gold))
        for entity, overlapping in zip(predicted, overlaps, strict=True):
            candidates = {index: unpaired[index] for index in overlapping if index in unpaired}
            outcome = "spurious"
            if candidates:
                outcome, index = _pair(scheme, entity, candidates)
                del unpaired[index]
            counts[outcome] += 1
        counts["missed"] = len(unpaired)
        rows.append([*counts.values()])
    return rows


def _pair(scheme: Scheme, entity: GoldSpan, candidates: dict[int, GoldSpan]) -> tuple[str, int]:
    """Return the outcome for a predicted entity, and the index of its gold entity among those that it overlaps."""
    if scheme == "type":
        distances = {
            index: abs(entity.start - span.start) + abs(entity.end - span.end)
            for index, span in candidates.items()
            if span.label == entity.label
        }
        if distances:
            return "correct", min(distances, key=distances.__getitem__)
        return "incorrect", next(iter(candidates))
    compared = 3 if scheme == "strict" else 2  # The partial scheme does not compare labels.
    for index, span in candidates.items():
        if span[:compared] == entity[:compared]:
            return "correct", index
    return "incorrect" if scheme == "strict" else "partial", next(iter(candidates))


def count_characters(spans: Iterable[GoldSpan]) -> int:
    """Return the number of characters in spans, each counted once. Gold may end far after the end of a text that is not stored."""
    count = 0
    position = 0
    for span in sorted(spans):
        count += max(0, span.end - max(position, span.start))
        position = max(position, span.end)
    return count


def summarize_counts(counts: np.ndarray, seed: int) -> list[SchemeScores]:
    """Return the scores of the total of each column of counts, with the interval of F1 from resampled texts.

    Texts are resampled instead of entities, because the entities of a text depend on each other.

    Args:
        counts: Counts of ``S`` texts, an int64 array of shape ``(S, ..., 5)``.
        seed: Seed of the resampling.
    """
    import numpy as np

    num_texts = len(counts)
    totals = counts.sum(0).reshape(-1, len(OUTCOMES))
    if not num_texts:
        return [SchemeScores() for _ in totals]
    # Texts with equal counts are resampled together, which is the same and much faster for many texts.
    rows, frequencies = np.unique(counts.reshape(num_texts, -1), axis=0, return_counts=True)
    generator = np.random.default_rng(seed)
    samples = [
        generator.multinomial(num_texts, frequencies / num_texts) @ rows.astype(float) for _ in range(NUM_RESAMPLES)
    ]
    correct, incorrect, partial, missed, spurious = np.reshape(samples, (NUM_RESAMPLES, *totals.shape)).T
    with np.errstate(invalid="ignore"):
        f1 = (2 * correct + partial) / (2 * (correct + incorrect + partial) + missed + spurious)
    quantiles = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    summaries = []
    for total, values in zip(totals.tolist(), f1, strict=True):
        scores = SchemeScores(*total)
        if scores.f1 is not None:
            # A resample without the entities of a rare label has no F1.
            interval = Interval(*np.nanquantile(values, quantiles).tolist())
            # Without errors, or with a single text, all resamples are equal, which does not make the score certain.
            if interval.low == interval.high:
                interval = _wilson_interval(scores.f1, sum(total))
            scores = replace(scores, f1_interval=interval)
        summaries.append(scores)
    return summaries


def _wilson_interval(fraction: float, count: int) -> Interval:
    """Return the 95% interval of a fraction of ``count`` entities (Wilson 1927; Brown, Cai and DasGupta 2001).

    Example:
        >>> low, high = _wilson_interval(1.0, 46)
        >>> round(low, 3), round(high, 3)
        (0.923, 1.0)
    """
    weight = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2 / count
    center = (fraction + weight / 2) / (1 + weight)
    half_width = math.sqrt(fraction * (1 - fraction) * weight + weight**2 / 4) / (1 + weight)
    return Interval(max(0.0, center - half_width), min(1.0, center + half_width))


def score_spans(
    model: str,
    predicted: Mapping[int, Sequence[GoldSpan] | None],
    gold: Mapping[int, Sequence[GoldSpan]],
    show: Callable[[ScoredSpan], Displayable],
    seed: int,
) -> Scores:
    """Return the scores of entities against gold entities.

    Args:
        model: Name of the model.
        predicted: Predicted entities by index of the text, or ``None`` for a text that failed.
        gold: Gold entities of the same texts.
        show: Function that returns the text of an entity for display.
        seed: Seed of the resampling for the intervals.
    """
    import numpy as np

    labels = sorted({span.label for spans in (*predicted.values(), *gold.values()) for span in spans or ()})
    # The first group contains the entities of all labels.
    groups: dict[str | None, int] = {label: index for index, label in enumerate([None, *labels])}
    counts = np.zeros((len(gold), len(groups), len(SCHEMES), len(OUTCOMES)), np.int64)
    gold_characters = 0
    uncovered_characters = 0
    missed: list[ScoredSpan] = []
    added: list[ScoredSpan] = []
    for row, (text, expected) in enumerate(gold.items()):
        actual = predicted[text] or ()
        for label in (None, *{span.label for span in (*expected, *actual)}):
            counts[row, groups[label]] = count_matches(
                [span for span in actual if label in {None, span.label}],
                [span for span in expected if label in {None, span.label}],
            )
        gold_characters += count_characters(expected)
        uncovered_characters += count_characters([*expected, *actual]) - count_characters(actual)
        for spans, others, unmatched in ((expected, actual, missed), (actual, expected, added)):
            overlaps = _find_overlaps(spans, others)
            unmatched += [
                ScoredSpan(text, *span, show) for span, indices in zip(spans, overlaps, strict=True) if not indices
            ]
    scores = iter(summarize_counts(counts, seed))
    by_group = {label: LabelScores(next(scores), next(scores), next(scores)) for label in groups}
    return Scores(
        model=model,
        num_texts=len(gold),
        num_failed=sum(spans is None for spans in predicted.values()),
        total=by_group[None],
        labels={label: by_group[label] for label in labels},
        gold_characters=gold_characters,
        uncovered_characters=uncovered_characters,
        missed=tuple(missed),
        added=tuple(added),
    )
