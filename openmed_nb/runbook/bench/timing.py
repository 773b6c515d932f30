"""Measured times and what they say: series and rounds, medians with intervals, phases of a step, operators and waits."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from ..._render.display import OK, WARNING, Finding, JsonMixin, format_milliseconds
from ..._utils.clock import current_time

Name = TypeVar("Name")
Measured = TypeVar("Measured")

# The names of phases that are looked at; training adds its own.
DATA = "data"
TRANSFER = "transfer"
FORWARD = "forward"
DECODE = "decode"

# A phase that takes more than this share of a step dominates: whatever else is made faster, it stays the larger part.
DOMINANT_FRACTION = 0.5

# A loader that keeps a step waiting for more than this share of it is slow: without the wait, a third more steps are done.
MAX_DATA_FRACTION = 0.25

# What to do about each phase that should not dominate.
REMEDIES: Mapping[str, str] = {
    DATA: "Read ahead with workers, prepare the data once and keep it, or see nb.training.loader.check().",
    TRANSFER: "Copy less often and more at once: a larger batch, and smaller types for labels and masks.",
    DECODE: "Bring less to the host: labels and scores, not all logits.",
}


@dataclass(frozen=True)
class PhaseTimes(JsonMixin):
    """The phases of a step, each waited for.

    Attributes:
        seconds: How long each phase takes, in seconds, in their order.
        meanwhile: Whether data are prepared while the device computes, as :func:`annotate` does on a GPU.

    Example:
        >>> PhaseTimes({"data": 3.0, "forward": 1.0}).fractions
        {'data': 0.75, 'forward': 0.25}
        >>> PhaseTimes({"data": 3.0, "forward": 1.0}, overlapped=True).waiting_seconds
        {'data': 2.0, 'forward': 1.0}
    """

    seconds: Mapping[str, float]
    overlapped: bool = False

    JSON_PROPERTIES = ("fractions", "dominant_phase")

    @property
    def waiting_seconds(self) -> dict[str, float]:
        """How long a step waits for each phase, in seconds: for data prepared meanwhile, as long as they outlast the forward pass."""
        waits = dict(self.seconds)
        if self.overlapped and DATA in waits:
            waits[DATA] = max(0.0, waits[DATA] - waits.get(FORWARD, 0.0))
        return waits

    @property
    def fractions(self) -> dict[str, float]:
        """Which part of a step each phase is that is waited for, from 0 to 1."""
        total = sum(self.waiting_seconds.values())
        return {name: seconds / total if total else 0.0 for name, seconds in self.waiting_seconds.items()}

    @property
    def dominant_phase(self) -> str | None:
        """The phase that takes more than half of a step, ``None`` if none does."""
        return next((name for name, share in self.fractions.items() if share > DOMINANT_FRACTION), None)

    def finding(self, name: str, data_remedy: str) -> Finding:
        """Return what to think of it, under a name, with what to do about data that dominate."""
        main = self.dominant_phase
        if main is None:
            return Finding(name, OK, "no phase takes more than half of a step")
        remedy = {**REMEDIES, DATA: data_remedy}.get(main, "")
        return Finding(name, WARNING if remedy else OK, f"{main} dominates", remedy)

    def shown(self, name: str) -> str:
        """Return the time and the share of a phase as they are shown, empty for one that the step does not have."""
        if name not in self.seconds:
            return ""
        return f"{format_milliseconds(self.waiting_seconds[name])} ({100 * self.fractions[name]:.0f} %)"


@dataclass(frozen=True)
class OperatorTime(JsonMixin):
    """An operator in one phase.

    Attributes:
        operator: Its name, such as ``"aten::addmm"``.
        phase: The phase in which it is called.
        count: How often in a step.
        seconds: How long the host is busy with it in a step, in seconds, without the operators that it calls: each of its
            calls counts as long as in the median of the steps.
        device_seconds: How long its kernels run on the GPU in a step, in seconds; ``None`` if torch's profiler does not see
            the device, as with MPS.
        launch_seconds: How much of ``seconds`` goes into starting it: of each call as much as an operator takes that has
            nothing to compute. ``None`` if no such operator was run.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None
    launch_seconds: float | None = None


@dataclass(frozen=True, order=True)
class CodeLocation(JsonMixin):
    """A line of a person's own code, or the library in which a model that was called from there does something.

    Attributes:
        file: The name of the file without its folder, or of the cell; empty if no code of the person was running.
        line: The number of the line, 0 if there is none.
        function: The name of the function.
        library: The module of a library in whose model it happened; empty if the person's own line asked for it, though
            through a library, such as one that shows progress.
        in_model: Whether it happened in a model of a library, which the person cannot change.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""
    in_model: bool = False

    JSON_PROPERTIES = ("is_user_code",)

    @property
    def is_user_code(self) -> bool:
        """Whether the person's own line asked for it."""
        return bool(self.file) and not self.in_model

    def __str__(self) -> str:
        if not self.is_user_code:
            return f"inside of {self.library}"
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")


# Why a call waits: numbers of the device are needed on the host; the batch is copied to the device, before the step has
# started anything there; or something else is, which waits for all that the step has started until then.
Reason = Literal["read", "batch", "copy"]


@dataclass(frozen=True)
class Synchronization(JsonMixin):
    """A call that waits for the device.

    Attributes:
        call: What is called, such as ``".item()"``.
        place: Where.
        count: How often in a step.
        reason: Why it waits: ``"read"`` for numbers that the host needs, ``"batch"`` for a copy to the device before the
            step has started anything there, ``"copy"`` for a later one.
    """

    call: str
    place: CodeLocation
    count: float
    reason: Reason = "read"

    JSON_FLATTEN: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "place": {name: name for name in ("file", "line", "function", "library", "in_model", "is_user_code")}
    }

    def __str__(self) -> str:
        return f"{self.call} at {self.place}" if self.place.is_user_code else f"{self.call} {self.place}"


# How probable it is that the interval of a median holds the true one, at least, and how many values that takes.
CONFIDENCE_LEVEL = 0.95
MIN_VALUES = 6


@dataclass(frozen=True)
class Interval(JsonMixin):
    """A median and its confidence interval.

    Attributes:
        low: The lower end.
        middle: The median.
        high: The upper end.
        level: How probable it is that such an interval holds the true median, at least.

    Example:
        >>> str(Interval(1.1, 1.25, 1.5, 0.9586))
        '1.25 (1.10 to 1.50, 95.9 % sure)'
    """

    low: float
    median: float
    high: float
    confidence: float

    def contains(self, value: float) -> bool:
        """Tell whether a value is in the interval, its ends included."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}, {100 * self.confidence:.1f} % sure)"


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of at least :data:`MIN_VALUES` values with its narrowest interval of at least 95 percent.

    Of n values in order, the k-th from below and the k-th from above enclose the median of what they were drawn from with a
    probability of 1 - 2 B(k - 1; n, 1/2), where B is the binomial distribution; no distribution of the values is assumed
    (Thompson 1936; Conover, Practical Nonparametric Statistics, 3.2).

    Example:
        >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0, 8.0, 7.0, 10.0, 9.0])
        Interval(low=2.0, median=5.5, high=9.0, confidence=0.978515625)
    """
    ordered = sorted(values)
    count = len(ordered)
    if count < MIN_VALUES:
        message = f"{count} values have no interval of level {CONFIDENCE_LEVEL}: at least {MIN_VALUES} are needed"
        raise ValueError(message)
    below = itertools.accumulate(math.comb(count, rank) for rank in range(count // 2))
    levels = [1 - 2 * ways / 2**count for ways in below]  # By rank, the widest interval first.
    rank = len([level for level in levels if level >= CONFIDENCE_LEVEL])
    return Interval(ordered[rank - 1], statistics.median(ordered), ordered[-rank], levels[rank - 1])


def round_up_to_workers(steps: int, workers: int) -> int:
    """Return a number of steps, or some more, in which each worker of a loader gives as many batches as the others.

    Example:
        >>> round_up_to_workers(10, 4), round_up_to_workers(10, 0), round_up_to_workers(1, 2)
        (12, 10, 2)
    """
    return steps + -steps % max(1, workers)


def interleave(measures: Mapping[Name, Callable[[], Measured]], rounds: Iterable[int]) -> dict[Name, list[Measured]]:
    """Return what is measured in rounds, of which each begins with the next one.

    Example:
        >>> interleave({"cpu": lambda: 2.0, "mps": lambda: 1.0}, range(3))
        {'cpu': [2.0, 2.0, 2.0], 'mps': [1.0, 1.0, 1.0]}
    """
    names = list(measures)
    measured: dict[Name, list[Measured]] = {name: [] for name in names}
    for number in rounds:
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(measures[name]())
    return measured


# A series of slow steps is cut short after LONGEST seconds, once it has FEWEST steps.
LONGEST = 3.0
FEWEST = 5


def repeat_measurement(
    measure: Callable[[], Measured], most: float = math.inf, fewest: int = FEWEST, seconds: float = LONGEST
) -> list[Measured]:
    """Return what ``measure`` returns for each of so many steps at most, or for as many as fit into some seconds."""
    begin = current_time()
    measured: list[Measured] = []
    while len(measured) < most and (len(measured) < fewest or current_time() - begin < seconds):
        measured.append(measure())
    return measured


def format_rate(number: float | None) -> str:
    """Return a rate with three digits or more, empty if there is none.

    Example:
        >>> format_rate(1234.5), format_rate(12.345), format_rate(0.01234), format_rate(None)
        ('1,234', '12.3', '0.0123', '')
    """
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"  # noqa: PLR2004 - three digits
