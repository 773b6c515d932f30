"""What a verdict is made of: the figures of a device at work, what rules ask of them, and which of them matter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

from ..._render.display import Report, Shown, Table
from ..._utils.text import describe_value
from ...devices.request import kind_of
from ...errors import ConfigurationError
from ...models.certificates import ROUNDING
from ...training.curve import TOO_SHORT
from ..bench.workloads import ANNOTATION, DATA, TRANSFER
from ..checks.precision.report import TOLERANCES

INFERENCE, TRAINING, GENERATION = "inference", "training", "generation"
# What a model is used for: finding entities, forward passes of a module of one's own, training, or writing text.
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)

SECONDS_OF_AN_HOUR = 3600
MOST = 1 << 63

# What figures count.
SHARE, DIFFERENCE, HOURS, TIMES, RATE = "share", "difference", "hours", "times", "rate"
COUNT, WORDS, NAMES, PHASES, YES_NO = "count", "words", "names", "phases", "yes or no"


def digits(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{float(f'{value:.3g}'):,g}"


def is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def are_shares(value: object) -> bool:
    return isinstance(value, Mapping) and are_names(tuple(value)) and all(map(is_finite, value.values()))


# For each unit: how people read a value, whether something is one, and that in words.
FINITE = "a finite number"
READINGS: dict[str, tuple[Callable[[Any], str], Callable[[Any], bool], str]] = {
    SHARE: (lambda value: f"{digits(100 * value)} %", is_finite, FINITE),
    DIFFERENCE: (lambda value: f"{value:.3g}", is_finite, FINITE),
    HOURS: (
        lambda value: (
            f"{digits(60 * value)} minutes" if abs(value) < 1 else f"{digits(value)} hour{'s' * (value != 1)}"
        ),
        is_finite,
        FINITE,
    ),
    TIMES: (lambda value: f"{digits(value)} times", is_finite, FINITE),
    RATE: (lambda value: f"{digits(value)} a second", is_finite, FINITE),
    COUNT: (
        lambda value: f"{value:,}" if value else "none",
        lambda value: type(value) is int and 0 <= value < MOST,
        "a whole number from 0",
    ),
    WORDS: (str, lambda value: isinstance(value, str), "a string"),
    NAMES: (lambda value: ", ".join(value) or "none", are_names, "a tuple of strings"),
    PHASES: (
        lambda value: ", ".join(f"{name} {in_unit(SHARE, share)}" for name, share in value.items()),
        are_shares,
        "a mapping of names to finite numbers",
    ),
    YES_NO: (lambda value: "yes" if value else "no", lambda value: isinstance(value, bool), "True or False"),
}


def in_unit(unit: str, value: object) -> str:
    """Return a value as people read it, with three digits that count: ``22 %``, ``3.46 times``, ``1,200``, ``none``."""
    return READINGS[unit][0](value)


def figure(words: str, unit: str, default: Any = None) -> Any:
    """Return a field of a figure: what it is called, and what it counts."""
    return field(default=default, metadata={"figure": (words, unit)})


@dataclass(frozen=True, repr=False)
class Evidence(Shown):
    """Figures of a device at work; ``None`` if something was not measured, never a guess. Shares are fractions.

    Attributes:
        models: By which names the reports call the model.
        device: Where the work was done, as torch spells it.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``.
        speed_up_low: How many times as fast as the CPU it is, the lower end of the interval.
        speed_up: The middle.
        speed_up_high: The upper end.
        utilisation: How busy the device was, its utilisation when idle taken off.
        shares: How much of a step each phase takes, such as ``{"data": 0.2, "forward": 0.8}``.
        synchronisations: Where a step waits for the device, as places of code.
        tiny_batch: Whether starting operators takes most of the device's time.
        batch_tokens: How many tokens a batch in use may have, if texts are annotated.
        batch: How many rows a batch has that is in use; of annotation, rows like those of the sweep.
        knee: How many it should have.
        best_batch: How many it has where the throughput is largest.
        knee_gain: How much more throughput there is at the knee than at the batch in use; 0.1 is a tenth.
        out_of_memory_at: The smallest number of rows that did not fit; 0 if all fitted that were tried.
        headroom: How much of the memory limit stays free at the batch in use.
        memory_growth: The growth over ten epochs.
        memory_verdict: What the memory curve says: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        entity_agreement: How many of the entities are the same as on the CPU in float32.
        logits: The largest difference of a logit from the CPU, in float32.
        not_numbers: How many tokens became NaN or infinity.
        recall_loss: How much of the recall of gold entities is lost.
        gradients: The largest relative difference of a gradient from the CPU, in float32.
        training_parts: Where training parts from the CPU's by more than rounding explains; empty if it does not.
        refused_dtype: A reduced type in which the model does not keep its entities.
        refused_operators: What does not run on MPS at all.
        fallback_operators: The operators that fall back to the CPU.
        fallback_time: How much of the time they take.
        fallback_calls: How many of the operators called with tensors of MPS they are.
        device_faults: What the doctor saw the device compute wrongly, or not at all.
        silent_errors: The known silent errors that the doctor saw on this device.
        doctor_failures: What else the doctor found that failed.
        states: States of the computer that spoil times, such as ``"power, warning: battery"``.
        texts_per_second: How many texts, or rows, are done in a second.
        texts_to_do: How many there are to do.
        simulated: Whether any of it is from a simulated device.

    Raises:
        ConfigurationError: For a value that its figure cannot have.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, texts_to_do=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = figure("names of the model", NAMES)
    device: str | None = figure("device", WORDS)
    task: str | None = figure("task", WORDS)
    speed_up_low: float | None = figure("speed-up over the CPU, at least", TIMES)
    speed_up: float | None = figure("speed-up over the CPU", TIMES)
    speed_up_high: float | None = figure("speed-up over the CPU, at most", TIMES)
    utilisation: float | None = figure("utilisation", SHARE)
    shares: Mapping[str, float] | None = figure("phases of a step", PHASES)
    synchronisations: tuple[str, ...] | None = figure("places where a step waits for the device", NAMES)
    tiny_batch: bool | None = figure("batch so small that starting operators takes most of the time", YES_NO)
    batch_tokens: int | None = figure("tokens that a batch may have", COUNT)
    batch: int | None = figure("rows in use", COUNT)
    knee: int | None = figure("rows at the knee", COUNT)
    best_batch: int | None = figure("rows at the highest throughput", COUNT)
    knee_gain: float | None = figure("more throughput at the knee", SHARE)
    out_of_memory_at: int | None = figure("out of memory at rows", COUNT)
    headroom: float | None = figure("memory limit that stays free", SHARE)
    memory_growth: float | None = figure("growth over ten epochs", SHARE)
    memory_verdict: str | None = figure("memory curve", WORDS)
    entity_agreement: float | None = figure("entities that are the same", SHARE)
    logits: float | None = figure("largest difference of a logit", DIFFERENCE)
    not_numbers: int | None = figure("tokens with NaN or infinity", COUNT)
    recall_loss: float | None = figure("recall lost", SHARE)
    gradients: float | None = figure("largest relative difference of a gradient", DIFFERENCE)
    training_parts: tuple[str, ...] | None = figure("training parts from the CPU's", NAMES)
    refused_dtype: str | None = figure("type in which the entities are not kept", WORDS)
    refused_operators: tuple[str, ...] | None = figure("operators that MPS refuses", NAMES)
    fallback_operators: tuple[str, ...] | None = figure("operators that fell back", NAMES)
    fallback_time: float | None = figure("time spent in what fell back", SHARE)
    fallback_calls: float | None = figure("calls that fell back", SHARE)
    device_faults: tuple[str, ...] | None = figure("computed wrongly", NAMES)
    silent_errors: tuple[str, ...] | None = figure("known silent errors that were seen", NAMES)
    doctor_failures: tuple[str, ...] | None = figure("failed in nb.doctor()", NAMES)
    states: tuple[str, ...] | None = figure("states that spoil times", NAMES)
    texts_per_second: float | None = figure("texts, or rows", RATE)
    texts_to_do: int | None = figure("texts to do", COUNT)
    simulated: bool = figure("simulated", YES_NO, default=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _, fits, words = READINGS[FIGURES[name][1]]
            if value is not None and not fits(value):
                remedy = f"Pass {words}, or None if it was not measured."
                raise ConfigurationError(f"{name} cannot be {describe_value(value)}.", remedy)
        if self.task not in {None, *TASKS}:
            what = f"task cannot be {describe_value(self.task)}."
            raise ConfigurationError(what, f"Use one of {', '.join(TASKS)}.")

    @property
    def kind(self) -> str | None:
        """What kind of device it is: ``"mps"``, ``"cuda"`` or ``"cpu"``."""
        return kind_of(self.device) if self.device else None

    @property
    def data_share(self) -> float | None:
        """How much of a step is spent on waiting for data."""
        return None if self.shares is None else self.shares.get(DATA)

    @property
    def transfer_share(self) -> float | None:
        """How much of a step is spent on copies to the device."""
        return None if self.shares is None else self.shares.get(TRANSFER)

    @property
    def hours(self) -> float | None:
        """How many hours the texts that are to do take."""
        if not self.texts_per_second or self.texts_to_do is None:
            return None
        return self.texts_to_do / self.texts_per_second / SECONDS_OF_AN_HOUR

    @property
    def measured(self) -> dict[str, Any]:
        """The figures that are known, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def report(self) -> Report:
        """Return which figures are known; they themselves are among the figures."""
        names = ", ".join(self.measured) or "nothing"
        return Report("Evidence", (f"Measured: {names}.",), figures=(Table("", ("figure", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the figures that are known as people read them, one in a row; phases are rows of their own."""
        values = {name: getattr(self, name) for name in FIGURES if name not in {"shares", "simulated"}}
        phases = {name: share for name, share in (self.shares or {}).items() if name not in {DATA, TRANSFER}}
        return (
            *((FIGURES[name][0], in_unit(FIGURES[name][1], one)) for name, one in values.items() if one is not None),
            *((f"step spent on {name}", in_unit(SHARE, share)) for name, share in phases.items()),
        )


COMPUTED = {
    "shares": {
        "data_share": ("step spent on waiting for data", SHARE),
        "transfer_share": ("step spent on copies to the device", SHARE),
    },
    "texts_to_do": {"hours": ("time for all texts", HOURS)},
}
# What each figure is called, and what it counts; those that are computed from others stand behind them.
FIGURES: dict[str, tuple[str, str]] = {
    name: said
    for one in fields(Evidence)
    for name, said in {one.name: one.metadata["figure"], **COMPUTED.get(one.name, {})}.items()
}


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
    def measured(self) -> str:
        """The figure with its value, and with the threshold if it has one."""
        name, value, _, limit = self.row
        side = "at least" if self.gate in AT_LEAST else "at most"
        return f"{name}: {value}{f' (gate: {side} {limit})' if limit else ''}"

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
    limits: Mapping[str, float]  # The thresholds by their names.

    def figure(self, name: str) -> Figure:
        """Return a figure without a gate."""
        words, unit = FIGURES[name]
        return Figure(words, getattr(self.evidence, name), unit)

    def gated(self, gate: str) -> Figure:
        """Return the figure of a gate, which has its name."""
        return replace(self.figure(gate), gate=gate, limit=self.limits[gate])

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
        """Whether rounding explains how far logits are apart, as in ``precision.report``.

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

        For entities only parity tells. A model of the person's own has none, so its logits, its losses, or the doctor's probes stand for it.
        """
        evidence = self.evidence
        if evidence.entity_agreement is not None:
            return True
        doubtful = self.is_rounding and self.beyond("logits")
        none_found = () in {evidence.silent_errors, evidence.training_parts}
        shown = none_found or (evidence.logits is not None and not doubtful)
        return evidence.task not in {None, ANNOTATION} and shown

    @property
    def speed_ups(self) -> list[float]:
        """What is known of the speed-up and the ends of its interval, the smallest first."""
        here = self.evidence
        return sorted(one for one in (here.speed_up_low, here.speed_up, here.speed_up_high) if one is not None)

    def speed_up_may_be(self, value: float) -> bool:
        """Tell whether the interval of the speed-up holds a value."""
        low, high = self.evidence.speed_up_low, self.evidence.speed_up_high
        return low is not None and high is not None and low <= value <= high

    def speed_up_is_known(self) -> bool:
        """Tell whether it is known on which side of its gate the speed-up is: its whole interval is on one."""
        known, gate = self.speed_ups, 1 + self.limits["speed_up"]
        return len(known) == 3 and not known[0] < gate <= known[-1]  # noqa: PLR2004 - both ends and the middle

    def unmeasured(self) -> tuple[Requirement, ...]:
        """Return what matters and was not measured."""
        return tuple(one for one in REQUIREMENTS if one.matters(self) and not one.known(self))

    def needed(self) -> tuple[Requirement, ...]:
        """Return what was not measured and could change a verdict."""
        return tuple(one for one in self.unmeasured() if one.needed)


class Area(IntEnum):
    """What a figure is about, in the order of precedence: wrong numbers beat everything."""

    NUMBERS, MEMORY, DATA, BATCH, FALLBACKS, SPEED = range(6)


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
    rank: Area
    command: str
    known: Callable[[Case], bool]
    matters: Callable[[Case], bool] = lambda _case: True
    needed: bool = True
    blocks: Callable[[Case], bool] = lambda _case: True

    @property
    def first_command(self) -> str:
        """The first of what is to be typed."""
        return re.split(r",? (?:and|or|with) ", self.command)[0]


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
    Requirement("device", Area.NUMBERS, COMPARE, measured("device")),
    Requirement("task", Area.NUMBERS, "nb.verdict(..., task='annotation')", measured("task")),
    Requirement(
        "parity",
        Area.NUMBERS,
        "nb.runbook.parity(model, texts)",
        Case.numbers_are_known,
        matters=lambda case: case.on_accelerator,
        blocks=lambda case: case.evidence.task != INFERENCE,
    ),
    Requirement(
        "memory",
        Area.MEMORY,
        AT_KNEE,
        lambda case: case.evidence.headroom is not None or bool(case.evidence.out_of_memory_at and case.evidence.batch),
    ),
    Requirement(
        "growth of memory",
        Area.MEMORY,
        "nb.epochs(...) and then nb.training.last_curve()",
        lambda case: case.evidence.memory_growth is not None and case.evidence.memory_verdict not in {None, TOO_SHORT},
        matters=lambda case: case.evidence.task in {None, TRAINING},
    ),
    Requirement("waiting for data", Area.DATA, COMPARE, measured("data_share")),
    Requirement("best batch", Area.BATCH, AT_KNEE, measured("knee_gain")),
    Requirement(
        "cost of fallbacks",
        Area.FALLBACKS,
        "nb.runbook.fallbacks() or nb.runbook.profile(model)",
        fallbacks_are_known,
        matters=lambda case: case.evidence.kind in {None, "mps"},
    ),
    Requirement(
        "speed-up",
        Area.SPEED,
        MORE_PAIRS,
        Case.speed_up_is_known,
        matters=lambda case: case.on_accelerator,
        blocks=lambda case: case.evidence.speed_up is None,
    ),
    Requirement("utilisation", Area.SPEED, COMPARE, measured("utilisation"), matters=utilisation_matters),
    Requirement("doctor", Area.SPEED, "nb.doctor()", measured("doctor_failures"), needed=False),
    Requirement(
        "waiting for the device", Area.SPEED, "nb.runbook.profile(model)", measured("synchronisations"), needed=False
    ),
    Requirement("power and heat", Area.SPEED, "nb.signals()", measured("states"), needed=False),
)
