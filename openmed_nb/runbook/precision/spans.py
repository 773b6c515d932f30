"""Two lists of entities of one text: which are the same, which moved, which have another label, are missing or extra."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.certificates import EntityCounts

Span = tuple[int, int, str]
"""Where an entity begins and ends, in characters, and its label."""

SHOWN_CHANGES = 20
"""So many changes are kept with their places; all are counted."""


@dataclass(frozen=True)
class Change:
    """An entity that is not the same in both; never a word of it.

    Attributes:
        text: The number of the text.
        kind: ``"moved"``, ``"relabelled"``, ``"missing"`` or ``"extra"``.
        reference: Its place and label in the reference; ``None`` where it is extra.
        candidate: Its place and label in the candidate; ``None`` where it is missing.
    """

    text: int
    kind: str
    reference: Span | None
    candidate: Span | None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as a mapping, ready for JSON."""
        spans = {"reference": self.reference, "candidate": self.candidate}
        return {"text": self.text, "kind": self.kind, **{name: span and list(span) for name, span in spans.items()}}


@dataclass(frozen=True)
class Spans(EntityCounts):
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

    def __add__(self, other: Spans) -> Spans:
        return Spans(
            self.exact + other.exact,
            self.moved + other.moved,
            self.relabelled + other.relabelled,
            self.missing + other.missing,
            self.extra + other.extra,
            (self.changes + other.changes)[:SHOWN_CHANGES],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the first changes, ready for JSON."""
        counts = {name: value for name, value in vars(self).items() if name != "changes"}
        changes = [change.to_dict() for change in self.changes]
        return {**counts, "reference": self.reference, "agreement": self.agreement, "changes": changes}


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> Spans:
    """Return what became of the entities of one text.

    As many as can be are paired: first those that are equal, then those with equal borders, then those with equal labels
    that overlap. What is left over is missing or extra, so that the two sides may change places.

    Args:
        reference: The entities of the reference.
        candidate: The entities of the candidate.
        text: The number of the text.

    Example:
        >>> found = compare_spans([(0, 6, "DISEASE"), (9, 20, "DISEASE")], [(0, 6, "DISEASE"), (9, 15, "DISEASE")], 3)
        >>> found.exact, found.changes
        (1, (Change(text=3, kind='moved', reference=(9, 20, 'DISEASE'), candidate=(9, 15, 'DISEASE')),))
    """
    ours, theirs = Counter(reference), Counter(candidate)
    exact = sum((ours & theirs).values())
    left, right = sorted((ours - theirs).elements()), sorted((theirs - ours).elements())
    relabelled = paired(left, right, lambda one, other: one[:2] == other[:2])
    left, right = without(left, [one for one, _ in relabelled]), without(right, [other for _, other in relabelled])
    moved = paired(left, right, lambda one, other: one[2] == other[2] and overlap(one, other))
    missing, extra = without(left, [one for one, _ in moved]), without(right, [other for _, other in moved])
    changes = (
        *(Change(text, "moved", one, other) for one, other in moved),
        *(Change(text, "relabelled", one, other) for one, other in relabelled),
        *(Change(text, "missing", one, None) for one in missing),
        *(Change(text, "extra", None, other) for other in extra),
    )
    return Spans(exact, len(moved), len(relabelled), len(missing), len(extra), changes[:SHOWN_CHANGES])


def overlap(one: Span, other: Span) -> bool:
    """Tell whether two entities share a character."""
    return max(one[0], other[0]) < min(one[1], other[1])


def without(spans: Sequence[Span], gone: Sequence[Span]) -> list[Span]:
    """Return what is left of spans, each counted as often as it is there."""
    return sorted((Counter(spans) - Counter(gone)).elements())


def paired(left: Sequence[Span], right: Sequence[Span], fits: Callable[[Span, Span], bool]) -> list[tuple[Span, Span]]:
    """Return as many pairs as there can be of spans that fit, each span in one (Kuhn's algorithm, the shortest way first).

    Args:
        left: The spans of one side.
        right: Those of the other, in order.
        fits: Tells whether two make a pair, which must touch.
    """
    touching = zip(left, those_that_touch(left, right), strict=True)
    fitting = [[number for number in numbers if fits(one, right[number])] for one, numbers in touching]
    holder: dict[int, int] = {}
    held: dict[int, int] = {}
    for place in range(len(left)):
        for number, one in way_to_a_free_one(place, fitting, holder, held):
            holder[number], held[one] = one, number
    return [(left[place], right[number]) for number, place in sorted(holder.items())]


def those_that_touch(left: Sequence[Span], right: Sequence[Span]) -> list[range]:
    """Return for each span the places of others, which are in order, among which all are that touch it.

    Example:
        >>> those_that_touch([(10, 12, "DRUG")], [(0, 3, "DRUG"), (8, 11, "DRUG"), (11, 14, "DRUG"), (20, 22, "DRUG")])
        [range(1, 3)]
    """
    starts = [start for start, _, _ in right]
    longest = max((end - start for start, end, _ in right), default=0)
    return [range(bisect_left(starts, start - longest), bisect_right(starts, end)) for start, end, _ in left]


def way_to_a_free_one(
    place: int, fitting: Sequence[Sequence[int]], holder: Mapping[int, int], held: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Return who of the left gets which of the right so that one more gets one; empty where there is no way.

    Args:
        place: Who has none.
        fitting: Which of the right fit each of the left.
        holder: Who has each of the right that somebody has.
        held: The same the other way round.
    """
    asked: dict[int, int] = {}
    waiting = deque([place])
    while waiting:
        one = waiting.popleft()
        for number in fitting[one]:
            if number not in asked:
                asked[number] = one
                if number not in holder:
                    return way_back(number, place, asked, held)
                waiting.append(holder[number])
    return []


def way_back(number: int, place: int, asked: Mapping[int, int], held: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return who gets which, from a free one of the right back to the one of the left that began to ask."""
    way = [(number, asked[number])]
    while way[-1][1] != place:
        number = held[way[-1][1]]
        way.append((number, asked[number]))
    return way


@dataclass(frozen=True)
class Score:
    """How many gold entities were found, each with both borders and its label right.

    Attributes:
        gold: How many there are.
        found: How many the model found.
        right: How many of those are gold.
    """

    gold: int = 0
    found: int = 0
    right: int = 0

    @property
    def recall(self) -> float:
        """The share of the gold entities that were found; 1 where there are none."""
        return self.right / self.gold if self.gold else 1.0

    @property
    def precision(self) -> float:
        """The share of the entities found that are gold; 1 where there are none."""
        return self.right / self.found if self.found else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        return 2 * self.right / (self.gold + self.found) if self.gold + self.found else 1.0

    def __add__(self, other: Score) -> Score:
        return Score(self.gold + other.gold, self.found + other.found, self.right + other.right)

    def to_dict(self) -> dict[str, float]:
        """Return counts and shares, ready for JSON."""
        return {**vars(self), "recall": self.recall, "precision": self.precision, "f1": self.f1}


def score(gold: Iterable[Span], found: Iterable[Span]) -> Score:
    """Return the score of the entities found in one text.

    Example:
        >>> score([(0, 6, "DISEASE"), (9, 20, "DISEASE")], [(0, 6, "DISEASE")]).recall
        0.5
    """
    wanted, there = Counter(gold), Counter(found)
    return Score(wanted.total(), there.total(), (wanted & there).total())
