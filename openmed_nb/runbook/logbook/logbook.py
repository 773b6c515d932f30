"""The logbook as a value: its text, its HTML, the Markdown that holds all of it, and its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.request import canonical
from ...display import NOTE, Report, Shown, Table, counted, plain
from ...errors import ConfigurationError, cause, given_path, one_line
from ...plain import from_plain, schema_of, write_whole
from .sections import SCHEMA, WARNING, YES_NO, ReportFigures, Run, Sections
from .variables import CLEANERS

if TYPE_CHECKING:
    from .diff import LogbookDiff

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

ALL_OF_IT = "Everything is in .markdown(), .to_dict() and .save('logbook.json')."
ONE_DEVICE = "Write a logbook for each device, such as nb.logbook(report)."
ANOTHER = "Pass a .json file that Logbook.save() has written."

FAMILY, _, NUMBER = SCHEMA.rpartition("/")
HEADING = "# Logbook"
# How a logbook for people begins.
FOR_PEOPLE = re.compile(rf"{HEADING} on [^\n]+\n\nWritten [0-9TZ:-]{{20}}, schema `{FAMILY}/[0-9]+`\.\n")

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
        from ..figures import figures_of

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
        from .diff import LogbookDiff

        if not isinstance(other, Logbook):
            what = f"A logbook cannot be compared with {type(other).__name__}."
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
            raise ConfigurationError(f"{file.name!r} already exists and is not a logbook.", "Use another name.")
        try:
            write_whole(file, writer(self))
        except (OSError, UnicodeEncodeError) as error:  # The latter for half a character in a logbook made by hand.
            what = f"{file.name!r} cannot be written: {cause(error)}."
            raise ConfigurationError(what, "Use a folder that is there and can be written.") from error
        return str(file)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Logbook:
        """Return the logbook of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that is not a logbook, is cut off, or was written by a newer version.
        """
        file = given_path(path, "the file of a logbook")
        try:
            text = file.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigurationError(f"The logbook {file.name!r} cannot be read: {reason}.", ANOTHER) from error
        try:
            stored = json.loads(text, object_pairs_hook=_each_name_once)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{file.name!r} {_what_else(text)}.", ANOTHER) from error
        version = version_of_logbook(stored)
        if version is None:
            raise ConfigurationError(f"{file.name!r} is not a logbook.", ANOTHER)
        if version != NUMBER:
            what = f"{file.name!r} is a logbook of version {version}, and this openmed_nb reads version {NUMBER}."
            raise ConfigurationError(what, "Read it with the openmed_nb that wrote it, or with a newer one.")
        try:
            book: Logbook = from_plain(Logbook, stored)
        except ValueError as error:
            damage = cause(error)
        else:
            if book.environment.keys() <= CLEANERS.keys():
                return book
            damage = "its environment has variables that no logbook holds"
        what = f"{file.name!r} is not a whole logbook: {damage}."
        raise ConfigurationError(what, "Take it from where it came from again.")

    def markdown(self) -> str:
        """Return everything as Markdown."""
        notes = [*([NOTE] if self.simulated else []), *([WARNING] if self.hypotheses else [])]
        head = [f"{HEADING} on {escaped(self.device)}", f"Written {self.written}, schema `{self.schema}`.", *notes]
        return "\n\n".join([*head, *map(markdown_of, section_tables(self.to_dict()))]) + "\n"

    def report(self) -> Report:
        """Return what it is of; all that it holds stands in the HTML alone, because it differs from computer to computer."""
        sentences = (ALL_OF_IT, *([WARNING] if self.hypotheses else []))
        tables = (Table("", ("of", "what"), tuple(self._summary())),)
        return Report(f"Logbook on {self.device}", sentences, tables, figures=tuple(section_tables(self.to_dict())))

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
            yield prefix, YES_NO[section] if isinstance(section, bool) else str(section)
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


def to_json(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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


def logbook_schema() -> dict[str, Any]:
    """Return the schema, in the 2020-12 draft of JSON Schema; ``logbook.schema.json`` holds it."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{SCHEMA.replace('/', ':')}",
        "title": "A logbook of openmed_nb",
        "description": "What figures were measured with. No text of a note, no secret and no name of a file is in it.",
    }
    return {**head, **schema_of(Sections)}
