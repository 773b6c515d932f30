"""``nb.runbook.profile``: time per phase and operator of a few steps, their bottlenecks, and the comparison of two profiles."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

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
    format_percent,
    pluralize,
    worst_status,
)
from ..._render.drawing import Bar, Chart, bar_chart
from ..._utils.clock import time_call
from ..._utils.plain import read_json_file, save_text, to_json, utc_timestamp
from ..._utils.text import describe_file, short_type_name
from ..._utils.validation import check_bool, check_integer, check_optional_integer, check_path
from ...devices import profilers
from ...devices.registry import get_device
from ...errors import ConfigurationError
from ...session import SESSION
from .fallbacks import Fallback
from .timing import DATA, MAX_DATA_FRACTION, OperatorTime, PhaseTimes, Reason, Synchronization, repeat_measurement
from .workloads import CUSTOM_STEP, StepReport, Workload, build_benchmarks, make_target

# Names of the findings.
DATA_FINDING = "data"
SYNCHRONIZATION = "synchronization"
TINY_BATCH = "tiny batch"
FALLBACK = "fallback"

# A batch is tiny if kernels run on the GPU for less than this fraction of a step. The GPU then mostly waits for launches.
# Measured on an H200 with BERT-base and rows of 128 tokens. Forward passes cross the threshold at 1 or 2 rows, and training
# steps at about 8 rows. Below it, twice the rows took no more time.
MIN_KERNEL_FRACTION = 0.5

# If torch's profiler records no kernels, a batch is tiny if launch overhead takes more than this fraction of a step: the number of
# operators times the measured time of an operator on single numbers, which is 25 to 110 microseconds on MPS (pytorch#82707), and
# 3 to 7 on one CPU. On an H200, the fraction of such a step was above the threshold in all 77 cases with a kernel fraction below
# one half, and in 8 of 12 other cases.
MAX_LAUNCH_FRACTION = 0.5

# Remedies for a wait, by its reason.
WAIT_REMEDIES: Mapping[Reason, str] = {
    "read": "Accumulate the values on the device, and read them only every few steps.",
    "copy": "Copy the tensor together with the batch before the step computes, or create it on the device.",
}

MAX_LOCATIONS = 3  # Locations in a finding.
MAX_CHART_OPERATORS = 5
MAX_TABLE_OPERATORS = 12


@dataclass(frozen=True, repr=False)
class Profile(StepReport):
    """Profile of a few steps.

    It also has the attributes ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated``.

    Attributes:
        device: Name of the device.
        rows: Number of texts or rows per step.
        steps: Number of steps under torch's profiler.
        seconds: Median duration of a step at full speed in seconds, including its data.
        phase_times: Time per phase, measured with a synchronization after each phase.
        data_only: Average time to load a batch without computing, in seconds. It is the mean, or the median for texts.
        compute_only: Median duration of a step with the same batch, in seconds.
        operators: Operators by phase, sorted by descending time.
        operators_per_step: Number of operators that compute per step. Views do not count.
        device_seconds: Time of the kernels on the GPU per step in seconds, or ``None`` if torch's profiler records no kernels.
        synchronizations: Calls in a step that wait for the device, except the calls of this package.
        fallbacks: Operators that fell back from MPS to the CPU.
        fallbacks_per_step: Number of fallbacks to the CPU per step.
        batch_tokens: Maximum number of tokens per batch on the device, or ``None`` if no texts were annotated.
        operator_seconds: Time of all operators per step on the CPU in seconds, or ``None`` on other devices.
        launch_seconds: Launch overhead of the operators per step in seconds, or ``None`` if torch's profiler records kernels,
            which are more precise.
        created_at: Time of the measurement in UTC, such as ``"2026-11-01T12:00:00Z"``, or an empty string if unknown.
    """

    device: str
    rows: int
    steps: int
    seconds: float
    phase_times: PhaseTimes
    data_only: float
    compute_only: float
    operators: tuple[OperatorTime, ...]
    operators_per_step: float
    device_seconds: float | None = None
    synchronizations: tuple[Synchronization, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    fallbacks_per_step: float = 0.0
    batch_tokens: int | None = None
    operator_seconds: float | None = None
    launch_seconds: float | None = None
    created_at: str = ""

    SCHEMA = "openmed_nb/profile/1"
    JSON_PROPERTIES = ("launch_fraction", "kernel_fraction", "fallback_fraction", "findings", "bottlenecks")

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Fraction of a step per phase, in [0, 1]."""
        return self.phase_times.fractions

    @property
    def launch_fraction(self) -> float | None:
        """Fraction of a step that is launch overhead, without data, in [0, 1], or ``None`` if it is unknown.

        On the CPU, this is the fraction of the time of the operators only, without the Python code of the user.
        """
        seconds = self.compute_only if self.operator_seconds is None else self.operator_seconds
        if self.launch_seconds is None or not self.operators_per_step or seconds <= 0:
            return None
        return min(1.0, self.launch_seconds / seconds)

    @property
    def kernel_fraction(self) -> float | None:
        """Fraction of a step in which kernels run on the GPU, without data, in [0, 1], or ``None`` if it is unknown."""
        if self.device_seconds is None or self.compute_only <= 0:
            return None
        return min(1.0, self.device_seconds / self.compute_only)

    @property
    def fallback_fraction(self) -> float:
        """Fraction of the operator calls that fall back to the CPU, in [0, 1]."""
        return min(1.0, self.fallbacks_per_step / self.operators_per_step) if self.operators_per_step else 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings named ``"data"``, ``"synchronization"``, ``"tiny batch"`` and ``"fallback"``."""
        return (
            self._data_finding(),
            self._synchronization_finding(),
            self._tiny_batch_finding(),
            self._fallback_finding(),
        )

    @property
    def bottlenecks(self) -> tuple[str, ...]:
        """Names of the findings with a warning."""
        return tuple(finding.name for finding in self.findings if finding.status == WARNING)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Save the profile as JSON in the schema that its first key names, without paths and text content.

        Args:
            file: Path of the file. An existing file is replaced atomically.

        Raises:
            ConfigurationError: If the file cannot be written.
        """
        save_text(check_path(file, "the file of a profile"), to_json(self))

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Profile:
        """Load a profile from a file that :meth:`save` has written.

        Raises:
            ConfigurationError: If the file cannot be read or does not contain a profile.

        Example:
            >>> try:
            ...     Profile.read("nowhere.json")
            ... except ConfigurationError as error:
            ...     print(error.remedy)
            Pass a file written by Profile.save().
        """
        path = check_path(file, "the file of a profile")
        remedy = "Pass a file written by Profile.save()."
        loaded: Profile = read_json_file(cls, path, "a profile of nb.runbook.profile()", remedy)
        return loaded

    def diff(self, other: object) -> ProfileDiff:
        """Compare this profile with a profile of the same workload at another time.

        Args:
            other: Other profile, for example from :meth:`read`. The order in time follows from the dates of both profiles.

        Returns:
            The comparison, with the operator times, ``progress``, and the stopping rule among its ``findings``.

        Raises:
            ConfigurationError: If ``other`` is not a profile.

        Example:
            >>> import torch
            >>> from openmed_nb.runbook import profile
            >>> result = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
            >>> result.diff(result).days, result.diff(result).should_stop
            (0, False)
        """
        if not isinstance(other, Profile):
            message = f"A profile cannot be compared with {short_type_name(other)}."
            raise ConfigurationError(message, "Pass a profile from nb.runbook.profile() or Profile.read().")
        return ProfileDiff(*sorted((self, other), key=attrgetter("created_at")))

    def to_report(self) -> Report:
        """Return a report with the bottlenecks and the measurements."""
        title = f"Profile of {self.name} ({self.task}) on {self.device_label(self.device)}"
        method = f"{pluralize(self.steps, 'step')} of {pluralize(self.rows, 'row')}."
        waits = tuple((wait.call, str(wait.place), f"{wait.count:g}") for wait in self.synchronizations)
        # Metrics of a step.
        metrics = [
            ("step at full speed", format_milliseconds(self.seconds)),
            ("data only", format_milliseconds(self.data_only)),
            ("same batch repeated", format_milliseconds(self.compute_only)),
        ]
        metrics += [(f"phase {name}", self.phase_times.format_phase(name)) for name in self.phase_times.seconds]
        metrics.append(("operators per step", f"{self.operators_per_step:g}"))
        for name, seconds, fraction in (
            ("launch overhead", self.launch_seconds, self.launch_fraction),
            ("GPU kernels", self.device_seconds, self.kernel_fraction),
        ):
            if seconds is not None and fraction is not None:
                metrics.append((name, f"{format_milliseconds(seconds)} ({format_percent(fraction)})"))
        # Operators.
        operator_rows = tuple(
            (
                time.operator,
                time.phase,
                f"{time.count:g}",
                f"{1000 * time.seconds:.3f}",
                "" if time.device_seconds is None else f"{1000 * time.device_seconds:.3f}",
            )
            for time in self.operators[:MAX_TABLE_OPERATORS]
        )
        operator_columns = ("operator", "phase", "calls per step", "ms on the host", "ms on the GPU")
        on_gpu = self.device_seconds is not None
        times = [
            (f"{time.operator} ({time.phase})", (time.device_seconds or 0.0) if on_gpu else time.seconds)
            for time in self.operators
        ]
        longest = sorted(times, key=itemgetter(1), reverse=True)[:MAX_CHART_OPERATORS]
        operator_caption = f"Operators with the longest time on the {'GPU' if on_gpu else 'host'} per step"
        # Phases, one after the other.
        bars = []
        start = 0.0
        for name, seconds in self.phase_times.waiting_seconds.items():
            text = self.phase_times.format_phase(name)
            bars.append(Bar(name, seconds, text, start, emphasized=name == self.phase_times.dominant_phase))
            start += seconds
        return Report(
            title,
            (f"{self.headline}.", method),
            (
                findings_table("", self.findings),
                Table("Calls that wait for the device", ("call", "location", "calls per step"), waits),
            ),
            metrics=(
                Table("Time of a step", ("metric", "value"), tuple(metrics), collapsed=True),
                Table("Operators by self time", operator_columns, operator_rows, collapsed=True),
            ),
            charts=(
                Chart("Time per phase, from the start to the end of a step", tuple(bars)),
                bar_chart(operator_caption, longest, format_milliseconds),
            ),
        )

    @property
    def headline(self) -> str:
        """Sentence that states the duration of a step and its longest phase."""
        longest = max(self.phase_fractions, key=self.phase_fractions.__getitem__, default="")
        phase = (
            f": {format_percent(self.phase_fractions[longest])} of it is {longest}"
            if longest not in {"", "step"}
            else ""
        )
        return f"A step takes {format_milliseconds(self.seconds)} on {self.device_label(self.device)}{phase}"

    def _data_finding(self) -> Finding:
        if self.phase_fractions.get(DATA, 0.0) > MAX_DATA_FRACTION:
            return Finding(DATA_FINDING, WARNING, "steps wait for their data", self.data_remedy)
        return Finding(DATA_FINDING, OK, "data are ready in time")

    def _synchronization_finding(self) -> Finding:
        user_waits = [wait for wait in self.synchronizations if wait.place.is_user_code]
        avoidable = [wait for wait in user_waits if wait.reason != "batch"]  # Each step needs its batch.
        if not avoidable:
            only_batch = "a step waits only for its batch to be copied to the device"
            return Finding(
                SYNCHRONIZATION, OK, only_batch if user_waits else "no line of the step waits for the device"
            )
        locations = ", ".join(map(str, avoidable[:MAX_LOCATIONS]))
        if len(avoidable) > MAX_LOCATIONS:
            locations += f", and {pluralize(len(avoidable) - MAX_LOCATIONS, 'other')}"
        if not get_device(self.device).is_accelerator:
            evidence = f"the CPU does not wait; on a GPU, these calls would: {locations}"
            return Finding(SYNCHRONIZATION, NOT_APPLICABLE, evidence)
        remedy = WAIT_REMEDIES[avoidable[0].reason]
        return Finding(SYNCHRONIZATION, WARNING, f"these calls wait for the device: {locations}", remedy)

    def _tiny_batch_finding(self) -> Finding:
        """Return the finding on whether most of a step is launch overhead."""
        if self.simulated and get_device(self.device).can_be_simulated:
            return Finding(TINY_BATCH, NOT_APPLICABLE, "a simulated device launches no kernels")
        if self.kernel_fraction is not None:
            is_tiny = self.kernel_fraction < MIN_KERNEL_FRACTION
        else:
            is_tiny = (self.launch_fraction or 0.0) > MAX_LAUNCH_FRACTION
            # A custom step may spend its time in Python code. Only operator times on the CPU exclude that.
            includes_python = self.task == CUSTOM_STEP and self.operator_seconds is None
            if self.launch_fraction is None or (includes_python and not is_tiny):
                return Finding(TINY_BATCH, NOT_APPLICABLE, "not known")
        if is_tiny:
            remedy = "Use a larger batch; nb.sweep() finds the best batch size."
            return Finding(TINY_BATCH, WARNING, "most of a step is launch overhead", remedy)
        return Finding(TINY_BATCH, OK, "most of a step is computation")

    def _fallback_finding(self) -> Finding:
        if not get_device(self.device).has_fallbacks:
            return Finding(FALLBACK, NOT_APPLICABLE, "only operators on MPS fall back to the CPU")
        names = sorted({fallback.operator for fallback in self.fallbacks})
        if not names:
            return Finding(FALLBACK, OK, "no operator fell back to the CPU")
        remedy = "Find the modules with nb.runbook.forecast(model). Replace the operators, or run that part of the model on the CPU."
        return Finding(FALLBACK, WARNING, f"{', '.join(names)} fell back to the CPU", remedy)


NUM_HOTSPOTS = 3  # Number of slowest operators that are compared.
# The stopping rule applies if a step is no faster after this many days. Up to the second limit, the advice is to move the
# workload; from then on, it is to split it.
MIN_STOPPING_DAYS = 7
MIN_SPLIT_DAYS = 14
MIN_CHANGE_FRACTION = 0.1  # Smaller changes also occur from run to run.
# Fields in which two profiles must agree to be comparable.
COMPARABLE_FIELDS = (
    "name",
    "task",
    "device",
    "dtype",
    "rows",
    "row_shape",
    "batch_tokens",
    "workers",
    "simulated",
)
LANES_HINT = "print(nb.verdict(...).lanes) compares CPU, MPS, MLX and a remote pool."
# Names of the findings of a comparison.
SAME_WORKLOAD = "same workload"
STEP_TIME = "step time"
STOPPING_RULE = "stopping rule"


class OperatorTimes(NamedTuple):
    """Self time of an operator per step in two profiles.

    Attributes:
        operator: Name of the operator.
        before: Seconds in the earlier profile.
        after: Seconds in the later profile.
    """

    operator: str
    before: float
    after: float


@dataclass(frozen=True, repr=False)
class ProfileDiff(Displayable):
    """Comparison of two profiles of the same workload at different times.

    Attributes:
        first: Earlier profile.
        second: Later profile.
    """

    first: Profile
    second: Profile

    SCHEMA = "openmed_nb/profile_diff/1"
    JSON_EXCLUDE = ("first", "second")
    JSON_PROPERTIES = ("days", "differences", "progress", "hotspots", "should_stop", "findings", "status", "simulated")
    SIMULATION_MARKERS = StepReport.SIMULATION_MARKERS

    @property
    def simulated(self) -> bool:
        """Whether one of the profiles was measured on a simulated device."""
        return self.first.simulated or self.second.simulated

    @property
    def days(self) -> int | None:
        """Number of full days between the profiles, or ``None`` if one of them has no date."""
        try:
            first, second = (
                datetime.fromisoformat(profile.created_at.replace("Z", "+00:00"))
                for profile in (self.first, self.second)
            )
        except ValueError:
            return None
        return (second - first).days

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields that make the times incomparable; empty if the workload is the same."""
        return tuple(name for name in COMPARABLE_FIELDS if getattr(self.first, name) != getattr(self.second, name))

    @property
    def progress(self) -> float | None:
        """Relative reduction of the step time, negative if a step is slower, or ``None`` if the workload differs."""
        if self.differences or not self.first.seconds:
            return None
        return 1 - self.second.seconds / self.first.seconds

    @property
    def operators(self) -> tuple[OperatorTimes, ...]:
        """Operators of both profiles with their times over all phases, sorted by descending time.

        The times are GPU times if both profiles have them, and host times otherwise.
        """
        on_gpu = self.first.device_seconds is not None and self.second.device_seconds is not None
        before = defaultdict[str, float](float)
        after = defaultdict[str, float](float)
        for profile, seconds in ((self.first, before), (self.second, after)):
            for time in profile.operators:
                seconds[time.operator] += (time.device_seconds or 0.0) if on_gpu else time.seconds
        times = [OperatorTimes(name, before[name], after[name]) for name in {**before, **after}]
        return tuple(sorted(times, key=lambda time: max(time.before, time.after), reverse=True))

    @property
    def hotspots(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the three slowest operators of each profile."""
        before = sorted(self.operators, key=attrgetter("before"), reverse=True)[:NUM_HOTSPOTS]
        after = sorted(self.operators, key=attrgetter("after"), reverse=True)[:NUM_HOTSPOTS]
        return (
            tuple(times.operator for times in before if times.before),
            tuple(times.operator for times in after if times.after),
        )

    @property
    def should_stop(self) -> bool:
        """Whether the stopping rule applies: the slowest operators and the step time are unchanged after a week or more."""
        return self._stopping_finding().status == WARNING

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on the workload, on the times of the step and its operators, and on the stopping rule."""
        if self.differences:
            remedy = "Profile the same model again, with the same batch on the same device."
            evidence = f"different {', '.join(self.differences)}; times are not comparable"
            return (Finding(SAME_WORKLOAD, WARNING, evidence, remedy),)
        return (
            Finding(SAME_WORKLOAD, OK, "model, batch and device are the same"),
            self._step_finding(),
            self._stopping_finding(),
        )

    def _step_finding(self) -> Finding:
        progress = self.progress or 0.0
        if progress < -MIN_CHANGE_FRACTION:
            remedy = "Check nb.system_status(), and list the changes with nb.logbook(...).diff(...)."
            return Finding(STEP_TIME, WARNING, "a step is slower", remedy)
        is_faster = progress > MIN_CHANGE_FRACTION
        return Finding(STEP_TIME, OK, "a step is faster" if is_faster else "a step takes as long as before")

    @property
    def status(self) -> str:
        """Worst status of the findings."""
        return worst_status(self.findings)

    def _stopping_finding(self) -> Finding:
        first, second = self.hotspots
        if self.differences or not second:
            return Finding(STOPPING_RULE, NOT_APPLICABLE, "the workload differs, or no operator was recorded")
        if set(first) != set(second):
            return Finding(STOPPING_RULE, OK, f"the slowest operators changed to {', '.join(second)}")
        if (self.progress or 0.0) > MIN_CHANGE_FRACTION:
            return Finding(STOPPING_RULE, OK, "the slowest operators are the same, and a step is faster")
        if self.days is None or self.days < MIN_STOPPING_DAYS:
            time = "less than a week apart" if self.days is not None else "and one profile has no date"
            return Finding(STOPPING_RULE, NOT_APPLICABLE, f"the slowest operators are the same, {time}")
        operators = ", ".join(second)
        evidence = f"the slowest operators are the same after {self.days} days, and a step is no faster: {operators}"
        action = "Move this workload" if self.days < MIN_SPLIT_DAYS else "Split off these operators"
        remedy = f"Stop optimizing. {action}, or accept the step time; {LANES_HINT}"
        return Finding(STOPPING_RULE, WARNING, evidence, remedy)

    def to_report(self) -> Report:
        """Return a report with the findings and the times."""
        interval = "at two times" if self.days is None else f"{pluralize(self.days, 'day')} apart"
        result = "stop optimizing" if self.should_stop else self._step_finding().evidence
        if self.differences:
            result = "not comparable"
        step = OperatorTimes("step at full speed", self.first.seconds, self.second.seconds)
        rows = tuple(
            (times.operator, f"{1000 * times.before:.3f}", f"{1000 * times.after:.3f}")
            for times in (step, *self.operators[:MAX_TABLE_OPERATORS])
        )
        table = Table("Time of a step", ("operator", "ms before", "ms after"), rows)
        later = self.second
        return Report(
            f"Two profiles of {later.name} ({later.task}) on {later.device_label(later.device)}, {interval}: {result}",
            tables=(findings_table("", self.findings),),
            metrics=() if self.differences else (table,),
            status=self.status,
        )


MAX_OPERATORS = 30  # Number of operators that a profile stores.
DEFAULT_STEPS = 50
WARM_UP_STEPS = 5
NUM_STAGES = 6  # Stages of a profile, for its progress.


def profile(  # noqa: PLR0913 - each parameter is an independent option of the public function
    model: object = None,
    data: object = None,
    *,
    steps: int = DEFAULT_STEPS,
    training: bool = False,
    device: str | None = None,
    batch_size: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    signposts: bool = False,
    metal_capture: str | None = None,
    **arguments: object,
) -> Profile:
    """Profile some steps: time per phase and operator, code lines that wait for the device, and other bottlenecks.

    After the warm-up, steps are timed at full speed and phase by phase. Then their data loading is timed alone, and steps with
    the same batch. Next, steps run under torch's profiler. Finally, the calls of a few steps are traced, which slows them and
    is not timed. A batch is tiny if launch overhead takes more than half of a step.

    Args:
        model: Name of a model, a pipeline from :func:`load_pipeline`, a torch module, or a custom function that runs a step
            with a batch. The side effects of the function are not undone. If ``None``, use the bundled model.
        data: Texts for a name or a pipeline. Example inputs or a ``DataLoader`` for a module or for training. Batches for a
            function, or a function that builds a batch with a given number of rows. If ``None``, use synthetic texts.
        steps: Number of steps under torch's profiler, and maximum number of steps in each timed series. Series of slow steps
            are shorter.
        training: Whether to profile training steps (forward, backward and AdamW) on a copy of the model.
        device: Device to profile. If ``None``, use the active device.
        batch_size: Number of texts or rows per step. If ``None``, use 32 texts, or the number of rows of the example or the
            loader. Texts run on a device in batches of tokens. A given ``batch_size`` allows 128 tokens for each of its
            texts, as :func:`sweep` measures. Otherwise, the batch budget of the device applies. The result reports it as
            ``batch_tokens``.
        trace: File for the trace of the profiled steps in Chrome's format, such as ``"trace.json"``. An existing file is
            overwritten. The trace contains no code, shapes or text, but torch writes the name of the computer into it.
        signposts: On MPS, whether the profiled steps emit signposts for Instruments (``torch.mps.profiler.profile``).
        metal_capture: On MPS, name of a capture of one step's Metal calls for Xcode, such as ``"step"``. torch writes
            ``0000-step.gputrace`` to the current directory; the number counts the captures of this process. This requires
            torch 2.7 and ``MTL_CAPTURE_ENABLED=1`` before Python starts (``torch.mps.profiler.metal_capture``).
        arguments: Arguments of :func:`openmed_nb.load_model` for a model name, such as ``revision``.

    Returns:
        The profile. It has ``findings`` named ``"data"``, ``"synchronization"``, ``"tiny batch"`` and ``"fallback"``, and
        ``bottlenecks`` with the names of those that are warnings. It also has ``seconds``, ``data_only``, ``compute_only``,
        ``phase_fractions``, ``synchronizations`` with call, file, line and count, and ``operators`` by time.
        ``save("profile.json")`` saves it in the schema that ``to_dict()["schema"]`` names. It contains no paths and no text
        content.

    Raises:
        ConfigurationError: If the model, the data or a number is invalid, or if a file cannot be written. Also if torch does not
            support signposts or captures on the device, or if another torch profiler is active.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device is unavailable or a batch does not fit in its memory.

    Calls that wait, such as ``.item()``, ``.cpu()`` or printing a tensor, are reported with the line of your code. Inside the
    model of a library, they are reported with the module of the library and without a warning. A copy to the device waits for
    all work that was launched there (``MPSStream::copy_and_sync`` in torch, ``memcpy_and_sync`` on CUDA). The copy of the batch
    before a step computes is reported without a warning. On the CPU nothing waits, and the lines that would wait on a GPU are
    reported. torch's profiler does not record kernels of MPS; operator times are host times there. Functions from
    ``torch.compile`` are traced uncompiled. Hooks of your model run in its copy.

    Example:
        >>> import torch
        >>> result = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
        >>> [finding.name for finding in result.findings], result.operators_per_step
        (['data', 'synchronization', 'tiny batch', 'fallback'], 1.0)
    """
    check_bool("signposts", signposts)
    steps = check_integer("steps", steps)
    batch_size = check_optional_integer("batch_size", batch_size)
    trace_path = _validate_trace_path(trace)
    capture_name = None if metal_capture is None else profilers.capture_name(metal_capture)
    with SESSION.operation():
        target, device_name = make_target(model, data, training=training, device=device, arguments=arguments)
        profilers.check_profiling(device_name, signposts, capture_name)
        with build_benchmarks(target, [device_name]) as benchmarks:
            workload = benchmarks[device_name].data_workload(batch_size)
            return _run_profile(workload, device_name, steps, trace_path, signposts, capture_name)


def _validate_trace_path(trace: object) -> Path | None:
    """Validate the path of a trace, and return it, or ``None`` for no trace.

    Raises:
        ConfigurationError: If the path does not name a JSON file in a writable directory.

    Example:
        >>> _validate_trace_path("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A trace cannot be written to 'trace.txt'. Use a name that ends in .json or .json.gz.
    """
    if trace is None:
        return None
    name = os.fspath(trace) if isinstance(trace, (str, os.PathLike)) else ""
    if not str(name).endswith((".json", ".json.gz")):
        description = describe_file(Path(name)) if name else short_type_name(trace)
        message = f"A trace cannot be written to {description}."
        raise ConfigurationError(message, "Use a name that ends in .json or .json.gz.")
    file = Path(name)
    try:  # torch's profiler fails silently if it cannot write the file.
        with tempfile.TemporaryFile(dir=file.parent):
            writable = os.access(file, os.W_OK) if file.exists() else True
    except OSError:
        writable = False
    if file.is_dir() or not writable:
        message = f"{describe_file(file)} cannot be written there."
        raise ConfigurationError(message, "Create the directory, or use another directory.")
    return file


def _run_profile(  # noqa: PLR0913, PLR0917 - the validated options of profile()
    workload: Workload,
    device: str,
    steps: int,
    trace: Path | None,
    signposts: bool,
    capture_name: str | None,
) -> Profile:
    """Profile a workload."""
    from .profile_watch import MAX_TRACED_STEPS, measure_launch_seconds, profile_operators, trace_steps

    def notify_stage(stage: int) -> None:
        SESSION.notify(ProgressEvent("Profiling", workload.name, stage, NUM_STAGES, "stage"))

    notify_stage(0)
    parsed_device = get_device(device)
    with workload.open_batches() as batches:
        batch = next(batches)
        for _ in range(WARM_UP_STEPS):
            workload.time_steps(batches)
        workload.reach_steady_state(batches)
        notify_stage(1)
        step_seconds = repeat_measurement(partial(workload.time_steps, batches), steps)
        workload.reach_steady_state(batches)
        notify_stage(2)
        phase_times = workload.measure_phase_times(batches, steps)
        workload.drain_prefetched(batches)
        notify_stage(3)
        data_seconds = repeat_measurement(partial(time_call, partial(next, batches)), steps)
        compute_seconds = repeat_measurement(partial(workload.time_step, batch), steps)
        seconds_per_launch = measure_launch_seconds(device)
        notify_stage(4)
        with profilers.signposts() if signposts else contextlib.nullcontext():
            operators = profile_operators(workload, batches, steps, trace)
        if capture_name is not None:
            with profilers.metal_capture(capture_name):
                workload.run(batch)
        notify_stage(5)
        step_trace = trace_steps(workload, batches)
    notify_stage(NUM_STAGES)
    records_kernels = parsed_device.profiler_times_kernels
    return Profile(
        **workload.report_fields,
        device=device,
        rows=workload.rows,
        steps=steps,
        seconds=statistics.median(step_seconds),
        phase_times=phase_times,
        data_only=workload.average(data_seconds),
        compute_only=statistics.median(compute_seconds),
        operators=operators[:MAX_OPERATORS],
        operators_per_step=step_trace.operators_per_step,
        device_seconds=sum(time.device_seconds or 0.0 for time in operators) if records_kernels else None,
        synchronizations=step_trace.synchronizations,
        fallbacks=step_trace.fallbacks,
        fallbacks_per_step=sum(fallback.count for fallback in step_trace.fallbacks) / MAX_TRACED_STEPS,
        batch_tokens=workload.batch_tokens,
        operator_seconds=None
        if parsed_device.is_accelerator
        else sum(time.seconds for time in operators if time.phase != DATA),
        launch_seconds=None if records_kernels else step_trace.operators_per_step * seconds_per_launch,
        created_at=utc_timestamp(),
    )
