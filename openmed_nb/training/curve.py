"""Memory at epoch boundaries: samples, their curve, the verdict."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

from ..devices.machine import import_psutil, run_command
from ..devices.memory import allocator
from ..devices.request import kind_of
from ..devices.simulated import active
from ..display import NOTE, Report, Shown, Table, counted, escape, in_bytes
from ..errors import ConfigurationError, DeviceUnavailable
from .holders import Holder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TrainingProcess:
    """A process of a training.

    Attributes:
        rank: Its number among all; the first shows what there is to show.
        count: How many there are.
        local_rank: Its number on this computer, by which it has its GPU.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that shows what there is to show; one that is alone does, whatever a variable says."""
        return self.rank == 0 or self.count == 1

    @property
    def sentence(self) -> str:
        """Which process this is, empty where there is one alone."""
        others = "each keeps the curve of its own device"
        return f"This is process {self.rank} of {self.count}; {others}." if self.count > 1 else ""


ALONE = TrainingProcess()
"""The one process of most trainings."""


def this_process(environ: Mapping[str, str] | None = None) -> TrainingProcess:
    """Return which process of a training this is, from torch where it knows, else from what the launcher has set.

    Args:
        environ: The environment variables; ``None`` are those of this process.

    Example:
        >>> this_process({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
        TrainingProcess(rank=1, count=2, local_rank=1)
        >>> this_process({"RANK": "x"})
        TrainingProcess(rank=0, count=1, local_rank=0)
    """
    environ = os.environ if environ is None else environ
    told = [number(environ.get(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    known = known_to_torch()
    rank, count = known or (told[0] or 0, told[1] or 1)
    return TrainingProcess(rank, count, told[2] or 0)


def number(value: str | None) -> int | None:
    """Return a variable as a whole number, ``None`` where it is none."""
    return int(value) if value is not None and value.isdecimal() else None


def known_to_torch() -> tuple[int, int] | None:
    """Return rank and count of torch's process group, ``None`` where there is none; torch is not loaded for that."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def check_processes(device: str, process: TrainingProcess) -> None:
    """Check that a device can be trained on by as many processes as there are.

    Raises:
        DeviceUnavailable: For several on MPS, where no backend of ``torch.distributed`` works (pytorch#160732).

    Example:
        >>> check_processes("mps", TrainingProcess(count=1))
        >>> check_processes("mps", TrainingProcess(count=2))
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailable: MPS cannot train in 2 processes: gloo and nccl, over which they would talk, do not work with it (pytorch#160732). Start one process, or train on the CPU.
    """
    if kind_of(device) == "mps" and process.count > 1:
        what = f"MPS cannot train in {process.count} processes: gloo and nccl, over which they would talk, do not work with it"
        raise DeviceUnavailable(f"{what} (pytorch#160732).", "Start one process, or train on the CPU.")


def own_device(device: str, process: TrainingProcess) -> str:
    """Return the device of a process where nobody named one: each has a GPU of CUDA of its own.

    Example:
        >>> own_device("cuda", TrainingProcess(1, 2, 1)), own_device("cuda", TrainingProcess())
        ('cuda:1', 'cuda')
    """
    return f"cuda:{process.local_rank}" if device == "cuda" and process.count > 1 else device


PRESSURE = {"1": "normal", "2": "warning", "4": "critical"}
"""The levels of macOS (``kern.memorystatus_vm_pressure_level``); 3 does not exist."""


@dataclass(frozen=True, repr=False)
class MemorySample(Shown):
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
        resident: The process's own memory: on macOS its unique memory, elsewhere the resident set.
        swap: What the system has put into its swap.
        pressure: The memory pressure: ``"normal"``, ``"warning"`` or ``"critical"``; only macOS says.
        simulated: Whether the device is the simulated MPS, whose figures are no figures of MPS.
    """

    epoch: int
    step: int
    seconds: float
    boundary: bool = True
    allocated: int | None = None
    reserved: int | None = None
    recommended: int | None = None
    peak: int | None = None
    resident: int | None = None
    swap: int | None = None
    pressure: str | None = None
    simulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as plain numbers and strings."""
        return dict(vars(self))

    def report(self) -> Report:
        """Return the figures as a table."""
        names = ("allocated", "reserved", "recommended", "peak", "resident", "swap")
        rows = tuple((name, in_bytes(getattr(self, name))) for name in names if getattr(self, name) is not None)
        where = "after epoch" if self.boundary else "in training, epochs done:"
        sentences = [f"Step {self.step}, {self.seconds:.1f} s."]
        sentences += [f"Memory pressure: {self.pressure}."] if self.pressure else []
        sentences += [NOTE] if self.simulated else []
        return Report(f"Memory {where} {self.epoch}", tuple(sentences), tables=(Table("", ("memory", "size"), rows),))


def take_sample(device: str, epoch: int, step: int, seconds: float, boundary: bool = True) -> MemorySample:
    """Return a look at the memory, and let the peak begin again.

    Args:
        device: Where the training runs: ``"cpu"``, ``"mps"``, ``"cuda"`` or ``"cuda:N"``.
        epoch: How many epochs are done.
        step: How many steps were counted.
        seconds: Seconds since the training began.
        boundary: Whether an epoch ended here.

    Example:
        >>> take_sample("cpu", 1, 100, 2.5).resident > 0
        True
    """
    memory = allocator(device).memory()
    allocator(device).reset_peak()
    return MemorySample(
        epoch,
        step,
        seconds,
        boundary,
        allocated=living_bytes() if memory.allocated is None else memory.allocated,
        reserved=memory.reserved,
        recommended=installed_bytes() if memory.recommended is None else memory.recommended,
        peak=memory.peak,
        resident=resident_bytes(),
        swap=swap_bytes(),
        pressure=parse_pressure(_ask_pressure()) if sys.platform == "darwin" else None,
        simulated=active(),
    )


def living_bytes() -> int:
    """Return the bytes of all tensors that Python objects or their autograd graphs reach."""
    from .holders import living_tensors, storage_sizes

    return sum(storage_sizes(living_tensors()).values())


def resident_bytes() -> int:
    """Return the memory of this process in bytes.

    On macOS that is its unique memory, near the footprint that the system judges it by; the resident set leaves out some
    memory of Metal there.
    """
    psutil = import_psutil()
    process = psutil.Process()
    return int(process.memory_full_info().uss if sys.platform == "darwin" else process.memory_info().rss)


def installed_bytes() -> int:
    """Return the memory of this computer in bytes."""
    psutil = import_psutil()
    return int(psutil.virtual_memory().total)


def swap_bytes() -> int:
    """Return what is in the swap, in bytes; macOS leaves it there after use, so only its growth says something."""
    psutil = import_psutil()
    return int(psutil.swap_memory().used)


def parse_pressure(output: str | None) -> str | None:
    r"""Return the memory pressure that ``sysctl`` told, ``None`` where it told none.

    Example:
        >>> parse_pressure("2\n"), parse_pressure("3"), parse_pressure(None)
        ('warning', None, None)
    """
    match = re.fullmatch(r"\s*(\d+)\s*", output or "")
    return PRESSURE.get(match.group(1)) if match else None


def _ask_pressure() -> str | None:
    return run_command(["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"])


FLAT, GROWING, SAWTOOTH, TOO_SHORT = "flat", "growing", "sawtooth", "too short to tell"

GROWTH_GATE = 0.26
"""The runbook's gate: more growth than this over ten epochs, with caches emptied at their boundaries, is suspect."""

GATE_EPOCHS = 10
"""Over how many epochs the gate looks; shorter and longer trainings are scaled to it."""

MINIMUM_STEADY = 3
"""With fewer epochs after the warm-up, a trend and a fluctuation look the same."""

TREND = 0.6
"""The least rank correlation with time (Kendall's tau) of a growth."""

MOST_SIZES = 100
"""A longer series is thinned evenly before all its pairs are compared."""

LONG = 6
"""From so many sizes on there is a second half to look at, and a fluctuation from one epoch to the next to leave out."""

TOLERANCE = 0.01
"""Differences below this share of the baseline count as none."""

SMALLEST_BASELINE = 1 << 20
"""Bytes; growth is told as a share of at least this much, so that a few kilobytes alarm nobody."""


@dataclass(frozen=True)
class Trend:
    """What became of one memory figure over the epochs after the warm-up.

    Attributes:
        kind: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        baseline: Bytes at the first boundary after the warm-up.
        last: Bytes at the last boundary.
        growth: Growth over ten epochs as a share of the baseline, from the median slope.
        spread: The largest less the smallest figure, as a share of the baseline.
        total: The last less the first figure, as a share of the baseline.
    """

    kind: str
    baseline: int
    last: int
    growth: float
    spread: float
    total: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the trend as plain numbers and strings."""
        return dict(vars(self))


def judge(sizes: Sequence[int], gate: float = GROWTH_GATE) -> Trend:
    """Return what a series of sizes at epoch boundaries means.

    The slope is the median of the slopes between all pairs (Theil 1950, Sen 1968), so that one odd epoch does not
    decide; a growth also has to rise again and again (Kendall 1938), and still to show, at half of the gate, without its
    largest rise.

    Args:
        sizes: Bytes at each boundary after the warm-up, in order.
        gate: The share of growth over ten epochs that is suspect.

    Returns:
        The trend. More than the gate, rising again and again, is growing, and so are three rises at the end; as much
        up and down is a sawtooth; one jump to a level that is kept is flat, but too short to tell where it came last.

    Example:
        >>> judge([100 << 20] * 9).kind, judge([(100 + 5 * epoch) << 20 for epoch in range(9)]).kind
        ('flat', 'growing')
        >>> judge([100 << 20, 180 << 20, 100 << 20, 180 << 20, 100 << 20]).kind, judge([100 << 20]).kind
        ('sawtooth', 'too short to tell')
    """
    if not sizes:
        return Trend(TOO_SHORT, 0, 0, 0.0, 0.0)
    every = -(-len(sizes) // MOST_SIZES)
    scale = max(sizes[0], SMALLEST_BASELINE)
    shares = [size / scale for size in sizes]
    thinned, pace = shares[::-every][::-1], gate * every / GATE_EPOCHS
    rises = grows(thinned, pace) or (len(thinned) >= LONG and grows(lower_envelope(thinned), pace))
    late = late_rise(shares, TOLERANCE)
    suspect = late if shares[-1] - shares[-1 - late] > max(gate / 2, gate * late / GATE_EPOCHS) else 0
    spread = max(shares) - min(shares)
    kind = _kind(shares, rises, spread > gate, suspect)
    return Trend(kind, sizes[0], sizes[-1], slope(thinned) * GATE_EPOCHS / every, spread, shares[-1] - shares[0])


def grows(shares: Sequence[float], pace: float) -> bool:
    """Tell whether a series rises by more than a pace for each size, again and again, and still does in its second half.

    Args:
        shares: Sizes as shares of the baseline.
        pace: The growth from one size to the next that is too much.

    Example:
        >>> grows([1.0, 1.1, 1.2, 1.3], 0.026), grows([1.0, 1.2, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4], 0.026)
        (True, False)
    """
    again, lately = slope(without_largest_rise(shares)), slope(shares[len(shares) // 2 :])
    steady = again > pace / 2 and (len(shares) < LONG or lately > pace / 2)
    return slope(shares) > pace and steady and rank_correlation(shares, TOLERANCE) >= TREND


def lower_envelope(sizes: Sequence[float]) -> list[float]:
    """Return the smaller of each two sizes in a row, so that what every second epoch takes and gives back is left out.

    Example:
        >>> lower_envelope([1, 9, 2, 9, 3])
        [1, 2, 2, 3]
    """
    return [min(pair) for pair in pairwise(sizes)]


def slope(sizes: Sequence[float]) -> float:
    """Return the median slope between all pairs of a series, in bytes for each epoch.

    Example:
        >>> slope([10, 20, 30, 1000, 50]), slope([7])
        (10.0, 0.0)
    """
    slopes = [(later - sooner) / (end - start) for (start, sooner), (end, later) in combinations(enumerate(sizes), 2)]
    return float(median(slopes)) if slopes else 0.0


def without_largest_rise(sizes: Sequence[float]) -> list[float]:
    """Return a series as it would be without its largest rise from one size to the next.

    Example:
        >>> without_largest_rise([100, 101, 180, 182])
        [100, 101, 101, 103]
    """
    rises = [later - sooner for sooner, later in pairwise(sizes)]
    largest = max(rises, default=0)
    start = rises.index(largest) + 1 if largest > 0 else len(sizes)
    return [*sizes[:start], *(size - largest for size in sizes[start:])]


def late_rise(sizes: Sequence[float], tolerance: float = 0.0) -> int:
    """Return how often a series has risen at its end, one size after the other.

    Example:
        >>> late_rise([5, 5, 5, 6, 7, 8]), late_rise([5, 6, 6])
        (3, 0)
    """
    backwards = (later > sooner + tolerance for later, sooner in pairwise(reversed(sizes)))
    return sum(1 for _ in takewhile(bool, backwards))


def rank_correlation(sizes: Sequence[float], tolerance: float = 0.0) -> float:
    """Return how steadily a series rises: 1 where each size is above those before it, -1 where it is below.

    Args:
        sizes: The series.
        tolerance: Differences up to this count as none.

    Example:
        >>> rank_correlation([1, 2, 3]), rank_correlation([3, 2, 1]), round(rank_correlation([1, 1, 2, 2]), 2)
        (1.0, -1.0, 0.67)
    """
    signs = [(later > sooner + tolerance) - (later < sooner - tolerance) for sooner, later in combinations(sizes, 2)]
    return sum(signs) / len(signs) if signs else 0.0


def _kind(sizes: Sequence[float], rises: bool, varies: bool, late: int) -> str:
    if len(sizes) < MINIMUM_STEADY:
        return TOO_SHORT
    if rises:
        return GROWING
    if varies and _falls_back(sizes):
        return SAWTOOTH
    return GROWING if late >= MINIMUM_STEADY else TOO_SHORT if late else FLAT


def _falls_back(sizes: Sequence[float]) -> bool:
    """Tell whether a series both rises and falls by a quarter of its spread; one that moves to a new level does not."""
    least = (max(sizes) - min(sizes)) / 4
    rises = any(size - lowest > least for size, lowest in zip(sizes, accumulate(sizes, min), strict=True))
    falls = any(highest - size > least for size, highest in zip(sizes, accumulate(sizes, max), strict=True))
    return rises and falls


def plotting(module: str = "training.plot") -> Any:
    """Return the module that draws a report.

    Args:
        module: Its name inside this package.

    Raises:
        ConfigurationError: Where matplotlib is not installed.
    """
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The picture needs {error.name}, which is not installed.",
            "Install it: python -m pip install 'openmed-nb[train]'.",
        ) from error


def svg_of(figure: Figure, label: str) -> str:
    """Return a figure as an SVG element that describes itself to a screen reader; text is text, in any font.

    Args:
        figure: The figure.
        label: What is to be seen in it, in words.
    """
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "openmed_nb"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


MEASURES = {
    "allocated": "memory of tensors",
    "reserved": "memory that the device keeps for the process",
    "resident": "memory of the process",
}
"""What is judged, the surest sign of retained tensors first."""

CAUSES = {
    "allocated": "Tensors are retained",
    "reserved": "No tensor is retained; most likely the device keeps blocks for every new shape of a batch",
    "resident": "No tensor is retained; something else in this process grows",
    "resident on mps": "No tensor is retained; most likely graphs, which MPS compiles for every new shape of a batch",
    "graphs": "Autograd graphs are retained, which take memory of the process also after their backward pass",
}
DETACH = "Keep loss.item() or loss.detach() instead of the loss; nb.who_holds() lists what holds tensors."

PAD = "Pad batches to a few fixed lengths (pytorch#132596, #181213)."

KEEP_FEWER = "Keep fewer of them, or keep them outside of the device; nb.who_holds() lists what holds tensors."

REMEDIES = {
    "allocated": DETACH,
    "graphs": DETACH,
    "reserved": PAD,
    "resident": "Look at lists that collect texts or results.",
    "resident on mps": f"{PAD} Then look at lists that collect texts or results.",
}

ADVICE = {
    SAWTOOTH: "Something takes memory in some epochs and gives it back: look at evaluation, logging and checkpoints.",
    TOO_SHORT: "Train on: the first epoch is warm-up, and a trend needs three more.",
    FLAT: "Nothing to do.",
}


@dataclass(frozen=True, repr=False)
class MemoryCurve(Shown):
    """The samples of a training, and what they mean.

    Attributes:
        device: Where the training ran.
        samples: All samples in order; those with ``boundary`` are judged.
        gate: The growth over ten epochs that is suspect, as a share: 0.26 is 26 %.
        holders: What held more tensors at the last boundary than after the warm-up, the most first.
        limit: The share of ``recommended`` at which torch refuses more: on MPS the high watermark, on CUDA what
            ``limit_memory`` has set; ``None`` where there is none.
        process: Which process of the training this is, where there are several.

    Example:
        >>> sizes = [50, 60, 90, 120, 150, 180]
        >>> samples = [MemorySample(n, 10 * n, 1.0 * n, allocated=size << 20) for n, size in enumerate(sizes, 1)]
        >>> MemoryCurve("mps", tuple(samples)).verdict
        'growing'
    """

    device: str
    samples: tuple[MemorySample, ...] = ()
    gate: float = GROWTH_GATE
    holders: tuple[Holder, ...] = ()
    limit: float | None = None
    process: TrainingProcess = ALONE

    @property
    def boundaries(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs, the warm-up included."""
        return tuple(sample for sample in self.samples if sample.boundary)

    @property
    def steady(self) -> tuple[MemorySample, ...]:
        """The samples at the ends of epochs after the first, in which optimizer states and caches are made."""
        return self.boundaries[1:]

    @property
    def simulated(self) -> bool:
        """Whether any figure comes from the simulated MPS."""
        return any(sample.simulated for sample in self.samples)

    @property
    def measure(self) -> str:
        """The figure that decides the verdict: the first that grows, else the first that is not flat."""
        trends = self.trends
        worst = {name: (GROWING, SAWTOOTH, TOO_SHORT, FLAT).index(trend.kind) for name, trend in trends.items()}
        return min(worst, key=lambda name: worst[name], default="resident")

    @cached_property
    def trends(self) -> dict[str, Trend]:
        """What became of each figure that all steady samples have."""
        series = {name: [getattr(sample, name) for sample in self.steady] for name in MEASURES}
        return {name: judge(sizes, self.gate) for name, sizes in series.items() if None not in sizes}

    @property
    def trend(self) -> Trend:
        """What became of the figure that decides."""
        return self.trends.get(self.measure, judge([]))

    @property
    def verdict(self) -> str:
        """``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``."""
        return self.trend.kind

    @property
    def reason(self) -> str:
        """Why this verdict, with the figures."""
        steady, trend = self.steady, self.trend
        if len(steady) < MINIMUM_STEADY:
            return f"{counted(len(steady), 'epoch')} after the warm-up."
        first, last = (
            f"{in_bytes(size)} after epoch {sample.epoch}"
            for size, sample in zip((trend.baseline, trend.last), (steady[0], steady[-1]), strict=True)
        )
        pace = {
            GROWING: f"that is {trend.growth:+.0%} in {GATE_EPOCHS} epochs at this pace, and more than {self.gate:.0%} is suspect",
            FLAT: f"it does not keep growing by more than {self.gate:.0%} in {GATE_EPOCHS} epochs",
            SAWTOOTH: f"in between it rose and fell by {trend.spread:.0%}",
            TOO_SHORT: "it rose in the last epochs only",
        }
        return f"{MEASURES[self.measure].capitalize()} went from {first} to {last}; {pace[trend.kind]}."

    @property
    def advice(self) -> str:
        """What to do next."""
        suspect = self.suspect
        if self.verdict != GROWING:
            slow = self.verdict == FLAT and self.trend.total > self.gate
            advice = (
                f"It is {self.trend.total:+.0%} all the same: watch it where you train for longer."
                if slow
                else ADVICE[self.verdict]
            )
            return f"{advice} But {suspect}. {DETACH}" if suspect else advice
        if suspect and not suspect.graphs:
            return f"{CAUSES['allocated']}: {suspect}. {KEEP_FEWER}"
        cause = "graphs" if suspect and self.measure != "allocated" else self.measure
        by_device = f"{cause} on {kind_of(self.device)}"
        cause = by_device if by_device in CAUSES else cause
        return f"{CAUSES[cause]}{f': {suspect}' if suspect else ''}. {REMEDIES[cause]}"

    @property
    def suspect(self) -> Holder | None:
        """What most likely makes the memory grow: what holds most more; if that is no tensor's memory, a list of graphs."""
        grows = self.verdict == GROWING and self.measure == "allocated"
        suspects = [holder for holder in self.holders if holder.graphs or grows]
        return suspects[0] if suspects else None

    def with_sample(self, sample: MemorySample) -> MemoryCurve:
        """Return the curve with one more sample."""
        return replace(self, samples=(*self.samples, sample))

    def with_holders(self, holders: Sequence[Holder]) -> MemoryCurve:
        """Return the curve with what holds more tensors than after the warm-up."""
        return replace(self, holders=tuple(holders))

    def to_dict(self) -> dict[str, Any]:
        """Return samples, trends and verdict as plain mappings, lists, numbers and strings."""
        return {
            "device": self.device,
            "simulated": self.simulated,
            "verdict": self.verdict,
            "reason": self.reason,
            "advice": self.advice,
            "gate": self.gate,
            "limit": self.limit,
            "process": self.process.rank,
            "processes": self.process.count,
            "trends": {name: trend.to_dict() for name, trend in self.trends.items()},
            "holders": [holder.to_dict() for holder in self.holders],
            "samples": [sample.to_dict() for sample in self.samples],
        }

    def plot(self) -> Any:
        """Return a matplotlib figure of the curve with its limits; a notebook shows it.

        Raises:
            ConfigurationError: Where matplotlib is not installed.
        """
        return plotting().draw(self)

    def report(self) -> Report:
        """Return the verdict, why, what to do, and the figures of each epoch."""
        sentences = [self.reason, self.advice]
        sentences += [self.process.sentence] if self.process.sentence else []
        sentences += [NOTE] if self.simulated else []
        columns = ("epoch", "step", "allocated", "reserved", "peak", "resident", "swap", "pressure", "")
        rows = tuple(self._row(sample) for sample in self.boundaries)
        held = tuple(holder.row for holder in self.holders)
        tables = (
            Table("Memory after each epoch", columns, rows),
            Table("What holds more tensors than after the warm-up", ("name", "kind", "tensors", "memory"), held),
        )
        device = f"{self.device} (SIMULATED)" if self.simulated else self.device
        return Report(f"Memory on {device}: {self.verdict}", tuple(sentences), tables=tables)

    def _row(self, sample: MemorySample) -> tuple[str, ...]:
        sizes = (sample.allocated, sample.reserved, sample.peak, sample.resident, sample.swap)
        note = "warm-up" if sample is self.boundaries[0] else ""
        return (str(sample.epoch), str(sample.step), *map(in_bytes, sizes), sample.pressure or "", note)
