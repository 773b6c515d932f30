"""A profile is measured: at full speed, in phases, data and compute apart, under torch's profiler, and then looked at."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.mps_profiler import check_metal_capture, check_signposts, metal_capture, signposts
from ...devices.request import kind_of
from ...devices.simulation import active
from ...devices.torch_profiler import check_no_profiler
from ...errors import ConfigurationError
from ..operators.fallbacks import Fallback, fallbacks
from ..workloads.clock import now
from ..workloads.counts import checked_count
from ..workloads.timing import (
    begun,
    drop_ready,
    put_on_devices,
    same_random_numbers,
    seconds_of_step,
    series,
    settle,
    split_of_steps,
)
from ..workloads.workload import Bench, Subject, Workload, starting
from .empty_operators import CALLS, empty_operators
from .operator_times import MOST_OPERATORS, device_seconds, host_seconds, starting_seconds
from .profile import Profile
from .slicing import checked_trace, slice_of

if TYPE_CHECKING:
    from .step_recorder import StepRecord

STEPS = 50
WARM_UP = 5

WATCHED = 3
"""How many steps are watched for what they call; that takes several times as long as the step, and the count is exact."""


@dataclass(frozen=True)
class Plan:
    """How a profile is measured.

    Attributes:
        steps: How many steps torch's profiler sees, and at most as many each series of times has.
        warm_up: How many steps come before any that counts.
        batch_size: How many rows a step has; ``None`` for what is usual.
        trace: Where the trace of torch's profiler is written; ``None`` for nowhere.
        signposts: Whether the profiled steps leave signposts for Instruments.
        metal_capture: Under which name one step's Metal calls are captured; ``None`` for none.
    """

    steps: int = STEPS
    warm_up: int = WARM_UP
    batch_size: int | None = None
    trace: Any = None
    signposts: bool = False
    metal_capture: str | None = None
    file: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warm_up", 0), ("batch_size", 1)):
            if (value := getattr(self, name)) is not None or name != "batch_size":
                object.__setattr__(self, name, checked_count(name, value, least))
        object.__setattr__(self, "file", checked_trace(self.trace))

    def check(self, device: str) -> None:
        """Check that all that is asked for can be had on a device, before anything runs.

        Raises:
            ConfigurationError: Where it cannot, with the reason.
        """
        check_no_profiler()
        if self.signposts:
            check_signposts(device)
        if self.metal_capture is not None:
            check_metal_capture(device)
            if not isinstance(self.metal_capture, str) or not self.metal_capture:
                what = f"{type(self.metal_capture).__name__} is no name for a Metal capture."
                raise ConfigurationError(what, "Pass one such as 'step.gputrace'.")


def profile_of(subject: Subject, device: str, plan: Plan) -> Profile:
    """Measure some steps on a device.

    What was loaded for it is let go afterwards, and random numbers go on as if nothing had been.

    Args:
        subject: What is measured.
        device: Where.
        plan: How.

    Raises:
        ConfigurationError: For what cannot be had on this device.
        DeviceUnavailable: Where a batch does not fit in its memory.
    """
    plan.check(device)
    with put_on_devices(subject, [device]) as benches, same_random_numbers(device):
        return profiled(benches[device], device, plan)


def profiled(bench: Bench, device: str, plan: Plan) -> Profile:
    """Return the profile of steps that are ready."""
    workload, empty, kind = bench.stream(plan.batch_size), empty_operators(device), kind_of(device)
    with begun(workload) as batches:
        batch = next(batches)
        for _ in range(plan.warm_up):
            seconds_of_step(workload, batches)
        settle(workload, batches)
        seconds = series(lambda: seconds_of_step(workload, batches), plan.steps)
        settle(workload, batches)
        split = split_of_steps(workload, batches, plan.steps)
        drop_ready(workload, batches)
        data = series(lambda: seconds_of_next(batches), plan.steps)
        turns = series(lambda: (workload.seconds(batch), empty.seconds(None)), plan.steps)
        with signposts() if plan.signposts else contextlib.nullcontext():
            operators = slice_of(workload, batches, plan.steps, plan.file, empty if kind == "cpu" else None)
        if plan.metal_capture is not None:
            with metal_capture(plan.metal_capture):
                workload.run(batch)
        record, fell = watched(workload, batches)
    compute, started = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    per_step = record.started / WATCHED
    return Profile(
        name=workload.name,
        task=workload.task,
        device=device,
        rows=workload.usual_rows,
        steps=plan.steps,
        warm_up=plan.warm_up,
        seconds=statistics.median(seconds),
        split=split,
        data_only=workload.typical(data),
        compute_only=compute,
        operators=operators[:MOST_OPERATORS],
        operators_per_step=per_step,
        operator_seconds=host_seconds(operators) if kind == "cpu" else None,
        starting_seconds=per_step * started / CALLS if kind == "mps" else starting_seconds(operators),
        device_seconds=device_seconds(operators),
        synchronisations=record.synchronisations(WATCHED),
        fallbacks=fell,
        watched=WATCHED,
        workers=workload.workers,
        dtype=workload.dtype,
        batch_tokens=workload.batch_tokens,
        row_shape=workload.row_shape,
        simulated=active(),
    )


def seconds_of_next(batches: Iterator[Any]) -> float:
    """Return how long it takes to get a batch, in seconds."""
    begin = now()
    next(batches)
    return now() - begin - starting(batches)


def watched(workload: Workload, batches: Iterator[Any]) -> tuple[StepRecord, tuple[Fallback, ...]]:
    """Return what some steps call, and what of it fell back from MPS to the CPU."""
    from .step_recorder import StepRecord, watching

    record = StepRecord(kind_of(workload.device))
    ledger = fallbacks() if record.kind == "mps" else contextlib.nullcontext()
    with ledger as seen:
        for _ in range(WATCHED):
            batch = next(batches)
            with watching(record):
                workload.run(batch)
    return record, () if seen is None else seen.entries
