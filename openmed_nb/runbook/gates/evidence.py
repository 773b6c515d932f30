"""What was measured, as plain figures: what a verdict is made of, whoever measured them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...devices.request import kind_of
from ...devices.simulation import MARK
from ...errors import ConfigurationError, shorten
from ...interface.display import Report, Shown, Table
from ..workloads.workload import DATA, TRANSFER
from .thresholds import COUNT, DIFFERENCE, HOURS, NAMES, PHASES, RATE, SHARE, TIMES, WORDS, YES_NO, in_unit

ANNOTATION, INFERENCE, TRAINING, GENERATION = "annotation", "inference", "training", "generation"
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)
"""What a model is used for: finding entities, forward passes of a module of one's own, training, or writing text."""

FIGURES: dict[str, tuple[str, str]] = {
    "models": ("names of the model", NAMES),
    "device": ("device", WORDS),
    "task": ("task", WORDS),
    "speed_up_low": ("speed-up over the CPU, at least", TIMES),
    "speed_up": ("speed-up over the CPU", TIMES),
    "speed_up_high": ("speed-up over the CPU, at most", TIMES),
    "utilisation": ("utilisation", SHARE),
    "shares": ("phases of a step", PHASES),
    "data_share": ("step spent on waiting for data", SHARE),
    "transfer_share": ("step spent on copies to the device", SHARE),
    "synchronisations": ("places where a step waits for the device", NAMES),
    "tiny_batch": ("batch so small that starting operators takes most of the time", YES_NO),
    "batch_tokens": ("tokens that a batch may have", COUNT),
    "batch": ("rows in use", COUNT),
    "knee": ("rows at the knee", COUNT),
    "best_batch": ("rows at the highest throughput", COUNT),
    "knee_gain": ("more throughput at the knee", SHARE),
    "out_of_memory_at": ("out of memory at rows", COUNT),
    "headroom": ("memory limit that stays free", SHARE),
    "memory_growth": ("growth over ten epochs", SHARE),
    "memory_verdict": ("memory curve", WORDS),
    "entity_agreement": ("entities that are the same", SHARE),
    "logits": ("largest difference of a logit", DIFFERENCE),
    "not_numbers": ("tokens with NaN or infinity", COUNT),
    "recall_loss": ("recall lost", SHARE),
    "gradients": ("largest relative difference of a gradient", DIFFERENCE),
    "refused_dtype": ("type in which the entities are not kept", WORDS),
    "refused_operators": ("operators that MPS refuses", NAMES),
    "fallback_operators": ("operators that fell back", NAMES),
    "fallback_time": ("time spent in what fell back", SHARE),
    "fallback_calls": ("calls that fell back", SHARE),
    "device_faults": ("computed wrongly", NAMES),
    "silent_errors": ("known silent errors that were seen", NAMES),
    "doctor_failures": ("failed in nb.doctor()", NAMES),
    "states": ("states that spoil times", NAMES),
    "texts_per_second": ("texts, or rows", RATE),
    "texts_to_do": ("texts to do", COUNT),
    "hours": ("time for all texts", HOURS),
    "simulated": ("simulated", YES_NO),
}
"""What each figure is called, and what it counts."""

SECONDS_OF_AN_HOUR = 3600
MOST = 1 << 63


@dataclass(frozen=True, repr=False)
class Evidence(Shown):
    """Figures of a device at work; ``None`` where something was not measured, never a guess. Shares are fractions.

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
        batch_tokens: How many tokens a batch in use may have, where texts are annotated.
        batch: How many rows a batch has that is in use; of annotation, rows like those of the sweep.
        knee: How many it should have.
        best_batch: How many it has where the throughput is largest.
        knee_gain: How much more throughput there is at the knee than at the batch in use; 0.1 is a tenth.
        out_of_memory_at: The smallest number of rows that did not fit; 0 where all fitted that were tried.
        headroom: How much of the memory limit stays free at the batch in use.
        memory_growth: The growth over ten epochs.
        memory_verdict: What the memory curve says: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        entity_agreement: How many of the entities are the same as on the CPU in float32.
        logits: The largest difference of a logit from the CPU, in float32.
        not_numbers: How many tokens became NaN or infinity.
        recall_loss: How much of the recall of gold entities is lost.
        gradients: The largest relative difference of a gradient from the CPU, in float32.
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
        ConfigurationError: For a figure that is none.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, texts_to_do=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = None
    device: str | None = None
    task: str | None = None
    speed_up_low: float | None = None
    speed_up: float | None = None
    speed_up_high: float | None = None
    utilisation: float | None = None
    shares: Mapping[str, float] | None = None
    synchronisations: tuple[str, ...] | None = None
    tiny_batch: bool | None = None
    batch_tokens: int | None = None
    batch: int | None = None
    knee: int | None = None
    best_batch: int | None = None
    knee_gain: float | None = None
    out_of_memory_at: int | None = None
    headroom: float | None = None
    memory_growth: float | None = None
    memory_verdict: str | None = None
    entity_agreement: float | None = None
    logits: float | None = None
    not_numbers: int | None = None
    recall_loss: float | None = None
    gradients: float | None = None
    refused_dtype: str | None = None
    refused_operators: tuple[str, ...] | None = None
    fallback_operators: tuple[str, ...] | None = None
    fallback_time: float | None = None
    fallback_calls: float | None = None
    device_faults: tuple[str, ...] | None = None
    silent_errors: tuple[str, ...] | None = None
    doctor_failures: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    texts_per_second: float | None = None
    texts_to_do: int | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value, (fits, words) = getattr(self, one.name), KINDS[FIGURES[one.name][1]]
            if value is not None and not fits(value):
                what = f"{one.name}={shorten(repr(value))} is no figure of a verdict."
                raise ConfigurationError(what, f"Pass {words}, or None where it was not measured.")
        if self.task not in {None, *TASKS}:
            what = f"task={shorten(repr(self.task))} is nothing that a verdict knows."
            raise ConfigurationError(what, f"Use one of {', '.join(TASKS)}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """Return the evidence that :meth:`to_dict` gave, or part of it.

        Raises:
            ConfigurationError: For a name that is no figure, and for a value that is none.

        Example:
            >>> Evidence.from_dict({"device": "mps", "fallback_operators": ["aten::mode"]}).fallback_operators
            ('aten::mode',)
        """
        unknown = sorted(set(values) - {one.name for one in fields(cls)})
        if unknown:
            raise ConfigurationError(f"{shorten(unknown[0])!r} is no figure of a verdict.", "Leave it out.")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    def but(self, **changes: Any) -> Evidence:
        """Return the evidence with other figures."""
        return replace(self, **changes)

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
        """The figures that there are, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain mappings, lists, numbers and strings, ready for JSON."""
        return {name: plain(value) for name, value in vars(self).items()}

    def report(self) -> Report:
        """Return which figures there are; they themselves are among the figures."""
        names = ", ".join(self.measured) or "nothing"
        title = f"Evidence{MARK if self.simulated else ''}"
        return Report(title, (f"Measured: {names}.",), figures=(Table("", ("figure", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the figures that there are as people read them, one in a row; phases are rows of their own."""
        told = {name: getattr(self, name) for name in FIGURES if name not in {"shares", "simulated"}}
        phases = {name: share for name, share in (self.shares or {}).items() if name not in {DATA, TRANSFER}}
        return (
            *((words_of(name), in_unit(FIGURES[name][1], value)) for name, value in told.items() if value is not None),
            *((f"step spent on {name}", in_unit(SHARE, share)) for name, share in phases.items()),
        )


def words_of(name: str) -> str:
    """Return what a figure is called.

    Example:
        >>> words_of("data_share")
        'step spent on waiting for data'
    """
    return FIGURES[name][0]


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    """Tell whether a value is a whole number from 0, and no larger than any that is counted."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def is_names(value: object) -> bool:
    """Tell whether a value is a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def is_shares(value: object) -> bool:
    """Tell whether a value gives numbers to names."""
    return isinstance(value, Mapping) and is_names(tuple(value)) and all(is_number(one) for one in value.values())


Kind = tuple[Callable[[Any], bool], str]
TEXT: Kind = (lambda value: isinstance(value, str), "a string")
NUMBER: Kind = (is_number, "a finite number")

KINDS: dict[str, Kind] = {
    **dict.fromkeys((SHARE, DIFFERENCE, HOURS, TIMES, RATE), NUMBER),
    WORDS: TEXT,
    COUNT: (is_count, "a whole number from 0"),
    NAMES: (is_names, "a tuple of strings"),
    PHASES: (is_shares, "a mapping of names to finite numbers"),
    YES_NO: (lambda value: isinstance(value, bool), "True or False"),
}
"""What a figure may be, and how that is said, by what it counts."""
