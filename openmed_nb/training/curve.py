"""Memory at the ends of epochs: samples, their curve, and the interpretation of its trend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import Literal

from .._render.display import (
    OK,
    SIMULATED_SUFFIX,
    UNITS,
    WARNING,
    Displayable,
    JsonMixin,
    Report,
    Table,
    format_bytes,
    format_duration,
    format_percent,
    pluralize,
)
from .._render.drawing import Axes, AxisMarker, Chart, Series
from ..devices.device import MemoryStats
from ..devices.machine import Footprint, import_psutil, is_mps_simulated, read_footprint
from ..devices.registry import get_device
from ..devices.request import device_type
from .holders import TensorReferrer, live_tensors, make_referrer_table, storage_sizes


@dataclass(frozen=True)
class MemorySample(JsonMixin):
    """Memory at one point of a training, in bytes; ``None`` if a metric is not available on this machine.

    Attributes:
        epoch: Number of finished epochs, from 1 at the end of the first epoch.
        step: Number of steps so far.
        seconds: Seconds since the start of the training.
        is_boundary: Whether an epoch ended here, so that caches were emptied before the sample.
        allocated: Memory of live tensors; on the CPU, the tensors that are reachable from Python objects.
        reserved: Device memory of the process, including cached blocks; not available on the CPU.
        recommended: Recommended maximum: on MPS the recommendation of Metal, on CUDA the memory of the GPU, on the CPU
            the memory of the computer.
        peak: Peak memory of tensors since the previous sample, if torch records it.
        resident: Memory of the process. On macOS it is the footprint, as Activity Monitor displays it. It includes
            compressed pages and Metal memory (``proc_pid_rusage``). Elsewhere it is the resident set size.
        simulated: Whether the device is the simulated MPS, whose metrics do not represent real MPS hardware.
    """

    epoch: int
    step: int
    seconds: float
    is_boundary: bool = True
    allocated: int | None = None
    reserved: int | None = None
    recommended: int | None = None
    peak: int | None = None
    resident: int | None = None
    simulated: bool = False


def take_sample(device: str, epoch: int, step: int, seconds: float, boundary: bool = True) -> MemorySample:
    """Sample the memory of a device, and reset its peak."""
    memory = read_device_memory(device)
    get_device(device).reset_peak_memory_stats()
    return MemorySample(
        epoch,
        step,
        seconds,
        boundary,
        **vars(memory),
        resident=resident_bytes(),
        simulated=is_mps_simulated(),
    )


def read_device_memory(device: str) -> MemoryStats:
    """Return the memory of a device; on the CPU, the tensors reachable from Python, and the memory of the computer."""
    memory = get_device(device).memory_stats()
    if memory.allocated is None:
        memory = replace(memory, allocated=sum(storage_sizes(live_tensors()).values()))
    return replace(memory, recommended=total_memory_bytes()) if memory.recommended is None else memory


def resident_bytes(read: Callable[[], Footprint | None] = read_footprint) -> int:
    """Return the memory of this process; on macOS, only the footprint includes compressed memory."""
    footprint = read()
    return int(import_psutil().Process().memory_info().rss) if footprint is None else footprint.current


def total_memory_bytes() -> int:
    return int(import_psutil().virtual_memory().total)


TrendKind = Literal["flat", "growing below the limit", "growing", "sawtooth", "insufficient data"]

# Threshold of the runbook. More growth than this fraction over ten epochs, with caches emptied at the end of each
# epoch, indicates a leak.
GROWTH_THRESHOLD = 0.26
# Number of epochs that the threshold refers to; shorter and longer trainings are scaled to it.
GROWTH_EPOCHS = 10
# With fewer epochs after the warm-up, a trend and a fluctuation cannot be distinguished.
MIN_STEADY_EPOCHS = 3
# Minimum rank correlation with time (Kendall's tau) of growth.
MIN_RANK_CORRELATION = 0.6
# A longer series is subsampled evenly before all pairs are compared.
MAX_SIZES = 100
# From this length, a series has a second half to check, and fluctuations between consecutive epochs are ignored.
MIN_LONG_SERIES = 6
# Differences below this fraction of the baseline are ignored.
TOLERANCE = 0.01
CONFIDENCE_Z = 1.96  # Standard deviations of a 95% interval.
# Growth is a fraction of at least this many bytes, so that a few kilobytes do not raise an alarm.
MIN_BASELINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Trend(JsonMixin):
    """Trend of one memory metric over the epochs after the warm-up.

    Attributes:
        kind: ``"flat"``, ``"growing below the limit"``, ``"growing"``, ``"sawtooth"`` or ``"insufficient data"``.
        baseline: Bytes at the end of the first epoch after the warm-up.
        last: Bytes at the end of the last epoch.
        growth: Growth over ten epochs as a fraction of the baseline, or of 1 MiB if that is larger, from the median slope.
            If memory grows although that slope is not above the threshold, as in growth that started late: the largest of
            this estimate, that from the smaller size of each consecutive pair, and that from the final rise alone.
        spread: Largest minus smallest value, as a fraction of the same size.
        growth_low: Lower end of the 95% interval of the growth from the median slope, or ``None`` with fewer than six epochs.
        growth_high: Upper end of this interval.
    """

    kind: TrendKind
    baseline: int
    last: int
    growth: float
    spread: float
    growth_low: float | None = None
    growth_high: float | None = None


def classify_trend(sizes: Sequence[int], threshold: float = GROWTH_THRESHOLD) -> Trend:
    """Classify a series of sizes at the ends of epochs after the warm-up.

    Repeated growth above the threshold is growing, and so are three rises at the end. An equal rise and fall is a
    sawtooth. A single jump to a stable level is flat, or insufficient data if it is the last change. A series whose slope
    is at least 0.1% in ten epochs with 95% confidence is growing below the limit.

    No outlier decides. The slope is the median over all pairs (Theil 1950, Sen 1968). Growth must be repeated (Kendall
    1938), and must exceed half the threshold without its largest rise.
    """
    if not sizes:
        return Trend("insufficient data", 0, 0, 0.0, 0.0)
    stride = -(-len(sizes) // MAX_SIZES)
    levels = [size / max(sizes[0], MIN_BASELINE_BYTES) for size in sizes]
    spread = max(levels) - min(levels)
    sampled = levels[::-stride][::-1]
    pace = threshold * stride / GROWTH_EPOCHS
    # The lower envelope ignores memory that every second epoch takes and releases.
    envelope = [min(pair) for pair in pairwise(sampled)]
    # Growth over ten epochs for each pair of sizes, in ascending order.
    growths = [slope * GROWTH_EPOCHS / stride for slope in _slopes(sampled)]
    growth = median(growths or [0.0])
    # Interval of the slope (Sen 1968): as many slopes are outside as Kendall's statistic varies by at random.
    rank = int((len(growths) - CONFIDENCE_Z * math.sqrt(len(growths) * (2 * len(sampled) + 5) / 9)) / 2)
    low, high = (growths[rank - 1], growths[-rank]) if rank > 0 else (None, None)
    num_rises = 0  # Number of consecutive rises at the end.
    while num_rises + 1 < len(levels) and levels[-1 - num_rises] > levels[-2 - num_rises] + TOLERANCE:
        num_rises += 1
    last_rise = levels[-1] - levels[-1 - num_rises]
    kind: TrendKind = "flat"
    if len(levels) < MIN_STEADY_EPOCHS:
        kind = "insufficient data"
    elif _is_growing(sampled, pace) or (len(sampled) >= MIN_LONG_SERIES and _is_growing(envelope, pace)):
        kind = "growing"
    elif spread > threshold and _oscillates(levels):
        kind = "sawtooth"
    elif last_rise > max(threshold / 2, threshold * num_rises / GROWTH_EPOCHS):  # A smaller final rise is ignored.
        kind = "growing" if num_rises >= MIN_STEADY_EPOCHS else "insufficient data"
    elif low is not None and low >= TOLERANCE / 10 and growth > TOLERANCE:
        kind = "growing below the limit"
    if kind == "growing" and growth <= threshold:
        growth = max(
            growth, _median_slope(envelope) * GROWTH_EPOCHS / stride, last_rise * GROWTH_EPOCHS / max(num_rises, 1)
        )
    return Trend(kind, sizes[0], sizes[-1], growth, spread, low, high)


def _is_growing(levels: Sequence[float], pace: float) -> bool:
    """Return whether a series rises repeatedly by more than a pace per size, and still does in its second half."""
    rises = [later - earlier for earlier, later in pairwise(levels)]
    largest = max(rises, default=0.0)
    if largest > 0:
        rises[rises.index(largest)] = 0.0
    rises_late = len(levels) < MIN_LONG_SERIES or _median_slope(levels[len(levels) // 2 :]) > pace / 2
    rises_repeatedly = _median_slope(list(accumulate(rises, initial=0.0))) > pace / 2
    # Kendall's tau is 1 if each size is above all earlier ones, and -1 if it is below.
    above = sum(later > earlier + TOLERANCE for earlier, later in combinations(levels, 2))
    below = sum(later < earlier - TOLERANCE for earlier, later in combinations(levels, 2))
    rises_steadily = above - below >= MIN_RANK_CORRELATION * math.comb(len(levels), 2)
    return _median_slope(levels) > pace and rises_repeatedly and rises_late and rises_steadily


def _slopes(sizes: Sequence[float]) -> list[float]:
    """Return the slopes per epoch of all pairs of a series, in ascending order."""
    return sorted(
        (later - earlier) / (end - start) for (start, earlier), (end, later) in combinations(enumerate(sizes), 2)
    )


def _median_slope(sizes: Sequence[float]) -> float:
    return median(_slopes(sizes) or [0.0])


def _oscillates(sizes: Sequence[float]) -> bool:
    """Return whether a series both rises and falls by a quarter of its spread, unlike a single jump."""
    rise = max(size - lowest for size, lowest in zip(sizes, accumulate(sizes, min), strict=True))
    fall = max(highest - size for size, highest in zip(sizes, accumulate(sizes, max), strict=True))
    return min(rise, fall) > (max(sizes) - min(sizes)) / 4


def describe_limit(growth: float, limit: float) -> str:
    """Return the limit of growth over ten epochs, and when slower growth reaches it, as a clause.

    Example:
        >>> describe_limit(0.05, 0.26)
        ', below the limit of 26%, which such growth reaches in 52 epochs'
    """
    return f", below the limit of {format_percent(limit)}, which such growth reaches in {pluralize(math.ceil(limit / growth * GROWTH_EPOCHS), 'epoch')}"


# Metrics for the verdict, the most reliable sign of retained tensors first.
METRIC_LABELS = {
    "allocated": "memory of tensors",
    "reserved": "device memory reserved for the process",
    "resident": "memory of the process",
}
FIND_REMEDY = "nb.training.find_tensor_referrers() lists what references tensors."
DETACH_REMEDY = f"Keep loss.item() or loss.detach() instead of the loss; {FIND_REMEDY}"
# Growth with new shapes is mostly the allocator's, not that of the cached graphs (pytorch#188045). The binaries of torch 2.14.0
# for macOS place blocks within heaps (pytorch#190438), those of 2.13.0 do not; they were read in November 2026.
PAD_REMEDY = "Pad batches to a few fixed lengths (pytorch#132596, #181213)."
KEEP_FEWER_REMEDY = f"Keep fewer of them, or store them outside the device; {FIND_REMEDY}"

# Names of the lines in a chart.
DEVICE_LINE_NAMES = {"allocated": "tensors", "reserved": "reserved by the device", "peak": "peak in the epoch"}
PROCESS_LINE_NAMES = {"resident": "process"}
# A limit is drawn if it is at most this multiple of the highest memory. Otherwise the lines would be flat on the axis.
MAX_REFERENCE_LINE_RATIO = 3
# Maximum number of labels on the axis of epochs.
MAX_TICKS = 10

# Most likely cause of growth for each metric, with the remedy.
GROWTH_CAUSES = {
    "allocated": ("Tensors are retained", DETACH_REMEDY),
    "graphs": (
        "Autograd graphs are retained; they use memory of the process even after their backward pass",
        DETACH_REMEDY,
    ),
    "reserved": (
        "No tensor is retained; most likely the device caches blocks for every new batch shape",
        PAD_REMEDY,
    ),
    "resident": (
        "No tensor is retained; something else in this process grows",
        "Check lists that collect texts or results.",
    ),
    "resident on mps": (
        "No tensor is retained; most likely MPS keeps memory for every new batch shape",
        f"{PAD_REMEDY} torch 2.14 keeps less (pytorch#190438). Then check lists that collect texts or results.",
    ),
}
STATUS = {"growing": WARNING, "sawtooth": WARNING, "growing below the limit": OK, "flat": OK}
ADVICE = {
    "sawtooth": "Memory rises in some epochs and is released later; check evaluation, logging and checkpointing.",
    "insufficient data": "Keep training: the first epoch is warm-up, and a trend needs at least three more.",
    "growing below the limit": f"Train for more epochs to see whether the growth ends. {FIND_REMEDY}",
    "flat": "No action needed.",
}


@dataclass(frozen=True)
class CacheReleases(JsonMixin):
    """Releases of cached device memory between the steps of a training.

    Attributes:
        count: Number of releases.
        seconds: Duration of all releases, without the time that the device needed to finish its work.
        training_seconds: Time from the start of the training to the last reading of the memory.
    """

    count: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """Sentence for a report; empty if no release was due."""
        if not self.count:
            return ""
        return (
            f"Between steps, the cache was emptied {pluralize(self.count, 'time')} ({format_duration(self.seconds)}, "
            f"{format_percent(self.seconds / self.training_seconds, '.1f')} of the time)."
        )


@dataclass(frozen=True)
class ProcessInfo:
    """Process of a distributed training.

    Attributes:
        rank: Index among all processes.
        world_size: Number of processes.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process displays the curve; always true for a single process, whatever its variables are."""
        return self.rank == 0 or self.world_size == 1


@dataclass(frozen=True, repr=False)
class MemoryCurve(Displayable):
    """Memory samples of a training, with their interpretation.

    Attributes:
        device: Device of the training.
        samples: All samples in order; the verdict depends on those with ``is_boundary``.
        growth_threshold: Fraction of growth over ten epochs that indicates a leak: 0.26 is 26%.
        referrers: Objects that hold more tensors at the end of the last epoch than after the warm-up, largest first.
        limit: Fraction of ``recommended`` at which torch raises an out-of-memory error: on MPS the high watermark, on
            CUDA the value of ``limit_memory``; ``None`` if there is no limit.
        process: This process, in a training with several processes.
        releases: Number and duration of the releases of cached memory between steps.

    Example:
        >>> sizes = [50, 60, 90, 120, 150, 180]
        >>> samples = [MemorySample(n, 10 * n, 1.0 * n, allocated=size << 20) for n, size in enumerate(sizes, 1)]
        >>> MemoryCurve("mps", tuple(samples)).verdict
        'growing'
    """

    device: str
    samples: tuple[MemorySample, ...] = ()
    growth_threshold: float = GROWTH_THRESHOLD
    referrers: tuple[TensorReferrer, ...] = ()
    limit: float | None = None
    process: ProcessInfo = ProcessInfo()
    releases: CacheReleases = CacheReleases()

    JSON_PROPERTIES = ("simulated", "verdict", "reason", "advice", "trends")

    @property
    def epoch_samples(self) -> tuple[MemorySample, ...]:
        """Samples at the ends of epochs, including the warm-up."""
        return tuple(sample for sample in self.samples if sample.is_boundary)

    @property
    def steady_samples(self) -> tuple[MemorySample, ...]:
        """Samples at the ends of epochs after the first, which creates optimizer states and caches."""
        return self.epoch_samples[1:]

    @property
    def simulated(self) -> bool:
        """Whether any sample comes from the simulated MPS."""
        return any(sample.simulated for sample in self.samples)

    @property
    def deciding_metric(self) -> str:
        """Metric that decides the verdict: the first that grows, else the first that is not flat."""
        order = ("growing", "sawtooth", "insufficient data", "growing below the limit", "flat")
        return min(self.trends, key=lambda name: order.index(self.trends[name].kind), default="resident")

    @cached_property
    def trends(self) -> dict[str, Trend]:
        """Trend of each metric that all steady samples have."""
        series = {name: [getattr(sample, name) for sample in self.steady_samples] for name in METRIC_LABELS}
        return {
            name: classify_trend(sizes, self.growth_threshold) for name, sizes in series.items() if None not in sizes
        }

    @property
    def trend(self) -> Trend:
        """Trend of the deciding metric."""
        return self.trends.get(self.deciding_metric, classify_trend([]))

    @property
    def verdict(self) -> TrendKind:
        """Kind of the trend of the deciding metric."""
        return self.trend.kind

    @property
    def reason(self) -> str:
        """Reason for the verdict, with the measured values."""
        steady = self.steady_samples
        trend = self.trend
        if len(steady) < MIN_STEADY_EPOCHS:
            return f"{pluralize(len(steady), 'epoch')} after the warm-up."
        threshold = format_percent(self.growth_threshold)
        base = " of 1 MiB" if trend.baseline < MIN_BASELINE_BYTES else ""
        # Growth that the interval does not exclude.
        excluded = f"{len(steady)} epochs after the warm-up are too few to exclude slower growth"
        if trend.growth_high is not None:
            excluded = (
                f"growth above {format_percent(max(0, trend.growth_high), '.1f')} is excluded with 95% confidence"
            )
        explanations = {
            "growing": (
                f"{format_percent(trend.growth, '+.0f')}{base} in {GROWTH_EPOCHS} epochs is projected; the threshold is {threshold}"
            ),
            "growing below the limit": (
                f"it grows by {format_percent(trend.growth, '.1f')}{base} in {GROWTH_EPOCHS} epochs (95% CI: "
                f"{format_percent(trend.growth_low or 0, '.1f')} to {format_percent(trend.growth_high or 0, '.1f')})"
                f"{describe_limit(trend.growth or 1, self.growth_threshold)}"
            ),
            "flat": f"no sustained growth above {threshold}{base} in {GROWTH_EPOCHS} epochs; {excluded}",
            "sawtooth": f"it rose and fell by {format_percent(trend.spread)}{base} in between",
            "insufficient data": "it rose in the last epochs only",
        }
        return (
            f"{METRIC_LABELS[self.deciding_metric].capitalize()} went from {format_bytes(trend.baseline)} after epoch "
            f"{steady[0].epoch} to {format_bytes(trend.last)} after epoch {steady[-1].epoch}; {explanations[trend.kind]}."
        )

    @property
    def advice(self) -> str:
        """Suggested action."""
        likely_cause = self.likely_cause
        if likely_cause and not likely_cause.num_graphs:
            return f"{GROWTH_CAUSES['allocated'][0]}: {likely_cause}. {KEEP_FEWER_REMEDY}"
        if self.verdict != "growing":
            return f"{likely_cause}. {DETACH_REMEDY}" if likely_cause else ADVICE[self.verdict]
        metric = "graphs" if likely_cause and self.deciding_metric != "allocated" else self.deciding_metric
        cause, remedy = GROWTH_CAUSES.get(f"{metric} on {device_type(self.device)}", GROWTH_CAUSES[metric])
        return f"{cause}{f': {likely_cause}' if likely_cause else ''}. {remedy}"

    @property
    def has_growing_tensors(self) -> bool:
        """Whether the memory of tensors decides the verdict and grows."""
        return self.verdict.startswith("growing") and self.deciding_metric == "allocated"

    @property
    def likely_cause(self) -> TensorReferrer | None:
        """Most likely cause of the growth: the largest growing referrer.

        If the memory of tensors does not grow, only referrers of autograd graphs are considered.
        """
        return next((referrer for referrer in self.referrers if referrer.num_graphs or self.has_growing_tensors), None)

    def append(self, sample: MemorySample) -> MemoryCurve:
        """Return the curve with an additional sample."""
        return replace(self, samples=(*self.samples, sample))

    @property
    def chart(self) -> Chart:
        """Chart of the memory of the device with its limits, or of the process if that decides the verdict."""
        names = PROCESS_LINE_NAMES if self.deciding_metric == "resident" else DEVICE_LINE_NAMES
        series = {name: [getattr(sample, name) for sample in self.samples] for name in names}
        series = {name: sizes for name, sizes in series.items() if sizes and None not in sizes}
        highest = max(map(max, series.values()), default=0)
        exponent = memory_exponent(highest)
        unit = 1024**exponent
        lines = []
        for name, sizes in series.items():
            tooltips = (
                f"after epoch {sample.epoch}: {names[name]} {format_bytes(size)}" if sample.is_boundary else ""
                for sample, size in zip(self.samples, sizes, strict=True)
            )
            x = tuple(map(float, range(1, len(sizes) + 1)))
            lines.append(Series(names[name], x, tuple(size / unit for size in sizes), tuple(tooltips)))
        device = get_device(self.device)
        recommended = next((sample.recommended for sample in self.samples if sample.recommended), 0)
        limits = [AxisMarker(recommended / unit, device.memory_limit_base_caption)]
        if self.limit:
            limits.append(AxisMarker(recommended * self.limit / unit, f"{device.limit_caption} ({self.limit:g})"))
        visible_limits = [limit for limit in limits if 0 < limit.position * unit <= MAX_REFERENCE_LINE_RATIO * highest]
        # Samples are evenly spaced, and some of those at the ends of epochs have a label.
        ends = [(number, sample.epoch) for number, sample in enumerate(self.samples, 1) if sample.is_boundary]
        ticks = tuple(AxisMarker(number, str(epoch)) for number, epoch in ends[:: 1 + len(ends) // MAX_TICKS])
        axes = Axes(UNITS[exponent], "epoch", ticks, tuple(visible_limits))
        return Chart(
            "Memory of the process" if names is PROCESS_LINE_NAMES else "Memory of the device",
            lines=tuple(lines),
            axes=axes,
        )

    def to_report(self) -> Report:
        """Return the verdict, its reason, the suggested action, and the metrics of each epoch."""
        names = ("allocated", "reserved", "peak", "resident")
        rows = tuple(
            (
                str(sample.epoch),
                str(sample.step),
                *(format_bytes(getattr(sample, name)) for name in names),
                "" if number else "warm-up",
            )
            for number, sample in enumerate(self.epoch_samples)
        )
        columns = ("epoch", "step", *names, "")
        headline: str = self.verdict
        status = STATUS.get(self.verdict, "")
        if self.verdict != "growing" and self.likely_cause and self.likely_cause.num_graphs:
            headline += ", but autograd graphs are retained"
            status = WARNING
        return Report(
            f"Memory on {self.device}{SIMULATED_SUFFIX if self.simulated else ''}: {headline}",
            tuple(filter(None, (self.reason, self.advice, self.releases.sentence))),
            (
                Table("Memory after each epoch", columns, rows, collapsed=True),
                make_referrer_table(self.referrers, "Referrers that hold more tensors than after warm-up"),
            ),
            status=status,
            charts=(self.chart,),
        )


def memory_exponent(highest: float) -> int:
    """Return the power of 1024 for the unit of an axis that reaches ``highest`` bytes: MiB, or GiB from 2 GiB."""
    return 3 if highest >= 2 << 30 else 2
