"""``nb.verdict``: one recommendation from several reports, with its supporting metrics."""

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
    JsonObject,
    Report,
    Table,
    pluralize,
)
from ..._render.drawing import Chart, StatusIndicator
from ..._utils.text import describe_value, short_type_name
from ..._utils.validation import invalid_type
from ...devices.registry import get_device
from ...devices.request import normalize_device
from ...errors import ConfigurationError, UnknownModelError
from ...models.registry import BUNDLED, find_model
from ...session import SESSION
from ..bench.comparison import BreakEven, Comparison
from ..bench.workloads import ANNOTATION, CUSTOM_STEP, FORWARD_PASS, TRAINING_STEP
from ..checks.precision.policy import AcceptanceCriteria
from ..checks.precision.report import ParityReport
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.sections import ReportMetrics, finite_numbers
from ..records.signals import SystemStatus
from .figures import extract_metrics
from .gates import Gates
from .lanes import CPU as CPU_LANE
from .lanes import LANE_BY_DEVICE_TYPE, Lanes
from .lanes import MLX as MLX_LANE
from .lanes import REMOTE as REMOTE_LANE
from .metrics import (
    GATES,
    HOURS,
    INFERENCE,
    METRICS,
    REPORTS,
    TRAINING,
    Area,
    Evidence,
    EvidenceContext,
    format_with_unit,
)
from .rules import (
    CPU,
    FALL_BACK,
    KEEP_DEVICE,
    MLX,
    REMOTE,
    EvidenceCase,
    MetricValues,
    Recommendation,
    Requirement,
    VerdictRule,
    build_decision_matrix,
)

# Task of each type of measured step; a custom step may belong to any task.
TASK_BY_STEP = {ANNOTATION: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}

# Classes that wrap a model, and do not identify it.
WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})

# Detail of the status indicator of an area that does not affect the verdict.
NOT_RELEVANT = "not relevant"

UNKNOWN_MODULE_PARITY = (
    "Parity of a custom module is not known: compare its outputs on both devices with torch.testing.assert_close."
)
HARMLESS_SYNCHRONIZATIONS = "A step waits for the device at locations that nb.runbook.profile(...) names; this costs little while the device is busy."
SIMULATED_EVIDENCE_NOTICE = (
    "The evidence is simulated: this verdict illustrates the procedure and does not apply to real MPS hardware."
)


@dataclass(frozen=True)
class Reason(JsonMixin):
    """A recommendation with its conditions and supporting metrics.

    Attributes:
        recommendation: The recommendation.
        precedence: Area of the recommendation, which determines its precedence.
        conditions: Conditions that hold, as text.
        metrics: Supporting metrics, with their gates.
        actions: Suggested actions.
        reconsider_when: Measurements that would change the recommendation.
    """

    JSON_EXCLUDE = ("precedence",)
    JSON_PROPERTIES = ("area",)

    recommendation: Recommendation
    precedence: Area
    conditions: tuple[str, ...]
    metrics: MetricValues
    actions: tuple[str, ...]
    reconsider_when: tuple[str, ...]

    @property
    def area(self) -> str:
        """Area: ``"correctness"``, ``"memory"``, ``"data"``, ``"batch"``, ``"fallbacks"`` or ``"speed"``."""
        return self.precedence.name.lower()


@dataclass(frozen=True, repr=False)
class Verdict(Displayable):
    """One recommendation, with the evidence for it.

    Attributes:
        evidence: Measured metrics.
        gates: Thresholds.
        reasons: Applicable recommendations in order of precedence; the first is the verdict.
        missing_requirements: Relevant requirements that were not measured.

    Example:
        >>> verdict = evaluate(Evidence(device="mps", task="annotation", entity_agreement=0.9))
        >>> verdict.recommendation, verdict.is_conclusive, [metric.value for metric in verdict.reason.metrics]
        ('compute on the CPU', True, [0.9])
    """

    SCHEMA = "openmed_nb/verdict/1"
    JSON_EXCLUDE = ("missing_requirements",)
    JSON_PROPERTIES = ("recommendation", "is_conclusive", "simulated", "slow_conditions", "warnings", "break_even")

    evidence: Evidence
    gates: Gates
    reasons: tuple[Reason, ...]
    missing_requirements: tuple[Requirement, ...]

    @property
    def reason(self) -> Reason:
        """Reason for the recommendation."""
        return self.reasons[0]

    @property
    def recommendation(self) -> Recommendation:
        """Recommendation, such as ``"keep this device"``; :func:`openmed_nb.verdict` lists all of them."""
        return self.reason.recommendation

    @property
    def alternatives(self) -> tuple[Reason, ...]:
        """Other applicable recommendations in order of precedence, each with its first reason."""
        first_reasons = {reason.recommendation: reason for reason in reversed(self.reasons)}
        return tuple(reason for reason in self.reasons[1:] if first_reasons[reason.recommendation] is reason)

    @property
    def blocking_requirements(self) -> tuple[Requirement, ...]:
        """Missing requirements that could change the verdict: their area has at least the precedence of its reason."""
        return tuple(
            requirement
            for requirement in self.missing_requirements
            if requirement.is_needed and requirement.precedence <= self.reason.precedence
        )

    @property
    def is_conclusive(self) -> bool:
        """Whether no missing measurement could change the verdict, and no evidence is simulated."""
        return not (self.blocking_requirements or self.simulated)

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence comes from a simulated device."""
        return self.evidence.simulated

    @property
    def slow_conditions(self) -> tuple[str, ...]:
        """Conditions of the computer that affect timings."""
        return self.evidence.slow_conditions or ()

    @property
    def _case(self) -> EvidenceCase:
        return EvidenceCase(self.evidence, vars(self.gates))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the evidence."""
        evidence = self.evidence
        case = self._case
        warnings = []
        if evidence.refused_dtype:
            warnings.append(f"The entities of the model change in {evidence.refused_dtype}: use float32.")
        if evidence.silent_errors:
            names = ", ".join(evidence.silent_errors)
            warnings.append(
                f"Known silent errors were detected on this device ({names}); see nb.doctor() for remedies."
            )
        if evidence.models and len(evidence.models) > 1:
            names = ", ".join(evidence.models)
            warnings.append(
                f"The reports use several names for the model ({names}): make sure that they refer to the same model."
            )
        if evidence.task == INFERENCE and case.on_accelerator and not case.is_correctness_known():
            warnings.append(UNKNOWN_MODULE_PARITY)
        if evidence.synchronizations and not case.find_blocking_synchronizations():
            warnings.append(HARMLESS_SYNCHRONIZATIONS)
        if case.is_speedup_possible(1.0):
            warnings.append("No significant difference in speed from the CPU.")
        if case.is_speedup_possible(1 + self.gates.speedup):
            warnings.append("The confidence interval of the speedup includes its threshold; measure more rounds.")
        return tuple(warnings)

    @property
    def not_known(self) -> tuple[str, ...]:
        """Missing measurements with their commands; those that could change the verdict come first."""
        blocking = self.blocking_requirements
        sentences = []
        for requirement in sorted(self.missing_requirements, key=lambda requirement: requirement not in blocking):
            effect = ", and could change the verdict" if requirement in blocking else ""
            sentences.append(f"Missing{effect}: {requirement.name}. Run {requirement.command}.")
        return tuple(sentences)

    @property
    def missing_summary(self) -> str:
        """Missing measurements that could change the verdict, and the command of the first one; empty if there are none."""
        blocking = self.blocking_requirements
        if not blocking:
            return ""
        names = ", ".join(requirement.name for requirement in blocking)
        command = f"Run {blocking[0].first_command}."
        is_suggested = any(command in action for action in self.reason.actions)
        return f"Not measured, and could change the verdict: {names}.{'' if is_suggested else f' {command}'}"

    @property
    def break_even(self) -> BreakEven | None:
        """Speed of the CPU, and the speed at which a GPU is worth using; ``None`` for another device."""
        return self._case.break_even

    @property
    def answer(self) -> tuple[str, ...]:
        """Speed, best batch size and duration on the CPU, and what a GPU must do, as sentences; empty for another device."""
        evidence = self.evidence
        if self._case.on_accelerator:
            return ()
        sentences = [*(self.break_even.sentences if self.break_even else ())]
        if evidence.knee:
            at_least = "at least " if evidence.knee_gain is None else ""
            sentences.append(f"The best batch size is {at_least}{pluralize(evidence.knee, 'row')}.")
        if evidence.hours is not None and evidence.num_texts:
            duration = format_with_unit(HOURS, evidence.hours)
            sentences.append(f"On this computer, {pluralize(evidence.num_texts, 'note')} take {duration}.")
        return tuple(sentences)

    @property
    def lanes(self) -> Lanes:
        """Comparison of CPU, MPS, MLX and a remote pool, with the measurements and the lane of this verdict."""
        lane = {CPU: CPU_LANE, MLX: MLX_LANE, REMOTE: REMOTE_LANE}.get(self.recommendation, "")
        if self.recommendation == KEEP_DEVICE:
            lane = LANE_BY_DEVICE_TYPE.get(self.evidence.device_type or "", "")
        return Lanes(self.evidence, self.gates, self.recommendation, lane)

    @property
    def title(self) -> str:
        """Device and recommendation in one line, with the operators that should fall back."""
        device = self.evidence.device or "an unknown device"
        operators = (self.evidence.refused_operators or ()) + (self.evidence.fallback_operators or ())
        suffix = f": {', '.join(operators)}" if self.recommendation == FALL_BACK and operators else ""
        return f"Verdict on {device}{SIMULATED_SUFFIX if self.simulated else ''}: {self.recommendation}{suffix}"

    def to_dict(self) -> JsonObject:
        """Return the verdict as JSON-compatible data."""
        not_known = [
            {
                "name": requirement.name,
                "command": requirement.command,
                "could_change_verdict": requirement in self.blocking_requirements,
            }
            for requirement in self.missing_requirements
        ]
        return {**super().to_dict(), "not_known": not_known}

    @property
    def indicators(self) -> tuple[StatusIndicator, ...]:
        """Status of each area: beyond its gates, within its gates, not measured, or not relevant."""
        indicators = []
        for area in Area:
            reasons = [
                reason for reason in self.reasons if reason.precedence == area and reason.recommendation != KEEP_DEVICE
            ]
            beyond = [metric for reason in reasons for metric in reason.metrics]
            gates = [name for name in METRICS if name in GATES and GATES[name].area == area]
            gated = list(map(self._case.get_gated_metric, gates))
            measured = [metric for metric in gated if metric.value is not None]
            detail = next((metric.measured for metric in beyond + measured), "")
            if beyond:
                status = FAILED
            elif any(
                requirement.precedence == area and requirement.is_needed for requirement in self.missing_requirements
            ):
                status = NOT_APPLICABLE
                detail = detail or "not measured"
            else:
                status = OK if measured else NOT_APPLICABLE
            indicators.append(StatusIndicator(area.name.lower(), status, detail or NOT_RELEVANT))
        return tuple(indicators)

    def to_report(self) -> Report:
        """Return a report of the recommendation and its reasons; measured values are in tables of metrics."""
        reason = self.reason
        notices = (SIMULATED_EVIDENCE_NOTICE,) if self.simulated else ()
        reasons = (*notices, f"Reason: {'; '.join(reason.conditions)}.")
        actions = (
            f"Suggested action: {' '.join(reason.actions)}",
            f"What could change this: {' '.join(reason.reconsider_when)}",
        )
        descriptions = "; ".join(metric.description for metric in reason.metrics)
        supporting = (f"Metrics: {descriptions}.",) if descriptions else ()
        missing = (self.missing_summary,) if self.missing_summary else ()
        conditions = tuple(f"Condition during the measurement: {condition}" for condition in self.slow_conditions)
        remarks = (*conditions, *self.warnings, *self.gates.changes)
        alternatives = tuple(
            (alternative.recommendation, "; ".join(alternative.conditions), "; ".join(alternative.actions))
            for alternative in self.alternatives
        )
        supporting_rows = tuple(
            (metric.row[0], reason.recommendation, *metric.row[1:])
            for reason in self.reasons
            for metric in reason.metrics
        )
        supporting_names = {row[0] for row in supporting_rows}
        other_rows = tuple(row for row in self.evidence.rows() if row[0] not in supporting_names)
        missing_rows = tuple(
            (requirement.name, "yes" if requirement in self.blocking_requirements else "no", requirement.command)
            for requirement in self.missing_requirements
        )
        relevant = (indicator for indicator in self.indicators if indicator.detail != NOT_RELEVANT)
        indicators = tuple(sorted(relevant, key=lambda indicator: SEVERITY.index(indicator.status), reverse=True))
        metrics = (
            Table(
                "Supporting metrics",
                ("metric", "recommendation", "value", "gate", "threshold"),
                supporting_rows,
                collapsed=True,
            ),
            Table(
                "Missing measurements",
                ("measurement", "could change the verdict", "how to measure"),
                missing_rows,
                collapsed=True,
            ),
            Table("Other measurements", ("metric", "value"), other_rows, collapsed=True),
        )
        return Report(
            title=self.title,
            sentences=(
                *self.answer,
                *reasons,
                *supporting,
                *missing,
                *actions,
                *remarks,
            ),
            tables=(
                Table(
                    "Other applicable recommendations",
                    ("recommendation", "reason", "suggested action"),
                    alternatives,
                ),
            ),
            metrics=metrics,
            html_sentences=(self.title, *self.answer, *reasons, *missing, *actions, *remarks),
            status=OK if self.recommendation == KEEP_DEVICE and self.is_conclusive else WARNING,
            charts=(Chart("Gates of this verdict", indicators=indicators),),
        )

    def logbook_metrics(self) -> ReportMetrics:
        """Return the numeric evidence for a logbook."""
        evidence = self.evidence
        values = finite_numbers(
            {**evidence.measured, "reasons": len(self.reasons), "not_known": len(self.missing_requirements)}
        )
        subject = evidence.task or "computer"
        return ReportMetrics("verdict", subject, evidence.device, self.recommendation, self.simulated, values)


def verdict(
    *reports: object, gates: Gates | None = None, task: str | None = None, num_texts: int | None = None
) -> Verdict:
    """Derive one recommendation for a device from reports.

    Args:
        reports: Reports of :func:`compare`, :func:`sweep`, :func:`profile`, :func:`parity`, :func:`loss_parity`,
            :func:`validate_precision`, :func:`forecast`, :func:`doctor`, :func:`system_status` and
            :func:`openmed_nb.training.last_curve`, and the log of :func:`fallbacks`. At most one report of each type, of one
            model on one device, in any order.
        gates: Custom thresholds: ``nb.runbook.gates(speedup=0.3)``.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``. Forward passes of a custom module are
            inference. If ``None``, use the task of the reports.
        num_texts: Number of texts to process, for the estimated duration.

    Returns:
        The verdict:

        - ``recommendation``: ``"keep this device"``, ``"speed up the input pipeline"``, ``"fix the batch"``,
          ``"checkpoint / accumulate"``, ``"fall back to the CPU for these operators"``, ``"move to MLX"``,
          ``"move to a remote pool"``, ``"compute on the CPU"`` or ``"measure first"``.
        - ``reason``: supporting metrics with their gates, suggested actions, and measurements that could change it.
        - ``alternatives``: other applicable recommendations.
        - ``missing_requirements``: relevant measurements that are missing.
        - ``is_conclusive``: whether none of them could change the verdict.
        - ``lanes``: comparison of CPU, MPS, MLX and a remote pool.

        - ``break_even``: on the CPU, its notes per hour, and the notes per hour from which a GPU is worth using: the rate of
          the CPU, increased by the gate ``speedup``, 22% by default (source: the runbook).

        On a computer without a GPU, the recommendation is never to measure first: there is no other device to choose. The
        text form contains no measured values except the speed of the CPU; they are in the HTML form and in ``to_dict()``.

    Raises:
        ConfigurationError: If an object is not a report, two reports have the same type, or reports are of different
            devices, models or tasks. If a name and a class may denote the same model, the verdict has a warning instead.

    The decision matrix is part of ``print(nb.runbook.gates())``. Incorrect results take precedence, then memory, data, batch
    size, fallbacks, and speed. Metrics that were not measured are never guessed.

    Example:
        >>> cpu = verdict(Evidence(device="cpu", task="annotation", texts_per_second=50.0, no_gpu=True))
        >>> cpu.recommendation, cpu.answer[0], cpu.reason.actions
        ('keep this device', 'The CPU annotates about 180,000 notes like these per hour.', ('Stay on the CPU. Run nb.sweep(model).',))
    """
    if gates is not None and not isinstance(gates, Gates):
        raise invalid_type("gates", gates, "Pass nb.runbook.gates(speedup=0.3).")
    evidence = collect_evidence(*reports, gates=gates, task=task, num_texts=num_texts)
    device = evidence.device or (None if reports else "cpu")
    if evidence.no_gpu is None and device == "cpu" and _has_no_gpu():
        evidence = replace(evidence, device=device, no_gpu=True)
    return evaluate(evidence, gates)


def _has_no_gpu() -> bool:
    """Return whether the CPU is the only device of this computer that can be used."""
    devices = SESSION.list_devices(confirm=False).devices
    return not any(get_device(status.device).is_accelerator and status.usable is not False for status in devices)


def evaluate(evidence: Evidence, gates: Gates | None = None) -> Verdict:
    """Return the verdict for evidence. The result is deterministic and defined for any evidence.

    Example:
        >>> evaluate(Evidence()).recommendation, evaluate(Evidence(task="training", out_of_memory_at=1)).recommendation
        ('measure first', 'checkpoint / accumulate')
    """
    gates = Gates() if gates is None else gates
    case = EvidenceCase(evidence, vars(gates))
    missing = case.find_missing_requirements()
    first_missing = min(missing, key=lambda requirement: not requirement.is_needed, default=None)
    command = first_missing.first_command if first_missing else "nb.doctor()"
    *rules, keep, tentative_keep, keep_cpu, measure = build_decision_matrix(case, command)
    # Rules of the same precedence and recommendation form one reason.
    groups: dict[tuple[Area, Recommendation], list[VerdictRule]] = {}
    for rule in rules:
        if rule.metrics:
            groups.setdefault((rule.precedence, rule.recommendation), []).append(rule)
    if not groups:
        rule = next((rule for rule in (keep, tentative_keep, keep_cpu) if rule.metrics), measure)
        groups[rule.precedence, rule.recommendation] = [rule]
    return Verdict(evidence, gates, tuple(map(_merge_rules, groups.values())), missing)


def _merge_rules(rules: Sequence[VerdictRule]) -> Reason:
    """Return rules with the same recommendation as one reason without duplicates."""
    return Reason(
        rules[0].recommendation,
        rules[0].precedence,
        tuple(dict.fromkeys(rule.condition for rule in rules)),
        tuple(dict.fromkeys(metric for rule in rules for metric in rule.metrics)),
        tuple(dict.fromkeys(rule.action for rule in rules)),
        tuple(dict.fromkeys(rule.reconsider_when for rule in rules)),
    )


def collect_evidence(
    *reports: object, gates: Gates | None = None, task: str | None = None, num_texts: int | None = None
) -> Evidence:
    """Return the metrics of reports, in any order. An :class:`Evidence` among them has precedence."""
    reports_by_type = _group_by_type(reports)
    user_evidence: Evidence = reports_by_type.pop(Evidence, Evidence())
    summaries = [extract_metrics(report) for report in reports_by_type.values() if not isinstance(report, SystemStatus)]
    device = user_evidence.device or _find_device(summaries, reports_by_type.get(Comparison))
    if task is None:
        task = user_evidence.task or _find_task(summaries)
    models = user_evidence.models or _find_model_names(reports_by_type.values()) or None
    dtypes = (summary.run.dtype for summary in summaries if summary.run.dtype)
    _single_value("a model in several dtypes", dtypes, "Pass reports of one dtype.")
    # A forecast runs on the CPU and does not depend on a simulation; the system status describes the computer only.
    is_simulated = any(summary.simulated for summary in summaries if summary.report != "forecast")
    is_simulated = is_simulated or getattr(reports_by_type.get(SystemStatus), "simulated", False)
    context = EvidenceContext(device, task, gates or Gates(), user_evidence.measured)
    sources: list[object] = []
    parity = reports_by_type.get(ParityReport)
    if parity is not None and parity.dtype != "float32":
        # Parity in a reduced dtype is evidence about the device only if the entities are kept. It has precedence over a
        # precision verdict in the same dtype.
        del reports_by_type[ParityReport]
        sources.append(PrecisionVerdict(parity, AcceptanceCriteria()))
    sources += reports_by_type.values()
    if Comparison in reports_by_type:
        sources.append(reports_by_type[Comparison].for_device(device or "cpu"))
    for name, metric in METRICS.items():
        if name not in context.values and (value := metric.read(sources, context)) is not None:
            context.values[name] = value
    return replace(
        user_evidence,
        **{
            **context.values,
            "models": models,
            "device": device,
            "task": task,
            "num_texts": user_evidence.num_texts if num_texts is None else num_texts,
            "simulated": user_evidence.simulated or is_simulated,
        },
    )


def _group_by_type(reports: Iterable[object]) -> dict[type, Any]:
    """Return reports by type.

    Raises:
        ConfigurationError: If an object is not a report, or two reports have the same type.
    """
    reports_by_type: dict[type, Any] = {}
    for report in reports:
        report_type = next((known_type for known_type in (Evidence, *REPORTS) if isinstance(report, known_type)), None)
        if report_type is None:
            message = f"{short_type_name(report)} is not a report for a verdict."
            raise ConfigurationError(
                message, "Pass reports of nb.compare, nb.sweep, nb.runbook.parity and similar functions."
            )
        if report_type in reports_by_type:
            message = f"There are two reports of the same type: {report_type.__name__}."
            raise ConfigurationError(message, "Pass one report of each type, of the same model on the same device.")
        reports_by_type[report_type] = report
    return reports_by_type


def _single_value(description: str, values: Iterable[str], remedy: str) -> str | None:
    """Return the value that reports agree on, or ``None`` if there is none.

    Raises:
        ConfigurationError: If there are different values.
    """
    unique = sorted(set(values))
    if len(unique) > 1:
        raise ConfigurationError(f"The reports cover {description}: {', '.join(unique)}.", remedy)
    return unique[0] if unique else None


def _find_device(summaries: Iterable[ReportMetrics], comparison: Comparison | None) -> str | None:
    """Return the device of the reports; for a comparison alone, the fastest device other than the CPU."""
    devices = (
        summary.canonical_device for summary in summaries if summary.canonical_device and summary.report != "comparison"
    )
    device = _single_value("several devices", devices, "Pass reports of one device.")
    if device is not None or comparison is None:
        return device
    speedups = [(result.speedup.median, result.device) for result in comparison.devices if result.speedup is not None]
    _, fastest = max(speedups, key=lambda speedup: speedup[0], default=(0.0, comparison.devices[0].device))
    return normalize_device(fastest)


def _find_task(summaries: Sequence[ReportMetrics]) -> str | None:
    """Return the task of the reports; a memory curve alone implies a training."""
    tasks = {TASK_BY_STEP[summary.run.task] for summary in summaries if summary.run.task in TASK_BY_STEP}
    task = _single_value("several tasks", tasks, "Pass reports of one task, or select it with task=.")
    return TRAINING if task is None and any(summary.report == "memory" for summary in summaries) else task


def _find_model_names(reports: Iterable[object]) -> tuple[str, ...]:
    """Return the names of the model in the reports, in alphabetical order.

    Raises:
        ConfigurationError: If two names certainly denote different models.
    """
    model_reports = [getattr(report, "parity", report) for report in reports]  # The parity of a precision verdict.
    names_and_tasks = sorted(
        {
            (getattr(report, "model", "") or getattr(report, "name", ""), getattr(report, "task", ""))
            for report in model_reports
        }
    )
    for is_comparable in (_is_class_name, _is_loadable):
        names = [name for name, task in names_and_tasks if name and task != CUSTOM_STEP and is_comparable(name)]
        different = [name for name in names if _canonical_name(name) != _canonical_name(names[0])]
        if different:
            models = f"{describe_value(names[0])} and {describe_value(different[0])}"
            raise ConfigurationError(
                f"The reports cover different models: {models}.", "Pass reports of one model, under one name."
            )
    return tuple(dict.fromkeys(name for name, _ in names_and_tasks if name))


def _is_class_name(name: str) -> bool:
    """Return whether a name is the class of a model object, not a name from which a model is loaded."""
    return name.isidentifier() and name != name.lower() and name not in WRAPPERS


def _is_loadable(name: str) -> bool:
    """Return whether a model can be loaded from a name: a bundled model, a hub id, or a path."""
    return name in BUNDLED or not name.isidentifier()


def _canonical_name(name: str) -> object:
    """Return the name of a class, or the location of a model, to compare names of models."""
    try:
        return name if _is_class_name(name) else find_model(name)
    except UnknownModelError:
        return name
