"""``nb.compare``: measure the same workload on several devices in interleaved rounds."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..._events.activity import ProgressEvent
from ..._render.display import (
    NOT_APPLICABLE,
    OK,
    WARNING,
    Finding,
    JsonMixin,
    Report,
    Table,
    findings_table,
    format_percent,
    pluralize,
)
from ..._render.drawing import Bar, Chart
from ..._utils.clock import current_time
from ..._utils.text import describe_value
from ..._utils.validation import check_number, check_optional_integer
from ...devices.registry import get_device
from ...devices.request import normalize_device
from ...devices.system_status import BackgroundLoadReader, UtilizationReader, make_utilization_reader
from ...errors import ConfigurationError, DeviceUnavailableError
from ...session import SESSION, check_options
from .timing import (
    MIN_VALUES,
    TRANSFER,
    Disturbance,
    MedianInterval,
    PhaseTimes,
    find_disturbance,
    format_rate,
    interleave,
    limit_rounds,
    median_interval,
)
from .workloads import (
    ANNOTATION,
    BATCHES_PER_WORKER,
    AnnotationBenchmark,
    StepReport,
    Workload,
    build_benchmarks,
    make_target,
)

CPU = "cpu"

LARGER_BATCH_REMEDY = "Use a larger batch; nb.sweep() finds the best batch size."

# Minimum gain in speed over the CPU that justifies a second device (source: the runbook).
MIN_SPEEDUP_GAIN = 0.22
SECONDS_PER_HOUR = 3600
# Condition of a speedup in annotation: for the CPU alone, ``annotate`` plans smaller batches, which are faster there.
GPU_BATCHES = ", with batches planned for the GPU"
# Maximum ratio of the ends of the interval of a step. Steps of texts vary with the lengths of the texts.
MAX_INTERVAL_RATIO = 2
# Approximate minimum number of tokens of the texts of a step. ``annotate`` sorts at least 16,384 tokens by length before it plans
# batches. Batches of 32 notes had 6% more padding, and the bundled model annotated 10% to 25% fewer notes (one core).
MIN_STEP_TOKENS = 4096

# Seconds between two readings of the utilization. Each reading runs a command whose cost is not work of the device.
SAMPLE_INTERVAL = 0.5
# Minimum number of readings for a mean utilization. Single readings vary too much.
MIN_SAMPLES = 5


def describe_cpu_speed(task: str, rows_per_second: float, low: float, high: float) -> str:
    """Return the speed of the CPU per hour as a sentence. With fewer digits, a narrow interval would be one number.

    Args:
        task: Task of the steps; ``"annotation"`` counts notes, any other task counts rows.
        rows_per_second: Throughput in notes or rows per second.
        low: Lower end of its confidence interval.
        high: Upper end of its confidence interval.

    Example:
        >>> describe_cpu_speed("annotation", 50.0, 48.0, 53.0)
        'The CPU annotates about 180,000 notes like these per hour (173,000 to 191,000).'
    """
    work = "annotates about {} notes" if task == ANNOTATION else "processes about {} rows"
    rates = [f"{float(f'{SECONDS_PER_HOUR * rate:.3g}'):,.0f}" for rate in (rows_per_second, low, high)]
    return f"The CPU {work.format(rates[0])} like these per hour ({rates[1]} to {rates[2]})."


@dataclass(frozen=True)
class DeviceMetrics(JsonMixin):
    """Measurements on one device.

    Attributes:
        device: Name of the device.
        seconds: Median duration of a step at full speed in seconds, including its data.
        rows: Number of texts or rows per step.
        phase_times: Time per phase, measured with a synchronization after each phase.
        speedup: Speed relative to the CPU with its confidence interval; 1.22 is 22% faster. ``None`` for the CPU itself, and for
            a simulated device, which computes on the CPU.
        utilization: Utilization of the device by the workload, in [0, 1] and without idle load, or ``None`` if it is unknown.
        throughput: Texts or rows per second with the confidence interval, or ``None`` if the interval is unknown.
    """

    device: str
    seconds: float
    rows: int
    phase_times: PhaseTimes
    speedup: MedianInterval | None = None
    utilization: float | None = None
    throughput: MedianInterval | None = None

    JSON_PROPERTIES = ("rows_per_second",)

    @property
    def rows_per_second(self) -> float:
        """Throughput in texts or rows per second."""
        return self.rows / self.seconds

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Fraction of a step per phase, in [0, 1]."""
        return self.phase_times.fractions


@dataclass(frozen=True, repr=False)
class Comparison(StepReport):
    """Measurements of the same workload on the CPU and on other devices, in interleaved rounds of one run.

    It also has the attributes ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated``.

    Attributes:
        devices: Measurements per device, the CPU first.
        rounds: Number of interleaved rounds.
        batch_tokens: Maximum number of tokens per batch, or ``None`` if no texts were annotated.
    """

    devices: tuple[DeviceMetrics, ...]
    rounds: int
    batch_tokens: int | None = None

    COMMAND = "nb.compare(model, texts)"
    SCHEMA = "openmed_nb/comparison/1"
    JSON_PROPERTIES = ("findings",)

    def for_device(self, device: str) -> DeviceMetrics:
        """Return the measurements on a device.

        Raises:
            ConfigurationError: If the device was not compared.
        """
        for metrics in self.devices:
            if normalize_device(metrics.device) == normalize_device(device):
                return metrics
        names = ", ".join(metrics.device for metrics in self.devices)
        raise ConfigurationError(f"{describe_value(device)} was not compared.", f"Use one of {names}.")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on the speed of each device and on the phases; none if the times are not reliable."""
        if self.disturbance:
            return ()
        findings = [self._speed_finding(metrics) for metrics in self.devices[1:]]
        for metrics in self.devices:
            finding = metrics.phase_times.finding(f"time on {self.device_label(metrics.device)}", self.data_remedy)
            # The CPU copies nothing: if "transfer" dominates there, all other phases are even shorter.
            if metrics.device == CPU and metrics.phase_times.dominant_phase == TRANSFER:
                finding = Finding(finding.name, OK, "the workload is too small to measure")
            findings.append(finding)
        return tuple(findings)

    def _speed_finding(self, metrics: DeviceMetrics) -> Finding:
        """Return the finding on the speed of a device relative to the CPU."""
        name = f"speed on {self.device_label(metrics.device)}"
        speedup = metrics.speedup
        if speedup is None:
            return Finding(name, NOT_APPLICABLE, "a simulated device computes on the CPU")
        ratio = f"{speedup.median:.2f} times as fast as the CPU ({speedup.low:.2f} to {speedup.high:.2f})"
        if self.batch_tokens:
            ratio += GPU_BATCHES
        if speedup.low > 1:
            return Finding(name, OK, ratio)
        if speedup.high < 1:
            return Finding(name, WARNING, ratio, f"{LARGER_BATCH_REMEDY} Otherwise use the CPU.")
        return Finding(
            name,
            WARNING,
            f"no significant difference: {ratio}",
            f"{LARGER_BATCH_REMEDY} More seconds can show smaller differences.",
        )

    def to_report(self) -> Report:
        """Return a report with the speed, the findings and the measurements."""
        names = [self.device_label(metrics.device) for metrics in self.devices]
        subject = f"{self.name} ({self.task}) on {' and '.join(names)}"
        speed_rows = tuple(
            (
                self.device_label(metrics.device),
                f"{1000 * metrics.seconds:.2f}",
                str(metrics.throughput or format_rate(metrics.rows_per_second)),
                str(metrics.speedup or ""),
                "" if metrics.utilization is None else format_percent(metrics.utilization),
            )
            for metrics in self.devices
        )
        columns = ("device", "ms per step", "rows per second", "speedup over the CPU", "utilization")
        speeds = Table("Speed", columns, speed_rows, collapsed=True)
        phase_names = dict.fromkeys(name for metrics in self.devices for name in metrics.phase_times.seconds)
        phase_rows = tuple(
            (name, *(metrics.phase_times.format_phase(name) for metrics in self.devices)) for name in phase_names
        )
        phases = Table("Time per phase, timed in other steps", ("phase", *names), phase_rows, collapsed=True)
        bars = tuple(
            Bar(
                self.device_label(metrics.device),
                metrics.rows_per_second,
                f"{format_rate(metrics.rows_per_second)} rows/s",
            )
            for metrics in self.devices
        )
        # A bar of a single device shows nothing.
        chart = Chart("Throughput", bars if len(bars) > 1 else ())
        answer = self.not_measured
        speed = self.devices[0].throughput
        if speed and len(bars) == 1 and not answer:
            sentence = describe_cpu_speed(self.task, speed.median, speed.low, speed.high)
            answer = f"{sentence} Only the CPU was measured."
        rows = f"{pluralize(self.devices[0].rows, 'row')} per step{self.rows_source}, in interleaved rounds."
        return Report(
            f"Comparison of {subject}{': not measured' if self.disturbance else ''}",
            tuple(filter(None, (answer, rows))),
            (findings_table("", self.findings),),
            metrics=self.select_reliable(speeds, phases),
            charts=self.select_reliable(chart),
            status=self.reliability_status,
        )


DEFAULT_ROUNDS = 20  # In DEFAULT_SECONDS, and in proportion for another time budget. 20 rounds give an interval with a confidence of 95.9%.
# Number of untimed steps at the start. The first step compiles, fills caches and starts loader workers.
WARM_UP_STEPS = 3
PHASE_STEPS = 10  # Maximum number of steps that are measured phase by phase; slow steps are repeated less often.
MIN_TRIAL_SECONDS = 0.02  # A trial repeats a quick step until it takes this long.
MAX_TRIAL_SECONDS = 0.5  # A trial does not repeat steps beyond this duration.
DEFAULT_SECONDS = 30.0
# Fraction of the time budget after which no further round starts. The rest is for the phases and the utilization.
TRIAL_TIME_FRACTION = 0.4
UTILIZATION_SECONDS = (
    4.0  # Duration of the sampling per device, before and during its work: enough for MIN_SAMPLES readings.
)


def compare(  # noqa: PLR0913 - each parameter is an independent option of the public function
    model: object = None,
    data: object = None,
    *,
    devices: object = None,
    training: bool = False,
    batch_size: int | None = None,
    seconds: float = DEFAULT_SECONDS,
    **arguments: object,
) -> Comparison:
    """Measure the same workload on several devices and compare their speed with the CPU.

    All devices run in interleaved rounds at full speed, including data loading. The speedup is the median of the ratios to
    the CPU over all rounds, with a nonparametric confidence interval. Afterwards, steps are timed phase by phase. Finally,
    each device works continuously while its utilization is sampled. On a GPU, :func:`annotate` tokenizes while the GPU
    computes. There, the data phase counts only as far as it takes longer than the forward pass.

    Args:
        model: Name of a model, a pipeline from :func:`load_pipeline`, a torch module, or a custom step function. The
            function computes on the device of the tensors in its batch. If ``None``, use the bundled model.
        data: Texts for a name or a pipeline. Example inputs or a ``DataLoader`` for a module or for training. Batches for a
            function, which are moved to each device, or a function that builds a batch with a given number of rows. If
            ``None``, use synthetic texts.
        devices: Devices to compare with the CPU, which is always included. If ``None``, use all usable devices.
        training: Whether to compare training steps (forward, backward and AdamW) on copies of the model.
        batch_size: Number of texts or rows per step. If ``None``, use at least 32 texts with about 4,096 tokens, from
            which batches are planned nearly as :func:`annotate` plans them, or the number of rows of the example or the
            loader. Texts run in batches of tokens that are the same on every device and are planned for the first
            accelerator. A given ``batch_size`` allows 128 tokens for each of its texts, as :func:`sweep` measures.
            Otherwise, the batch size of :func:`annotate` on that accelerator applies, which a sweep stores. The result reports
            it as ``batch_tokens``.
        seconds: Approximate time budget of the call in seconds. It sets the number of interleaved rounds: 20 in 30
            seconds, at least 6. Slow workloads run fewer. The utilization is sampled for 4 seconds before and during the
            work of each device if there is time for that.
        arguments: Arguments of :func:`openmed_nb.load_model` for a model name, such as ``revision``.

    Returns:
        The comparison. ``for_device("mps")`` has ``speedup`` with ``low``, ``median`` and ``high`` (1.22 is 22% faster). It
        also has ``seconds``, ``rows_per_second``, ``phase_fractions`` and
        ``phase_times.dominant_phase``. Its ``utilization`` is in [0, 1] without idle load, or ``None`` if it cannot be read.
        ``findings`` describes the results. If only the CPU was measured, the text states its notes or rows per hour. If the
        computer is busy or hot, or if the times vary too much, ``disturbance`` is the reason. The text and the page then show
        no times, and a verdict treats them as not measured.

    Raises:
        ConfigurationError: If the data or a number is invalid.
        ModelError: If the model cannot be loaded.
        DeviceError: If a device is unavailable or a batch does not fit in its memory.

    A CPU alone is planned smaller batches of texts, with less padding, than MPS or CUDA. With them, the bundled model is 1.3
    to 1.4 times faster on the CPU than with the batches for MPS (notes and sentences, one core).

    Models are loaded for the comparison and released afterwards. The session, your model and the random number generators are
    not changed. Hooks of your model run in its copies. The utilization covers all processes. It is read once
    a second from ``ioreg`` on a Mac, from ``nvidia-smi`` on CUDA, and from psutil for the CPU. It is not read while MPS is
    simulated.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(8, 8)
        >>> comparison = compare(model, torch.ones(2, 8), devices="cpu", seconds=1)
        >>> list(comparison.for_device("cpu").phase_fractions), comparison.for_device("cpu").speedup is None
        (['data', 'transfer', 'forward'], True)
        >>> compare(torch.linalg.inv, [torch.eye(8)], devices="cpu", seconds=1).task
        'own step'
    """
    check_options(compare, arguments)
    start = current_time()
    batch_size = check_optional_integer("batch_size", batch_size)
    seconds = check_number("seconds", seconds, above=0, example=f"{DEFAULT_SECONDS:g}")
    with SESSION.operation():
        if "device" in arguments:
            raise ConfigurationError(
                f"compare() has no option device={describe_value(arguments['device'])}.",
                f"Pass devices=, a list with names of usable devices: {', '.join(_list_usable())}.",
            )
        target, device = make_target(model, data, training=training, arguments=arguments, moved=True)
        requested: Iterable[object] = (devices,)
        if devices is None:
            requested = (device, *_list_usable())
        elif isinstance(devices, Iterable) and not isinstance(devices, str):
            requested = devices
        # The CPU is the baseline. Each other device is compared once.
        unique_names = {CPU: CPU}
        for request in requested:
            # A GPU that was not tried before may fail its first check.
            with contextlib.suppress(DeviceUnavailableError) if devices is None else contextlib.nullcontext():
                name = SESSION.device(request).device
                unique_names.setdefault(normalize_device(name), name)
        names = tuple(unique_names.values())
        with build_benchmarks(target, names) as benchmarks:
            # Texts run in the same batches on every device, which are planned for the first accelerator.
            reference = next((benchmarks[name] for name in names if get_device(name).is_accelerator), benchmarks[CPU])
            for name, benchmark in benchmarks.items():
                if isinstance(reference, AnnotationBenchmark) and isinstance(benchmark, AnnotationBenchmark):
                    budget = reference.annotator.budget
                    annotator = replace(benchmark.annotator, budget=budget)
                    benchmarks[name] = replace(
                        benchmark, annotator=annotator, step_tokens=max(MIN_STEP_TOKENS, budget.max_tokens)
                    )
            workloads = {name: benchmark.data_workload(batch_size) for name, benchmark in benchmarks.items()}
            rounds = max(MIN_VALUES, round(DEFAULT_ROUNDS * seconds / DEFAULT_SECONDS))
            return _run_comparison(workloads, rounds, start + seconds)


def _list_usable() -> list[str]:
    """Return the names of the usable devices. Listing them probes each device."""
    return [choice.device for choice in SESSION.list_devices().devices if choice.usable is not False]


def _run_comparison(workloads: Mapping[str, Workload], rounds: int, deadline: float) -> Comparison:
    """Measure workloads: interleaved rounds, then phases, then the utilization of each device.

    The measurement ends at about ``deadline``, a time of the clock. It ends after one step per device on a busy or hot computer,
    where a step can take ten times as long.
    """
    baseline = workloads[CPU]
    own = baseline.persistent_workers  # All devices have the same loader.
    read_load = BackgroundLoadReader(own)
    disturbance = find_disturbance(own=own)
    if not disturbance:
        trials_deadline = current_time() + TRIAL_TIME_FRACTION * (deadline - current_time())
        trials = _time_interleaved(workloads, rounds, limit_rounds(read_load, trials_deadline))
        # Rounds are missing only if other programs slowed them down.
        disturbance = find_disturbance(read_load(), 1.0 if len(trials[CPU]) >= MIN_VALUES else 0.0)
    if disturbance:
        steps = []  # A single step of each device, phase by phase.
        for name, workload in workloads.items():
            with workload.open_batches() as batches:
                times = PhaseTimes(workload.time_phases(batches))
            steps.append(DeviceMetrics(name, sum(times.seconds.values()), workload.rows, times))
        return Comparison(
            **baseline.report_fields,
            devices=tuple(steps),
            rounds=0,
            batch_tokens=baseline.batch_tokens,
            disturbance=disturbance,
        )
    # Phases are timed in consecutive steps, as loaders that prefetch need them.
    phase_times = {}
    for name in SESSION.track("Comparing", f"{baseline.name}, phase by phase", workloads, "device"):
        workload = workloads[name]
        with workload.open_batches() as batches:
            _warm_up(workload, batches)
            phase_times[name] = workload.measure_phase_times(batches, PHASE_STEPS)
    utilizations: dict[str, float | None] = {}
    if deadline - current_time() > 2 * UTILIZATION_SECONDS * len(workloads):
        for name in SESSION.track("Comparing", f"{baseline.name}, utilization", workloads, "device"):
            utilizations[name] = _measure_utilization(name, workloads[name])
    SESSION.notify(ProgressEvent("Comparing", baseline.name))
    metrics = tuple(
        _device_metrics(workload, name, trials, phase_times[name], utilizations.get(name))
        for name, workload in workloads.items()
    )
    spread = max(device.throughput.high / device.throughput.low for device in metrics if device.throughput)
    disturbance = find_disturbance(read_load(), varies=spread > MAX_INTERVAL_RATIO)
    for speedup in filter(None, (device.speedup for device in metrics)):
        # Even if the check is off, no device is faster by less than the times vary.
        if not speedup.low <= 1 <= speedup.high and max(speedup.median, 1 / speedup.median) < spread:
            disturbance = disturbance or Disturbance("the times of the same step vary by more than the devices differ")
    return Comparison(
        **baseline.report_fields,
        devices=metrics,
        rounds=len(trials[CPU]),
        batch_tokens=baseline.batch_tokens,
        disturbance=disturbance,
    )


def _device_metrics(
    workload: Workload,
    device: str,
    trials: Mapping[str, Sequence[float]],
    phase_times: PhaseTimes,
    utilization: float | None = None,
) -> DeviceMetrics:
    """Return the measurements on a device; the speedup is the median of the ratios of all rounds."""
    seconds = trials[device]
    step = median_interval(seconds)
    ratios = [cpu_seconds / device_seconds for cpu_seconds, device_seconds in zip(trials[CPU], seconds, strict=True)]
    return DeviceMetrics(
        device,
        step.median,
        workload.rows,
        phase_times,
        None if device == CPU or get_device(device).is_simulated else median_interval(ratios),
        utilization,
        MedianInterval(
            workload.rows / step.high, workload.rows / step.median, workload.rows / step.low, step.confidence
        ),
    )


def _time_interleaved(
    workloads: Mapping[str, Workload], rounds: int, is_over: Callable[[int], bool] = lambda _number: False
) -> dict[str, list[float]]:
    """Return the seconds of a step at full speed per device and round, measured in interleaved rounds.

    ``is_over`` returns whether the run ends before the round with a number. The n-th trial of each device uses the same
    batches if the loader yields them in the same order.
    """
    with contextlib.ExitStack() as stack:
        batches = {device: stack.enter_context(workload.open_batches()) for device, workload in workloads.items()}
        step_seconds = [_warm_up(workload, batches[device]) for device, workload in workloads.items()]
        steps = _steps_per_trial(step_seconds, max(workload.workers for workload in workloads.values()))

        def run_trial(device: str) -> float:
            workloads[device].discard_prefetched(batches[device])
            return workloads[device].time_steps(batches[device], steps)

        suffix = "" if len(workloads) > 1 else ", CPU only"
        tracked_rounds = SESSION.track("Comparing", f"{workloads[CPU].name}{suffix}", range(rounds), "round")
        measures = {device: partial(run_trial, device) for device in workloads}
        return interleave(measures, tracked_rounds, is_over)


def _warm_up(workload: Workload, batches: Iterator[object]) -> float:
    """Run the first steps and return the duration of the last step in seconds."""
    return [workload.time_steps(batches) for _ in range(WARM_UP_STEPS)][-1]


def _steps_per_trial(step_seconds: Collection[float], workers: int) -> int:
    """Return the number of steps per trial.

    Args:
        step_seconds: Duration of a step on each device in seconds.
        workers: Number of loader workers.
    """
    quickest = max(1e-6, min(step_seconds))
    slowest = max(1e-6, *step_seconds)
    steps = min(math.ceil(MIN_TRIAL_SECONDS / quickest), max(1, int(MAX_TRIAL_SECONDS / slowest)))
    return max(steps, BATCHES_PER_WORKER * workers)


def _measure_utilization(device: str, workload: Workload) -> float | None:
    """Return the utilization during a continuous workload minus that directly before it, or ``None`` if it is unknown."""
    manager = SESSION.device_manager
    read = make_utilization_reader(device, manager.machine, manager.run)
    if read is None:
        return None
    with workload.open_batches() as batches:
        idle_samples = _samples_during(partial(time.sleep, SAMPLE_INTERVAL / 10), read, UTILIZATION_SECONDS)
        busy_samples = _samples_during(lambda: workload.run(next(batches)), read, UTILIZATION_SECONDS)
    if min(len(idle_samples), len(busy_samples)) < MIN_SAMPLES:
        return None
    return max(0.0, statistics.fmean(busy_samples) - statistics.fmean(idle_samples))


def _samples_during(
    work: Callable[[], object], read: UtilizationReader, seconds: float, interval: float = SAMPLE_INTERVAL
) -> list[float]:
    """Repeat ``work`` and return the readings that another thread takes every ``interval`` seconds.

    The thread always ends with the work. Failed readings are ignored. A reader must not use tensors: two threads that use MPS
    at the same time can crash the process (reported up to torch 2.14: pytorch#197805).
    """
    samples: list[float] = []
    finished = threading.Event()

    def sample() -> None:
        while not finished.wait(interval):
            value = read()
            if value is not None:
                samples.append(value)

    read()  # psutil reports the CPU utilization since the previous reading.
    thread = threading.Thread(target=sample, name="openmed_nb utilization", daemon=True)
    thread.start()
    try:
        start = current_time()
        while current_time() - start < seconds:
            work()
    finally:
        finished.set()
        thread.join()
    return samples
