"""The thresholds that a verdict asks for, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ...errors import number
from ...models.certificates import RECALL_LOSS, SPAN_AGREEMENT
from ...training.curve import GATE_EPOCHS, GROWTH_GATE
from ..measure.workloads import DATA_SHARE
from ..precision.parity import TOLERANCES
from ..sweep_search import HEADROOM_SHARE, KNEE_GAIN

SCHEMA = "openmed_nb/gates/1"

# What figures count.
SHARE, DIFFERENCE, HOURS, TIMES, RATE = "share", "difference", "hours", "times", "rate"
COUNT, WORDS, NAMES, PHASES, YES_NO = "count", "words", "names", "phases", "yes or no"

# How people read them.
SPELLED: dict[str, Callable[[Any], str]] = {
    SHARE: lambda value: f"{digits(100 * value)} %",
    DIFFERENCE: lambda value: f"{value:.3g}",
    HOURS: lambda value: f"{digits(value)} hours",
    TIMES: lambda value: f"{digits(value)} times",
    RATE: lambda value: f"{digits(value)} a second",
    COUNT: lambda value: f"{value:,}" if value else "none",
    WORDS: str,
    NAMES: lambda value: ", ".join(value) or "none",
    PHASES: lambda value: ", ".join(f"{name} {in_unit(SHARE, share)}" for name, share in value.items()),
    YES_NO: lambda value: "yes" if value else "no",
}


def in_unit(unit: str, value: object) -> str:
    """Return a value as people read it, with three digits that count: ``22 %``, ``3.46 times``, ``1,200``, ``none``."""
    return SPELLED[unit](value)


def digits(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{float(f'{value:.3g}'):,g}"


# Who says so.
OWN, RUNBOOK, PARITY = "a choice of this toolkit", "the runbook", "as nb.runbook.parity judges it"
SEEN = "several times the largest difference that was seen where nothing was wrong"


def threshold(  # noqa: PLR0913, PLR0917 - a row of a table
    value: float | None, says: str, reason: str, source: str = OWN, unit: str = SHARE, largest: float = 1.0
) -> Any:
    """Return a field of a threshold: what reaching it means, why it stands there, who says so, its unit and largest value."""
    about = {"says": says, "reason": reason, "source": source, "unit": unit, "largest": largest}
    return field(default=value, metadata=about)


@dataclass(frozen=True, repr=False)
class Thresholds:
    """The thresholds of a verdict; shares are fractions: 0.22 is 22 %.

    Raises:
        ConfigurationError: For a value that makes no sense.

    Example:
        >>> Thresholds(speed_up=0.3).changed
        (('speed_up', 0.22, 0.3),)
    """

    speed_up: float = threshold(
        0.22,
        "a device must be so much faster than the CPU",
        "less is not worth a second device to keep right; where it also waits, data and batch are looked at first",
        RUNBOOK,
        largest=10.0,
    )
    utilisation: float = threshold(
        0.18,
        "a device that is busy for less waits; its utilisation when idle is taken off",
        "a device that waits is not slow: data and batch are",
        RUNBOOK,
    )
    entity_agreement: float = threshold(
        SPAN_AGREEMENT,
        "so many of the entities must be the same as on the CPU",
        "fewer is more than near ties",
        PARITY,
    )
    recall_loss: float = threshold(
        RECALL_LOSS,
        "no more of the recall of gold entities may be lost",
        "a model that finds less of what is there is another model",
        PARITY,
    )
    logits: float = threshold(
        TOLERANCES["float32"].logits,
        "logits in float32 may differ by so much, by more where all entities are the same",
        SEEN,
        PARITY,
        DIFFERENCE,
        largest=1e6,
    )
    gradients: float = threshold(
        TOLERANCES["float32"].gradients,
        "gradients in float32 may differ by so much, relatively",
        SEEN,
        PARITY,
        DIFFERENCE,
        largest=1e6,
    )
    memory_growth: float = threshold(
        GROWTH_GATE,
        f"more growth over {GATE_EPOCHS} epochs means that something is retained",
        "caches are emptied at the boundaries of epochs, so what still grows is held",
        RUNBOOK,
        largest=10.0,
    )
    headroom: float = threshold(
        HEADROOM_SHARE,
        "so much of the memory limit must stay free at the batch in use",
        "one longer text, or one new shape, is then no out of memory",
    )
    data_share: float = threshold(
        DATA_SHARE,
        "no more of a step may be spent on waiting for data",
        "without the wait, a third more steps are done",
    )
    transfer_share: float = threshold(
        0.25,
        "no more of a step may be spent on copies to the device",
        "without them, a third more steps are done",
    )
    knee_gain: float = threshold(
        0.1,
        "no more throughput may be gained at the knee of the sweep than at the batch in use",
        f"the knee itself leaves {KNEE_GAIN:.0%}, and a gain near that is hardly worth another batch",
        largest=10.0,
    )
    fallback_time: float = threshold(
        0.05,
        "no more of the time may be spent in what fell back to the CPU",
        "where it takes less, computing it elsewhere gains little",
    )
    fallback_calls: float = threshold(
        0.01,
        "no more of the calls on MPS may fall back, where no times are known",
        "each waits for the GPU and copies there and back, and starting an operator alone takes 25 to 110 microseconds",
        "pytorch#82707, and a choice of this toolkit",
    )
    hours: float = threshold(
        24.0,
        "work that takes longer goes to several computers",
        "one computer can be spared for a day",
        unit=HOURS,
        largest=1e5,
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            number(one.name, getattr(self, one.name), one.metadata["largest"], such_as=f"{one.default:g}")

    @property
    def changed(self) -> tuple[tuple[str, float, float], ...]:
        """The thresholds that are not as they were given, with what they were and what they are."""
        now = {one.name: getattr(self, one.name) for one in fields(self)}
        return tuple((name, was, now[name]) for name, was in DEFAULTS.items() if was != now[name])

    @property
    def changes(self) -> tuple[str, ...]:
        """The same as sentences; empty if nothing was changed."""
        return tuple(
            f"Gate changed: {name} from {in_unit(UNITS[name], was)} to {in_unit(UNITS[name], now)}."
            for name, was, now in self.changed
        )

    def shown(self) -> dict[str, str]:
        """Return each threshold as people read it, by its name."""
        return {name: in_unit(unit, getattr(self, name)) for name, unit in UNITS.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return values, changes and reasons as plain mappings, numbers and strings, ready for JSON."""
        about = {one.name: {**one.metadata, "default": one.default} for one in fields(self)}
        changed = {name: {"from": was, "to": now} for name, was, now in self.changed}
        return {"schema": SCHEMA, "values": dict(vars(self)), "changed": changed, "about": about}


DEFAULTS: dict[str, float] = {one.name: getattr(Thresholds, one.name) for one in fields(Thresholds)}
UNITS: dict[str, str] = {one.name: one.metadata["unit"] for one in fields(Thresholds)}
