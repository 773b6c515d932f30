"""The verdict and the gates that it asks for: one recommendation, the figures that led to it, what would change it, and what is not known. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...display import MARK, Plain, Report, Shown, Table, to_text
from ...errors import ConfigurationError, offered, shorten
from ..logbook.sections import ReportFigures, numbers
from .evidence import INFERENCE, Evidence, evidence_of
from .gates import DEFAULTS, UNITS, Thresholds, in_unit
from .rules import (
    FALL_BACK,
    LEANING,
    MATRIX,
    MEASURING,
    RANKS,
    RULES,
    STAYING,
    Case,
    Figures,
    Requirement,
    VerdictRule,
)

# How many characters a line of the text form has at most, but for the spaces between columns.
WIDTH = 108

# What a person sees, the likely cause, what to look at, with which tool, and who reported it.
SYMPTOMS = json.loads(Path(__file__).with_name("symptoms.json").read_text("utf-8"))


class Gates(Thresholds, Shown):
    """The thresholds of a verdict, shown with the decision matrix and a table of symptoms; see :class:`.gates.Thresholds`."""

    def report(self) -> Report:
        """Return the thresholds with their reasons, and as reference the decision matrix and the symptoms."""
        were = {name: f"was {in_unit(UNITS[name], was)}" for name, was, _ in self.changed}
        thresholds = tuple(
            (
                one.name,
                self.shown()[one.name],
                were.get(one.name, ""),
                *(one.metadata[name] for name in ("says", "reason", "source")),
            )
            for one in fields(self)
        )
        rules = tuple((str(number), *rule.row(self.shown())) for number, rule in enumerate(MATRIX, 1))
        symptoms = tuple((symptom, cause, f"{look}: {tool}", source) for symptom, cause, look, tool, source in SYMPTOMS)
        matrix = "Decision matrix: of the rules that hold, the first decides"
        tables = (
            Table("Thresholds", ("gate", "value", "changed", "what it says", "why", "who says so"), thresholds),
            Table(matrix, ("", "when", "recommendation", "what to do", "what would change it"), rules),
            Table("Symptoms", ("symptom", "likely cause", "what to look at, and with what", "reported in"), symptoms),
        )
        sentences = self.changes or ("No threshold was changed; nb.runbook.gates(speed_up=0.3) changes one.",)
        return Report("Gates", sentences, tables)

    def __str__(self) -> str:
        report = self.report()
        return to_text(replace(report, tables=tuple(map(narrow, report.tables))))


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`verdict`, each with its reason, and some of them changed.

    Args:
        changed: New values by name, as fractions: ``speed_up=0.3`` asks for 30 % more speed than the CPU has. The names are
            the attributes of the result; printing it shows all with their reasons, the decision matrix, and a table of
            symptoms with their likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``; ``changed`` says which are not as they were given.

    Raises:
        ConfigurationError: For an unknown name, and for a value that makes no sense.

    Example:
        >>> gates(speed_up=0.3).changed, gates().memory_growth
        ((('speed_up', 0.22, 0.3),), 0.26)
        >>> gates(speedup=0.3)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no gate 'speedup'. Did you mean 'speed_up'?
    """
    for name in changed:
        if name not in DEFAULTS:
            raise ConfigurationError(f"There is no gate {shorten(name)!r}.", offered(name, DEFAULTS))
    return Gates(**changed)


def narrow(table: Table) -> Table:
    """Return a table without long lines: long cells go on in the rows below, and an empty row ends each.

    Example:
        >>> narrow(Table("", ("a", "b"), (("1", "word " * 23),))).rows
        (('1', 'word word word word word word word word word word word word word word word word word word word word word'),\
 ('', 'word word'), ('', ''))
    """
    columns = list(zip(table.columns, *table.rows, strict=True))
    words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    wide = [max(map(len, column)) > longest for column, longest in zip(columns, words, strict=True)]
    more = (WIDTH - sum(words)) // max(1, sum(wide))
    widths = [longest + more if breaks else longest for longest, breaks in zip(words, wide, strict=True)]
    rows = (
        row
        for cells in table.rows
        for row in (*zip_longest(*map(broken, cells, widths), fillvalue=""), ("",) * len(cells))
    )
    return replace(table, rows=tuple(rows))


def broken(cell: str, width: int) -> list[str]:
    """Return a cell as lines, broken between words."""
    return textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


LOGIC_ONLY = "The evidence is simulated: this shows how a verdict is reached, and says nothing of MPS."

# What is said with a verdict, if a value makes it true; it stands in the braces.
CAUTIONS: tuple[tuple[Callable[[Case], Any], str], ...] = (
    (
        lambda case: case.evidence.refused_dtype,
        "The model does not keep its entities in {0}: use float32.",
    ),
    (
        lambda case: ", ".join(case.evidence.silent_errors or ()),
        "Known silent errors were seen on this device ({0}); nb.doctor() says what to avoid.",
    ),
    (
        lambda case: ", ".join(case.evidence.models or ()) if len(case.evidence.models or ()) > 1 else "",
        "The reports call the model {0}: make sure that it is one.",
    ),
    (
        lambda case: case.evidence.task == INFERENCE and case.on_accelerator and not case.numbers_are_known(),
        "Parity of a module of your own is not known: compare its outputs on both devices with torch.testing.assert_close.",
    ),
    (
        lambda case: bool(case.known("synchronisations")) and not case.synchronises(),
        "A step waits for the device in lines that nb.runbook.profile(...) names; that costs little while the device is busy.",
    ),
    (
        lambda case: speed_up_may_be(case.evidence, 1.0),
        "No difference in speed from the CPU was shown.",
    ),
    (
        lambda case: speed_up_may_be(case.evidence, 1 + case.gates.speed_up),
        "The speed-up may be on either side of its gate: more pairs would tell.",
    ),
)


def speed_up_may_be(evidence: Evidence, value: float) -> bool:
    """Tell whether the interval of the speed-up holds a value."""
    low, high = evidence.speed_up_low, evidence.speed_up_high
    return low is not None and high is not None and low <= value <= high


@dataclass(frozen=True)
class Reason(Plain):
    """A recommendation with all that speaks for it.

    Attributes:
        recommendation: What is recommended.
        rank: Where it stands in the order of precedence.
        when: What holds, as sentences.
        figures: The figures, each with its gate.
        do: What to do.
        change: What would change it.
    """

    HIDDEN, ALSO = ("rank",), ("area",)

    recommendation: str
    rank: int
    when: tuple[str, ...]
    figures: Figures
    do: tuple[str, ...]
    change: tuple[str, ...]

    @property
    def area(self) -> str:
        """What it is about: ``"numbers"``, ``"memory"``, ``"data"``, ``"batch"``, ``"fallbacks"`` or ``"speed"``."""
        return RANKS[self.rank]


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """One recommendation, with what led to it.

    Attributes:
        evidence: What was measured.
        gates: The thresholds.
        reasons: The recommendations that have reasons, in order of precedence; the first is the verdict.
        unknown: What matters and was not measured.

    Example:
        >>> verdict = judge(Evidence(device="mps", task="annotation", entity_agreement=0.9))
        >>> verdict.recommendation, verdict.sure, [figure.value for figure in verdict.reason.figures]
        ('compute on the CPU', True, [0.9])
    """

    SCHEMA, HIDDEN = "openmed_nb/verdict/1", ("unknown",)
    ALSO = ("recommendation", "sure", "simulated", "states", "cautions")

    evidence: Evidence
    gates: Gates
    reasons: tuple[Reason, ...]
    unknown: tuple[Requirement, ...]

    @property
    def reason(self) -> Reason:
        """Why it is recommended."""
        return self.reasons[0]

    @property
    def recommendation(self) -> str:
        """What is recommended, such as ``"stay on this device"``; :func:`openmed_nb.verdict` lists all."""
        return self.reason.recommendation

    @property
    def others(self) -> tuple[Reason, ...]:
        """The other recommendations that also have reasons, in order, each with its first."""
        firsts = {one.recommendation: one for one in reversed(self.reasons)}
        return tuple(one for one in self.reasons[1:] if firsts[one.recommendation] is one)

    @property
    def before(self) -> tuple[Requirement, ...]:
        """What was not measured and could lead to another verdict, because it goes before this one or with it."""
        return tuple(one for one in self.unknown if one.needed and one.rank <= self.reason.rank)

    @property
    def sure(self) -> bool:
        """Whether nothing that was not measured could lead to another verdict, and nothing is simulated."""
        return not (self.before or self.simulated)

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence is from a simulated device."""
        return self.evidence.simulated

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the computer that spoil times."""
        return self.evidence.states or ()

    @property
    def cautions(self) -> tuple[str, ...]:
        """What else to know."""
        case = Case(self.evidence, self.gates)
        return tuple(sentence.format(value) for read, sentence in CAUTIONS if (value := read(case)))

    @property
    def not_known(self) -> tuple[str, ...]:
        """What was not measured, with how to; first what could lead to another verdict."""
        later = tuple(one for one in self.unknown if one not in self.before)
        return (
            *(f"Not known, and may change the verdict: {one.name}; run {one.command}." for one in self.before),
            *(f"Not known: {one.name}; run {one.command}." for one in later),
        )

    @property
    def title(self) -> str:
        """The recommendation in one line; operators that shall fall back are named."""
        device = self.evidence.device or "a device that is not known"
        operators = (*(self.evidence.refused_operators or ()), *(self.evidence.fallback_operators or ()))
        named = f": {', '.join(operators)}" if self.recommendation == FALL_BACK and operators else ""
        return f"Verdict on {device}{MARK if self.simulated else ''}: {self.recommendation}{named}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON."""
        unknown = [
            {"name": one.name, "command": one.command, "goes_before": one in self.before} for one in self.unknown
        ]
        return {**super().to_dict(), "not_known": unknown}

    def report(self) -> Report:
        """Return the recommendation with its reasons; the figures are among the figures."""
        reason, figures = self.reason, "; ".join(figure.words for figure in self.reason.figures)
        sentences = (
            *((LOGIC_ONLY,) if self.simulated else ()),
            f"Why: {'; '.join(reason.when)}.",
            *((f"Figures: {figures}.",) if figures else ()),
            f"What to do: {' '.join(reason.do)}",
            f"What would change it: {' '.join(reason.change)}",
            *self.not_known,
            *(f"Beside it: {state}" for state in self.states),
            *self.cautions,
            *self.gates.changes,
        )
        others = tuple((one.recommendation, *map("; ".join, (one.when, one.do))) for one in self.others)
        table = Table("Other recommendations that have reasons", ("recommendation", "because", "what to do"), others)
        led = tuple(
            (figure.row[0], one.recommendation, *figure.row[1:]) for one in self.reasons for figure in one.figures
        )
        rest = tuple(row for row in self.evidence.rows() if row[0] not in {row[0] for row in led})
        tables = (
            Table("What led to it", ("figure", "speaks for", "value", "gate", "threshold"), led),
            Table("What else was measured", ("figure", "value"), rest),
        )
        return Report(self.title, sentences, (table,), figures=tables)

    def logbook_figures(self) -> ReportFigures:
        """Return what a logbook keeps of it: the numbers among its evidence."""
        here = self.evidence
        values = numbers({**here.measured, "reasons": len(self.reasons), "not_known": len(self.unknown)})
        subject = here.task or "computer"
        return ReportFigures("verdict", subject, here.device, self.recommendation, self.simulated, values)


def verdict(*reports: Any, gates: Gates | None = None, task: str | None = None, texts: int | None = None) -> Verdict:
    """Join reports into one recommendation: what to do about this device, with the figures that led to it.

    Args:
        reports: What :func:`compare`, :func:`sweep`, :func:`profile`, :func:`parity`, :func:`validate_precision`,
            :func:`forecast`, :func:`doctor`, :func:`signals` and :func:`openmed_nb.training.last_curve` return, and the ledger of
            :func:`fallbacks`; at most one of each kind, of one model on one device, in any order.
        gates: Thresholds of your own: ``nb.runbook.gates(speed_up=0.3)``.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``; ``None`` for what the reports say. Forward
            passes of a module of your own are inference.
        texts: How many texts are to be done, from which follows how long they take.

    Returns:
        The verdict: ``recommendation``, one of ``"stay on this device"``, ``"fix the data plane"``, ``"fix the batch"``,
        ``"checkpoint / accumulate"``, ``"fall back to the CPU for these operators"``, ``"move to MLX"``, ``"move to a remote
        pool"``, ``"compute on the CPU"`` and ``"measure first"``; ``reason``, with its figures and their gates, what to do,
        and what would change it; ``others`` that have reasons too; ``unknown``, what was not measured; and ``sure``, whether
        none of that could change it. Its text form has no measured figure; they stand in the HTML and in ``to_dict()``.

    Raises:
        ConfigurationError: For what is not a report, two of one kind, and reports of several devices, models or tasks. If a
            name and a class may be one model, the verdict says so.

    The rules stand in ``print(nb.runbook.gates())``, in their order: wrong numbers beat everything, then memory, data, batch,
    fallbacks, and speed. What was not measured is never guessed.

    Example:
        >>> first = verdict(task="annotation")
        >>> first.recommendation, [area.command for area in first.unknown][:2]
        ('measure first', ['nb.compare(model, texts)', 'nb.runbook.parity(model, texts)'])
    """
    if gates is not None and not isinstance(gates, Gates):
        raise ConfigurationError(f"gates cannot be {type(gates).__name__}.", "Pass nb.runbook.gates(speed_up=0.3).")
    return judge(evidence_of(*reports, gates=gates, task=task, texts=texts), gates)


def judge(evidence: Evidence, gates: Gates | None = None) -> Verdict:
    """Return the verdict on figures; the same figures always give the same verdict, and no figures raise.

    Example:
        >>> judge(Evidence()).recommendation, judge(Evidence(task="training", out_of_memory_at=1)).recommendation
        ('measure first', 'checkpoint / accumulate')
    """
    case = Case(evidence, limits := Gates() if gates is None else gates)
    # Rules of one rank that recommend the same are one reason.
    groups: dict[tuple[int, str], list[tuple[VerdictRule, Figures]]] = {}
    for rule in RULES:
        if figures := rule.figures(case):
            groups.setdefault((rule.rank, rule.recommendation), []).append((rule, figures))
    if not groups:
        staying = ((rule, rule.figures(case)) for rule in (STAYING, LEANING))
        groups[0, ""] = [next((one for one in staying if one[1]), (MEASURING, ()))]
    reasons = tuple(_reason(holding, limits.shown()) for holding in groups.values())
    return Verdict(evidence, limits, reasons, case.unmeasured())


def _reason(holding: list[tuple[VerdictRule, Figures]], shown: dict[str, str]) -> Reason:
    """Return rules that hold and recommend the same as one reason, each sentence and figure once."""
    first = holding[0][0]
    when, _, do, change = (
        tuple(dict.fromkeys(cells)) for cells in zip(*(rule.row(shown) for rule, _ in holding), strict=True)
    )
    figures = dict.fromkeys(figure for _, found in holding for figure in found)
    return Reason(first.recommendation, first.rank, when, tuple(figures), do, change)
