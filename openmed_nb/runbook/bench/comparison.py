"""``nb.compare``: the same work on several devices, in turn, and what the figures mean."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..._events.activity import LOADING, ProgressEvent
from ..._render.display import NOT_APPLICABLE, OK, WARNING, Finding, JsonMixin, Report, Table, findings_table, pluralize
from ..._render.drawing import Bar, Chart
from ..._utils.clock import current_time
from ..._utils.text import describe_value
from ..._utils.validation import check_integer, check_number, check_optional_integer
from ...devices.machine import format_device
from ...devices.registry import parse_device_argument
from ...devices.request import normalize_device
from ...errors import ConfigurationError, DeviceUnavailableError
from ...session import SESSION
from ..records.signals import UtilizationReader, make_utilization_reader
from .timing import (
    MIN_VALUES,
    TRANSFER,
    Interval,
    PhaseTimes,
    format_rate,
    interleave,
    median_interval,
    round_up_to_workers,
)
from .workloads import StepReport, Workload, build_benchmarks, make_target, share_batch_plan

CPU = "cpu"

# What the interval of a speed-up says: it is above 1, below 1, or holds it.
FASTER = "faster than the CPU"
SLOWER = "slower than the CPU"
NO_DIFFERENCE = "no difference shown"

LARGER_BATCH_REMEDY = "Use a larger batch: nb.sweep() finds the best."
SPEED_FINDINGS = {
    FASTER: (OK, ""),
    SLOWER: (WARNING, f"{LARGER_BATCH_REMEDY} Otherwise compute on the CPU."),
    NO_DIFFERENCE: (WARNING, f"{LARGER_BATCH_REMEDY} More pairs show smaller differences."),
}

SIMULATED_SPEED = "a simulated device computes on the CPU"
CPU_ONLY_NOTICE = "There is only the CPU here: nothing to compare it with."

SAMPLE_INTERVAL = 0.5  # Seconds between two questions: each starts a command, whose cost is not work of the device.
EXTENSION_FACTOR = 2  # If answers are slow, a device is watched at most so many times as long.
# How many answers a mean of utilization needs; each is of one moment, which says nothing of the next.
MIN_SAMPLES = 5


@dataclass(frozen=True)
class Utilization(JsonMixin):
    """How busy a device was, all processes together, as shares from 0 to 1.

    Attributes:
        idle: The mean just before, while nothing of the work ran; ``None`` if it could not be read.
        busy: The mean while the work ran; ``None`` if it could not be read.
        samples: How many answers ``busy`` is the mean of.

    Example:
        >>> Utilization(0.25, 0.75, 5).net, Utilization(None, 0.75, 5).net, Utilization(0.5, 0.25, 5).net
        (0.5, None, 0.0)
    """

    idle: float | None = None
    busy: float | None = None
    samples: int = 0

    JSON_PROPERTIES = ("net",)

    @property
    def net(self) -> float | None:
        """What of it was the work: ``busy`` less ``idle``, at least 0; ``None`` if one of them is not known."""
        return None if self.idle is None or self.busy is None else max(0.0, self.busy - self.idle)

    def __str__(self) -> str:
        if self.net is None or self.busy is None or self.idle is None:
            return "not known"
        return f"{100 * self.net:.0f} % ({100 * self.busy:.0f} % less {100 * self.idle:.0f} % when idle)"


@dataclass(frozen=True)
class DeviceMetrics:
    """What was measured on one device.

    Attributes:
        device: Its name.
        seconds: How long a step takes at full speed, data included: the median, in seconds.
        quartiles: A quarter of the steps is below the first, and a quarter above the second, in seconds.
        rows: How many texts, or rows, a step usually has.
        split: Where the time goes, each phase waited for.
        speedup: How many times as fast as the CPU it is; 1.22 is 22 % faster. ``None`` for the CPU itself.
        load: How busy it was, before and meanwhile.
        mean_rows: How many rows a step has in the mean, if a loader gives batches of several sizes.
        simulated: Whether the device is simulated: it computes on the CPU, and has no speed of its own.
    """

    device: str
    seconds: float
    quartiles: tuple[float, float]
    rows: int
    phase_times: PhaseTimes
    speedup: Interval | None = None
    utilization_details: Utilization = field(default_factory=Utilization)
    mean_rows: float | None = None
    simulated: bool = False

    @property
    def rows_per_second(self) -> float:
        """How many texts, or rows, are done in a second."""
        return (self.mean_rows or self.rows) / self.seconds if self.seconds else 0.0

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return self.phase_times.fractions

    @property
    def utilization(self) -> float | None:
        """How busy the work kept the device, from 0 to 1, without what it does when idle; ``None`` if it is not known."""
        return self.utilization_details.net

    @property
    def speedup_category(self) -> str | None:
        """What the interval of the speed-up says, in words; ``None`` for the CPU."""
        if self.speedup is None:
            return None
        if self.simulated:
            return f"{NOT_APPLICABLE}: simulated"
        if self.speedup.contains(1.0):
            return NO_DIFFERENCE
        return FASTER if self.speedup.low > 1 else SLOWER

    def to_dict(self) -> dict[str, Any]:
        """Return it as mappings, numbers and strings, ready for JSON."""
        return {
            "device": self.device,
            "seconds_per_step": self.seconds,
            "quartiles": list(self.quartiles),
            "rows": self.rows,
            "rows_per_second": self.rows_per_second,
            "phases": self.phase_times.to_dict(),
            "speedup": None if self.simulated else self.speedup and self.speedup.to_dict(),
            "speedup_category": self.speedup_category,
            "utilization": self.utilization_details.to_dict(),
        }


@dataclass(frozen=True, repr=False)
class Comparison(StepReport):
    """The same work on the CPU and on other devices, in one run, in turn.

    Beside ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated`` it has:

    Attributes:
        devices: What was measured on each device, the CPU first.
        pairs: How often each device had its turn.
        batch_tokens: How many tokens a batch might have; ``None`` if no texts were annotated.
    """

    devices: tuple[DeviceMetrics, ...]
    rounds: int
    batch_tokens: int | None = None

    SCHEMA = "openmed_nb/comparison/1"
    JSON_PROPERTIES = ("findings",)

    def for_device(self, device: str) -> DeviceMetrics:
        """Return what was measured on a device.

        Raises:
            ConfigurationError: For a device that was not compared.
        """
        for one in self.devices:
            if normalize_device(one.device) == normalize_device(device):
                return one
        names = ", ".join(one.device for one in self.devices)
        raise ConfigurationError(f"{describe_value(device)} was not compared.", f"Use one of {names}.")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the figures mean, in words."""
        return (*map(self._of_speed, self.devices[1:]), *map(self._of_phases, self.devices))

    @property
    def fastest(self) -> DeviceMetrics | None:
        """The device that is faster than the others for sure; ``None`` if no difference was shown, or it is simulated."""
        sure = [one for one in self.devices if one.speedup_category == FASTER]
        others_slower = all(one.speedup_category == SLOWER for one in self.devices[1:])
        best = self.devices[0] if others_slower and len(self.devices) > 1 else None
        return max(sure, key=lambda one: one.rows_per_second, default=best)

    @property
    def headline(self) -> str:
        """Which device is how many times as fast as the CPU, in a sentence."""
        return "; ".join(map(self._describe, self.devices[1:])) or CPU_ONLY_NOTICE

    def _describe(self, one: DeviceMetrics) -> str:
        name = self.shown(one.device)
        if one.simulated or one.speedup is None:
            return f"{name} has no speed of its own: {SIMULATED_SPEED}"
        low = one.speedup.low
        middle = one.speedup.median
        high = one.speedup.high
        if one.speedup_category == NO_DIFFERENCE:
            return f"No difference in speed was shown between {name} and the CPU ({low:.2f} to {high:.2f} times)"
        if one.speedup_category == SLOWER:
            return f"The CPU is {1 / middle:.2f} times as fast as {name} ({1 / high:.2f} to {1 / low:.2f})"
        return f"{name} is {middle:.2f} times as fast as the CPU ({low:.2f} to {high:.2f})"

    def _bar(self, one: DeviceMetrics) -> Bar:
        """Return the speed of a device as a bar, with the quartiles of its steps."""
        rows = one.mean_rows or one.rows
        slow, fast = (rows / seconds if all(one.quartiles) else None for seconds in one.quartiles[::-1])
        shown = f"{format_rate(one.rows_per_second)} rows/s"
        name = self.shown(one.device)
        return Bar(name, one.rows_per_second, shown, low=slow, high=fast, emphasized=one is self.fastest)

    def to_report(self) -> Report:
        """Return what the figures mean in words; the figures stand in the HTML."""
        names = [self.shown(one.device) for one in self.devices]
        title = f"Comparison of {self.name} ({self.task}) on {' and '.join(names)}"
        sizes = " and ".join(dict.fromkeys(pluralize(one.rows, "row") for one in self.devices))
        how = f"{sizes} a step; each device had its turn {pluralize(self.rounds, 'time')}."
        columns = ("device", "milliseconds a step", "quartiles", "rows a second", "times the CPU", "utilization")
        speeds = Table("Speed", columns, tuple(map(self._speed_row, self.devices)), collapsed=True)
        phases = dict.fromkeys(name for one in self.devices for name in one.phase_times.seconds)
        rows = tuple((name, *(one.phase_times.shown(name) for one in self.devices)) for name in phases)
        split = Table("Where the time goes", ("phase", *names), rows, collapsed=True)
        drawing = Chart("Speed, with the quartiles of the steps", tuple(map(self._bar, self.devices)))
        return Report(
            title,
            (how, CPU_ONLY_NOTICE) if len(self.devices) == 1 else (how,),
            (findings_table("", self.findings),),
            metrics=(speeds, split),
            html_sentences=(self.headline, f"{title}: {how}"),
            charts=(drawing,),
        )

    def _of_speed(self, one: DeviceMetrics) -> Finding:
        shown = self.shown(one.device)
        if one.speedup_category is None or one.simulated or shown != one.device:
            return Finding(f"speed on {shown}", NOT_APPLICABLE, SIMULATED_SPEED)
        status, remedy = SPEED_FINDINGS[one.speedup_category]
        return Finding(f"speed on {shown}", status, one.speedup_category, remedy)

    def _of_phases(self, one: DeviceMetrics) -> Finding:
        name = f"time on {self.shown(one.device)}"
        if (
            one.device == CPU and one.phase_times.dominant_phase == TRANSFER
        ):  # Nothing is copied there: the rest is even smaller.
            return Finding(name, OK, "the work is too small to tell")
        return one.phase_times.finding(name, self.data_remedy)

    def _speed_row(self, one: DeviceMetrics) -> tuple[str, ...]:
        low, high = one.quartiles
        return (
            self.shown(one.device),
            f"{1000 * one.seconds:.2f}",
            f"{1000 * low:.2f} to {1000 * high:.2f}",
            f"{one.rows_per_second:,.1f}",
            NOT_APPLICABLE if one.simulated else str(one.speedup or ""),
            str(one.utilization_details),
        )


DEFAULT_ROUNDS = 20  # How often each device has its turn by default; 20 pairs give an interval that is 95.9 % sure.
WARM_UP = 3  # Steps before any that counts: the first compile, fill caches, and start what reads ahead.
PHASE_STEPS = 10  # How many steps are waited for phase by phase, fewer if they are slow.
MIN_TRIAL_SECONDS = 0.02  # A turn repeats a quick step until it takes so many seconds.
MAX_TRIAL_SECONDS = 0.5  # No step is repeated in a turn for more seconds.
SECONDS = 30.0  # How long all of it may take by default.
TRIAL_TIME_FRACTION = (
    0.4  # The share of that time after which no more turns begin; the rest is for the phases and to watch.
)
UTILIZATION_SECONDS = 3.0  # How long a device is watched by default: time for enough answers.
MAX_UTILIZATION_SECONDS = 3600  # A device is watched for at most so many seconds.
BATCHES_PER_WORKER = 4  # A turn has at least so many batches of each worker of a loader: they come in bursts.


def compare(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    devices: Any = None,
    training: bool = False,
    batch_size: int | None = None,
    rounds: int = DEFAULT_ROUNDS,
    utilization_seconds: float = UTILIZATION_SECONDS,
    seconds: float = SECONDS,
    progress: bool = True,
    **arguments: Any,
) -> Comparison:
    """Do the same work on each device in one run, in turn: how much faster than the CPU, and where the time goes.

    Each device has its turns at full speed, data included, and the speed-up is the median of the ratios to the CPU of all
    rounds, with an interval that assumes nothing of how times are distributed. Then steps are waited for phase by phase, and
    at last each device works without a pause while the system is asked how busy it is. :func:`annotate` tokenizes while a GPU
    computes: of its phases there, data count only as long as they outlast the forward pass.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; a torch module; or a
            function of your own, which computes where the tensors of its batch are.
        data: Texts for a name or a pipeline; example inputs or a ``DataLoader`` for a module or for training; for a function
            batches, which are moved to each device, or a function that makes one of a number of rows. Synthetic texts where
            nobody says.
        devices: The devices beside the CPU, which is always among them; ``None`` for all that can be used.
        training: Whether training steps are compared: forward, backward and AdamW, on copies of the model.
        batch_size: How many texts, or rows, a step has; 32 texts, or as many rows as the example or the loader has. Texts
            run in batches of tokens, the same on every device and planned as for the first but the CPU: of 128 for each text
            of a ``batch_size`` that is passed, which is what :func:`sweep` measures; without one, of as many as suit that
            device. The result says it as ``batch_tokens``.
        pairs: How often each device has its turn, from 6, if there is time for it.
        watch: For how many seconds each device is watched while it works, and before while it does not, up to twice as long
            if there are too few answers for a mean by then; 0 leaves ``utilization`` out.
        seconds: About how long the whole call may take. Where the work is slow, there are fewer turns, but at least 6, and devices
            are watched for a shorter time, or not at all; ask for more with it to have more.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The comparison: ``of("mps")`` has ``speedup`` with ``low``, ``middle`` and ``high`` (1.22 is 22 % faster), ``speed`` in
        words, ``seconds``, ``rows_per_second``, ``shares`` of the phases, ``split.dominant_phase``, and ``utilization`` from 0 to 1
        without what the device does when idle, ``None`` where it cannot be read; ``findings`` says it in words. Its text has
        no times.

    Raises:
        ConfigurationError: For data and numbers that are none.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where a device cannot be used, or a batch does not fit in its memory.

    On its own, a CPU takes smaller batches of texts, with less filling, than are planned for MPS or CUDA: the bundled model is 1.3
    to 1.4 times faster in them than in those for MPS (notes and sentences, one core).

    Models are loaded for the comparison and let go after it; the session, a model of yours and random numbers stay as they
    are; hooks of a model of yours run in its copies. Utilization is that of all processes together: on a Mac ``ioreg`` says it, on CUDA ``nvidia-smi``, and of the CPU
    psutil, once a second. Under a simulated MPS device nothing of it is read.

    Example:
        >>> import torch
        >>> comparison = compare(torch.nn.Linear(8, 8), torch.ones(2, 8), devices="cpu", rounds=6, utilization_seconds=0)
        >>> list(comparison.for_device("cpu").phase_fractions), comparison.for_device("cpu").speedup is None
        (['data', 'transfer', 'forward'], True)
        >>> compare(torch.linalg.inv, [torch.eye(8)], devices="cpu", rounds=6, utilization_seconds=0).task
        'own step'
    """
    begin = current_time()
    batch_size = check_optional_integer("batch_size", batch_size)
    rounds = check_integer("rounds", rounds, MIN_VALUES)
    seconds = check_number("seconds", seconds, above=0, example=f"{SECONDS:g}")
    utilization_seconds = check_number(
        "utilization_seconds",
        utilization_seconds,
        MAX_UTILIZATION_SECONDS,
        example=f"{UTILIZATION_SECONDS:g}; 0 leaves the utilization out",
    )
    if "device" in arguments:
        raise ConfigurationError("compare() has no option device.", "Name the devices: devices=['mps'].")
    with SESSION.operation(progress):
        subject, device = make_target(model, data, training=training, arguments=arguments, moved=True)
        asked: Iterable[Any] = (device, *usable_devices()) if devices is None else (devices,)
        if isinstance(devices, Iterable) and not isinstance(devices, str):
            asked = devices
        names = select_devices(*(SESSION.device(name).device for name in asked))
        alone = "" if len(names) > 1 else ", the only device here"

        def tell(name: str) -> None:
            what = f"{subject.name} on {format_device(name)}{alone}"
            SESSION.notify(ProgressEvent(LOADING, what, names.index(name), len(names)))

        with build_benchmarks(subject, names, tell) as benches:
            work = {name: bench.data_workload(batch_size) for name, bench in share_batch_plan(benches).items()}
            return run_comparison(work, rounds, utilization_seconds, begin + seconds)


def usable_devices() -> Iterator[str]:
    """Yield the devices that compute, the best first."""
    for one in SESSION.list_devices().devices:
        if one.usable is not False:
            with contextlib.suppress(DeviceUnavailableError):  # A GPU that was not tried yet, and that fails.
                yield SESSION.device(one.device).device


def select_devices(*names: str) -> tuple[str, ...]:
    """Return the devices of a comparison: the CPU, which the others are compared with, and each other once.

    Example:
        >>> select_devices("cuda", "cpu", "cuda:0")
        ('cpu', 'cuda')
    """
    first: dict[str, str] = {}
    for name in (CPU, *names):
        first.setdefault(normalize_device(name), name)
    return tuple(first.values())


def run_comparison(work: Mapping[str, Workload], pairs: int, watch: float, until: float = math.inf) -> Comparison:
    """Return what is measured of the same work on devices: its turns, its phases, and then how busy each device is.

    It ends about at a moment of the clock, ``until``.
    """
    turns = time_interleaved(work, pairs, current_time() + TRIAL_TIME_FRACTION * (until - current_time()))
    first = work[CPU]
    phases = SESSION.track("Comparing", f"{first.name}, phase by phase", work, "device")
    splits = {name: measure_phases(work[name]) for name in phases}
    loads: dict[str, Utilization] = {}
    if watch:
        for name in SESSION.track("Comparing", f"{first.name}, how busy a device is", work, "device"):
            loads[name] = measure_utilization(
                name, work[name], sampling_seconds(watch, until - current_time(), len(work) - len(loads))
            )
    SESSION.notify(ProgressEvent("Comparing", first.name))
    figures = tuple(
        device_metrics(one, name, turns, splits[name], loads.get(name, Utilization())) for name, one in work.items()
    )
    return Comparison(**first.facts, devices=figures, rounds=len(turns[CPU]), batch_tokens=first.batch_tokens)


def device_metrics(
    workload: Workload, device: str, turns: Mapping[str, Sequence[float]], split: PhaseTimes, load: Utilization
) -> DeviceMetrics:
    """Return what was measured on a device; the speed-up is the median of the ratios of all pairs."""
    seconds = turns[device]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    ratios = [cpu / own for cpu, own in zip(turns[CPU], seconds, strict=True)]
    return DeviceMetrics(
        device,
        middle,
        (low, high),
        workload.usual_rows,
        split,
        None if device == CPU else median_interval(ratios),
        load,
        mean_rows=workload.mean_rows,
        simulated=parse_device_argument(device).is_simulated,
    )


def time_interleaved(work: Mapping[str, Workload], pairs: int, until: float = math.inf) -> dict[str, list[float]]:
    """Return the seconds of a step on each device at full speed, in rounds that begin with each device in turn.

    After a moment of the clock, ``until``, no round begins but those without which there is no interval.

    The n-th turn of each device has the same batches if the loader gives them in the same order.
    """
    with contextlib.ExitStack() as stack:
        batches = {device: stack.enter_context(workload.open_batches()) for device, workload in work.items()}
        warm = [warm_up(workload, batches[device]) for device, workload in work.items()]
        steps = steps_per_trial(warm, max(workload.workers for workload in work.values()))

        def turn_of(device: str) -> float:
            work[device].reach_steady_state(batches[device])
            return work[device].seconds_of_steps(batches[device], steps)

        model = next(iter(work.values())).name
        alone = "" if len(work) > 1 else " with nothing but the CPU"
        turns = SESSION.track("Comparing", f"{model}{alone}", range(pairs), "turn")
        rounds = itertools.takewhile(lambda turn: turn < MIN_VALUES or current_time() <= until, turns)
        return interleave({device: partial(turn_of, device) for device in work}, rounds)


def warm_up(workload: Workload, batches: Iterator[Any]) -> float:
    """Run the first steps, and return how long the last of them took, in seconds."""
    return [workload.seconds_of_steps(batches) for _ in range(WARM_UP)][-1]


def steps_per_trial(seconds: Collection[float], workers: int) -> int:
    """Return how many steps a turn has, from the seconds of a step on each device and the processes that read ahead."""
    quickest = max(1e-6, min(seconds))
    slowest = max(1e-6, *seconds)
    steps = min(math.ceil(MIN_TRIAL_SECONDS / quickest), max(1, int(MAX_TRIAL_SECONDS / slowest)))
    return round_up_to_workers(max(steps, BATCHES_PER_WORKER * workers), workers)


def measure_phases(workload: Workload) -> PhaseTimes:
    """Return where the time of a step goes; steps follow each other here, as loaders that read ahead need it."""
    with workload.open_batches() as batches:
        warm_up(workload, batches)
        workload.reach_steady_state(batches)
        fewest = BATCHES_PER_WORKER * workload.workers
        return workload.split(batches, round_up_to_workers(max(PHASE_STEPS, fewest), workload.workers), fewest)


def sampling_seconds(watch: float, left: float, devices: int) -> float:
    """Return for how many seconds a device is watched, of those that are left for so many devices, at work and before.

    Where there is no time for enough answers, it is not watched.

    Example:
        >>> sampling_seconds(3, 60, 2), sampling_seconds(30, 12, 2), sampling_seconds(3, 5, 2), sampling_seconds(0, 60, 2)
        (3, 3.0, 0.0, 0)
    """
    room = left / (2 * devices)
    if watch <= room:
        return watch
    return room if room >= MIN_SAMPLES * SAMPLE_INTERVAL else 0.0


def measure_utilization(device: str, workload: Workload, seconds: float) -> Utilization:
    """Return how busy a device is while it works without a pause, and how busy it was just before."""
    if not seconds:
        return Utilization()
    read = make_utilization_reader(
        device, SESSION.device_manager.machine, environ=SESSION.environ, uuid=parse_device_argument(device).uuid()
    )
    with workload.open_batches() as batches:
        return utilization_during(read, seconds, lambda: workload.run(next(batches)))


def utilization_during(
    read: UtilizationReader | None, seconds: float, work: Callable[[], Any], interval: float = SAMPLE_INTERVAL
) -> Utilization:
    """Return how busy a device is while work is done again and again, and how busy it was just before, while nothing is done.

    Each takes some seconds, up to twice as many if there are too few answers by then, and too few say nothing; what cannot
    be read is not run.
    """
    if read is None:
        return Utilization()
    idle = samples_during(partial(time.sleep, interval / 10), read, seconds, interval)
    busy = samples_during(work, read, seconds, interval)
    idle_mean, busy_mean = (
        statistics.fmean(answers) if len(answers) >= MIN_SAMPLES else None for answers in (idle, busy)
    )
    return Utilization(idle_mean, busy_mean, len(busy))


def samples_during(
    work: Callable[[], Any], read: UtilizationReader, seconds: float, interval: float = SAMPLE_INTERVAL
) -> list[float]:
    """Return what a reader answers in another thread while work is done again and again; the thread always ends with the work.

    It is asked every ``interval`` seconds. What cannot be read is left out, and so is what was answered after the work. No
    reader may work with tensors: two threads on MPS can crash the process (pytorch#197805).
    """
    answers: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        due = time.monotonic() + interval
        while not ended.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + interval
            answer = read()
            if answer is not None and not ended.is_set():
                answers.append(answer)

    read()  # The processor's share is counted from one question to the next.
    thread = threading.Thread(target=ask, name="openmed_nb utilization", daemon=True)
    thread.start()
    try:
        begin = current_time()
        while current_time() - begin < seconds * (1 if len(answers) >= MIN_SAMPLES else EXTENSION_FACTOR):
            work()
    finally:
        ended.set()
        thread.join()
    return answers
