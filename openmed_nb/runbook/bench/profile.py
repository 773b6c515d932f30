"""``nb.runbook.profile``: time per phase and operator of a few steps, their bottlenecks, and the comparison of two profiles."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path

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
from ..._render.drawing import Bar, Chart
from ..._utils.clock import time_call
from ..._utils.plain import read_json_file, save_text, to_json, utc_timestamp
from ..._utils.text import describe_file, short_type_name
from ..._utils.validation import check_bool, check_integer, check_optional_integer, check_path
from ...devices import profilers
from ...devices.registry import get_device
from ...devices.system_status import BackgroundLoadReader
from ...errors import ConfigurationError
from ...session import SESSION, check_options
from .fallbacks import Fallback, fallbacks
from .timing import (
    DATA,
    MAX_DATA_FRACTION,
    Disturbance,
    OperatorTime,
    PhaseTimes,
    Synchronization,
    WaitReason,
    find_disturbance,
    repeat_measurement,
)
from .workloads import CUSTOM_STEP, StepReport, Workload, build_benchmarks, make_target

# Names of the findings.
DATA_FINDING = "data"
SYNCHRONIZATION = "synchronization"
TINY_BATCH = "tiny batch"
FALLBACK = "fallback"

# A batch is tiny if launch overhead takes more than this fraction of a step.
#
# If torch's profiler records kernels, launch overhead is the time in which none runs. Measured on an H200 with BERT-base and rows
# of 128 tokens, forward passes cross the threshold at 1 or 2 rows, and training steps at about 8 rows. Below it, twice the rows
# took no more time.
#
# Otherwise, it is the number of operators times the measured time of an operator on single numbers, which is 25 to 110
# microseconds on MPS (pytorch#82707), and 3 to 7 on one CPU. On an H200, this fraction was above the threshold in all 77 cases in
# which the kernels ran for less than half of a step, and in 8 of 12 other cases.
MAX_LAUNCH_FRACTION = 0.5

# Remedies for a wait, by its reason.
WAIT_REMEDIES: Mapping[WaitReason, str] = {
    "read": "Accumulate the values on the device, and read them only every few steps.",
    "copy": "Copy the tensor together with the batch before the step computes, or create it on the device.",
}

NOT_MEASURED = "not measured, because the times are not reliable"
MAX_LOCATIONS = 3  # Locations in a finding.
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
        launch_seconds: Launch overhead of the operators per step in seconds.
        synchronizations: Calls in a step that wait for the device, except the calls of this package and of library models.
        fallbacks: Operators that fell back from MPS to the CPU.
        fallbacks_per_step: Number of fallbacks to the CPU per step.
        batch_tokens: Maximum number of tokens per batch on the device, or ``None`` if no texts were annotated.
        created_at: Time of the measurement in UTC, such as ``"2026-11-01T12:00:00Z"``.
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
    launch_seconds: float = 0.0
    synchronizations: tuple[Synchronization, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    fallbacks_per_step: float = 0.0
    batch_tokens: int | None = None
    created_at: str = field(default_factory=utc_timestamp)

    COMMAND = "nb.runbook.profile(model)"
    SCHEMA = "openmed_nb/profile/1"
    JSON_PROPERTIES = ("launch_fraction", "fallback_fraction", "findings", "bottlenecks")

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Fraction of a step per phase, in [0, 1]."""
        return self.phase_times.fractions

    @property
    def launch_fraction(self) -> float:
        """Fraction of a step that is launch overhead, without data, in [0, 1]."""
        return min(1.0, self.launch_seconds / self.compute_only)

    @property
    def fallback_fraction(self) -> float:
        """Fraction of the operator calls that fall back to the CPU, in [0, 1]."""
        return min(1.0, self.fallbacks_per_step / self.operators_per_step) if self.operators_per_step else 0.0

    @property
    def operator_times(self) -> dict[str, float]:
        """Seconds per step of each operator over all phases, the slowest first: GPU times if they are recorded."""
        seconds: dict[str, float] = {}
        for time in self.operators:
            own_seconds = time.seconds if time.device_seconds is None else time.device_seconds
            seconds[time.operator] = seconds.get(time.operator, 0.0) + own_seconds
        return dict(sorted(seconds.items(), key=itemgetter(1), reverse=True))

    @property
    def hotspots(self) -> tuple[str, ...]:
        """Names of the slowest operators, the slowest first."""
        return tuple(self.operator_times)[:NUM_HOTSPOTS]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings named ``"data"``, ``"synchronization"``, ``"tiny batch"`` and ``"fallback"``."""
        data = Finding(DATA_FINDING, OK, "data are ready in time")
        if self.phase_fractions.get(DATA, 0.0) > MAX_DATA_FRACTION:
            data = Finding(DATA_FINDING, WARNING, "steps wait for their data", self.data_remedy)
        tiny_batch = self._tiny_batch_finding()
        if self.disturbance:
            data, tiny_batch = (Finding(name, NOT_APPLICABLE, NOT_MEASURED) for name in (DATA_FINDING, TINY_BATCH))
        findings = (data, self._synchronization_finding(), tiny_batch, self._fallback_finding())
        if not self.disturbance:
            return findings
        # A result "ok" would read like a result of the times.
        return tuple(replace(each, status=NOT_APPLICABLE) if each.status == OK else each for each in findings)

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
        return read_json_file(cls, path, "a profile of nb.runbook.profile()", remedy)

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
            raise ConfigurationError(
                f"A profile cannot be compared with {short_type_name(other)}.",
                "Pass a profile from nb.runbook.profile() or Profile.read().",
            )
        return ProfileDiff(*sorted((self, other), key=attrgetter("created_at")))

    def to_report(self) -> Report:
        """Return a report with the bottlenecks and the measurements."""
        title = f"Profile of {self.name} ({self.task}) on {self.device_label(self.device)}"
        step_time = self.not_measured or f"A step takes {format_milliseconds(self.seconds)}."
        waits = tuple((wait.call, wait.place, f"{wait.count:g}") for wait in self.synchronizations)
        # Metrics of a step.
        times = self.phase_times
        metrics = (
            ("step at full speed", format_milliseconds(self.seconds)),
            ("data only", format_milliseconds(self.data_only)),
            ("first batch repeated, without loading it", format_milliseconds(self.compute_only)),
            *((f"phase {name}, timed in other steps", times.format_phase(name)) for name in times.seconds),
            ("operators per step, without views and nested calls", f"{self.operators_per_step:g}"),
            ("launch overhead", f"{format_milliseconds(self.launch_seconds)} ({format_percent(self.launch_fraction)})"),
        )
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
        # Phases, one after the other.
        bars = []
        start = 0.0
        for name, seconds in times.waiting_seconds.items():
            bars.append(Bar(name, seconds, times.format_phase(name), start, emphasized=name == times.dominant_phase))
            start += seconds
        return Report(
            title,
            (step_time, f"{pluralize(self.steps, 'step')} of {pluralize(self.rows, 'row')}{self.rows_source}."),
            (
                findings_table("", self.findings),
                Table("Calls that wait for the device", ("call", "location", "calls per step"), waits),
            ),
            metrics=self.select_reliable(
                Table("Time of a step", ("metric", "value"), metrics, collapsed=True),
                Table("Operators by self time", operator_columns, operator_rows, collapsed=True),
            ),
            charts=self.select_reliable(Chart("Time per phase, from the start to the end of a step", tuple(bars))),
            status=self.reliability_status,
        )

    def _synchronization_finding(self) -> Finding:
        waits = self.synchronizations
        if not waits:
            return Finding(SYNCHRONIZATION, OK, "no line of the step waits for the device")
        locations = ", ".join(map(str, waits[:MAX_LOCATIONS]))
        if len(waits) > MAX_LOCATIONS:
            locations += f", and {pluralize(len(waits) - MAX_LOCATIONS, 'other')}"
        if not get_device(self.device).is_accelerator:
            evidence = f"the CPU does not wait; on a GPU, these calls would: {locations}"
            return Finding(SYNCHRONIZATION, NOT_APPLICABLE, evidence)
        remedy = WAIT_REMEDIES[waits[0].reason]
        return Finding(SYNCHRONIZATION, WARNING, f"these calls wait for the device: {locations}", remedy)

    def _tiny_batch_finding(self) -> Finding:
        """Return the finding on whether most of a step is launch overhead."""
        if self.simulated and get_device(self.device).can_be_simulated:
            return Finding(TINY_BATCH, NOT_APPLICABLE, "a simulated device launches no kernels")
        if self.launch_fraction > MAX_LAUNCH_FRACTION:
            remedy = "Use a larger batch; nb.sweep() finds the best batch size."
            return Finding(TINY_BATCH, WARNING, "most of a step is launch overhead", remedy)
        if self.task == CUSTOM_STEP and not get_device(self.device).profiler_times_kernels:
            return Finding(TINY_BATCH, NOT_APPLICABLE, "not known, because the step may spend its time in Python code")
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
MIN_STOPPING_DAYS = 7  # The stopping rule applies if a step is no faster after this many days.
MIN_CHANGE_FRACTION = 0.1  # Smaller changes also occur from run to run.
# Fields in which two profiles must agree to be comparable.
COMPARABLE_FIELDS = ("name", "task", "device", "dtype", "rows", "row_shape", "batch_tokens", "workers", "simulated")
STOPPING_REMEDY = (
    "Stop optimizing. Move this workload, or accept the step time; "
    "print(nb.verdict(...).lanes) compares CPU, MPS, MLX (not measured here) and a remote pool."
)
# Names of the findings of a comparison.
SAME_WORKLOAD = "same workload"
STEP_TIME = "step time"
STOPPING_RULE = "stopping rule"


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
    JSON_PROPERTIES = ("days", "differences", "progress", "should_stop", "findings", "status", "simulated")
    SIMULATION_MARKERS = StepReport.SIMULATION_MARKERS

    @property
    def simulated(self) -> bool:
        """Whether one of the profiles was measured on a simulated device."""
        return self.first.simulated or self.second.simulated

    @property
    def days(self) -> int:
        """Number of full days between the profiles."""
        first, second = (
            datetime.fromisoformat(profile.created_at.replace("Z", "+00:00")) for profile in (self.first, self.second)
        )
        return (second - first).days

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields that make the times incomparable; empty if the workload is the same."""
        return tuple(name for name in COMPARABLE_FIELDS if getattr(self.first, name) != getattr(self.second, name))

    @property
    def _disturbance(self) -> Disturbance | None:
        return self.first.disturbance or self.second.disturbance

    @property
    def progress(self) -> float | None:
        """Relative reduction of the step time, negative if a step is slower, or ``None`` if the times are not comparable."""
        return None if self._disturbance or self.differences else 1 - self.second.seconds / self.first.seconds

    @property
    def should_stop(self) -> bool:
        """Whether the stopping rule applies: the slowest operators and the step time are unchanged after a week or more."""
        return self.findings[-1].name == STOPPING_RULE and self.findings[-1].status == WARNING

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on the workload, on the time of the step, and on the stopping rule."""
        if self._disturbance:
            evidence = f"not comparable: {self._disturbance}"
            return (Finding(STEP_TIME, WARNING, evidence, self._disturbance.remedy),)
        if self.progress is None:
            remedy = "Profile the same model again, with the same batch on the same device."
            evidence = f"different {', '.join(self.differences)}; times are not comparable"
            return (Finding(SAME_WORKLOAD, WARNING, evidence, remedy),)
        same_workload = Finding(SAME_WORKLOAD, OK, "model, batch and device are the same")
        is_faster = self.progress > MIN_CHANGE_FRACTION
        step_time = Finding(STEP_TIME, OK, "a step is faster" if is_faster else "a step takes as long as before")
        if self.progress < -MIN_CHANGE_FRACTION:
            remedy = "Check nb.system_status(), and list the changes with nb.logbook(...).diff(...)."
            step_time = Finding(STEP_TIME, WARNING, "a step is slower", remedy)
        return same_workload, step_time, self._stopping_finding(is_faster)

    @property
    def status(self) -> str:
        """Worst status of the findings."""
        return worst_status(self.findings)

    def _stopping_finding(self, is_faster: bool) -> Finding:
        hotspots = self.second.hotspots
        operators = ", ".join(hotspots)
        if set(hotspots) != set(self.first.hotspots):
            return Finding(STOPPING_RULE, OK, f"the slowest operators changed to {operators}")
        if is_faster:
            return Finding(STOPPING_RULE, OK, "the slowest operators are the same, and a step is faster")
        if self.days < MIN_STOPPING_DAYS:
            evidence = "the slowest operators are the same, less than a week apart"
            return Finding(STOPPING_RULE, NOT_APPLICABLE, evidence)
        evidence = f"the slowest operators are the same after {self.days} days, and a step is no faster: {operators}"
        return Finding(STOPPING_RULE, WARNING, evidence, STOPPING_REMEDY)

    def to_report(self) -> Report:
        """Return a report with the findings and the times."""
        interval = f"{pluralize(self.days, 'day')} apart"
        result = "not comparable" if self.progress is None else self.findings[1].evidence
        if self.should_stop:
            result = "stop optimizing"
        times = [
            {"step at full speed": profile.seconds, **profile.operator_times} for profile in (self.first, self.second)
        ]
        rows = tuple(
            (name, *(f"{1000 * seconds.get(name, 0.0):.3f}" for seconds in times)) for name in {**times[1], **times[0]}
        )
        table = Table("Time of a step", ("operator", "ms before", "ms after"), rows[:MAX_TABLE_OPERATORS])
        later = self.second
        return Report(
            f"Two profiles of {later.name} ({later.task}) on {later.device_label(later.device)}, {interval}: {result}",
            tables=(findings_table("", self.findings),),
            metrics=() if self.progress is None else (table,),
            status=self.status,
        )


MAX_OPERATORS = 30  # Number of operators that a profile stores.
DEFAULT_STEPS = 50
WARM_UP_STEPS = 5


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
            are shorter, and those on a busy computer have one step.
        training: Whether to profile training steps (forward, backward and AdamW) on a copy of the model.
        device: Device to profile. If ``None``, use the active device.
        batch_size: Number of texts or rows per step. If ``None``, use at least 32 texts, or the number of rows of the example
            or the loader. Texts run on a device in batches of tokens. A given ``batch_size`` allows 128 tokens for each of
            its texts, as :func:`sweep` measures. Otherwise, the batch size of :func:`annotate` applies, which a sweep stores.
            The result reports it as ``batch_tokens``.
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

    Calls that wait, such as ``.item()``, ``.cpu()`` or printing a tensor, are reported with the line of your code. Calls inside the
    model of a library are not reported. A copy to the device waits for all work that was launched there
    (``MPSStream::copy_and_sync`` in torch, ``memcpy_and_sync`` on CUDA). The copy of the batch before a step computes is not
    reported. On the CPU nothing waits, and the lines that would wait on a GPU are
    reported. torch's profiler does not record kernels of MPS; operator times are host times there. Functions from
    ``torch.compile`` are traced uncompiled. Hooks of your model run in its copy.

    Example:
        >>> import torch
        >>> result = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
        >>> [finding.name for finding in result.findings], result.operators_per_step
        (['data', 'synchronization', 'tiny batch', 'fallback'], 1.0)
    """
    check_options(profile, arguments)
    check_bool("signposts", signposts)
    steps = check_integer("steps", steps)
    batch_size = check_optional_integer("batch_size", batch_size)
    trace_path = None if trace is None else _validate_trace_path(trace)
    capture_name = None if metal_capture is None else profilers.capture_name(metal_capture)
    with SESSION.operation():
        target, device_name = make_target(model, data, training=training, device=device, arguments=arguments)
        profilers.check_profiling(device_name, signposts, capture_name)
        with build_benchmarks(target, [device_name]) as benchmarks:
            workload = benchmarks[device_name].data_workload(batch_size)
            return _run_profile(workload, device_name, steps, trace_path, signposts, capture_name)


def _validate_trace_path(trace: str | os.PathLike[str]) -> Path:
    """Validate the path of a trace, and return it.

    Raises:
        ConfigurationError: If the path does not name a JSON file in a directory that exists.

    Example:
        >>> _validate_trace_path("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A trace cannot be written to 'trace.txt'. \
Use a name that ends in .json or .json.gz, in a directory that exists.
    """
    file = check_path(trace, "the trace")
    if not (file.name.endswith((".json", ".json.gz")) and file.parent.is_dir()):
        raise ConfigurationError(
            f"A trace cannot be written to {describe_file(file)}.",
            "Use a name that ends in .json or .json.gz, in a directory that exists.",
        )
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

    SESSION.notify(ProgressEvent("Profiling", workload.name))
    disturbance = find_disturbance(own=workload.persistent_workers)
    if disturbance:
        steps = 1
    read_load = BackgroundLoadReader(workload.persistent_workers)
    parsed_device = get_device(device)
    with workload.open_batches() as batches:
        batch = next(batches)
        for _ in range(WARM_UP_STEPS):
            workload.time_steps(batches)
        workload.discard_prefetched(batches)
        step_seconds = repeat_measurement(partial(workload.time_steps, batches), steps)
        phase_times = workload.measure_phase_times(batches, steps)
        workload.discard_prefetched(batches)
        data_seconds = repeat_measurement(partial(time_call, partial(next, batches)), steps)
        compute_seconds = repeat_measurement(partial(workload.time_step, batch), steps)
        with profilers.signposts() if signposts else contextlib.nullcontext():
            operators = profile_operators(workload, batches, steps, trace)
        if capture_name is not None:
            with profilers.metal_capture(capture_name):
                workload.run(batch)
        with fallbacks() if parsed_device.has_fallbacks else contextlib.nullcontext() as log:
            step_trace = trace_steps(workload, batches)
    entries = () if log is None else log.entries
    compute_only = statistics.median(compute_seconds)
    if parsed_device.profiler_times_kernels:
        launch_seconds = max(0.0, compute_only - sum(time.device_seconds or 0.0 for time in operators))
    else:
        launch_seconds = step_trace.operators_per_step * measure_launch_seconds(device)
    return Profile(
        **workload.report_fields,
        device=device,
        rows=workload.rows,
        steps=steps,
        seconds=statistics.median(step_seconds),
        phase_times=phase_times,
        data_only=workload.average(data_seconds),
        compute_only=compute_only,
        operators=operators[:MAX_OPERATORS],
        operators_per_step=step_trace.operators_per_step,
        launch_seconds=launch_seconds,
        synchronizations=step_trace.synchronizations,
        fallbacks=entries,
        fallbacks_per_step=sum(entry.count for entry in entries) / MAX_TRACED_STEPS,
        batch_tokens=workload.batch_tokens,
        disturbance=disturbance or find_disturbance(read_load()),
    )
