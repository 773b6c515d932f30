"""The same work on several devices, compared: the values, and what they mean."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..devices.machine import Machine, import_psutil, run_command
from ..devices.request import canonical, kind_of
from ..devices.simulated import active, shown_device, shows_simulated
from ..display import MARK, NOT_APPLICABLE, NOTE, OK, WARNING, Finding, Report, Shown, Table, counted, findings_table
from ..errors import ConfigurationError, shorten, whole
from ..training.epochs import named
from .measure.benches import Asked
from .measure.timing import Interval, fewest_values, median_interval
from .measure.workloads import (
    TRANSFER,
    Bench,
    Split,
    Subject,
    Workload,
    begun,
    put_on_devices,
    same_random_numbers,
    seconds_of_step,
    settle,
    split_of_steps,
    whole_rounds,
)
from .signals import macos
from .signals.reading import Run, read_nvidia

Read = Callable[[], "float | None"]
"""Returns how busy a device is just now, as a share from 0 to 1, or since it was last asked; ``None`` where it cannot be read."""

INTERVAL = 1.0
"""Seconds between two questions: each starts a command, and what the commands cost is no work of the device."""

FEWEST = 5
"""How many answers a mean needs; each is of one moment, which says nothing of the next."""

SECONDS = 6.0
"""How long a device is watched where nobody says: time for so many answers."""

LONGEST = 2
"""Where answers are slow, a device is watched at most so many times as long."""

NOT_BUSY = ("idle", "iowait")
GUESTS = ("guest", "guest_nice")
"""Linux counts these in ``user`` and ``nice`` too (proc(5)), and psutil's own percentage leaves them out."""


@dataclass(frozen=True)
class Utilisation:
    """How busy a device was, all processes together, as shares from 0 to 1.

    Attributes:
        idle: The mean just before, while nothing of ours ran; ``None`` where it could not be read.
        busy: The mean while the work ran; ``None`` where it could not be read.
        samples: How many answers ``busy`` is the mean of.
    """

    idle: float | None = None
    busy: float | None = None
    samples: int = 0

    @property
    def net(self) -> float | None:
        """What of it was the work: ``busy`` less ``idle``, at least 0; ``None`` where one of them is not known.

        Example:
            >>> Utilisation(0.25, 0.75, 5).net, Utilisation(None, 0.75, 5).net, Utilisation(0.5, 0.25, 5).net
            (0.5, None, 0.0)
        """
        return None if self.idle is None or self.busy is None else max(0.0, self.busy - self.idle)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return it as plain numbers, with the net share."""
        return {**vars(self), "net": self.net}


def utilisation_of(idle: Sequence[float], busy: Sequence[float]) -> Utilisation:
    """Return what two series of answers say; fewer than five of either say nothing.

    Example:
        >>> utilisation_of([0.0, 0.25, 0.5] * 2, [0.75] * 5)
        Utilisation(idle=0.25, busy=0.75, samples=5)
        >>> utilisation_of([0.25] * 5, [1.0, 1.0]).busy
    """
    return Utilisation(mean_of(idle), mean_of(busy), len(busy))


def mean_of(answers: Sequence[float]) -> float | None:
    """Return the mean of answers, ``None`` where they are too few.

    Example:
        >>> mean_of([0.25, 0.75, 0.5, 0.5, 0.5]), mean_of([0.5])
        (0.5, None)
    """
    return statistics.fmean(answers) if len(answers) >= FEWEST else None


def reader_of(
    device: str,
    machine: Machine,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> Read | None:
    """Return what reads how busy a device is; ``None`` under a simulation, and where this cannot be read.

    Args:
        device: ``"cpu"``, ``"mps"``, ``"cuda"`` or ``"cuda:N"``.
        machine: The facts of the computer.
        run: Runs a command and returns what it prints, ``None`` where it cannot.
        environ: The environment variables, which say what CUDA calls its devices.
        uuid: What torch says of the CUDA GPU.

    Example:
        >>> reader_of("mps", Machine("Darwin", "arm64", simulated=True)) is None
        True
        >>> reader_of("cuda", Machine("Linux", "x86_64"), run=lambda command: None) is None
        True
    """
    if machine.simulated or active():
        return None
    if kind_of(device) == "cpu":
        return CpuReader() if cpu_times() else None
    commands: dict[str, Read] = {
        "mps": lambda: share_of(macos.parse_ioreg(run(macos.IOREG)).utilisation),
        "cuda": lambda: share_of(read_nvidia(device, run, environ, uuid).utilisation),
    }
    read = commands.get(kind_of(device))
    return read if read is not None and read() is not None else None


class CpuReader:
    """Reads how busy the processor was since it was last asked, of all cores together."""

    def __init__(self) -> None:
        self._before = cpu_times()

    def __call__(self) -> float | None:
        """Return the share, ``None`` where no time that the system counts has passed."""
        before, self._before = self._before, cpu_times()
        return busy_share(before, self._before)


def cpu_times() -> dict[str, float]:
    """Return the seconds that the processor has spent in each state, of all cores together; empty where they cannot be read."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_share(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return which share of the time between two readings of the processor was work, ``None`` where none has passed.

    Example:
        >>> busy_share({"user": 1.0, "idle": 1.0}, {"user": 2.0, "idle": 4.0}), busy_share({}, {})
        (0.25, None)
    """
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    return 1 - sum(spent.get(name, 0.0) for name in NOT_BUSY) / total if total and before else None


def share_of(percent: int | None) -> float | None:
    """Return percent as a share.

    Example:
        >>> share_of(25), share_of(None)
        (0.25, None)
    """
    return None if percent is None else percent / 100


@contextmanager
def sampling(read: Read, interval: float = INTERVAL) -> Iterator[list[float]]:
    """Ask a reader again and again from another thread while a block runs; the thread ends with the block, in any case.

    What cannot be read is left out, and so is what was answered after the block. No reader may work with tensors: two
    threads on MPS can crash the process (pytorch#197805).

    Args:
        read: The reader.
        interval: Seconds from one question to the next.

    Yields:
        The answers so far.

    Example:
        >>> with sampling(lambda: 0.5, interval=0.001) as answers:
        ...     while not answers:
        ...         pass
        >>> answers[0]
        0.5
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

    thread = threading.Thread(target=ask, name="openmed_nb utilisation", daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


def measured(
    read: Read | None,
    seconds: float,
    work: Callable[[], Any],
    interval: float = INTERVAL,
    clock: Callable[[], float] = time.monotonic,
) -> Utilisation:
    """Return how busy a device is while work is done again and again, and how busy it was just before.

    Args:
        read: Reads how busy the device is; ``None`` where that cannot be read, and then nothing is done.
        seconds: How long the work is done, and as long nothing is done before; longer, up to twice as long, where there are
            too few answers by then.
        work: Does a piece of the work.
        interval: Seconds between two questions.
        clock: Returns the time in seconds.

    Example:
        >>> measured(None, 5.0, lambda: None)
        Utilisation(idle=None, busy=None, samples=0)
    """
    if read is None or seconds <= 0:
        return Utilisation()
    idle = answers_during(lambda: time.sleep(interval / 10), read, seconds, interval, clock)
    return utilisation_of(idle, answers_during(work, read, seconds, interval, clock))


def answers_during(
    work: Callable[[], Any], read: Read, seconds: float, interval: float, clock: Callable[[], float]
) -> list[float]:
    """Return the answers of a reader while work is done again and again, for some seconds."""
    read()  # The processor's share is counted from one question to the next.
    with sampling(read, interval) as answers:
        begin = clock()
        while goes_on(clock() - begin, seconds, len(answers)):
            work()
    return answers


def goes_on(elapsed: float, seconds: float, answers: int) -> bool:
    """Tell whether a device is still watched after some seconds, with so many answers.

    Example:
        >>> goes_on(5.0, 6.0, 5), goes_on(6.5, 6.0, 5), goes_on(6.5, 6.0, 4), goes_on(12.5, 6.0, 4)
        (True, False, True, False)
    """
    return elapsed < seconds * (LONGEST if answers < FEWEST else 1)


SCHEMA = "openmed_nb/comparison/1"

CPU = "cpu"

FASTER, SLOWER, NO_DIFFERENCE = "faster than the CPU", "slower than the CPU", "no difference shown"
"""What an interval says: it is above 1, below 1, or holds it."""

TRY_LARGER = "Use a larger batch: nb.sweep() finds the best."
SPEED_FINDINGS = {
    FASTER: (OK, ""),
    SLOWER: (WARNING, f"{TRY_LARGER} Otherwise compute on the CPU."),
    NO_DIFFERENCE: (WARNING, f"{TRY_LARGER} More pairs show smaller differences."),
}

SIMULATED_SPEED = "a simulated device computes on the CPU"
ALONE = "There is only the CPU here: nothing to compare it with."


@dataclass(frozen=True)
class DeviceFigures:
    """What was measured on one device.

    Attributes:
        device: Its name.
        seconds: How long a step takes at full speed, data included: the median, in seconds.
        quartiles: A quarter of the steps is below the first, and a quarter above the second, in seconds.
        rows: How many texts, or rows, a step usually has.
        split: Where the time goes, each phase waited for.
        speed_up: How many times as fast as the CPU it is; 1.22 is 22 % faster. ``None`` for the CPU itself.
        load: How busy it was, before and meanwhile.
        mean_rows: How many rows a step has in the mean, where a loader gives batches of several sizes.
        simulated: Whether the device is simulated: it computes on the CPU, and has no speed of its own.
    """

    device: str
    seconds: float
    quartiles: tuple[float, float]
    rows: int
    split: Split
    speed_up: Interval | None = None
    load: Utilisation = field(default_factory=Utilisation)
    mean_rows: float | None = None
    simulated: bool = False

    @property
    def rows_per_second(self) -> float:
        """How many texts, or rows, are done in a second."""
        return (self.mean_rows or self.rows) / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return self.split.shares

    @property
    def utilisation(self) -> float | None:
        """How busy the work kept the device, from 0 to 1, without what it does when idle; ``None`` where it is not known."""
        return self.load.net

    @property
    def speed(self) -> str | None:
        """What the interval of the speed-up says, in words; ``None`` for the CPU."""
        if self.speed_up is None:
            return None
        if self.simulated:
            return f"{NOT_APPLICABLE}: simulated"
        return NO_DIFFERENCE if self.speed_up.holds(1.0) else FASTER if self.speed_up.low > 1 else SLOWER

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain mappings, numbers and strings, ready for JSON."""
        return {
            "device": self.device,
            "seconds_per_step": self.seconds,
            "quartiles": list(self.quartiles),
            "rows": self.rows,
            "rows_per_second": self.rows_per_second,
            "phases": self.split.to_dict(),
            "speed_up": None if self.simulated else self.speed_up and self.speed_up.to_dict(),
            "speed": self.speed,
            "utilisation": self.load.to_dict(),
        }


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The same work on the CPU and on other devices, in one run, in turn.

    Attributes:
        name: What the person calls the model.
        task: ``"annotation"``, ``"forward pass"`` or ``"training step"``.
        devices: What was measured on each device, the CPU first.
        pairs: How often each device had its turn.
        workers: How many processes read ahead.
        dtype: The type of the model's numbers, where that is known.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` where that is not known, and where texts are read.
        simulated: Whether a simulated device is among them, of which no figure is one of the device.
        batch_tokens: How many tokens a batch might have on the device that is compared with the CPU, or on the CPU where it
            is alone; ``None`` where no texts were annotated.
    """

    name: str
    task: str
    devices: tuple[DeviceFigures, ...]
    pairs: int
    workers: int = 0
    dtype: str | None = None
    simulated: bool = False
    batch_tokens: int | None = None
    row_shape: str | None = None

    def of(self, device: str) -> DeviceFigures:
        """Return what was measured on a device.

        Raises:
            ConfigurationError: For a device that was not compared.
        """
        for one in self.devices:
            if canonical(one.device) == canonical(device):
                return one
        names = ", ".join(one.device for one in self.devices)
        raise ConfigurationError(f"{device!r} was not compared.", f"Use one of {names}.")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the figures mean, in words."""
        return (*map(self._of_speed, self.devices[1:]), *map(self._of_phases, self.devices))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings, ready for JSON."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "devices": [one.to_dict() for one in self.devices],
            "findings": [one.to_dict() for one in self.findings],
        }

    def report(self) -> Report:
        """Return what there is to show: what the figures mean in words; the figures stand in the HTML."""
        names = [self.shown(one.device) for one in self.devices]
        title = f"Comparison of {self.name} ({self.task}) on {' and '.join(names)}"
        sizes = " and ".join(dict.fromkeys(counted(one.rows, "row") for one in self.devices))
        how = f"{sizes} a step; each device had its turn {counted(self.pairs, 'time')}."
        sentences = ((NOTE,) if self.simulated else ()) + (how,) + ((ALONE,) if len(self.devices) == 1 else ())
        figures = (self._speed_table(), self._phase_table())
        return Report(title, sentences, (findings_table("", self.findings),), figures=figures)

    def shown(self, device: str) -> str:
        """Return the name of a device as it is shown, marked where it is simulated."""
        return f"{device}{MARK}" if self.simulated and canonical(device) == "mps" else device

    def _of_speed(self, one: DeviceFigures) -> Finding:
        name = f"speed on {self.shown(one.device)}"
        if one.speed is None or one.simulated or self.shown(one.device) != one.device:
            return Finding(name, NOT_APPLICABLE, SIMULATED_SPEED)
        status, remedy = SPEED_FINDINGS[one.speed]
        return Finding(name, status, one.speed, remedy)

    def _of_phases(self, one: DeviceFigures) -> Finding:
        name = f"time on {self.shown(one.device)}"
        if one.device == CPU and one.split.dominating == TRANSFER:  # Nothing is copied there: the rest is even smaller.
            return Finding(name, OK, "the work is too small to tell")
        return one.split.finding(name, self.workers)

    def _speed_table(self) -> Table:
        columns = ("device", "milliseconds a step", "quartiles", "rows a second", "times the CPU", "utilisation")
        rows = tuple(
            (
                self.shown(one.device),
                f"{1000 * one.seconds:.2f}",
                f"{1000 * one.quartiles[0]:.2f} to {1000 * one.quartiles[1]:.2f}",
                f"{one.rows_per_second:.1f}",
                NOT_APPLICABLE if one.simulated else shown_interval(one.speed_up),
                shown_utilisation(one.load),
            )
            for one in self.devices
        )
        return Table("Speed", columns, rows)

    def _phase_table(self) -> Table:
        names = dict.fromkeys(name for one in self.devices for name in one.split.seconds)
        rows = tuple((name, *(shown_phase(one.split, name) for one in self.devices)) for name in names)
        return Table("Where the time goes", ("phase", *(self.shown(one.device) for one in self.devices)), rows)


def shown_interval(interval: Interval | None) -> str:
    """Return a speed-up as it is shown, with how sure it is.

    Example:
        >>> shown_interval(Interval(1.1, 1.25, 1.5, 0.9586)), shown_interval(None)
        ('1.25 (1.10 to 1.50, 95.9 % sure)', '')
    """
    if interval is None:
        return ""
    return f"{interval.middle:.2f} ({interval.low:.2f} to {interval.high:.2f}, {100 * interval.level:.1f} % sure)"


def shown_utilisation(load: Utilisation) -> str:
    """Return how busy a device was, as it is shown.

    Example:
        >>> shown_utilisation(Utilisation(0.05, 0.65, 5)), shown_utilisation(Utilisation())
        ('60 % (65 % less 5 % when idle)', 'not known')
    """
    if load.net is None or load.busy is None or load.idle is None:
        return "not known"
    return f"{100 * load.net:.0f} % ({100 * load.busy:.0f} % less {100 * load.idle:.0f} % when idle)"


def shown_phase(split: Split, name: str) -> str:
    """Return the time and the share of a phase, as they are shown.

    Example:
        >>> shown_phase(Split({"data": 0.001, "forward": 0.003}), "data"), shown_phase(Split({}), "data")
        ('1.00 ms (25 %)', '')
    """
    if name not in split.seconds:
        return ""
    return f"{1000 * split.seconds[name]:.2f} ms ({100 * split.shares[name]:.0f} %)"


PAIRS = 20
"""How often each device has its turn where nobody says; 20 pairs give an interval that is 95.9 % sure."""

WARM_UP = 3
"""How many steps come before any that counts: the first compile, fill caches, and start what reads ahead."""

PHASE_STEPS = 10
"""How many steps are waited for phase by phase, fewer where they are slow."""

SHORTEST_TURN, LONGEST_TURN = 0.02, 0.5
"""A turn repeats a quick step until it takes so many seconds, as long as none takes more."""

LONGEST_WATCH = 3600
"""A device is watched for at most so many seconds."""

ROUNDS_OF_WORKERS = 4
"""A turn has at least so many batches of each worker of a loader: they come at about the same time, in bursts."""


@dataclass(frozen=True)
class Plan:
    """How a comparison is measured.

    Attributes:
        batch_size: How many rows a step has; ``None`` for what is usual.
        pairs: How often each device has its turn.
        seconds: How long each device is watched; 0 to leave that out.
    """

    batch_size: int | None = None
    pairs: int = PAIRS
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("pairs", fewest_values())):
            if (value := getattr(self, name)) is not None or name != "batch_size":
                object.__setattr__(self, name, whole(name, value, least))
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not (number and 0 <= self.seconds <= LONGEST_WATCH):
            what = f"seconds cannot be {shorten(repr(self.seconds))}."
            raise ConfigurationError(what, f"Pass a number from 0 to {LONGEST_WATCH}; 0 leaves the utilisation out.")


def devices_to_compare(*names: str) -> tuple[str, ...]:
    """Return the devices of a comparison: the CPU, which the others are measured by, and each other once.

    Example:
        >>> devices_to_compare("cuda", "cpu", "cuda:0")
        ('cpu', 'cuda')
    """
    first: dict[str, str] = {}
    for name in (CPU, *names):
        first.setdefault(canonical(name), name)
    return tuple(first.values())


def check_comparable(asked: Asked) -> None:
    """Refuse what cannot be put on devices, before anything is loaded.

    Raises:
        ConfigurationError: For a function, which computes where it computes, and for an argument that names one device.
    """
    asked.check()
    if asked.is_step:
        what = f"{named(asked.model)} is a function, and only its own code says on which device it computes."
        remedy = "Pass a model's name, a pipeline or a torch module; nb.profile() and nb.sweep() take functions."
        raise ConfigurationError(what, remedy)
    if "device" in asked.arguments:
        raise ConfigurationError("compare() has no option device.", "Name the devices: devices=['mps'].")


def comparison_of(
    subject: Subject,
    devices: Sequence[str],
    plan: Plan,
    reader: Callable[[str], Read | None],
    tell: Callable[[str], None] = lambda _device: None,
) -> Comparison:
    """Measure the same work on each device.

    What was loaded for it is let go afterwards, and random numbers go on as if nothing had been.

    Args:
        subject: What is measured.
        devices: The CPU, and the others.
        plan: How it is measured.
        reader: Returns what reads how busy a device is, ``None`` where that cannot be read.
        tell: Is told which device is made ready.

    Raises:
        DeviceUnavailable: Where a batch does not fit in the memory of a device.
    """
    with contextlib.ExitStack() as stack:
        benches = stack.enter_context(put_on_devices(subject, devices, tell))
        for device in devices:
            stack.enter_context(same_random_numbers(device))
        return measured_on(benches, subject.name, plan, reader)


def measured_on(
    benches: Mapping[str, Bench], name: str, plan: Plan, reader: Callable[[str], Read | None]
) -> Comparison:
    """Return what is measured on devices that are ready."""
    work = {device: bench.stream(plan.batch_size) for device, bench in benches.items()}
    turns = seconds_in_turn(work, plan.pairs)
    splits = {device: split_on(one) for device, one in work.items()}
    loads = {
        device: load_on(one, reader(device) if plan.seconds else None, plan.seconds) for device, one in work.items()
    }
    figures = tuple(figures_of(one, device, turns, splits, loads) for device, one in work.items())
    first, tokens = work[CPU], [one.batch_tokens for device, one in work.items() if device != CPU]
    return Comparison(
        name,
        first.task,
        figures,
        plan.pairs,
        first.workers,
        first.dtype,
        active(),
        batch_tokens=next(iter(tokens), first.batch_tokens),
        row_shape=first.row_shape,
    )


def figures_of(
    workload: Workload,
    device: str,
    turns: Mapping[str, Sequence[float]],
    splits: Mapping[str, Split],
    loads: Mapping[str, Utilisation],
) -> DeviceFigures:
    """Return what was measured on a device; the speed-up is the median of the ratios of all pairs."""
    seconds = turns[device]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    ratios = [cpu / own for cpu, own in zip(turns[CPU], seconds, strict=True)]
    speed_up = None if device == CPU else median_interval(ratios)
    return DeviceFigures(
        device,
        middle,
        (low, high),
        workload.usual_rows,
        splits[device],
        speed_up,
        loads[device],
        mean_rows=workload.mean_rows,
        simulated=shows_simulated(shown_device(device)),
    )


def seconds_in_turn(work: Mapping[str, Workload], pairs: int) -> dict[str, list[float]]:
    """Return the seconds of a step on each device at full speed, in rounds that begin with each device in turn.

    The n-th turn of each device has the same batches where the loader gives them in the same order.
    """
    seconds: dict[str, list[float]] = {device: [] for device in work}
    with contextlib.ExitStack() as stack:
        batches = {device: stack.enter_context(begun(one)) for device, one in work.items()}
        warm = {device: warmed_up(one, batches[device]) for device, one in work.items()}
        steps = steps_of_turn(warm.values(), max(one.workers for one in work.values()))
        for number in range(pairs):
            for device in rotated(list(work), number):
                settle(work[device], batches[device])
                seconds[device].append(seconds_of_step(work[device], batches[device], steps))
    return seconds


def warmed_up(workload: Workload, batches: Iterator[Any]) -> float:
    """Run the first steps, and return how long the last of them took, in seconds."""
    return [seconds_of_step(workload, batches) for _ in range(WARM_UP)][-1]


def steps_of_turn(seconds: Collection[float], workers: int) -> int:
    """Return how many steps a turn has.

    Args:
        seconds: How long a step takes on each device.
        workers: How many processes read ahead.

    Example:
        >>> steps_of_turn([0.004, 0.001], 0), steps_of_turn([1.0, 0.001], 0), steps_of_turn([1.0, 0.5], 2)
        (20, 1, 8)
    """
    quickest, slowest = max(1e-6, min(seconds)), max(1e-6, *seconds)
    most = max(1, int(LONGEST_TURN / slowest))
    return whole_rounds(max(min(math.ceil(SHORTEST_TURN / quickest), most), ROUNDS_OF_WORKERS * workers), workers)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return names with another one first each time.

    Example:
        >>> rotated(["cpu", "mps"], 0), rotated(["cpu", "mps"], 1)
        (['cpu', 'mps'], ['mps', 'cpu'])
    """
    first = number % len(names)
    return [*names[first:], *names[:first]]


def split_on(workload: Workload) -> Split:
    """Return where the time of a step goes; steps follow each other here, as loaders that read ahead need it."""
    with begun(workload) as batches:
        warmed_up(workload, batches)
        settle(workload, batches)
        fewest = ROUNDS_OF_WORKERS * workload.workers
        return split_of_steps(workload, batches, whole_rounds(max(PHASE_STEPS, fewest), workload.workers), fewest)


def load_on(workload: Workload, read: Read | None, seconds: float) -> Utilisation:
    """Return how busy a device is while it works without a pause, and how busy it was just before."""
    with begun(workload) as batches:
        return measured(read, seconds, lambda: workload.run(next(batches)))
