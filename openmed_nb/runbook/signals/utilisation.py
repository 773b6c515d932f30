"""How busy a device is while something runs on it: asked now and then, from a thread of its own."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...devices.machine import Machine, import_psutil, run_command
from ...devices.request import kind_of
from ...devices.simulation import active
from . import macos
from .reading import Run, read_nvidia

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
