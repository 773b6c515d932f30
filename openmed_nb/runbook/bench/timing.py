"""Timing helpers and results: repeated and interleaved measurements, their reliability and intervals, phases, operators and waits."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from ..._events.progress import is_disabled
from ..._render.display import OK, WARNING, Finding, JsonMixin, format_milliseconds, format_percent
from ..._utils.clock import current_time
from ...devices.machine import import_psutil
from ...devices.system_status import read_system_status, sample_background_load
from ...session import SESSION

Name = TypeVar("Name")
Measured = TypeVar("Measured")

# Names of the phases with a rule below. Training adds further phases.
DATA = "data"
TRANSFER = "transfer"
FORWARD = "forward"
DECODE = "decode"

# A phase dominates if it takes more than this fraction of a step. Speeding up the other phases cannot halve the step then.
DOMINANT_FRACTION = 0.5

# A data loader is slow if a step waits for it for more than this fraction of its time. Without the wait, throughput is a third
# higher.
MAX_DATA_FRACTION = 0.25

# Remedies for the phases that should not dominate.
REMEDIES: Mapping[str, str] = {
    DATA: (
        "Use more loader workers with persistent_workers=True, or preprocess the data once and cache it. "
        "To compare numbers of workers, use nb.runbook.profile(step, loader)."
    ),
    TRANSFER: "Copy less often: use a larger batch, and smaller dtypes for labels and masks.",
    DECODE: "Copy less to the host: labels and scores instead of all logits.",
}


@dataclass(frozen=True)
class PhaseTimes(JsonMixin):
    """Time per phase of a step, with a synchronization after each phase.

    Attributes:
        seconds: Seconds per phase, in the order of execution.
        overlapped: Whether data are prepared while the device computes, as :func:`annotate` does on a GPU.

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
        """Seconds that a step waits for each phase.

        Overlapped data preparation counts only for the time by which it exceeds the forward pass.
        """
        waits = dict(self.seconds)
        if self.overlapped and DATA in waits:
            waits[DATA] = max(0.0, waits[DATA] - waits.get(FORWARD, 0.0))
        return waits

    @property
    def fractions(self) -> dict[str, float]:
        """Fraction of a step that is spent waiting for each phase, in [0, 1]."""
        total = sum(self.waiting_seconds.values())
        return {name: seconds / total if total else 0.0 for name, seconds in self.waiting_seconds.items()}

    @property
    def dominant_phase(self) -> str | None:
        """Name of the phase that takes more than half of a step, or ``None`` if no phase does."""
        return next((name for name, fraction in self.fractions.items() if fraction > DOMINANT_FRACTION), None)

    def finding(self, name: str, data_remedy: str) -> Finding:
        """Return the finding on the dominant phase.

        Args:
            name: Name of the finding.
            data_remedy: Remedy if the data phase dominates.
        """
        dominant_phase = self.dominant_phase
        if dominant_phase is None:
            return Finding(name, OK, "no phase takes more than half of a step")
        remedy = {**REMEDIES, DATA: data_remedy}.get(dominant_phase, "")
        return Finding(name, WARNING if remedy else OK, f"{dominant_phase} dominates", remedy)

    def format_phase(self, name: str) -> str:
        """Return the time and the percentage of a phase as text, or an empty string if the step has no such phase."""
        if name not in self.seconds:
            return ""
        return f"{format_milliseconds(self.waiting_seconds[name])} ({format_percent(self.fractions[name])})"


@dataclass(frozen=True)
class OperatorTime:
    """Time of an operator in one phase.

    Attributes:
        operator: Name of the operator, such as ``"aten::addmm"``.
        phase: Phase in which the operator is called.
        count: Number of calls per step.
        seconds: Host time per step in seconds, without the operators that it calls.
        device_seconds: GPU time of its kernels per step in seconds, or ``None`` if torch's profiler does not record the
            device, as on MPS.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None


# Why a call waits.
# - "read": The host reads values from the device.
# - "copy": A copy to the device waits for all work that the step has launched so far.
WaitReason = Literal["read", "copy"]


@dataclass(frozen=True)
class Synchronization:
    """Call in a line of user code that waits for the device.

    Attributes:
        call: Text of the call, such as ``".item()"``.
        file: Name of the file without its directory, or of the notebook cell.
        line: Line number.
        function: Name of the function.
        reason: Why the call waits, see :data:`WaitReason`.
        count: Number of calls per step.
    """

    call: str
    file: str
    line: int
    function: str
    reason: WaitReason
    count: float = 0.0

    @property
    def place(self) -> str:
        """File, line and function of the call."""
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")

    def __str__(self) -> str:
        return f"{self.call} at {self.place}"


# Minimum confidence level of the interval of a median, and the number of values that this level needs.
CONFIDENCE_LEVEL = 0.95
MIN_VALUES = 6


@dataclass(frozen=True)
class MedianInterval:
    """A median and its confidence interval.

    Attributes:
        low: Lower end.
        median: Median.
        high: Upper end.
        confidence: Minimum probability that such an interval contains the true median.

    Example:
        >>> str(MedianInterval(1.1, 1.25, 1.5, 0.9586))
        '1.25 (1.10 to 1.50, 95.9% CI)'
        >>> str(MedianInterval(6625.62, 9876.54, 14072.77, 0.969))
        '9,877 (6,626 to 14,073, 96.9% CI)'
    """

    low: float
    median: float
    high: float
    confidence: float

    def __str__(self) -> str:
        low, median, high = map(format_rate, (self.low, self.median, self.high))
        return f"{median} ({low} to {high}, {format_percent(self.confidence, '.1f')} CI)"


def median_interval(values: Sequence[float]) -> MedianInterval:
    """Return the median of at least :data:`MIN_VALUES` values with its narrowest confidence interval of at least 95%.

    The interval is nonparametric. Of n sorted values, the k-th smallest and the k-th largest enclose the population median
    with probability 1 - 2 B(k - 1; n, 1/2). B is the cumulative binomial distribution (Thompson 1936; Conover, Practical
    Nonparametric Statistics, 3.2).

    Example:
        >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0, 8.0, 7.0, 10.0, 9.0])
        MedianInterval(low=2.0, median=5.5, high=9.0, confidence=0.978515625)
    """
    ordered = sorted(values)
    count = len(ordered)
    if count < MIN_VALUES:
        raise ValueError(f"a {CONFIDENCE_LEVEL} confidence interval needs at least {MIN_VALUES} values, got {count}")
    below = itertools.accumulate(math.comb(count, rank) for rank in range(count // 2))
    levels = [1 - 2 * combinations / 2**count for combinations in below]  # By rank, the widest interval first.
    rank = len([level for level in levels if level >= CONFIDENCE_LEVEL])
    return MedianInterval(ordered[rank - 1], statistics.median(ordered), ordered[-rank], levels[rank - 1])


def interleave(
    measures: Mapping[Name, Callable[[], Measured]],
    rounds: Iterable[int],
    is_over: Callable[[int], bool] = lambda _number: False,
) -> dict[Name, list[Measured]]:
    """Run several measurements in interleaved rounds and return the results by name.

    Each round starts with the next measurement in the list. ``is_over`` returns whether the run ends before the round with a
    number.

    Example:
        >>> interleave({"cpu": lambda: 2.0, "mps": lambda: 1.0}, range(3))
        {'cpu': [2.0, 2.0, 2.0], 'mps': [1.0, 1.0, 1.0]}
    """
    names = list(measures)
    measured: dict[Name, list[Measured]] = {name: [] for name in names}
    for number in rounds:
        if is_over(number):
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(measures[name]())
    return measured


# If ``0``, times are reported as reliable even on a busy computer.
CHECK_VARIABLE = "OPENMED_NB_CHECK_LOAD"

# Other processes may use this fraction of the processor cores. One process for each core takes at least half of them.
MAX_BACKGROUND_FRACTION = 0.25

# Maximum ratio of the quartiles of steps of one shape, and of a repeated speed to the first one. Sizes are compared by medians of
# many steps, which tolerate the variation of a quiet computer. Sharing a processor core doubles a time.
MAX_RATIO = 1.5

BUSY = "the computer is busy"


@dataclass(frozen=True)
class Disturbance(JsonMixin):
    """Reason why times are not reliable.

    Attributes:
        reason: Reason as a clause, such as ``"the computer is busy"``.
        remedy: What to do before the times are measured again, as a sentence.
        details: Measured load as a clause, or an empty string.

    Example:
        >>> str(Disturbance("the computer is busy", details="other programs use 1.2 of 2 processor cores"))
        'the computer is busy (other programs use 1.2 of 2 processor cores)'
    """

    reason: str
    remedy: str = "Measure again, without starting or closing a program."
    details: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.details})" if self.details else self.reason


def describe_load(load: float | None = None, own: Collection[int] = ()) -> str | None:
    """Return the load of other programs as a clause if times cannot be measured because of it, or an empty string if they can.

    If the check is off, return ``None``.

    The stated load is sampled while this process waits. During a measurement, it is lower, because both compete for the cores.

    Args:
        load: Load during a measurement, as a fraction of all processor cores, or ``None`` if there was no measurement.
        own: Ids of processes of the measurement that run before it, such as persistent loader workers.
    """
    if is_disabled(CHECK_VARIABLE, SESSION.environ):
        return None
    if load is None or load > MAX_BACKGROUND_FRACTION:
        load = max(load or 0.0, sample_background_load(own) or 0.0)
    cores = import_psutil().cpu_count() or 1
    return f"other programs use {load * cores:.1f} of {cores} processor cores" if load > MAX_BACKGROUND_FRACTION else ""


def find_disturbance(
    load: float | None = None, speed_ratio: float = 1.0, varies: bool = False, own: Collection[int] = ()
) -> Disturbance | None:
    """Return the reason why times are not reliable, or ``None`` if none is known.

    Args:
        load: Load of other programs during the measurement, or ``None`` before it.
        speed_ratio: Ratio of a repeated speed to the first one, of the option that changed most.
        varies: Whether repeated times vary by more than the options that are compared.
        own: As in :func:`describe_load`.
    """
    if is_disabled(CHECK_VARIABLE, SESSION.environ):
        return None
    manager = SESSION.device_manager
    if details := describe_load(load, own):
        remedy = "Close other programs, end the processes that earlier cells have started, and measure again."
        return Disturbance(BUSY, remedy, details)
    if read_system_status(manager.machine, "cpu", manager.run).thermal_state == "limited":
        reason = "the computer is hot and has reduced its speed until it cools down"
        return Disturbance(reason, "Let the computer cool down, and measure again.")
    if not 1 / MAX_RATIO <= speed_ratio <= MAX_RATIO:
        return Disturbance(f"the computer became {'faster' if speed_ratio > 1 else 'slower'} during the measurement")
    return Disturbance("the times of the same step vary too much") if varies else None


def limit_rounds(read_load: Callable[[], float | None], deadline: float) -> Callable[[int], bool]:
    """Return the function ``is_over`` of :func:`interleave` for rounds that end after ``deadline``, a time of the clock."""

    def is_over(number: int) -> bool:
        # An interval needs some rounds. On a computer that has become busy, they would take too long.
        return current_time() > deadline and (number >= MIN_VALUES or bool(describe_load(read_load())))

    return is_over


class Quartiles(NamedTuple):
    """First and third quartile of repeated measurements.

    Attributes:
        low: First quartile.
        high: Third quartile.
    """

    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of at least one value.

    Example:
        >>> quartiles([4.0]), quartiles([1.0, 2.0, 3.0])
        (Quartiles(low=4.0, high=4.0), Quartiles(low=1.5, high=2.5))
    """
    if len(values) == 1:
        return Quartiles(values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, high)


# A series of slow steps ends after MAX_SERIES_SECONDS, once it has MIN_REPEATS steps.
MAX_SERIES_SECONDS = 3.0
MIN_REPEATS = 5


def repeat_measurement(
    measure: Callable[[], Measured],
    max_repeats: float = math.inf,
    min_repeats: int = MIN_REPEATS,
    max_seconds: float = MAX_SERIES_SECONDS,
) -> list[Measured]:
    """Repeat a measurement and return the results.

    Args:
        measure: Function that performs one measurement.
        max_repeats: Maximum number of measurements.
        min_repeats: Number of measurements that are made even after ``max_seconds``, up to ``max_repeats``.
        max_seconds: Duration in seconds after which no further measurement starts.
    """
    start = current_time()
    measured: list[Measured] = []
    while len(measured) < max_repeats and (len(measured) < min_repeats or current_time() - start < max_seconds):
        measured.append(measure())
    return measured


def format_rate(number: float | None) -> str:
    """Format a rate with at least three digits, or return an empty string for ``None``.

    Example:
        >>> format_rate(1234.5), format_rate(12.345), format_rate(0.01234), format_rate(None)
        ('1,234', '12.3', '0.0123', '')
    """
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"  # noqa: PLR2004 - three digits
