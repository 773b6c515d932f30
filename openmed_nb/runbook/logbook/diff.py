"""What differs between two logbooks, and whether their figures may be compared."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...devices.request import kind_of
from ...display import Report, Shown, Table, counted
from .sections import YES_NO, Figures, Sections

FINGERPRINT = 12
"""How many characters of a fingerprint are shown."""

UNKNOWN = "not known"
NOT_TOLD = "not told"
SLOW_PRESSURE = ("warning", "critical")


@dataclass(frozen=True)
class Compared:
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


def _model(book: Sections) -> str | None:
    model = book.model
    if model is None:
        return None
    parts = (model.weights, model.settings, model.tokenizer or "")
    return f"{model.source} " + " ".join(part[:FINGERPRINT] for part in parts)


def _dataset(book: Sections) -> str | None:
    return f"{book.dataset.kind} {book.dataset.checksum[:FINGERPRINT]}" if book.dataset else None


def of_run(book: Sections, name: str) -> Any:
    """Return what reports say of their run, each its own where they differ; and what the logbook says where none does.

    Args:
        book: The logbook.
        name: A field of :class:`.Run`.
    """
    told = {one.key: getattr(one.run, name) for one in book.figures}
    known = sorted({(report, value) for (report, *_), value in told.items() if value is not None})
    if len({value for _, value in known}) > 1:
        return ", ".join(f"{report} {value}" for report, value in known)
    return known[0][1] if known else getattr(book.run, name)


def _dtype(book: Sections) -> str | None:
    return of_run(book, "dtype") or (book.model.dtype if book.model else None)


def _batch(book: Sections) -> Any:
    return of_run(book, "batch_size") or (book.loader.batch_size if book.loader else None)


def _cudnn_benchmark(book: Sections) -> bool | None:
    return book.randomness.cudnn_benchmark if kind_of(book.hardware.device) == "cuda" else False


def _heat(book: Sections) -> str:
    return "limited" if book.conditions.heat == "limited" else "not limited"


def _pressure(book: Sections) -> str:
    pressure = book.conditions.memory_pressure
    return str(pressure) if pressure in SLOW_PRESSURE else "none reported"


REFUSING = (
    Compared(
        "simulation",
        lambda book: "simulated" if book.simulated else "real",
        "nothing simulated is a figure of a device",
    ),
    Compared("device", lambda book: book.hardware.device, OTHER_DEVICE),
    Compared("name of the device", lambda book: book.hardware.name, OTHER_DEVICE),
    Compared("chip", lambda book: book.hardware.chip, OTHER_DEVICE),
    Compared("threads", lambda book: book.hardware.threads, OTHER_MODE),
    Compared("torch", lambda book: book.software.torch, OTHER_CODE),
    Compared("transformers", lambda book: book.software.transformers, OTHER_CODE),
    Compared("model", _model, OTHER_WORK, needed=True),
    Compared("type of the weights", _dtype, OTHER_WORK),
    Compared("dataset", _dataset, OTHER_WORK, needed=True),
    Compared("task", lambda book: of_run(book, "task"), OTHER_WORK),
    Compared("batch", _batch, OTHER_WORK),
    Compared("length", lambda book: of_run(book, "length"), OTHER_WORK),
    Compared("shape of a row", lambda book: of_run(book, "row_shape") or NOT_TOLD, OTHER_WORK),
    Compared("workers", lambda book: of_run(book, "workers"), OTHER_WORK),
    Compared("loader workers", lambda book: book.loader and book.loader.workers, OTHER_WORK),
    Compared("batch of the loader", lambda book: book.loader and book.loader.batch_size, OTHER_WORK),
    Compared("power source", lambda book: book.conditions.power_source, OTHER_POWER),
    Compared("power mode", lambda book: book.conditions.power_mode, OTHER_POWER),
    Compared("heat", _heat, OTHER_POWER),
    Compared("memory pressure", _pressure, OTHER_POWER),
    Compared("deterministic algorithms", lambda book: book.randomness.deterministic_algorithms, OTHER_MODE),
    Compared("cuDNN benchmark", _cudnn_benchmark, OTHER_MODE),
    Compared("precision of products", lambda book: book.randomness.matmul_precision, OTHER_MODE),
)
"""Where one of these differs, is known to one logbook alone, or is needed and not known, figures must not be compared."""

LISTED = (
    Compared("openmed_nb", lambda book: book.software.openmed_nb),
    Compared("Python", lambda book: book.software.python),
    Compared("system", lambda book: book.software.system),
    Compared("architecture", lambda book: book.software.architecture),
    Compared("commit", lambda book: book.code.commit and book.code.commit[:FINGERPRINT]),
    Compared("changed since the commit", lambda book: book.code.dirty),
    Compared("memory of the computer", lambda book: book.hardware.memory_bytes),
    Compared("memory limit", lambda book: book.hardware.memory_limit),
    Compared(
        "seeds",
        lambda book: ", ".join(f"{name} {seed}" for name, seed in sorted(book.randomness.seeds.items())) or None,
    ),
    Compared("cuDNN deterministic", lambda book: book.randomness.cudnn_deterministic),
    Compared("seeding of workers", lambda book: book.loader and book.loader.worker_seeding),
    Compared("pinned memory", lambda book: book.loader and book.loader.pin_memory),
    Compared("batches read ahead", lambda book: book.loader and book.loader.prefetch_factor),
    Compared("workers that live on", lambda book: book.loader and book.loader.persistent_workers),
    Compared("start of workers", lambda book: book.loader and book.loader.start_method),
    Compared("heat as reported", lambda book: book.conditions.heat),
    Compared("speed limit in percent", lambda book: book.conditions.speed_limit),
    Compared("conditions read", lambda book: book.conditions.moment),
    Compared("storage", lambda book: ", ".join(f"{one.what} {one.kind}" for one in book.storage) or None),
)
"""Where these differ, it is said."""

MAPPINGS: tuple[tuple[str, Callable[[Sections], dict[str, str]]], ...] = (
    ("package", lambda book: book.software.packages),
    ("variable", lambda book: book.environment),
    ("MPS variable", lambda book: {one.name: f"{one.value}, {one.effect}" for one in book.mps_variables}),
)
"""Names and values, of which each that differs is said."""

MOMENTARY = (
    Compared("busy programs", lambda book: book.background.busy),
    Compared("share of the processors that others took", lambda book: book.background.share),
    Compared("available memory in bytes", lambda book: book.conditions.memory_available),
    Compared("swap in bytes", lambda book: book.conditions.swap_used),
    Compared("battery in percent", lambda book: book.conditions.battery),
    Compared("seconds to the artifact store", lambda book: book.network and book.network.median_seconds),
)
"""What differs from moment to moment; it stands among the figures."""


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

    first: Sections
    second: Sections

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


def shared(first: Sections, second: Sections) -> tuple[Sections, Sections]:
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


def _with_figures(book: Sections, keys: Container[tuple[str, str, str | None]]) -> Sections:
    return replace(book, figures=tuple(one for one in book.figures if one.key in keys))
