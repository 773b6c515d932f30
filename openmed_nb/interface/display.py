"""All rendering and all escaping: a value describes itself as a Report, this file makes text and HTML of it.

This is the one room that every floor may use; it imports nothing else of the package. HTML made here needs no script
and no network, says the same without its style sheet (which Jupyter drops from notebooks it does not trust), and takes
its colours from the theme of the front end.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

STYLE = """<style>
.openmed-nb {color: var(--jp-content-font-color1, inherit); font-size: 0.95em; line-height: 1.5;}
.openmed-nb table {border-collapse: collapse; margin: 0.4em 0;}
.openmed-nb caption {text-align: left; font-weight: 600; color: inherit; padding: 0.2em 0; caption-side: top;}
.openmed-nb.tex2jax_ignore table th, .openmed-nb.tex2jax_ignore table td {text-align: left; vertical-align: top; padding: 0.15em 0.7em 0.15em 0;}
.openmed-nb tbody tr {border-top: 1px solid var(--jp-border-color2, #8888);}
.openmed-nb p {margin: 0.15em 0;}
.openmed-nb mark {border-radius: 3px; padding: 0 0.2em; color: #000000;}
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
class Report:
    """What a value says of itself: a title, sentences, tables, and ready-made HTML for what neither can say.

    ``figure`` is HTML whose every inserted string went through :func:`escape`; ``figure_text`` is the same as text.
    """

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figure: str = ""
    figure_text: str = ""


class Shown:
    """Gives a value its text and HTML forms; the value says what there is to show in ``report``.

    A dataclass that is shown has ``repr=False``: its fields may hold what must not be shown, such as a note.
    """

    def report(self) -> Report:
        """Return what this value has to say."""
        raise NotImplementedError

    def __str__(self) -> str:
        return to_text(self.report())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return to_html(self.report())


class Json(str):
    r"""A string of JSON that a notebook shows as it is, without quotes around it.

    Example:
        >>> Json.of({"device": "cpu"})
        '{\n  "device": "cpu"\n}'
    """

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Json:
        """Return the value, made of mappings, sequences, strings and numbers, as indented JSON."""
        return cls(json.dumps(value, indent=2, ensure_ascii=False))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))


def escape(value: object) -> str:
    """Return the value as HTML text that can stand in an element or in a quoted attribute.

    Example:
        >>> escape('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(value), quote=True)


def to_text(report: Report) -> str:
    """Return the report as plain text.

    Example:
        >>> print(to_text(Report("cpu", ("Asked for.",), (Table("Others", ("device", "why"), (("mps", "no Mac"),)),))))
        cpu
          Asked for.
        Others
          device  why
          mps     no Mac
    """
    lines = [report.title, *(f"  {sentence}" for sentence in report.sentences)]
    if report.figure_text:
        lines.append(report.figure_text)
    for table in report.tables:
        lines += [table.caption] if table.caption else []
        lines.extend(_text_rows(table))
    return "\n".join(line.rstrip() for line in lines)


def to_html(report: Report) -> str:
    """Return the report as one HTML element with its style sheet.

    Example:
        >>> to_html(Report("<cpu>")).endswith('<p><strong>&lt;cpu&gt;</strong></p></div>')
        True
    """
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences)
    tables = "".join(_html_table(table) for table in report.tables)
    title = f"<p><strong>{escape(report.title)}</strong></p>"
    return f'{STYLE}<div class="openmed-nb tex2jax_ignore">{title}{sentences}{report.figure}{tables}</div>'


def _text_rows(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
