"""The logbook as a value: its text, HTML, Markdown and files; and whether the figures of two may be compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...._render.display import FAILED, NOTE, OK, WARNING, Plain, Report, Shown, Table, counted, in_bytes
from ...._utils.plain import from_plain, save, to_json
from ...._utils.text import cause, describe_file, one_line, short_type_name
from ...._utils.validation import given_path
from ....devices.request import canonical, kind_of
from ....errors import ConfigurationError
from .privacy import ALL_LOGGED, CLEANERS, LOGS
from .sections import OWN_WORDS, SCHEMA, ReportFigures, Run, Sections

# What each section is called, in the order in which they are shown.
SECTIONS = {
    "software": "Software",
    "code": "Code",
    "hardware": "Hardware",
    "model": "Model",
    "dataset": "Dataset",
    "run": "Run",
    "loader": "Loader",
    "randomness": "Random numbers",
    "environment": "Environment variables",
    "mps_variables": "What became of the MPS variables",
    "conditions": "Power, heat and memory",
    "background": "Other programs",
    "storage": "Storage",
    "network": "Way to the artifact store",
    "hypotheses": "Hypotheses that are ruled out",
    "figures": "Figures of reports",
}

WHOLE = 100_000  # From here on the HTML shows whole numbers.
ALL_OF_IT = "Everything is in .markdown(), .to_dict() and .save('logbook.json')."
LOCAL = "Keep it on a disk of this computer: HF_HOME and TORCH_HOME say where caches are."
ONE_DEVICE = "Write a logbook for each device, such as nb.logbook(report)."
ANOTHER = "Pass a .json file that Logbook.save() has written."

FAMILY, _, NUMBER = SCHEMA.rpartition("/")
HEADING = "# Logbook"
# How a logbook for people begins.
FOR_PEOPLE = re.compile(rf"{HEADING} on [^\n]+\n\nWritten [0-9TZ:-]{{20}}, schema `{FAMILY}/[0-9]+`\.\n")

# Written by scripts/write_schemas.py.
SCHEMA_FILE = Path(__file__).with_name("logbook.schema.json")


@dataclass(frozen=True, repr=False)
class Logbook(Sections, Shown):
    """What figures were measured with. No text of a note, no secret and no name of a file is in it.

    Its fields are those of :class:`.sections.Sections`.
    """

    def with_reports(self, *reports: Any) -> Logbook:
        """Return the logbook with what reports found since it was written, so that power and heat are those from before.

        Args:
            reports: What ``nb.sweep()`` and the others returned.

        Raises:
            ConfigurationError: For what is not a report, and for a report of another device than the logbook's.
        """
        from ...verdict.figures import figures_of

        figures = tuple(map(figures_of, reports))
        device = reported_device(figures)
        if device not in {None, canonical(self.hardware.device)}:
            what = f"A report is of {device}, and the logbook of {self.hardware.device}."
            raise ConfigurationError(what, ONE_DEVICE)
        return replace(
            self,
            run=run_of(figures, self.run),
            figures=(*self.figures, *figures),
            simulated=self.simulated or any(one.simulated for one in figures),
        )

    def diff(self, other: Any) -> LogbookDiff:
        """Compare with another logbook: first whether their figures may be compared at all.

        Args:
            other: The second one, a logbook too.

        Raises:
            ConfigurationError: For what is not a logbook.
        """
        if not isinstance(other, Logbook):
            what = f"A logbook cannot be compared with {short_type_name(other)}."
            raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
        return LogbookDiff(self, other)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write it in one step into a file, ``.json`` to be read again or ``.md`` to be read by people; return its path.

        A logbook that is there already is replaced.

        Raises:
            ConfigurationError: For another ending, for a file that is not a logbook, and if it cannot be written.
        """
        file = given_path(path, "the file of a logbook")
        writer = WRITERS.get(file.suffix.lower())
        if writer is None:
            what = f"A logbook cannot be written as {file.suffix or 'a file without an ending'!r}."
            raise ConfigurationError(what, "Use .json or .md.")
        if file.exists() and not is_logbook(file):
            raise ConfigurationError(f"{describe_file(file)} already exists and is not a logbook.", "Use another name.")
        save(file, writer(self))  # One made by hand may have half a character, which no file can hold.
        return str(file)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Logbook:
        """Return the logbook of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that is not a logbook, is cut off, or was written by a newer version.
        """
        file = given_path(path, "the file of a logbook")
        reason = ""
        try:
            text = file.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        if reason:  # Outside of the handler: the other error has the path, and would be the context of this one.
            raise ConfigurationError(f"The logbook {describe_file(file)} cannot be read: {reason}.", ANOTHER)
        try:
            stored = json.loads(text, object_pairs_hook=_each_name_once)
        except (ValueError, RecursionError):
            raise ConfigurationError(f"{describe_file(file)} {_what_else(text)}.", ANOTHER) from None
        version = version_of_logbook(stored)
        if version is None:
            raise ConfigurationError(f"{describe_file(file)} is not a logbook.", ANOTHER)
        if version != NUMBER:
            what = (
                f"{describe_file(file)} is a logbook of version {version}, and this openmed_nb reads version {NUMBER}."
            )
            raise ConfigurationError(what, "Read it with the openmed_nb that wrote it, or with a newer one.")
        try:
            book: Logbook = from_plain(Logbook, stored)
        except ValueError as error:
            damage = cause(error)
        else:
            if book.environment.keys() <= CLEANERS.keys():
                return book
            damage = "its environment has variables that no logbook holds"
        what = f"{describe_file(file)} is not a whole logbook: {damage}."
        raise ConfigurationError(what, "Take it from where it came from again.")

    def markdown(self) -> str:
        """Return everything as Markdown."""
        notes = [*([NOTE] if self.simulated else []), *([OWN_WORDS] if self.hypotheses else []), *self._slow()]
        head = [f"{HEADING} on {escaped(self.device)}", f"Written {self.written}, schema `{self.schema}`.", *notes]
        return "\n\n".join([*head, *map(markdown_of, section_tables(self.to_dict()))]) + "\n"

    def report(self) -> Report:
        """Return what it is of; all that it holds stands in the HTML alone, because it differs from computer to computer."""
        slow = tuple(self._slow())
        sentences = (*slow, ALL_OF_IT, *([OWN_WORDS] if self.hypotheses else []))
        tables = (Table("", ("of", "what"), tuple(self._summary())),)
        sections = tuple(replace(one, folded=True) for one in section_tables(self.to_dict()))
        headline = f"Logbook on {self.device}: what these figures were measured with"
        title, status = f"Logbook on {self.device}", WARNING if slow else ""
        return Report(title, sentences, tables, figures=sections, spoken=(headline, *sentences), status=status)

    def _slow(self) -> Iterator[str]:
        """Yield what of the surroundings takes time."""
        for one in self.storage:
            if one.kind in {"network", "cloud"}:
                yield f"The {one.what} is on a {one.kind} volume, which loading waits for. {LOCAL}"
        for name in LOGS:
            if ALL_LOGGED.fullmatch(self.environment.get(name, "")):
                yield f"{name} logs all that is done, which takes time. Unset it before times are measured."

    def _summary(self) -> Iterator[tuple[str, str]]:
        """Yield what the person said of it, and nothing that differs from computer to computer."""
        run, model, dataset = self.run, self.model, self.dataset
        length = f" of {counted(run.length, 'token')}" if run.length else ""
        yield "model", f"{model.name}{f' in {model.dtype}' if model.dtype else ''}" if model else "not said"
        noun = "text" if dataset and dataset.kind == "texts" else "file"
        yield "dataset", counted(dataset.items, noun) if dataset else "not said"
        yield "batch", f"{counted(run.batch_size, 'row')}{length}" if run.batch_size else "not said"
        yield "reports", ", ".join(dict.fromkeys(one.report for one in self.figures)) or "none"
        if self.hypotheses:
            yield "ruled out", counted(len(self.hypotheses), "hypothesis", "hypotheses")


def reported_device(figures: Iterable[ReportFigures]) -> str | None:
    """Return the device that reports are of, ``None`` if they name none.

    Raises:
        ConfigurationError: If they name several: a logbook is of one.
    """
    named = sorted({one.place for one in figures if one.place})
    if len(named) > 1:
        raise ConfigurationError(f"The reports are of several devices: {', '.join(named)}.", ONE_DEVICE)
    return named[0] if named else None


def run_of(figures: Iterable[ReportFigures], said: Run) -> Run:
    """Return what is known of a run: what the last report says, and else what the person said; the largest peak counts."""
    runs = [vars(run) for run in (said, *(one.run for one in figures))]
    last: dict[str, Any] = {name: value for run in runs for name, value in run.items() if value is not None}
    peaks = [run["peak_memory_bytes"] for run in runs if run["peak_memory_bytes"] is not None]
    return Run(**{**last, "peak_memory_bytes": max(peaks, default=None)})


def section_tables(book: Mapping[str, Any]) -> Iterator[Table]:
    """Yield each section of a logbook as mappings that holds something as a table; what is not known is left out of it.

    Example:
        >>> [table.rows for table in section_tables({"code": {"commit": None, "changed": 2}})]
        [(('changed', '2'),)]
    """
    for name, caption in SECTIONS.items():
        if rows := tuple(_rows(book.get(name))):
            yield Table(caption, ("what", "value"), rows)


def _rows(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value that is known, however deep it stands."""
    if isinstance(section, Mapping):
        items: Iterable[tuple[str, Any]] = section.items()
    elif isinstance(section, Sequence) and not isinstance(section, str):
        items = ((str(number), one) for number, one in enumerate(section, 1))
    else:
        if section is not None:
            yield prefix, shown(section)
        return
    for name, one in items:
        yield from _rows(one, f"{prefix}: {name}" if prefix else name)


def markdown_of(table: Table) -> str:
    """Return a table as Markdown, with a heading."""
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = ("| " + " | ".join(map(escaped, row)) + " |" for row in rows)
    return f"## {escaped(table.caption)}\n\n" + "\n".join(lines)


def escaped(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in one line.

    Example:
        >>> print(escaped("a|b <c> *d*"))
        a\|b &lt;c&gt; \*d\*
    """
    line = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", line)


# What writes a file, by its ending.
WRITERS: dict[str, Callable[[Logbook], str]] = {".json": to_json, ".md": Logbook.markdown}


def is_logbook(file: Path) -> bool:
    """Tell whether a file is a logbook of any version."""
    try:
        text = file.read_text("utf-8-sig")
        return bool(FOR_PEOPLE.match(text)) or version_of_logbook(json.loads(text)) is not None
    except (OSError, ValueError, RecursionError):
        return False


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _what_else(text: str) -> str:
    """Return what a text is that is not JSON."""
    if text.startswith(HEADING):
        return "is a logbook for people, which cannot be read again"
    return "is cut off or damaged" if FAMILY in text[:200] else "is not a logbook"


def version_of_logbook(stored: Any) -> str | None:
    """Return the version of a logbook that was read, ``None`` if it is none."""
    said = stored.get("schema") if isinstance(stored, dict) else None
    match = re.fullmatch(f"{FAMILY}/([1-9][0-9]{{0,8}})", said) if isinstance(said, str) else None
    return match[1] if match else None


FINGERPRINT = 12  # How many characters of a fingerprint are shown.

UNKNOWN = "not known"
OTHER_DEVICE = "figures are of one device"
OTHER_CODE = "other versions compute in other ways"
OTHER_WORK = "that is other work, and takes another time"
OTHER_POWER = "the computer does not run at the same speed"
OTHER_MODE = "torch was asked for something else"
CANNOT_BE_TOLD = "neither says it, so it cannot be told"
ONE_SAYS = "only one of them says it"

# Of what decides, both logbooks must know these before their figures are compared; the others may be unknown to both.
NEEDED = ("model", "dataset")


def deciding(book: Sections) -> dict[str, tuple[Any, str]]:
    """Return what must be the same in two logbooks before their figures are compared, each with the reason."""
    hardware, software, conditions, randomness = book.hardware, book.software, book.conditions, book.randomness
    model, dataset, loader, run = book.model, book.dataset, book.loader, run_of_figures(book)
    fingerprints = model and " ".join(
        one[:FINGERPRINT] for one in (model.weights, model.settings, model.tokenizer or "")
    )
    slow_memory = conditions.memory_pressure in {"warning", "critical"}
    return {
        "simulation": ("simulated" if book.simulated else "real", "nothing simulated is a figure of a device"),
        "device": (hardware.device, OTHER_DEVICE),
        "name of the device": (hardware.name, OTHER_DEVICE),
        "chip": (hardware.chip, OTHER_DEVICE),
        "threads": (hardware.threads, OTHER_MODE),
        "torch": (software.torch, OTHER_CODE),
        "transformers": (software.transformers, OTHER_CODE),
        "model": (model and f"{model.source} {fingerprints}", OTHER_WORK),
        "type of the weights": (run["dtype"] or (model and model.dtype), OTHER_WORK),
        "dataset": (dataset and f"{dataset.kind} {dataset.checksum[:FINGERPRINT]}", OTHER_WORK),
        "task": (run["task"], OTHER_WORK),
        "batch": (run["batch_size"] or (loader and loader.batch_size), OTHER_WORK),
        "length": (run["length"], OTHER_WORK),
        "shape of a row": (run["row_shape"] or "not told", OTHER_WORK),
        "workers": (run["workers"], OTHER_WORK),
        "activation checkpointing": (run["checkpointed"] or "not told", OTHER_WORK),
        "accumulation": (run["accumulation"] or "not told", OTHER_WORK),
        "autocast": (run["autocast"] or "not told", OTHER_WORK),
        "loader workers": (loader and loader.workers, OTHER_WORK),
        "batch of the loader": (loader and loader.batch_size, OTHER_WORK),
        "power source": (conditions.power_source, OTHER_POWER),
        "power mode": (conditions.power_mode, OTHER_POWER),
        "heat": ("limited" if conditions.heat == "limited" else "not limited", OTHER_POWER),
        "memory pressure": (conditions.memory_pressure if slow_memory else "none reported", OTHER_POWER),
        "deterministic algorithms": (randomness.deterministic_algorithms, OTHER_MODE),
        "cuDNN benchmark": (kind_of(hardware.device) == "cuda" and randomness.cudnn_benchmark, OTHER_MODE),
        "precision of products": (randomness.matmul_precision, OTHER_MODE),
    }


def run_of_figures(book: Sections) -> dict[str, Any]:
    """Return what reports say of their run, each its own if they differ; and what the logbook says if none does."""

    def of_run(name: str) -> Any:
        known = [(one.report, getattr(one.run, name)) for one in _by_key(book).values()]
        known = sorted({(report, value) for report, value in known if value is not None})
        if len({value for _, value in known}) > 1:
            return ", ".join(f"{report} {value}" for report, value in known)
        return known[0][1] if known else getattr(book.run, name)

    return {name: of_run(name) for name in vars(book.run)}


def listed(book: Sections) -> dict[str, Any]:
    """Return what may differ between two logbooks whose figures are compared, and is listed then."""
    software, code, hardware, randomness = book.software, book.code, book.hardware, book.randomness
    loader, conditions = book.loader, book.conditions
    return {
        "precision certificate": book.model and book.model.certificate,
        "openmed_nb": software.openmed_nb,
        "Python": software.python,
        "system": software.system,
        "architecture": software.architecture,
        "commit": code.commit and code.commit[:FINGERPRINT],
        "changed since the commit": code.dirty,
        "memory of the computer": hardware.memory_bytes,
        "memory limit": hardware.memory_limit,
        "seeds": ", ".join(f"{name} {seed}" for name, seed in sorted(randomness.seeds.items())) or None,
        "cuDNN deterministic": randomness.cudnn_deterministic,
        "seeding of workers": loader and loader.worker_seeding,
        "pinned memory": loader and loader.pin_memory,
        "batches read ahead": loader and loader.prefetch_factor,
        "workers that live on": loader and loader.persistent_workers,
        "start of workers": loader and loader.start_method,
        "heat as reported": conditions.heat,
        "speed limit in percent": conditions.speed_limit,
        "conditions read": conditions.moment,
        "storage": ", ".join(f"{one.what} {one.kind}" for one in book.storage) or None,
    }


def settings(book: Sections) -> tuple[dict[str, str], ...]:
    """Return packages, environment variables and MPS variables with what they are; those that differ are listed too."""
    return (
        {f"package {name}": version for name, version in book.software.packages.items()},
        {f"variable {name}": value for name, value in book.environment.items()},
        {f"MPS variable {one.name}": f"{one.value}, {one.effect}" for one in book.mps_variables},
    )


def momentary(book: Sections) -> dict[str, Any]:
    """Return what differs from moment to moment; it stands among the figures."""
    return {
        "busy programs": book.background.busy,
        "share of the processors that others took": book.background.share,
        "available memory": in_bytes(book.conditions.memory_available) or None,
        "swap": in_bytes(book.conditions.swap_used) or None,
        "battery in percent": book.conditions.battery,
        "seconds to the artifact store": book.network and book.network.median_seconds,
    }


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

    @property
    def row(self) -> tuple[str, ...]:
        """The figure as people read it; large ones are whole."""
        both = (f"{one:,.0f}" if abs(one) >= WHOLE else f"{one:.6g}" for one in (self.first, self.second))
        return self.report, self.subject, self.name, *both, "" if self.ratio is None else f"{self.ratio:.3f}"


@dataclass(frozen=True, repr=False)
class LogbookDiff(Shown):
    """What two logbooks differ in.

    Attributes:
        first: The first logbook.
        second: The second one.
    """

    HIDDEN, ALSO = ("first", "second"), ("comparable", "reasons", "unknown", "differences", "figures")

    first: Sections
    second: Sections

    @property
    def reasons(self) -> tuple[Difference, ...]:
        """Why their figures must not be compared; none if they may."""
        others, silent = [], []
        needed = NEEDED if self.first.figures and self.second.figures else ()
        for name, why, first, second in self._deciding():
            if first != second:
                reason = ONE_SAYS if None in {first, second} else why
                others.append(Difference(name, shown(first), shown(second), reason))
            elif first is None and name in needed:
                silent.append(Difference(name, UNKNOWN, UNKNOWN, CANNOT_BE_TOLD))
        return (*others, *silent)

    @property
    def comparable(self) -> bool:
        """Whether their figures may be compared."""
        return not self.reasons

    @property
    def unknown(self) -> tuple[str, ...]:
        """What neither says, though it changes figures."""
        return tuple(name for name, _, first, second in self._deciding() if first is None and second is None)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What else differs."""
        found = different(listed(self.first), listed(self.second))
        for first, second in zip(settings(self.first), settings(self.second), strict=True):
            names = sorted(first | second)
            found += different(*({name: one.get(name, "not set") for name in names} for one in (first, second)))
        return tuple(found)

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
        moment = different(momentary(self.first), momentary(self.second))
        both = (self.differences, moment)
        others, moments = (tuple((one.name, one.first, one.second) for one in some) for some in both)
        figures = tuple(one.row for one in self.figures)
        shown_apart = (
            Table("Figures", ("report", "of", "figure", "first", "second", "second / first"), figures),
            Table("At that moment", columns, moments),
        )
        tables = (Table("Why not", (*columns, "because"), why_not), Table("What else differs", columns, others))
        return Report(title, unknown, tables, figures=shown_apart, status=FAILED if reasons else OK)

    def _deciding(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield what decides, why, and what each says of it; only the runs of figures that both have count, if there are any."""
        keys = _by_key(self.first).keys() & _by_key(self.second).keys()
        first, second = (
            deciding(replace(book, figures=tuple(one for one in book.figures if not keys or one.key in keys)))
            for book in (self.first, self.second)
        )
        for name, (value, why) in first.items():
            yield name, why, value, second[name][0]


def different(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two mappings of the same names."""
    others = [name for name, value in first.items() if value != second[name]]
    return [Difference(name, shown(first[name]), shown(second[name])) for name in others]


def shown(value: Any) -> str:
    """Return something that a logbook says as a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return UNKNOWN if value is None else str(value)


def _by_key(book: Sections) -> dict[tuple[str, str, str | None], ReportFigures]:
    return {one.key: one for one in book.figures}
