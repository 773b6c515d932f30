"""Rendering of values as text, HTML and JSON, and the only place that escapes HTML.

A value describes itself as a Report (:mod:`.values`), and this module renders the report as text or HTML.

Every layer may use this module; it imports only charts and text helpers of the package. The HTML does not need scripts or
network access. Its inline styles are limited to those that JupyterLab preserves in an untrusted notebook
(https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts): no style sheets and no theme
variables. Text therefore has the color of the front end, elements with a background define their own text color, and output
looks similar in both themes.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from .._utils.text import escape_control_characters
from .values import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    SEVERITY,
    SIMULATED_SUFFIX,
    SIMULATION_NOTICE,
    UNITS,
    UNKNOWN,
    WARNING,
    Displayable,
    Finding,
    Json,
    JsonMixin,
    JsonObject,
    OverlappingSpan,
    Report,
    Table,
    TextSegment,
    findings_table,
    format_bytes,
    format_duration,
    format_milliseconds,
    format_percent,
    pluralize,
    to_plain_data,
    worst_status,
)

# Values that most callers use together with their rendering. Modules of ``%load_ext`` import them from ``values``.
__all__ = (
    "FAILED",
    "NOT_APPLICABLE",
    "OK",
    "SIMULATED_SUFFIX",
    "SIMULATION_NOTICE",
    "UNITS",
    "UNKNOWN",
    "WARNING",
    "Displayable",
    "Finding",
    "Json",
    "JsonMixin",
    "JsonObject",
    "OverlappingSpan",
    "Report",
    "Table",
    "TextSegment",
    "findings_table",
    "format_bytes",
    "format_duration",
    "format_milliseconds",
    "format_percent",
    "pluralize",
    "to_plain_data",
    "worst_status",
)

# Styles that JupyterLab preserves in an untrusted notebook, except tabular-nums. Without it, digits have the width of the font.
BLOCK = "line-height:1.5;overflow-wrap:break-word"  # A long checksum is not wider than the page.
HEADLINE = "margin:0 0 0.2em 0;font-size:1.15em"
DETAILS = (
    "margin:0 0 0.3em 0;font-size:0.85em;opacity:0.75"  # Gray in both themes, with a contrast of at least 4.5 to 1.
)
SENTENCE = "margin:0.1em 0"
TABLE = "margin:0.5em 0;border-collapse:collapse;font-size:1em;font-variant-numeric:tabular-nums"
CAPTION = "caption-side:top;text-align:left;font-weight:600;padding:0.2em 0"
TOP_ROW = "border:none;background:none"
ROW = "border-top:1px solid rgba(128,128,128,0.35);background:none"
CELL = "padding:0.2em 1.2em 0.2em 0;vertical-align:top"
ROW_HEADER = "font-weight:400"  # Only the headers of the columns are bold.
COLLAPSED = "margin:0.4em 0"
SUMMARY = "cursor:pointer"
TEXT = "white-space:pre-wrap;margin:0.4em 0"
SEPARATED = "border-top:1px solid rgba(128,128,128,0.35);padding:0.4em 0"
SCROLLABLE_TEXT = "max-height:30em;overflow:auto"
SCROLLABLE_TABLE = "max-width:100%;overflow:auto"
SCREEN_READER_ONLY = "font-size:0"  # The only way to hide text visually that an untrusted notebook permits.
ENTITY = "border-radius:3px;padding:0 0.25em;color:#000000"
# Paler in both themes, with a contrast of at least 4.5 to 1. The border shows it without colors.
CONTEXT = ";opacity:0.7;border:1px dashed #000000"

# Background colors of labels, with a contrast of at least 7 to 1 to black. With 13 colors, labels that often occur together have
# different colors, such as DISEASE, DRUG, GENE and ANATOMY, or PROBLEM, TREATMENT and TEST.
LABEL_COLORS = (
    "#ffc9c9",
    "#ffd8a8",
    "#99e9f2",
    "#a5d8ff",
    "#d0bfff",
    "#dee2e6",
    "#fcc2d7",
    "#c0eb75",
    "#eebefa",
    "#96f2d7",
    "#ffec99",
    "#bac8ff",
    "#b2f2bb",
)

MAX_ALIGNED_CHARACTERS = (
    50  # Maximum length of a cell of a table that is aligned in the text, except in the last column.
)
MAX_NOWRAP_CHARACTERS = 24  # Maximum length of a cell without line breaks.
MAX_UNSCROLLED_CHARACTERS = 3000  # A longer text is displayed in a box with a scroll bar.
LINE_CHARACTERS = 80  # Characters for which a line break counts then.
MAX_TABLE_CHARACTERS = 36  # Approximate width of a page on a phone; a wider table has a scroll bar if it needs one.

# One number or a range, optionally with a unit and with a percentage in parentheses.
NUMBER_PATTERN = re.compile(
    r"[-+<≈]?\d[\d.,e+-]*%?( [^\d\s]{1,12})?( to -?\d[\d.,]*%?( [^\d\s]{1,12})?)?( \([\d.,]+%\))?"
)
# A number with its unit, between which no line ends.
QUANTITY_PATTERN = re.compile(r"[\d.]+ (?:ms|s|bytes|[KMGTP]iB)\b")
# Code in a sentence: a name of the package, optionally with arguments, or a magic. It is applied to escaped text.
INLINE_CODE_PATTERN = re.compile(
    r"^%%?\w(?:[^.]|\.(?=\w))*$|(?<![\w.])(?:found = )?(?:(?:openmed_)?nb(?!\.(?:service|plist)\b)|found)(?:\.\w+)+(?:\([^()]*\))?|masked\[\d+\]|%%?openmed\w*(?: --?\w+)*"
)


def escape(value: object) -> str:
    """Return the value as escaped text for an HTML element or a quoted attribute."""
    import html  # Imported on first use, because it loads a table of a thousand entities.

    return html.escape(str(value), quote=True)


def escape_quantities(text: str) -> str:
    """Return a text as HTML in which quantities do not wrap, however narrow the page is.

    Example:
        >>> escape_quantities("cached 9.8 MiB")
        'cached <span style="white-space:nowrap">9.8 MiB</span>'
    """
    return QUANTITY_PATTERN.sub(r'<span style="white-space:nowrap">\g<0></span>', escape(text))


def to_text(report: Report) -> str:
    """Return the report as plain text.

    Example:
        >>> others = Table("Others", ("device", "reason"), (("mps", "no Mac"),))
        >>> print(to_text(Report("1 device", ("Requested.",), (others,), details="torch 2.14")))
        1 device
          torch 2.14
          Requested.
        Others
          device  reason
          mps     no Mac
    """
    lines = [report.title, *(f"  {sentence}" for sentence in filter(None, (report.details, *report.sentences)))]
    if report.segments:
        lines.append("".join(map(_text_segment, report.segments)).rstrip())
        counts: Counter[str] = Counter()
        for segment in report.segments:
            counts.update([segment.label] if segment.label else [span.label for span in segment.spans])
        labels = [f"{label} ({pluralize(count, 'entity', 'entities')})" for label, count in sorted(counts.items())]
        if labels:
            lines.append(f"Labels: {', '.join(labels)}")
    metrics = [replace(table, caption=f"{table.caption} (this run)") for table in report.metrics]
    for table in drop_empty_tables((*report.tables, *metrics)):
        if table.caption:
            lines.append(table.caption)
        lines.extend(_text_rows(table))
    return escape_control_characters("\n".join(line.rstrip() for line in lines))


def to_html(report: Report) -> str:
    """Return the report as one HTML element."""
    from .drawing import render_charts, status_badge  # Imported on first use, so that the extension loads quickly.

    badge = f"{status_badge(report.status)} " if report.status else ""
    title = f'<p style="{HEADLINE}">{badge}<strong>{escape(report.title)}</strong></p>' if report.title else ""
    details = f'<p style="{DETAILS}">{escape_quantities(report.details)}</p>' if report.details else ""
    prose = "".join(f'<p style="{SENTENCE}">{_html_prose(sentence)}</p>' for sentence in report.sentences)
    charts = render_charts(*report.charts)
    text = _html_text(report.segments) if report.segments else ""
    tables = _html_tables(report.tables)
    metrics = _html_tables(report.metrics)
    if metrics:
        metrics = f'<div class="openmed-figures">{metrics}</div>'
    content = f"{title}{details}{prose}{charts}{text}{tables}{metrics}"
    return f'<div class="openmed-nb tex2jax_ignore" style="{BLOCK}">{content}</div>'


def _html_tables(tables: Iterable[Table]) -> str:
    """Return the tables that have rows as HTML."""
    return "".join(map(_html_table, drop_empty_tables(tables)))


def _html_prose(text: str) -> str:
    """Return a text as HTML in which commands and names of the package are formatted as code."""
    return INLINE_CODE_PATTERN.sub(r"<code>\g<0></code>", escape(text))


def _html_table(table: Table) -> str:
    """Return a table as HTML, the rows with the worst status first.

    Checks that are not applicable, and passed checks next to others, are collapsed.
    """
    status_columns = [
        index for index, column in enumerate(zip(*table.rows, strict=True)) if index and set(column) <= set(SEVERITY)
    ]

    def severity(row: tuple[str, ...]) -> int:
        return max((SEVERITY.index(row[index]) for index in status_columns), default=-1)

    rows = sorted(table.rows, key=severity, reverse=True)
    worst = severity(rows[0])
    hidden = [row for row in rows if severity(row) in {SEVERITY.index(OK), SEVERITY.index(NOT_APPLICABLE)} - {worst}]
    if table.collapsed:
        return _html_collapsed(escape(table.caption), table, status_columns)
    if not hidden:
        return _html_scrollable_rows(table, status_columns)
    shown = replace(table, rows=tuple(rows[: len(rows) - len(hidden)]))
    others = replace(table, caption="", rows=tuple(hidden))
    summary = f"{pluralize(len(hidden), 'other check')}: ok or not applicable"
    return _html_scrollable_rows(shown, status_columns) + _html_collapsed(summary, others, status_columns)


def _html_collapsed(summary: str, table: Table, status_columns: list[int]) -> str:
    """Return a table as HTML below a summary that expands it.

    A wide table and its summary are in one box with a scroll bar. The keyboard reaches the box by the summary, which
    JupyterLab keeps in an untrusted notebook, unlike a tab stop.
    """
    html_table = _html_rows(table, status_columns)
    content = f'<details style="{COLLAPSED}"><summary style="{SUMMARY}">{summary}</summary>{html_table}</details>'
    return f'<div style="{SCROLLABLE_TABLE}">{content}</div>' if _is_wide(table) else content


def _html_scrollable_rows(table: Table, status_columns: list[int]) -> str:
    """Return a table as HTML, in a box with a scroll bar if it is wide."""
    html_table = _html_rows(table, status_columns)
    return _html_scrollable(SCROLLABLE_TABLE, table.caption or "Table", html_table) if _is_wide(table) else html_table


def _html_rows(table: Table, status_columns: list[int]) -> str:
    """Return a table as HTML with headers for columns and rows. Numbers are right-aligned, and statuses have a badge."""
    from .drawing import status_badge

    styles = [_cell_style(column) for column in zip(table.columns, *table.rows, strict=True)]
    head = "".join(
        f'<th scope="col" style="{style}">{escape(name)}</th>'
        for name, style in zip(table.columns, styles, strict=True)
    )
    body = []
    for row in table.rows:
        cells = [
            f"{status_badge(cell)} {cell}" if index in status_columns else _html_prose(cell)
            for index, cell in enumerate(row)
        ]
        first = f'<th scope="row" style="{styles[0]};{ROW_HEADER}">{cells[0]}</th>'
        rest = (f'<td style="{style}">{cell}</td>' for cell, style in zip(cells[1:], styles[1:], strict=True))
        body.append(f'<tr style="{ROW}">{first}{"".join(rest)}</tr>')
    caption = ""
    if table.caption and not table.collapsed:
        # A caption may be wider than its table.
        nowrap = ";white-space:nowrap" if len(table.caption) <= 2 * MAX_NOWRAP_CHARACTERS else ""
        caption = f'<caption style="{CAPTION}{nowrap}">{escape(table.caption)}</caption>'
    head = f'<thead><tr style="{TOP_ROW}">{head}</tr></thead>'
    return f'<table style="{TABLE}">{caption}{head}<tbody>{"".join(body)}</tbody></table>'


def _html_scrollable(style: str, label: str, content: str) -> str:
    """Return content in a box with a scroll bar, which the keyboard reaches and a screen reader names."""
    return f'<div role="region" aria-label="{escape(label)}" tabindex="0" style="{style}">{content}</div>'


def _is_wide(table: Table) -> bool:
    """Return whether a table may be wider than a page on a phone. Long cells are wrapped between words."""
    width = 0
    for column in zip(table.columns, *table.rows, strict=True):
        is_short = max(map(len, column)) <= MAX_NOWRAP_CHARACTERS
        width += max(max(map(len, [cell] if is_short else cell.split()), default=0) for cell in column) + 2
    return width > MAX_TABLE_CHARACTERS


def _cell_style(column: tuple[str, ...]) -> str:
    """Return the style of the cells of a column, including its header.

    Numbers, optionally with units or as ranges, are right-aligned. Short cells are not wrapped.
    """
    values = [cell for cell in column[1:] if cell]
    align = "right" if values and all(map(NUMBER_PATTERN.fullmatch, values)) else "left"
    nowrap = ";white-space:nowrap" if max(map(len, column)) <= MAX_NOWRAP_CHARACTERS else ""
    return f"{CELL};text-align:{align}{nowrap}"


def drop_empty_tables(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables that have rows, without their empty columns.

    Example:
        >>> drop_empty_tables([Table("Empty", ("a",), ()), Table("Half", ("a", "b"), (("1", ""), ("2", "")))])
        (Table(caption='Half', columns=('a',), rows=(('1',), ('2',)), collapsed=False),)
    """
    kept_tables = []
    for table in tables:
        if table.rows:
            columns = list(zip(table.columns, *table.rows, strict=True))
            kept = [column for index, column in enumerate(columns) if index == 0 or any(column[1:])]
            names, *rows = zip(*kept, strict=True)
            kept_tables.append(replace(table, columns=names, rows=tuple(rows)))
    return tuple(kept_tables)


def _html_text(segments: tuple[TextSegment, ...]) -> str:
    """Return the text as HTML with highlighted segments and their labels. Several texts are separated by lines."""
    starts = [index for index, segment in enumerate(segments) if segment.starts_text or index == 0]
    texts = ["".join(map(_html_segment, segments[start:end])) for start, end in pairwise([*starts, len(segments)])]
    style = TEXT if len(texts) == 1 else f"{TEXT};{SEPARATED}"
    html_texts = "".join(f'<div dir="auto" style="{style}">{text.rstrip()}</div>' for text in texts)
    length = sum(len(segment.text) + LINE_CHARACTERS * segment.text.count("\n") for segment in segments)
    is_long = length > MAX_UNSCROLLED_CHARACTERS
    return _html_scrollable(SCROLLABLE_TEXT, "Text", html_texts) if is_long else html_texts


def _text_segment(segment: TextSegment) -> str:
    """Return a segment as text, with the label after each span. Brackets of overlapping spans are nested or cross.

    Example:
        >>> _text_segment(TextSegment("no chest pain", spans=(OverlappingSpan(3, 13, "SIGN"), OverlappingSpan(3, 8, "BODY"))))
        'no [[chest](BODY) pain](SIGN)'
    """
    if segment.spans:
        return _bracket_spans(segment, str, _text_label)
    return f"[{segment.text}]({segment.suffix})" if segment.suffix else segment.text


def _text_label(span: OverlappingSpan) -> str:
    return f"({span.suffix})"


def _html_label(span: OverlappingSpan) -> str:
    style = f"font-weight:600;white-space:nowrap;{label_style(span.label, span.context)}"
    return f'<small style="{style}" title="{escape(_tooltip(span))}">{escape(span.suffix)}{_hidden_score(span.score)}</small>'


def _bracket_spans(
    segment: TextSegment,
    format_text: Callable[[str], str],
    format_label: Callable[[OverlappingSpan], str],
    bracket: str = "{}",
) -> str:
    """Return a segment with brackets around its overlapping spans and the label after each span."""
    num_opened = Counter(span.start for span in segment.spans)
    closed: dict[int, list[OverlappingSpan]] = {}
    for span in sorted(segment.spans, key=lambda span: -span.start):
        closed.setdefault(span.end, []).append(span)
    parts = []
    for start, end in pairwise(sorted({0, len(segment.text), *num_opened, *closed})):
        parts.append(bracket.format("[") * num_opened[start] + format_text(segment.text[start:end]))
        parts += [bracket.format("]") + format_label(span) for span in closed.get(end, ())]
    return "".join(parts)


def _tooltip(item: TextSegment | OverlappingSpan) -> str:
    return ", ".join(filter(None, (f"{item.label} {item.score}".rstrip(), item.details)))


def _hidden_score(score: str) -> str:
    """Return a score for screen readers."""
    return f'<span style="{SCREEN_READER_ONLY}"> {escape(score)}</span>' if score else ""


def _html_segment(segment: TextSegment) -> str:
    """Return a segment as HTML."""
    if segment.spans:
        # A bracket is an element like a label, because it is not a part of the text.
        return _bracket_spans(segment, escape, _html_label, '<small style="font-size:1em">{}</small>')
    text = escape(segment.text)
    if not segment.label:
        return text
    score = _hidden_score(segment.score)
    tag = ""
    if segment.suffix:
        # The space is inside the element, so that no line starts with a label.
        tag = f'<small style="font-weight:600;white-space:nowrap"> {escape(segment.suffix)}{score}</small>'
    return f'<mark style="{label_style(segment.label, segment.context)}" title="{escape(_tooltip(segment))}">{text}{tag}</mark>'


def label_style(label: str, context: str = "") -> str:
    """Return the style of a highlighted entity. The color depends on the label only, so it is always the same."""
    return f"{ENTITY};background-color:{label_color(label)}{CONTEXT if context else ''}"


def label_color(label: str) -> str:
    """Return the color of a label, which is always the same."""
    return LABEL_COLORS[zlib.crc32(label.encode(errors="replace")) % len(LABEL_COLORS)]


def _text_rows(table: Table) -> list[str]:
    """Return the header and the rows of a table as aligned text, or each row as a line if it has long cells before the last."""
    if any(len(cell) > MAX_ALIGNED_CHARACTERS for row in table.rows for cell in row[:-1]):
        return [f"  {row[0]}: {'; '.join(filter(None, row[1:]))}" for row in table.rows]
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


WIDGET_MIME_TYPE = "application/vnd.jupyter.widget-view+json"


class StaticReprMixin:
    """Mixin that adds static HTML and text to a widget, which a saved notebook stores in addition to the live widget.

    The text is the ``repr``, which is equal in every run. The HTML is a snapshot of the report at the time of display.
    """

    comm: object
    model_id: str

    _ipython_display_ = None  # Disables the text-only display of ipywidgets 7.

    def report(self) -> Report:
        """Return the current report."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        static: dict[str, object] = {"text/html": to_html(self.report()), "text/plain": repr(self)}
        if self.comm is None:  # The widget is closed.
            return static
        return {WIDGET_MIME_TYPE: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}, **static}
