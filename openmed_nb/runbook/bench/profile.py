"""``nb.runbook.profile``: where the time of a few steps goes, what holds them up, and how two profiles differ."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..._events.activity import ProgressEvent
from ..._render.display import (
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Finding,
    Report,
    Table,
    findings_table,
    format_milliseconds,
    pluralize,
    worst_status,
)
from ..._render.drawing import Bar, Chart, bar_chart
from ..._utils.plain import find_changes, read_json_file, save_text, to_json, utc_timestamp
from ..._utils.text import describe_file, short_type_name
from ..._utils.validation import check_bool, check_integer, check_optional_integer, check_path
from ...devices import profilers
from ...devices.registry import parse_device_argument
from ...errors import ConfigurationError
from ...session import SESSION
from ..checks.operators.fallbacks import Fallback
from .timing import DATA, MAX_DATA_FRACTION, OperatorTime, PhaseTimes, Synchronization, repeat_measurement
from .workloads import CUSTOM_STEP, StepReport, Workload, build_benchmarks, make_target, next_batch

# What is looked for, by the names of the findings.
DATA_FINDING = "data"
SYNCHRONIZATION = "synchronization"
TINY_BATCH = "tiny batch"
FALLBACK = "fallback"

# A batch is tiny if kernels run on the GPU for less than half of a step: it mostly waits for the next to be started.
# Measured on an H200: a BERT of base size with rows of 128 tokens crosses it at 1 or 2 rows in forward passes and at about 8
# in training steps; below it, twice the rows took no more time.
MIN_KERNEL_FRACTION = 0.5

# If torch's profiler sees no kernels, a batch is tiny if more than this share of a step goes into starting operators.
# What starting one takes is measured in turn with the steps, with operators that have nothing to compute, because it differs:
# 25 to 110 microseconds on MPS (pytorch#82707), 3 to 7 on one CPU within minutes. Measured in forward passes and training steps
# of linear layers, convolutions, elementwise functions and transformers, with 1 to 4096 rows: on the CPU (67 cases), twice the
# rows take 1.1 times as long in the median if the share is above a half, and 1.8 times if it is not. On an H200, counted
# as on MPS, the share is above a half in all 77 cases in which kernels run for less than half of a step, and in 8 of 12 others.
MAX_LAUNCH_FRACTION = 0.5

# What to do about a wait, by its reason.
WAIT_REMEDIES = {
    "read": "Gather the numbers on the device and read them once in a while, not at each step.",
    "copy": "Copy it with the batch, before the step computes, or make it on the device.",
}

SHOWN = 3  # How many places a finding names.
DRAWN_OPERATORS = 5  # How many operators are drawn.
SHOWN_OPERATORS = 12  # How many are in the table.


@dataclass(frozen=True, repr=False)
class Profile(StepReport):
    """A narrow look at a few steps.

    Beside ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated`` it has:

    Attributes:
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
        device_seconds: How long kernels run on the GPU in a step, in seconds; ``None`` if torch's profiler cannot see that.
        synchronizations: The calls that wait for the device within a step, except those of this package.
        fallbacks: The operators that fell back from MPS to the CPU, in ``watched`` steps.
        watched: How many steps were watched for both.
        batch_tokens: How many tokens a batch might have on the device; ``None`` if no texts were annotated.
        operator_seconds: How long operators compute in a step, in seconds, if that is on the CPU; else ``None``.
        launch_seconds: How long it takes to start the operators of a step, in seconds, by what operators with nothing to
            compute took in turn with the steps; ``None`` if torch's profiler sees the kernels, which tell more.
        written: When it was measured, in UTC, such as ``"2026-11-01T12:00:00Z"``; empty if nobody knows.
    """

    device: str
    rows: int
    steps: int
    warm_up: int
    seconds: float
    phase_times: PhaseTimes
    data_only: float
    compute_only: float
    operators: tuple[OperatorTime, ...]
    operators_per_step: float
    device_seconds: float | None = None
    synchronizations: tuple[Synchronization, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    traced_steps: int = 1
    batch_tokens: int | None = None
    operator_seconds: float | None = None
    launch_seconds: float | None = None
    created_at: str = ""

    SCHEMA = "openmed_nb/profile/1"
    JSON_PROPERTIES = (
        "microseconds_per_operator",
        "launch_fraction",
        "kernel_fraction",
        "fallback_fraction",
        "findings",
        "bottlenecks",
    )

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return self.phase_times.fractions

    @property
    def _computing(self) -> float:
        """The seconds of a step, data left out; on the CPU those of the operators alone, without the person's own Python."""
        return self.compute_only if self.operator_seconds is None else self.operator_seconds

    @property
    def microseconds_per_operator(self) -> float | None:
        """How long a step takes for each operator that it starts, data left out; ``None`` if none was seen.

        On the CPU it is the time of the operators alone, without that of the person's own Python.
        """
        return 1e6 * self._computing / self.operators_per_step if self.operators_per_step else None

    @property
    def launch_fraction(self) -> float | None:
        """Which part of a step goes into starting operators, data left out, from 0 to 1; ``None`` if it is not known.

        On the CPU it is the part of the time of the operators alone, without that of the person's own Python.
        """
        if self.launch_seconds is None or not self.operators_per_step or self._computing <= 0:
            return None
        return min(1.0, self.launch_seconds / self._computing)

    @property
    def kernel_fraction(self) -> float | None:
        """Which part of a step kernels run on the GPU, data left out, from 0 to 1; ``None`` if it is not known."""
        if self.device_seconds is None or self.compute_only <= 0:
            return None
        return min(1.0, self.device_seconds / self.compute_only)

    @property
    def fallbacks_per_step(self) -> float:
        """How often operators fall back to the CPU in a step."""
        return sum(one.count for one in self.fallbacks) / self.traced_steps

    @property
    def fallback_fraction(self) -> float:
        """Which part of the operators falls back to the CPU, by number, from 0 to 1."""
        return min(1.0, self.fallbacks_per_step / self.operators_per_step) if self.operators_per_step else 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was looked for and how it is: ``"data"``, ``"synchronization"``, ``"tiny batch"`` and ``"fallback"``."""
        return (self._data(), self._synchronization(), self._tiny_batch(), self._fallback())

    @property
    def bottlenecks(self) -> tuple[str, ...]:
        """The names of the findings that warn."""
        return tuple(one.name for one in self.findings if one.status == WARNING)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, in the schema that its first key names; it has no path, no shape and no text.

        Args:
            file: Where; an older file is written over, in one step.

        Raises:
            ConfigurationError: If it cannot be written.
        """
        save_text(check_path(file, "the file of a profile"), to_json(self))

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Profile:
        """Return the profile of a file that :meth:`save` has written.

        Raises:
            ConfigurationError: For a file that cannot be read, and for one that holds no profile.

        Example:
            >>> try:
            ...     Profile.read("nowhere.json")
            ... except ConfigurationError as error:
            ...     print(error.remedy)
            Pass a file that Profile.save() has written.
        """
        path = check_path(file, "the file of a profile")
        remedy = "Pass a file that Profile.save() has written."
        found: Profile = read_json_file(cls, path, "a profile of nb.runbook.profile()", remedy)
        return found

    def diff(self, other: Any) -> ProfileDiff:
        """Compare with a profile of the same work at another time: what became faster, and whether to go on.

        Args:
            other: The other profile, such as one that :meth:`read` returned; which is the earlier one their dates say.

        Returns:
            Both, with the operators that take longest, ``progress``, and the stopping rule among the ``findings``.

        Raises:
            ConfigurationError: For what is not a profile.

        Example:
            >>> import torch
            >>> from openmed_nb.runbook import profile
            >>> found = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
            >>> found.diff(found).days, found.diff(found).should_stop
            (0, False)
        """
        if not isinstance(other, Profile):
            what = f"A profile cannot be compared with {short_type_name(other)}."
            raise ConfigurationError(what, "Pass what nb.runbook.profile() or Profile.read() returned.")
        return ProfileDiff(*sorted((self, other), key=lambda one: one.created_at))

    def to_report(self) -> Report:
        """Return what holds the steps up; the figures stand in the HTML."""
        title = f"Profile of {self.name} ({self.task}) on {self.shown(self.device)}"
        how = f"{pluralize(self.steps, 'step')} of {pluralize(self.rows, 'row')}, after {self.warm_up} for warming up."
        waits = tuple((wait.call, str(wait.place), f"{wait.count:g}") for wait in self.synchronizations)
        tables = (
            findings_table("", self.findings),
            Table("What waits for the device", ("call", "where", "times a step"), waits),
        )
        begins = itertools.accumulate(self.phase_times.waiting_seconds.values(), initial=0.0)
        phases = tuple(
            Bar(name, seconds, self.phase_times.shown(name), begin, emphasized=name == self.phase_times.dominant_phase)
            for (name, seconds), begin in zip(self.phase_times.waiting_seconds.items(), begins, strict=False)
        )
        on_gpu = self.device_seconds is not None  # Else the times are those of the host.
        times = [
            (f"{time.operator} ({time.phase})", (time.device_seconds or 0.0) if on_gpu else time.seconds)
            for time in self.operators
        ]
        longest = sorted(times, key=lambda time: -time[1])[:DRAWN_OPERATORS]
        caption = f"Operators that take longest {'on the GPU' if on_gpu else 'on the host'}, in a step"
        return Report(
            title,
            (how,),
            tables,
            metrics=(self._time_table(), self._operator_table()),
            html_sentences=(self.headline, f"{title}: {how}"),
            charts=(
                Chart("Where the time of a step goes, from its beginning to its end", phases),
                bar_chart(caption, longest, format_milliseconds),
            ),
        )

    @property
    def headline(self) -> str:
        """How long a step takes, and what takes most of it, in a sentence."""
        most = max(self.shares, key=self.shares.__getitem__, default="")
        share = f": {100 * self.shares[most]:.0f} % of it is {most}" if most not in {"", "step"} else ""
        return f"A step takes {format_milliseconds(self.seconds)} on {self.shown(self.device)}{share}"

    def _data(self) -> Finding:
        if self.shares.get(DATA, 0.0) > MAX_DATA_FRACTION:
            return Finding(DATA_FINDING, WARNING, "steps wait for their data", self.data_remedy)
        return Finding(DATA_FINDING, OK, "data come in time")

    def _synchronization(self) -> Finding:
        mine = [wait for wait in self.synchronizations if wait.place.is_user_code]
        avoidable = [wait for wait in mine if wait.reason != "batch"]  # No step can do without its batch.
        if not avoidable:
            waits = "only the batch is waited for, on its way to the device"
            return Finding(SYNCHRONIZATION, OK, waits if mine else "no line of the step waits for the device")
        places = ", ".join(map(str, avoidable[:SHOWN]))
        if len(avoidable) > SHOWN:
            places += f", and {pluralize(len(avoidable) - SHOWN, 'other')}"
        if not parse_device_argument(self.device).is_accelerator:
            words = f"nothing waits on the CPU; a GPU would be waited for: {places}"
            return Finding(SYNCHRONIZATION, NOT_APPLICABLE, words)
        remedy = WAIT_REMEDIES[avoidable[0].reason]
        return Finding(SYNCHRONIZATION, WARNING, f"the device is waited for: {places}", remedy)

    def _tiny_batch(self) -> Finding:
        """Return whether a step does little but start operators."""
        if self.simulated and parse_device_argument(self.device).can_be_simulated:
            return Finding(TINY_BATCH, NOT_APPLICABLE, "a simulated device starts no operators")
        if self.kernel_fraction is not None:
            tiny = self.kernel_fraction < MIN_KERNEL_FRACTION
        else:
            tiny = (self.launch_fraction or 0.0) > MAX_LAUNCH_FRACTION
            # A step of one's own may spend its time in Python, which only the CPU's own operator times tell apart.
            hides_python = self.task == CUSTOM_STEP and self.operator_seconds is None
            if self.launch_fraction is None or (hides_python and not tiny):
                return Finding(TINY_BATCH, NOT_APPLICABLE, "not known")
        if tiny:
            remedy = "Use a larger batch: nb.sweep() finds the best."
            return Finding(TINY_BATCH, WARNING, "most of a step goes into starting operators", remedy)
        return Finding(TINY_BATCH, OK, "operators have enough to do")

    def _fallback(self) -> Finding:
        if not parse_device_argument(self.device).has_fallbacks:
            return Finding(FALLBACK, NOT_APPLICABLE, "only MPS has operators that fall back to the CPU")
        names = sorted({fallback.operator for fallback in self.fallbacks})
        if not names:
            return Finding(FALLBACK, OK, "nothing fell back to the CPU")
        remedy = "See where with nb.runbook.fallbacks(), and write it with other operators, or do this part on the CPU."
        return Finding(FALLBACK, WARNING, f"{', '.join(names)} fell back to the CPU", remedy)

    def _time_table(self) -> Table:
        rows = [
            ("a step at full speed", format_milliseconds(self.seconds)),
            ("data only", format_milliseconds(self.data_only)),
            ("the same batch again", format_milliseconds(self.compute_only)),
        ]
        rows += [(f"phase {name}", self.phase_times.shown(name)) for name in self.phase_times.seconds]
        rows.append(("operators a step", f"{self.operators_per_step:g}"))
        if self.microseconds_per_operator is not None:
            rows.append(("time for each operator", f"{self.microseconds_per_operator:.1f} µs"))
        parts = (
            ("starting operators", self.launch_seconds, self.launch_fraction),
            ("kernels on the GPU", self.device_seconds, self.kernel_fraction),
        )
        rows += [
            (name, f"{format_milliseconds(seconds)} ({100 * share:.0f} %)")
            for name, seconds, share in parts
            if seconds is not None and share is not None
        ]
        return Table("Times of a step", ("what", "figure"), tuple(rows), collapsed=True)

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
        return Table("Operators by the time that they take themselves", columns, rows, collapsed=True)


TOP = 3  # How many operators on top are compared.
# After how many days without progress to stop (the runbook): after a week to move the work or to accept it, after two to split it.
WEEK = 7
TWO_WEEKS = 14
CHANGE = 0.1  # What changes by less also changes from run to run.
# What two profiles must have in common.
SAME_WORK = ("name", "task", "device", "dtype", "rows", "row_shape", "batch_tokens", "workers", "simulated")
LANES = "print(nb.verdict(...).lanes) shows CPU, MPS, MLX and a remote pool beside each other."
# The names of findings.
WORK = "same work"
STEP_TIME = "time of a step"
STOPPING = "stopping rule"


@dataclass(frozen=True)
class OperatorTimes:
    """The seconds that an operator takes itself in a step, at two times."""

    operator: str
    before: float
    after: float

    @property
    def change(self) -> str:
        """How much more or less it takes, as people read it."""
        return f"{100 * (self.after / self.before - 1):+.0f} %" if self.before else "new"


@dataclass(frozen=True, repr=False)
class ProfileDiff(Displayable):
    """Two profiles of the same work at two times.

    Attributes:
        first: The earlier one.
        second: The later one.
    """

    first: Profile
    second: Profile

    SCHEMA = "openmed_nb/profile_diff/1"
    JSON_EXCLUDE = ("first", "second")
    JSON_PROPERTIES = (
        "written",
        "days",
        "differences",
        "progress",
        "operators",
        "hotspots",
        "should_stop",
        "findings",
        "status",
        "simulated",
    )
    SIMULATION_MARKERS = StepReport.SIMULATION_MARKERS

    @property
    def simulated(self) -> bool:
        """Whether one was measured under the simulation."""
        return self.first.simulated or self.second.simulated

    @property
    def written(self) -> tuple[str, str]:
        """When they were measured."""
        return self.first.created_at, self.second.created_at

    @property
    def days(self) -> int | None:
        """How many whole days lie between them; ``None`` if one has no date."""
        try:
            first, second = (datetime.fromisoformat(one.replace("Z", "+00:00")) for one in self.written)
        except ValueError:
            return None
        return (second - first).days

    @property
    def differences(self) -> tuple[str, ...]:
        """In what the work differs, so that times cannot be compared; empty if it is the same."""
        first, second = ({name: getattr(one, name) for name in SAME_WORK} for one in (self.first, self.second))
        return tuple(change.path[0] for change in find_changes(first, second))

    @property
    def progress(self) -> float | None:
        """How much less time a step takes, 0.1 for a tenth, below 0 for more; ``None`` if the work differs."""
        if self.differences or not self.first.seconds:
            return None
        return 1 - self.second.seconds / self.first.seconds

    @property
    def operators(self) -> tuple[OperatorTimes, ...]:
        """The operators of both with their times of all phases, those that take longest first.

        These are times on the GPU if both profiles know them, else on the host.
        """
        known = self.first.device_seconds is not None and self.second.device_seconds is not None
        unit = "device_seconds" if known else "seconds"
        before = defaultdict[str, float](float)
        after = defaultdict[str, float](float)
        for profile, seconds in ((self.first, before), (self.second, after)):
            for operator in profile.operators:
                seconds[operator.operator] += getattr(operator, unit) or 0.0
        times = [OperatorTimes(name, before[name], after[name]) for name in {**before, **after}]
        return tuple(sorted(times, key=lambda one: max(one.before, one.after), reverse=True))

    @property
    def hotspots(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the three operators that take longest, of each."""
        return self._top("before"), self._top("after")

    def _top(self, when: str) -> tuple[str, ...]:
        times = {one.operator: getattr(one, when) for one in self.operators if getattr(one, when)}
        return tuple(sorted(times, key=times.__getitem__, reverse=True)[:TOP])

    @property
    def should_stop(self) -> bool:
        """Whether the stopping rule holds: a week or more apart, the same operators on top, and a step no faster."""
        return self._stopping().status == WARNING

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Whether the work is the same, what became faster and slower, and the stopping rule."""
        if self.differences:
            remedy = "Profile the same work again, with the same batch on the same device."
            return (Finding(WORK, WARNING, f"other {', '.join(self.differences)}: nothing is compared", remedy),)
        top = {*self._top("before"), *self._top("after")}
        changes: dict[str, list[str]] = {"faster": [], "slower": []}
        for times in self.operators:
            if times.operator in top and abs(times.after - times.before) > CHANGE * max(times.after, times.before):
                changes["faster" if times.after < times.before else "slower"].append(times.operator)
        words = [f"{word}: {', '.join(names)}" for word, names in changes.items() if names]
        return (
            Finding(WORK, OK, "model, batch and device are the same"),
            self._step(),
            Finding("operators", OK, "; ".join(words) or "those on top take as long as before"),
            self._stopping(),
        )

    def _step(self) -> Finding:
        gain = self.progress or 0.0
        if gain < -CHANGE:
            remedy = "Look at nb.signals(), and at what changed: nb.logbook(...).diff(...)."
            return Finding(STEP_TIME, WARNING, "a step is slower", remedy)
        return Finding(STEP_TIME, OK, "a step is faster" if gain > CHANGE else "a step takes as long as before")

    @property
    def status(self) -> str:
        """The worst of the findings."""
        return worst_status(self.findings)

    def _stopping(self) -> Finding:
        first, second = self.hotspots
        if self.differences or not second:
            return Finding(STOPPING, NOT_APPLICABLE, "the work differs, or no operator was seen")
        if set(first) != set(second):
            return Finding(STOPPING, OK, f"others are on top now: {', '.join(second)}")
        if (self.progress or 0.0) > CHANGE:
            return Finding(STOPPING, OK, "the same operators are on top, and a step is faster")
        if self.days is None or self.days < WEEK:
            when = "less than a week apart" if self.days is not None else "and one has no date"
            return Finding(STOPPING, NOT_APPLICABLE, f"the same operators are on top, {when}")
        what = f"the same operators are on top after {self.days} days, and a step is no faster: {', '.join(second)}"
        do = "move this work" if self.days < TWO_WEEKS else "split off what they do"
        return Finding(STOPPING, WARNING, what, f"Stop here: {do}, or accept it; {LANES}")

    def to_report(self) -> Report:
        """Return what became of the work; times stand in the HTML."""
        apart = "at two times" if self.days is None else f"{pluralize(self.days, 'day')} apart"
        said = "stop here" if self.should_stop else self._step().evidence
        if self.differences:
            said = "other work"
        step = OperatorTimes("a step at full speed", self.first.seconds, self.second.seconds)
        rows = tuple(
            (one.operator, f"{1000 * one.before:.3f}", f"{1000 * one.after:.3f}", one.change)
            for one in (step, *self.operators[:SHOWN_OPERATORS])
        )
        times = Table("Times of a step", ("what", "ms before", "ms now", "change"), rows)
        later = self.second
        return Report(
            f"Two profiles of {later.name} ({later.task}) on {later.shown(later.device)}, {apart}: {said}",
            tables=(findings_table("", self.findings),),
            metrics=() if self.differences else (times,),
            status=self.status,
        )


MAX_OPERATORS = 30  # How many are kept.
STEPS = 50
WARM_UP = 5
NUM_STAGES = 6  # What a profile is made of, one after the other.


def profile(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    training: bool = False,
    device: str | None = None,
    batch_size: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    signposts: bool = False,
    metal_capture: str | None = None,
    progress: bool = True,
    **arguments: Any,
) -> Profile:
    """Look at some steps closely: where their time goes, which lines wait for the device, which operators take long.

    After the warm-up, steps are timed at full speed and phase by phase; then their data alone, and the same batch again and
    again; then some run under torch's profiler; and at last a few are watched for what they call, which slows them and is not
    timed. In turn with them run operators that have nothing to compute: a batch is tiny if more than half of a step goes into
    starting operators.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; a torch module; or a
            function that does a step of your own with a batch, which is run as it is and changes what it changes.
        data: Texts for a name or a pipeline; example inputs or a ``DataLoader`` for a module or for training; batches for a
            function, or another function that makes a batch of a number of rows. Synthetic texts where nobody says.
        steps: How many steps torch's profiler sees. The series of times have as many, or fewer where they are slow.
        warm_up: How many steps come before any that counts.
        training: Whether training steps are profiled: forward, backward and AdamW, on a copy of the model.
        device: The device; ``None`` is the session's.
        batch_size: How many texts, or rows, a step has; 32 texts, or as many rows as the example or the loader has. Texts
            run on a device in batches of tokens: of 128 for each text of a ``batch_size`` that is passed, which is what
            :func:`sweep` measures; without one, of as many as suit the device. The result says it as ``batch_tokens``.
        trace: A file for the trace of the profiled steps in the format of Chrome, such as ``"trace.json"``; it is written over.
            It has no code, shapes or text, but torch writes the name of the computer into it.
        signposts: On MPS, whether the profiled steps leave signposts for Instruments (``torch.mps.profiler.profile``).
        metal_capture: On MPS, the name under which one step's Metal calls are captured for Xcode, such as ``"step"``, for which
            torch writes ``0000-step.gputrace`` in the current folder; the number counts the captures of this process
            (``torch.mps.profiler.metal_capture``, since torch 2.7, where ``MTL_CAPTURE_ENABLED=1`` was set before Python began).
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The profile: ``findings``, named ``"data"``, ``"synchronization"``, ``"tiny batch"`` and ``"fallback"``; ``bottlenecks``,
        the names of those that warn; ``seconds``, ``data_only``, ``compute_only`` and ``shares`` of the phases;
        ``synchronizations`` with call, file, line and count; ``operators`` by time; and ``save("profile.json")``, in the schema
        that ``to_dict()["schema"]`` names. Its text has no times, no path and no word of a text.

    Raises:
        ConfigurationError: For what cannot be measured, for data and numbers that are none, for a file that cannot be written,
            for signposts and captures where torch has none, and while another profiler of torch is on.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where the device cannot be used, or a batch does not fit in its memory.

    Calls that wait, such as ``.item()``, ``.cpu()`` or printing a tensor, are named with the line of your own code; inside of
    a model of a library, the library's module is named and nothing warns. A copy to the device waits for all that was started
    there (torch's ``MPSStream::copy_and_sync`` and, on CUDA, ``memcpy_and_sync``): that of the batch, before a step computes, is
    named and does not warn. On the CPU nothing waits, and the lines are named that
    would on a GPU. torch's profiler sees no kernels of MPS: there, the times of operators are those of the host. What
    ``torch.compile`` made is watched uncompiled. Hooks of a model of yours run in its copy.

    Example:
        >>> import torch
        >>> found = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
        >>> [one.name for one in found.findings], found.operators_per_step
        (['data', 'synchronization', 'tiny batch', 'fallback'], 1.0)
    """
    check_bool("signposts", signposts)
    steps = check_integer("steps", steps)
    warm_up = check_integer("warm_up", warm_up, 0)
    batch_size = check_optional_integer("batch_size", batch_size)
    file = validate_trace_path(trace)
    capture = None if metal_capture is None else profilers.capture_name(metal_capture)
    with SESSION.operation(progress):
        subject, place = make_target(model, data, training=training, device=device, arguments=arguments)
        profilers.check_no_profiler()
        if signposts:
            profilers.check_signposts(place)
        if capture is not None:
            profilers.check_metal_capture(place)
        with build_benchmarks(subject, [place]) as benches:
            return run_profile(
                benches[place].data_workload(batch_size), place, steps, warm_up, file, signposts, capture
            )


def validate_trace_path(trace: Any) -> Path | None:
    """Return where a trace will be written; anything but a file of JSON in a folder that takes files is an error.

    Example:
        >>> validate_trace_path("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A trace cannot be written to 'trace.txt'. Use a name that ends in .json or .json.gz.
    """
    if trace is None:
        return None
    name = os.fspath(trace) if isinstance(trace, (str, os.PathLike)) else ""
    if not str(name).endswith((".json", ".json.gz")):
        shown = describe_file(Path(name)) if name else short_type_name(trace)
        raise ConfigurationError(f"A trace cannot be written to {shown}.", "Use a name that ends in .json or .json.gz.")
    file = Path(name)
    try:  # torch's profiler says nothing if it cannot write.
        with tempfile.TemporaryFile(dir=file.parent):
            writable = os.access(file, os.W_OK) if file.exists() else True
    except OSError:
        writable = False
    if file.is_dir() or not writable:
        what = f"{describe_file(file)} cannot be written there."
        raise ConfigurationError(what, "Make the folder, or use another one.")
    return file


def run_profile(  # noqa: PLR0913, PLR0917 - what a person asked for
    workload: Workload,
    device: str,
    steps: int,
    warm_up: int,
    trace: Path | None,
    signposts: bool,
    capture: str | None,
) -> Profile:
    """Return the profile of steps that are ready."""
    from .profile_watch import CALLS, MAX_TRACED_STEPS, empty_operators, profile_operators, sum_operators, trace_steps

    def tell(done: int) -> None:
        SESSION.notify(ProgressEvent("Profiling", workload.name, done, NUM_STAGES, "part"))

    tell(0)
    known = parse_device_argument(device)
    empty = empty_operators(device)
    with workload.open_batches() as batches:
        batch = next(batches)
        for _ in range(warm_up):
            workload.seconds_of_steps(batches)
        workload.reach_steady_state(batches)
        tell(1)
        seconds = repeat_measurement(lambda: workload.seconds_of_steps(batches), steps)
        workload.reach_steady_state(batches)
        tell(2)
        split = workload.split(batches, steps)
        workload.drain_prefetched(batches)
        tell(3)
        data = repeat_measurement(lambda: next_batch(batches)[1], steps)
        turns = repeat_measurement(lambda: (workload.seconds(batch), empty.seconds(None)), steps)
        tell(4)
        with profilers.signposts() if signposts else contextlib.nullcontext():
            operators = profile_operators(workload, batches, steps, trace, None if known.is_accelerator else empty)
        if capture is not None:
            with profilers.metal_capture(capture):
                workload.run(batch)
        tell(5)
        per_step, waits, fell = trace_steps(workload, batches)
    tell(NUM_STAGES)
    compute, started = zip(*turns, strict=True)
    starting = sum_operators(operators, "launch_seconds")
    if known.is_accelerator and not known.profiler_times_kernels:
        starting = per_step * statistics.median(started) / CALLS
    return Profile(
        **workload.facts,
        device=device,
        rows=workload.usual_rows,
        steps=steps,
        warm_up=warm_up,
        seconds=statistics.median(seconds),
        phase_times=split,
        data_only=workload.typical(data),
        compute_only=statistics.median(compute),
        operators=operators[:MAX_OPERATORS],
        operators_per_step=per_step,
        device_seconds=sum_operators(operators, "device_seconds", with_data=True),
        synchronizations=waits,
        fallbacks=fell,
        traced_steps=MAX_TRACED_STEPS,
        batch_tokens=workload.batch_tokens,
        operator_seconds=None if known.is_accelerator else (sum_operators(operators, "seconds") or 0.0),
        launch_seconds=starting,
        created_at=utc_timestamp(),
    )
