"""The same work on several devices, compared: the values, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...devices.request import canonical
from ...devices.simulation import MARK, NOTE
from ...errors import ConfigurationError
from ...interface.display import Report, Shown, Table
from ...quantities import counted
from ..findings import NOT_APPLICABLE, OK, WARNING, Finding, findings_table
from ..signals.utilisation import Utilisation
from ..workloads.split import Split
from ..workloads.workload import TRANSFER
from .intervals import Interval

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
