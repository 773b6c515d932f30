"""How long the operators of a slice take, by the phase in which they are called."""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..workloads.workload import DATA
from .empty_operators import EMPTY

PREFIX = "openmed_nb: "
"""Begins the names under which the phases stand in a trace."""

MICRO = 1e-6
"""torch's profiler counts microseconds."""

OPERATOR, RANGE = re.compile(r"\w+(::[\w.]+)+"), "a range of yours"
"""How names of operators look, and what stands for any other name."""

MOST_OPERATORS = 30
"""How many operators a profile keeps."""


@dataclass(frozen=True)
class OperatorTime:
    """An operator in one phase.

    Attributes:
        operator: Its name, such as ``"aten::addmm"``.
        phase: The phase in which it is called.
        count: How often in a step.
        seconds: How long the host is busy with it in a step, in seconds, without the operators that it calls: each of its
            calls counts as long as in the median of the steps.
        device_seconds: How long its kernels run on the GPU in a step, in seconds; ``None`` where torch's profiler does not see
            the device, as with MPS.
        starting_seconds: How much of ``seconds`` goes into starting it: of each call as much as an operator takes that has
            nothing to compute. ``None`` where no such operator was run.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None
    starting_seconds: float | None = None

    @property
    def weight(self) -> float:
        """By what the largest is known: the seconds of the device where they are known, else those of the host."""
        return self.seconds if self.device_seconds is None else self.device_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return it as a mapping, ready for JSON."""
        return dict(vars(self))


def operator_times(events: Iterable[Any], steps: int, sees_device: bool) -> tuple[OperatorTime, ...]:
    """Return the operators of some steps, those that take longest first.

    Args:
        events: What ``torch.profiler.profile.events`` returns.
        steps: How many steps were run.
        sees_device: Whether torch's profiler sees the kernels of the device.
    """
    listed = list(events)
    phases = PhaseTimes(listed)
    seen: dict[tuple[str, str], Calls] = {}
    for event in filter(is_operator, listed):
        step, phase = phases.of(event.time_range.start)
        seen.setdefault((shown_name(event.name), phase), Calls()).add(step, event)
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
    return tuple(sorted(times, key=lambda one: (-one.weight, one.operator, one.phase)))


class Calls:
    """The calls of an operator in a phase of all steps, in seconds.

    The first call of each step stands beside the first of the others, and so on. The median over the steps is what such a call
    takes: on a busy computer the system stops the process now and then, and a call in which it does takes a thousand times as
    long, so that a mean would tell of other programs.
    """

    def __init__(self) -> None:
        self.device = 0.0
        self._places: dict[int, list[float]] = {}
        self._in_step: Counter[int] = Counter()

    def add(self, step: int, event: Any) -> None:
        """Take an event of torch's profiler that is a call in a step."""
        self._places.setdefault(self._in_step[step], []).append(event.self_cpu_time_total * MICRO)
        self._in_step[step] += 1
        self.device += event.self_device_time_total * MICRO

    @property
    def count(self) -> int:
        """How many there are."""
        return self._in_step.total()

    @property
    def median(self) -> float:
        """How long the host is busy with any of them."""
        return statistics.median(itertools.chain.from_iterable(self._places.values()))

    def host(self, most: float = float("inf")) -> float:
        """Return how long the host is busy with all of them.

        Args:
            most: The most that a call counts.
        """
        return sum(min(most, statistics.median(seconds)) * len(seconds) for seconds in self._places.values())


class PhaseTimes:
    """When each phase of each step ran, by the marks that stand in the trace.

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


def is_operator(event: Any) -> bool:
    """Tell whether an event is an operator, not a mark, a call of the driver, a kernel or a node of autograd."""
    named = "::" in event.name and not event.name.startswith(("autograd::", PREFIX))
    return named and is_of_host(event)


def shown_name(name: str) -> str:
    """Return the name of an operator; of a range that a person named, which may say anything, only that it is one.

    Example:
        >>> shown_name("aten::addmm"), shown_name("note::the patient has asthma")
        ('aten::addmm', 'a range of yours')
    """
    return name if OPERATOR.fullmatch(name) else RANGE


def is_of_host(event: Any) -> bool:
    """Tell whether an event is one of the host; marks come a second time as those of the GPU."""
    return str(event.device_type).endswith("CPU")


def host_seconds(times: Sequence[OperatorTime]) -> float:
    """Return how long the host is busy with operators in a step, those that make its data left out, in seconds.

    Example:
        >>> host_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.25), OperatorTime("aten::stack", "data", 1.0, 0.1)])
        0.25
    """
    return sum(one.seconds for one in times if one.phase != DATA)


def starting_seconds(times: Sequence[OperatorTime]) -> float | None:
    """Return how much of that goes into starting them; ``None`` where nobody knows.

    Example:
        >>> starting_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.25, starting_seconds=0.125)])
        0.125
        >>> starting_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.25)])
    """
    known = [one.starting_seconds for one in times if one.phase != DATA and one.starting_seconds is not None]
    return sum(known) if known else None


def device_seconds(times: Sequence[OperatorTime]) -> float | None:
    """Return how long kernels run on the GPU in a step, in seconds; ``None`` where nobody sees that.

    Example:
        >>> device_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.1, 0.25), OperatorTime("aten::t", "forward", 1, 0.1, 0.0)])
        0.25
        >>> device_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.1)])
    """
    seen = [one.device_seconds for one in times if one.device_seconds is not None]
    return sum(seen) if seen else None
