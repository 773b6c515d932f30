"""Show a value as text, HTML and JSON: the one place that renders and escapes.

A value describes itself as a Report; this file makes text and HTML of it.

This is the one room that every floor may use; it imports nothing of the package but the errors. HTML made here needs no script
and no network, says the same without its style sheet (which Jupyter drops from notebooks it does not trust), and takes
its colours from the theme of the front end.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

from .errors import visible

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_bytes(size: int | None) -> str:
    """Return a size in the units that torch uses, empty where there is none.

    Example:
        >>> in_bytes(512), in_bytes(3 << 20), in_bytes(-(5 << 30)), in_bytes(None)
        ('512 bytes', '3.0 MiB', '-5.0 GiB', '')
    """
    if size is None:
        return ""
    amount, unit = float(size), 0
    while abs(amount) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004 - what the units are
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{size} bytes"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun; the plural is given where it does not end in a plain s.

    Example:
        >>> counted(1, "tensor"), counted(1200, "tensor"), counted(2, "entity", "entities")
        ('1 tensor', '1,200 tensors', '2 entities')
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


# How many colours the style sheet has for labels.
COLOURS = 6

STYLE = """<style>
.openmed-nb {color: var(--jp-content-font-color1, inherit); line-height: 1.5;}
.openmed-nb.tex2jax_ignore table {border-collapse: collapse; margin: 0.4em 0; font-size: 1em;}
.openmed-nb caption {text-align: left; font-weight: 600; color: inherit; padding: 0.2em 0; caption-side: top;}
.openmed-nb.tex2jax_ignore table th, .openmed-nb.tex2jax_ignore table td {text-align: left; vertical-align: top; padding: 0.15em 0.7em 0.15em 0;}
.openmed-nb tbody tr {border-top: 1px solid var(--jp-border-color2, #8888);}
.openmed-nb p {margin: 0.15em 0;}
.openmed-nb mark {border-radius: 3px; box-decoration-break: clone; -webkit-box-decoration-break: clone; padding: 0 0.2em; color: #000000;}
.openmed-nb mark small {font-weight: 600;}
.openmed-nb .openmed-colour-0 {background: #ffd8a8;} .openmed-nb .openmed-colour-1 {background: #a5d8ff;}
.openmed-nb .openmed-colour-2 {background: #b2f2bb;} .openmed-nb .openmed-colour-3 {background: #eebefa;}
.openmed-nb .openmed-colour-4 {background: #ffec99;} .openmed-nb .openmed-colour-5 {background: #c3fae8;}
</style>"""


@dataclass(frozen=True)
class Table:
    """A small table of strings, perhaps with a caption; the first cell of a row is the name of the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A piece of a running text, with the label and the details that mark it; without a label it is plain."""

    text: str
    label: str = ""
    details: str = ""


@dataclass(frozen=True)
class Report:
    """What a value says of itself: a title, sentences, tables, and a running text with marks in it.

    Attributes:
        figures: Tables of times and other figures that no two runs share. They stand in the HTML; the text form leaves
            them out, so that two runs can be compared by their texts (nbval does).
    """

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pieces: tuple[Piece, ...] = ()
    figures: tuple[Table, ...] = ()


# Stands first in everything that was measured under the simulation.
NOTE = "SIMULATED MPS: no figure here is one of MPS."

# Stands behind the name of a simulated device.
MARK = " (SIMULATED)"


def plain(value: Any) -> Any:
    """Return a value as mappings with names, lists, numbers and strings, ready for JSON.

    A value with a ``to_dict`` gives that; any other dataclass gives its fields.

    Example:
        >>> plain({1: (Table("", ("a",), ()), None)})
        {'1': [{'caption': '', 'columns': ['a'], 'rows': []}, None]}
    """
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple, set, frozenset)) else value


class Plain:
    """Gives a dataclass its ``to_dict``: the fields, and what a class lists beside them.

    Attributes:
        SCHEMA: Names the form of the JSON for those who read it; empty for a value inside another.
        ALSO: Properties that stand in the JSON beside the fields.
        HIDDEN: Fields that do not.

    Example:
        >>> @dataclass(frozen=True)
        ... class Rows(Plain):
        ...     count: int
        ...     raw: object
        ...     SCHEMA, ALSO, HIDDEN = "rows/1", ("twice",), ("raw",)
        ...     @property
        ...     def twice(self) -> int:
        ...         return 2 * self.count
        >>> Rows(4, object()).to_dict()
        {'schema': 'rows/1', 'count': 4, 'twice': 8}
    """

    SCHEMA: ClassVar[str] = ""
    ALSO: ClassVar[tuple[str, ...]] = ()
    HIDDEN: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists, numbers and strings, ready for JSON."""
        own: list[str] = [one.name for one in fields(self)] if is_dataclass(self) else []
        named = [name for name in own if name not in self.HIDDEN]
        schema = {"schema": self.SCHEMA} if self.SCHEMA else {}
        return {**schema, **{name: plain(getattr(self, name)) for name in (*named, *self.ALSO)}}


class Shown(Plain):
    """Gives a value its text, HTML and JSON; the value says what there is to show in ``report``.

    A dataclass that is shown has ``repr=False``: its fields may hold what must not be shown, such as a note. One whose
    figures may come from the simulated MPS device has a field or a property ``simulated``; the marks follow from that.
    """

    def report(self) -> Report:
        """Return what this value has to say."""
        raise NotImplementedError

    # What a report of the simulation gets: a first sentence, and a mark of its title; empty if it says so itself.
    WHEN_SIMULATED: ClassVar[tuple[str, str]] = (NOTE, MARK)

    def marked(self) -> Report:
        """Return the report, which says so where its figures come from the simulation."""
        report = self.report()
        if not getattr(self, "simulated", False):
            return report
        sentence, mark = self.WHEN_SIMULATED
        title = report.title if mark in report.title else f"{report.title}{mark}"
        return replace(report, title=title, sentences=(*filter(None, (sentence,)), *report.sentences))

    def __str__(self) -> str:
        return to_text(self.marked())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return to_html(self.marked())


class Json(str):
    r"""A string of JSON that a notebook shows as it is, without quotes around it."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Json:
        """Return the value, made of mappings, sequences, strings and numbers, as indented JSON."""
        return cls(json.dumps(value, indent=2, ensure_ascii=False))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def escape(value: object) -> str:
    """Return the value as HTML text that can stand in an element or in a quoted attribute."""
    return html.escape(str(value), quote=True)


def to_text(report: Report) -> str:
    """Return the report as plain text.

    Example:
        >>> print(to_text(Report("cpu", ("Asked for.",), tables=(Table("Others", ("device", "why"), (("mps", "no Mac"),)),))))
        cpu
          Asked for.
        Others
          device  why
          mps     no Mac
    """
    lines = [report.title, *(f"  {sentence}" for sentence in report.sentences)]
    if report.pieces:
        marked = (f"[{piece.text}]({piece.label})" if piece.label else piece.text for piece in report.pieces)
        counts = ", ".join(f"{label} {count}" for label, count in labels(report.pieces).items())
        lines += ["".join(marked).rstrip(), *([f"Labels: {counts}"] if counts else [])]
    for table in filled(report.tables):
        lines += [table.caption] if table.caption else []
        lines.extend(_text_rows(table))
    return visible("\n".join(line.rstrip() for line in lines))


def to_html(report: Report) -> str:
    """Return the report as one HTML element with its style sheet."""
    return STYLE + html_element(report)


def html_element(report: Report) -> str:
    """Return the report as one HTML element, for a page on which the style sheet stands once."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences)
    tables = "".join(_html_table(table) for table in filled(report.tables))
    figures = "".join(_html_table(table) for table in filled(report.figures))
    figures = f'<div class="openmed-figures">{figures}</div>' if figures else ""
    title = f"<p><strong>{escape(report.title)}</strong></p>"
    text = _html_text(report.pieces) if report.pieces else ""
    return f'<div class="openmed-nb tex2jax_ignore">{title}{sentences}{text}{tables}{figures}</div>'


def _html_table(table: Table) -> str:
    """Return a table as HTML, with its caption and with headers for its columns and rows."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def labels(pieces: Iterable[Piece]) -> dict[str, int]:
    """Return the labels of a running text in alphabetical order, each with how often it occurs."""
    return dict(sorted(Counter(piece.label for piece in pieces if piece.label).items()))


def filled(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables that have rows, without the columns that are empty throughout.

    Example:
        >>> filled([Table("Empty", ("a",), ()), Table("Half", ("a", "b"), (("1", ""), ("2", "")))])
        (Table(caption='Half', columns=('a',), rows=(('1',), ('2',))),)
    """
    return tuple(_without_empty_columns(table) for table in tables if table.rows)


def _without_empty_columns(table: Table) -> Table:
    kept = [index for index in range(len(table.columns)) if index == 0 or any(row[index] for row in table.rows)]
    columns = tuple(table.columns[index] for index in kept)
    return Table(table.caption, columns, tuple(tuple(row[index] for index in kept) for row in table.rows))


def _html_text(pieces: tuple[Piece, ...]) -> str:
    """Return the text with its marks, and a legend; each label keeps one colour."""
    found = labels(pieces)
    colours = {label: f"openmed-colour-{index % COLOURS}" for index, label in enumerate(found)}
    text = "".join(_html_piece(piece, colours.get(piece.label, "")) for piece in pieces)
    marks = (f'<mark class="{colours[label]}">{escape(label)}</mark> {count}' for label, count in found.items())
    legend = f"<p>Labels: {', '.join(marks)}</p>" if found else ""
    return f'<div dir="auto" style="white-space: pre-wrap">{text}</div>{legend}'


def _html_piece(piece: Piece, colour: str) -> str:
    if not piece.label:
        return escape(piece.text)
    label, details = escape(piece.label), escape(piece.details)
    content = f"{escape(piece.text)} <small>{label}</small>"
    return f'<mark class="{colour}" title="{label} {details}">{content}</mark>'


def _text_rows(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


OK = "ok"
WARNING = "warning"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"

# From the mildest to the worst.
SEVERITY = (NOT_APPLICABLE, OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding(Plain):
    """One thing that was looked at.

    Attributes:
        name: What was looked at, in a few words.
        status: ``"ok"``, ``"warning"``, ``"failed"`` or ``"not applicable"``.
        evidence: What was seen, in words that are the same in every run; never a time.
        remedy: One thing to do, as a sentence; empty where nothing is wrong.
    """

    name: str
    status: str
    evidence: str
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst status of findings."""
    return max((one.status for one in findings), key=SEVERITY.index, default=NOT_APPLICABLE)


def findings_table(caption: str, findings: Iterable[Finding]) -> Table:
    """Return findings as a table."""
    rows = tuple((one.name, one.status, one.evidence, one.remedy) for one in findings)
    return Table(caption, ("check", "result", "evidence", "what to do"), rows)


VIEW = "application/vnd.jupyter.widget-view+json"


class StaticForm:
    """Gives a widget an HTML and a text form beside the live one; they are what a saved notebook keeps.

    Its text is its ``repr``, which does not change between runs; its HTML is the report of the moment in which it is shown.
    """

    comm: Any
    model_id: str

    _ipython_display_ = None  # ipywidgets 7 shows itself with it, in text only; IPython passes over None.

    def report(self) -> Report:
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = {"text/html": to_html(self.report()), "text/plain": repr(self)}
        if self.comm is None:  # It is closed.
            return static
        return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}, **static}
