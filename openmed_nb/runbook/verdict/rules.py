"""Requirements and decision matrix of a verdict, evaluated on its evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...devices.registry import get_device
from ...training.curve import GROWING, INSUFFICIENT_DATA
from ..bench.comparison import BreakEven
from ..bench.workloads import ANNOTATION, TOKENIZATION_REMEDY
from ..checks.precision.policy import ROUNDING, TOLERANCES
from .metrics import (
    GATES,
    GENERATION,
    INFERENCE,
    METRICS,
    NAMES,
    RATIO,
    TRAINING,
    Area,
    Evidence,
    Unit,
    format_with_unit,
)

Recommendation = Literal[
    "keep this device",
    "speed up the input pipeline",
    "fix the batch",
    "checkpoint / accumulate",
    "fall back to the CPU for these operators",
    "move to MLX",
    "move to a remote pool",
    "compute on the CPU",
    "measure first",
]
KEEP_DEVICE: Recommendation = "keep this device"
FIX_INPUT_PIPELINE: Recommendation = "speed up the input pipeline"
FIX_BATCH: Recommendation = "fix the batch"
CHECKPOINT: Recommendation = "checkpoint / accumulate"
FALL_BACK: Recommendation = "fall back to the CPU for these operators"
MLX: Recommendation = "move to MLX"
REMOTE: Recommendation = "move to a remote pool"
CPU: Recommendation = "compute on the CPU"
MEASURE: Recommendation = "measure first"


@dataclass(frozen=True)
class MetricValue:
    """Measured value of a metric that supports a recommendation.

    Attributes:
        name: Label of the metric.
        value: Measured value.
        unit: Unit of the value.
        gate: Name of its threshold; empty if it has none.
        limit: Threshold of the gate.
    """

    name: str
    value: Any
    unit: Unit
    gate: str = ""
    limit: float | None = None

    @property
    def threshold(self) -> float:
        """Threshold on the scale of the value.

        For a speedup this is ``1 + limit``, because in binary arithmetic 1.22 - 1 is less than 0.22.
        """
        limit = self.limit or 0.0
        return 1 + limit if self.unit == RATIO else limit

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Name, formatted value, gate and formatted threshold."""
        limit = format_with_unit(self.unit, self.threshold) if self.gate else ""
        return self.name, format_with_unit(self.unit, self.value), self.gate, limit

    @property
    def measured(self) -> str:
        """Name and value as text, with the threshold if there is one."""
        name, value, gate, limit = self.row
        if not gate:
            return f"{name}: {value}"
        bound = "at least" if GATES[gate].is_minimum else "at most"
        return f"{name}: {value} (gate: {bound} {limit})"

    @property
    def description(self) -> str:
        """Name, gate and named items as text, without measured values, which differ between runs."""
        name, value, gate, limit = self.row
        if self.unit == NAMES:
            return f"{name}: {value}"
        return f"{name} (gate {gate}: {limit})" if gate else name


MetricValues = tuple[MetricValue, ...]


@dataclass(frozen=True)
class EvidenceCase:
    """Evidence and thresholds, with the conditions of the rules and requirements.

    A method that returns metric values returns none if its condition does not hold.

    Attributes:
        evidence: Measured metrics.
        limits: Thresholds by gate.
    """

    evidence: Evidence
    limits: Mapping[str, float]

    def get_metric(self, name: str) -> MetricValue:
        """Return the value of a metric without its gate."""
        return MetricValue(METRICS[name].label, getattr(self.evidence, name), METRICS[name].unit)

    def get_gated_metric(self, gate: str) -> MetricValue:
        """Return the value of the metric of a gate; both have the same name."""
        return replace(self.get_metric(gate), gate=gate, limit=self.limits[gate])

    def select_nonempty(self, *names: str) -> MetricValues:
        """Return the metrics with names, counts above 0, or true flags."""
        return tuple(self.get_metric(name) for name in names if getattr(self.evidence, name))

    def exceeding(self, gate: str) -> MetricValues:
        """Return the metric of a gate if it violates the gate by more than rounding."""
        metric = self.get_gated_metric(gate)
        if metric.value is None:
            return ()
        excess = metric.value - metric.threshold
        if GATES[gate].is_minimum:
            excess = -excess
        return (metric,) if excess > ROUNDING else ()

    @property
    def on_accelerator(self) -> bool:
        """Whether the device can be compared with the CPU, which an unknown device can."""
        device_type = self.evidence.device_type
        return device_type is None or get_device(device_type).is_accelerator

    @property
    def has_fallbacks(self) -> bool:
        """Whether operators can fall back to the CPU, which an unknown device can."""
        device_type = self.evidence.device_type
        return device_type is None or get_device(device_type).has_fallbacks

    @property
    def has_only_cpu(self) -> bool:
        """Whether the work runs on the CPU of a computer that has no GPU."""
        return bool(self.evidence.no_gpu) and not self.on_accelerator

    @property
    def break_even(self) -> BreakEven | None:
        """Speed at which a GPU is worth using, by the gate of the speedup; ``None`` if the rate of the CPU is not known."""
        evidence = self.evidence
        rate = evidence.texts_per_second
        if self.on_accelerator or rate is None or rate <= 0:
            return None
        task = evidence.task or ANNOTATION
        return BreakEven(task, rate, evidence.phase_fractions or {}, self.limits["speedup"])

    @property
    def generates_on_mps(self) -> bool:
        """Whether a language model generates text on MPS, for which MLX is an alternative."""
        return self.evidence.task == GENERATION and self.evidence.device_type == "mps"

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the logit difference, as in ``precision.policy``.

        Rounding errors accumulate in larger models. Up to the tolerance of a 16-bit dtype, the entities therefore decide.
        """
        logits = self.evidence.logits
        tolerance = TOLERANCES["float16"].logits or 0.0
        return logits is not None and logits <= tolerance and self.evidence.entity_agreement in {None, 1}

    @property
    def is_input_pipeline_fast(self) -> bool:
        """Whether measurements show that neither data nor copies take much of a step."""
        return self.evidence.data_fraction is not None and not (
            self.exceeding("data_fraction") or self.find_slow_transfer()
        )

    @property
    def is_batch_size_good(self) -> bool:
        """Whether measurements show that another batch size would gain little."""
        return self.evidence.knee_gain is not None and not self.exceeding("knee_gain")

    def find_incorrect_results(self) -> MetricValues:
        """Return the metrics whose results differ from the CPU in float32."""
        if not self.on_accelerator:
            return ()
        metrics = self.select_nonempty("device_faults", "non_finite_tokens", "divergence_source")
        for name in CORRECTNESS_GATES:
            if name != "logits" or not self.is_rounding:
                metrics += self.exceeding(name)
        return metrics

    def find_slow_transfer(self) -> MetricValues:
        """Return the transfer fraction if it is too large; work on the CPU has no transfers."""
        return self.exceeding("transfer_fraction") if self.on_accelerator else ()

    def find_blocking_synchronizations(self) -> MetricValues:
        """Return the synchronization points if the device is underutilized.

        On a busy device, a synchronization such as reading the loss costs little.
        """
        utilization = self.exceeding("utilization")
        synchronizations = self.select_nonempty("synchronizations")
        return synchronizations + utilization if utilization and synchronizations else ()

    def find_idle_device(self) -> MetricValues:
        """Return speedup and utilization if both are too small, because the device waits."""
        speedup = self.exceeding("speedup")
        utilization = self.exceeding("utilization")
        return speedup + utilization if speedup and utilization and self.on_accelerator else ()

    def find_costly_fallbacks(self) -> MetricValues:
        """Return the operators that MPS does not support, and those that fall back if their cost is too high."""
        if not self.has_fallbacks:
            return ()
        cost = self.exceeding("fallback_calls" if self.evidence.fallback_time is None else "fallback_time")
        operators = self.select_nonempty("fallback_operators") if cost else ()
        return self.select_nonempty("refused_operators") + cost + operators

    def find_small_speedup(self) -> MetricValues:
        """Return speedup and utilization if the whole interval is below its gate on a working device.

        The speedup then reflects the device itself: it is busy, or neither data nor batch size limit it.
        """
        utilization = self.get_gated_metric("utilization")
        known_utilization = () if utilization.value is None else (utilization,)
        is_busy = bool(known_utilization) and not self.exceeding("utilization")
        is_working = is_busy or (self.is_input_pipeline_fast and self.is_batch_size_good)
        if not (self.on_accelerator and self.speedups and is_working):
            return ()
        upper = replace(self.get_gated_metric("speedup"), name=METRICS["speedup_high"].label, value=self.speedups[-1])
        return (upper, *known_utilization) if upper.value < upper.threshold else ()

    def find_supporting_metrics(self) -> MetricValues:
        """Return the metrics that support keeping the device, each with its gate.

        Metrics beyond their gate that do not decide are omitted, such as a count of fallbacks whose time is known. A
        speedup whose interval contains the gate is included.
        """
        gates = (*_COMPARISON_GATES, *_DEVICE_GATES) if self.on_accelerator else _DEVICE_GATES
        metrics = [self.get_gated_metric(gate) for gate in gates]
        return tuple(
            metric
            for metric in metrics
            if metric.value is not None and (metric.gate == "speedup" or not self.exceeding(metric.gate))
        )

    def is_correctness_known(self) -> bool:
        """Return whether it is known if results are correct.

        Only parity shows this for entities. Custom modules have no entities, so logits, training losses or the probes of
        the doctor are used instead.
        """
        evidence = self.evidence
        if evidence.entity_agreement is not None:
            return True
        is_doubtful = self.is_rounding and self.exceeding("logits")
        has_no_errors = () in {evidence.silent_errors, evidence.divergence_source}
        is_shown = has_no_errors or (evidence.logits is not None and not is_doubtful)
        return evidence.task not in {None, ANNOTATION} and is_shown

    def is_fallback_cost_known(self) -> bool:
        """Return whether it is known that no operator falls back, or how much the fallbacks cost."""
        evidence = self.evidence
        has_few_calls = evidence.fallback_calls is not None and not self.exceeding("fallback_calls")
        return evidence.fallback_operators == () or evidence.fallback_time is not None or has_few_calls

    def needs_utilization(self) -> bool:
        """Return whether the utilization is required.

        It is if the speedup is small, and data or batch size may be the cause.
        """
        is_fast = self.evidence.speedup is not None and not self.exceeding("speedup")
        is_explained = self.is_input_pipeline_fast and self.is_batch_size_good
        return self.on_accelerator and not (is_fast or is_explained)

    @property
    def speedups(self) -> list[float]:
        """Known values among the speedup and the ends of its interval, in ascending order."""
        evidence = self.evidence
        values = (evidence.speedup_low, evidence.speedup, evidence.speedup_high)
        return sorted(value for value in values if value is not None)

    def is_speedup_possible(self, value: float) -> bool:
        """Return whether the confidence interval of the speedup contains a value."""
        low = self.evidence.speedup_low
        high = self.evidence.speedup_high
        return low is not None and high is not None and low <= value <= high

    def is_speedup_known(self) -> bool:
        """Return whether the whole interval of the speedup is on one side of its gate."""
        speedups = self.speedups
        gate = 1 + self.limits["speedup"]
        return len(speedups) == 3 and not speedups[0] < gate <= speedups[-1]  # noqa: PLR2004 - both ends and the median

    def find_missing_requirements(self) -> tuple[Requirement, ...]:
        """Return the relevant requirements that were not measured."""
        return tuple(
            requirement
            for requirement in list_requirements(self)
            if requirement.is_relevant and not requirement.is_known
        )


CORRECTNESS_GATES = [name for name in METRICS if name in GATES and GATES[name].area == Area.CORRECTNESS]
# Gates that support keeping a device: comparisons with the CPU, and gates of the device itself.
_COMPARISON_GATES = ("speedup", "entity_agreement", "logits")
_DEVICE_GATES = ("headroom", "memory_growth", "data_fraction", "knee_gain", "fallback_time", "fallback_calls")


@dataclass(frozen=True)
class Requirement:
    """A measurement that a verdict depends on.

    Attributes:
        name: Name of the measurement.
        precedence: Area, which determines the precedence.
        command: Command that measures it.
        is_known: Whether it was measured.
        is_relevant: Whether it can change this verdict.
        is_needed: Whether a verdict is inconclusive without it, if it is relevant.
        is_blocking: Whether no device is kept without it, if it is needed.
    """

    name: str
    precedence: Area
    command: str
    is_known: bool
    is_relevant: bool = True
    is_needed: bool = True
    is_blocking: bool = True

    @property
    def first_command(self) -> str:
        """First call in the command."""
        return re.split(r",? (?:and|or|with) ", self.command)[0]


COMPARE = "nb.compare(model, texts)"
AT_KNEE = (
    "nb.sweep(model), with more seconds=... if throughput still rises, and "
    "nb.compare(model, texts, batch_size=sweep.knee)"
)
MORE_ROUNDS = f"{COMPARE}, with more rounds=... if its interval contains the gate"
EPOCHS = "nb.epochs(...) and then nb.training.last_curve()"
FALLBACKS = "nb.runbook.fallbacks() or nb.runbook.profile(model)"


def list_requirements(case: EvidenceCase) -> tuple[Requirement, ...]:
    """Return all requirements of a verdict."""
    evidence = case.evidence
    has_memory = evidence.headroom is not None or bool(evidence.out_of_memory_at and evidence.batch)
    has_growth = evidence.memory_growth is not None and evidence.memory_verdict not in {None, INSUFFICIENT_DATA}
    return (
        Requirement("device", Area.CORRECTNESS, COMPARE, evidence.device is not None),
        Requirement(
            "task",
            Area.CORRECTNESS,
            # A comparison determines the task, except for a custom step.
            "nb.verdict(..., task='annotation')" if evidence.texts_per_second else COMPARE,
            evidence.task is not None,
        ),
        Requirement(
            "parity",
            Area.CORRECTNESS,
            "nb.runbook.parity(model, texts)",
            case.is_correctness_known(),
            is_relevant=case.on_accelerator,
            is_blocking=evidence.task != INFERENCE,
        ),
        Requirement("memory", Area.MEMORY, AT_KNEE, has_memory),
        Requirement("memory growth", Area.MEMORY, EPOCHS, has_growth, is_relevant=evidence.task in {None, TRAINING}),
        Requirement("data wait time", Area.DATA, COMPARE, evidence.data_fraction is not None),
        Requirement("best batch size", Area.BATCH, AT_KNEE, evidence.knee_gain is not None),
        Requirement(
            "fallback cost",
            Area.FALLBACKS,
            FALLBACKS,
            case.is_fallback_cost_known(),
            is_relevant=case.has_fallbacks,
        ),
        Requirement(
            "speedup",
            Area.SPEED,
            MORE_ROUNDS,
            case.is_speedup_known(),
            is_relevant=case.on_accelerator,
            is_blocking=evidence.speedup is None,
        ),
        Requirement(
            "utilization",
            Area.SPEED,
            COMPARE,
            evidence.utilization is not None,
            is_relevant=case.needs_utilization(),
        ),
        Requirement("doctor", Area.SPEED, "nb.doctor()", evidence.doctor_failures is not None, is_needed=False),
        Requirement(
            "synchronization points",
            Area.SPEED,
            "nb.runbook.profile(model)",
            evidence.synchronizations is not None,
            is_needed=False,
        ),
        Requirement(
            "power and thermal state",
            Area.SPEED,
            "nb.system_status()",
            evidence.slow_conditions is not None,
            is_needed=False,
        ),
    )


@dataclass(frozen=True)
class VerdictRule:
    """A rule of the decision matrix.

    Attributes:
        recommendation: Recommendation of the rule.
        precedence: Area, which determines the precedence.
        condition: Condition of the rule as text.
        metrics: Metrics that support the rule; empty if it does not apply.
        action: Suggested action.
        reconsider_when: Measurement that would change the recommendation.
    """

    recommendation: Recommendation
    precedence: Area
    condition: str
    metrics: MetricValues
    action: str
    reconsider_when: str


def build_decision_matrix(case: EvidenceCase, command: str) -> tuple[VerdictRule, ...]:
    """Return the rules in order of precedence.

    The last four rules are for evidence to which no other rule applies.

    Args:
        case: Evidence and thresholds. The texts of the rules contain the thresholds.
        command: Command that measures the first missing requirement.
    """
    gate = {name: format_with_unit(METRICS[name].gate_unit, limit) for name, limit in case.limits.items()}
    evidence = case.evidence
    is_annotation = evidence.task == ANNOTATION
    is_training = evidence.task == TRAINING
    incorrect_results = case.find_incorrect_results()
    small_speedup = case.find_small_speedup()
    idle_device = case.find_idle_device()
    slow_data = case.exceeding("data_fraction")
    knee_gain = case.exceeding("knee_gain")
    out_of_memory = case.select_nonempty("out_of_memory_at")
    single_row_out_of_memory = out_of_memory if evidence.out_of_memory_at == 1 else ()
    # The batch in use does not fit, or leaves too little memory free.
    memory_shortage = case.exceeding("headroom")
    if evidence.out_of_memory_at and evidence.batch and evidence.batch >= evidence.out_of_memory_at:
        memory_shortage = out_of_memory + memory_shortage
    missing = [requirement for requirement in case.find_missing_requirements() if requirement.is_needed]
    violations = [GATES[name].violation.format(gate[name]) for name in case.limits if name in CORRECTNESS_GATES]
    is_idle = (
        f"the device is less than {gate['speedup']} faster than the CPU at a utilization below {gate['utilization']}"
    )
    is_slow = f"the device is less than {gate['speedup']} faster than the CPU, even at the upper bound of the interval,"
    annotation_hint = "For annotation, use nb.annotate(..., batch_tokens=sweep.batch_tokens)."
    faster_or_busier = f"A device at least {gate['speedup']} faster than the CPU, or a utilization of {gate['utilization']}: nb.compare(...)."
    matching_entities = (
        f"Parity of at least {gate['entity_agreement']} of the entities in float32, for example with another torch or macOS: "
        "nb.runbook.parity(...)."
    )
    less_data_time = f"At most {gate['data_fraction']} of a step waiting for data: nb.compare(...)."
    return (
        VerdictRule(
            MEASURE,
            Area.CORRECTNESS,
            "nb.doctor() found failures",
            case.select_nonempty("doctor_failures"),
            "Follow the remedies of nb.doctor(); measurements taken before that do not apply afterwards.",
            "nb.doctor() without failures.",
        ),
        VerdictRule(
            CPU,
            Area.CORRECTNESS,
            f"{', '.join(violations)}, NaN or infinity appears, or training losses diverge",
            () if case.generates_on_mps else incorrect_results,
            "Compute on the CPU, or on CUDA if available: nb.use('cpu').",
            matching_entities,
        ),
        VerdictRule(
            MLX,
            Area.CORRECTNESS,
            "a language model generates text on MPS with incorrect results, as defined above",
            incorrect_results if case.generates_on_mps else (),
            "Run the model with MLX, or on the CPU or CUDA.",
            matching_entities,
        ),
        VerdictRule(
            REMOTE,
            Area.MEMORY,
            f"memory grows by more than {gate['memory_growth']} over ten epochs",
            case.exceeding("memory_growth") if evidence.memory_verdict == GROWING else (),
            "Find retained tensors with nb.training.find_tensor_referrers(); a host with more memory only delays the failure. "
            "Until then, plan to use another host.",
            f"Memory growth of at most {gate['memory_growth']} over ten epochs: nb.epochs(...) and nb.training.last_curve().",
        ),
        VerdictRule(
            CHECKPOINT,
            Area.MEMORY,
            f"a training step runs out of memory, or leaves less than {gate['headroom']} of the limit free",
            (single_row_out_of_memory or memory_shortage) if is_training else (),
            "Use nb.training.checkpoint_activations(model), and smaller batches with nb.training.GradientAccumulation.",
            f"At least {gate['headroom']} of the memory limit free at the batch size in use: nb.sweep(..., training=True).",
        ),
        VerdictRule(
            REMOTE,
            Area.MEMORY,
            "a single row runs out of memory",
            single_row_out_of_memory,
            "Use a device with more memory, a smaller model, or shorter rows.",
            "A row that fits: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.MEMORY,
            f"the batch size in use runs out of memory, or leaves less than {gate['headroom']} of the limit free",
            () if is_training or single_row_out_of_memory else memory_shortage,
            f"Use a smaller batch size, such as the knee of the sweep. {annotation_hint}",
            f"At least {gate['headroom']} of the memory limit free at the batch size in use: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['data_fraction']} of a step is spent waiting for tokenization",
            slow_data if is_annotation else (),
            TOKENIZATION_REMEDY,
            less_data_time,
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['data_fraction']} of a step is spent waiting for data",
            () if is_annotation else slow_data,
            "Prefetch, and tokenize once: see nb.runbook.profile(step, loader).",
            less_data_time,
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['transfer_fraction']} of a step is spent on copies to a device other than the CPU",
            case.find_slow_transfer(),
            "Copy fewer and larger batches, and only the data that the model reads.",
            f"At most {gate['transfer_fraction']} of a step for copies: nb.compare(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"a step waits for the device, for example in .item() or .cpu(), at a utilization below {gate['utilization']}",
            case.find_blocking_synchronizations(),
            "Copy results from the device after the step, or only every few steps.",
            "No synchronization points: nb.runbook.profile(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"{is_idle}, unless the input pipeline is known to be fast enough",
            () if case.is_input_pipeline_fast else idle_device,
            "Check the data and the batch size before the device: nb.compare(...) measures the time per phase.",
            faster_or_busier,
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            f"throughput at the knee of the sweep is more than {gate['knee_gain']} above that of the batch size in use",
            knee_gain + case.select_nonempty("batch", "knee") if knee_gain else (),
            f"Use the batch size at the knee. {annotation_hint}",
            f"A throughput gain of at most {gate['knee_gain']} at the knee: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            "kernel launches take most of the time of the small batch, unless its size is known to be the best",
            () if case.is_batch_size_good else case.select_nonempty("tiny_batch"),
            "Use a larger batch size: nb.sweep(...) finds one.",
            "A batch size that keeps the device busy: nb.runbook.profile(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            f"{is_idle} although the input pipeline is fast enough, unless the batch size is known to be good",
            idle_device if case.is_input_pipeline_fast and not case.is_batch_size_good else (),
            "Use a larger batch size: nb.sweep(...) finds one.",
            faster_or_busier,
        ),
        VerdictRule(
            FALL_BACK,
            Area.FALLBACKS,
            f"MPS does not support some operators, or fallbacks take more than {gate['fallback_time']} of the time, or more "
            f"than {gate['fallback_calls']} of the calls if their time is not known",
            case.find_costly_fallbacks(),
            "Compute them on the CPU explicitly, in one place, or replace them; until then, PYTORCH_ENABLE_MPS_FALLBACK=1 "
            "before the import of torch lets them run.",
            f"At most {gate['fallback_time']} of the time in fallbacks, for example with a newer torch: "
            "nb.runbook.fallbacks() and nb.runbook.forecast(model).",
        ),
        VerdictRule(
            CPU,
            Area.SPEED,
            f"{is_slow} although the device is busy, or data and batch size are good; a smaller gain does not justify a "
            "second device",
            () if case.generates_on_mps else small_speedup,
            "Compute on the CPU: nb.use('cpu').",
            f"A device at least {gate['speedup']} faster than the CPU, for example with a larger model or longer texts: "
            "nb.compare(...).",
        ),
        VerdictRule(
            MLX,
            Area.SPEED,
            f"a language model generates text on MPS, and {is_slow} although the device does not wait",
            small_speedup if case.generates_on_mps else (),
            "Run the model with MLX, which is built for text generation.",
            f"A device at least {gate['speedup']} faster than the CPU: nb.compare(...).",
        ),
        VerdictRule(
            REMOTE,
            Area.SPEED,
            f"the work takes more than {gate['hours']}",
            case.exceeding("hours"),
            "Distribute the texts over several computers with nb.cluster(...); nb.handoff(...) moves the work to one of them.",
            f"Fewer texts, or a throughput that processes them in {gate['hours']}.",
        ),
        # The last four rules apply if no other rule does: all requirements known, enough of them, no other device, or too few.
        VerdictRule(
            KEEP_DEVICE,
            Area.SPEED,
            "all required metrics were measured and no other rule applies",
            () if missing else case.find_supporting_metrics(),
            "No action is needed.",
            "Any metric beyond its gate. Another model, torch, macOS or computer requires new measurements.",
        ),
        VerdictRule(
            KEEP_DEVICE,
            Area.SPEED,
            "no other rule applies, but a missing measurement could change this",
            () if any(requirement.is_blocking for requirement in missing) else case.find_supporting_metrics(),
            f"No action is needed; to confirm, run {command}.",
            "The measurements of this command, or any other metric beyond its gate.",
        ),
        VerdictRule(
            KEEP_DEVICE,
            Area.SPEED,
            "this computer has no GPU, so there is no other device to choose",
            case.find_supporting_metrics() or case.select_nonempty("no_gpu") if case.has_only_cpu else (),
            f"Stay on the CPU. Run {command}.",
            f"A GPU at least {gate['speedup']} faster than the CPU: nb.compare(model, texts) on a computer that has one.",
        ),
        VerdictRule(
            MEASURE,
            Area.SPEED,
            "no rule applies, and required metrics are missing",
            (),
            f"Run {command}.",
            "The measurements of this command.",
        ),
    )
