"""The logbook as a value: its sections, its text, its HTML, and the Markdown that holds all of it."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...display import NOTE, Report, Shown, Table, counted
from ...errors import ConfigurationError, cause, given_path, one_line
from ...plain import from_plain, schema_of, to_plain
from .figures import check_device, joined, told_by
from .sections import SCHEMA, WARNING, YES_NO, Sections
from .variables import CLEANERS

if TYPE_CHECKING:
    from .diff import LogbookDiff


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
"""What each section is called, in the order in which they are shown."""


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
            ConfigurationError: For what is no report, and for a report of another device, which the logbook tells nothing of.
        """
        told = told_by(reports)
        check_device(told, self.hardware.device)
        return replace(
            self,
            run=joined(told, self.run),
            figures=(*self.figures, *told),
            simulated=self.simulated or any(one.simulated for one in told),
        )

    def diff(self, other: Any) -> LogbookDiff:
        """Compare with another logbook: first whether their figures may be compared at all.

        Args:
            other: The second one, a logbook too.

        Raises:
            ConfigurationError: For what is no logbook.
        """
        from .diff import LogbookDiff

        if not isinstance(other, Logbook):
            what = f"{type(other).__name__} is no logbook to compare with."
            raise ConfigurationError(what, "Pass what nb.logbook() or Logbook.read() returned.")
        return LogbookDiff(self, other)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write it in one step into a file, ``.json`` to be read again or ``.md`` to be read by people; return its path.

        A logbook that is there already is replaced.

        Raises:
            ConfigurationError: For another ending, for a file that is no logbook, and where it cannot be written.
        """
        return save(self, path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Logbook:
        """Return the logbook of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that is no logbook, is cut off, or was written by a newer version.
        """
        return read(path)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, as the published schema says."""
        return dict(to_plain(self))

    def markdown(self) -> str:
        """Return everything as Markdown."""
        return to_markdown(self)

    def report(self) -> Report:
        """Return what it is of; all that it holds stands in the HTML alone, because it differs from computer to computer."""
        sentences = [*([NOTE] if self.simulated else []), ALL_OF_IT]
        return Report(
            f"Logbook on {self.device}",
            (*sentences, *([WARNING] if self.hypotheses else [])),
            (Table("", ("of", "what"), tuple(_summary(self))),),
            figures=tuple(section_tables(self.to_dict())),
        )


ALL_OF_IT = "Everything is in .markdown(), .to_dict() and .save('logbook.json')."


def _summary(book: Logbook) -> Iterator[tuple[str, str]]:
    """Yield what the person said of it, and nothing that differs from computer to computer."""
    run, model = book.run, book.model
    length = f" of {counted(run.length, 'token')}" if run.length else ""
    yield "model", f"{model.name}{f' in {model.dtype}' if model.dtype else ''}" if model else "not said"
    yield (
        "dataset",
        counted(book.dataset.items, "text" if book.dataset.kind == "texts" else "file") if book.dataset else "not said",
    )
    yield "batch", f"{counted(run.batch_size, 'row')}{length}" if run.batch_size else "not said"
    yield "reports", ", ".join(dict.fromkeys(one.report for one in book.figures)) or "none"
    if book.hypotheses:
        yield "ruled out", counted(len(book.hypotheses), "hypothesis", "hypotheses")


def section_tables(plain: Mapping[str, Any]) -> Iterator[Table]:
    """Yield each section that holds something as a table; what is not known is left out of it.

    Args:
        plain: A logbook as mappings, or a part of one.

    Example:
        >>> [table.rows for table in section_tables({"code": {"commit": None, "changed": 2}})]
        [(('changed', '2'),)]
    """
    for name, caption in SECTIONS.items():
        rows = tuple(_rows(plain.get(name)))
        if rows:
            yield Table(caption, ("what", "value"), rows)


def _rows(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value that is known, however deep it stands."""
    if isinstance(section, Mapping):
        items: Any = ((_name(prefix, name), one) for name, one in section.items())
    elif isinstance(section, Sequence) and not isinstance(section, str):
        items = ((_name(prefix, str(number)), one) for number, one in enumerate(section, 1))
    else:
        if section is not None:
            yield prefix, YES_NO[section] if isinstance(section, bool) else str(section)
        return
    for name, one in items:
        yield from _rows(one, name)


def _name(prefix: str, name: str) -> str:
    return f"{prefix}: {name}" if prefix else name


HEADING = "# Logbook"
"""How every such file begins."""


def to_markdown(book: Logbook) -> str:
    """Return a logbook as Markdown."""
    said = [NOTE] if book.simulated else []
    said += [WARNING] if book.hypotheses else []
    parts = [f"{HEADING} on {plain(book.device)}", f"Written {book.written}, schema `{book.schema}`.", *said]
    return "\n\n".join([*parts, *map(section, section_tables(book.to_dict()))]) + "\n"


def section(table: Table) -> str:
    """Return a table with a heading.

    Example:
        >>> from openmed_nb.display import Table
        >>> print(section(Table("Code", ("what", "value"), (("changed", "2"),))))
        ## Code
        <BLANKLINE>
        | what | value |
        | --- | --- |
        | changed | 2 |
    """
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = ("| " + " | ".join(plain(cell) for cell in row) + " |" for row in rows)
    return f"## {plain(table.caption)}\n\n" + "\n".join(lines)


def plain(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in one line.

    Example:
        >>> print(plain("a|b <c> *d*"))
        a\|b &lt;c&gt; \*d\*
    """
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", escaped)


FAMILY, _, NUMBER = SCHEMA.rpartition("/")

FOR_PEOPLE = re.compile(rf"{HEADING} on [^\n]+\n\nWritten [0-9TZ:-]{{20}}, schema `{FAMILY}/[0-9]+`\.\n")
"""How a logbook for people begins."""

ANOTHER = "Pass a .json file that Logbook.save() has written."


def to_json(book: Logbook) -> str:
    """Return a logbook as JSON."""
    return json.dumps(book.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: dict[str, Callable[[Logbook], str]] = {".json": to_json, ".md": to_markdown}
"""What writes a file, by its ending."""


def save(book: Logbook, path: str | os.PathLike[str]) -> str:
    """Write a logbook in one step; as :meth:`.Logbook.save`."""
    file = given_path(path, "the file of a logbook")
    writer = WRITERS.get(file.suffix.lower())
    if writer is None:
        raise ConfigurationError(
            f"A logbook cannot be written as {file.suffix or 'a file without an ending'!r}.", "Use .json or .md."
        )
    if file.exists() and not is_logbook(file):
        raise ConfigurationError(f"{file.name!r} is there already, and no logbook.", "Use another name.")
    try:
        write_whole(file, writer(book))
    except (OSError, UnicodeEncodeError) as error:  # The latter for half a character in a logbook made by hand.
        what = f"{file.name!r} cannot be written: {cause(error)}."
        raise ConfigurationError(what, "Use a folder that is there and can be written.") from error
    return str(file)


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step, so that it is never there in part.

    Raises:
        OSError: Where it cannot be written.
    """
    real = Path(os.path.realpath(file))  # A link stays a link.
    with tempfile.TemporaryDirectory(dir=real.parent, prefix=f".{real.name[:40]}.") as aside:
        part = Path(aside) / "part"
        part.write_text(text, "utf-8")
        if real.exists():
            part.chmod(stat.S_IMODE(real.stat().st_mode))
        part.replace(real)


def is_logbook(file: Path) -> bool:
    """Tell whether a file is a logbook of any version."""
    try:
        text = file.read_text("utf-8-sig")
        return bool(FOR_PEOPLE.match(text)) or version_of(json.loads(text)) is not None
    except (OSError, ValueError, RecursionError):
        return False


def read(path: str | os.PathLike[str]) -> Logbook:
    """Return the logbook of a file; as :meth:`.Logbook.read`."""
    file = given_path(path, "the file of a logbook")
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigurationError(f"The logbook {file.name!r} cannot be read: {reason}.", ANOTHER) from error
    try:
        stored = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file.name!r} {what_else(text)}.", ANOTHER) from error
    check_schema(stored, file.name)
    try:
        book: Logbook = from_plain(Logbook, stored)
        check_names(book)
    except ValueError as error:
        what = f"{file.name!r} is no whole logbook: {cause(error)}."
        raise ConfigurationError(what, "Take it from where it came from again.") from error
    return book


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the names and values of a JSON object.

    Raises:
        ValueError: Where a name is there twice.
    """
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def check_names(book: Logbook) -> None:
    """Check that only allowed variables are in a logbook.

    Raises:
        ValueError: For others; they are not shown.
    """
    if book.environment.keys() - CLEANERS.keys():
        raise ValueError("its environment has variables that no logbook holds")


def what_else(text: str) -> str:
    """Return what a text that is no JSON is instead.

    Example:
        >>> what_else("# Logbook on cpu"), what_else('{"schema": "openmed_nb/logbook/1", "wri')
        ('is a logbook for people, which cannot be read again', 'is cut off or damaged')
    """
    if text.startswith(HEADING):
        return "is a logbook for people, which cannot be read again"
    return "is cut off or damaged" if FAMILY in text[:200] else "is no logbook"


def version_of(stored: Any) -> str | None:
    """Return the version of a logbook that was read, ``None`` where it is none.

    Example:
        >>> version_of({"schema": "openmed_nb/logbook/1"}), version_of({"schema": "openmed_nb/logbook/0"})
        ('1', None)
    """
    said = stored.get("schema") if isinstance(stored, dict) else None
    match = re.fullmatch(f"{FAMILY}/([1-9][0-9]{{0,8}})", said) if isinstance(said, str) else None
    return match[1] if match else None


def check_schema(stored: Any, name: str) -> None:
    """Check that what was read says that it is a logbook of this version.

    Raises:
        ConfigurationError: Where it says something else.
    """
    number = version_of(stored)
    if number is None:
        raise ConfigurationError(f"{name!r} is no logbook.", ANOTHER)
    if number != NUMBER:
        what = f"{name!r} is a logbook of version {number}, and this openmed_nb reads version {NUMBER}."
        raise ConfigurationError(what, "Read it with the openmed_nb that wrote it, or with a newer one.")


SCHEMA_FILE = Path(__file__).with_name("logbook.schema.json")


def logbook_schema() -> dict[str, Any]:
    """Return the schema, in the 2020-12 draft of JSON Schema.

    Example:
        >>> logbook_schema()["additionalProperties"]
        False
    """
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{SCHEMA.replace('/', ':')}",
        "title": "A logbook of openmed_nb",
        "description": "What figures were measured with. No text of a note, no secret and no name of a file is in it.",
    }
    return {**head, **schema_of(Sections)}


def schema_text() -> str:
    """Return the schema as it stands in its file."""
    return json.dumps(logbook_schema(), indent=2, ensure_ascii=False) + "\n"
