"""What a verdict rests on, and its rules, in order of precedence: wrong numbers, memory, data, batch, fallbacks, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...models.certificates import ROUNDING
from ...training.curve import GROWING, TOO_SHORT
from ..measure.workloads import ANNOTATION
from ..precision.parity import TOLERANCES
from .evidence import FIGURES, GENERATION, INFERENCE, TRAINING, Evidence
from .gates import NAMES, TIMES, Thresholds, in_unit

# The gates that a figure must reach; beyond the others it must not go.
AT_LEAST = frozenset({"speed_up", "utilisation", "entity_agreement", "headroom"})


@dataclass(frozen=True)
class Figure:
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
    unit: str
    gate: str = ""
    limit: float | None = None

    @property
    def threshold(self) -> float:
        """The threshold as the figure counts: of a speed-up, 1 more, because 1.22 - 1 is less than 0.22 in binary."""
        return (self.limit or 0.0) + (1 if self.unit == TIMES else 0)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The figure as people read it: its name, its value, its gate, and the threshold."""
        limit = in_unit(self.unit, self.threshold) if self.gate else ""
        return self.name, in_unit(self.unit, self.value), self.gate, limit

    @property
    def words(self) -> str:
        """The figure without what differs from run to run: its name, its gate, and names that it stands for."""
        if self.unit == NAMES:
            return f"{self.name}: {in_unit(NAMES, self.value)}"
        return f"{self.name} (gate {self.gate}: {self.row[-1]})" if self.gate else self.name


Figures = tuple[Figure, ...]


@dataclass(frozen=True)
class Case:
    """Evidence under gates: what rules and requirements ask. A method that returns figures returns none where it does not hold."""

    evidence: Evidence
    gates: Thresholds

    def figure(self, name: str) -> Figure:
        """Return a figure without a gate."""
        words, unit = FIGURES[name]
        return Figure(words, getattr(self.evidence, name), unit)

    def gated(self, gate: str) -> Figure:
        """Return the figure of a gate, which has its name."""
        return replace(self.figure(gate), gate=gate, limit=getattr(self.gates, gate))

    def known(self, *names: str) -> Figures:
        """Return those of some figures that say anything: names, counts above 0, and true flags."""
        return tuple(self.figure(name) for name in names if getattr(self.evidence, name))

    def beyond(self, gate: str) -> Figures:
        """Return the figure of a gate if it is on the wrong side of it; what rounding may have done does not count."""
        figure = self.gated(gate)
        if figure.value is None:
            return ()
        apart = figure.threshold - figure.value if gate in AT_LEAST else figure.value - figure.threshold
        return (figure,) if apart > ROUNDING else ()

    @property
    def on_accelerator(self) -> bool:
        """Whether there is a CPU to compare the device with."""
        return self.evidence.kind != "cpu"

    @property
    def writes_on_mps(self) -> bool:
        """Whether a language model writes on MPS, for which there is MLX."""
        return self.evidence.task == GENERATION and self.evidence.kind == "mps"

    @property
    def moves_to_cpu(self) -> bool:
        """Whether the CPU is what a device that does not pay is left for."""
        return self.on_accelerator and not self.writes_on_mps

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains how far logits are apart, as in ``precision.parity``.

        A larger model adds up more roundings, so up to what 16 bits round the entities decide.
        """
        logits, most = self.evidence.logits, TOLERANCES["float16"].logits or 0.0
        return logits is not None and logits <= most and self.evidence.entity_agreement in {None, 1}

    @property
    def data_is_fine(self) -> bool:
        """Whether it was measured that neither data nor copies take much of a step."""
        return self.evidence.data_share is not None and not (self.beyond("data_share") or self.slow_transfer())

    @property
    def batch_is_fine(self) -> bool:
        """Whether it was measured that another batch would gain little."""
        return self.evidence.knee_gain is not None and not self.beyond("knee_gain")

    def slow_transfer(self) -> Figures:
        """Return a share of copies that is too large; to the CPU nothing is copied."""
        return self.beyond("transfer_share") if self.on_accelerator else ()

    def waits(self) -> Figures:
        """Return speed-up and utilisation if both are too small: the device waits."""
        gain, busy = self.beyond("speed_up"), self.beyond("utilisation")
        return (*gain, *busy) if gain and busy and self.on_accelerator else ()

    def synchronises(self) -> Figures:
        """Return where a step waits for a device that is hardly busy; while it is busy, a loss that is read costs little."""
        idle, places = self.beyond("utilisation"), self.known("synchronisations")
        return (*places, *idle) if idle and places else ()

    def no_row_fits(self) -> Figures:
        """Return that not even one row fits into the memory."""
        return self.known("out_of_memory_at") if self.evidence.out_of_memory_at == 1 else ()

    def short_of_memory(self) -> Figures:
        """Return that the batch in use does not fit, or hardly does."""
        full, batch = self.evidence.out_of_memory_at, self.evidence.batch
        out = self.known("out_of_memory_at") if full and batch and batch >= full else ()
        return (*out, *self.beyond("headroom"))

    def numbers_are_known(self) -> bool:
        """Tell whether it is known that the numbers are right, or that they are not.

        For entities only parity tells. A model of the person's own has none, so its logits, or the doctor's probes, stand for it.
        """
        evidence = self.evidence
        if evidence.entity_agreement is not None:
            return True
        doubtful = self.is_rounding and self.beyond("logits")
        shown = (evidence.logits is not None and not doubtful) or evidence.silent_errors == ()
        return evidence.task not in {None, ANNOTATION} and shown

    def ends_of_speed_up(self) -> tuple[float, float] | None:
        """Return the ends of the interval of the speed-up as far as they are known; ``None`` if nothing was measured."""
        here = self.evidence
        known = [one for one in (here.speed_up_low, here.speed_up, here.speed_up_high) if one is not None]
        return (min(known), max(known)) if known else None

    def speed_up_is_known(self) -> bool:
        """Tell whether it is known on which side of its gate the speed-up is: its whole interval is on one."""
        if None in {self.evidence.speed_up_low, self.evidence.speed_up, self.evidence.speed_up_high}:
            return False
        low, high = self.ends_of_speed_up() or (0.0, 0.0)
        return high < 1 + self.gates.speed_up or low >= 1 + self.gates.speed_up

    def unmeasured(self) -> tuple[Requirement, ...]:
        """Return what matters and was not measured."""
        return tuple(one for one in REQUIREMENTS if one.matters(self) and not one.known(self))

    def needed(self) -> tuple[Requirement, ...]:
        """Return what was not measured and could change a verdict."""
        return tuple(one for one in self.unmeasured() if one.needed)


def wrong_numbers(case: Case) -> Figures:
    """Return what is not as on the CPU in float32."""
    return (
        *case.known("device_faults", "not_numbers"),
        *case.beyond("entity_agreement"),
        *(() if case.is_rounding else case.beyond("logits")),
        *case.beyond("recall_loss"),
        *case.beyond("gradients"),
    )


def wrong_batch(case: Case) -> Figures:
    """Return how much more throughput there is at the knee, and where that is."""
    gain = case.beyond("knee_gain")
    return (*gain, *case.known("batch", "knee")) if gain else ()


def falls_back(case: Case) -> Figures:
    """Return the operators that MPS does not have, if they take too much."""
    if case.evidence.kind not in {None, "mps"}:
        return ()
    much = case.beyond("fallback_calls" if case.evidence.fallback_time is None else "fallback_time")
    named = case.known("fallback_operators") if much else ()
    return (*case.known("refused_operators"), *much, *named)


def gains_little(case: Case) -> Figures:
    """Return speed-up and utilisation if the whole interval is below its gate although the device works.

    It is the device's own speed that is seen: it is busy, or nothing is left that it could wait for.
    """
    ends, busy = case.ends_of_speed_up(), case.gated("utilisation")
    measured_busy = busy.value is not None and not case.beyond("utilisation")
    if ends is None or not (measured_busy or (case.data_is_fine and case.batch_is_fine)):
        return ()
    at_most = replace(case.gated("speed_up"), name=FIGURES["speed_up_high"][0], value=ends[1])
    return (at_most, *([busy] if busy.value is not None else [])) if ends[1] < at_most.threshold else ()


# The gates of a device that is worth it; the first three compare it with the CPU.
STAYS = (
    *("speed_up", "entity_agreement", "logits"),
    *("headroom", "memory_growth", "data_share", "knee_gain", "fallback_time", "fallback_calls"),
)


def all_is_well(case: Case) -> Figures:
    """Return the figures of a device that is worth it, each with its gate.

    What is beyond its gate and does not decide is left out, such as a count of fallbacks whose time is known; a speed-up that
    may be on either side stands there.
    """
    compared = STAYS if case.on_accelerator else STAYS[3:]
    known = (gate for gate in compared if getattr(case.evidence, gate) is not None)
    return tuple(case.gated(gate) for gate in known if gate == "speed_up" or not case.beyond(gate))


# The order of precedence: wrong numbers beat everything.
NUMBERS, MEMORY, DATA_PLANE, BATCH, FALLBACKS, SPEED = range(6)
RANKS = ("numbers", "memory", "data", "batch", "fallbacks", "speed")


@dataclass(frozen=True)
class Requirement:
    """Something that a verdict rests on.

    Attributes:
        name: What it is.
        rank: Where it stands in the order of precedence.
        command: How to measure it.
        known: Tells whether it was measured.
        matters: Tells whether it can change this verdict.
        needed: Whether a verdict is unsure without it, if it matters.
        blocks: Tells whether no device is stayed on without it, if it is needed.
    """

    name: str
    rank: int
    command: str
    known: Callable[[Case], bool]
    matters: Callable[[Case], bool] = lambda _case: True
    needed: bool = True
    blocks: Callable[[Case], bool] = lambda _case: True


def fallbacks_are_known(case: Case) -> bool:
    """Tell whether it is known that nothing falls back, or how much that costs."""
    here = case.evidence
    few = here.fallback_calls is not None and not case.beyond("fallback_calls")
    return here.fallback_operators == () or here.fallback_time is not None or few


def utilisation_matters(case: Case) -> bool:
    """Tell whether it must be known if a device waits: it gains little, and data or batch may be why."""
    gains = case.evidence.speed_up is not None and not case.beyond("speed_up")
    return case.on_accelerator and not (gains or (case.data_is_fine and case.batch_is_fine))


def measured(name: str) -> Callable[[Case], bool]:
    """Return what tells whether a figure was measured."""
    return lambda case: getattr(case.evidence, name) is not None


COMPARE = "nb.compare(model, texts)"
AT_KNEE = (
    "nb.sweep(model), with more seconds=... where it still rises, and nb.compare(model, texts, batch_size=sweep.knee)"
)
MORE_PAIRS = f"{COMPARE}, with more pairs=... where its interval holds the gate"

# Everything that a verdict rests on.
REQUIREMENTS = (
    Requirement("device", NUMBERS, COMPARE, measured("device")),
    Requirement("task", NUMBERS, "nb.verdict(..., task='annotation')", measured("task")),
    Requirement(
        "parity",
        NUMBERS,
        "nb.runbook.parity(model, texts)",
        Case.numbers_are_known,
        matters=lambda case: case.on_accelerator,
        blocks=lambda case: case.evidence.task != INFERENCE,
    ),
    Requirement(
        "memory",
        MEMORY,
        AT_KNEE,
        lambda case: case.evidence.headroom is not None or bool(case.evidence.out_of_memory_at and case.evidence.batch),
    ),
    Requirement(
        "growth of memory",
        MEMORY,
        "nb.epochs(...) and then nb.training.last_curve()",
        lambda case: case.evidence.memory_growth is not None and case.evidence.memory_verdict not in {None, TOO_SHORT},
        matters=lambda case: case.evidence.task in {None, TRAINING},
    ),
    Requirement("waiting for data", DATA_PLANE, COMPARE, measured("data_share")),
    Requirement("best batch", BATCH, AT_KNEE, measured("knee_gain")),
    Requirement(
        "cost of fallbacks",
        FALLBACKS,
        "nb.runbook.fallbacks() or nb.runbook.profile(model)",
        fallbacks_are_known,
        matters=lambda case: case.evidence.kind in {None, "mps"},
    ),
    Requirement(
        "speed-up",
        SPEED,
        MORE_PAIRS,
        Case.speed_up_is_known,
        matters=lambda case: case.on_accelerator,
        blocks=lambda case: case.evidence.speed_up is None,
    ),
    Requirement("utilisation", SPEED, COMPARE, measured("utilisation"), matters=utilisation_matters),
    Requirement("doctor", SPEED, "nb.doctor()", measured("doctor_failures"), needed=False),
    Requirement(
        "waiting for the device", SPEED, "nb.runbook.profile(model)", measured("synchronisations"), needed=False
    ),
    Requirement("power and heat", SPEED, "nb.signals()", measured("states"), needed=False),
)


STAY = "stay on this device"
FIX_DATA = "fix the data plane"
FIX_BATCH = "fix the batch"
CHECKPOINT = "checkpoint / accumulate"
FALL_BACK = "fall back to the CPU for these operators"
MLX = "move to MLX"
REMOTE = "move to a remote pool"
CPU = "compute on the CPU"
MEASURE = "measure first"


@dataclass(frozen=True)
class VerdictRule:
    """One line of the decision matrix.

    Attributes:
        recommendation: What it recommends.
        rank: Where it stands in the order of precedence.
        when: When it holds, in words; names of gates in braces stand for their values.
        figures: Returns the figures that speak for it, none if it does not hold.
        do: One thing to do.
        change: What would change it, in words like ``when``.
    """

    recommendation: str
    rank: int
    when: str
    figures: Callable[[Case], Figures]
    do: str
    change: str

    def row(self, gates: Mapping[str, str]) -> tuple[str, str, str, str]:
        """Return the rule as a row of a table, with the values of gates as people read them."""
        return self.when.format(**gates), self.recommendation, self.do, self.change.format(**gates)


WRONG = (
    "fewer than {entity_agreement} of the entities are the same as on the CPU, more than {recall_loss} of the recall is lost, "
    "logits differ by more than {logits} or gradients by more than {gradients}, or NaN appears"
)
RIGHT_AGAIN = "Parity within {entity_agreement} of the entities in float32, such as with another torch or macOS: nb.runbook.parity(...)."
WAITS = "the device is less than {speed_up} faster than the CPU while it is busy for less than {utilisation}"
LITTLE = "even at the upper end of the interval the device is less than {speed_up} faster than the CPU"
TO_ANNOTATE = "In annotation that is nb.annotate(..., batch_tokens=sweep.batch_tokens)."
BUSY_AGAIN = "A speed-up of {speed_up}, or a utilisation of {utilisation}: nb.compare(...)."

# The rules; of those that hold, the first decides.
RULES = (
    VerdictRule(
        MEASURE,
        NUMBERS,
        "the doctor found something that failed",
        lambda case: case.known("doctor_failures"),
        "Do what nb.doctor() says; what is measured before that is of another computer.",
        "A doctor's report without failures.",
    ),
    VerdictRule(
        CPU,
        NUMBERS,
        WRONG,
        lambda case: wrong_numbers(case) if case.moves_to_cpu else (),
        "Compute on the CPU, or on CUDA where there is one: nb.use('cpu').",
        RIGHT_AGAIN,
    ),
    VerdictRule(
        MLX,
        NUMBERS,
        "a language model writes on MPS, and its numbers are wrong, as above",
        lambda case: wrong_numbers(case) if case.writes_on_mps else (),
        "Run the model with MLX, or on the CPU or CUDA.",
        RIGHT_AGAIN,
    ),
    VerdictRule(
        REMOTE,
        MEMORY,
        "memory grows by more than {memory_growth} over ten epochs",
        lambda case: case.beyond("memory_growth") if case.evidence.memory_verdict == GROWING else (),
        "Find what is retained with nb.training.who_holds(): a larger host only takes longer to fill. Plan another one until then.",
        "A growth of at most {memory_growth} over ten epochs: nb.epochs(...) and nb.training.last_curve().",
    ),
    VerdictRule(
        CHECKPOINT,
        MEMORY,
        "a training step runs out of memory, or leaves less than {headroom} of the limit free",
        lambda case: (case.no_row_fits() or case.short_of_memory()) if case.evidence.task == TRAINING else (),
        "Use nb.training.checkpoint_activations(model), and smaller batches with nb.training.GradientAccumulation.",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(..., training=True).",
    ),
    VerdictRule(
        REMOTE,
        MEMORY,
        "not even one row fits into the memory",
        Case.no_row_fits,
        "Use a device with more memory, a smaller model, or shorter rows.",
        "One row that fits: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        MEMORY,
        "the batch in use runs out of memory, or leaves less than {headroom} of the limit free",
        lambda case: () if case.evidence.task == TRAINING or case.no_row_fits() else case.short_of_memory(),
        f"Use a smaller batch, such as the one at the knee of the sweep. {TO_ANNOTATE}",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_DATA,
        DATA_PLANE,
        "more than {data_share} of a step is spent on waiting for data",
        lambda case: case.beyond("data_share"),
        "Read ahead and tokenise once: nb.training.loader.check(loader) and nb.training.loader.ladder(...) say how.",
        "At most {data_share} of a step for data: nb.compare(...).",
    ),
    VerdictRule(
        FIX_DATA,
        DATA_PLANE,
        "more than {transfer_share} of a step is spent on copies to a device that is not the CPU",
        Case.slow_transfer,
        "Copy fewer and larger batches, and no more than the model reads.",
        "At most {transfer_share} of a step for copies: nb.compare(...).",
    ),
    VerdictRule(
        FIX_DATA,
        DATA_PLANE,
        "a step waits for the device, such as for .item() or .cpu(), and that is busy for less than {utilisation}",
        Case.synchronises,
        "Take results off the device after the step, or every some steps.",
        "No place where a step waits for the device: nb.runbook.profile(...).",
    ),
    VerdictRule(
        FIX_DATA,
        DATA_PLANE,
        f"{WAITS}, unless data are known to be fine",
        lambda case: () if case.data_is_fine else case.waits(),
        "Look at the data and the batch before the device: nb.compare(...) splits a step.",
        BUSY_AGAIN,
    ),
    VerdictRule(
        FIX_BATCH,
        BATCH,
        "the knee of the sweep has more than {knee_gain} more throughput than the batch in use",
        wrong_batch,
        f"Use the batch at the knee. {TO_ANNOTATE}",
        "At most {knee_gain} more throughput at the knee: nb.sweep(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        BATCH,
        "the batch is so small that starting operators takes most of the time, unless it is known to be the best",
        lambda case: () if case.batch_is_fine else case.known("tiny_batch"),
        "Use a larger batch: nb.sweep(...) finds one.",
        "A batch that keeps the device busy: nb.runbook.profile(...).",
    ),
    VerdictRule(
        FIX_BATCH,
        BATCH,
        f"{WAITS}, and data are fine, unless the batch is known to be",
        lambda case: case.waits() if case.data_is_fine and not case.batch_is_fine else (),
        "Use a larger batch: nb.sweep(...) finds one.",
        BUSY_AGAIN,
    ),
    VerdictRule(
        FALL_BACK,
        FALLBACKS,
        "MPS refuses operators, or what fell back takes more than {fallback_time} of the time, or of the calls more than "
        "{fallback_calls} where no times are known",
        falls_back,
        "Compute them on the CPU on purpose, all in one place, or another way; PYTORCH_ENABLE_MPS_FALLBACK=1 before torch "
        "is imported lets them run until then.",
        "At most {fallback_time} of the time in what falls back, such as in a newer torch: nb.runbook.fallbacks() and nb.runbook.forecast(model).",
    ),
    VerdictRule(
        CPU,
        SPEED,
        f"{LITTLE}, although it is busy, or data and batch are fine: less is not worth a second device",
        lambda case: gains_little(case) if case.moves_to_cpu else (),
        "Compute on the CPU: nb.use('cpu').",
        "A speed-up of {speed_up}, such as with a larger model or longer texts: nb.compare(...).",
    ),
    VerdictRule(
        MLX,
        SPEED,
        f"a language model writes on MPS, and {LITTLE}, although nothing waits",
        lambda case: gains_little(case) if case.writes_on_mps else (),
        "Run the model with MLX, which is made for that.",
        "A speed-up of {speed_up} over the CPU: nb.compare(...).",
    ),
    VerdictRule(
        REMOTE,
        SPEED,
        "the work takes more than {hours}",
        lambda case: case.beyond("hours"),
        "Spread the texts over several computers.",
        "Fewer texts, or so many more in a second that they are done in {hours}.",
    ),
)

# What is recommended if no rule holds: all is known, enough is, or too little.
STAYING = VerdictRule(
    STAY,
    SPEED,
    "everything that matters was measured, and no other rule holds",
    lambda case: () if case.needed() else all_is_well(case),
    "Nothing to do.",
    "Any figure beyond its gate. Another model, torch, macOS or computer is to be measured anew.",
)
LEANING = VerdictRule(
    STAY,
    SPEED,
    "no other rule holds, though something that may change that is in doubt",
    lambda case: () if any(one.blocks(case) for one in case.needed()) else all_is_well(case),
    "Look at what is not known.",
    "What is not known, once it is, or any figure beyond its gate.",
)
MEASURING = VerdictRule(
    MEASURE,
    SPEED,
    "no rule holds, and something that matters was not measured",
    lambda _case: (),
    "Measure what is not known.",
    "What is not known, once it is measured.",
)

# The decision matrix, with what is recommended if none of the rules holds.
MATRIX = (*RULES, STAYING, LEANING, MEASURING)
