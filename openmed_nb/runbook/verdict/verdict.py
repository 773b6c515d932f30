"""The verdict: one recommendation, the figures that led to it, what would change it, and what is not known. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...display import MARK, NOTE, Report, Shown, Table
from ...errors import ConfigurationError
from .evidence import INFERENCE, Evidence
from .gates import Thresholds
from .reference import Gates
from .rules import (
    FALL_BACK,
    LEANING,
    MEASURING,
    RANKS,
    RULES,
    STAYING,
    Area,
    Figures,
    Rule,
    numbers_are_known,
    synchronises_beside,
    unmeasured,
)

SCHEMA = "openmed_nb/verdict/1"

LOGIC_ONLY = "The evidence is simulated: this shows how a verdict is reached, and says nothing of MPS."

CAUTIONS: tuple[tuple[Callable[[Evidence, Thresholds], Any], str], ...] = (
    (
        lambda here, _gates: here.refused_dtype,
        "The model does not keep its entities in {0}: use float32.",
    ),
    (
        lambda here, _gates: ", ".join(here.silent_errors or ()),
        "Known silent errors were seen on this device ({0}); nb.doctor() says what to avoid.",
    ),
    (
        lambda here, _gates: ", ".join(here.models or ()) if len(here.models or ()) > 1 else "",
        "The reports call the model {0}: make sure that it is one.",
    ),
    (
        lambda here, gates: here.task == INFERENCE and here.kind != "cpu" and not numbers_are_known(here, gates),
        "Parity of a module of your own is not known: compare its outputs on both devices with torch.testing.assert_close.",
    ),
    (
        lambda here, gates: bool(synchronises_beside(here, gates)),
        "A step waits for the device in lines that nb.profile(...) names; that costs little while the device is busy.",
    ),
    (
        lambda here, _gates: holds(here, 1.0),
        "No difference in speed from the CPU was shown.",
    ),
    (
        lambda here, gates: holds(here, 1 + gates.speed_up),
        "The speed-up may be on either side of its gate: more pairs would tell.",
    ),
)
"""What is said beside a verdict, where something makes it true."""


@dataclass(frozen=True)
class Reason:
    """A recommendation with all that speaks for it.

    Attributes:
        recommendation: What is recommended.
        rank: Where it stands in the order of precedence.
        when: What holds, as sentences.
        figures: The figures, each with its gate.
        do: What to do.
        change: What would change it.
    """

    recommendation: str
    rank: int
    when: tuple[str, ...]
    figures: Figures
    do: tuple[str, ...]
    change: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as plain mappings, lists, numbers and strings, ready for JSON."""
        figures = [figure.to_dict() for figure in self.figures]
        lists = {name: list(getattr(self, name)) for name in ("when", "do", "change")}
        return {"recommendation": self.recommendation, "figures": figures, **lists}


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

    evidence: Evidence
    gates: Gates
    reasons: tuple[Reason, ...]
    unknown: tuple[Area, ...]

    @property
    def reason(self) -> Reason:
        """Why it is recommended."""
        return self.reasons[0]

    @property
    def recommendation(self) -> str:
        """What is recommended, in the words of ``rules.RECOMMENDATIONS``."""
        return self.reason.recommendation

    @property
    def others(self) -> tuple[Reason, ...]:
        """The other recommendations that also have reasons, in order, each with its first."""
        firsts = {one.recommendation: one for one in reversed(self.reasons)}
        return tuple(one for one in self.reasons[1:] if firsts[one.recommendation] is one)

    @property
    def before(self) -> tuple[Area, ...]:
        """What was not measured and could lead to another verdict, because it goes before this one or with it."""
        return tuple(one for one in self.unknown if one.needed and one.rank <= self.reason.rank)

    @property
    def sure(self) -> bool:
        """Whether nothing that was not measured could lead to another verdict, and nothing is simulated."""
        return not (self.before or self.evidence.simulated)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What else to know."""
        told = ((look(self.evidence, self.gates), sentence) for look, sentence in CAUTIONS)
        return tuple(sentence.format(value) for value, sentence in told if value)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON."""
        return {
            "schema": SCHEMA,
            "recommendation": self.recommendation,
            "sure": self.sure,
            "simulated": self.evidence.simulated,
            "reasons": [{**one.to_dict(), "area": RANKS[one.rank]} for one in self.reasons],
            "not_known": [{**one.to_dict(), "goes_before": one in self.before} for one in self.unknown],
            "states": list(self.evidence.states or ()),
            "cautions": list(self.cautions),
            "gates": self.gates.to_dict(),
            "evidence": self.evidence.to_dict(),
        }

    def report(self) -> Report:
        """Return the recommendation with its reasons; the figures are among the figures."""
        simulated = (NOTE, LOGIC_ONLY) if self.evidence.simulated else ()
        sentences = (*simulated, *self.because, *self.not_known, *self.beside, *self.cautions, *self.gates.changes)
        others = tuple((one.recommendation, *map("; ".join, (one.when, one.do))) for one in self.others)
        table = Table("Other recommendations that have reasons", ("recommendation", "because", "what to do"), others)
        return Report(self.title, sentences, (table,), figures=self.figures_tables())

    @property
    def title(self) -> str:
        """The recommendation in one line; operators that shall fall back are named."""
        device = self.evidence.device or "a device that is not known"
        operators = (*(self.evidence.refused_operators or ()), *(self.evidence.fallback_operators or ()))
        named = f": {', '.join(operators)}" if self.recommendation == FALL_BACK and operators else ""
        return f"Verdict on {device}{MARK if self.evidence.simulated else ''}: {self.recommendation}{named}"

    @property
    def because(self) -> tuple[str, ...]:
        """Why, by which figures, what to do, and what would change it, as sentences."""
        reason = self.reason
        figures = "; ".join(figure.words for figure in reason.figures)
        return (
            f"Why: {'; '.join(reason.when)}.",
            *((f"Figures: {figures}.",) if figures else ()),
            f"What to do: {' '.join(reason.do)}",
            f"What would change it: {' '.join(reason.change)}",
        )

    @property
    def not_known(self) -> tuple[str, ...]:
        """What was not measured, with how to; first what could lead to another verdict."""
        later = tuple(one for one in self.unknown if one not in self.before)
        return (
            *(f"Not known, and may change the verdict: {one.name}; run {one.command}." for one in self.before),
            *(f"Not known: {one.name}; run {one.command}." for one in later),
        )

    @property
    def beside(self) -> tuple[str, ...]:
        """The states of the computer that spoil times."""
        return tuple(f"Beside it: {state}" for state in self.evidence.states or ())

    def figures_tables(self) -> tuple[Table, ...]:
        """Return the figures that led to the recommendations, and all that was measured."""
        rows = tuple(
            (figure.row[0], one.recommendation, *figure.row[1:]) for one in self.reasons for figure in one.figures
        )
        columns = ("figure", "speaks for", "value", "gate", "threshold")
        said = {row[0] for row in rows}
        others = tuple(row for row in self.evidence.rows() if row[0] not in said)
        return Table("What led to it", columns, rows), Table("What else was measured", ("figure", "value"), others)


def judge(evidence: Evidence, gates: Gates | None = None) -> Verdict:
    """Return the verdict on figures; the same figures always give the same verdict, and no figures raise.

    Args:
        evidence: What was measured.
        gates: The thresholds.

    Example:
        >>> judge(Evidence()).recommendation, judge(Evidence(task="training", out_of_memory_at=1)).recommendation
        ('measure first', 'checkpoint / accumulate')
    """
    gates = Gates() if gates is None else gates
    return Verdict(evidence, gates, reasons_of(evidence, gates), unmeasured(evidence, gates))


def reasons_of(evidence: Evidence, gates: Gates) -> tuple[Reason, ...]:
    """Return the recommendations that have reasons, in order of precedence.

    Rules of one rank that recommend the same are one reason.
    """
    groups: dict[tuple[int, str], list[tuple[Rule, Figures]]] = {}
    for rule in RULES:
        if figures := rule.look(evidence, gates):
            groups.setdefault((rule.rank, rule.recommendation), []).append((rule, figures))
    return tuple(joined(holding, gates) for holding in groups.values()) or (otherwise(evidence, gates),)


def otherwise(evidence: Evidence, gates: Gates) -> Reason:
    """Return what is recommended where no rule holds."""
    staying = ((rule, rule.look(evidence, gates)) for rule in (STAYING, LEANING))
    return joined([next((one for one in staying if one[1]), (MEASURING, ()))], gates)


def joined(holding: list[tuple[Rule, Figures]], gates: Gates) -> Reason:
    """Return rules that hold and recommend the same as one reason."""
    first, shown = holding[0][0], gates.shown()
    whens, _, dos, changes = zip(*(rule.said(shown) for rule, _ in holding), strict=True)
    figures = dict.fromkeys(figure for _, found in holding for figure in found)
    return Reason(first.recommendation, first.rank, unique(whens), tuple(figures), unique(dos), unique(changes))


def unique(sentences: tuple[str, ...]) -> tuple[str, ...]:
    """Return sentences, each once, in order."""
    return tuple(dict.fromkeys(sentences))


def checked_gates(gates: object) -> Gates:
    """Return thresholds that a person passes, those that are given where nobody does.

    Raises:
        ConfigurationError: For anything else.
    """
    if gates is None:
        return Gates()
    if isinstance(gates, Gates):
        return gates
    raise ConfigurationError(f"{type(gates).__name__} is no set of gates.", "Pass nb.gates(speed_up=0.3).")


def holds(evidence: Evidence, value: float) -> bool:
    """Tell whether the interval of the speed-up holds a value."""
    low, high = evidence.speed_up_low, evidence.speed_up_high
    return low is not None and high is not None and low <= value <= high
