"""The logbook as a value: its text, HTML, Markdown and files; and whether the figures of two may be compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...._render.display import (
    FAILED,
    OK,
    SIMULATION_NOTICE,
    WARNING,
    Displayable,
    JsonMixin,
    Report,
    Table,
    format_bytes,
    pluralize,
    to_plain_data,
)
from ...._utils.plain import find_changes, read_json_file, save_text, to_json
from ...._utils.text import collapse_whitespace, describe_file, short_type_name
from ...._utils.validation import check_path
from ....devices.registry import parse_device_argument
from ....devices.request import normalize_device
from ....errors import ConfigurationError
from .privacy import ALL_LOGGED, LOG_VARIABLES, VARIABLES
from .sections import HYPOTHESES_NOTICE, SCHEMA, LogbookData, ReportMetrics, Run

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

MIN_INTEGER_DISPLAY = 100_000  # From here on the HTML shows whole numbers.
FULL_OUTPUT_HINT = "Everything is in .markdown(), .to_dict() and .save('logbook.json')."
LOCAL_CACHE_REMEDY = "Keep it on a disk of this computer: HF_HOME and TORCH_HOME say where caches are."
ONE_DEVICE_REMEDY = "Write a logbook for each device, such as nb.logbook(report)."
LOGBOOK_FILE_REMEDY = "Pass a .json file that Logbook.save() of this version has written."

FAMILY = SCHEMA.rstrip("0123456789")  # Of all versions.
HEADING = "# Logbook"
# How a logbook for people begins.
MARKDOWN_HEADER_PATTERN = re.compile(rf"{HEADING} on [^\n]+\n\nWritten [0-9TZ:-]{{20}}, schema `{FAMILY}[0-9]+`\.\n")

# Written by scripts/write_schemas.py.
SCHEMA_FILE = Path(__file__).with_name("logbook.schema.json")


@dataclass(frozen=True, repr=False)
class Logbook(LogbookData, Displayable):
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
        from ...verdict.figures import extract_metrics

        figures = tuple(map(extract_metrics, reports))
        device = report_device(figures)
        if device not in {None, normalize_device(self.hardware.device)}:
            what = f"A report is of {device}, and the logbook of {self.hardware.device}."
            raise ConfigurationError(what, ONE_DEVICE_REMEDY)
        return replace(
            self,
            run=merge_run(figures, self.run),
            metrics=(*self.metrics, *figures),
            simulated=self.simulated or any(report.simulated for report in figures),
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
        file = check_path(path, "the file of a logbook")
        writer = WRITERS.get(file.suffix.lower())
        if writer is None:
            what = f"A logbook cannot be written as {file.suffix or 'a file without an ending'!r}."
            raise ConfigurationError(what, "Use .json or .md.")
        if file.exists() and not _is_logbook(file):
            raise ConfigurationError(f"{describe_file(file)} already exists and is not a logbook.", "Use another name.")
        save_text(file, writer(self))  # One made by hand may have half a character, which no file can hold.
        return str(file)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Logbook:
        """Return the logbook of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that is not a logbook, is cut off, or was written by a newer version.
        """
        file = check_path(path, "the file of a logbook")
        book: Logbook = read_json_file(cls, file, "a logbook", LOGBOOK_FILE_REMEDY)
        if not book.environment.keys() <= VARIABLES:
            what = f"{describe_file(file)} is not a logbook: its environment has variables that no logbook holds."
            raise ConfigurationError(what, LOGBOOK_FILE_REMEDY)
        return book

    def to_markdown(self) -> str:
        """Return everything as Markdown."""
        notes = [
            *([SIMULATION_NOTICE] if self.simulated else []),
            *([HYPOTHESES_NOTICE] if self.hypotheses else []),
            *self._slow(),
        ]
        head = [
            f"{HEADING} on {escape_markdown(self.device)}",
            f"Written {self.written}, schema `{self.schema}`.",
            *notes,
        ]
        return "\n\n".join([*head, *map(table_to_markdown, _section_tables(self.to_dict()))]) + "\n"

    def to_report(self) -> Report:
        """Return what it is of; all that it holds stands in the HTML alone, because it differs from computer to computer."""
        slow = tuple(self._slow())
        sentences = (*slow, FULL_OUTPUT_HINT, *([HYPOTHESES_NOTICE] if self.hypotheses else []))
        tables = (Table("", ("of", "what"), tuple(self._summary())),)
        sections = tuple(replace(table, collapsed=True) for table in _section_tables(self.to_dict()))
        title = f"Logbook on {self.device}"
        headline = f"{title}: what these figures were measured with"
        status = WARNING if slow else ""
        return Report(title, sentences, tables, metrics=sections, html_sentences=(headline, *sentences), status=status)

    def _slow(self) -> Iterator[str]:
        """Yield what of the surroundings takes time."""
        for place in self.storage:
            if place.kind in {"network", "cloud"}:
                yield f"The {place.contents} is on a {place.kind} volume, which loading waits for. {LOCAL_CACHE_REMEDY}"
        for name in LOG_VARIABLES:
            if ALL_LOGGED.fullmatch(self.environment.get(name, "")):
                yield f"{name} logs all that is done, which takes time. Unset it before times are measured."

    def _summary(self) -> Iterator[tuple[str, str]]:
        """Yield what the person said of it, and nothing that differs from computer to computer."""
        run = self.run
        model = self.model
        dataset = self.dataset
        length = f" of {pluralize(run.length, 'token')}" if run.length else ""
        yield "model", f"{model.name}{f' in {model.dtype}' if model.dtype else ''}" if model else "not said"
        noun = "text" if dataset and dataset.kind == "texts" else "file"
        yield "dataset", pluralize(dataset.items, noun) if dataset else "not said"
        yield "batch", f"{pluralize(run.batch_size, 'row')}{length}" if run.batch_size else "not said"
        yield "reports", ", ".join(dict.fromkeys(figures.report for figures in self.metrics)) or "none"
        if self.hypotheses:
            yield "ruled out", pluralize(len(self.hypotheses), "hypothesis", "hypotheses")


def report_device(figures: Iterable[ReportMetrics]) -> str | None:
    """Return the device that reports are of, ``None`` if they name none.

    Raises:
        ConfigurationError: If they name several: a logbook is of one.
    """
    named = sorted({report.canonical_device for report in figures if report.canonical_device})
    if len(named) > 1:
        raise ConfigurationError(f"The reports are of several devices: {', '.join(named)}.", ONE_DEVICE_REMEDY)
    return named[0] if named else None


def merge_run(figures: Iterable[ReportMetrics], said: Run) -> Run:
    """Return what is known of a run: what the last report says, and else what the person said; the largest peak counts."""
    known: dict[str, Any] = {}
    peaks = []
    for run in (said, *(report.run for report in figures)):
        known |= {name: value for name, value in vars(run).items() if value is not None}
        peaks.append(run.peak_memory_bytes or 0)
    return Run(**{**known, "peak_memory_bytes": max(peaks) or None})


def _section_tables(book: Mapping[str, Any]) -> Iterator[Table]:
    """Yield each section of a logbook as mappings that holds something as a table; what is not known is left out of it.

    Example:
        >>> [table.rows for table in _section_tables({"code": {"commit": None, "changed": 2}})]
        [(('changed', '2'),)]
    """
    for name, caption in SECTIONS.items():
        if rows := tuple(_rows(book.get(name))):
            yield Table(caption, ("what", "value"), rows)


def _rows(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value that is known, however deep it stands."""
    if isinstance(section, (list, tuple)):
        section = {str(number): item for number, item in enumerate(section, 1)}
    if isinstance(section, Mapping):
        for name, item in section.items():
            yield from _rows(item, f"{prefix}: {name}" if prefix else name)
    elif section is not None:
        yield prefix, _format_value(section)


def table_to_markdown(table: Table) -> str:
    """Return a table as Markdown, with a heading."""
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = ("| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows)
    return f"## {escape_markdown(table.caption)}\n\n" + "\n".join(lines)


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in one line.

    Example:
        >>> print(escaped("a|b <c> *d*"))
        a\|b &lt;c&gt; \*d\*
    """
    line = collapse_whitespace(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", line)


# What writes a file, by its ending.
WRITERS: dict[str, Callable[[Logbook], str]] = {".json": to_json, ".md": Logbook.to_markdown}


def _is_logbook(file: Path) -> bool:
    """Return whether a file is a logbook of any version."""
    try:
        text = file.read_text("utf-8-sig")
        return bool(MARKDOWN_HEADER_PATTERN.match(text)) or str(json.loads(text)["schema"]).startswith(FAMILY)
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return False


FINGERPRINT = 12  # How many characters of a fingerprint are shown.

UNKNOWN = "not known"
NOT_TOLD = "not told"
NOT_SET = "not set"
UNKNOWN_IN_BOTH = "neither says it, so it cannot be told"
KNOWN_IN_ONE = "only one of them says it"

# What must be the same in two logbooks before their figures are compared, by the reason; each with the place of its value.
DECIDING = {
    "nothing simulated is a figure of a device": {"simulation": "compared.simulation"},
    "figures are of one device": {
        "device": "hardware.device",
        "name of the device": "hardware.name",
        "chip": "hardware.chip",
    },
    "other versions compute in other ways": {"torch": "software.torch", "transformers": "software.transformers"},
    "that is other work, and takes another time": {
        "model": "compared.model",
        "type of the weights": "compared.dtype",
        "dataset": "compared.dataset",
        "task": "run.task",
        "batch": "compared.batch_size",
        "length": "run.length",
        "shape of a row": "compared.row_shape",
        "workers": "run.workers",
        "activation checkpointing": "compared.checkpointed",
        "accumulation": "compared.accumulation",
        "autocast": "compared.autocast",
        "loader workers": "loader.workers",
        "batch of the loader": "loader.batch_size",
    },
    "the computer does not run at the same speed": {
        "power source": "conditions.power_source",
        "power mode": "conditions.power_mode",
        "heat": "compared.heat",
        "memory pressure": "compared.memory_pressure",
    },
    "torch was asked for something else": {
        "threads": "hardware.threads",
        "deterministic algorithms": "randomness.deterministic_algorithms",
        "cuDNN benchmark": "compared.cudnn_benchmark",
        "precision of products": "randomness.matmul_precision",
    },
}
# Of what decides, both logbooks must know these before their figures are compared; the others may be unknown to both.
REQUIRED_KEYS = ("model", "dataset")

# What may differ between two logbooks whose figures are compared, and is listed then.
LISTED = {
    "precision certificate": "model.certificate",
    "openmed_nb": "software.openmed_nb",
    "Python": "software.python",
    "system": "software.system",
    "architecture": "software.architecture",
    "commit": "compared.commit",
    "changed since the commit": "compared.dirty",
    "memory of the computer": "hardware.memory_bytes",
    "memory limit": "hardware.memory_limit",
    "seeds": "compared.seeds",
    "cuDNN deterministic": "randomness.cudnn_deterministic",
    "seeding of workers": "loader.worker_seeding",
    "pinned memory": "loader.pin_memory",
    "batches read ahead": "loader.prefetch_factor",
    "workers that live on": "loader.persistent_workers",
    "start of workers": "loader.start_method",
    "heat as reported": "conditions.heat",
    "speed limit in percent": "conditions.speed_limit",
    "conditions read": "conditions.moment",
    "storage": "compared.storage",
}
# What differs from moment to moment; it stands among the figures.
MOMENTARY = {
    "busy programs": "background.busy",
    "share of the processors that others took": "background.share",
    "available memory": "compared.memory_available",
    "swap": "compared.swap_used",
    "battery in percent": "conditions.battery",
    "seconds to the artifact store": "network.median_seconds",
}
# The groups of what does not decide, beside the reasons. SETTINGS are packages and variables, which may be absent.
MERELY_LISTED = "listed"
SETTINGS = "settings"
MOMENT = "moment"
GROUPS = {**DECIDING, MERELY_LISTED: LISTED, MOMENT: MOMENTARY}


def _compared_facts(book: LogbookData) -> dict[str, dict[str, Any]]:
    """Return all by which two logbooks are compared, in the groups of ``GROUPS`` and ``SETTINGS``; ``None`` is not known."""
    stored = to_plain_data(book)
    stored["run"] = _run_of_figures(book)
    stored["compared"] = _in_comparable_form(book, stored["run"])
    grouped = {
        group: {name: _value_at(stored, place) for name, place in places.items()} for group, places in GROUPS.items()
    }
    grouped[SETTINGS] = {
        **{f"package {name}": version for name, version in book.software.packages.items()},
        **{f"variable {name}": value for name, value in book.environment.items()},
        **{f"MPS variable {variable.name}": f"{variable.value}, {variable.effect}" for variable in book.mps_variables},
    }
    return grouped


def _value_at(stored: Any, place: str) -> Any:
    for name in place.split("."):
        stored = stored and stored[name]
    return stored


def _in_comparable_form(book: LogbookData, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared in another form than it is stored."""
    model = book.model
    dataset = book.dataset
    conditions = book.conditions
    fingerprints = (model.weights, model.settings, model.tokenizer or "") if model else ()
    slow_memory = conditions.memory_pressure in {"warning", "critical"}
    optional = ("row_shape", "checkpointed", "accumulation", "autocast")
    return {
        "simulation": "simulated" if book.simulated else "real",
        "model": model and f"{model.source} {' '.join(print_[:FINGERPRINT] for print_ in fingerprints)}",
        "dtype": run["dtype"] or (model and model.dtype),
        "dataset": dataset and f"{dataset.kind} {dataset.checksum[:FINGERPRINT]}",
        "batch_size": run["batch_size"] or (book.loader and book.loader.batch_size),
        **{name: run[name] or NOT_TOLD for name in optional},
        "heat": "limited" if conditions.thermal_state == "limited" else "not limited",
        "memory_pressure": conditions.memory_pressure if slow_memory else "none reported",
        "cudnn_benchmark": parse_device_argument(book.hardware.device).uses_cudnn and book.randomness.cudnn_benchmark,
        "commit": book.code.commit and book.code.commit[:FINGERPRINT],
        "dirty": book.code.dirty,
        "seeds": ", ".join(f"{name} {seed}" for name, seed in sorted(book.randomness.seeds.items())) or None,
        "storage": ", ".join(f"{place.contents} {place.kind}" for place in book.storage) or None,
        "memory_available": format_bytes(conditions.memory_available) or None,
        "swap_used": format_bytes(conditions.swap_used) or None,
    }


def _run_of_figures(book: LogbookData) -> dict[str, Any]:
    """Return what reports say of their run, each its own if they differ; and what the logbook says if none does."""
    run = {}
    for name, said in vars(book.run).items():
        told = {(figures.report, getattr(figures.run, name)) for figures in _by_key(book).values()}
        told = {(report, value) for report, value in told if value is not None}
        values = {value for _, value in told}
        several = ", ".join(f"{report} {value}" for report, value in sorted(told))
        run[name] = several if len(values) > 1 else next(iter(values), said)
    return run


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
    reason: str = ""


@dataclass(frozen=True)
class ComparedMetric(JsonMixin):
    """A figure of both logbooks.

    Attributes:
        report: Which report it is of.
        subject: What was measured.
        name: Which figure.
        first: In the first logbook.
        second: In the second one.
    """

    JSON_PROPERTIES = ("ratio",)

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
        both = (
            f"{value:,.0f}" if abs(value) >= MIN_INTEGER_DISPLAY else f"{value:.6g}"
            for value in (self.first, self.second)
        )
        return self.report, self.subject, self.name, *both, "" if self.ratio is None else f"{self.ratio:.3f}"


@dataclass(frozen=True, repr=False)
class LogbookDiff(Displayable):
    """What two logbooks differ in.

    Attributes:
        first: The first logbook.
        second: The second one.
    """

    JSON_EXCLUDE = ("first", "second")
    JSON_PROPERTIES = ("comparable", "reasons", "unknown_fields", "differences", "metrics")

    first: LogbookData
    second: LogbookData

    @property
    def reasons(self) -> tuple[Difference, ...]:
        """Why their figures must not be compared; none if they may."""
        reasons = self._differences(*DECIDING)
        if self.first.metrics and self.second.metrics:
            silent = [name for name in REQUIRED_KEYS if name in self.unknown_fields]
            reasons += tuple(Difference(name, UNKNOWN, UNKNOWN, UNKNOWN_IN_BOTH) for name in silent)
        return reasons

    @property
    def comparable(self) -> bool:
        """Whether their figures may be compared."""
        return not self.reasons

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """What neither says, though it changes figures."""
        first, second = self._facts()
        return tuple(
            name
            for group, places in DECIDING.items()
            for name in places
            if first[group][name] is None and second[group][name] is None
        )

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What else differs."""
        return self._differences(MERELY_LISTED, SETTINGS)

    @property
    def metrics(self) -> tuple[ComparedMetric, ...]:
        """The figures that both have, of several reports of one thing the last; none if they must not be compared."""
        if not self.comparable:
            return ()
        later = _by_key(self.second)
        return tuple(
            ComparedMetric(figures.report, figures.subject, name, value, later[key].values[name])
            for key, figures in _by_key(self.first).items()
            if key in later
            for name, value in figures.values.items()
            if name in later[key].values
        )

    def to_report(self) -> Report:
        """Return first whether they may be compared, then what differs; figures stand in the HTML alone."""
        reasons = self.reasons
        title = f"Must not be compared: {pluralize(len(reasons), 'reason')}" if reasons else "May be compared"
        unknown = (f"Neither says: {', '.join(self.unknown_fields)}.",) if self.unknown_fields else ()
        columns = ("what", "first", "second")
        why_not = tuple((reason.name, reason.first, reason.second, reason.reason) for reason in reasons)
        others = tuple((other.name, other.first, other.second) for other in self.differences)
        moments = tuple((moment.name, moment.first, moment.second) for moment in self._differences(MOMENT))
        figures = tuple(figure.row for figure in self.metrics)
        return Report(
            title,
            unknown,
            (Table("Why not", (*columns, "because"), why_not), Table("What else differs", columns, others)),
            metrics=(
                Table("Figures", ("report", "of", "figure", "first", "second", "second / first"), figures),
                Table("At that moment", columns, moments),
            ),
            status=FAILED if reasons else OK,
        )

    def _facts(self) -> tuple[dict[str, dict[str, Any]], ...]:
        """Return the facts of both; only the runs of figures that both have count, if there are any."""
        keys = _by_key(self.first).keys() & _by_key(self.second).keys()
        facts = []
        for book in (self.first, self.second):
            figures = tuple(figures for figures in book.metrics if not keys or figures.key in keys)
            facts.append(_compared_facts(replace(book, metrics=figures)))
        return tuple(facts)

    def _differences(self, *groups: str) -> tuple[Difference, ...]:
        """Return what differs in some of the groups, with the reason where it decides."""
        differences = []
        first, second = self._facts()
        for change in find_changes(first, second):
            group, name = change.path
            if group in groups:
                absent = NOT_SET if group == SETTINGS else UNKNOWN
                why = group if group in DECIDING else ""
                if why and None in {change.before, change.after}:
                    why = KNOWN_IN_ONE
                differences.append(
                    Difference(name, _format_value(change.before, absent), _format_value(change.after, absent), why)
                )
        return tuple(differences)


def _format_value(value: Any, absent: str = UNKNOWN) -> str:
    """Return something that a logbook says as a text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return absent if value is None else str(value)


def _by_key(book: LogbookData) -> dict[tuple[str, str, str | None], ReportMetrics]:
    return {figures.key: figures for figures in book.metrics}
