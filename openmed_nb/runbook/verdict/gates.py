"""``nb.runbook.gates``: the thresholds of a verdict, each with its reason, and the decision matrix that asks for them."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..._render.display import Displayable, Report, Table, pluralize, to_text
from ..._utils.text import describe_value
from ..._utils.validation import suggest
from ...errors import ConfigurationError
from .metrics import GATES, METRICS, Evidence, Thresholds
from .rules import EvidenceCase, decision_matrix

# How many characters a line of the text form has at most, but for the spaces between columns.
WIDTH = 108

# What a person sees, the likely cause, what to look at, with which tool, and who reported it.
SYMPTOMS = json.loads(Path(__file__).with_name("symptoms.json").read_text("utf-8"))


@dataclass(frozen=True, repr=False)
class Gates(Thresholds, Displayable):
    """The thresholds of a verdict, shown with the decision matrix and a table of symptoms; shares are fractions: 0.22 is 22 %.

    Raises:
        ConfigurationError: For a value that makes no sense.

    Example:
        >>> Gates(speedup=0.3).changed
        (('speedup', 0.22, 0.3),)
    """

    SCHEMA = "openmed_nb/gates/1"

    @property
    def changed(self) -> tuple[tuple[str, float, float], ...]:
        """The thresholds that are not as they were given, with what they were and what they are."""
        was = vars(Gates())
        return tuple((name, was[name], value) for name, value in vars(self).items() if value != was[name])

    @property
    def changes(self) -> tuple[str, ...]:
        """The same as sentences; empty if nothing was changed."""
        was = Gates().shown()
        now = self.shown()
        return tuple(f"Gate changed: {name} from {was[name]} to {now[name]}." for name, *_ in self.changed)

    def to_dict(self) -> dict[str, Any]:
        """Return values, changes and reasons as plain mappings, numbers and strings, ready for JSON."""
        about = {
            name: {
                "says": GATES[name].says,
                "reason": GATES[name].reason,
                "source": GATES[name].source,
                "unit": METRICS[name].gate_unit,
                "largest": GATES[name].largest,
                "default": GATES[name].default,
            }
            for name in vars(self)
        }
        changed = {name: {"from": was, "to": now} for name, was, now in self.changed}
        return {"schema": self.SCHEMA, "values": dict(vars(self)), "changed": changed, "about": about}

    def to_report(self) -> Report:
        """Return the thresholds with their reasons, and as reference the decision matrix and the symptoms."""
        given = Gates().shown()
        shown = self.shown()
        was = {name: f"was {given[name]}" for name, *_ in self.changed}
        names = sorted(shown, key=lambda name: name not in was)  # Those that were changed come first.
        thresholds = tuple((name, shown[name], was.get(name, ""), GATES[name].says) for name in names)
        reasons = tuple((name, GATES[name].reason, GATES[name].source) for name in names)
        matrix = decision_matrix(EvidenceCase(Evidence(), vars(self)), "the first command that the verdict names")
        rules = tuple(
            (str(number), rule.condition, rule.recommendation, rule.action, rule.reconsider_when)
            for number, rule in enumerate(matrix, 1)
        )
        symptoms = tuple((symptom, cause, f"{look}: {tool}", source) for symptom, cause, look, tool, source in SYMPTOMS)
        tables = (
            Table("Thresholds", ("gate", "value", "changed", "what it says"), thresholds),
            Table("Why they are what they are", ("gate", "why", "who says so"), reasons, collapsed=True),
            Table(
                "Decision matrix: of the rules that hold, the first decides",
                ("", "when", "recommendation", "what to do", "what would change it"),
                rules,
                collapsed=True,
            ),
            Table(
                "Symptoms",
                ("symptom", "likely cause", "what to look at, and with what", "reported in"),
                symptoms,
                collapsed=True,
            ),
        )
        sentences = self.changes or ("No threshold was changed; nb.runbook.gates(speedup=0.3) changes one.",)
        headline = (
            f"Gates: the {pluralize(len(thresholds), 'threshold')} and {pluralize(len(rules), 'rule')} behind a verdict"
        )
        return Report("Gates", sentences, tables, html_sentences=(headline, *sentences))

    def __str__(self) -> str:
        return narrow_text(self.to_report())


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`verdict`, each with its reason, and some of them changed.

    Args:
        changed: New values by name, as fractions: ``speedup=0.3`` asks for 30 % more speed than the CPU has. The names are
            the attributes of the result; printing it shows all with their reasons, the decision matrix, and a table of
            symptoms with their likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``; ``changed`` says which are not as they were given.

    Raises:
        ConfigurationError: For an unknown name, and for a value that makes no sense.

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
            known = list(vars(Gates()))
            raise ConfigurationError(f"There is no gate {describe_value(name)}.", suggest(name, known))
    return Gates(**changed)


def narrow_text(report: Report) -> str:
    """Return the text of a report without long lines."""
    return to_text(replace(report, tables=tuple(map(_wrap_table, report.tables))))


def _wrap_table(table: Table) -> Table:
    """Return a table without long lines: long cells go on in the rows below, and an empty row ends each."""
    columns = list(zip(table.columns, *table.rows, strict=True))
    words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    wide = [max(map(len, column)) > longest for column, longest in zip(columns, words, strict=True)]
    more = (WIDTH - sum(words)) // max(1, sum(wide))
    widths = [longest + more if breaks else longest for longest, breaks in zip(words, wide, strict=True)]
    rows: list[tuple[str, ...]] = []
    for cells in table.rows:
        lines = (
            textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(cells, widths, strict=True)
        )
        rows += [*zip_longest(*lines, fillvalue=""), ("",) * len(cells)]
    return replace(table, rows=tuple(rows))
