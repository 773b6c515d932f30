"""What differs between two logbooks, and whether their figures may be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...devices.request import kind_of
from ...display import Plain, Report, Shown, Table, counted
from .sections import YES_NO, ReportFigures, Sections

FINGERPRINT = 12  # How many characters of a fingerprint are shown.

UNKNOWN = "not known"
ROWS_UNKNOWN = "not told"
SLOW_PRESSURE = ("warning", "critical")


@dataclass(frozen=True)
class ComparedFact:
    """Something that two logbooks say.

    Attributes:
        name: What it is.
        reads: Returns it; ``None`` where it is not known.
        why: Why figures must not be compared where it differs; empty where they may.
        needed: Whether it must be known before figures are compared: what neither logbook says may differ.
    """

    name: str
    reads: Callable[[Sections], Any]
    why: str = ""
    needed: bool = False


OTHER_DEVICE = "figures are of one device"
OTHER_CODE = "other versions compute in other ways"
OTHER_WORK = "that is other work, and takes another time"
OTHER_POWER = "the computer does not run at the same speed"
OTHER_MODE = "torch was asked for something else"
CANNOT_BE_TOLD = "neither says it, so it cannot be told"
ONE_SAYS = "only one of them says it"


def of_run(book: Sections, name: str) -> Any:
    """Return what reports say of their run, each its own if they differ; and what the logbook says if none does."""
    known = sorted(
        {(one.report, value) for one in _by_key(book).values() if (value := getattr(one.run, name)) is not None}
    )
    if len({value for _, value in known}) > 1:
        return ", ".join(f"{report} {value}" for report, value in known)
    return known[0][1] if known else getattr(book.run, name)


def _model(book: Sections) -> str | None:
    model = book.model
    if model is None:
        return None
    parts = (model.weights, model.settings, model.tokenizer or "")
    return f"{model.source} " + " ".join(part[:FINGERPRINT] for part in parts)


def _pressure(book: Sections) -> str:
    pressure = book.conditions.memory_pressure
    return str(pressure) if pressure in SLOW_PRESSURE else "none reported"


# Where one of these differs, is known to one logbook alone, or is needed and not known, figures must not be compared.
REFUSING = (
    ComparedFact(
        "simulation",
        lambda book: "simulated" if book.simulated else "real",
        "nothing simulated is a figure of a device",
    ),
    ComparedFact("device", lambda book: book.hardware.device, OTHER_DEVICE),
    ComparedFact("name of the device", lambda book: book.hardware.name, OTHER_DEVICE),
    ComparedFact("chip", lambda book: book.hardware.chip, OTHER_DEVICE),
    ComparedFact("threads", lambda book: book.hardware.threads, OTHER_MODE),
    ComparedFact("torch", lambda book: book.software.torch, OTHER_CODE),
    ComparedFact("transformers", lambda book: book.software.transformers, OTHER_CODE),
    ComparedFact("model", _model, OTHER_WORK, needed=True),
    ComparedFact(
        "type of the weights", lambda book: of_run(book, "dtype") or (book.model and book.model.dtype), OTHER_WORK
    ),
    ComparedFact(
        "dataset",
        lambda book: book.dataset and f"{book.dataset.kind} {book.dataset.checksum[:FINGERPRINT]}",
        OTHER_WORK,
        needed=True,
    ),
    ComparedFact("task", lambda book: of_run(book, "task"), OTHER_WORK),
    ComparedFact(
        "batch", lambda book: of_run(book, "batch_size") or (book.loader and book.loader.batch_size), OTHER_WORK
    ),
    ComparedFact("length", lambda book: of_run(book, "length"), OTHER_WORK),
    ComparedFact("shape of a row", lambda book: of_run(book, "row_shape") or ROWS_UNKNOWN, OTHER_WORK),
    ComparedFact("workers", lambda book: of_run(book, "workers"), OTHER_WORK),
    ComparedFact("loader workers", lambda book: book.loader and book.loader.workers, OTHER_WORK),
    ComparedFact("batch of the loader", lambda book: book.loader and book.loader.batch_size, OTHER_WORK),
    ComparedFact("power source", lambda book: book.conditions.power_source, OTHER_POWER),
    ComparedFact("power mode", lambda book: book.conditions.power_mode, OTHER_POWER),
    ComparedFact("heat", lambda book: "limited" if book.conditions.heat == "limited" else "not limited", OTHER_POWER),
    ComparedFact("memory pressure", _pressure, OTHER_POWER),
    ComparedFact("deterministic algorithms", lambda book: book.randomness.deterministic_algorithms, OTHER_MODE),
    ComparedFact(
        "cuDNN benchmark",
        lambda book: kind_of(book.hardware.device) == "cuda" and book.randomness.cudnn_benchmark,
        OTHER_MODE,
    ),
    ComparedFact("precision of products", lambda book: book.randomness.matmul_precision, OTHER_MODE),
)

# Where these differ, it is said.
LISTED = (
    ComparedFact("openmed_nb", lambda book: book.software.openmed_nb),
    ComparedFact("Python", lambda book: book.software.python),
    ComparedFact("system", lambda book: book.software.system),
    ComparedFact("architecture", lambda book: book.software.architecture),
    ComparedFact("commit", lambda book: book.code.commit and book.code.commit[:FINGERPRINT]),
    ComparedFact("changed since the commit", lambda book: book.code.dirty),
    ComparedFact("memory of the computer", lambda book: book.hardware.memory_bytes),
    ComparedFact("memory limit", lambda book: book.hardware.memory_limit),
    ComparedFact(
        "seeds",
        lambda book: ", ".join(f"{name} {seed}" for name, seed in sorted(book.randomness.seeds.items())) or None,
    ),
    ComparedFact("cuDNN deterministic", lambda book: book.randomness.cudnn_deterministic),
    ComparedFact("seeding of workers", lambda book: book.loader and book.loader.worker_seeding),
    ComparedFact("pinned memory", lambda book: book.loader and book.loader.pin_memory),
    ComparedFact("batches read ahead", lambda book: book.loader and book.loader.prefetch_factor),
    ComparedFact("workers that live on", lambda book: book.loader and book.loader.persistent_workers),
    ComparedFact("start of workers", lambda book: book.loader and book.loader.start_method),
    ComparedFact("heat as reported", lambda book: book.conditions.heat),
    ComparedFact("speed limit in percent", lambda book: book.conditions.speed_limit),
    ComparedFact("conditions read", lambda book: book.conditions.moment),
    ComparedFact("storage", lambda book: ", ".join(f"{one.what} {one.kind}" for one in book.storage) or None),
)

# Names and values, of which each that differs is said.
MAPPINGS: tuple[tuple[str, Callable[[Sections], dict[str, str]]], ...] = (
    ("package", lambda book: book.software.packages),
    ("variable", lambda book: book.environment),
    ("MPS variable", lambda book: {one.name: f"{one.value}, {one.effect}" for one in book.mps_variables}),
)

# What differs from moment to moment; it stands among the figures.
MOMENTARY = (
    ComparedFact("busy programs", lambda book: book.background.busy),
    ComparedFact("share of the processors that others took", lambda book: book.background.share),
    ComparedFact("available memory in bytes", lambda book: book.conditions.memory_available),
    ComparedFact("swap in bytes", lambda book: book.conditions.swap_used),
    ComparedFact("battery in percent", lambda book: book.conditions.battery),
    ComparedFact("seconds to the artifact store", lambda book: book.network and book.network.median_seconds),
)


@dataclass(frozen=True)
class Difference:
    """Something in which two logbooks differ.

    Attributes:
        name: What it is.
        first: What the first one says; ``"not known"`` where it does not.
        second: What the second one says.
        why: Why figures must not be compared for it; empty if they may.
    """

    name: str
    first: str
    second: str
    why: str = ""


@dataclass(frozen=True)
class ComparedFigure(Plain):
    """A figure of both logbooks.

    Attributes:
        report: Which report it is of.
        subject: What was measured.
        name: Which figure.
        first: In the first logbook.
        second: In the second one.
    """

    ALSO = ("ratio",)

    report: str
    subject: str
    name: str
    first: float
    second: float

    @property
    def ratio(self) -> float | None:
        """The second over the first, ``None`` if the first is 0."""
        return self.second / self.first if self.first else None


@dataclass(frozen=True, repr=False)
class LogbookDiff(Shown):
    """What two logbooks differ in.

    Attributes:
        first: The first logbook.
        second: The second one.
    """

    first: Sections
    second: Sections

    HIDDEN, ALSO = ("first", "second"), ("comparable", "reasons", "unknown", "differences", "figures")

    @property
    def reasons(self) -> tuple[Difference, ...]:
        """Why their figures must not be compared; none if they may."""
        needed = [one for one in self._silent() if one.needed] if self.first.figures and self.second.figures else []
        silent = (Difference(one.name, UNKNOWN, UNKNOWN, CANNOT_BE_TOLD) for one in needed)
        return (*self._different(REFUSING), *silent)

    @property
    def comparable(self) -> bool:
        """Whether their figures may be compared."""
        return not self.reasons

    @property
    def unknown(self) -> tuple[str, ...]:
        """What neither says, though it changes figures."""
        return tuple(one.name for one in self._silent())

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What else differs."""
        return (*self._different(LISTED), *self._named())

    @property
    def figures(self) -> tuple[ComparedFigure, ...]:
        """The figures that both have, of several reports of one thing the last; none if they must not be compared."""
        if not self.comparable:
            return ()
        former, latter = _by_key(self.first), _by_key(self.second)
        return tuple(
            ComparedFigure(one.report, one.subject, name, value, latter[key].values[name])
            for key, one in former.items()
            if key in latter
            for name, value in one.values.items()
            if name in latter[key].values
        )

    def report(self) -> Report:
        """Return first whether they may be compared, then what differs; figures stand in the HTML alone."""
        reasons = self.reasons
        title = f"Must not be compared: {counted(len(reasons), 'reason')}" if reasons else "May be compared"
        unknown = (f"Neither says: {', '.join(self.unknown)}.",) if self.unknown else ()
        columns = ("what", "first", "second")
        why_not = tuple((one.name, one.first, one.second, one.why) for one in reasons)
        others, moments = (
            tuple((one.name, one.first, one.second) for one in some)
            for some in (self.differences, self._different(MOMENTARY))
        )
        figures = tuple(
            (
                one.report,
                one.subject,
                one.name,
                f"{one.first:.6g}",
                f"{one.second:.6g}",
                f"{one.ratio:.3f}" if one.first else "",
            )
            for one in self.figures
        )
        shown_apart = (
            Table("Figures", ("report", "of", "figure", "first", "second", "second / first"), figures),
            Table("At that moment", columns, moments),
        )
        tables = (Table("Why not", (*columns, "because"), why_not), Table("What else differs", columns, others))
        return Report(title, unknown, tables, figures=shown_apart)

    def _silent(self) -> Iterator[ComparedFact]:
        """Yield what neither says."""
        former, latter = shared(self.first, self.second)
        return (one for one in REFUSING if one.reads(former) is None and one.reads(latter) is None)

    def _different(self, facts: Iterable[ComparedFact]) -> Iterator[Difference]:
        former, latter = shared(self.first, self.second)
        for one in facts:
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
    """Return something that a logbook says as a text."""
    if isinstance(value, bool):
        return YES_NO[value]
    return UNKNOWN if value is None else str(value)


def shared(first: Sections, second: Sections) -> tuple[Sections, Sections]:
    """Return two logbooks with those figures alone that both have, if there are any: no others are compared."""
    both = _by_key(first).keys() & _by_key(second).keys()
    if not both:
        return first, second
    former, latter = (
        replace(book, figures=tuple(one for one in book.figures if one.key in both)) for book in (first, second)
    )
    return former, latter


def _by_key(book: Sections) -> dict[tuple[str, str, str | None], ReportFigures]:
    return {one.key: one for one in book.figures}
