"""A profile as a value: where the time of some steps went, and what held them up."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK, finish
from ..devices.profilers import (
    check_metal_capture,
    check_no_profiler,
    check_signposts,
    metal_capture,
    profiling,
    signposts,
)
from ..devices.request import kind_of
from ..devices.simulated import active
from ..display import MARK, NOT_APPLICABLE, NOTE, OK, WARNING, Finding, Report, Shown, Table, counted, findings_table
from ..errors import ConfigurationError, given_path, whole
from ..plain import write_whole
from .comparison import shown_phase
from .measure.timing import now
from .measure.workloads import (
    DATA,
    DATA_SHARE,
    OWN_STEP,
    Bench,
    Phase,
    Split,
    Subject,
    Workload,
    begun,
    data_remedy,
    drop_ready,
    put_on_devices,
    same_random_numbers,
    seconds_of_step,
    series,
    settle,
    split_of_steps,
    starting,
)
from .operators.fallbacks import Fallback, fallbacks
from .profile_watch import Synchronisation

if TYPE_CHECKING:
    from .profile_recorder import StepRecord


DATA_FINDING, SYNCHRONISATION, TINY_BATCH, FALLBACK = "data", "synchronisation", "tiny batch", "fallback"
"""What is looked for, by the names of the findings."""

KERNEL_SHARE = 0.5
"""A batch is tiny where kernels run on the GPU for less than half of a step: it mostly waits for the next to be started.

Measured on an H200: a BERT of base size with rows of 128 tokens crosses it at 1 or 2 rows in forward passes and at about 8
in training steps; below it, twice the rows took no more time.
"""

STARTING_SHARE = 0.5
"""Where torch's profiler sees no kernels, a batch is tiny if more than this share of a step goes into starting operators.

What starting one takes is measured in turn with the steps, with operators that have nothing to compute, because it differs:
25 to 110 microseconds on MPS (pytorch#82707), 3 to 7 on one CPU within minutes. Measured in forward passes and training steps
of linear layers, convolutions, elementwise functions and transformers, with 1 to 4096 rows: on the CPU (67 cases), twice the
rows take 1.1 times as long in the median where the share is above a half, and 1.8 times where it is not. On an H200, counted
as on MPS, the share is above a half in all 77 cases in which kernels run for less than half of a step, and in 8 of 12 others.
"""

SHOWN = 3
"""How many places a finding names."""


def findings_of(profile: Profile) -> tuple[Finding, ...]:
    """Return what was looked for and how it is."""
    return (data(profile), synchronisation(profile), tiny_batch(profile), fallback(profile))


def data(profile: Profile) -> Finding:
    """Return whether steps wait for their data."""
    if profile.shares.get(DATA, 0.0) > DATA_SHARE:
        return Finding(DATA_FINDING, WARNING, "steps wait for their data", data_remedy(profile.workers))
    return Finding(DATA_FINDING, OK, "data come in time")


def synchronisation(profile: Profile) -> Finding:
    """Return whether steps wait for the device before their end, and where."""
    own = [one for one in profile.synchronisations if one.place.is_own]
    if not own:
        return Finding(SYNCHRONISATION, OK, "no line of the step waits for the device")
    more = f", and {counted(len(own) - SHOWN, 'other')}" if len(own) > SHOWN else ""
    places = f"{', '.join(str(one) for one in own[:SHOWN])}{more}"
    if kind_of(profile.device) == "cpu":
        return Finding(
            SYNCHRONISATION, NOT_APPLICABLE, f"nothing waits on the CPU; a GPU would be waited for: {places}"
        )
    remedy = "Gather the numbers on the device and read them once in a while, not at each step."
    return Finding(SYNCHRONISATION, WARNING, f"the device is waited for: {places}", remedy)


def tiny_batch(profile: Profile) -> Finding:
    """Return whether a step does little but start operators."""
    tiny = is_tiny(profile)
    if tiny is None:
        simulated = profile.simulated and kind_of(profile.device) == "mps"
        why = "a simulated device starts no operators" if simulated else "not known"
        return Finding(TINY_BATCH, NOT_APPLICABLE, why)
    if tiny:
        remedy = "Use a larger batch: nb.sweep() finds the best."
        return Finding(TINY_BATCH, WARNING, "most of a step goes into starting operators", remedy)
    return Finding(TINY_BATCH, OK, "operators have enough to do")


def is_tiny(profile: Profile) -> bool | None:
    """Tell whether the batch is too small for its device, ``None`` where that is not known."""
    if profile.simulated and kind_of(profile.device) == "mps":
        return None
    if profile.kernel_share is not None:
        return profile.kernel_share < KERNEL_SHARE
    share = profile.starting_share
    if share is None or (share <= STARTING_SHARE and profile.hides_python):
        return None
    return share > STARTING_SHARE


def fallback(profile: Profile) -> Finding:
    """Return whether operators leave MPS for the CPU."""
    if kind_of(profile.device) != "mps":
        return Finding(FALLBACK, NOT_APPLICABLE, "only MPS has operators that fall back to the CPU")
    names = sorted({one.operator for one in profile.fallbacks})
    if names:
        remedy = "See where with nb.fallbacks(), and write it with other operators, or do this part on the CPU."
        return Finding(FALLBACK, WARNING, f"{', '.join(names)} fell back to the CPU", remedy)
    return Finding(FALLBACK, OK, "nothing fell back to the CPU")


EMPTY = "empty operators"
"""The phase in which they run."""

CALLS = 20
"""How many of them follow a step, so that waiting for the device once, at their end, is a small part of their time."""


def empty_operators(device: str) -> Workload:
    """Return steps of some linear layers of one number: what models mostly consist of, and among what costs most to start."""
    import torch

    row, weight, bias = (torch.ones(size, dtype=torch.float32).to(device) for size in ((1, 1), (1, 1), (1,)))

    def start(_batch: Any) -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row, weight, bias)

    return Workload(EMPTY, OWN_STEP, device, 1, None, lambda: itertools.repeat(None), (Phase(EMPTY, start),))


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


SCHEMA = "openmed_nb/profile/1"

SHOWN_OPERATORS = 12
"""How many operators the report shows."""


@dataclass(frozen=True, repr=False)
class Profile(Shown):
    """A narrow look at some steps.

    Attributes:
        name: What the person calls the model, or the function.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        device: The device.
        rows: How many texts, or rows, a step has.
        steps: How many steps torch's profiler saw.
        warm_up: How many came before any that counts.
        seconds: How long a step takes at full speed, data included: the median, in seconds.
        split: Where the time of a step goes, each phase waited for.
        data_only: How long it takes to get a batch and do nothing with it, in seconds: the mean.
        compute_only: How long a step takes with the same batch again and again, in seconds: the median.
        operators: The operators that take longest, by phase.
        operators_per_step: How many operators a step starts that compute something; views do not count.
        device_seconds: How long kernels run on the GPU in a step, in seconds; ``None`` where torch's profiler cannot see that.
        operator_seconds: How long operators compute in a step, in seconds, where that is on the CPU; else ``None``.
        starting_seconds: How long it takes to start the operators of a step, in seconds, by what operators with nothing to
            compute took in turn with the steps; ``None`` where torch's profiler sees the kernels, which tell more.
        synchronisations: The calls that wait for the device within a step, but for those of this package.
        fallbacks: The operators that fell back from MPS to the CPU, in ``watched`` steps.
        watched: How many steps were watched for both.
        workers: How many processes read ahead.
        dtype: The type of the model's numbers, where that is known.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` where that is not known, and where texts are read.
        simulated: Whether the device is simulated; no figure is then one of the device.
        batch_tokens: How many tokens a batch might have on the device; ``None`` where no texts were annotated.
    """

    name: str
    task: str
    device: str
    rows: int
    steps: int
    warm_up: int
    seconds: float
    split: Split
    data_only: float
    compute_only: float
    operators: tuple[OperatorTime, ...]
    operators_per_step: float
    device_seconds: float | None = None
    synchronisations: tuple[Synchronisation, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    watched: int = 1
    workers: int = 0
    dtype: str | None = None
    simulated: bool = False
    batch_tokens: int | None = None
    row_shape: str | None = None
    operator_seconds: float | None = None
    starting_seconds: float | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return self.split.shares

    @property
    def microseconds_per_operator(self) -> float | None:
        """How long a step takes for each operator that it starts, data left out; ``None`` where none was seen.

        On the CPU it is the time of the operators alone, without that of the person's own Python.
        """
        seconds = self.compute_only if self.operator_seconds is None else self.operator_seconds
        return 1e6 * seconds / self.operators_per_step if self.operators_per_step else None

    @property
    def starting_share(self) -> float | None:
        """Which part of a step goes into starting operators, data left out, from 0 to 1; ``None`` where nobody knows.

        On the CPU it is the part of the time of the operators alone, without that of the person's own Python.
        """
        seconds = self.compute_only if self.operator_seconds is None else self.operator_seconds
        known = self.starting_seconds is not None and self.operators_per_step and seconds > 0
        return min(1.0, (self.starting_seconds or 0.0) / seconds) if known else None

    @property
    def hides_python(self) -> bool:
        """Whether a step may spend its time in the person's own Python, which nobody tells apart on this device."""
        return self.task == OWN_STEP and self.operator_seconds is None

    @property
    def kernel_share(self) -> float | None:
        """Which part of a step kernels run on the GPU, data left out, from 0 to 1; ``None`` where nobody sees that."""
        known = self.device_seconds is not None and self.compute_only > 0
        return min(1.0, (self.device_seconds or 0.0) / self.compute_only) if known else None

    @property
    def fallbacks_per_step(self) -> float:
        """How often operators fall back to the CPU in a step."""
        return sum(one.count for one in self.fallbacks) / self.watched

    @property
    def fallback_share(self) -> float:
        """Which part of the operators falls back to the CPU, by number, from 0 to 1."""
        return min(1.0, self.fallbacks_per_step / self.operators_per_step) if self.operators_per_step else 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was looked for and how it is: ``"data"``, ``"synchronisation"``, ``"tiny batch"`` and ``"fallback"``."""
        return findings_of(self)

    @property
    def bottlenecks(self) -> tuple[str, ...]:
        """The names of the findings that warn."""
        return tuple(one.name for one in self.findings if one.status == WARNING)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON; no path, no shape and no text."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "split": self.split.to_dict(),
            "operators": [one.to_dict() for one in self.operators],
            "microseconds_per_operator": self.microseconds_per_operator,
            "starting_share": self.starting_share,
            "kernel_share": self.kernel_share,
            "synchronisations": [one.to_dict() for one in self.synchronisations],
            "fallbacks": [one.to_dict() for one in self.fallbacks],
            "fallback_share": self.fallback_share,
            "findings": [one.to_dict() for one in self.findings],
            "bottlenecks": list(self.bottlenecks),
        }

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, in the schema that its first key names.

        Args:
            file: Where; a file that is there is written over, in one step.

        Raises:
            ConfigurationError: Where it cannot be written.
        """
        target = given_path(file, "the file of a profile")
        try:
            write_whole(target, json.dumps(self.to_dict(), indent=2) + "\n")
        except OSError as error:
            what = f"{target.name!r} cannot be written: {error.strerror or type(error).__name__}."
            raise ConfigurationError(what, "Use a folder that is there and can be written.") from error

    def report(self) -> Report:
        """Return what there is to show: what holds the steps up; the figures stand in the HTML."""
        shown = f"{self.device}{MARK}" if self.simulated and kind_of(self.device) == "mps" else self.device
        title = f"Profile of {self.name} ({self.task}) on {shown}"
        how = f"{counted(self.steps, 'step')} of {counted(self.rows, 'row')}, after {self.warm_up} for warming up."
        sentences = ((NOTE,) if self.simulated else ()) + (how,)
        waits = tuple((one.call, str(one.place), f"{one.count:g}") for one in self.synchronisations)
        tables = (
            findings_table("", self.findings),
            Table("What waits for the device", ("call", "where", "times a step"), waits),
        )
        return Report(title, sentences, tables, figures=(self._time_table(), self._operator_table()))

    def _time_table(self) -> Table:
        rows = [
            ("a step at full speed", f"{1000 * self.seconds:.2f} ms"),
            ("data only", f"{1000 * self.data_only:.2f} ms"),
            ("the same batch again", f"{1000 * self.compute_only:.2f} ms"),
            *((f"phase {name}", shown_phase(self.split, name)) for name in self.split.seconds),
            ("operators a step", f"{self.operators_per_step:g}"),
        ]
        if self.microseconds_per_operator is not None:
            rows.append(("time for each operator", f"{self.microseconds_per_operator:.1f} µs"))
        parts = (
            ("starting operators", self.starting_seconds, self.starting_share),
            ("kernels on the GPU", self.device_seconds, self.kernel_share),
        )
        rows += [
            (name, f"{1000 * seconds:.2f} ms ({100 * share:.0f} %)")
            for name, seconds, share in parts
            if seconds is not None and share is not None
        ]
        return Table("Times of a step", ("what", "figure"), tuple(rows))

    def _operator_table(self) -> Table:
        rows = tuple(
            (
                one.operator,
                one.phase,
                f"{one.count:g}",
                f"{1000 * one.seconds:.3f}",
                "" if one.device_seconds is None else f"{1000 * one.device_seconds:.3f}",
            )
            for one in self.operators[:SHOWN_OPERATORS]
        )
        columns = ("operator", "phase", "times a step", "ms on the host", "ms on the GPU")
        return Table("Operators that take longest in a step, without those that they call", columns, rows)


def slice_of(
    workload: Workload, batches: Iterator[Any], steps: int, trace: Path | None, beside: Workload | None = None
) -> tuple[OperatorTime, ...]:
    """Run some steps under torch's profiler and return its operators, those that take longest first.

    Args:
        workload: The steps.
        batches: Their batches.
        steps: How many.
        trace: Where the trace is written, in the format of Chrome; ``None`` for nowhere.
        beside: Operators with nothing to compute, which follow each step; ``None`` for none.
    """
    with profiling(workload.device):  # The first profile of a process takes long to start.
        marked_step(workload, batches)
    with profiling(workload.device) as profiler:
        for _ in range(steps):
            marked_step(workload, batches)
            if beside is not None:
                marked_phases(beside, None)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return operator_times(profiler.events(), steps, kind_of(workload.device) == "cuda")


def marked_step(workload: Workload, batches: Iterator[Any]) -> None:
    """Do a step at full speed, with marks where its phases begin and end."""
    from torch.profiler import record_function

    with record_function(f"{PREFIX}{DATA}"):
        batch = next(batches)
    marked_phases(workload, batch)


def marked_phases(workload: Workload, value: Any) -> None:
    """Do the phases of a step that take its batch, marked in the same way."""
    from torch.profiler import record_function

    with TENSOR_LOCK:
        for phase in workload.phases:
            with record_function(f"{PREFIX}{phase.name}"):
                value = phase.run(value)
        finish(workload.torch_device)


def checked_trace(trace: Any) -> Path | None:
    """Return where a trace is to be written.

    Raises:
        ConfigurationError: For what is no file of JSON in a folder that is there.

    Example:
        >>> checked_trace("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'trace.txt' is no file for a trace. Use a name that ends in .json or .json.gz.
    """
    if trace is None:
        return None
    name = os.fspath(trace) if isinstance(trace, (str, os.PathLike)) else ""
    if not str(name).endswith((".json", ".json.gz")):
        shown = repr(Path(name).name) if name else type(trace).__name__
        raise ConfigurationError(f"{shown} is no file for a trace.", "Use a name that ends in .json or .json.gz.")
    file = Path(name)
    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)) or not takes_files(file.parent):
        raise ConfigurationError(f"{file.name!r} cannot be written there.", "Make the folder, or use another one.")
    return file


def takes_files(folder: Path) -> bool:
    """Tell whether a file can be written into a folder: torch's profiler writes none without a word where it cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


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
                object.__setattr__(self, name, whole(name, value, least))
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
    from .profile_recorder import StepRecord, watching

    record = StepRecord(kind_of(workload.device))
    ledger = fallbacks() if record.kind == "mps" else contextlib.nullcontext()
    with ledger as seen:
        for _ in range(WATCHED):
            batch = next(batches)
            with watching(record):
                workload.run(batch)
    return record, () if seen is None else seen.entries
