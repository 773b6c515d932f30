"""How long the operators of a slice take, by the phase in which they are called."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..workloads.workload import DATA

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
        seconds: How long the host is busy with it in a step, in seconds, without the operators that it calls.
        device_seconds: How long its kernels run on the GPU in a step, in seconds; ``None`` where torch's profiler does not see
            the device, as with MPS.
    """

    operator: str
    phase: str
    count: float
    seconds: float
    device_seconds: float | None = None

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
    sums: dict[tuple[str, str], list[float]] = {}
    for event in filter(is_operator, listed):
        entry = sums.setdefault((shown_name(event.name), phases.of(event.time_range.start)), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += event.self_cpu_time_total
        entry[2] += event.self_device_time_total
    times = [
        OperatorTime(name, phase, count / steps, host * MICRO / steps, device * MICRO / steps if sees_device else None)
        for (name, phase), (count, host, device) in sums.items()
    ]
    return tuple(sorted(times, key=lambda one: (-one.weight, one.operator, one.phase)))


class PhaseTimes:
    """When each phase ran, by the marks that stand in the trace.

    A backward pass on a GPU runs in a thread of its own, so that only the clock tells where its operators belong.
    """

    def __init__(self, events: Iterable[Any]) -> None:
        marks = [event for event in events if event.name.startswith(PREFIX) and is_of_host(event)]
        marks.sort(key=lambda event: event.time_range.start)
        self._starts = [event.time_range.start for event in marks]
        self._ends = [event.time_range.end for event in marks]
        self._names = [event.name.removeprefix(PREFIX) for event in marks]

    def of(self, moment: float) -> str:
        """Return the phase of a moment, empty outside of all."""
        index = bisect.bisect_right(self._starts, moment) - 1
        return self._names[index] if index >= 0 and moment <= self._ends[index] else ""


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


def device_seconds(times: Sequence[OperatorTime]) -> float | None:
    """Return how long kernels run on the GPU in a step, in seconds; ``None`` where nobody sees that.

    Example:
        >>> device_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.1, 0.25), OperatorTime("aten::t", "forward", 1, 0.1, 0.0)])
        0.25
        >>> device_seconds([OperatorTime("aten::mm", "forward", 2.0, 0.1)])
    """
    seen = [one.device_seconds for one in times if one.device_seconds is not None]
    return sum(seen) if seen else None
