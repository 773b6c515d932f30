"""Show a value as text, HTML and JSON: the one place that renders and escapes.

A value describes itself as a Report; this file makes text and HTML of it.

This is the one room that every floor may use; it imports nothing of the package but pictures and errors. HTML made here needs no script
and no network. Its styles are inline and of the few kinds that JupyterLab leaves to a notebook that it does not trust
(https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts): no style sheet, no variables of a theme.
So text has the color of the front end, what has a background also has its own ink, and both themes look alike.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from .._utils.text import escape_control_characters

if TYPE_CHECKING:
    from .drawing import Chart

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size: int | None) -> str:
    """Return a size in the units that torch uses, empty where there is none.

    Example:
        >>> format_bytes(512), format_bytes(3 << 20), format_bytes(-(5 << 30)), format_bytes(None)
        ('512 bytes', '3.0 MiB', '-5.0 GiB', '')
    """
    if size is None:
        return ""
    amount, unit = float(size), 0
    while abs(amount) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004 - what the units are
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{size} bytes"


def format_milliseconds(seconds: float, digits: int = 2) -> str:
    """Return a time in milliseconds, with so many digits after the point.

    Example:
        >>> format_milliseconds(0.0123), format_milliseconds(2.5, 0)
        ('12.30 ms', '2,500 ms')
    """
    return f"{1000 * seconds:,.{digits}f} ms"


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun; the plural is given where it does not end in a plain s.

    Example:
        >>> pluralize(1, "tensor"), pluralize(1200, "tensor"), pluralize(2, "entity", "entities")
        ('1 tensor', '1,200 tensors', '2 entities')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


@dataclass(frozen=True)
class Table:
    """A small table of strings, perhaps with a caption; the first cell of a row is the name of the row.

    Attributes:
        folded: Whether the HTML shows the caption alone until a person unfolds it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    collapsed: bool = False


@dataclass(frozen=True)
class TextSegment:
    """A piece of a running text, with the label that marks it; without a label it is plain.

    Attributes:
        score: How sure the label is; the HTML shows it to who points at the mark, and tells it to screen readers. A replacement
            has none, and one that holds its label, such as ``[NAME]``, is shown as it is.
        details: What else it shows to who points at the mark.
        begins: Whether another text begins with this piece.
    """

    text: str
    label: str = ""
    score: str = ""
    details: str = ""
    starts_text: bool = False

    @property
    def suffix(self) -> str:
        """The label that stands behind the text, empty where the text says it."""
        return self.label if self.score or self.label not in self.text else ""


@dataclass(frozen=True)
class Report:
    """What a value says of itself: a title, sentences, tables, and a running text with marks in it.

    Attributes:
        figures: Tables of times and other figures that no two runs share. They stand in the HTML; the text form leaves
            them out, so that two runs can be compared by their texts (nbval does).
        spoken: A headline and sentences as a person would say them, which the HTML has in place of title and sentences;
            empty where those will do.
        status: One of :data:`SEVERITY`, shown as a mark before the headline of the HTML; empty for none.
        pictures: Figures that the HTML draws, above all tables.
        wrong: What is not well: a sentence for each in the text form, and a row of the first table in the HTML.
    """

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    segments: tuple[TextSegment, ...] = ()
    metrics: tuple[Table, ...] = ()
    html_sentences: tuple[str, ...] = ()
    status: str = ""
    charts: tuple[Chart, ...] = ()
    problems: tuple[Finding, ...] = ()


# Stands first in everything that was measured under the simulation.
SIMULATION_NOTICE = "SIMULATED MPS: no figure here is one of MPS."

# Stands behind the name of a simulated device.
SIMULATED_SUFFIX = " (SIMULATED)"


def to_plain_data(value: Any) -> Any:
    """Return a value as mappings with names, lists, numbers and strings, ready for JSON.

    A value with a ``to_dict`` gives that; any other dataclass gives its fields. NaN and infinity, which JSON has not, are ``None``.

    Example:
        >>> to_plain_data({1: (Table("", ("a",), ()), None, float("nan"))})
        {'1': [{'caption': '', 'columns': ['a'], 'rows': [], 'collapsed': False}, None, None]}
    """
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain_data(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain_data(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_data(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonMixin:
    """Gives a dataclass its ``to_dict``: the fields, and what a class lists beside them.

    Attributes:
        SCHEMA: Names the form of the JSON for those who read it; empty for a value inside another.
        ALSO: Properties that stand in the JSON beside the fields.
        HIDDEN: Fields that do not.
        FLAT: Fields whose own ones stand in the JSON behind all others: for each the names there, and what they stand for.

    Example:
        >>> @dataclass(frozen=True)
        ... class Rows(JsonMixin):
        ...     count: int
        ...     raw: object
        ...     SCHEMA, JSON_PROPERTIES, JSON_EXCLUDE = "rows/1", ("twice",), ("raw",)
        ...     @property
        ...     def twice(self) -> int:
        ...         return 2 * self.count
        >>> Rows(4, object()).to_dict()
        {'schema': 'rows/1', 'count': 4, 'twice': 8}
    """

    SCHEMA: ClassVar[str] = ""
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ()
    JSON_EXCLUDE: ClassVar[tuple[str, ...]] = ()
    JSON_FLATTEN: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists, numbers and strings, ready for JSON."""
        own: list[str] = [one.name for one in fields(self)] if is_dataclass(self) else []
        named = [name for name in own if name not in self.JSON_EXCLUDE and name not in self.JSON_FLATTEN]
        schema = {"schema": self.SCHEMA} if self.SCHEMA else {}
        flat = [
            (name, getattr(self, one), inner)
            for one, names in self.JSON_FLATTEN.items()
            for name, inner in names.items()
        ]
        return {
            **schema,
            **{name: to_plain_data(getattr(self, name)) for name in (*named, *self.JSON_PROPERTIES)},
            **{name: to_plain_data(getattr(value, inner)) for name, value, inner in flat},
        }


class Displayable(JsonMixin):
    """Gives a value its text, HTML and JSON; the value says what there is to show in ``report``.

    A dataclass that is shown has ``repr=False``: its fields may hold what must not be shown, such as a note. One whose
    figures may come from the simulated MPS device has a field or a property ``simulated``; the marks follow from that.
    """

    def to_report(self) -> Report:
        """Return what this value has to say."""
        raise NotImplementedError

    # What a report of the simulation gets: a first sentence, and a mark of its title; empty if it says so itself.
    SIMULATION_MARKERS: ClassVar[tuple[str, str]] = (SIMULATION_NOTICE, SIMULATED_SUFFIX)

    def final_report(self) -> Report:
        """Return the report, which says so where its figures come from the simulation."""
        report = self.to_report()
        if not getattr(self, "simulated", False):
            return report
        sentence, mark = self.SIMULATION_MARKERS
        first = tuple(filter(None, (sentence,)))
        title = report.title if mark in report.title else f"{report.title}{mark}"
        headline, *rest = report.html_sentences or ("",)
        headline = headline if mark in headline else f"{headline}{mark}"
        spoken = (headline, *first, *rest) if report.html_sentences else ()
        pictures = tuple(replace(one, caption=f"{one.caption}{mark}") for one in report.charts)
        return replace(
            report, title=title, sentences=(*first, *report.sentences), html_sentences=spoken, charts=pictures
        )

    def __str__(self) -> str:
        return to_text(self.final_report())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return to_html(self.final_report())


# Styles that JupyterLab leaves to a notebook from elsewhere, but for tabular-nums: without it digits are as wide as the font has them.
BLOCK = "line-height:1.5"
HEADLINE = "margin:0 0 0.2em 0;font-size:1.15em"
SENTENCE = "margin:0.1em 0"
TABLE = "margin:0.5em 0;border-collapse:collapse;font-size:1em;font-variant-numeric:tabular-nums"
CAPTION = "caption-side:top;text-align:left;font-weight:600;padding:0.2em 0"
TOP_ROW = "border:none;background:none"
ROW = "border-top:1px solid rgba(128,128,128,0.35);background:none"
CELL = "padding:0.2em 1.2em 0.2em 0;vertical-align:top"
COLLAPSED = "margin:0.4em 0"
SUMMARY = "cursor:pointer"
TEXT = "white-space:pre-wrap"
SEPARATED = "border-top:1px solid rgba(128,128,128,0.35);padding:0.4em 0"
BOUNDED = "max-height:30em;overflow:auto"  # A long text scrolls in itself.
WIDE = "max-width:100%;overflow:auto"  # A table that is wider than a page does, too.
SCREEN_READER_ONLY = "font-size:0"  # Screen readers tell it, and eyes do not see it; no other way to do so is left to a page without trust.
ENTITY = "border-radius:3px;padding:0 0.25em;color:#000000"

# Backgrounds for labels, on which black has a contrast of at least 7 to 1. With thirteen of them, labels differ that
# often stand in one text, such as DISEASE, DRUG, GENE and ANATOMY, or PROBLEM, TREATMENT and TEST.
LABEL_COLORS = (
    *("#ffc9c9", "#ffd8a8", "#99e9f2", "#a5d8ff", "#d0bfff", "#dee2e6", "#fcc2d7"),
    *("#c0eb75", "#eebefa", "#96f2d7", "#ffec99", "#bac8ff", "#b2f2bb"),
)

MAX_NOWRAP_CHARACTERS = 24  # How many characters a cell may have that is not broken into lines.
LONG = 3000  # A running text with more characters than that scrolls in a box.
PAGE = 100  # About how many characters stand beside each other on a page.

# A number or two, with a unit, and perhaps with a share in parentheses.
NUMBER = re.compile(r"[-+<≈]?\d[\d.,e+-]*%?( [^\d\s]{1,12})?( to -?\d[\d.,]*( [^\d\s]{1,12})?)?( \([\d.,]+ ?%\))?")
# What can be typed: a name of the package, perhaps with arguments, or a magic; in text that is escaped already.
INLINE_CODE_PATTERN = re.compile(
    r"^%%?\w(?:[^.]|\.(?=\w))*$|(?<![\w.])(?:found = )?(?:(?:openmed_)?nb(?!\.(?:service|plist)\b)|found)(?:\.\w+)+(?:\([^()]*\))?|masked\[\d+\]|%%?openmed\w*(?: --?\w+)*"
)


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
    import html  # It brings a table of a thousand entities.

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
    lines = [report.title, *(f"  {sentence}" for sentence in (*report.sentences, *report.problems))]
    if report.segments:
        marked = (f"[{piece.text}]({piece.suffix})" if piece.suffix else piece.text for piece in report.segments)
        counts = ", ".join(f"{label} {count}" for label, count in count_labels(report.segments).items())
        lines += ["".join(marked).rstrip(), *([f"Labels: {counts}"] if counts else [])]
    for table in drop_empty_tables(report.tables):
        lines += [table.caption] if table.caption else []
        lines.extend(_text_rows(table))
    return escape_control_characters("\n".join(line.rstrip() for line in lines))


def to_html(report: Report) -> str:
    """Return the report as one HTML element."""
    from .drawing import render_charts, status_badge  # Nothing is drawn where the extension is loaded.

    headline, *sentences = report.html_sentences or (report.title, *report.sentences)
    first = f"{status_badge(report.status)} " if report.status else ""
    title = f'<p style="{HEADLINE}">{first}<strong>{escape(headline)}</strong></p>' if headline else ""
    prose = "".join(f'<p style="{SENTENCE}">{_html_prose(sentence)}</p>' for sentence in sentences)
    pictures, text = render_charts(*report.charts), _html_text(report.segments) if report.segments else ""
    all_tables = (findings_table("", report.problems), *report.tables)
    tables, figures = ("".join(map(_html_table, drop_empty_tables(some))) for some in (all_tables, report.metrics))
    figures = f'<div class="openmed-figures">{figures}</div>' if figures else ""
    return (
        f'<div class="openmed-nb tex2jax_ignore" style="{BLOCK}">{title}{prose}{pictures}{text}{tables}{figures}</div>'
    )


def _html_prose(text: str) -> str:
    """Return a text in which everything that can be typed is set as code."""
    return INLINE_CODE_PATTERN.sub(r"<code>\g<0></code>", escape(text))


def _html_table(table: Table) -> str:
    """Return a table as HTML: the worst first, what is well beside it and what does not apply folded up, what is not known in a line."""
    from .drawing import status_badge

    results = [at for at, column in enumerate(zip(*table.rows, strict=True)) if at and set(column) <= set(SEVERITY)]

    def severity(row: tuple[str, ...]) -> int:
        return max((SEVERITY.index(row[at]) for at in results), default=-1)

    rows = sorted(table.rows, key=severity, reverse=True)
    idle = [row for row in rows if severity(row) == SEVERITY.index(NOT_APPLICABLE)]
    fine = [row for row in rows if severity(row) == SEVERITY.index(OK) < severity(rows[0])]
    unknown = [row for row in rows if set(row[1:]) == {UNKNOWN}]
    rest = tuple(row for row in rows if row not in (*fine, *idle, *unknown))
    if table.collapsed or not (rest or unknown):
        shown = _html_rows(table, results)
        return _html_folded(escape(table.caption), shown) if table.collapsed else shown
    asides = (
        (OK, f"{pluralize(len(fine), 'check')} {'is' if len(fine) == 1 else 'are'} ok", fine),
        (NOT_APPLICABLE, f"{pluralize(len(idle), 'check')} {'does' if len(idle) == 1 else 'do'} not apply here", idle),
    )
    folded = (
        _html_folded(f"{status_badge(status)} {summary}", _html_rows(replace(table, caption="", rows=tuple(some)), []))
        for status, summary, some in asides
        if some
    )
    names = escape(", ".join(row[0] for row in unknown))
    line = f'<p style="{COLLAPSED}">{status_badge(NOT_APPLICABLE)} Not known here: {names}</p>' if unknown else ""
    return "".join((_html_rows(replace(table, rows=rest), results) if rest else "", *folded, line))


def _html_folded(summary: str, content: str) -> str:
    return f'<details style="{COLLAPSED}"><summary style="{SUMMARY}">{summary}</summary>{content}</details>'


def _html_rows(table: Table, results: list[int]) -> str:
    """Return a table as HTML, with headers for its columns and rows; numbers stand to the right, results have their sign."""
    from .drawing import status_badge

    styles = [_cell_style(column) for column in zip(table.columns, *table.rows, strict=True)]
    head = "".join(
        f'<th scope="col" style="{style}">{escape(name)}</th>'
        for name, style in zip(table.columns, styles, strict=True)
    )
    body = []
    for row in table.rows:
        cells = [f"{status_badge(cell)} {cell}" if at in results else _html_prose(cell) for at, cell in enumerate(row)]
        first = f'<th scope="row" style="{styles[0]}">{cells[0]}</th>'
        rest = (f'<td style="{style}">{cell}</td>' for cell, style in zip(cells[1:], styles[1:], strict=True))
        body.append(f'<tr style="{ROW}">{first}{"".join(rest)}</tr>')
    line = (
        ";white-space:nowrap" if len(table.caption) <= 2 * MAX_NOWRAP_CHARACTERS else ""
    )  # A heading may go beyond its columns.
    caption = (
        ""
        if table.collapsed or not table.caption
        else f'<caption style="{CAPTION}{line}">{escape(table.caption)}</caption>'
    )
    head = f'<thead><tr style="{TOP_ROW}">{head}</tr></thead>'
    made = f'<table style="{TABLE}">{caption}{head}<tbody>{"".join(body)}</tbody></table>'
    return f'<div style="{WIDE}">{made}</div>' if _least_width(table) > PAGE else made


def _least_width(table: Table) -> int:
    """Return about how many characters a table needs beside each other: cells are broken between words, and short ones are not."""
    width = 0
    for column in zip(table.columns, *table.rows, strict=True):
        whole = max(map(len, column)) <= MAX_NOWRAP_CHARACTERS
        width += max(max(map(len, [cell] if whole else cell.split()), default=0) for cell in column) + 2
    return width


def _cell_style(column: tuple[str, ...]) -> str:
    """Return the style of the cells of a column, which begins with its header; short cells stay in one line."""
    align = "right" if is_numeric(column[1:]) else "left"
    return f"{CELL};text-align:{align}" + (
        ";white-space:nowrap" if max(map(len, column)) <= MAX_NOWRAP_CHARACTERS else ""
    )


def is_numeric(cells: Iterable[str]) -> bool:
    """Tell whether a column holds numbers, perhaps with units or as ranges; empty cells do not count.

    Example:
        >>> is_numeric(["1,024", "", "3.1 MiB", "1.4 to 1.88"]), is_numeric(["12 %", "no limit"]), is_numeric([""])
        (True, False, False)
    """
    there = [cell for cell in cells if cell]
    return bool(there) and all(map(NUMBER.fullmatch, there))


def count_labels(pieces: Iterable[TextSegment]) -> dict[str, int]:
    """Return the labels of a running text in alphabetical order, each with how often it occurs."""
    return dict(sorted(Counter(piece.label for piece in pieces if piece.label).items()))


def drop_empty_tables(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables that have rows, without the columns that are empty throughout.

    Example:
        >>> drop_empty_tables([Table("Empty", ("a",), ()), Table("Half", ("a", "b"), (("1", ""), ("2", "")))])
        (Table(caption='Half', columns=('a',), rows=(('1',), ('2',)), collapsed=False),)
    """
    return tuple(_without_empty_columns(table) for table in tables if table.rows)


def _without_empty_columns(table: Table) -> Table:
    kept = [index for index in range(len(table.columns)) if index == 0 or any(row[index] for row in table.rows)]
    columns = tuple(table.columns[index] for index in kept)
    return replace(table, columns=columns, rows=tuple(tuple(row[index] for index in kept) for row in table.rows))


def _html_text(pieces: tuple[TextSegment, ...]) -> str:
    """Return the text with its marks, each of which names its label; several texts stand below each other with lines between."""
    starts = [place for place, piece in enumerate(pieces) if piece.starts_text or not place]
    texts = ["".join(map(_html_piece, pieces[a:b])) for a, b in pairwise([*starts, len(pieces)])]
    style = TEXT if len(texts) == 1 else f"{TEXT};{SEPARATED}"
    shown = "".join(f'<div dir="auto" style="{style}">{text.rstrip()}</div>' for text in texts)
    long = sum(len(piece.text) for piece in pieces) > LONG
    return f'<div style="{BOUNDED}">{shown}</div>' if long else shown


def _html_piece(piece: TextSegment) -> str:
    if not piece.label:
        return escape(piece.text)
    says = ", ".join(filter(None, (f"{piece.label} {piece.score}".rstrip(), piece.details)))
    heard = f'<span style="{SCREEN_READER_ONLY}"> {escape(piece.score)}</span>' if piece.score else ""
    # The space is inside: no line begins with a label.
    tag = piece.suffix and f'<small style="font-weight:600;white-space:nowrap"> {escape(piece.suffix)}{heard}</small>'
    return f'<mark style="{label_style(piece.label)}" title="{escape(says)}">{escape(piece.text)}{tag}</mark>'


def label_style(label: str) -> str:
    """Return the style of a marked entity: its label alone decides on the color, so that it is the same everywhere."""
    return f"{ENTITY};background-color:{LABEL_COLORS[zlib.crc32(label.encode(errors='replace')) % len(LABEL_COLORS)]}"


def _text_rows(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


OK = "ok"
WARNING = "warning"
FAILED = "failed"
NOT_APPLICABLE = "not applicable"

# What a figure says that could not be measured.
UNKNOWN = "not known"

# From the mildest to the worst.
SEVERITY = (NOT_APPLICABLE, OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding(JsonMixin):
    """One thing that was looked at.

    Attributes:
        name: What was looked at, in a few words.
        status: ``"ok"``, ``"warning"``, ``"failed"`` or ``"not applicable"``.
        evidence: What was seen, in words that are the same in every run; never a time.
        remedy: One thing to do, as a sentence; empty where nothing is wrong.
        details: What else is known of it, for who wants to know more.
    """

    name: str
    status: str
    evidence: str
    remedy: str = ""
    details: str = ""

    def __str__(self) -> str:
        """Return it as a line that can be read alone."""
        return f"{self.name}, {self.status}: {self.evidence.rstrip('.')}. {self.remedy}".rstrip()


def worst_status(findings: Iterable[Finding]) -> str:
    """Return the worst status of findings."""
    return max((one.status for one in findings), key=SEVERITY.index, default=NOT_APPLICABLE)


def findings_table(caption: str, findings: Iterable[Finding]) -> Table:
    """Return findings as a table."""
    rows = tuple((one.name, one.status, one.evidence, one.remedy) for one in findings)
    return Table(caption, ("check", "result", "evidence", "what to do"), rows)


VIEW = "application/vnd.jupyter.widget-view+json"


class StaticReprMixin:
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
