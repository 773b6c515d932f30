"""How busy a device is while it works, less what it was just before: asked of the system in another thread."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..._render.display import Plain
from ..._utils.clock import now
from ...devices.registry import device_of
from ...session import SESSION
from ..records.signals import Busy, busy_reader
from .workloads import Workload

ASKED_EVERY = 0.5  # Seconds between two questions: each starts a command, whose cost is not work of the device.
EXTENDED = 2  # If answers are slow, a device is watched at most so many times as long.
# How many answers a mean of utilisation needs; each is of one moment, which says nothing of the next.
FEWEST_ANSWERS = 5


@dataclass(frozen=True)
class Utilisation(Plain):
    """How busy a device was, all processes together, as shares from 0 to 1.

    Attributes:
        idle: The mean just before, while nothing of the work ran; ``None`` if it could not be read.
        busy: The mean while the work ran; ``None`` if it could not be read.
        samples: How many answers ``busy`` is the mean of.

    Example:
        >>> Utilisation(0.25, 0.75, 5).net, Utilisation(None, 0.75, 5).net, Utilisation(0.5, 0.25, 5).net
        (0.5, None, 0.0)
    """

    idle: float | None = None
    busy: float | None = None
    samples: int = 0

    ALSO = ("net",)

    @property
    def net(self) -> float | None:
        """What of it was the work: ``busy`` less ``idle``, at least 0; ``None`` if one of them is not known."""
        return None if self.idle is None or self.busy is None else max(0.0, self.busy - self.idle)

    def __str__(self) -> str:
        if self.net is None or self.busy is None or self.idle is None:
            return "not known"
        return f"{100 * self.net:.0f} % ({100 * self.busy:.0f} % less {100 * self.idle:.0f} % when idle)"


def utilisation_of(idle: Sequence[float], busy: Sequence[float]) -> Utilisation:
    """Return what two series of answers say; too few of either say nothing."""
    before, meanwhile = (statistics.fmean(one) if len(one) >= FEWEST_ANSWERS else None for one in (idle, busy))
    return Utilisation(before, meanwhile, len(busy))


def time_to_watch(watch: float, left: float, devices: int) -> float:
    """Return for how many seconds a device is watched, of those that are left for so many devices, at work and before.

    Where there is no time for enough answers, it is not watched.

    Example:
        >>> time_to_watch(3, 60, 2), time_to_watch(30, 12, 2), time_to_watch(3, 5, 2), time_to_watch(0, 60, 2)
        (3, 3.0, 0.0, 0)
    """
    room = left / (2 * devices)
    return watch if watch <= room else room if room >= FEWEST_ANSWERS * ASKED_EVERY else 0.0


def load_on(device: str, workload: Workload, seconds: float) -> Utilisation:
    """Return how busy a device is while it works without a pause, and how busy it was just before."""
    if not seconds:
        return Utilisation()
    read = busy_reader(device, SESSION.computer.machine, environ=SESSION.environ, uuid=device_of(device).uuid())
    with workload.begun() as batches:
        return utilisation_during(read, seconds, lambda: workload.run(next(batches)))


def utilisation_during(
    read: Busy | None, seconds: float, work: Callable[[], Any], interval: float = ASKED_EVERY
) -> Utilisation:
    """Return how busy a device is while work is done again and again, and how busy it was just before, while nothing is done.

    Each takes some seconds, up to twice as many if there are too few answers by then; what cannot be read is not run.
    """
    if read is None:
        return Utilisation()
    idle = answers_during(lambda: time.sleep(interval / 10), read, seconds, interval)
    return utilisation_of(idle, answers_during(work, read, seconds, interval))


def answers_during(work: Callable[[], Any], read: Busy, seconds: float, interval: float) -> list[float]:
    """Return the answers of a reader while work is done again and again."""
    read()  # The processor's share is counted from one question to the next.
    with sampling(read, interval) as answers:
        begin = now()
        while goes_on(now() - begin, seconds, len(answers)):
            work()
    return answers


def goes_on(elapsed: float, seconds: float, answers: int) -> bool:
    """Tell whether a device is still watched after some seconds, with so many answers."""
    return elapsed < seconds * (EXTENDED if answers < FEWEST_ANSWERS else 1)


@contextlib.contextmanager
def sampling(read: Busy, interval: float = ASKED_EVERY) -> Iterator[list[float]]:
    """Ask a reader every ``interval`` seconds in another thread during a block; the thread always ends with the block.

    What cannot be read is left out, and so is what was answered after the block. No reader may work with tensors: two
    threads on MPS can crash the process (pytorch#197805).
    """
    answers, ended = list[float](), threading.Event()

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
