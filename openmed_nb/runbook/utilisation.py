"""How busy a device is, all processes together: read once a second in another thread, while work runs and just before."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..devices.machine import Machine, import_psutil, mps_is_simulated, run_command
from ..devices.request import kind_of
from ..display import Plain
from .measure.timing import now
from .signals import IOREG, Run, parse_ioreg, read_nvidia

# Returns how busy a device is just now, as a share from 0 to 1, or since it was last asked; ``None`` if it cannot be read.
Read = Callable[[], "float | None"]

INTERVAL = 1.0  # Seconds between two questions: each starts a command, whose cost is not work of the device.
FEWEST = 5  # How many answers a mean needs; each is of one moment, which says nothing of the next.
SECONDS = 6.0  # How long a device is watched by default: time for that many answers.
LONGEST = 2  # If answers are slow, a device is watched at most so many times as long.

NOT_BUSY = ("idle", "iowait")
# Linux counts these in ``user`` and ``nice`` too (proc(5)); so does not psutil's percentage.
GUESTS = ("guest", "guest_nice")


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
    before, meanwhile = (statistics.fmean(answers) if len(answers) >= FEWEST else None for answers in (idle, busy))
    return Utilisation(before, meanwhile, len(busy))


def reader_of(
    device: str,
    machine: Machine,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> Read | None:
    """Return what reads how busy a device is; ``None`` under a simulation, and if this cannot be read.

    ``environ`` says what CUDA calls its devices, and ``uuid`` how torch names the CUDA GPU.
    """
    if machine.simulated or mps_is_simulated():
        return None
    kind = kind_of(device)
    if kind == "cpu":
        return CpuReader() if cpu_times() else None

    def read() -> float | None:
        if kind not in {"mps", "cuda"}:
            return None
        gpu = parse_ioreg(run(IOREG)) if kind == "mps" else read_nvidia(device, run, environ, uuid)
        return None if gpu.utilisation is None else gpu.utilisation / 100

    return None if read() is None else read


class CpuReader:
    """Reads how busy the processor was since it was last asked, of all cores together."""

    def __init__(self) -> None:
        self._before = cpu_times()

    def __call__(self) -> float | None:
        before, self._before = self._before, cpu_times()
        return busy_share(before, self._before)


def cpu_times() -> dict[str, float]:
    """Return the seconds that the processor has spent in each state, of all cores together; empty if they cannot be read."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_share(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return which share of the time between two readings of the processor was work, ``None`` if none has passed."""
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    return 1 - sum(spent.get(name, 0.0) for name in NOT_BUSY) / total if total and before else None


@contextmanager
def sampling(read: Read, interval: float = INTERVAL) -> Iterator[list[float]]:
    """Ask a reader every ``interval`` seconds in another thread during a block; the thread always ends with the block.

    What cannot be read is left out, and so is what was answered after the block. No reader may work with tensors: two
    threads on MPS can crash the process (pytorch#197805).
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


def measured(read: Read | None, seconds: float, work: Callable[[], Any], interval: float = INTERVAL) -> Utilisation:
    """Return how busy a device is while work is done again and again, and how busy it was just before, while nothing is done.

    Each takes some seconds, up to twice as many if there are too few answers by then; what cannot be read is not run.
    """
    if read is None or seconds <= 0:
        return Utilisation()
    idle = answers_during(lambda: time.sleep(interval / 10), read, seconds, interval)
    return utilisation_of(idle, answers_during(work, read, seconds, interval))


def answers_during(work: Callable[[], Any], read: Read, seconds: float, interval: float) -> list[float]:
    """Return the answers of a reader while work is done again and again."""
    read()  # The processor's share is counted from one question to the next.
    with sampling(read, interval) as answers:
        begin = now()
        while goes_on(now() - begin, seconds, len(answers)):
            work()
    return answers


def goes_on(elapsed: float, seconds: float, answers: int) -> bool:
    """Tell whether a device is still watched after some seconds, with so many answers."""
    return elapsed < seconds * (LONGEST if answers < FEWEST else 1)
