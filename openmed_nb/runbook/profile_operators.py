"""What a profile finds: operators, from the events of torch's profiler, with the time that each takes in each phase; calls that wait."""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..display import Plain
from .measure.workloads import DATA

PREFIX = "openmed_nb: "  # Begins the names under which the phases stand in a trace.
MICRO = 1e-6  # torch's profiler counts microseconds.

# How names of operators look, and what is shown instead of any other name.
OPERATOR, RANGE = re.compile(r"\w+(::[\w.]+)+"), "a range of yours"

# The phase of operators with nothing to compute, and how many of them follow a step, so that waiting for the device once, at
# their end, is a small part of their time.
EMPTY, CALLS = "empty operators", 20


@dataclass(frozen=True)
class OperatorTime(Plain):
    """An operator in one phase.

    Attributes:
        operator: Its name, such as ``"aten::addmm"``.
        phase: The phase in which it is called.
        count: How often in a step.
        seconds: How long the host is busy with it in a step, in seconds, without the operators that it calls: each of its
            calls counts as long as in the median of the steps.
        device_seconds: How long its kernels run on the GPU in a step, in seconds; ``None`` if torch's profiler does not see
            the device, as with MPS.
        starting_seconds: How much of ``seconds`` goes into starting it: of each call as much as an operator takes that has
            nothing to compute. ``None`` if no such operator was run.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None
    starting_seconds: float | None = None


@dataclass(frozen=True, order=True)
class CodePlace(Plain):
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

    ALSO = ("is_own",)

    @property
    def is_own(self) -> bool:
        """Whether the person's own line asked for it."""
        return bool(self.file) and not self.in_model

    def __str__(self) -> str:
        own = f"{self.file}:{self.line}" + (f" in {self.function}" if self.function.isidentifier() else "")
        return own if self.is_own else f"inside of {self.library}"


@dataclass(frozen=True)
class Synchronisation(Plain):
    """A call that waits for the device.

    Attributes:
        call: What is called, such as ``".item()"``.
        place: Where.
        count: How often in a step.
    """

    call: str
    place: CodePlace
    count: float

    def __str__(self) -> str:
        return f"{self.call} at {self.place}" if self.place.is_own else f"{self.call} {self.place}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as a mapping, ready for JSON, with the fields of its place."""
        return {"call": self.call, "count": self.count, **self.place.to_dict()}


class Calls:
    """The calls of an operator in a phase of all steps, in seconds.

    The first call of each step is compared with the first of the others, and so on. The median over the steps is what such a
    call takes: on a busy computer the system stops the process now and then, and a call in which it does takes a thousand times
    as long, so that a mean would tell of other programs.
    """

    def __init__(self) -> None:
        self.device = 0.0
        self.count = 0
        self._places: dict[int, list[float]] = {}
        self._in_step: Counter[int] = Counter()

    def add(self, step: int, event: Any) -> None:
        """Take an event of torch's profiler that is a call in a step."""
        self._places.setdefault(self._in_step[step], []).append(event.self_cpu_time_total * MICRO)
        self._in_step[step] += 1
        self.count += 1
        self.device += event.self_device_time_total * MICRO

    @property
    def median(self) -> float:
        """How long the host is busy with any of them."""
        return statistics.median(itertools.chain.from_iterable(self._places.values()))

    def host(self, most: float = float("inf")) -> float:
        """Return how long the host is busy with all of them, if none counts more than ``most``."""
        return sum(min(most, statistics.median(seconds)) * len(seconds) for seconds in self._places.values())


class PhaseTimes:
    """When each phase of each step ran, by the marks in the trace.

    A backward pass on a GPU runs in a thread of its own, so that only the clock tells where its operators belong.
    """

    def __init__(self, events: Iterable[Any]) -> None:
        marks = [event for event in events if event.name.startswith(PREFIX) and is_of_host(event)]
        marks.sort(key=lambda event: event.time_range.start)
        self._starts = [event.time_range.start for event in marks]
        self._ends = [event.time_range.end for event in marks]
        self._names = [event.name.removeprefix(PREFIX) for event in marks]
        self._steps = list(itertools.accumulate(name == DATA for name in self._names))

    def of(self, moment: float) -> tuple[int, str]:
        """Return the number of the step and the phase of a moment; the phase is empty outside of all."""
        index = bisect.bisect_right(self._starts, moment) - 1
        if index < 0:
            return 0, ""
        return self._steps[index], self._names[index] if moment <= self._ends[index] else ""


def is_of_host(event: Any) -> bool:
    """Tell whether an event is one of the host; marks come a second time as those of the GPU."""
    return str(event.device_type).endswith("CPU")


def operator_times(events: Iterable[Any], steps: int, sees_device: bool) -> tuple[OperatorTime, ...]:
    """Return the operators of so many steps, those that take longest first, from ``torch.profiler.profile.events``."""
    listed = list(events)
    phases = PhaseTimes(listed)
    seen: dict[tuple[str, str], Calls] = {}
    for event in listed:
        # Not a mark, a call of the driver, a kernel or a node of autograd.
        if "::" in event.name and not event.name.startswith(("autograd::", PREFIX)) and is_of_host(event):
            step, phase = phases.of(event.time_range.start)
            # A person's own range may be named anything.
            name = event.name if OPERATOR.fullmatch(event.name) else RANGE
            seen.setdefault((name, phase), Calls()).add(step, event)
    empty = max((calls.median for (_name, phase), calls in seen.items() if phase == EMPTY), default=None)
    times = [
        OperatorTime(
            name,
            phase,
            calls.count / steps,
            calls.host() / steps,
            calls.device / steps if sees_device else None,
            None if empty is None else calls.host(most=empty) / steps,
        )
        for (name, phase), calls in seen.items()
        if phase != EMPTY
    ]

    def longest_first(one: OperatorTime) -> tuple[float, str, str]:
        return -(one.seconds if one.device_seconds is None else one.device_seconds), one.operator, one.phase

    return tuple(sorted(times, key=longest_first))


def total(times: Sequence[OperatorTime], name: str, with_data: bool = False) -> float | None:
    """Return the sum of a figure of operators, usually without those that make the data; ``None`` if it is not known of any.

    Example:
        >>> times = [OperatorTime("aten::mm", "forward", 2.0, 0.25), OperatorTime("aten::stack", "data", 1.0, 0.1)]
        >>> total(times, "seconds"), total(times, "starting_seconds")
        (0.25, None)
    """
    values = [getattr(one, name) for one in times if with_data or one.phase != DATA]
    known = [value for value in values if value is not None]
    return sum(known) if known else None
