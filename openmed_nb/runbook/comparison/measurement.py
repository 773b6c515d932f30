"""The same work on each device: in turn at full speed, then in phases, then without a pause while the device is watched."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...devices.request import canonical
from ...devices.simulation import active, shown_device, shows_simulated
from ...errors import ConfigurationError, shorten
from ...training.epochs import named
from ..signals.utilisation import SECONDS, Read, Utilisation, measured
from ..workloads.choosing import Asked
from ..workloads.counts import checked_count
from ..workloads.split import Split
from ..workloads.timing import (
    begun,
    put_on_devices,
    same_random_numbers,
    seconds_of_step,
    settle,
    split_of_steps,
    whole_rounds,
)
from ..workloads.workload import Bench, Subject, Workload
from .comparison import CPU, Comparison, DeviceFigures
from .intervals import fewest_values, median_interval

PAIRS = 20
"""How often each device has its turn where nobody says; 20 pairs give an interval that is 95.9 % sure."""

WARM_UP = 3
"""How many steps come before any that counts: the first compile, fill caches, and start what reads ahead."""

PHASE_STEPS = 10
"""How many steps are waited for phase by phase, fewer where they are slow."""

SHORTEST_TURN, LONGEST_TURN = 0.02, 0.5
"""A turn repeats a quick step until it takes so many seconds, as long as none takes more."""

LONGEST_WATCH = 3600
"""A device is watched for at most so many seconds."""

ROUNDS_OF_WORKERS = 4
"""A turn has at least so many batches of each worker of a loader: they come at about the same time, in bursts."""


@dataclass(frozen=True)
class Plan:
    """How a comparison is measured.

    Attributes:
        batch_size: How many rows a step has; ``None`` for what is usual.
        pairs: How often each device has its turn.
        seconds: How long each device is watched; 0 to leave that out.
    """

    batch_size: int | None = None
    pairs: int = PAIRS
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("pairs", fewest_values())):
            if (value := getattr(self, name)) is not None or name != "batch_size":
                object.__setattr__(self, name, checked_count(name, value, least))
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not (number and 0 <= self.seconds <= LONGEST_WATCH):
            what = f"seconds cannot be {shorten(repr(self.seconds))}."
            raise ConfigurationError(what, f"Pass a number from 0 to {LONGEST_WATCH}; 0 leaves the utilisation out.")


def devices_to_compare(*names: str) -> tuple[str, ...]:
    """Return the devices of a comparison: the CPU, which the others are measured by, and each other once.

    Example:
        >>> devices_to_compare("cuda", "cpu", "cuda:0")
        ('cpu', 'cuda')
    """
    first: dict[str, str] = {}
    for name in (CPU, *names):
        first.setdefault(canonical(name), name)
    return tuple(first.values())


def check_comparable(asked: Asked) -> None:
    """Refuse what cannot be put on devices, before anything is loaded.

    Raises:
        ConfigurationError: For a function, which computes where it computes, and for an argument that names one device.
    """
    asked.check()
    if asked.is_step:
        what = f"{named(asked.model)} is a function, and only its own code says on which device it computes."
        remedy = "Pass a model's name, a pipeline or a torch module; nb.profile() and nb.sweep() take functions."
        raise ConfigurationError(what, remedy)
    if "device" in asked.arguments:
        raise ConfigurationError("compare() has no option device.", "Name the devices: devices=['mps'].")


def comparison_of(
    subject: Subject,
    devices: Sequence[str],
    plan: Plan,
    reader: Callable[[str], Read | None],
    tell: Callable[[str], None] = lambda _device: None,
) -> Comparison:
    """Measure the same work on each device.

    What was loaded for it is let go afterwards, and random numbers go on as if nothing had been.

    Args:
        subject: What is measured.
        devices: The CPU, and the others.
        plan: How it is measured.
        reader: Returns what reads how busy a device is, ``None`` where that cannot be read.
        tell: Is told which device is made ready.

    Raises:
        DeviceUnavailable: Where a batch does not fit in the memory of a device.
    """
    with contextlib.ExitStack() as stack:
        benches = stack.enter_context(put_on_devices(subject, devices, tell))
        for device in devices:
            stack.enter_context(same_random_numbers(device))
        return measured_on(benches, subject.name, plan, reader)


def measured_on(
    benches: Mapping[str, Bench], name: str, plan: Plan, reader: Callable[[str], Read | None]
) -> Comparison:
    """Return what is measured on devices that are ready."""
    work = {device: bench.stream(plan.batch_size) for device, bench in benches.items()}
    turns = seconds_in_turn(work, plan.pairs)
    splits = {device: split_on(one) for device, one in work.items()}
    loads = {
        device: load_on(one, reader(device) if plan.seconds else None, plan.seconds) for device, one in work.items()
    }
    figures = tuple(figures_of(one, device, turns, splits, loads) for device, one in work.items())
    first, tokens = work[CPU], [one.batch_tokens for device, one in work.items() if device != CPU]
    return Comparison(
        name,
        first.task,
        figures,
        plan.pairs,
        first.workers,
        first.dtype,
        active(),
        batch_tokens=next(iter(tokens), first.batch_tokens),
        row_shape=first.row_shape,
    )


def figures_of(
    workload: Workload,
    device: str,
    turns: Mapping[str, Sequence[float]],
    splits: Mapping[str, Split],
    loads: Mapping[str, Utilisation],
) -> DeviceFigures:
    """Return what was measured on a device; the speed-up is the median of the ratios of all pairs."""
    seconds = turns[device]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    ratios = [cpu / own for cpu, own in zip(turns[CPU], seconds, strict=True)]
    speed_up = None if device == CPU else median_interval(ratios)
    return DeviceFigures(
        device,
        middle,
        (low, high),
        workload.usual_rows,
        splits[device],
        speed_up,
        loads[device],
        mean_rows=workload.mean_rows,
        simulated=shows_simulated(shown_device(device)),
    )


def seconds_in_turn(work: Mapping[str, Workload], pairs: int) -> dict[str, list[float]]:
    """Return the seconds of a step on each device at full speed, in rounds that begin with each device in turn.

    The n-th turn of each device has the same batches where the loader gives them in the same order.
    """
    seconds: dict[str, list[float]] = {device: [] for device in work}
    with contextlib.ExitStack() as stack:
        batches = {device: stack.enter_context(begun(one)) for device, one in work.items()}
        warm = {device: warmed_up(one, batches[device]) for device, one in work.items()}
        steps = steps_of_turn(warm.values(), max(one.workers for one in work.values()))
        for number in range(pairs):
            for device in rotated(list(work), number):
                settle(work[device], batches[device])
                seconds[device].append(seconds_of_step(work[device], batches[device], steps))
    return seconds


def warmed_up(workload: Workload, batches: Iterator[Any]) -> float:
    """Run the first steps, and return how long the last of them took, in seconds."""
    return [seconds_of_step(workload, batches) for _ in range(WARM_UP)][-1]


def steps_of_turn(seconds: Collection[float], workers: int) -> int:
    """Return how many steps a turn has.

    Args:
        seconds: How long a step takes on each device.
        workers: How many processes read ahead.

    Example:
        >>> steps_of_turn([0.004, 0.001], 0), steps_of_turn([1.0, 0.001], 0), steps_of_turn([1.0, 0.5], 2)
        (20, 1, 8)
    """
    quickest, slowest = max(1e-6, min(seconds)), max(1e-6, *seconds)
    most = max(1, int(LONGEST_TURN / slowest))
    return whole_rounds(max(min(math.ceil(SHORTEST_TURN / quickest), most), ROUNDS_OF_WORKERS * workers), workers)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return names with another one first each time.

    Example:
        >>> rotated(["cpu", "mps"], 0), rotated(["cpu", "mps"], 1)
        (['cpu', 'mps'], ['mps', 'cpu'])
    """
    first = number % len(names)
    return [*names[first:], *names[:first]]


def split_on(workload: Workload) -> Split:
    """Return where the time of a step goes; steps follow each other here, as loaders that read ahead need it."""
    with begun(workload) as batches:
        warmed_up(workload, batches)
        settle(workload, batches)
        fewest = ROUNDS_OF_WORKERS * workload.workers
        return split_of_steps(workload, batches, whole_rounds(max(PHASE_STEPS, fewest), workload.workers), fewest)


def load_on(workload: Workload, read: Read | None, seconds: float) -> Utilisation:
    """Return how busy a device is while it works without a pause, and how busy it was just before."""
    with begun(workload) as batches:
        return measured(read, seconds, lambda: workload.run(next(batches)))
