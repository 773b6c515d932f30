"""Requirements and decision matrix of a verdict, evaluated on its evidence, and their display with the gates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ..._render.display import Displayable, JsonMixin, Report, Table
from ..._utils.validation import check_names
from ...devices.registry import get_device
from ..bench.comparison import Comparison
from ..bench.profile import Profile
from ..bench.sweep import SweepReport
from ..bench.workloads import ANNOTATION, TOKENIZATION_REMEDY
from ..checks.parity_report import TOLERANCES
from .metrics import (
    GATES,
    GENERATION,
    INFERENCE,
    METRICS,
    TOO_FEW_EPOCHS,
    TRAINING,
    Area,
    Case,
    Evidence,
    Thresholds,
)

Recommendation = Literal[
    "keep this device",
    "speed up the input pipeline",
    "fix the leak",
    "fix the batch",
    "checkpoint / accumulate",
    "fall back to the CPU for these operators",
    "move to MLX",
    "move to a remote pool",
    "compute on the CPU",
    "measure first",
]

MetricNames = tuple[str, ...]

# Rounding error of a difference of two recalls.
ROUNDING = 1e-9

CORRECTNESS_GATES = ("entity_agreement", "recall_loss", "logits", "gradients")
# Commands that measure training steps if the task is a training. Training takes example inputs or a loader instead of texts.
TRAINING_COMMANDS = {
    Comparison.COMMAND: "nb.compare(model, data, training=True)",
    SweepReport.COMMAND: "nb.sweep(model, data, training=True)",
    Profile.COMMAND: "nb.runbook.profile(model, data, training=True)",
}
# Gates that support keeping a device: comparisons with the CPU, and gates of the device itself.
COMPARISON_GATES = ("speedup", "entity_agreement", "logits")
DEVICE_GATES = ("headroom", "memory_growth", "data_fraction", "knee_gain", "fallback_time", "fallback_calls")


@dataclass(frozen=True)
class DecisionCase(Case):
    """A case with the conditions of the rules and requirements.

    A method that returns names of metrics returns none if its condition does not hold.
    """

    def select_nonempty(self, *names: str) -> MetricNames:
        """Return the metrics with names, counts above 0, or true flags."""
        return tuple(name for name in names if self.evidence[name])

    def get_threshold(self, gate: str) -> float:
        """Return a threshold on the scale of its metric.

        For a speedup this is ``1 + gate``, because in binary arithmetic 1.22 - 1 is less than 0.22.
        """
        limit: float = getattr(self.gates, gate)
        return 1 + limit if METRICS[gate].unit == "ratio" else limit

    def exceeding(self, gate: str) -> MetricNames:
        """Return the metric of a gate if it violates the gate by more than rounding."""
        value = self.evidence[gate]
        if value is None:
            return ()
        excess = value - self.get_threshold(gate)
        return (gate,) if (-excess if GATES[gate].is_minimum else excess) > ROUNDING else ()

    def is_within(self, gate: str) -> bool:
        """Return whether the metric of a gate was measured and does not violate the gate."""
        return self.evidence[gate] is not None and not self.exceeding(gate)

    @property
    def on_accelerator(self) -> bool:
        """Whether the device can be compared with the CPU, which an unknown device can, as it may be MPS."""
        return get_device(self.evidence["device"] or "mps").is_accelerator

    @property
    def has_fallbacks(self) -> bool:
        """Whether operators can fall back to the CPU, which an unknown device can, as it may be MPS."""
        return get_device(self.evidence["device"] or "mps").has_fallbacks

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the logit difference, as in ``checks.parity_report``.

        Rounding errors accumulate in larger models. Up to the tolerance of a 16-bit dtype, the entities therefore decide.
        """
        logits = self.evidence["logits"]
        tolerance = TOLERANCES["float16"].logits or 0.0
        return logits is not None and logits <= tolerance and self.evidence["entity_agreement"] in {None, 1}

    @property
    def is_input_pipeline_fast(self) -> bool:
        """Whether measurements show that neither data nor copies take much of a step."""
        return self.is_within("data_fraction") and not self.find_slow_transfer()

    @property
    def speedups(self) -> list[float]:
        """Known values among the speedup and the ends of its interval, in ascending order."""
        values = [self.evidence[name] for name in ("speedup_low", "speedup", "speedup_high")]
        return sorted(value for value in values if value is not None)

    def find_incorrect_results(self) -> MetricNames:
        """Return the metrics whose results differ from the CPU in float32."""
        if not self.on_accelerator:
            return ()
        metrics = self.select_nonempty("device_faults", "non_finite_tokens", "divergence_source")
        for name in CORRECTNESS_GATES:
            if name != "logits" or not self.is_rounding:
                metrics += self.exceeding(name)
        return metrics

    def find_slow_transfer(self) -> MetricNames:
        """Return the transfer fraction if it is too large; work on the CPU has no transfers."""
        return self.exceeding("transfer_fraction") if self.on_accelerator else ()

    def find_blocking_synchronizations(self) -> MetricNames:
        """Return the synchronization points if the device is underutilized.

        On a busy device, a synchronization such as reading the loss costs little.
        """
        utilization = self.exceeding("utilization")
        synchronizations = self.select_nonempty("synchronizations")
        return synchronizations + utilization if utilization and synchronizations else ()

    def find_idle_device(self) -> MetricNames:
        """Return speedup and utilization if both are too small, because the device waits."""
        speedup = self.exceeding("speedup")
        utilization = self.exceeding("utilization")
        return speedup + utilization if speedup and utilization and self.on_accelerator else ()

    def find_costly_fallbacks(self) -> MetricNames:
        """Return the operators that MPS does not support, and those that fall back if their cost is too high."""
        if not self.has_fallbacks:
            return ()
        cost = self.exceeding("fallback_calls" if self.evidence["fallback_time"] is None else "fallback_time")
        operators = self.select_nonempty("fallback_operators") if cost else ()
        return self.select_nonempty("refused_operators") + cost + operators

    def find_memory_shortage(self) -> MetricNames:
        """Return the metrics that show that the batch size in use does not fit, or leaves too little memory free."""
        batch = self.evidence["batch"]
        limit = self.evidence["out_of_memory_at"]
        out_of_memory = ("out_of_memory_at",) if limit and batch and batch >= limit else ()
        return out_of_memory + self.exceeding("headroom")

    def find_small_speedup(self) -> MetricNames:
        """Return speedup and utilization if the whole interval is below its gate on a working device.

        The speedup then reflects the device itself: it is busy, or neither data nor batch size limit it.
        """
        is_tuned = self.is_input_pipeline_fast and self.is_within("knee_gain")
        is_working = is_tuned or self.is_within("utilization")
        speedups = self.speedups
        if not (self.on_accelerator and is_working and speedups) or speedups[-1] >= self.get_threshold("speedup"):
            return ()
        return ("speedup",) if self.evidence["utilization"] is None else ("speedup", "utilization")

    def find_supporting_metrics(self) -> MetricNames:
        """Return the metrics that support keeping the device.

        Metrics beyond their gate that do not decide are omitted, such as a count of fallbacks whose time is known. A
        speedup whose interval contains the gate is included.
        """
        names = (*COMPARISON_GATES, *DEVICE_GATES) if self.on_accelerator else DEVICE_GATES
        return tuple(
            name for name in names if self.is_within(name) or (name == "speedup" and self.evidence[name] is not None)
        )

    @property
    def is_curve_too_short(self) -> bool:
        """Whether the memory curve does not show whether memory grows, although the verdict depends on it.

        A training must be long enough to show it. A curve of another task, such as the ten epochs of a report, needs more
        only if it has too few to show anything.
        """
        is_training = self.evidence["task"] in {None, TRAINING}
        verdict = self.evidence["memory_verdict"]
        return verdict == TOO_FEW_EPOCHS or (is_training and verdict == "insufficient data")

    def format_command(self, command: str) -> str:
        """Return a command that measures the steps of the task."""
        return TRAINING_COMMANDS.get(command, command) if self.evidence["task"] == TRAINING else command

    def describe_next_step(self, command: str) -> str:
        """Return the sentence that asks for a measurement, or for its repetition if its times were not reliable."""
        is_repeated = command in (self.evidence["disturbed_measurements"] or ())
        called = self.format_command(command)
        return f"Repeat {called} on a quiet computer." if is_repeated else f"Run {called}."

    def is_correctness_known(self) -> bool:
        """Return whether it is known if results are correct.

        Only parity shows this for entities. Custom modules have no entities, so logits, training losses or the probes of
        the doctor are used instead.
        """
        evidence = self.evidence
        if evidence["entity_agreement"] is not None:
            return True
        is_doubtful = self.is_rounding and self.exceeding("logits")
        has_no_errors = () in {evidence["silent_errors"], evidence["divergence_source"]}
        is_shown = has_no_errors or (evidence["logits"] is not None and not is_doubtful)
        return evidence["task"] not in {None, ANNOTATION} and is_shown

    def is_fallback_cost_known(self) -> bool:
        """Return whether it is known that no operator falls back, or how much the fallbacks cost."""
        is_time_known = self.evidence["fallback_time"] is not None
        return is_time_known or self.evidence["fallback_operators"] == () or self.is_within("fallback_calls")

    def needs_utilization(self) -> bool:
        """Return whether the utilization is required.

        It is if the speedup is small, and data or batch size may be the cause.
        """
        is_explained = self.is_input_pipeline_fast and self.is_within("knee_gain")
        return self.on_accelerator and not (self.is_within("speedup") or is_explained)

    def is_speedup_known(self) -> bool:
        """Return whether the whole interval of the speedup is on one side of its gate."""
        speedups = self.speedups
        is_measured = len(speedups) == 3  # noqa: PLR2004 - both ends and the median
        return is_measured and not speedups[0] < self.get_threshold("speedup") <= speedups[-1]


@dataclass(frozen=True)
class Requirement:
    """A measurement that a verdict depends on.

    Attributes:
        name: Name of the measurement.
        precedence: Area, which determines the precedence.
        command: Command that measures it.
        is_missing: Whether it could change this verdict, and was not measured.
        is_needed: Whether a verdict is inconclusive without it.
        is_blocking: Whether no device is kept without it, if it is needed.
    """

    name: str
    precedence: Area
    command: str
    is_missing: bool
    is_needed: bool = True
    is_blocking: bool = True


def list_requirements(case: DecisionCase) -> tuple[Requirement, ...]:
    """Return all requirements of a verdict."""
    evidence = case.evidence
    task = evidence["task"]
    has_memory = evidence["headroom"] is not None or (evidence["out_of_memory_at"] and evidence["batch"])
    needs_growth = task in {None, TRAINING} and (evidence["memory_growth"] is None or not evidence["memory_verdict"])
    # A comparison determines the task, except for a custom step, and the batch size that a sweep is compared with.
    task_command = "nb.verdict(..., task='annotation')" if evidence["texts_per_second"] else Comparison.COMMAND
    batch_command = Comparison.COMMAND if evidence["knee"] and evidence["batch"] is None else SweepReport.COMMAND
    return (
        Requirement("device", Area.CORRECTNESS, Comparison.COMMAND, evidence["device"] is None),
        Requirement("task", Area.CORRECTNESS, task_command, task is None),
        Requirement(
            "parity",
            Area.CORRECTNESS,
            "nb.runbook.parity(model, texts)",
            case.on_accelerator and not case.is_correctness_known(),
            is_blocking=task != INFERENCE,
        ),
        Requirement("memory growth", Area.MEMORY, "nb.epochs(...)", needs_growth or case.is_curve_too_short),
        Requirement("free memory", Area.MEMORY, SweepReport.COMMAND, not has_memory),
        Requirement("data wait time", Area.DATA, Comparison.COMMAND, evidence["data_fraction"] is None),
        Requirement("gain from the best batch size", Area.BATCH, batch_command, evidence["knee_gain"] is None),
        Requirement(
            "fallback cost",
            Area.FALLBACKS,
            "nb.runbook.fallbacks()",
            case.has_fallbacks and not case.is_fallback_cost_known(),
        ),
        Requirement(
            "speedup",
            Area.SPEED,
            Comparison.COMMAND,
            case.on_accelerator and not case.is_speedup_known(),
            is_blocking=evidence["speedup"] is None,
        ),
        Requirement(
            "utilization", Area.SPEED, Comparison.COMMAND, case.needs_utilization() and evidence["utilization"] is None
        ),
        Requirement("doctor", Area.SPEED, "nb.doctor()", evidence["doctor_failures"] is None, is_needed=False),
        Requirement(
            "synchronization points",
            Area.SPEED,
            Profile.COMMAND,
            evidence["synchronizations"] is None,
            is_needed=False,
        ),
        Requirement(
            "power and thermal state",
            Area.SPEED,
            "nb.system_status()",
            evidence["slow_conditions"] is None,
            is_needed=False,
        ),
    )


@dataclass(frozen=True)
class Reason(JsonMixin):
    """A recommendation with its conditions and supporting metrics. A rule of the decision matrix has one condition.

    Attributes:
        recommendation: The recommendation.
        precedence: Area of the recommendation, which determines its precedence.
        conditions: Conditions as text.
        metrics: Names of the metrics that support it; empty for a rule that does not apply.
        actions: Suggested actions.
    """

    JSON_EXCLUDE = ("precedence",)

    recommendation: Recommendation
    precedence: Area
    conditions: tuple[str, ...]
    metrics: MetricNames
    actions: tuple[str, ...]

    def merge(self, other: Reason) -> Reason:
        """Return this reason with those of another one for the same recommendation, without duplicates."""
        return replace(
            self,
            conditions=tuple(dict.fromkeys(self.conditions + other.conditions)),
            metrics=tuple(dict.fromkeys(self.metrics + other.metrics)),
            actions=tuple(dict.fromkeys(self.actions + other.actions)),
        )


class Rule(NamedTuple):
    """A row of the decision matrix. Its texts contain thresholds in braces.

    Attributes:
        name: Name of the rule.
        recommendation: The recommendation.
        area: Name of its :class:`Area`.
        condition: Condition as text.
        action: Suggested action.
    """

    name: str
    recommendation: Recommendation
    area: str
    condition: str
    action: str


# The rules for problems in order of precedence, and the rules that decide if there is no problem.
PROBLEMS, CONCLUSIONS = (
    [Rule(**row) for row in rows]
    for rows in json.loads(Path(__file__).with_name("rules.json").read_text("utf-8")).values()
)

ANNOTATION_HINT = " For annotation, use nb.annotate(..., batch_tokens=sweep.batch_tokens)."


def find_rule_metrics(case: DecisionCase) -> dict[str, MetricNames]:
    """Return the metrics that support each rule by its name; none for a rule that does not apply."""
    evidence = case.evidence
    is_training = evidence["task"] == TRAINING
    # For a language model that generates text on MPS, MLX is an alternative.
    generates_on_mps = evidence["task"] == GENERATION and evidence.device_type == "mps"
    incorrect_results = case.find_incorrect_results()
    small_speedup = case.find_small_speedup()
    idle_device = case.find_idle_device()
    knee_gain = case.exceeding("knee_gain")
    is_batch_good = case.is_within("knee_gain")
    memory_shortage = case.find_memory_shortage()
    single_row_out_of_memory = ("out_of_memory_at",) if evidence["out_of_memory_at"] == 1 else ()
    missing = [
        requirement for requirement in list_requirements(case) if requirement.is_missing and requirement.is_needed
    ]
    supporting_metrics = case.find_supporting_metrics()
    # A training that was too short to show whether memory grows is no reason to keep a device.
    has_only_cpu = evidence["no_gpu"] and not case.on_accelerator and not case.is_curve_too_short
    return {
        "doctor_failures": case.select_nonempty("doctor_failures"),
        "incorrect_results": () if generates_on_mps else incorrect_results,
        "incorrect_generation": incorrect_results if generates_on_mps else (),
        "memory_growth": case.exceeding("memory_growth") if evidence["memory_verdict"] == "growing" else (),
        "training_memory": (single_row_out_of_memory or memory_shortage) if is_training else (),
        "single_row": single_row_out_of_memory,
        "batch_memory": () if is_training or single_row_out_of_memory else memory_shortage,
        "data": case.exceeding("data_fraction"),
        "transfers": case.find_slow_transfer(),
        "synchronizations": case.find_blocking_synchronizations(),
        "idle_pipeline": () if case.is_input_pipeline_fast else idle_device,
        "knee": knee_gain + case.select_nonempty("batch", "knee") if knee_gain else (),
        "tiny_batch": () if is_batch_good else case.select_nonempty("tiny_batch"),
        "idle_batch": idle_device if case.is_input_pipeline_fast and not is_batch_good else (),
        "fallbacks": case.find_costly_fallbacks(),
        "small_speedup": () if generates_on_mps else small_speedup,
        "small_generation_speedup": small_speedup if generates_on_mps else (),
        "hours": case.exceeding("hours"),
        "all_measured": () if missing else supporting_metrics,
        "none_blocking": () if any(requirement.is_blocking for requirement in missing) else supporting_metrics,
        "only_cpu": supporting_metrics or ("no_gpu",) if has_only_cpu else (),
        "nothing_measured": (),
    }


def build_decision_matrix(case: DecisionCase, next_step: str) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
    """Return the rules for problems in order of precedence, and the rules that decide if there is no problem.

    Args:
        case: Evidence and thresholds. The texts of the rules contain the thresholds.
        next_step: Sentence that asks for the first missing requirement.
    """
    task = case.evidence["task"]
    memory_advice = "Do what the memory curve suggests, as in nb.training.last_curve()."
    texts = {
        **case.gates.format_values(),
        "next_step": next_step,
        "memory_advice": case.evidence["memory_advice"] or memory_advice,
        "annotation_hint": ANNOTATION_HINT if task in {None, ANNOTATION} else "",
        "input": "data",
        "input_advice": "Prefetch, and tokenize once: see nb.runbook.profile(step, loader).",
    }
    if task == ANNOTATION:
        texts |= {"input": "tokenization", "input_advice": TOKENIZATION_REMEDY}
    metrics = find_rule_metrics(case)

    def to_reasons(rules: Sequence[Rule]) -> tuple[Reason, ...]:
        return tuple(
            Reason(
                rule.recommendation,
                Area[rule.area],
                (rule.condition.format(**texts),),
                metrics[rule.name],
                (rule.action.format(**texts),),
            )
            for rule in rules
        )

    return to_reasons(PROBLEMS), to_reasons(CONCLUSIONS)


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

    Raises:
        ConfigurationError: If a threshold is out of range.

    Example:
        >>> Gates(speedup=0.3).changes
        ('Gate changed: speedup from 22% to 30%.',)
    """

    SCHEMA = "openmed_nb/gates/1"
    JSON_PROPERTIES = ("changes",)

    def to_report(self) -> Report:
        """Return the thresholds with their reasons, the decision matrix and the table of symptoms."""
        thresholds = tuple(
            (name, value, GATES[name].description, GATES[name].reason) for name, value in self.format_values().items()
        )
        matrix = build_decision_matrix(DecisionCase(Evidence(), self), "Run the first command that the verdict lists.")
        rules = tuple((rule.recommendation, *rule.conditions, *rule.actions) for part in matrix for rule in part)
        symptoms = tuple(
            (
                row.symptom,
                row.cause.replace("`", ""),
                " ".join(row.actions).replace("`", ""),
                ", ".join(row.sources),
            )
            for row in SYMPTOMS
        )
        return Report(
            "Gates",
            self.changes or ("All thresholds have their defaults. To change one: nb.runbook.gates(speedup=0.3).",),
            (
                Table("Thresholds", ("gate", "value", "description", "reason"), thresholds),
                Table(
                    "Decision matrix: the first matching rule decides",
                    ("recommendation", "condition", "suggested action"),
                    rules,
                    collapsed=True,
                ),
                Table(
                    "Symptoms, with reports read in November 2026",
                    ("symptom", "likely cause", "suggested action", "reported in"),
                    symptoms,
                    collapsed=True,
                ),
            ),
        )


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`openmed_nb.verdict`, with some of them changed.

    Args:
        changed: New thresholds by name, as fractions. ``speedup`` is a gain: ``speedup=0.3`` requires 1.3 times the speed of
            the CPU, and ``speedup=1.3`` 2.3 times. The names are the attributes of the result. Printing the result shows all thresholds with their reasons, the decision matrix,
            and a table of symptoms with likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``. Their ``changes`` are sentences.

    Raises:
        ConfigurationError: If a name is unknown or a threshold is out of range.

    Example:
        >>> gates(speedup=0.3).changes, gates().memory_growth
        (('Gate changed: speedup from 22% to 30%.',), 0.26)
        >>> gates(memory=0.3)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'memory' is not a gate. Did you mean 'memory_growth'? Gates: memory_growth, speedup, \
utilization, entity_agreement, recall_loss, logits, gradients, headroom, data_fraction, transfer_fraction, ….
    """
    check_names("a gate", changed, GATES, "Gates")
    return Gates(**changed)
