"""Memory at epoch boundaries: samples, their curve, and what its trend means."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import Any

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
    pluralize,
)
from .._render.drawing import Axes, AxisMarker, Chart, Series, nice_ticks
from ..devices.device import MemoryStats
from ..devices.machine import Footprint, import_psutil, is_mps_simulated, read_footprint, run_command
from ..devices.registry import parse_device_argument
from ..devices.request import device_type
from ..errors import ConfigurationError
from .holders import TensorReferrer, live_tensor_bytes, table_of

# The levels of macOS (kern.memorystatus_vm_pressure_level); 3 does not exist.
PRESSURE_LEVELS = {"1": "normal", "2": "warning", "4": "critical"}


@dataclass(frozen=True, repr=False)
class MemorySample(Displayable):
    """The memory at one moment of a training, in bytes; ``None`` where there is no such figure here.

    Attributes:
        epoch: How many epochs are done, counted from 1 at the first boundary; inside an epoch, those before it.
        step: How many steps were counted until now.
        seconds: Seconds since the training began.
        boundary: Whether an epoch ended here, so that caches were emptied before the look.
        allocated: What living tensors use; on the CPU, the tensors that Python objects reach.
        reserved: What the process holds of the device, cached blocks included; none on the CPU.
        recommended: What the device should not go beyond: on MPS what Metal recommends, on CUDA the memory of the GPU, on
            the CPU that of the computer.
        peak: The most that tensors used since the sample before, where torch counts it.
        resident: The process's own memory: on macOS its footprint, as Activity Monitor shows it, which has compressed pages
            and the memory of Metal in it (``proc_pid_rusage``); elsewhere the resident set.
        swap: What the system has put into its swap.
        pressure: The memory pressure: ``"normal"``, ``"warning"`` or ``"critical"``; only macOS says.
        simulated: Whether the device is the simulated MPS, whose figures are not figures of MPS.
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
    swap: int | None = None
    pressure: str | None = None
    simulated: bool = False

    def to_report(self) -> Report:
        """Return the figures as a table."""
        names = ("allocated", "reserved", "recommended", "peak", "resident", "swap")
        rows = tuple((name, format_bytes(getattr(self, name))) for name in names if getattr(self, name) is not None)
        where = "after epoch" if self.is_boundary else "in training, epochs done:"
        sentences = [f"Step {self.step}, {self.seconds:.1f} s."]
        if self.pressure:
            sentences.append(f"Memory pressure: {self.pressure}.")
        return Report(f"Memory {where} {self.epoch}", tuple(sentences), tables=(Table("", ("memory", "size"), rows),))


def take_sample(device: str, epoch: int, step: int, seconds: float, boundary: bool = True) -> MemorySample:
    """Look at the memory of a device, and let the peak begin again."""
    memory = held_memory(device)
    parse_device_argument(device).reset_peak()
    pressure = None
    if sys.platform == "darwin":
        pressure = parse_pressure(run_command(["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"]))
    return MemorySample(
        epoch,
        step,
        seconds,
        boundary,
        allocated=memory.allocated,
        reserved=memory.reserved,
        recommended=installed_bytes() if memory.recommended is None else memory.recommended,
        peak=memory.peak,
        resident=resident_bytes(),
        swap=int(import_psutil().swap_memory().used),  # macOS leaves it there after use, so only its growth tells.
        pressure=pressure,
        simulated=is_mps_simulated(),
    )


def held_memory(device: str) -> MemoryStats:
    """Return the memory of a device; on the CPU, ``allocated`` is what the tensors use that Python objects reach."""
    memory = parse_device_argument(device).memory()
    return replace(memory, allocated=live_tensor_bytes()) if memory.allocated is None else memory


def resident_bytes(read: Callable[[], Footprint | None] = read_footprint) -> int:
    """Return the memory of this process; on macOS a leak that was compressed is in the footprint alone."""
    footprint = read()
    return int(import_psutil().Process().memory_info().rss) if footprint is None else footprint.current


def installed_bytes() -> int:
    return int(import_psutil().virtual_memory().total)


def parse_pressure(output: str | None) -> str | None:
    """Return the memory pressure in an answer of ``sysctl``."""
    return PRESSURE_LEVELS.get((output or "").strip())


FLAT = "flat"
GROWING = "growing"
SAWTOOTH = "sawtooth"
INSUFFICIENT_DATA = "too short to tell"

# The runbook's gate: more growth than this over ten epochs, with caches emptied at their boundaries, is suspect.
GROWTH_THRESHOLD = 0.26
# Over how many epochs the gate looks; shorter and longer trainings are scaled to it.
GROWTH_EPOCHS = 10
# With fewer epochs after the warm-up, a trend and a fluctuation look the same.
MIN_STEADY_EPOCHS = 3
# The least rank correlation with time (Kendall's tau) of a growth.
MIN_RANK_CORRELATION = 0.6
# A longer series is thinned evenly before all its pairs are compared.
MOST_SIZES = 100
# From so many sizes on there is a second half to look at, and a fluctuation from one epoch to the next to leave out.
LONG = 6
# Differences below this share of the baseline count as none.
TOLERANCE = 0.01
# More epochs than anyone trains: such a number stands for a training without an end, as Trainer's for a dataset without a
# length (transformers#12499). Lightning's for that is -1.
MOST_EPOCHS = 1_000_000
# A growth that is at most so many times that of histories with a bound is theirs.
OF_HISTORIES = 1.1
# Bytes; growth is a share of at least this much, so that a few kilobytes alarm no one.
SMALLEST_BASELINE = 1 << 20


@dataclass(frozen=True)
class Trend(JsonMixin):
    """What became of one memory figure over the epochs after the warm-up.

    Attributes:
        kind: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        baseline: Bytes at the first boundary after the warm-up.
        last: Bytes at the last boundary.
        growth: Growth over ten epochs as a share of the baseline, from the median slope.
        spread: The largest less the smallest figure, as a share of the baseline.
        total: The last less the first figure, as a share of the baseline.
        steepest: Growth over ten epochs by the sign that shows it most: in all sizes, in the smaller of each two, or in
            those at the end alone.
    """

    kind: str
    baseline: int
    last: int
    growth: float
    spread: float
    total: float = 0.0
    steepest: float = 0.0

    JSON_EXCLUDE = ("steepest",)


def classify_trend(sizes: Sequence[int], threshold: float = GROWTH_THRESHOLD) -> Trend:
    """Return what a series of sizes at epoch boundaries after the warm-up means.

    More than the gate, rising again and again, is growing, and so are three rises at the end; as much up and down is a
    sawtooth; one jump to a level that is kept is flat, but too short to tell where it came last. No odd epoch decides:
    the slope is the median between all pairs (Theil 1950, Sen 1968), a growth has to rise again and again (Kendall
    1938), and to show without its largest rise at half of the gate.
    """
    if not sizes:
        return Trend(INSUFFICIENT_DATA, 0, 0, 0.0, 0.0)
    every = -(-len(sizes) // MOST_SIZES)
    scale = max(sizes[0], SMALLEST_BASELINE)
    shares = [size / scale for size in sizes]
    spread = max(shares) - min(shares)
    thinned = shares[::-every][::-1]
    pace = threshold * every / GROWTH_EPOCHS
    envelope = [min(pair) for pair in pairwise(thinned)]  # Without what every second epoch takes and gives back.
    growth = slope(thinned) * GROWTH_EPOCHS / every
    late = 0  # How often it has risen at its end, one size after the other.
    while late + 1 < len(shares) and shares[-1 - late] > shares[-2 - late] + TOLERANCE:
        late += 1
    last_rise = shares[-1] - shares[-1 - late]
    steepest = max(growth, slope(envelope) * GROWTH_EPOCHS / every, last_rise * GROWTH_EPOCHS / max(late, 1))
    kind = FLAT
    if len(shares) < MIN_STEADY_EPOCHS:
        kind = INSUFFICIENT_DATA
    elif is_growing(thinned, pace) or (len(thinned) >= LONG and is_growing(envelope, pace)):
        kind = GROWING
    elif spread > threshold and oscillates(shares):
        kind = SAWTOOTH
    elif last_rise > max(threshold / 2, threshold * late / GROWTH_EPOCHS):  # The gate lets a smaller last rise pass.
        kind = GROWING if late >= MIN_STEADY_EPOCHS else INSUFFICIENT_DATA
    return Trend(kind, sizes[0], sizes[-1], growth, spread, shares[-1] - shares[0], steepest)


def is_growing(shares: Sequence[float], pace: float) -> bool:
    """Tell whether a series rises by more than a pace for each size, again and again, and still does in its second half."""
    rises = [later - sooner for sooner, later in pairwise(shares)]
    largest = max(rises, default=0.0)
    if largest > 0:
        rises[rises.index(largest)] = 0.0
    still = len(shares) < LONG or slope(shares[len(shares) // 2 :]) > pace / 2
    again = slope(list(accumulate(rises, initial=0.0))) > pace / 2
    # Kendall's tau: 1 where each size is above those before it, -1 where it is below.
    above = sum(later > sooner + TOLERANCE for sooner, later in combinations(shares, 2))
    below = sum(later < sooner - TOLERANCE for sooner, later in combinations(shares, 2))
    steady = above - below >= MIN_RANK_CORRELATION * math.comb(len(shares), 2)
    return slope(shares) > pace and again and still and steady


def slope(sizes: Sequence[float]) -> float:
    """Return the median slope between all pairs of a series, for each epoch."""
    slopes = [(later - sooner) / (end - start) for (start, sooner), (end, later) in combinations(enumerate(sizes), 2)]
    return median(slopes) if slopes else 0.0


def oscillates(sizes: Sequence[float]) -> bool:
    """Tell whether a series both rises and falls by a quarter of its spread; one that moves to a new level does not."""
    rise = max(size - lowest for size, lowest in zip(sizes, accumulate(sizes, min), strict=True))
    fall = max(highest - size for size, highest in zip(sizes, accumulate(sizes, max), strict=True))
    return min(rise, fall) > (max(sizes) - min(sizes)) / 4


# What is judged, the surest sign of retained tensors first.
METRIC_LABELS = {
    "allocated": "memory of tensors",
    "reserved": "memory that the device keeps for the process",
    "resident": "memory of the process",
}
DETACH_REMEDY = "Keep loss.item() or loss.detach() instead of the loss; nb.training.find_tensor_referrers() lists what holds tensors."
PAD_REMEDY = "Pad batches to a few fixed lengths (pytorch#132596, #181213)."
KEEP_FEWER_REMEDY = "Keep fewer of them, or keep them outside of the device; nb.training.find_tensor_referrers() lists what holds tensors."

# What the lines of a picture are called.
LINES_OF_DEVICE = {"allocated": "tensors", "reserved": "reserved by the device", "peak": "peak in the epoch"}
LINES_OF_PROCESS = {"resident": "process"}
# A limit is drawn if it is at most so many times the highest memory; otherwise the lines would lie on the axis.
NEAR = 3

# What most likely makes a figure grow, and what to do about it.
GROWTH_CAUSES = {
    "allocated": ("Tensors are retained", DETACH_REMEDY),
    "graphs": (
        "Autograd graphs are retained, which take memory of the process also after their backward pass",
        DETACH_REMEDY,
    ),
    "reserved": (
        "No tensor is retained; most likely the device keeps blocks for every new shape of a batch",
        PAD_REMEDY,
    ),
    "resident": (
        "No tensor is retained; something else in this process grows",
        "Look at lists that collect texts or results.",
    ),
    "resident on mps": (
        "No tensor is retained; most likely graphs, which MPS compiles for every new shape of a batch",
        f"{PAD_REMEDY} Then look at lists that collect texts or results.",
    ),
}
STATUS = {GROWING: WARNING, SAWTOOTH: WARNING, FLAT: OK}
ADVICE = {
    SAWTOOTH: "Something takes memory in some epochs and gives it back: look at evaluation, logging and checkpoints.",
    INSUFFICIENT_DATA: "Train on: the first epoch is warm-up, and a trend needs three more.",
    FLAT: "Nothing to do.",
}


@dataclass(frozen=True)
class ProcessInfo:
    """A process of a training: its number among all, how many there are, and its number on this computer."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # By this number it has its GPU.

    @property
    def is_main_process(self) -> bool:
        """Whether this process shows the curve; one that is alone does, whatever a variable says."""
        return self.rank == 0 or self.world_size == 1

    @property
    def sentence(self) -> str:
        """Which process this is, empty where there is one alone."""
        others = "each keeps the curve of its own device"
        return f"This is process {self.rank} of {self.world_size}; {others}." if self.world_size > 1 else ""


@dataclass(frozen=True, repr=False)
class MemoryCurve(Displayable):
    """The samples of a training, and what they mean.

    Attributes:
        device: Where the training ran.
        samples: All samples in order; those with ``boundary`` are judged.
        gate: The growth over ten epochs that is suspect, as a share: 0.26 is 26 %.
        holders: What held more tensors at the last boundary than after the warm-up, the most first.
        limit: The share of ``recommended`` at which torch refuses more: on MPS the high watermark, on CUDA what
            ``limit_memory`` has set; ``None`` where there is none.
        process: Which process of the training this is, where there are several.
        planned: How many epochs the training has in all; ``None`` if nobody knows.
        filling: Bytes by which histories of optimizers have grown since the warm-up, which stop at a bound, as that of LBFGS.

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
    total_epochs: int | None = None
    filling: int = 0

    JSON_EXCLUDE = ("process", "total_epochs", "filling")
    JSON_PROPERTIES = ("simulated", "verdict", "reason", "advice", "trends")

    @property
    def epoch_samples(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs, the warm-up included."""
        return tuple(sample for sample in self.samples if sample.is_boundary)

    @property
    def steady_samples(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs after the first, in which optimizer states and caches are made."""
        return self.epoch_samples[1:]

    @property
    def simulated(self) -> bool:
        """Whether any figure comes from the simulated MPS."""
        return any(sample.simulated for sample in self.samples)

    @property
    def deciding_metric(self) -> str:
        """The figure that decides the verdict: the first that grows, else the first that is not flat."""
        order = (GROWING, SAWTOOTH, INSUFFICIENT_DATA, FLAT)
        return min(self.trends, key=lambda name: order.index(self.trends[name].kind), default="resident")

    @cached_property
    def trends(self) -> dict[str, Trend]:
        """What became of each figure that all steady samples have."""
        series = {name: [getattr(sample, name) for sample in self.steady_samples] for name in METRIC_LABELS}
        found = {
            name: classify_trend(sizes, self.growth_threshold) for name, sizes in series.items() if None not in sizes
        }
        for name, trend in found.items():
            if trend.kind == GROWING and self._fills_up(trend):
                found[name] = replace(trend, kind=INSUFFICIENT_DATA)
        return found

    def _fills_up(self, trend: Trend) -> bool:
        """Tell whether a figure has grown by no more than histories that have a bound."""
        return trend.last - trend.baseline <= OF_HISTORIES * self.filling

    @property
    def trend(self) -> Trend:
        """What became of the figure that decides."""
        return self.trends.get(self.deciding_metric, classify_trend([]))

    @property
    def verdict(self) -> str:
        """``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``."""
        return self.trend.kind

    @property
    def reason(self) -> str:
        """Why this verdict, with the figures."""
        steady, trend = self.steady_samples, self.trend
        if len(steady) < MIN_STEADY_EPOCHS:
            return f"{pluralize(len(steady), 'epoch')} after the warm-up."
        first = f"{format_bytes(trend.baseline)} after epoch {steady[0].epoch}"
        last = f"{format_bytes(trend.last)} after epoch {steady[-1].epoch}"
        pace = {
            GROWING: f"that is {100 * trend.growth:+.0f} % in {GROWTH_EPOCHS} epochs at this pace, and more than {100 * self.growth_threshold:.0f} % is suspect",
            FLAT: f"it does not keep growing by more than {100 * self.growth_threshold:.0f} % in {GROWTH_EPOCHS} epochs",
            SAWTOOTH: f"in between it rose and fell by {100 * trend.spread:.0f} %",
            INSUFFICIENT_DATA: "it rose in the last epochs only",
        }
        if self.filling and trend.kind == INSUFFICIENT_DATA:
            pace[INSUFFICIENT_DATA] = "an optimizer fills a history that has a bound, as LBFGS does"
        return f"{METRIC_LABELS[self.deciding_metric].capitalize()} went from {first} to {last}; {pace[trend.kind]}."

    @property
    def advice(self) -> str:
        """What to do next."""
        suspect = self.likely_cause
        if self.verdict != GROWING:
            advice = ADVICE[self.verdict]
            if self.verdict == INSUFFICIENT_DATA and self.filling:
                advice = "Train on until the history is full, or make it shorter (history_size)."
            if self.verdict == FLAT and self.trend.total > self.growth_threshold and not self._fills_up(self.trend):
                advice = f"It is {100 * self.trend.total:+.0f} % all the same: watch it where you train for longer."
            if suspect is None:
                return advice
            so_far = "It takes little memory so far, but" if advice == ADVICE[FLAT] else f"{advice} But"
            return f"{so_far} {suspect}. {DETACH_REMEDY}"
        if suspect and not suspect.num_graphs:
            return f"{GROWTH_CAUSES['allocated'][0]}: {suspect}. {KEEP_FEWER_REMEDY}"
        figure = "graphs" if suspect and self.deciding_metric != "allocated" else self.deciding_metric
        cause, remedy = GROWTH_CAUSES.get(f"{figure} on {device_type(self.device)}", GROWTH_CAUSES[figure])
        return f"{cause}{f': {suspect}' if suspect else ''}. {remedy}"

    @property
    def likely_cause(self) -> TensorReferrer | None:
        """What most likely makes the memory grow: what holds most more; if that is no tensor's memory, a list of graphs."""
        grows = self.verdict == GROWING and self.deciding_metric == "allocated"
        return next((holder for holder in self.referrers if holder.num_graphs or grows), None)

    def append(self, sample: MemorySample) -> MemoryCurve:
        """Return the curve with one more sample."""
        return replace(self, samples=(*self.samples, sample))

    def to_dict(self) -> dict[str, Any]:
        """Return samples, trends, verdict and the number of the process as plain mappings, lists, numbers and strings."""
        return {**super().to_dict(), "process": self.process.rank, "processes": self.process.world_size}

    def plot(self) -> Any:
        """Return a matplotlib figure of the curve with its limits; a notebook shows it.

        Raises:
            ConfigurationError: Where matplotlib is not installed.
        """
        suspect = f" ({self.likely_cause.name})" if self.likely_cause else ""
        title = f"{'SIMULATED MPS, ' if self.simulated else ''}{self.device}: {self.verdict}{suspect}"
        return require_plotting(".plot").draw(title, self.pictures)

    @property
    def limits(self) -> tuple[AxisMarker, ...]:
        """What the device should not go beyond, and where torch refuses more, in bytes."""
        recommended = next((sample.recommended for sample in self.samples if sample.recommended), 0)
        device = parse_device_argument(self.device)
        limits = [AxisMarker(recommended, device.capacity_caption)]
        if self.limit:
            limits.append(AxisMarker(int(recommended * self.limit), f"{device.limit_caption} ({self.limit:g})"))
        return tuple(limits) if recommended else ()

    @property
    def pictures(self) -> tuple[Chart, ...]:
        """The memory of the device, with its limits, and that of the process, both over the epochs."""
        return (
            self._picture("Memory of the device", LINES_OF_DEVICE, 12, self.limits, self.epoch_samples[:1]),
            self._picture("Memory of the process", LINES_OF_PROCESS, 6),
        )

    def _picture(
        self,
        caption: str,
        names: Mapping[str, str],
        height: float,
        limits: Iterable[AxisMarker] = (),
        warm: Iterable[MemorySample] = (),
    ) -> Chart:
        """Return some of the figures over the epochs that there are to be; limits that are far away are left out."""
        series = {name: [getattr(sample, name) for sample in self.samples] for name in names}
        series = {name: sizes for name, sizes in series.items() if sizes and None not in sizes}
        most = max(map(max, series.values()), default=0)
        exponent = memory_exponent(most)
        unit = 1024**exponent
        across = tuple(sample_positions(self.samples))
        lines = []
        for name, sizes in series.items():
            shown = (
                f"after epoch {sample.epoch}: {names[name]} {format_bytes(size)}" if sample.is_boundary else ""
                for sample, size in zip(self.samples, sizes, strict=True)
            )
            lines.append(Series(names[name], across, tuple(size / unit for size in sizes), tuple(shown)))
        last = max((self.total_epochs or 0, *(sample.epoch for sample in self.samples)))
        epochs = nice_ticks(last, whole=True)
        epochs = (*(epoch for epoch in epochs if epoch + epochs[1] / 2 < last), last)  # None close to the last.
        axes = Axes(
            UNITS[exponent],
            "epoch",
            tuple(AxisMarker(epoch, f"{epoch:g}") for epoch in epochs),
            tuple(AxisMarker(limit.position / unit, limit.name) for limit in limits if limit.position <= NEAR * most),
            tuple(AxisMarker(first.epoch, "warm-up ends") for first in warm),
            height,
        )
        return Chart(caption, lines=tuple(lines), axes=axes)

    def to_report(self) -> Report:
        """Return the verdict, why, what to do, and the figures of each epoch."""
        rows: list[tuple[str, ...]] = []
        for sample in self.epoch_samples:
            sizes = (sample.allocated, sample.reserved, sample.peak, sample.resident, sample.swap)
            note = "" if rows else "warm-up"
            rows.append((str(sample.epoch), str(sample.step), *map(format_bytes, sizes), sample.pressure or "", note))
        columns = ("epoch", "step", "allocated", "reserved", "peak", "resident", "swap", "pressure", "")
        return Report(
            f"Memory on {self.device}{SIMULATED_SUFFIX if self.simulated else ''}: {self.verdict}",
            tuple(filter(None, (self.reason, self.advice, self.process.sentence))),
            (
                Table("Memory after each epoch", columns, tuple(rows), collapsed=True),
                table_of(self.referrers, "What holds more tensors than after the warm-up"),
            ),
            status=STATUS.get(self.verdict, ""),
            charts=self.pictures,
        )


def known_epochs(planned: float | None) -> int | None:
    """Return a number of epochs, ``None`` for one that stands for a training without an end."""
    return int(planned) if planned is not None and 0 < planned <= MOST_EPOCHS else None


def sample_positions(samples: Sequence[MemorySample]) -> list[float]:
    """Return where each sample stands among the epochs: a boundary at its number, others evenly before the next one.

    Example:
        >>> inner, end = MemorySample(0, 5, 1.0, is_boundary=False), MemorySample(1, 10, 2.0)
        >>> sample_positions([inner, end]), sample_positions([end])
        ([0.5, 1.0], [1.0])
    """
    inner = Counter(sample.epoch for sample in samples if not sample.is_boundary)
    parts = max(inner.values(), default=0) + 1
    seen = 0  # Samples inside of this epoch.
    found = []
    for sample in samples:
        seen = 0 if sample.is_boundary else seen + 1
        found.append(sample.epoch + seen / parts)
    return found


def memory_exponent(most: float) -> int:
    """Return the power of 1024 in which an axis counts that reaches so many bytes: MiB, or from 2 GiB on GiB."""
    return 3 if most >= 2 << 30 else 2


def require_plotting(module: str) -> Any:
    """Return a module that draws, or say what it needs that is not installed."""
    try:
        return importlib.import_module(module, __package__)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        what = f"The picture needs {package}, which is not installed."
        raise ConfigurationError(what, f"Install it: python -m pip install {package}.") from error
