"""What a verdict asks of its evidence: what must be known, and the decision matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...devices.registry import parse_device_argument
from ...training.curve import GROWING, INSUFFICIENT_DATA
from ..bench.workloads import ANNOTATION, TOKENIZE_MORE
from ..checks.precision.policy import ROUNDING, TOLERANCES
from .metrics import (
    GATES,
    GENERATION,
    INFERENCE,
    METRICS,
    NAMES,
    TIMES,
    TRAINING,
    Area,
    Evidence,
    Unit,
    format_with_unit,
)

KEEP_DEVICE = "keep this device"
FIX_INPUT_PIPELINE = "speed up the input pipeline"
FIX_BATCH = "fix the batch"
CHECKPOINT = "checkpoint / accumulate"
FALL_BACK = "fall back to the CPU for these operators"
MLX = "move to MLX"
REMOTE = "move to a remote pool"
CPU = "compute on the CPU"
MEASURE = "measure first"


@dataclass(frozen=True)
class Metric:
    """A figure that speaks for a recommendation.

    Attributes:
        name: What was measured, in words.
        value: The figure.
        unit: What it counts.
        gate: The name of its threshold; empty if it has none.
        limit: The threshold.
    """

    name: str
    value: Any
    unit: Unit
    gate: str = ""
    limit: float | None = None

    @property
    def threshold(self) -> float:
        """The threshold as the figure counts: of a speed-up, 1 more, because 1.22 - 1 is less than 0.22 in binary."""
        limit = self.limit or 0.0
        return 1 + limit if self.unit == TIMES else limit

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The figure as people read it: its name, its value, its gate, and the threshold."""
        limit = format_with_unit(self.unit, self.threshold) if self.gate else ""
        return self.name, format_with_unit(self.unit, self.value), self.gate, limit

    @property
    def measured(self) -> str:
        """The figure with its value, and with the threshold if it has one."""
        name, value, gate, limit = self.row
        if not gate:
            return f"{name}: {value}"
        return f"{name}: {value} (gate: {'at least' if GATES[gate].at_least else 'at most'} {limit})"

    @property
    def words(self) -> str:
        """The figure without what differs from run to run: its name, its gate, and names that it stands for."""
        name, value, gate, limit = self.row
        if self.unit == NAMES:
            return f"{name}: {value}"
        return f"{name} (gate {gate}: {limit})" if gate else name


Figures = tuple[Metric, ...]


@dataclass(frozen=True)
class EvidenceCase:
    """Evidence under gates: what rules and requirements ask. A method that returns figures returns none where it does not hold."""

    evidence: Evidence
    limits: Mapping[str, float]  # The thresholds by their names.

    def figure(self, name: str) -> Metric:
        """Return a figure without a gate."""
        return Metric(METRICS[name].label, getattr(self.evidence, name), METRICS[name].unit)

    def gated(self, gate: str) -> Metric:
        """Return the figure of a gate, which has its name."""
        return replace(self.figure(gate), gate=gate, limit=self.limits[gate])

    def known(self, *names: str) -> Figures:
        """Return those of some figures that say anything: names, counts above 0, and true flags."""
        return tuple(self.figure(name) for name in names if getattr(self.evidence, name))

    def exceeding(self, gate: str) -> Figures:
        """Return the figure of a gate if it is on the wrong side of it; what rounding may have done does not count."""
        figure = self.gated(gate)
        if figure.value is None:
            return ()
        apart = figure.value - figure.threshold
        return (figure,) if (-apart if GATES[gate].at_least else apart) > ROUNDING else ()

    @property
    def on_accelerator(self) -> bool:
        """Whether there is a CPU to compare the device with."""
        return self.evidence.kind is None or parse_device_argument(self.evidence.kind).is_accelerator

    @property
    def writes_on_mps(self) -> bool:
        """Whether a language model writes on MPS, for which there is MLX."""
        return self.evidence.task == GENERATION and self.evidence.kind == "mps"

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains how far logits are apart, as in ``precision.policy``.

        A larger model adds up more roundings, so up to what 16 bits round the entities decide.
        """
        logits = self.evidence.logits
        most = TOLERANCES["float16"].logits or 0.0
        return logits is not None and logits <= most and self.evidence.entity_agreement in {None, 1}

    @property
    def data_is_fine(self) -> bool:
        """Whether it was measured that neither data nor copies take much of a step."""
        return self.evidence.data_fraction is not None and not (self.exceeding("data_fraction") or self.slow_transfer())

    @property
    def batch_is_fine(self) -> bool:
        """Whether it was measured that another batch would gain little."""
        return self.evidence.knee_gain is not None and not self.exceeding("knee_gain")

    def wrong_numbers(self) -> Figures:
        """Return what is not as on the CPU in float32."""
        wrong = self.known("device_faults", "non_finite_tokens", "divergence_source")
        for name in _gates_of_numbers():
            if name != "logits" or not self.is_rounding:
                wrong += self.exceeding(name)
        return wrong if self.on_accelerator else ()

    def growing_memory(self) -> Figures:
        """Return a growth of memory that the curve shows."""
        return self.exceeding("memory_growth") if self.evidence.memory_verdict == GROWING else ()

    def no_row_fits(self) -> Figures:
        """Return that not even one row fits into the memory."""
        return self.known("out_of_memory_at") if self.evidence.out_of_memory_at == 1 else ()

    def short_of_memory(self) -> Figures:
        """Return that the batch in use does not fit, or hardly does."""
        full = self.evidence.out_of_memory_at
        batch = self.evidence.batch
        out = self.known("out_of_memory_at") if full and batch and batch >= full else ()
        return (*out, *self.exceeding("headroom"))

    def slow_transfer(self) -> Figures:
        """Return a share of copies that is too large; to the CPU nothing is copied."""
        return self.exceeding("transfer_fraction") if self.on_accelerator else ()

    def synchronizes(self) -> Figures:
        """Return where a step waits for a device that is hardly busy; while it is busy, a loss that is read costs little."""
        idle = self.exceeding("utilization")
        places = self.known("synchronizations")
        return (*places, *idle) if idle and places else ()

    def waits(self) -> Figures:
        """Return speed-up and utilization if both are too small: the device waits."""
        gain = self.exceeding("speedup")
        busy = self.exceeding("utilization")
        return (*gain, *busy) if gain and busy and self.on_accelerator else ()

    def wrong_batch(self) -> Figures:
        """Return how much more throughput there is at the knee, and where that is."""
        gain = self.exceeding("knee_gain")
        return (*gain, *self.known("batch", "knee")) if gain else ()

    def falls_back(self) -> Figures:
        """Return the operators that MPS does not have, if they take too much."""
        if self.evidence.kind is not None and not parse_device_argument(self.evidence.kind).has_fallbacks:
            return ()
        much = self.exceeding("fallback_calls" if self.evidence.fallback_time is None else "fallback_time")
        named = self.known("fallback_operators") if much else ()
        return (*self.known("refused_operators"), *much, *named)

    def gains_little(self) -> Figures:
        """Return speed-up and utilization if the whole interval is below its gate although the device works.

        It is the device's own speed that is seen: it is busy, or nothing is left that it could wait for.
        """
        busy = self.gated("utilization")
        known = () if busy.value is None else (busy,)
        works = (known and not self.exceeding("utilization")) or (self.data_is_fine and self.batch_is_fine)
        if not (self.on_accelerator and self.speed_ups and works):
            return ()
        at_most = replace(self.gated("speedup"), name=METRICS["speedup_high"].label, value=self.speed_ups[-1])
        return (at_most, *known) if at_most.value < at_most.threshold else ()

    def is_worth_it(self) -> Figures:
        """Return the figures of a device that is worth it, each with its gate.

        What is beyond its gate and does not decide is left out, such as a count of fallbacks whose time is known; a speed-up that
        may be on either side stands there.
        """
        figures = [self.gated(gate) for gate in (*(_COMPARED if self.on_accelerator else ()), *_KEPT)]
        return tuple(
            figure
            for figure in figures
            if figure.value is not None and (figure.gate == "speedup" or not self.exceeding(figure.gate))
        )

    def numbers_are_known(self) -> bool:
        """Tell whether it is known that the numbers are right, or that they are not.

        For entities only parity tells. A model of the person's own has none, so its logits, its losses, or the doctor's probes stand for it.
        """
        evidence = self.evidence
        if evidence.entity_agreement is not None:
            return True
        doubtful = self.is_rounding and self.exceeding("logits")
        none_found = () in {evidence.silent_errors, evidence.divergence_source}
        shown = none_found or (evidence.logits is not None and not doubtful)
        return evidence.task not in {None, ANNOTATION} and shown

    def fallbacks_are_known(self) -> bool:
        """Tell whether it is known that nothing falls back, or how much that costs."""
        here = self.evidence
        few = here.fallback_calls is not None and not self.exceeding("fallback_calls")
        return here.fallback_operators == () or here.fallback_time is not None or few

    def utilization_matters(self) -> bool:
        """Tell whether it must be known if a device waits: it gains little, and data or batch may be why."""
        gains = self.evidence.speedup is not None and not self.exceeding("speedup")
        return self.on_accelerator and not (gains or (self.data_is_fine and self.batch_is_fine))

    @property
    def speed_ups(self) -> list[float]:
        """What is known of the speed-up and the ends of its interval, the smallest first."""
        here = self.evidence
        return sorted(one for one in (here.speedup_low, here.speedup, here.speedup_high) if one is not None)

    def speedup_may_be(self, value: float) -> bool:
        """Tell whether the interval of the speed-up holds a value."""
        low = self.evidence.speedup_low
        high = self.evidence.speedup_high
        return low is not None and high is not None and low <= value <= high

    def speedup_is_known(self) -> bool:
        """Tell whether it is known on which side of its gate the speed-up is: its whole interval is on one."""
        known = self.speed_ups
        gate = 1 + self.limits["speedup"]
        return len(known) == 3 and not known[0] < gate <= known[-1]  # noqa: PLR2004 - both ends and the middle

    def unmeasured(self) -> tuple[Requirement, ...]:
        """Return what matters and was not measured."""
        return tuple(one for one in requirements(self) if one.matters and not one.is_known)


def _gates_of_numbers() -> list[str]:
    return [name for name, gate in GATES.items() if gate.area == Area.NUMBERS]


# The gates of a device that is worth it: those that compare it with the CPU, and all others.
_COMPARED = ("speedup", "entity_agreement", "logits")
_KEPT = ("headroom", "memory_growth", "data_fraction", "knee_gain", "fallback_time", "fallback_calls")


@dataclass(frozen=True)
class Requirement:
    """Something that a verdict rests on.

    Attributes:
        name: What it is.
        rank: Where it stands in the order of precedence.
        command: How to measure it.
        known: Whether it was measured.
        matters: Whether it can change this verdict.
        needed: Whether a verdict is unsure without it, if it matters.
        blocks: Whether no device is stayed on without it, if it is needed.
    """

    name: str
    rank: Area
    command: str
    is_known: bool
    matters: bool = True
    needed: bool = True
    is_blocking: bool = True

    @property
    def first_command(self) -> str:
        """The first of what is to be typed."""
        return re.split(r",? (?:and|or|with) ", self.command)[0]


COMPARE = "nb.compare(model, texts)"
AT_KNEE = (
    "nb.sweep(model), with more seconds=... where it still rises, and nb.compare(model, texts, batch_size=sweep.knee)"
)
MORE_ROUNDS = f"{COMPARE}, with more rounds=... where its interval holds the gate"
EPOCHS = "nb.epochs(...) and then nb.training.last_curve()"
FALLBACKS = "nb.runbook.fallbacks() or nb.runbook.profile(model)"


def requirements(case: EvidenceCase) -> tuple[Requirement, ...]:
    """Return everything that a verdict rests on."""
    here = case.evidence
    compared = case.on_accelerator
    fits = here.headroom is not None or bool(here.out_of_memory_at and here.batch)
    grows = here.memory_growth is not None and here.memory_verdict not in {None, INSUFFICIENT_DATA}
    return (
        Requirement("device", Area.NUMBERS, COMPARE, here.device is not None),
        Requirement("task", Area.NUMBERS, "nb.verdict(..., task='annotation')", here.task is not None),
        Requirement(
            "parity",
            Area.NUMBERS,
            "nb.runbook.parity(model, texts)",
            case.numbers_are_known(),
            matters=compared,
            is_blocking=here.task != INFERENCE,
        ),
        Requirement("memory", Area.MEMORY, AT_KNEE, fits),
        Requirement("growth of memory", Area.MEMORY, EPOCHS, grows, matters=here.task in {None, TRAINING}),
        Requirement("waiting for data", Area.DATA, COMPARE, here.data_fraction is not None),
        Requirement("best batch", Area.BATCH, AT_KNEE, here.knee_gain is not None),
        Requirement(
            "cost of fallbacks",
            Area.FALLBACKS,
            FALLBACKS,
            case.fallbacks_are_known(),
            matters=here.kind is None or parse_device_argument(here.kind).has_fallbacks,
        ),
        Requirement(
            "speed-up",
            Area.SPEED,
            MORE_ROUNDS,
            case.speedup_is_known(),
            matters=compared,
            is_blocking=here.speedup is None,
        ),
        Requirement(
            "utilization", Area.SPEED, COMPARE, here.utilization is not None, matters=case.utilization_matters()
        ),
        Requirement("doctor", Area.SPEED, "nb.doctor()", here.doctor_failures is not None, needed=False),
        Requirement(
            "waiting for the device",
            Area.SPEED,
            "nb.runbook.profile(model)",
            here.synchronizations is not None,
            needed=False,
        ),
        Requirement("power and heat", Area.SPEED, "nb.system_status()", here.slow_conditions is not None, needed=False),
    )


@dataclass(frozen=True)
class VerdictRule:
    """One line of the decision matrix.

    Attributes:
        recommendation: What it recommends.
        rank: Where it stands in the order of precedence.
        when: When it holds, in words.
        figures: The figures that speak for it, none if it does not hold.
        do: One thing to do.
        change: What would change it, in words.
    """

    recommendation: str
    rank: Area
    condition: str
    figures: Figures
    action: str
    reconsider_when: str


def decision_matrix(case: EvidenceCase, command: str) -> tuple[VerdictRule, ...]:
    """Return the rules, of which the first that holds decides, and what is recommended if none does.

    Args:
        case: What they are asked of; their words have the values of its gates.
        command: What measures the first thing that is not known.
    """
    gate = {name: format_with_unit(METRICS[name].gate_unit, limit) for name, limit in case.limits.items()}
    annotates = case.evidence.task == ANNOTATION
    trains = case.evidence.task == TRAINING
    wrong = case.wrong_numbers()
    little = case.gains_little()
    no_row = case.no_row_fits()
    short = case.short_of_memory()
    starved = case.exceeding("data_fraction")
    unknown = [one for one in case.unmeasured() if one.needed]
    *phrases, last = (GATES[name].beyond.format(gate[name]) for name in case.limits if name in _gates_of_numbers())
    waits = f"the device is less than {gate['speedup']} faster than the CPU while it is busy for less than {gate['utilization']}"
    slow = f"even at the upper end of the interval the device is less than {gate['speedup']} faster than the CPU"
    to_annotate = "In annotation that is nb.annotate(..., batch_tokens=sweep.batch_tokens)."
    busy_again = f"A speed-up of {gate['speedup']}, or a utilization of {gate['utilization']}: nb.compare(...)."
    right_again = (
        f"Parity within {gate['entity_agreement']} of the entities in float32, such as with another torch or macOS: "
        "nb.runbook.parity(...)."
    )
    enough_data = f"At most {gate['data_fraction']} of a step for data: nb.compare(...)."
    return (
        VerdictRule(
            MEASURE,
            Area.NUMBERS,
            "the doctor found something that failed",
            case.known("doctor_failures"),
            "Do what nb.doctor() says; what is measured before that is of another computer.",
            "A doctor's report without failures.",
        ),
        VerdictRule(
            CPU,
            Area.NUMBERS,
            f"{', '.join(phrases)} or {last}, NaN appears, or the losses of a training part",
            () if case.writes_on_mps else wrong,
            "Compute on the CPU, or on CUDA where there is one: nb.use('cpu').",
            right_again,
        ),
        VerdictRule(
            MLX,
            Area.NUMBERS,
            "a language model writes on MPS, and its numbers are wrong, as above",
            wrong if case.writes_on_mps else (),
            "Run the model with MLX, or on the CPU or CUDA.",
            right_again,
        ),
        VerdictRule(
            REMOTE,
            Area.MEMORY,
            f"memory grows by more than {gate['memory_growth']} over ten epochs",
            case.growing_memory(),
            "Find what is retained with nb.training.find_tensor_referrers(): a larger host only takes longer to fill. Plan another one until then.",
            f"A growth of at most {gate['memory_growth']} over ten epochs: nb.epochs(...) and nb.training.last_curve().",
        ),
        VerdictRule(
            CHECKPOINT,
            Area.MEMORY,
            f"a training step runs out of memory, or leaves less than {gate['headroom']} of the limit free",
            (no_row or short) if trains else (),
            "Use nb.training.checkpoint_activations(model), and smaller batches with nb.training.GradientAccumulation.",
            f"At least {gate['headroom']} of the memory limit free at the batch in use: nb.sweep(..., training=True).",
        ),
        VerdictRule(
            REMOTE,
            Area.MEMORY,
            "not even one row fits into the memory",
            no_row,
            "Use a device with more memory, a smaller model, or shorter rows.",
            "One row that fits: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.MEMORY,
            f"the batch in use runs out of memory, or leaves less than {gate['headroom']} of the limit free",
            () if trains or no_row else short,
            f"Use a smaller batch, such as the one at the knee of the sweep. {to_annotate}",
            f"At least {gate['headroom']} of the memory limit free at the batch in use: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['data_fraction']} of a step is spent on waiting for texts to be tokenized",
            starved if annotates else (),
            TOKENIZE_MORE,
            enough_data,
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['data_fraction']} of a step is spent on waiting for data",
            () if annotates else starved,
            "Read ahead and tokenize once: nb.training.loader.check(loader) and nb.training.loader.benchmark_workers(...) say how.",
            enough_data,
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"more than {gate['transfer_fraction']} of a step is spent on copies to a device that is not the CPU",
            case.slow_transfer(),
            "Copy fewer and larger batches, and no more than the model reads.",
            f"At most {gate['transfer_fraction']} of a step for copies: nb.compare(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"a step waits for the device, such as for .item() or .cpu(), and that is busy for less than {gate['utilization']}",
            case.synchronizes(),
            "Take results off the device after the step, or every some steps.",
            "No place where a step waits for the device: nb.runbook.profile(...).",
        ),
        VerdictRule(
            FIX_INPUT_PIPELINE,
            Area.DATA,
            f"{waits}, unless data are known to be fine",
            () if case.data_is_fine else case.waits(),
            "Look at the data and the batch before the device: nb.compare(...) splits a step.",
            busy_again,
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            f"the knee of the sweep has more than {gate['knee_gain']} more throughput than the batch in use",
            case.wrong_batch(),
            f"Use the batch at the knee. {to_annotate}",
            f"At most {gate['knee_gain']} more throughput at the knee: nb.sweep(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            "the batch is so small that starting operators takes most of the time, unless it is known to be the best",
            () if case.batch_is_fine else case.known("tiny_batch"),
            "Use a larger batch: nb.sweep(...) finds one.",
            "A batch that keeps the device busy: nb.runbook.profile(...).",
        ),
        VerdictRule(
            FIX_BATCH,
            Area.BATCH,
            f"{waits}, and data are fine, unless the batch is known to be",
            case.waits() if case.data_is_fine and not case.batch_is_fine else (),
            "Use a larger batch: nb.sweep(...) finds one.",
            busy_again,
        ),
        VerdictRule(
            FALL_BACK,
            Area.FALLBACKS,
            f"MPS refuses operators, or what fell back takes more than {gate['fallback_time']} of the time, or of the calls more "
            f"than {gate['fallback_calls']} where no times are known",
            case.falls_back(),
            "Compute them on the CPU on purpose, all in one place, or another way; PYTORCH_ENABLE_MPS_FALLBACK=1 before torch "
            "is imported lets them run until then.",
            f"At most {gate['fallback_time']} of the time in what falls back, such as in a newer torch: nb.runbook.fallbacks() "
            "and nb.runbook.forecast(model).",
        ),
        VerdictRule(
            CPU,
            Area.SPEED,
            f"{slow}, although it is busy, or data and batch are fine: less is not worth a second device",
            () if case.writes_on_mps else little,
            "Compute on the CPU: nb.use('cpu').",
            f"A speed-up of {gate['speedup']}, such as with a larger model or longer texts: nb.compare(...).",
        ),
        VerdictRule(
            MLX,
            Area.SPEED,
            f"a language model writes on MPS, and {slow}, although nothing waits",
            little if case.writes_on_mps else (),
            "Run the model with MLX, which is made for that.",
            f"A speed-up of {gate['speedup']} over the CPU: nb.compare(...).",
        ),
        VerdictRule(
            REMOTE,
            Area.SPEED,
            f"the work takes more than {gate['hours']}",
            case.exceeding("hours"),
            "Spread the texts over several computers with nb.cluster(...); nb.handoff(...) takes the work to one of them.",
            f"Fewer texts, or so many more in a second that they are done in {gate['hours']}.",
        ),
        # What is recommended if no rule holds: all is known, enough is, or too little.
        VerdictRule(
            KEEP_DEVICE,
            Area.SPEED,
            "everything that matters was measured, and no other rule holds",
            () if unknown else case.is_worth_it(),
            "Nothing to do.",
            "Any figure beyond its gate. Another model, torch, macOS or computer is to be measured anew.",
        ),
        VerdictRule(
            KEEP_DEVICE,
            Area.SPEED,
            "no other rule holds, though something that may change that is in doubt",
            () if any(one.is_blocking for one in unknown) else case.is_worth_it(),
            f"Nothing to do; to be sure, run {command}.",
            "The figures that it measures, or any other beyond its gate.",
        ),
        VerdictRule(
            MEASURE,
            Area.SPEED,
            "no rule holds, and something that matters was not measured",
            (),
            f"Run {command}.",
            "The figures that it measures.",
        ),
    )
