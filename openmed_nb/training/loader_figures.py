"""What follows from the times of a loader, of a model and of worker processes: values that conclude from their figures."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

from ..interface.display import Report, Shown, Table
from ..quantities import in_bytes

CLOSE = 1.1
"""Times that differ by less count as the same: five readings of one loader in a row took 0.63 to 0.68 ms
per batch, 8 % apart, and far more once the computer was busy with something else."""

WORTH_WAITING = 0.1
"""A loop that waits for less than this share of its time has nothing to gain from its loader: without any waiting it would
be 1 / (1 - 0.1) = 1.11 times as fast, which is hardly more than ``CLOSE``."""


@dataclass(frozen=True, repr=False)
class LoaderCheck(Shown):
    """How long a loader takes for a batch, and a model for a step.

    Attributes:
        device: The device that was measured.
        data_seconds: The mean time for a batch of the loader alone.
        step_seconds: The median time for a step alone, the copy to the device included.
        workers: How many processes read ahead; with none, loading and computing take turns.
        batches: How many of each were measured.
        simulated: Whether the device was a simulated one, whose times say nothing of a real one.
    """

    device: str
    data_seconds: float
    step_seconds: float
    workers: int
    batches: int
    simulated: bool = False

    @property
    def bottleneck(self) -> str:
        """What takes longer: ``"loader"``, ``"model"``, or ``"neither"`` where both are close.

        Example:
            >>> LoaderCheck("cpu", 0.030, 0.010, 0, 20).bottleneck
            'loader'
        """
        if self.data_seconds > CLOSE * self.step_seconds:
            return "loader"
        return "model" if self.step_seconds > CLOSE * self.data_seconds else "neither"

    @property
    def waiting(self) -> float:
        """The share of its time, 0 to 1, that a loop waits for batches; workers read while the model computes.

        Example:
            >>> LoaderCheck("cpu", 0.030, 0.010, 0, 20).waiting, LoaderCheck("cpu", 0.005, 0.010, 2, 20).waiting
            (0.75, 0.0)
        """
        waited = max(0.0, self.data_seconds - self.step_seconds) if self.workers else self.data_seconds
        whole = max(self.data_seconds, self.step_seconds) if self.workers else self.data_seconds + self.step_seconds
        return waited / whole if whole else 0.0

    @property
    def advice(self) -> str:
        """One thing to do."""
        if self.waiting <= WORTH_WAITING:
            return "Nothing to gain from the loader."
        if self.workers:
            return "Do the work on the texts once, before training, or try more workers with worker_ladder."
        if self.bottleneck == "loader":
            return "Do the work on the texts once, before training, or let workers read ahead: see worker_ladder."
        return "Loading and computing take turns: let workers read ahead while the model computes, see worker_ladder."

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and what follows from them."""
        return {**vars(self), "bottleneck": self.bottleneck, "waiting": self.waiting}

    def report(self) -> Report:
        """Return what takes longer, both times, the share of waiting, and one thing to do."""
        titles = {
            "loader": "the loader takes longer than the model",
            "model": "the model takes longer than the loader",
            "neither": "loader and model take the same time",
        }
        rows = (("loader", milliseconds(self.data_seconds)), ("step", milliseconds(self.step_seconds)))
        share = f"Training waits {self.waiting:.0%} of its time for batches ({self.workers} workers)."
        title = f"{'SIMULATED ' if self.simulated else ''}{self.device}: {titles[self.bottleneck]}"
        table = Table(f"Over {self.batches} batches", ("alone", "per batch"), rows)
        return Report(title, (share, self.advice), (table,))


@dataclass(frozen=True)
class Rung:
    """A number of worker processes, and what it costs.

    Attributes:
        workers: How many.
        seconds: Time per batch, once all of them run.
        start_seconds: Time until the first batch.
        worker_bytes: Resident memory of each worker; forked ones share a part of it with this process.
    """

    workers: int
    seconds: float
    start_seconds: float
    worker_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class WorkerLadder(Shown):
    """How fast a dataset is read with several numbers of worker processes, and what memory they take.

    Attributes:
        rungs: What was measured, in the order of the numbers of workers.
        batch_size: How many items a batch has.
    """

    rungs: tuple[Rung, ...]
    batch_size: int

    @property
    def workers(self) -> int:
        """The smallest number of workers that no larger one beats by more than a tenth.

        Example:
            >>> WorkerLadder((Rung(0, 0.040, 0.04), Rung(1, 0.020, 0.3), Rung(2, 0.019, 0.4)), 8).workers
            1
        """
        best = self.rungs[0]
        for rung in self.rungs[1:]:
            best = rung if best.seconds > CLOSE * rung.seconds else best
        return best.workers

    def to_dict(self) -> dict[str, Any]:
        """Return the choice and all figures."""
        return {
            "workers": self.workers,
            "batch_size": self.batch_size,
            "rungs": [dict(vars(one)) for one in self.rungs],
        }

    def report(self) -> Report:
        """Return the choice and a table of the figures."""
        rows = tuple(
            (
                str(rung.workers),
                milliseconds(rung.seconds),
                milliseconds(rung.start_seconds),
                in_bytes(round(mean(rung.worker_bytes))) if rung.worker_bytes else "",
            )
            for rung in self.rungs
        )
        columns = ("workers", "per batch", "first batch", "memory of each")
        unread = any(rung.workers and not rung.worker_bytes for rung in self.rungs)
        sentences = ("The memory of some workers could not be read.",) if unread else ()
        return Report(f"{self.workers} workers", sentences, (Table(f"Batches of {self.batch_size}", columns, rows),))


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds.

    Example:
        >>> milliseconds(0.00125), milliseconds(2.5)
        ('1.25 ms', '2,500 ms')
    """
    value = seconds * 1000
    return f"{value:,.2f} ms" if value < 100 else f"{value:,.0f} ms"  # noqa: PLR2004
