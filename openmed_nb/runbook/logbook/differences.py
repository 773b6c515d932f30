"""Two logbooks beside each other: whether they may be compared, what differs, and then the figures."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...interface.display import Report, Shown, Table
from ...quantities import counted
from .comparability import CANNOT_BE_TOLD, LISTED, MAPPINGS, MOMENTARY, ONE_SAYS, REFUSING, UNKNOWN, Compared
from .logbook import YES_NO, Logbook
from .sections import Figures


@dataclass(frozen=True)
class Difference:
    """Something in which two logbooks differ.

    Attributes:
        name: What it is.
        first: What the first one says; ``"not known"`` where it does not.
        second: What the second one says.
        why: Why figures must not be compared for it; empty where they may.
    """

    name: str
    first: str
    second: str
    why: str = ""


@dataclass(frozen=True)
class FiguresBeside:
    """A figure of both logbooks.

    Attributes:
        report: Which report it is of.
        subject: What was measured.
        name: Which figure.
        first: In the first logbook.
        second: In the second one.
    """

    report: str
    subject: str
    name: str
    first: float
    second: float

    @property
    def ratio(self) -> float | None:
        """The second over the first, ``None`` where that is no number."""
        return self.second / self.first if self.first else None


@dataclass(frozen=True, repr=False)
class LogbookDiff(Shown):
    """What two logbooks differ in.

    Attributes:
        first: The first logbook.
        second: The second one.
    """

    first: Logbook
    second: Logbook

    @property
    def reasons(self) -> tuple[Difference, ...]:
        """Why their figures must not be compared; none where they may."""
        figures = self.first.figures and self.second.figures
        needed = (one for one in self._untold() if one.needed and figures)
        untold = (Difference(one.name, UNKNOWN, UNKNOWN, CANNOT_BE_TOLD) for one in needed)
        return (*self._different(REFUSING), *untold)

    @property
    def comparable(self) -> bool:
        """Whether their figures may be compared."""
        return not self.reasons

    @property
    def unknown(self) -> tuple[str, ...]:
        """What neither says, though it changes figures."""
        return tuple(one.name for one in self._untold())

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differs beside that."""
        return (*self._different(LISTED), *self._named())

    @property
    def figures(self) -> tuple[FiguresBeside, ...]:
        """The figures that both have; none where they must not be compared."""
        return tuple(beside(self.first.figures, self.second.figures)) if self.comparable else ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {
            "comparable": self.comparable,
            "reasons": [asdict(one) for one in self.reasons],
            "unknown": list(self.unknown),
            "differences": [asdict(one) for one in self.differences],
            "figures": [{**asdict(one), "ratio": one.ratio} for one in self.figures],
        }

    def report(self) -> Report:
        """Return first whether they may be compared, then what differs; figures stand in the HTML alone."""
        reasons = self.reasons
        title = f"Must not be compared: {counted(len(reasons), 'reason')}" if reasons else "May be compared"
        unknown = (f"Neither says: {', '.join(self.unknown)}.",) if self.unknown else ()
        because = tuple((one.name, one.first, one.second, one.why) for one in reasons)
        others = tuple((one.name, one.first, one.second) for one in self.differences)
        moments = tuple((one.name, one.first, one.second) for one in self._different(MOMENTARY))
        rows = tuple(
            (one.report, one.subject, one.name, f"{one.first:.6g}", f"{one.second:.6g}", ratio_of(one))
            for one in self.figures
        )
        return Report(
            title,
            unknown,
            (
                Table("Why not", ("what", "first", "second", "because"), because),
                Table("What else differs", ("what", "first", "second"), others),
            ),
            figures=(
                Table("Figures", ("report", "of", "figure", "first", "second", "second / first"), rows),
                Table("At that moment", ("what", "first", "second"), moments),
            ),
        )

    def _untold(self) -> Iterator[Compared]:
        former, latter = shared(self.first, self.second)
        return (one for one in REFUSING if one.reads(former) is None and one.reads(latter) is None)

    def _different(self, compared: Iterable[Compared]) -> Iterator[Difference]:
        former, latter = shared(self.first, self.second)
        for one in compared:
            first, second = one.reads(former), one.reads(latter)
            if first != second:
                why = ONE_SAYS if one.why and None in {first, second} else one.why
                yield Difference(one.name, shown(first), shown(second), why)

    def _named(self) -> Iterator[Difference]:
        for kind, reads in MAPPINGS:
            first, second = reads(self.first), reads(self.second)
            for name in sorted(first.keys() | second.keys()):
                if first.get(name) != second.get(name):
                    yield Difference(f"{kind} {name}", first.get(name, "not set"), second.get(name, "not set"))


def shown(value: Any) -> str:
    """Return something that a logbook says as a text.

    Example:
        >>> shown(None), shown(True), shown(32)
        ('not known', 'yes', '32')
    """
    if isinstance(value, bool):
        return YES_NO[value]
    return UNKNOWN if value is None else str(value)


def ratio_of(figure: FiguresBeside) -> str:
    """Return the ratio of a figure as a text, empty where there is none."""
    return "" if figure.ratio is None else f"{figure.ratio:.3f}"


def shared(first: Logbook, second: Logbook) -> tuple[Logbook, Logbook]:
    """Return two logbooks with those figures alone that both have, where there are any: no others are compared."""
    both = _by_subject(first.figures).keys() & _by_subject(second.figures).keys()
    return (_with_figures(first, both), _with_figures(second, both)) if both else (first, second)


def beside(first: Iterable[Figures], second: Iterable[Figures]) -> Iterator[FiguresBeside]:
    """Yield the figures that two logbooks both have, of several reports of one thing the last."""
    former, latter = _by_subject(first), _by_subject(second)
    both = ((one, latter[key]) for key, one in former.items() if key in latter)
    for one, other in both:
        for name in (name for name in one.values if name in other.values):
            yield FiguresBeside(one.report, one.subject, name, one.values[name], other.values[name])


def _by_subject(figures: Iterable[Figures]) -> dict[tuple[str, str, str | None], Figures]:
    return {one.key: one for one in figures}


def _with_figures(book: Logbook, keys: Container[tuple[str, str, str | None]]) -> Logbook:
    return replace(book, figures=tuple(one for one in book.figures if one.key in keys))
