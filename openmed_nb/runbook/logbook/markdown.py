"""A logbook as Markdown: a table for each section."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...devices.simulation import NOTE
from ...errors import one_line
from .hypotheses import WARNING
from .logbook import section_tables

if TYPE_CHECKING:
    from ...interface.display import Table
    from .logbook import Logbook

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
        >>> from openmed_nb.interface.display import Table
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
