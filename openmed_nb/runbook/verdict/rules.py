"""What a verdict rests on, and its rules, in order of precedence: wrong numbers, memory, data, batch, fallbacks, speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...models.certificates import ROUNDING
from ...training.curve import GROWING, TOO_SHORT
from ..measure.workloads import ANNOTATION
from ..precision.parity import TOLERANCES
from .evidence import FIGURES, GENERATION, INFERENCE, TRAINING, Evidence, plain, words_of
from .gates import NAMES, TIMES, Thresholds, in_unit

AT_LEAST = frozenset({"speed_up", "utilisation", "entity_agreement", "headroom"})
"""The gates that a figure must reach; beyond the others it must not go."""


@dataclass(frozen=True)
class Figure:
    """A figure that speaks for a recommendation.

    Attributes:
        name: What was measured, in words.
        value: The figure.
        unit: What it counts.
        gate: The name of its threshold; empty where it has none.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as a mapping, ready for JSON."""
        return {**vars(self), "value": plain(self.value)}


Figures = tuple[Figure, ...]
Look = Callable[[Evidence, Thresholds], Figures]
"""Returns the figures that reach their gates, none where a rule does not hold."""


def figure_of(evidence: Evidence, name: str) -> Figure:
    """Return a figure without a gate."""
    return Figure(words_of(name), getattr(evidence, name), FIGURES[name][1])


def gated(evidence: Evidence, gates: Thresholds, gate: str) -> Figure:
    """Return the figure of a gate, which has its name."""
    return Figure(words_of(gate), getattr(evidence, gate), FIGURES[gate][1], gate, getattr(gates, gate))


def beyond(evidence: Evidence, gates: Thresholds, gate: str) -> Figures:
    """Return the figure of a gate where it is on the wrong side of it; what rounding may have done does not count."""
    figure = gated(evidence, gates, gate)
    if figure.value is None:
        return ()
    apart = figure.threshold - figure.value if gate in AT_LEAST else figure.value - figure.threshold
    return (figure,) if apart > ROUNDING else ()


def told(evidence: Evidence, *names: str) -> Figures:
    """Return those of some figures that say anything: names that there are, counts above 0, and what is so."""
    return tuple(figure_of(evidence, name) for name in names if getattr(evidence, name))


def is_accelerator(evidence: Evidence) -> bool:
    """Tell whether the work was not done on the CPU, which is what devices are compared with."""
    return evidence.kind != "cpu"


def writes_on_mps(evidence: Evidence) -> bool:
    """Tell whether a language model writes on MPS, for which there is MLX."""
    return evidence.task == GENERATION and evidence.kind == "mps"


def wrong_numbers(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return what is not as on the CPU in float32."""
    return (
        *told(evidence, "device_faults", "not_numbers"),
        *beyond(evidence, gates, "entity_agreement"),
        *(() if is_rounding(evidence) else beyond(evidence, gates, "logits")),
        *beyond(evidence, gates, "recall_loss"),
        *beyond(evidence, gates, "gradients"),
    )


def is_rounding(evidence: Evidence) -> bool:
    """Tell whether rounding explains how far logits are apart.

    As in ``judgement.of_logits``: a larger model adds up more roundings, so up to what 16 bits round the entities decide.
    """
    small = evidence.logits is not None and evidence.logits <= (TOLERANCES["float16"].logits or 0.0)
    return small and evidence.entity_agreement in {None, 1}


def memory_grows(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return the growth over ten epochs, where the memory curve says that it is one."""
    return beyond(evidence, gates, "memory_growth") if evidence.memory_verdict == GROWING else ()


def no_row_fits(evidence: Evidence, _gates: Thresholds) -> Figures:
    """Return that not even one row fits into the memory."""
    return told(evidence, "out_of_memory_at") if evidence.out_of_memory_at == 1 else ()


def short_of_memory(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return that the batch in use does not fit, or hardly does."""
    full, batch = evidence.out_of_memory_at, evidence.batch
    out = told(evidence, "out_of_memory_at") if full and batch and batch >= full else ()
    return (*out, *beyond(evidence, gates, "headroom"))


def short_in_training(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return that a training step does not fit, or hardly does."""
    if evidence.task != TRAINING:
        return ()
    return no_row_fits(evidence, gates) or short_of_memory(evidence, gates)


def short_without_training(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return that a batch hardly fits, where a smaller one is all that helps."""
    if evidence.task == TRAINING or no_row_fits(evidence, gates):
        return ()
    return short_of_memory(evidence, gates)


def waits(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return speed-up and utilisation where both are too small: the device waits."""
    gain, busy = beyond(evidence, gates, "speed_up"), beyond(evidence, gates, "utilisation")
    return (*gain, *busy) if gain and busy and is_accelerator(evidence) else ()


def data_is_fine(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it was measured that neither data nor copies take much of a step."""
    known = evidence.data_share is not None
    return known and not (slow_data(evidence, gates) or slow_transfer(evidence, gates))


def batch_is_fine(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it was measured that another batch would gain little."""
    return evidence.knee_gain is not None and not beyond(evidence, gates, "knee_gain")


def waits_for_data(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return speed-up and utilisation where the device waits, unless data are known to be fine."""
    return () if data_is_fine(evidence, gates) else waits(evidence, gates)


def waits_for_rows(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return speed-up and utilisation where the device waits and data are fine, unless the batch is known to be fine."""
    fine = batch_is_fine(evidence, gates) or not data_is_fine(evidence, gates)
    return () if fine else waits(evidence, gates)


def slow_data(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return a share of data that is too large."""
    return beyond(evidence, gates, "data_share")


def slow_transfer(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return a share of copies that is too large; to the CPU nothing is copied."""
    return beyond(evidence, gates, "transfer_share") if is_accelerator(evidence) else ()


def is_busy(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it was measured that the device is busy."""
    return evidence.utilisation is not None and not beyond(evidence, gates, "utilisation")


def synchronises(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return where a step waits for a device that is hardly busy; while it is busy, a loss that is read costs little."""
    idle = beyond(evidence, gates, "utilisation")
    return (*told(evidence, "synchronisations"), *idle) if idle and evidence.synchronisations else ()


def synchronises_beside(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return where a step waits for the device, where that does not decide."""
    return () if synchronises(evidence, gates) else told(evidence, "synchronisations")


def wrong_batch(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return how much more throughput there is at the knee, and where that is."""
    gain = beyond(evidence, gates, "knee_gain")
    return (*gain, *told(evidence, "batch", "knee")) if gain else ()


def tiny_batch(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return that starting operators takes most of the time, unless it is known that no larger batch is faster."""
    return () if batch_is_fine(evidence, gates) else told(evidence, "tiny_batch")


def falls_back(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return the operators that MPS does not have, where they take too much."""
    if evidence.kind not in {None, "mps"}:
        return ()
    much = beyond(evidence, gates, "fallback_calls" if evidence.fallback_time is None else "fallback_time")
    named = told(evidence, "fallback_operators") if much else ()
    return (*told(evidence, "refused_operators"), *much, *named)


def is_at_work(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it is the device's own speed that is seen: it is busy, or nothing is left that it could wait for."""
    return is_busy(evidence, gates) or (data_is_fine(evidence, gates) and batch_is_fine(evidence, gates))


def ends_of_speed_up(evidence: Evidence) -> tuple[float, float] | None:
    """Return the ends of the interval of the speed-up as far as they are known; ``None`` where nothing was measured."""
    known = [one for one in (evidence.speed_up_low, evidence.speed_up, evidence.speed_up_high) if one is not None]
    return (min(known), max(known)) if known else None


def gains_little(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return speed-up and utilisation where the whole interval is below its gate although the device works."""
    ends = ends_of_speed_up(evidence)
    at_most = gated(evidence.but(speed_up=ends and ends[1]), gates, "speed_up")
    if ends is None or ends[1] >= at_most.threshold or not is_at_work(evidence, gates):
        return ()
    busy = () if evidence.utilisation is None else (gated(evidence, gates, "utilisation"),)
    return (replace(at_most, name=words_of("speed_up_high")), *busy)


def too_long(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return how long the work takes, where that is too long for one computer."""
    return beyond(evidence, gates, "hours")


def on_mps_writing(look: Look) -> Look:
    """Return a look that holds only where a language model writes on MPS."""
    return lambda evidence, gates: look(evidence, gates) if writes_on_mps(evidence) else ()


def elsewhere(look: Look) -> Look:
    """Return a look that holds on any other device but the CPU, and for any other task."""

    def looks(evidence: Evidence, gates: Thresholds) -> Figures:
        return look(evidence, gates) if is_accelerator(evidence) and not writes_on_mps(evidence) else ()

    return looks


STAYS = (
    "speed_up",
    "entity_agreement",
    "logits",
    "headroom",
    "memory_growth",
    "data_share",
    "knee_gain",
    "fallback_time",
    "fallback_calls",
)
"""The gates of a device that is worth it."""


def all_is_well(evidence: Evidence, gates: Thresholds) -> Figures:
    """Return the figures of a device that is worth it, each with its gate.

    What is beyond its gate and does not decide is left out, such as a count of fallbacks whose time is known; a speed-up that
    may be on either side stands there.
    """
    compared = STAYS if is_accelerator(evidence) else STAYS[3:]
    known = (gate for gate in compared if getattr(evidence, gate) is not None)
    return tuple(
        gated(evidence, gates, gate) for gate in known if gate == "speed_up" or not beyond(evidence, gates, gate)
    )


NUMBERS, MEMORY, DATA_PLANE, BATCH, FALLBACKS, SPEED = range(6)
"""The order of precedence: wrong numbers beat everything."""

RANKS = ("numbers", "memory", "data", "batch", "fallbacks", "speed")

AT_KNEE = (
    "nb.sweep(model), with more seconds=... where it still rises, and nb.compare(model, texts, batch_size=sweep.knee)"
)
MORE_PAIRS = "nb.compare(model, texts), with more pairs=... where its interval holds the gate"


@dataclass(frozen=True)
class Area:
    """Something that a verdict rests on.

    Attributes:
        name: What it is.
        rank: Where it stands in the order of precedence.
        command: How to measure it.
        known: Tells whether it was measured.
        matters: Tells whether it can change this verdict.
        needed: Whether a verdict is unsure without it, where it matters.
        blocks: Tells whether no device is stayed on without it, where it is needed.
    """

    name: str
    rank: int
    command: str
    known: Callable[[Evidence, Thresholds], bool]
    matters: Callable[[Evidence, Thresholds], bool] = lambda _evidence, _gates: True
    needed: bool = True
    blocks: Callable[[Evidence], bool] = lambda _evidence: True

    def to_dict(self) -> dict[str, str]:
        """Return what was not measured, and how to, ready for JSON."""
        return {"name": self.name, "command": self.command}


def numbers_are_known(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it is known that the numbers are right, or that they are not.

    For entities only parity tells. A model of the person's own has none, so its logits, or the doctor's probes, stand for it.
    """
    if evidence.entity_agreement is not None:
        return True
    doubtful = is_rounding(evidence) and beyond(evidence, gates, "logits")
    told = evidence.logits is not None and not doubtful
    return evidence.task not in {None, ANNOTATION} and (told or evidence.silent_errors == ())


def memory_is_known(evidence: Evidence, _gates: Thresholds) -> bool:
    """Tell whether it is known how much memory the batch in use takes."""
    return evidence.headroom is not None or bool(evidence.out_of_memory_at and evidence.batch)


def growth_is_known(evidence: Evidence, _gates: Thresholds) -> bool:
    """Tell whether there were enough epochs to tell whether memory grows."""
    return evidence.memory_growth is not None and evidence.memory_verdict not in {None, TOO_SHORT}


def fallbacks_are_known(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it is known that nothing falls back, or how much that costs."""
    few = evidence.fallback_calls is not None and not beyond(evidence, gates, "fallback_calls")
    return evidence.fallback_operators == () or evidence.fallback_time is not None or few


def utilisation_matters(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it must be known if a device waits: it gains little, and data or batch may be why."""
    gains = evidence.speed_up is not None and not beyond(evidence, gates, "speed_up")
    fine = data_is_fine(evidence, gates) and batch_is_fine(evidence, gates)
    return is_accelerator(evidence) and not (gains or fine)


def speed_up_is_known(evidence: Evidence, gates: Thresholds) -> bool:
    """Tell whether it is known on which side of its gate the speed-up is: its whole interval is on one."""
    if None in {evidence.speed_up_low, evidence.speed_up, evidence.speed_up_high}:
        return False
    low, high = ends_of_speed_up(evidence) or (0.0, 0.0)
    return high < 1 + gates.speed_up or low >= 1 + gates.speed_up


def on_accelerator(evidence: Evidence, _gates: Thresholds) -> bool:
    """Tell whether there is a CPU to compare with."""
    return is_accelerator(evidence)


AREAS = (
    Area("device", NUMBERS, "nb.compare(model, texts)", lambda here, _: here.device is not None),
    Area("task", NUMBERS, "nb.verdict(..., task='annotation')", lambda here, _: here.task is not None),
    Area(
        "parity",
        NUMBERS,
        "nb.parity(model, texts)",
        numbers_are_known,
        on_accelerator,
        blocks=lambda here: here.task != INFERENCE,
    ),
    Area("memory", MEMORY, AT_KNEE, memory_is_known),
    Area(
        "growth of memory",
        MEMORY,
        "nb.epochs(...) and then nb.memory_curve()",
        growth_is_known,
        lambda here, _: here.task in {None, TRAINING},
    ),
    Area("waiting for data", DATA_PLANE, "nb.compare(model, texts)", lambda here, _: here.data_share is not None),
    Area("best batch", BATCH, AT_KNEE, lambda here, _: here.knee_gain is not None),
    Area(
        "cost of fallbacks",
        FALLBACKS,
        "nb.fallbacks() or nb.profile(model)",
        fallbacks_are_known,
        lambda here, _: here.kind in {None, "mps"},
    ),
    Area(
        "speed-up",
        SPEED,
        MORE_PAIRS,
        speed_up_is_known,
        on_accelerator,
        blocks=lambda here: here.speed_up is None,
    ),
    Area(
        "utilisation",
        SPEED,
        "nb.compare(model, texts)",
        lambda here, _: here.utilisation is not None,
        utilisation_matters,
    ),
    Area("doctor", SPEED, "nb.doctor()", lambda here, _: here.doctor_failures is not None, needed=False),
    Area(
        "waiting for the device",
        SPEED,
        "nb.profile(model)",
        lambda here, _: here.synchronisations is not None,
        needed=False,
    ),
    Area("power and heat", SPEED, "nb.signals()", lambda here, _: here.states is not None, needed=False),
)
"""Everything that a verdict rests on."""


def unmeasured(evidence: Evidence, gates: Thresholds) -> tuple[Area, ...]:
    """Return what matters and was not measured."""
    return tuple(one for one in AREAS if one.matters(evidence, gates) and not one.known(evidence, gates))


def needed(evidence: Evidence, gates: Thresholds) -> tuple[Area, ...]:
    """Return what was not measured and could change a verdict."""
    return tuple(one for one in unmeasured(evidence, gates) if one.needed)


STAY = "stay on this device"
FIX_DATA = "fix the data plane"
FIX_BATCH = "fix the batch"
CHECKPOINT = "checkpoint / accumulate"
FALL_BACK = "fall back to the CPU for these operators"
MLX = "move to MLX"
REMOTE = "move to a remote pool"
CPU = "compute on the CPU"
MEASURE = "measure first"

RECOMMENDATIONS = (STAY, FIX_DATA, FIX_BATCH, CHECKPOINT, FALL_BACK, MLX, REMOTE, CPU, MEASURE)
"""All that a verdict can recommend."""


@dataclass(frozen=True)
class Rule:
    """One line of the decision matrix.

    Attributes:
        recommendation: What it recommends.
        rank: Where it stands in the order of precedence.
        when: When it holds, in words; names of gates in braces stand for their values.
        look: Returns the figures that speak for it, none where it does not hold.
        do: One thing to do.
        change: What would change it, in words like ``when``.
    """

    recommendation: str
    rank: int
    when: str
    look: Look
    do: str
    change: str

    def said(self, gates: Mapping[str, str]) -> tuple[str, str, str, str]:
        """Return the rule as a row of a table, with the values of gates as people read them."""
        return self.when.format(**gates), self.recommendation, self.do, self.change.format(**gates)


WRONG = (
    "fewer than {entity_agreement} of the entities are the same as on the CPU, more than {recall_loss} of the recall is lost, "
    "logits differ by more than {logits} or gradients by more than {gradients}, or NaN appears"
)
RIGHT_AGAIN = (
    "Parity within {entity_agreement} of the entities in float32, such as with another torch or macOS: nb.parity(...)."
)
WAITS = "the device is less than {speed_up} faster than the CPU while it is busy for less than {utilisation}"
LITTLE = "even at the upper end of the interval the device is less than {speed_up} faster than the CPU"
TO_ANNOTATE = "In annotation that is nb.annotate(..., batch_tokens=sweep.batch_tokens)."
BUSY_AGAIN = "A speed-up of {speed_up}, or a utilisation of {utilisation}: nb.compare(...)."

RULES = (
    Rule(
        MEASURE,
        NUMBERS,
        "the doctor found something that failed",
        lambda here, _: told(here, "doctor_failures"),
        "Do what nb.doctor() says; what is measured before that is of another computer.",
        "A doctor's report without failures.",
    ),
    Rule(
        CPU,
        NUMBERS,
        WRONG,
        elsewhere(wrong_numbers),
        "Compute on the CPU, or on CUDA where there is one: nb.use('cpu').",
        RIGHT_AGAIN,
    ),
    Rule(
        MLX,
        NUMBERS,
        "a language model writes on MPS, and its numbers are wrong, as above",
        on_mps_writing(wrong_numbers),
        "Run the model with MLX, or on the CPU or CUDA.",
        RIGHT_AGAIN,
    ),
    Rule(
        REMOTE,
        MEMORY,
        "memory grows by more than {memory_growth} over ten epochs",
        memory_grows,
        "Find what is retained with nb.who_holds(): a larger host only takes longer to fill. Plan another one until then.",
        "A growth of at most {memory_growth} over ten epochs: nb.epochs(...) and nb.memory_curve().",
    ),
    Rule(
        CHECKPOINT,
        MEMORY,
        "a training step runs out of memory, or leaves less than {headroom} of the limit free",
        short_in_training,
        "Use nb.checkpoint_activations(model), and smaller batches with nb.GradientAccumulation.",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(..., training=True).",
    ),
    Rule(
        REMOTE,
        MEMORY,
        "not even one row fits into the memory",
        no_row_fits,
        "Use a device with more memory, a smaller model, or shorter rows.",
        "One row that fits: nb.sweep(...).",
    ),
    Rule(
        FIX_BATCH,
        MEMORY,
        "the batch in use runs out of memory, or leaves less than {headroom} of the limit free",
        short_without_training,
        f"Use a smaller batch, such as the one at the knee of the sweep. {TO_ANNOTATE}",
        "At least {headroom} of the memory limit free at the batch in use: nb.sweep(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "more than {data_share} of a step is spent on waiting for data",
        slow_data,
        "Read ahead and tokenise once: nb.check_loader(loader) and nb.worker_ladder(...) say how.",
        "At most {data_share} of a step for data: nb.compare(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "more than {transfer_share} of a step is spent on copies to a device that is not the CPU",
        slow_transfer,
        "Copy fewer and larger batches, and no more than the model reads.",
        "At most {transfer_share} of a step for copies: nb.compare(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        "a step waits for the device, such as for .item() or .cpu(), and that is busy for less than {utilisation}",
        synchronises,
        "Take results off the device after the step, or every some steps.",
        "No place where a step waits for the device: nb.profile(...).",
    ),
    Rule(
        FIX_DATA,
        DATA_PLANE,
        f"{WAITS}, unless data are known to be fine",
        waits_for_data,
        "Look at the data and the batch before the device: nb.compare(...) splits a step.",
        BUSY_AGAIN,
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        "the knee of the sweep has more than {knee_gain} more throughput than the batch in use",
        wrong_batch,
        f"Use the batch at the knee. {TO_ANNOTATE}",
        "At most {knee_gain} more throughput at the knee: nb.sweep(...).",
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        "the batch is so small that starting operators takes most of the time, unless it is known to be the best",
        tiny_batch,
        "Use a larger batch: nb.sweep(...) finds one.",
        "A batch that keeps the device busy: nb.profile(...).",
    ),
    Rule(
        FIX_BATCH,
        BATCH,
        f"{WAITS}, and data are fine, unless the batch is known to be",
        waits_for_rows,
        "Use a larger batch: nb.sweep(...) finds one.",
        BUSY_AGAIN,
    ),
    Rule(
        FALL_BACK,
        FALLBACKS,
        "MPS refuses operators, or what fell back takes more than {fallback_time} of the time, or of the calls more than "
        "{fallback_calls} where no times are known",
        falls_back,
        "Compute them on the CPU on purpose, all in one place, or another way; PYTORCH_ENABLE_MPS_FALLBACK=1 before torch "
        "is imported lets them run until then.",
        "At most {fallback_time} of the time in what falls back, such as in a newer torch: nb.fallbacks() and nb.forecast(model).",
    ),
    Rule(
        CPU,
        SPEED,
        f"{LITTLE}, although it is busy, or data and batch are fine: less is not worth a second device",
        elsewhere(gains_little),
        "Compute on the CPU: nb.use('cpu').",
        "A speed-up of {speed_up}, such as with a larger model or longer texts: nb.compare(...).",
    ),
    Rule(
        MLX,
        SPEED,
        f"a language model writes on MPS, and {LITTLE}, although nothing waits",
        on_mps_writing(gains_little),
        "Run the model with MLX, which is made for that.",
        "A speed-up of {speed_up} over the CPU: nb.compare(...).",
    ),
    Rule(
        REMOTE,
        SPEED,
        "the work takes more than {hours}",
        too_long,
        "Spread the texts over several computers.",
        "Fewer texts, or so many more in a second that they are done in {hours}.",
    ),
)
"""The rules; of those that hold, the first decides."""

STAYING = Rule(
    STAY,
    SPEED,
    "everything that matters was measured, and no other rule holds",
    lambda here, gates: all_is_well(here, gates) if not needed(here, gates) else (),
    "Nothing to do.",
    "Any figure beyond its gate. Another model, torch, macOS or computer is to be measured anew.",
)
"""What is recommended where no rule holds, and all is known."""

LEANING = Rule(
    STAY,
    SPEED,
    "no other rule holds, though something that may change that is in doubt",
    lambda here, gates: () if any(one.blocks(here) for one in needed(here, gates)) else all_is_well(here, gates),
    "Look at what is not known.",
    "What is not known, once it is, or any figure beyond its gate.",
)
"""What is recommended where no rule holds, and enough is known."""

MEASURING = Rule(
    MEASURE,
    SPEED,
    "no rule holds, and something that matters was not measured",
    lambda _here, _gates: (),
    "Measure what is not known.",
    "What is not known, once it is measured.",
)
"""What is recommended where no rule holds, and too little is known."""

MATRIX = (*RULES, STAYING, LEANING, MEASURING)
"""The decision matrix, with what is recommended where none of the rules holds."""
