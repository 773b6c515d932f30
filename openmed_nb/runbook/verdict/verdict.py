"""``nb.verdict``: reports joined into one recommendation, the figures that led to it, what would change it, and what is not known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    SEVERITY,
    SIMULATED_SUFFIX,
    WARNING,
    Displayable,
    JsonMixin,
    Report,
    Table,
)
from ..._render.drawing import Chart, StatusIndicator
from ..._utils.text import describe_value, short_type_name
from ...devices.request import normalize_device
from ...errors import ConfigurationError, UnknownModelError
from ...models.registry import BUNDLED, find_model
from ..bench.comparison import Comparison
from ..bench.workloads import ANNOTATION, CUSTOM_STEP, FORWARD_PASS, TRAINING_STEP
from ..checks.precision.policy import AcceptanceCriteria
from ..checks.precision.report import ParityReport
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.sections import ReportMetrics, finite_numbers
from ..records.signals import SystemStatus
from . import lanes as of_lanes
from .figures import extract_metrics
from .gates import Gates
from .metrics import GATES, INFERENCE, METRICS, REPORTS, TRAINING, Area, Evidence, EvidenceContext
from .rules import (
    CPU,
    FALL_BACK,
    KEEP_DEVICE,
    MLX,
    REMOTE,
    EvidenceCase,
    Figures,
    Requirement,
    VerdictRule,
    decision_matrix,
)

# What a measured step is a part of; a person's own step may be a part of any.
TASK_OF = {ANNOTATION: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}

# What torch wraps models into: the class says nothing of the model.
WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})

# The words of the lamp of an area that nothing here depends on.
NOTHING_HERE = "nothing to measure here"

PARITY_BY_HAND = (
    "Parity of a module of your own is not known: compare its outputs on both devices with torch.testing.assert_close."
)
WAITS_WHILE_BUSY = "A step waits for the device in lines that nb.runbook.profile(...) names; that costs little while the device is busy."
SIMULATED_EVIDENCE_NOTICE = "The evidence is simulated: this shows how a verdict is reached, and says nothing of MPS."


@dataclass(frozen=True)
class Reason(JsonMixin):
    """A recommendation with all that speaks for it.

    Attributes:
        recommendation: What is recommended.
        rank: Where it stands in the order of precedence.
        when: What holds, as sentences.
        figures: The figures, each with its gate.
        do: What to do.
        change: What would change it.
    """

    JSON_EXCLUDE = ("rank",)
    JSON_PROPERTIES = ("area",)

    recommendation: str
    rank: Area
    conditions: tuple[str, ...]
    figures: Figures
    actions: tuple[str, ...]
    reconsider_when: tuple[str, ...]

    @property
    def area(self) -> str:
        """What it is about: ``"numbers"``, ``"memory"``, ``"data"``, ``"batch"``, ``"fallbacks"`` or ``"speed"``."""
        return self.rank.name.lower()


@dataclass(frozen=True, repr=False)
class Verdict(Displayable):
    """One recommendation, with what led to it.

    Attributes:
        evidence: What was measured.
        gates: The thresholds.
        reasons: The recommendations that have reasons, in order of precedence; the first is the verdict.
        unknown: What matters and was not measured.

    Example:
        >>> verdict = evaluate(Evidence(device="mps", task="annotation", entity_agreement=0.9))
        >>> verdict.recommendation, verdict.is_conclusive, [figure.value for figure in verdict.reason.figures]
        ('compute on the CPU', True, [0.9])
    """

    SCHEMA = "openmed_nb/verdict/1"
    JSON_EXCLUDE = ("missing_requirements",)
    JSON_PROPERTIES = ("recommendation", "is_conclusive", "simulated", "states", "warnings")

    evidence: Evidence
    gates: Gates
    reasons: tuple[Reason, ...]
    missing_requirements: tuple[Requirement, ...]

    @property
    def reason(self) -> Reason:
        """Why it is recommended."""
        return self.reasons[0]

    @property
    def recommendation(self) -> str:
        """What is recommended, such as ``"stay on this device"``; :func:`openmed_nb.verdict` lists all."""
        return self.reason.recommendation

    @property
    def alternatives(self) -> tuple[Reason, ...]:
        """The other recommendations that also have reasons, in order, each with its first."""
        firsts = {one.recommendation: one for one in reversed(self.reasons)}
        return tuple(one for one in self.reasons[1:] if firsts[one.recommendation] is one)

    @property
    def blocking_unknowns(self) -> tuple[Requirement, ...]:
        """What was not measured and could lead to another verdict, because it goes before this one or with it."""
        return tuple(one for one in self.missing_requirements if one.needed and one.rank <= self.reason.rank)

    @property
    def is_conclusive(self) -> bool:
        """Whether nothing that was not measured could lead to another verdict, and nothing is simulated."""
        return not (self.blocking_unknowns or self.simulated)

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence is from a simulated device."""
        return self.evidence.simulated

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the computer that spoil times."""
        return self.evidence.slow_conditions or ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What else to know."""
        here = self.evidence
        case = EvidenceCase(here, vars(self.gates))
        said = []
        if here.refused_dtype:
            said.append(f"The model does not keep its entities in {here.refused_dtype}: use float32.")
        if here.silent_errors:
            names = ", ".join(here.silent_errors)
            said.append(f"Known silent errors were seen on this device ({names}); nb.doctor() says what to avoid.")
        if here.models and len(here.models) > 1:
            said.append(f"The reports call the model {', '.join(here.models)}: make sure that it is one.")
        if here.task == INFERENCE and case.on_accelerator and not case.numbers_are_known():
            said.append(PARITY_BY_HAND)
        if here.synchronizations and not case.synchronizes():
            said.append(WAITS_WHILE_BUSY)
        if case.speedup_may_be(1.0):
            said.append("No difference in speed from the CPU was shown.")
        if case.speedup_may_be(1 + self.gates.speedup):
            said.append("The speed-up may be on either side of its gate: more pairs would tell.")
        return tuple(said)

    @property
    def not_known(self) -> tuple[str, ...]:
        """What was not measured, with how to; first what could lead to another verdict."""
        later = tuple(one for one in self.missing_requirements if one not in self.blocking_unknowns)
        return (
            *(
                f"Not known, and may change the verdict: {one.name}; run {one.command}."
                for one in self.blocking_unknowns
            ),
            *(f"Not known: {one.name}; run {one.command}." for one in later),
        )

    @property
    def lanes(self) -> of_lanes.Lanes:
        """CPU, MPS, MLX and a remote pool side by side, with what was measured here, and which of them this verdict means."""
        lane = {
            CPU: of_lanes.CPU,
            MLX: of_lanes.MLX,
            REMOTE: of_lanes.REMOTE,
            KEEP_DEVICE: of_lanes.LANE_OF.get(self.evidence.kind or "", ""),
        }
        return of_lanes.Lanes(self.evidence, self.gates, self.recommendation, lane.get(self.recommendation, ""))

    @property
    def title(self) -> str:
        """The recommendation in one line; operators that shall fall back are named."""
        device = self.evidence.device or "a device that is not known"
        operators = (*(self.evidence.refused_operators or ()), *(self.evidence.fallback_operators or ()))
        named = f": {', '.join(operators)}" if self.recommendation == FALL_BACK and operators else ""
        return f"Verdict on {device}{SIMULATED_SUFFIX if self.simulated else ''}: {self.recommendation}{named}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON."""
        before = self.blocking_unknowns
        unknown = [
            {"name": one.name, "command": one.command, "goes_before": one in before}
            for one in self.missing_requirements
        ]
        return {**super().to_dict(), "not_known": unknown}

    @property
    def indicators(self) -> tuple[StatusIndicator, ...]:
        """How each area is: beyond its gates, within them, not measured, or not asked for here."""
        return tuple(map(self._lamp, Area))

    def _lamp(self, rank: Area) -> StatusIndicator:
        """Return the lamp of an area, with the figure that decides on it."""
        case = EvidenceCase(self.evidence, vars(self.gates))
        against = [one for one in self.reasons if one.rank == rank and one.recommendation != KEEP_DEVICE]
        beyond = [figure for one in against for figure in one.figures]
        known = [case.gated(name) for name, gate in GATES.items() if gate.area == rank]
        known = [figure for figure in known if figure.value is not None]
        words = next((figure.measured for figure in (*beyond, *known)), "")
        if beyond:
            return StatusIndicator(rank.name.lower(), FAILED, words)
        if any(one.rank == rank and one.needed for one in self.missing_requirements):
            return StatusIndicator(rank.name.lower(), NOT_APPLICABLE, words or "not measured")
        return StatusIndicator(rank.name.lower(), OK if known else NOT_APPLICABLE, words or NOTHING_HERE)

    def to_report(self) -> Report:
        """Return the recommendation with its reasons; the figures are among the figures."""
        reason = self.reason
        figures = "; ".join(figure.words for figure in reason.figures)
        reasons = (*((SIMULATED_EVIDENCE_NOTICE,) if self.simulated else ()), f"Why: {'; '.join(reason.conditions)}.")
        to_do = (f"What to do: {' '.join(reason.actions)}", f"What would change it: {' '.join(reason.reconsider_when)}")
        named = (f"Figures: {figures}.",) if figures else ()
        also = (*(f"Beside it: {state}" for state in self.states), *self.warnings, *self.gates.changes)
        others = tuple(
            (one.recommendation, "; ".join(one.conditions), "; ".join(one.actions)) for one in self.alternatives
        )
        table = Table("Other recommendations that have reasons", ("recommendation", "because", "what to do"), others)
        led = tuple(
            (figure.row[0], one.recommendation, *figure.row[1:]) for one in self.reasons for figure in one.figures
        )
        shown = {row[0] for row in led}
        rest = tuple(row for row in self.evidence.rows() if row[0] not in shown)
        unknown = tuple(
            (one.name, "yes" if one in self.blocking_unknowns else "no", one.command)
            for one in self.missing_requirements
        )
        asked_for = (one for one in self.indicators if one.detail != NOTHING_HERE)
        lamps = tuple(sorted(asked_for, key=lambda one: SEVERITY.index(one.status), reverse=True))
        tables = (
            Table("What led to it", ("figure", "speaks for", "value", "gate", "threshold"), led, collapsed=True),
            Table(
                "What is not known", ("what", "may change the verdict", "how to measure it"), unknown, collapsed=True
            ),
            Table("What else was measured", ("figure", "value"), rest, collapsed=True),
        )
        return Report(
            title=self.title,
            sentences=(*reasons, *named, *to_do, *self.not_known, *also),
            tables=(table,),
            metrics=tables,
            html_sentences=(self.title, *reasons, *to_do, *also),
            status=OK if self.recommendation == KEEP_DEVICE and self.is_conclusive else WARNING,
            charts=(Chart("The gates of this verdict", indicators=lamps),),
        )

    def logbook_figures(self) -> ReportMetrics:
        """Return what a logbook keeps of it: the numbers among its evidence."""
        here = self.evidence
        values = finite_numbers(
            {**here.measured, "reasons": len(self.reasons), "not_known": len(self.missing_requirements)}
        )
        subject = here.task or "computer"
        return ReportMetrics("verdict", subject, here.device, self.recommendation, self.simulated, values)


def verdict(
    *reports: Any, gates: Gates | None = None, task: str | None = None, num_texts: int | None = None
) -> Verdict:
    """Join reports into one recommendation: what to do about this device, with the figures that led to it.

    Args:
        reports: What :func:`compare`, :func:`sweep`, :func:`profile`, :func:`parity`, :func:`loss_parity`,
            :func:`validate_precision`, :func:`forecast`, :func:`doctor`, :func:`signals` and :func:`openmed_nb.training.last_curve` return, and the ledger of
            :func:`fallbacks`; at most one of each kind, of one model on one device, in any order.
        gates: Thresholds of your own: ``nb.runbook.gates(speedup=0.3)``.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``; ``None`` for what the reports say. Forward
            passes of a module of your own are inference.
        num_texts: How many texts are to be done, from which follows how long they take.

    Returns:
        The verdict: ``recommendation``, one of ``"stay on this device"``, ``"feed the device faster"``, ``"fix the batch"``,
        ``"checkpoint / accumulate"``, ``"fall back to the CPU for these operators"``, ``"move to MLX"``, ``"move to a remote
        pool"``, ``"compute on the CPU"`` and ``"measure first"``; ``reason``, with its figures and their gates, what to do,
        and what would change it; ``others`` that have reasons too; ``unknown``, what was not measured; and ``sure``, whether
        none of that could change it; and ``lanes``, CPU, MPS, MLX and a remote pool side by side. Its text form has no measured figure; they stand in the HTML and in ``to_dict()``.

    Raises:
        ConfigurationError: For what is not a report, two of one kind, and reports of several devices, models or tasks. If a
            name and a class may be one model, the verdict says so.

    The rules stand in ``print(nb.runbook.gates())``, in their order: wrong numbers beat everything, then memory, data, batch,
    fallbacks, and speed. What was not measured is never guessed.

    Example:
        >>> first = verdict(task="annotation")
        >>> first.recommendation, [area.command for area in first.missing_requirements][:2]
        ('measure first', ['nb.compare(model, texts)', 'nb.runbook.parity(model, texts)'])
    """
    if gates is not None and not isinstance(gates, Gates):
        raise ConfigurationError(f"gates cannot be {short_type_name(gates)}.", "Pass nb.runbook.gates(speedup=0.3).")
    return evaluate(collect_evidence(*reports, gates=gates, task=task, num_texts=num_texts), gates)


def evaluate(evidence: Evidence, gates: Gates | None = None) -> Verdict:
    """Return the verdict on figures; the same figures always give the same verdict, and no figures raise.

    Example:
        >>> evaluate(Evidence()).recommendation, evaluate(Evidence(task="training", out_of_memory_at=1)).recommendation
        ('measure first', 'checkpoint / accumulate')
    """
    gates = Gates() if gates is None else gates
    case = EvidenceCase(evidence, vars(gates))
    unknown = case.unmeasured()
    first = min(unknown, key=lambda one: not one.needed, default=None)
    *rules, staying, leaning, measuring = decision_matrix(case, first.first_command if first else "nb.doctor()")
    # Rules of one rank that recommend the same are one reason.
    groups: dict[tuple[Area, str], list[VerdictRule]] = {}
    for rule in rules:
        if rule.figures:
            groups.setdefault((rule.rank, rule.recommendation), []).append(rule)
    if not groups:
        rule = next((one for one in (staying, leaning) if one.figures), measuring)
        groups[rule.rank, rule.recommendation] = [rule]
    return Verdict(evidence, gates, tuple(map(_reason, groups.values())), unknown)


def _reason(rules: Sequence[VerdictRule]) -> Reason:
    """Return rules that recommend the same as one reason, each sentence and figure once."""
    return Reason(
        rules[0].recommendation,
        rules[0].rank,
        tuple(dict.fromkeys(rule.condition for rule in rules)),
        tuple(dict.fromkeys(figure for rule in rules for figure in rule.figures)),
        tuple(dict.fromkeys(rule.action for rule in rules)),
        tuple(dict.fromkeys(rule.reconsider_when for rule in rules)),
    )


def collect_evidence(
    *reports: Any, gates: Gates | None = None, task: str | None = None, num_texts: int | None = None
) -> Evidence:
    """Return the metrics of reports, in any order; an :class:`Evidence` among them has a person's own, which count most."""
    by_kind = _by_kind(reports)
    own: Evidence = by_kind.pop(Evidence, Evidence())
    about = [extract_metrics(report) for report in by_kind.values() if not isinstance(report, SystemStatus)]
    device = own.device or _device_of(about, by_kind.get(Comparison))
    if task is None:
        task = own.task or _task_of(about)
    models = own.models or _models_of(by_kind.values()) or None
    _single_value(
        "a model in several types", (one.run.dtype for one in about if one.run.dtype), "Pass reports of one type."
    )
    # A forecast runs on the CPU, so a simulation changes nothing of it; signals are of the computer alone.
    simulated = any(one.simulated for one in about if one.report != "forecast")
    simulated = simulated or getattr(by_kind.get(SystemStatus), "simulated", False)
    context = EvidenceContext(device, task, gates or Gates(), own.measured)
    accepted = by_kind.pop(PrecisionVerdict, None)
    read = list(map(_as_precision, by_kind.values()))
    if accepted is not None:
        read.append(accepted)  # Of two that tell of a type, parity counts first.
    if Comparison in by_kind:
        read.append(by_kind[Comparison].for_device(device or "cpu"))
    for name, metric in METRICS.items():
        if name not in context.known and (value := metric.read(read, context)) is not None:
            context.known[name] = value
    return replace(
        own,
        **{
            **context.known,
            "models": models,
            "device": device,
            "task": task,
            "num_texts": own.num_texts if num_texts is None else num_texts,
            "simulated": own.simulated or simulated,
        },
    )


def _as_precision(report: Any) -> Any:
    """Return parity in a reduced type as a look at that type: it tells of the device only if the entities are kept."""
    reduced = isinstance(report, ParityReport) and report.dtype != "float32"
    return PrecisionVerdict(report, AcceptanceCriteria()) if reduced else report


def _by_kind(reports: Iterable[Any]) -> dict[type, Any]:
    """Return reports by their classes; refuse what is not a report, and two of one class."""
    found: dict[type, Any] = {}
    for report in reports:
        kind = next((kind for kind in (Evidence, *REPORTS) if isinstance(report, kind)), None)
        if kind is None:
            what = f"{short_type_name(report)} is not a report for a verdict."
            raise ConfigurationError(what, "Pass what nb.compare, nb.sweep, nb.runbook.parity and the others return.")
        if kind in found:
            what = f"There are two reports of one kind: {kind.__name__}."
            raise ConfigurationError(what, "Pass one of each, of the same model on the same device.")
        found[kind] = report
    return found


def _single_value(what: str, values: Iterable[str], remedy: str) -> str | None:
    """Return the one value that reports agree on, ``None`` if they name none, or raise."""
    named = sorted(set(values))
    if len(named) > 1:
        raise ConfigurationError(f"The reports are of {what}: {', '.join(named)}.", remedy)
    return named[0] if named else None


def _device_of(about: Iterable[ReportMetrics], comparison: Comparison | None) -> str | None:
    """Return the device that reports are of; of a comparison alone, the fastest that is not the CPU."""
    named = (one.canonical_device for one in about if one.canonical_device and one.report != "comparison")
    device = _single_value("several devices", named, "Pass reports of one device.")
    if device is not None or comparison is None:
        return device
    others = [(one.speedup.median, one.device) for one in comparison.devices if one.speedup is not None]
    fastest = max(others, key=lambda one: one[0], default=(0.0, comparison.devices[0].device))
    return normalize_device(fastest[1])


def _task_of(about: Sequence[ReportMetrics]) -> str | None:
    """Return what the model is used for; a memory curve is of a training if no other report says more."""
    tasks = {TASK_OF[one.run.task] for one in about if one.run.task in TASK_OF}
    said = _single_value("several tasks", tasks, "Pass reports of one task, or say which with task=.")
    return TRAINING if said is None and any(one.report == "memory" for one in about) else said


def _models_of(reports: Iterable[Any]) -> tuple[str, ...]:
    """Return by which names reports call the model, in alphabetical order; refuse two that certainly are of two models."""
    of_model = [getattr(one, "parity", one) for one in reports]  # That of a verdict on a precision.
    called = sorted(
        {(getattr(one, "model", "") or getattr(one, "name", ""), getattr(one, "task", "")) for one in of_model}
    )
    for kind in (_is_class_name, _is_loadable):
        named = [name for name, task in called if name and task != CUSTOM_STEP and kind(name)]
        other = next(
            (name for name in named if name != named[0] and _shared_names(name) != _shared_names(named[0])), None
        )
        if other is not None:
            what = f"The reports are of different models: {describe_value(named[0])} and {describe_value(other)}."
            raise ConfigurationError(what, "Pass reports of one model, by one name.")
    return tuple(dict.fromkeys(name for name, _ in called if name))


def _is_class_name(name: str) -> bool:
    """Tell whether a name is that of the class of a model that was passed, not one that a model is loaded by."""
    return name.isidentifier() and name != name.lower() and name not in WRAPPERS


def _is_loadable(name: str) -> bool:
    """Tell whether a model is loaded by a name: a bundled one, an id of a hub, or a path."""
    return name in BUNDLED or not name.isidentifier()


def _shared_names(name: str) -> object:
    """Return what two names of one model share: of classes the names, of others where they are."""
    try:
        return name if _is_class_name(name) else find_model(name)
    except UnknownModelError:
        return name
