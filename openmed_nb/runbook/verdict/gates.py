"""``nb.runbook.gates``: thresholds of a verdict with their reasons, and the decision matrix."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ..._render.display import Displayable, JsonObject, Report, Table, pluralize, to_text
from ..._utils.text import describe_value
from ..._utils.validation import suggest
from ...errors import ConfigurationError
from .metrics import GATES, METRICS, Evidence, Thresholds
from .rules import EvidenceCase, build_decision_matrix

# Maximum number of characters per line of the text form, without the spaces between columns.
MAX_LINE_WIDTH = 108


class Symptom(NamedTuple):
    """A row of the table of symptoms. Code in its sentences is in backticks, as in Markdown.

    Attributes:
        topic: Heading of a group of symptoms.
        symptom: Observed behavior, or the text of the error.
        cause: Likely cause, in sentences.
        actions: What to do, in sentences with complete calls.
        guides: Pages of the documentation, as paths below ``docs`` without a suffix.
        sources: Issues with owner, repository and number, such as ``"pytorch/pytorch#77753"``.
    """

    topic: str
    symptom: str
    cause: str
    actions: Sequence[str]
    guides: Sequence[str]
    sources: Sequence[str]


SYMPTOMS = [
    Symptom(topic, **row)
    for topic, rows in json.loads(Path(__file__).with_name("symptoms.json").read_text("utf-8")).items()
    for row in rows
]


@dataclass(frozen=True, repr=False)
class Gates(Thresholds, Displayable):
    """Thresholds of a verdict, displayed with the decision matrix and a table of symptoms.

    Fractions are in [0, 1]: 0.22 is 22%.

    Raises:
        ConfigurationError: If a threshold is out of range.

    Example:
        >>> Gates(speedup=0.3).changed
        (('speedup', 0.22, 0.3),)
    """

    SCHEMA = "openmed_nb/gates/1"

    @property
    def changed(self) -> tuple[tuple[str, float, float], ...]:
        """Name, default and value of each threshold that differs from its default."""
        defaults = vars(Gates())
        return tuple((name, defaults[name], value) for name, value in vars(self).items() if value != defaults[name])

    @property
    def changes(self) -> tuple[str, ...]:
        """One sentence for each changed threshold."""
        defaults = Gates().format_values()
        values = self.format_values()
        return tuple(f"Gate changed: {name} from {defaults[name]} to {values[name]}." for name, *_ in self.changed)

    def to_dict(self) -> JsonObject:
        """Return values, changes and reasons as JSON-compatible data."""
        about = {
            name: {
                "description": GATES[name].description,
                "reason": GATES[name].reason,
                "source": GATES[name].source,
                "unit": METRICS[name].gate_unit,
                "maximum": GATES[name].maximum,
                "default": GATES[name].default,
            }
            for name in vars(self)
        }
        changed = {name: {"from": default, "to": value} for name, default, value in self.changed}
        return {"schema": self.SCHEMA, "values": dict(vars(self)), "changed": changed, "about": about}

    def to_report(self) -> Report:
        """Return the thresholds with their reasons, the decision matrix and the table of symptoms."""
        defaults = Gates().format_values()
        values = self.format_values()
        changed = {name: f"was {defaults[name]}" for name, *_ in self.changed}
        names = sorted(values, key=lambda name: name not in changed)  # Changed thresholds first.
        thresholds = tuple((name, values[name], changed.get(name, ""), GATES[name].description) for name in names)
        reasons = tuple((name, GATES[name].reason, GATES[name].source) for name in names)
        matrix = build_decision_matrix(EvidenceCase(Evidence(), vars(self)), "the first command that the verdict lists")
        rules = tuple(
            (str(number), rule.condition, rule.recommendation, rule.action, rule.reconsider_when)
            for number, rule in enumerate(matrix, 1)
        )
        symptoms = tuple(map(_symptom_cells, SYMPTOMS))
        tables = (
            Table("Thresholds", ("gate", "value", "changed", "description"), thresholds),
            Table("Reasons for the thresholds", ("gate", "reason", "source"), reasons, collapsed=True),
            Table(
                "Decision matrix: the first matching rule decides",
                ("", "condition", "recommendation", "suggested action", "what could change this"),
                rules,
                collapsed=True,
            ),
            Table(
                "Symptoms, with reports read in November 2026",
                ("symptom", "likely cause", "suggested action", "reported in"),
                symptoms,
                collapsed=True,
            ),
        )
        sentences = self.changes or (
            "All thresholds have their defaults. To change one: nb.runbook.gates(speedup=0.3).",
        )
        headline = f"Gates: {pluralize(len(thresholds), 'threshold')} and {pluralize(len(rules), 'rule')} of a verdict"
        return Report("Gates", sentences, tables, html_sentences=(headline, *sentences))

    def __str__(self) -> str:
        return to_narrow_text(self.to_report())


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`openmed_nb.verdict`, with some of them changed.

    Args:
        changed: New thresholds by name, as fractions: ``speedup=0.3`` requires 30% more speed than the CPU. The names are
            the attributes of the result. Printing the result shows all thresholds with their reasons, the decision matrix,
            and a table of symptoms with likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``. Their ``changed`` lists the thresholds that differ from the default.

    Raises:
        ConfigurationError: If a name is unknown or a threshold is out of range.

    Example:
        >>> gates(speedup=0.3).changed, gates().memory_growth
        ((('speedup', 0.22, 0.3),), 0.26)
        >>> gates(speed=0.3)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no gate 'speed'. Did you mean 'speedup'?
    """
    for name in changed:
        if name not in GATES:
            raise ConfigurationError(f"There is no gate {describe_value(name)}.", suggest(name, vars(Gates())))
    return Gates(**changed)


def _symptom_cells(row: Symptom) -> tuple[str, ...]:
    """Return the cells of a symptom as plain text. The names of repositories are short, so that the text form fits."""
    sources = ", ".join(source.rpartition("/")[2] for source in row.sources)
    return tuple(text.replace("`", "") for text in (row.symptom, row.cause, " ".join(row.actions), sources))


def to_narrow_text(report: Report) -> str:
    """Return the text of a report with long cells wrapped."""
    return to_text(replace(report, tables=tuple(map(_wrap_table, report.tables))))


def _wrap_table(table: Table) -> Table:
    """Return a table with long cells wrapped onto more rows, and an empty row after each original row."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    longest_words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    can_wrap = [max(map(len, column)) > longest for column, longest in zip(columns, longest_words, strict=True)]
    extra = (MAX_LINE_WIDTH - sum(longest_words)) // max(1, can_wrap.count(True))
    widths = [longest + extra if wraps else longest for longest, wraps in zip(longest_words, can_wrap, strict=True)]
    rows: list[tuple[str, ...]] = []
    for cells in table.rows:
        lines = (
            textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(cells, widths, strict=True)
        )
        rows += [*zip_longest(*lines, fillvalue=""), ("",) * len(cells)]
    return replace(table, rows=tuple(rows))
