"""``nb.verdict``: one recommendation from several reports, with its supporting metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..._render.display import (
    OK,
    SIMULATED_SUFFIX,
    WARNING,
    Displayable,
    Report,
    Table,
    format_percent,
    pluralize,
)
from ..._utils.plain import MAX_INTEGER
from ..._utils.text import describe_value, short_type_name
from ..._utils.validation import check_choice, check_optional_integer, invalid_type, is_finite_number
from ...devices.registry import get_device
from ...devices.request import normalize_device
from ...errors import ConfigurationError
from ...session import SESSION
from ...training.curve import GROWTH_EPOCHS, describe_limit
from ..bench.comparison import GPU_BATCHES, SECONDS_PER_HOUR, Comparison, describe_cpu_speed
from ..bench.workloads import ANNOTATION, CUSTOM_STEP, FORWARD_PASS, TRAINING_STEP
from ..checks.parity_report import ParityReport
from ..checks.validation import PrecisionVerdict
from .metrics import (
    GATES,
    GENERATION,
    INFERENCE,
    METRICS,
    REPORTS,
    TASKS,
    TRAINING,
    Area,
    Case,
    Evidence,
    ReportMetrics,
    finite_numbers,
    format_value,
    read_report,
)
from .rules import (
    DecisionCase,
    Gates,
    Reason,
    Recommendation,
    Requirement,
    build_decision_matrix,
    list_requirements,
)

# Task of each type of measured step; a custom step may belong to any task.
TASK_BY_STEP = {ANNOTATION: ANNOTATION, FORWARD_PASS: INFERENCE, TRAINING_STEP: TRAINING}

# Classes that wrap a model, and do not identify it.
WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel"})

# Execution targets of a workload, with their strengths, risks and typical workloads.
LANES = (
    (
        "CPU",
        "supports every PyTorch operator; the reference for all comparisons",
        "slow for large models and long texts",
        "small models, short texts, checks, and work that another lane computes incorrectly",
    ),
    (
        "MPS",
        "runs the same PyTorch code on the GPU of a Mac; notes stay on the machine",
        "operators that fall back or have silent errors; memory shared with all programs",
        "annotation in full batches, and fine-tuning of models that fit in memory",
    ),
    (
        "MLX",
        "built for Apple GPUs, with fast text generation; not measured here",
        "different code and weights, which require full validation",
        "language models that generate text on a Mac",
    ),
    (
        "remote pool",
        "throughput scales with the number of computers; continues while the laptop sleeps",
        "notes leave this computer; different drivers and versions; queueing",
        "work of more than a day, services, and models that do not fit on this computer",
    ),
)


@dataclass(frozen=True, repr=False)
class Lanes(Displayable):
    """Comparison of the lanes CPU, MPS, MLX and remote pool. A lane is an execution target of a workload.

    Attributes:
        recommendation: Recommendation of the verdict.
    """

    SCHEMA = "openmed_nb/lanes/1"

    recommendation: Recommendation

    def to_report(self) -> Report:
        """Return a report with a row for each lane."""
        table = Table("Lanes", ("lane", "strengths", "risks", "best for"), LANES)
        review = "If the same operators still dominate Profile.diff(...) after two weeks, move this work to another lane or accept it."
        return Report(f"Lanes: {self.recommendation}", (review,), (table,))


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
        >>> verdict.recommendation, verdict.is_conclusive, verdict.reason.metrics
        ('compute on the CPU', True, ('entity_agreement',))
    """

    SCHEMA = "openmed_nb/verdict/1"
    JSON_EXCLUDE = ("missing_requirements",)
    JSON_PROPERTIES = ("recommendation", "is_conclusive", "simulated", "warnings", "not_known")

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
        return bool(self.evidence["simulated"])

    @property
    def _case(self) -> DecisionCase:
        return DecisionCase(self.evidence, self.gates)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the evidence."""
        return tuple(self._iter_warnings())

    def _iter_warnings(self) -> Iterator[str]:
        evidence = self.evidence
        case = self._case
        if evidence["refused_dtype"]:
            yield f"The entities of the model change in {evidence['refused_dtype']}: use float32."
        if evidence["silent_errors"]:
            yield f"Known silent errors were detected on this device ({', '.join(evidence['silent_errors'])}); see nb.doctor() for remedies."
        if (evidence["entity_bound"] or 0) > 1 - self.gates.entity_agreement:
            yield f"Up to {format_value('fraction', evidence['entity_bound'])} of the entities can differ: compare more texts."
        growth = evidence["memory_growth"]
        if growth and evidence["memory_verdict"] == "growing below the limit":
            yield f"Memory grows by {format_percent(growth, '.1f')} in {GROWTH_EPOCHS} epochs{describe_limit(growth, self.gates.memory_growth)}."
        if evidence["memory_advice"] and evidence["memory_verdict"] != "growing":
            yield f"Memory curve, {evidence['memory_verdict']}: {evidence['memory_advice']}"
        if evidence["task"] == INFERENCE and case.on_accelerator and not case.is_correctness_known():
            yield "Parity of a custom module is not known: compare its outputs on both devices with torch.testing.assert_close."

    @property
    def not_known(self) -> tuple[str, ...]:
        """Missing measurements with their commands; those that could change the verdict come first."""
        blocking = self.blocking_requirements
        return tuple(
            f"Missing{', and could change the verdict' if requirement in blocking else ''}: {requirement.name}. "
            f"{self._case.describe_next_step(requirement.command)}"
            for requirement in sorted(self.missing_requirements, key=lambda requirement: requirement not in blocking)
        )

    @property
    def missing_summary(self) -> str:
        """Missing measurements that could change the verdict, and the command of the first one; empty if there are none."""
        blocking = self.blocking_requirements
        if not blocking:
            return ""
        next_step = self._case.describe_next_step(blocking[0].command)
        return (
            f"Not measured, and could change the verdict: {', '.join(requirement.name for requirement in blocking)}."
            f"{'' if next_step in ' '.join(self.reason.actions) else f' {next_step}'}"
        )

    @property
    def answer(self) -> tuple[str, ...]:
        """Speed, best batch size and duration on the CPU as sentences; empty for another device."""
        evidence = self.evidence
        if self._case.on_accelerator:
            return ()
        sentences = []
        rate, low, high = (evidence[f"texts_per_second{end}"] or 0 for end in ("", "_low", "_high"))
        # A rate without an interval is not stated.
        if min(rate, low, high) > 0:
            sentences.append(describe_cpu_speed(evidence["task"] or ANNOTATION, rate, low, high))
            if num_texts := evidence["num_texts"]:
                hours = (format_value("hours", num_texts / limit / SECONDS_PER_HOUR) for limit in (high, low))
                sentences.append(f"On this computer, {pluralize(num_texts, 'note')} take {' to '.join(hours)}.")
        if evidence["knee"]:
            sentences.append(
                f"The best batch size is {'at least ' if evidence['knee_gain'] is None else ''}{pluralize(evidence['knee'], 'row')}."
            )
        return tuple(sentences)

    @property
    def lanes(self) -> Lanes:
        """Comparison of CPU, MPS, MLX and a remote pool."""
        return Lanes(self.recommendation)

    def describe_metrics(self, reason: Reason) -> str:
        """Return the metrics of a reason with their gates and named items, without values that differ between runs."""
        limits = self.gates.format_values()
        descriptions = []
        for name in reason.metrics:
            label, unit, *_ = METRICS[name]
            if name == "speedup" and self.evidence["batch_tokens"]:
                label += GPU_BATCHES
            if unit == "names":
                label += f": {format_value(unit, self.evidence[name])}"
            elif name in limits:
                label += f" (gate {name}: {limits[name]})"
            descriptions.append(label)
        return "; ".join(descriptions)

    def to_report(self) -> Report:
        """Return a report of the recommendation and its reason; measured values are in a table of metrics."""
        evidence = self.evidence
        reason = self.reason
        disturbed = evidence["disturbed_measurements"]
        operators = (evidence["refused_operators"] or ()) + (evidence["fallback_operators"] or ())
        suffix = (
            f": {', '.join(operators)}"
            if self.recommendation == "fall back to the CPU for these operators" and operators
            else ""
        )
        if reason.metrics == ("no_gpu",):
            suffix = ", the only one; nothing was measured"
        device = f"{evidence['device'] or 'an unknown device'}{SIMULATED_SUFFIX if self.simulated else ''}"
        sentences = (
            *self.answer,
            f"Reason: {'; '.join(reason.conditions)}.",
            f"Metrics: {self.describe_metrics(reason)}." if reason.metrics else "",
            self.missing_summary,
            f"Suggested action: {' '.join(reason.actions)}",
            *(f"Condition during the measurement: {condition}" for condition in evidence["slow_conditions"] or ()),
            f"Measurements to repeat, because their times do not count: {', '.join(map(self._case.format_command, disturbed))}."
            if disturbed
            else "",
        )
        limits = self.gates.format_values()
        rows = tuple(
            (
                metric.label,
                format_value(metric.unit, evidence[name]),
                f"at {'least' if GATES[name].is_minimum else 'most'} {limits[name]}" if name in limits else "",
            )
            for name, metric in METRICS.items()
            # These values are sentences.
            if evidence[name] is not None and not (name in {"slow_conditions", "memory_advice"} and evidence[name])
        )
        return Report(
            title=f"Verdict on {device}: {self.recommendation}{suffix}",
            sentences=(*filter(None, sentences), *self.warnings, *self.gates.changes),
            metrics=(Table("Measurements", ("metric", "value", "gate"), rows, collapsed=True),),
            status=OK if self.recommendation == "keep this device" and self.is_conclusive else WARNING,
        )

    def logbook_metrics(self) -> ReportMetrics:
        """Return the numeric evidence for a logbook."""
        evidence = self.evidence
        values = finite_numbers({**evidence, "not_known": len(self.missing_requirements)})
        return ReportMetrics("verdict", evidence["task"] or "computer", evidence["device"], self.simulated, values)


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
            inference or generation, and a custom step belongs to any task. If ``None``, use the task of the reports. Of
            several tasks of reports, this selects one.
        num_texts: Number of texts to process, for the estimated duration.

    Returns:
        The verdict:

        - ``recommendation``: ``"keep this device"``, ``"speed up the input pipeline"``, ``"fix the leak"``,
          ``"fix the batch"``, ``"checkpoint / accumulate"``, ``"fall back to the CPU for these operators"``,
          ``"move to MLX"``, ``"move to a remote pool"``, ``"compute on the CPU"`` or ``"measure first"``.
        - ``reason``: conditions, names of the supporting metrics, and suggested actions.
        - ``missing_requirements``: relevant measurements that are missing.
        - ``is_conclusive``: whether none of them could change the verdict.
        - ``lanes``: comparison of CPU, MPS, MLX and a remote pool.
        - ``answer``: on the CPU, its notes per hour, best batch size and duration as sentences.

        On a computer without a GPU, there is no other device to choose. The recommendation is to measure first only if a
        training was too short to show whether memory grows.

    Raises:
        ConfigurationError: If an argument is not valid, an object is not a report, two reports have the same type, or reports
            are of different devices, models or tasks, or of another task than ``task``.

    Times of a report with a ``disturbance``, such as a busy computer, count as not measured, and the verdict names the
    measurements to repeat. The times of other reports still count. The decision matrix is part of
    ``print(nb.runbook.gates())``. Incorrect results take precedence, then memory, data, batch size, fallbacks, and speed.
    Metrics that were not measured are never guessed.

    Example:
        >>> cpu = verdict(Evidence(device="cpu", task="annotation", knee=16, no_gpu=True))
        >>> cpu.recommendation, cpu.answer, cpu.reason.actions
        ('keep this device', ('The best batch size is at least 16 rows.',), ('Stay on the CPU. Run nb.sweep(model).',))
    """
    if gates is not None and not isinstance(gates, Gates):
        raise invalid_type("gates", gates, "Pass nb.runbook.gates(speedup=0.3).")
    if task is not None:
        check_choice("task", task, TASKS)
    check_optional_integer("num_texts", num_texts, minimum=0, maximum=MAX_INTEGER, otherwise=", such as len(texts)")
    evidence = collect_evidence(*reports, gates=gates, task=task, num_texts=num_texts)
    device = evidence["device"] or (None if reports else "cpu")
    if evidence["no_gpu"] is None and device == "cpu":
        devices = SESSION.list_devices(confirm=False).devices
        if not any(get_device(status.device).is_accelerator and status.usable is not False for status in devices):
            evidence = Evidence(**{**evidence, "device": device, "no_gpu": True})
    return evaluate(evidence, gates)


def evaluate(evidence: Evidence, gates: Gates | None = None) -> Verdict:
    """Return the verdict for evidence. The result is deterministic and defined for any evidence.

    Example:
        >>> evaluate(Evidence()).recommendation, evaluate(Evidence(task="training", out_of_memory_at=1)).recommendation
        ('measure first', 'checkpoint / accumulate')
    """
    gates = gates or Gates()
    case = DecisionCase(evidence, gates)
    missing = tuple(requirement for requirement in list_requirements(case) if requirement.is_missing)
    first_missing = min(missing, key=lambda requirement: not requirement.is_needed, default=None)
    problems, conclusions = build_decision_matrix(
        case, case.describe_next_step(first_missing.command if first_missing else "nb.doctor()")
    )
    # Rules of the same precedence and recommendation form one reason.
    reasons: dict[tuple[Area, Recommendation], Reason] = {}
    for rule in problems:
        if rule.metrics:
            key = (rule.precedence, rule.recommendation)
            reasons[key] = reasons[key].merge(rule) if key in reasons else rule
    conclusion = next((rule for rule in conclusions if rule.metrics), conclusions[-1])
    return Verdict(evidence, gates, tuple(reasons.values()) or (conclusion,), missing)


def collect_evidence(
    *reports: object, gates: Gates | None = None, task: str | None = None, num_texts: int | None = None
) -> Evidence:
    """Return the metrics of reports, in any order. An :class:`Evidence` among them has precedence."""
    reports_by_type = _group_by_type(reports)
    evidence = Evidence(**reports_by_type.pop(Evidence, {}))
    gates = gates or Gates()
    summaries = [read_report(report, Case()) for report in reports_by_type.values()]
    _check_models(reports_by_type.values())
    _single_value(
        "a model in several dtypes", (summary.run.dtype for summary in summaries), "Pass reports of one dtype."
    )
    values = {
        **evidence,
        "device": evidence["device"] or _find_device(summaries, reports_by_type.get(Comparison)),
        "task": _find_task(summaries, task or evidence["task"]),
        "num_texts": evidence["num_texts"] if num_texts is None else num_texts,
        "simulated": evidence["simulated"] or any(summary.simulated for summary in summaries) or None,
    }
    parity = reports_by_type.get(ParityReport)
    if parity is not None and parity.dtype != "float32":
        # Parity in a reduced dtype is evidence about the device only if the entities are kept. It has precedence over a
        # precision verdict in the same dtype.
        del reports_by_type[ParityReport]
        reports_by_type[PrecisionVerdict] = PrecisionVerdict(parity)
    for report_type in REPORTS:
        if report_type in reports_by_type:
            case = Case(Evidence(**values), gates)
            for name, value in read_report(reports_by_type[report_type], case).values.items():
                is_known = value is not None and (not isinstance(value, float) or is_finite_number(value))
                # All reports contribute.
                if name == "disturbed_measurements" or (name == "slow_conditions" and evidence[name] is None):
                    values[name] = tuple(dict.fromkeys(values.get(name, ()) + value))
                elif name in METRICS and is_known and values.get(name) is None:
                    values[name] = value
    return Evidence(**values)


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


def _single_value(description: str, values: Iterable[str | None], remedy: str) -> str | None:
    """Return the value that reports agree on, or ``None`` if there is none.

    Raises:
        ConfigurationError: If there are different values.
    """
    unique = sorted({value for value in values if value})
    if len(unique) > 1:
        raise ConfigurationError(f"The reports cover {description}: {', '.join(unique)}.", remedy)
    return unique[0] if unique else None


def _find_device(summaries: Iterable[ReportMetrics], comparison: Comparison | None) -> str | None:
    """Return the device of the reports; for a comparison alone, the fastest device other than the CPU."""
    devices = (summary.canonical_device for summary in summaries if summary.report != "comparison")
    device = _single_value("several devices", devices, "Pass reports of one device.")
    if device is not None or comparison is None:
        return device
    others = comparison.devices[1:] or comparison.devices  # The first is the CPU.
    fastest = max(others, key=lambda result: result.speedup.median if result.speedup else 0.0)
    return normalize_device(fastest.device)


def _find_task(summaries: Sequence[ReportMetrics], selected: str | None) -> str | None:
    """Return the selected task, or that of the reports; a memory curve alone implies a training.

    Raises:
        ConfigurationError: If no report has the selected task, or if none is selected and the reports have several tasks.
    """
    tasks = {TASK_BY_STEP.get(summary.run.task or "") for summary in summaries} - {None}
    if selected:
        # No step generates text, so forward passes are measured for that task.
        if tasks and (INFERENCE if selected == GENERATION else selected) not in tasks:
            message = (
                f"The reports cover {', '.join(sorted(map(str, tasks)))}, and not the task {describe_value(selected)}."
            )
            raise ConfigurationError(message, "Remove task=, or pass reports of that task.")
        return selected
    task = _single_value("several tasks", tasks, "Pass reports of one task, or select it with task=.")
    return TRAINING if task is None and any(summary.report == "memory" for summary in summaries) else task


def _check_models(reports: Iterable[object]) -> None:
    """Raise an error if two reports cover different models.

    The name of a class and the name from which a model is loaded may denote the same model, and so may a wrapper.
    """
    names = set()
    for report in reports:
        subject = getattr(report, "parity", report)  # The parity of a precision verdict.
        if getattr(subject, "task", "") != CUSTOM_STEP:
            names.add(getattr(subject, "model", "") or getattr(subject, "name", ""))
    names -= {"", *WRAPPERS}
    classes = {name for name in names if name.isidentifier() and name != name.lower()}
    for group in (classes, names - classes):
        _single_value("several models", map(describe_value, group), "Pass reports of one model, under one name.")
